"""What came of a run: summary.json, and a table for people. A view of manifest and accounts; a run reads nothing back.

Rows, shards and their bytes are those of the manifest, so of all runs on the output. Time, rates, retries, restarts and
losses are this run's, and those of all runs as far as their drivers could say: each writes its account to drives/ while
it works, so one that was killed is known up to a few seconds before.
"""

import dataclasses
import json
import logging
import statistics
import time
from collections.abc import Mapping
from typing import Any

from ray_extract.errors import Exit, NotFound, StoreError
from ray_extract.layout import DRIVES_PREFIX, SUMMARY_KEY
from ray_extract.ledger import Totals
from ray_extract.plan import show_bytes
from ray_extract.progress import TIME_FORMAT, show_count, show_seconds
from ray_extract.store import Store
from ray_extract.tally import Account

logger = logging.getLogger(__name__)

VERSION = 1
_NODES_SHOWN = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A run at its end.

    Args:
        code: the exit code.
        reason: why it is not complete; None if it is.
        totals: of all rows; None until every unit is committed.
        units, units_done: planned, retry rounds included, and committed.
        manifest: its key; None until every unit is committed.
        wall_s: seconds of this run, with preparation and manifest.
        this: its drives.
        whole: all drives on this output.
        unfinished: drives among them that did not say how they ended: killed, or at work now.
    """

    code: Exit
    reason: str | None
    totals: Totals | None
    units: int
    units_done: int
    manifest: str | None
    wall_s: float
    this: Account
    whole: Account
    unfinished: int = 0

    def to_json(self) -> dict[str, Any]:
        """What summary.json holds."""
        return {
            "version": VERSION,
            "state": "complete" if self.reason is None else "incomplete",
            "time": time.strftime(TIME_FORMAT, time.gmtime()),
            "exit_code": int(self.code),
            "reason": self.reason,
            "rows": None if self.totals is None else self.totals.to_json(),
            "units": self.units,
            "units_done": self.units_done,
            "manifest": self.manifest,
            "this_run": {"total_s": round(self.wall_s, 3), **self.this.to_json()},
            "all_runs": {"unfinished": self.unfinished, **self.whole.to_json()},
        }

    def lines(self, url: str) -> list[str]:
        """For people; `url` is the output's."""
        lines = [*self._rows(), f"time        {show_seconds(self.wall_s)}"]
        if self.this.drives:
            lines += ["this run", *_account_lines(self.this)]
        else:
            lines.append("speed       nothing was left to extract")
        if self.whole.drives > self.this.drives:
            they = "it" if self.unfinished == 1 else "they"
            lost = f"; {self.unfinished} did not say how {they} ended" if self.unfinished else ""
            runs = f"all {self.whole.drives} runs" if self.whole.drives > 1 else "the run before"
            lines += [f"{runs}{lost}", *_account_lines(self.whole)]
        lines.append(f"output      {url}")
        if self.totals is not None:
            lines.append(f"next        ray-extract verify {url}")
            if self.totals.failed:
                lines.append("retry       ray-extract retry-failed, with the arguments of this command")
        return lines

    def _rows(self) -> list[str]:
        totals = self.totals
        if totals is None:
            return [f"units       {self.units_done:,} of {self.units:,} committed; rows are counted when all are"]
        kept = f"   ({totals.kept:,} stored)" if totals.kept != totals.tokens else ""
        return [
            f"rows        {totals.rows:,}",
            f"  ok        {totals.ok:,}",
            f"  skipped   {_with_reasons(totals.skipped)}",
            f"  failed    {_with_reasons(totals.failed)}",
            f"tokens      {totals.tokens:,}{kept}",
            f"shards      {self.units_done:,}, {show_bytes(totals.nbytes)}",
        ]


def _with_reasons(reasons: Mapping[str, int]) -> str:
    shown = ", ".join(f"{count:,} x {reason}" for reason, count in sorted(reasons.items()))
    return f"{sum(reasons.values()):,}" + (f"   ({shown})" if shown else "")


def _account_lines(account: Account) -> list[str]:
    rate, serving = account.tokens_per_s, account.serving_s
    lost = [f"{show_seconds(seconds)} {loss}" for loss, seconds in sorted(account.lost_s.items(), key=lambda i: -i[1])]
    return [
        f"  speed     {rate:,.0f} tokens/s, {account.tokens:,} tokens in {serving:.0f} s, {show_bytes(account.nbytes)}",
        *_node_lines(account),
        f"  retries   {_with_reasons(account.retries)}",
        f"  restarts  {_with_reasons(account.restarts)}",
        f"  lost      {', '.join(lost) or 'nothing'}",
    ]


def _node_lines(account: Account) -> list[str]:
    rates = {name: node.tokens_per_s for name, node in account.nodes.items() if node.engine_s}
    if len(rates) <= _NODES_SHOWN:
        return [
            f"  node      {name}: {rate:,.0f} tokens/s an engine, {show_count(account.nodes[name].engines, 'engine')}"
            for name, rate in sorted(rates.items())
        ]
    slow, fast = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    return [
        f"  nodes     {len(rates):,}: {statistics.median(rates.values()):,.0f} tokens/s an engine (median), "
        f"{rates[slow]:,.0f} the slowest ({slow}), {rates[fast]:,.0f} the fastest ({fast})"
    ]


def read_drives(store: Store) -> tuple[Account, int]:
    """All drives' accounts, added up, and how many of them did not say how they ended.

    Raises:
        StoreError: the store failed.
    """
    whole, unfinished = Account(), 0
    for item in store.list(DRIVES_PREFIX):
        try:
            record = json.loads(store.get(item.key))
            whole += Account.from_json(record)
            unfinished += record["state"] in ("running", "draining")
        except (ValueError, KeyError, TypeError, AttributeError):
            logger.warning("%s/%s is damaged, and not part of the summary", store.url, item.key)
    return whole, unfinished


def write_summary(store: Store, summary: Summary) -> None:
    """Store it in place of the one before; unless that says the same, and nothing was extracted since."""
    try:
        if not summary.this.drives and _says(store, summary):
            return
        store.put(SUMMARY_KEY, json.dumps(summary.to_json(), indent=2).encode(), create=False)
    except StoreError as error:
        # Only a view: what is committed is committed.
        logger.warning("%s could not be written: %s", SUMMARY_KEY, error)


def _says(store: Store, summary: Summary) -> bool:
    try:
        found = json.loads(store.get(SUMMARY_KEY))
        said = found["state"], found["manifest"], found["exit_code"]
        return bool(said == ("complete", summary.manifest, summary.code) and summary.reason is None)
    except (NotFound, ValueError, KeyError, TypeError):
        return False
