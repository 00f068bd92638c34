"""How far a run is, from its output alone: plan and commits say it, progress.json what only the run's driver knows."""

import dataclasses
import json
import time
from calendar import timegm
from collections.abc import Mapping
from typing import Any

from ray_extract import layout
from ray_extract.errors import NotFound
from ray_extract.ledger import Ledger, failed_rows, latest_manifest, read_success
from ray_extract.plan import load_plan, read_rounds
from ray_extract.progress import TIME_FORMAT, show_count, show_seconds
from ray_extract.store import Store

SILENT_S = 300.0
"""A driver that runs writes progress.json more often than this."""

WORKS = ("running", "draining")
"""States of a driver that is at work."""

_MEANS = {
    "planning": "it has begun, and has no plan yet",
    "silent": "its driver ended without a word, or cannot write here; run it again to go on",
    "unknown": f"no readable {layout.PROGRESS_KEY} says whether a driver works on it; run it again to go on",
    "done": "everything is extracted, and its driver makes the manifest; if it has ended, run it again",
    "drained": "stopped on request; run it again to go on",
    "failed": "its log and summary.json say why; mend that if need be, and run it again",
    "damaged": "it was complete, and commits or manifests are gone; run it again",
}


@dataclasses.dataclass(frozen=True, slots=True)
class RunStatus:
    """How far a run is.

    Args:
        state: `complete`; `damaged`: it was, and commits or manifests are gone; `planning`; `silent`: its driver said
            nothing for SILENT_S; `unknown`: nothing tells; or what the driver said, see progress.Snapshot.to_json.
        units, units_done: planned, and those of them with a commit.
        tokens, tokens_committed: prompt tokens of the same.
        rows_failed: in the manifest, or else as far as the driver said; None if nothing tells.
        manifest: key of the latest one, or None.
        newer: commits that came after it, as far as _SUCCESS tells.
        progress: what progress.json holds; empty without a readable one.
        age_s: since that was written, by this machine's clock; None without one.
        retries, retries_done: units of retry rounds, and those of them with a commit.
    """

    state: str
    units: int
    units_done: int
    tokens: int
    tokens_committed: int
    rows_failed: int | None
    manifest: str | None
    progress: Mapping[str, Any]
    age_s: float | None
    newer: int = 0
    retries: int = 0
    retries_done: int = 0

    def to_json(self) -> dict[str, Any]:
        """progress.json, with what plan and commits say in place of what it says of them."""
        known = dataclasses.asdict(self)
        del known["progress"]
        return {**self.progress, **known}

    def lines(self) -> list[str]:
        """For people."""
        means = f": {_MEANS[self.state]}" if self.state in _MEANS else ""
        heard = f" (its driver was heard of {show_seconds(self.age_s)} ago)" if self.age_s is not None else ""
        lines = [
            f"state       {self.state}{means}{heard}",
            f"units       {self.units_done:,} of {self.units:,} committed",
            f"tokens      {self.tokens_committed:,} of {self.tokens:,}",
        ]
        if self.state in WORKS:  # what it was when the driver ended says nothing of now, nor of the whole run
            speed, engines = self.progress["tokens_per_s"], self.progress["engines_ready"]
            lines.append(f"speed       {speed:,.0f} tokens/s, {show_count(engines, 'engine')} ready")
        if self.retries:
            lines.append(f"retries     {self.retries_done:,} of {self.retries:,} units of retry rounds committed")
        newer = f" ({show_count(self.newer, 'commit')} came after it, for the next one)" if self.newer else ""
        return [
            *lines,
            f"failed rows {'unknown' if self.rows_failed is None else f'{self.rows_failed:,}'}",
            f"manifest    {self.manifest or 'none yet'}{newer}",
        ]


def run_status(store: Store) -> RunStatus:
    """How far the run is whose output this is.

    Raises:
        NotFound: no run has begun there.
        IdentityMismatch, PlanError, ShardError: it is of another release, or damaged.
        StoreError: the store failed.
    """
    ledger = Ledger(store)
    if ledger.identity() is None:
        raise NotFound(f"{store.url}: no {layout.RUN_KEY} there; not the output of a run, or none has begun")
    try:
        units = load_plan(store)[1]
    except NotFound:
        return RunStatus("planning", 0, 0, 0, 0, None, None, {}, None)
    committed = ledger.committed_units()
    done = [unit for unit in units if unit.unit in committed]
    rounds = read_rounds(store)
    retries_done = sum(unit.unit in committed for unit in rounds)
    progress, success = _progress(store), read_success(store)
    age = _age(progress)
    if age is None:
        progress = {}
    manifest, failed, newer = latest_manifest(store), progress.get("rows_failed"), 0
    if manifest is not None and success.get("manifest") == manifest:
        failed = sum(success["failed"].values())
        newer = max(0, len(done) + retries_done - success.get("shards", len(done) + retries_done))
    elif manifest is not None:
        # Its driver ended before it wrote _SUCCESS anew, or has not come to that.
        failed = failed_rows(store, manifest)
    return RunStatus(
        state=state_of(bool(success), len(done) == len(units) and manifest is not None, progress.get("state"), age),
        units=len(units),
        units_done=len(done),
        tokens=sum(unit.tokens for unit in units),
        tokens_committed=sum(unit.tokens for unit in done),
        rows_failed=failed,
        manifest=manifest,
        progress=progress,
        age_s=age,
        newer=newer,
        retries=len(rounds),
        retries_done=retries_done,
    )


def state_of(success: bool, whole: bool, said: str | None, age_s: float | None) -> str:
    """The state of a planned run; pure.

    Args:
        success: whether it was complete once.
        whole: whether every unit has a commit, and there is a manifest.
        said: what the driver said last, if anything.
        age_s: since then.
    """
    if success and whole:
        return "complete"
    works = said in WORKS
    if works and age_s is not None and age_s <= SILENT_S:
        return str(said)
    if success:
        return "damaged"
    return "silent" if works else said or "unknown"


def _progress(store: Store) -> dict[str, Any]:
    """What progress.json says; empty if it is absent or damaged."""
    try:
        found = json.loads(store.get(layout.PROGRESS_KEY))
    except (NotFound, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _age(progress: Mapping[str, Any]) -> float | None:
    """Seconds since progress was written; None if it lacks what is shown of it, so that it is none."""
    kinds = {"state": str, "tokens_per_s": int | float, "engines_ready": int, "rows_failed": int}
    if not all(isinstance(progress.get(name), kind) for name, kind in kinds.items()):
        return None
    try:
        return max(0.0, time.time() - timegm(time.strptime(progress["time"], TIME_FORMAT)))
    except (KeyError, TypeError, ValueError):
        return None
