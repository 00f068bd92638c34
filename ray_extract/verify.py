"""Read a run's output again and compare everything in it with everything else. Modifies nothing.

run.json    whose it is, and which states it has
plan/       the prepared rows: token ids, masks, which rows are usable, which unit each is in; retry rounds
commits/    one for each unit; its shard's size, digests, failed rows, hash of all bytes that are not states
shards/     each committed one: the same rows, ids, masks and spans as prepared; every digest and statistic recomputed
manifest    what rows, plan and commits say, once more
head.safetensors, token-counts.safetensors, if they are there
"""

import concurrent.futures
import dataclasses
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from ray_extract import layout
from ray_extract.config import ModelConfig
from ray_extract.counts import TokenCounts, count_problems
from ray_extract.dataset.prepare import PreparedRow, reason_kind
from ray_extract.dataset.prepared import PreparedRows, RowIndex
from ray_extract.errors import ConfigError, NotFound, PlanError, ShardError
from ray_extract.head import head_problems
from ray_extract.ledger import (
    MANIFEST_SCHEMA,
    Ledger,
    RunIdentity,
    Totals,
    count,
    latest_manifest,
    manifest_columns,
    manifest_parts,
    read_manifest,
    run_again,
    stored_columns,
    success_problems,
    take_retries,
)
from ray_extract.model import ModelShape, describe_model
from ray_extract.plan import load_plan, read_rounds, show_bytes
from ray_extract.progress import show_count
from ray_extract.records import Receipt, RowStatus, Unit
from ray_extract.shards.base import Shard
from ray_extract.shards.image import FP8, TORCH_TO_CODE, Column, RowTable, row_table
from ray_extract.shards.reader import open_shard
from ray_extract.store import Store, open_store

if TYPE_CHECKING:
    from ray_extract.recompute import StateError

log = logging.getLogger(__name__)

MAX_PROBLEMS = 50
"""Problems that a report spells out; the rest are counted."""

_SHARDS_AT_ONCE = 4  # hides the latency of an object store; each takes up to about 64 MiB
_NO_OPTIONS: Mapping[str, Any] = {}


@dataclasses.dataclass(slots=True)
class VerifyReport:
    """What verify found.

    Args:
        url: the output.
        rows: rows of the data set.
        rows_ok, rows_failed: of the shards that could be read; a row counts once, in however many it is.
        rows_skipped: of the prepared rows.
        units, committed: shards planned, those of retry rounds included, and with a commit.
        tokens, kept: prompt and stored tokens of the rows that are ok.
        nbytes: bytes of the shards that could be read.
        skipped, failed: rows by kind of reason.
        errors: of the recomputed rows, see recompute.state_errors.
        recomputed: how many rows those were.
        boundaries: those recomputed without the rest of the model; none for all states.
        model_note: why the checkpoint could not be compared with the run's, if it could not.
        problems: the first MAX_PROBLEMS.
        problem_count: all of them.
        damaged: units whose shard or commit is wrong.
        stale: whether the manifest, or what goes with it, is not what plan and commits say.
    """

    url: str
    rows: int = 0
    rows_ok: int = 0
    rows_failed: int = 0
    rows_skipped: int = 0
    units: int = 0
    committed: int = 0
    tokens: int = 0
    kept: int = 0
    nbytes: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: "list[StateError]" = dataclasses.field(default_factory=list)
    recomputed: int = 0
    boundaries: tuple[int, ...] = ()
    model_note: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)
    problem_count: int = 0
    damaged: list[str] = dataclasses.field(default_factory=list)
    stale: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. Failed rows that say so are not wrong."""
        return self.problem_count == 0

    def add(self, problem: str) -> None:
        """Note a problem."""
        self.problem_count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def lines(self) -> list[str]:
        """For people, one line a fact."""
        kinds = [f"          {n:,} skipped: {kind}" for kind, n in sorted(self.skipped.items())]
        kinds += [f"          {n:,} failed: {kind}" for kind, n in sorted(self.failed.items())]
        more = self.problem_count - len(self.problems)
        part = f", no further than boundary {max(self.boundaries)}" if self.boundaries else ""
        left = self.rows - self.rows_ok - self.rows_skipped - self.rows_failed
        return [
            f"output    {self.url}",
            f"rows      {self.rows:,} = {self.rows_ok:,} ok + {self.rows_skipped:,} skipped "
            f"+ {self.rows_failed:,} failed{f' + {left:,} without a readable shard' if left else ''}",
            *kinds,
            f"tokens    {self.tokens:,}, the states of {self.kept:,} are stored",
            f"shards    {self.committed:,} of {self.units:,}, {show_bytes(self.nbytes)}",
            *([f"recompute {show_count(self.recomputed, 'row')} with Transformers{part}"] if self.errors else []),
            *([f"          {self.model_note}"] if self.errors and self.model_note else []),
            *(f"          {error}{'' if error.ok else '  <-- too far'}" for error in self.errors),
            *(f"PROBLEM   {problem}" for problem in self.problems),
            *([f"          and {show_count(more, 'problem')} more"] if more else []),
            *self._remedies(),
            "verified: everything agrees" if self.ok else f"NOT verified: {show_count(self.problem_count, 'problem')}",
        ]

    def _remedies(self) -> list[str]:
        """What to do, as far as it mends what is wrong."""
        if len(self.damaged) == self.committed > 1:
            return [
                f"to mend   all shards are wrong; if {layout.RUN_KEY} and the URL are the run's, delete all files in "
                f"{layout.COMMITS_PREFIX} and run the job again, which extracts all rows anew"
            ]
        lines = [f"to mend   delete {layout.commit_key(unit)}" for unit in self.damaged[:MAX_PROBLEMS]]
        if len(lines) < len(self.damaged):
            more = show_count(len(self.damaged) - len(lines), "unit")
            lines.append(f"          and those of {more} more, once these are mended")
        if lines:
            return [*lines, f"          and {run_again(self.damaged)}, which extracts their rows anew"]
        return ["to mend   run the job again, which writes the next manifest"] if self.stale else []


@dataclasses.dataclass(frozen=True, slots=True)
class _Expected:
    """What the identity says of every shard."""

    keep: str
    format: str
    columns: tuple[Column, ...]


@dataclasses.dataclass(slots=True)
class _Checked:
    """What one unit adds to the report."""

    ok: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # row -> prompt tokens, stored ones
    failed: dict[int, str] = dataclasses.field(default_factory=dict)  # row -> kind of reason
    nbytes: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    damaged: bool = False


def verify(
    url: str,
    storage_options: Mapping[str, Any] = _NO_OPTIONS,
    *,
    recompute: int = 0,
    seed: int = 0,
    model_path: str | None = None,
    boundaries: Collection[int] = (),
) -> VerifyReport:
    """Verify the output of a run.

    Args:
        url, storage_options: the output, as in the job.
        recompute: recompute this many random rows with Transformers; needs torch and transformers.
        seed: which rows those are.
        model_path: the checkpoint for it.
        boundaries: recompute these states only, and load no more of the checkpoint than is below them.

    Raises:
        ConfigError: no run at this URL; recompute without a model, or a model that cannot be loaded or is not the
            run's; boundaries without recompute, or one that is not stored.
        IdentityMismatch: the run is of another release.
        PlanError: the plan itself is damaged, so that nothing can be compared with it.
        StoreError: the store failed; a missing object is a problem in the report instead.
    """
    if recompute and model_path is None:
        raise ConfigError("--recompute needs the checkpoint that the run used; name its folder with --model")
    if boundaries and not recompute:
        raise ConfigError("--boundary says what --recompute does; say with --recompute N how many rows")
    store = open_store(url, storage_options)
    identity, expected, index, units, rounds = _read_run(store)
    skipped = sum(index.skipped.values())
    report = VerifyReport(url=store.url, rows=index.rows, skipped=index.skipped, rows_skipped=skipped)
    if recompute and model_path is not None:
        # Before the shards are read, which may take hours.
        report.boundaries = _stored(boundaries, identity.capture["boundaries"])
        report.model_note = _check_model(model_path, identity, report.boundaries)
    ledger = Ledger(store)
    done = _committed(ledger, units, rounds, report)
    rows = _Locked(PreparedRows(store, index))
    failed: dict[int, str] = {}
    with concurrent.futures.ThreadPoolExecutor(_SHARDS_AT_ONCE) as pool:
        checks = pool.map(lambda unit: _check_unit(ledger, unit, rows, expected), done)
        for unit, found in zip(done, checks, strict=True):
            log.info("unit %s: %s", unit.unit, "; ".join(found.problems) or "right")
            _add(report, failed, found, again=unit.members is not None)
            if found.damaged:
                report.damaged.append(unit.unit)
    report.failed = dict(Counter(failed.values()))
    report.rows_failed = len(failed)
    for problem in head_problems(store, identity.model["fingerprint"], identity.capture["hidden"]):
        report.add(problem)
    if {unit.unit for unit in units} <= {unit.unit for unit in done}:
        if report.rows != report.rows_ok + report.rows_skipped + report.rows_failed:
            report.add(
                f"{report.rows} rows, but {report.rows_ok} ok + {report.rows_skipped} skipped + "
                f"{report.rows_failed} failed could be read"
            )
        before = report.problem_count
        _check_manifest(ledger, PreparedRows(store, index), units, rounds, expected, report)
        report.stale = report.problem_count > before
    if recompute and model_path is not None:
        _recompute(store.url, storage_options, identity, recompute, seed, model_path, report)
    return report


class _Locked:
    """PreparedRows for several threads, see there."""

    def __init__(self, rows: PreparedRows) -> None:
        self._rows = rows
        self._lock = threading.Lock()

    def of(self, unit: Unit) -> list[PreparedRow]:
        with self._lock:
            return self._rows.of(unit)


def _read_run(store: Store) -> tuple[RunIdentity, _Expected, RowIndex, list[Unit], list[Unit]]:
    identity = Ledger(store).identity()
    if identity is None:
        raise ConfigError(f"{store.url}: no {layout.RUN_KEY}, so this is no output of ray_extract; check the URL")
    columns = stored_columns(identity)
    try:
        index, units = load_plan(store)
    except NotFound:
        raise ConfigError(f"{store.url}: the run has no plan yet; nothing to verify") from None
    expected = _Expected(identity.capture["keep"], identity.format["shards"], columns)
    return identity, expected, index, units, read_rounds(store)


def _stored(asked: Collection[int], stored: Sequence[int]) -> tuple[int, ...]:
    """The boundaries asked for, ascending and once each."""
    for boundary in asked:
        if boundary not in stored:
            have = ", ".join(map(str, stored)) or "none, only the final state"
            raise ConfigError(f"--boundary {boundary}: the run did not store it; it stored {have}")
    return tuple(sorted(set(asked)))


def _check_model(path: str, identity: RunIdentity, boundaries: Sequence[int]) -> str:
    """Compare a checkpoint with the run's; says why if that is impossible and not needed.

    The fingerprint needs all weight files. As far as a boundary some of them are enough, and states that agree are
    proof of the weights.

    Raises:
        ConfigError: another checkpoint, none at all, or a run of random weights.
    """
    run = identity.model
    if run.get("weights") == "random":
        raise ConfigError(
            "--recompute: the run's weights were random (model.load_format = dummy), so no checkpoint has them"
        )
    if boundaries and not Path(path).expanduser().is_dir():
        raise ConfigError(f"--model {path}: no such folder; --boundary needs the checkpoint in a local one")
    found = _describe(path, run["dtype"], "dummy" if boundaries else "auto")
    pairs = [("architecture", found.architecture, run["architecture"])]
    pairs += [("hidden size", str(found.hidden), str(identity.capture["hidden"]))]
    note = ""
    try:
        whole = _describe(path, run["dtype"], "auto") if boundaries else found
        pairs += [("fingerprint of config.json and weights", whole.fingerprint[:16], run["fingerprint"][:16])]
    except ConfigError as error:
        note = f"the weights could not be compared with the run's by their fingerprint: {error}"
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise ConfigError(
                f"--model {path}: not the checkpoint of this run: its {what} is {ours}, the run's {theirs}; "
                "give the one that the job's model.path named"
            )
    return note


def _describe(path: str, dtype: str, load_format: Literal["auto", "dummy"]) -> ModelShape:
    try:
        return describe_model(ModelConfig.model_validate({"path": path, "dtype": dtype, "load_format": load_format}))
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"model.path = {path!r}", f"--model {path}")) from None


def _committed(ledger: Ledger, units: Sequence[Unit], rounds: Sequence[Unit], report: VerifyReport) -> list[Unit]:
    """The units to check, in the order in which a row's places count; notes those that are missing or unknown."""
    committed = ledger.committed_units()
    planned = [*units, *rounds]
    done = [unit for unit in planned if unit.unit in committed]
    report.units, report.committed = len(planned), len(done)
    known = {name for unit in planned for name in (unit.unit, *layout.ancestors(unit.unit))}
    for name in sorted(committed - known):
        report.add(
            f"{layout.commit_key(name)}: the plan has no such unit; delete it, or put back the plan/retry-*.json or "
            "plan/split-*.json that it is of"
        )
    for part, what in (
        (units, "the run is not finished; run it again"),
        (rounds, "the retry round is not finished; run ray-extract retry-failed again"),
    ):
        missing = sorted(unit.unit for unit in part if unit.unit not in committed)
        if missing:
            found = f"{show_count(len(missing), 'unit')} without a commit, such as {missing[0]}"
            report.add(f"{found}: {what}")
    return done


def _add(report: VerifyReport, failed: dict[int, str], found: _Checked, again: bool) -> None:
    """Add a unit, of a retry round if `again`, to the report and to the rows that failed so far."""
    for row, (tokens, kept) in found.ok.items():
        if again and failed.pop(row, None) is None:
            continue  # counted where it was ok first
        report.rows_ok += 1
        report.tokens += tokens
        report.kept += kept
    failed |= {row: kind for row, kind in found.failed.items() if not again or row in failed}
    report.nbytes += found.nbytes
    for problem in found.problems:
        report.add(problem)


def _check_unit(ledger: Ledger, unit: Unit, rows: _Locked, expected: _Expected) -> _Checked:
    found = _Checked()
    try:
        receipt = ledger.receipt(unit.unit)
        if receipt is None:
            raise ShardError(f"{ledger.store.url}/{layout.commit_key(unit.unit)}: gone")
        shard = open_shard(ledger.store, receipt.key, receipt.format)
        _count(found, shard, receipt)
        problems = [*_receipt_problems(unit, receipt, shard, expected)]
        prepared = rows.of(unit)
        table = row_table(
            [row.index for row in prepared],
            [row.input_ids for row in prepared],
            [row.loss_mask for row in prepared],
            expected.keep,
        )
        problems += _table_differences(shard.table, table)
        for place, wrong in shard.differences(range(shard.rows), stats=True).items():
            problems.append(f"row {int(shard.table.row[place])}: {', '.join(wrong)} differ from what was captured")
        found.problems += [f"{shard.where}: {problem}" for problem in problems]
        found.damaged = bool(problems)
    except (ShardError, NotFound) as error:
        found.problems.append(str(error))
        found.damaged = True
    except PlanError as error:
        found.problems.append(str(error))
    return found


def _receipt_problems(unit: Unit, receipt: Receipt, shard: Shard, expected: _Expected) -> Iterator[str]:
    """Where commit, plan, identity and shard disagree."""
    ok = shard.status == RowStatus.OK
    failures = {int(shard.table.row[i]): RowStatus(int(shard.status[i])) for i in np.flatnonzero(~ok)}
    kept = np.diff(shard.table.cu_kept)
    pairs: list[tuple[str, Any, Any]] = [
        ("the commit's key", receipt.key, layout.shard_key(unit.unit, receipt.attempt, expected.format)),
        ("format", receipt.format, expected.format),
        ("states", [dataclasses.astuple(c) for c in shard.columns], [dataclasses.astuple(c) for c in expected.columns]),
        ("bytes", shard.size, receipt.size),
        ("rows in the shard, against the commit", shard.rows, receipt.rows),
        ("rows in the shard, against the plan", shard.rows, unit.rows),
        ("stored tokens, against the plan", int(kept.sum()), unit.kept),
        ("prompt tokens of the rows that are ok", int(np.diff(shard.table.cu_seqlens)[ok].sum()), receipt.tokens),
        ("stored tokens of the rows that are ok", int(kept[ok].sum()), receipt.kept),
        ("failed rows", _named(failures), _named({f.row: f.status for f in receipt.failures})),
        ("hash of all bytes but the states", shard.sha256_other(), receipt.sha256),
    ]
    for what, got, wanted in pairs:
        if got != wanted:
            yield f"{what}: {got}, expected {wanted}"
    if shard.digest.astype("<u8").tobytes() != receipt.digests:
        yield "the digests in the shard are not those of the commit"


def _named(failures: Mapping[int, RowStatus]) -> dict[int, str]:
    return {row: status.name.lower() for row, status in sorted(failures.items())}


def _table_differences(found: RowTable, expected: RowTable) -> Iterator[str]:
    """Where a shard's rows are not those prepared."""
    for name in ("row", "cu_seqlens", "cu_kept", "cu_spans", "spans", "input_ids", "loss_mask"):
        got, wanted = getattr(found, name), getattr(expected, name)
        if got.shape != wanted.shape:
            yield f"{name} has {len(got)} entries, {len(wanted)} prepared"
        elif (wrong := np.argwhere(got != wanted)).size:
            at = tuple(wrong[0].tolist())
            yield f"{name}{list(at)} is {got[at]}, {wanted[at]} prepared ({len(wrong)} differ)"


def _count(found: _Checked, shard: Shard, receipt: Receipt) -> None:
    ok = shard.status == RowStatus.OK
    found.nbytes = shard.size
    rows = shard.table.row
    sizes = zip(np.diff(shard.table.cu_seqlens)[ok].tolist(), np.diff(shard.table.cu_kept)[ok].tolist(), strict=True)
    found.ok = dict(zip(rows[ok].tolist(), sizes, strict=True))
    reasons = {f.row: f"{f.status.name.lower()}: {f.reason}" for f in receipt.failures}
    found.failed = {row: reason_kind(reasons.get(row, "without a reason")) for row in rows[~ok].tolist()}


def _check_manifest(
    ledger: Ledger,
    rows: PreparedRows,
    units: Sequence[Unit],
    rounds: Sequence[Unit],
    expected: _Expected,
    report: VerifyReport,
) -> None:
    try:
        manifest = read_manifest(ledger.store)
    except ShardError as error:
        report.add(str(error))
        return

    if manifest_columns(manifest) != expected.columns:
        report.add(f"manifest: its columns are {manifest_columns(manifest)}, the run's are {expected.columns}")

    counts, totals, at = TokenCounts(), Totals(), 0
    try:
        retries, receipts = take_retries(ledger.receipts(), rounds)
        parts = manifest_parts(rows.parts(), units, receipts, retries, keep=expected.keep, columns=expected.columns)
        for batch in counts.counted(parts):
            _compare(manifest.slice(at, batch.num_rows), batch, report.add)
            totals += count(batch)
            at += batch.num_rows
    except (ShardError, PlanError) as error:
        report.add(f"manifest: {error}")
        return
    if at != len(manifest):
        report.add(f"manifest: {len(manifest)} rows, expected {at}")
    latest = latest_manifest(ledger.store)
    for problem in count_problems(ledger.store, counts, latest):
        report.add(problem)
    for problem in success_problems(ledger.store, latest, totals):
        report.add(problem)


def _compare(part: pa.Table, batch: pa.RecordBatch, add: Callable[[str], None]) -> None:
    wanted = pa.Table.from_batches([batch])
    if part.equals(wanted):
        return
    for got, record in itertools.zip_longest(part.to_pylist(), wanted.to_pylist()):
        if got != record:
            row = (record or got)["row"]
            names = [name for name in MANIFEST_SCHEMA.names if not got or not record or got[name] != record[name]]
            add(f"manifest: row {row}: {', '.join(names)} not as in plan and commits")


def _recompute(
    url: str,
    storage_options: Mapping[str, Any],
    identity: RunIdentity,
    count: int,
    seed: int,
    model_path: str,
    report: VerifyReport,
) -> None:
    try:
        from ray_extract.readers.dataset import HiddenStates
        from ray_extract.recompute import StoredRow, state_errors
        from ray_extract.shards.values import TORCH_DTYPES
    except ImportError as error:
        raise ConfigError(f"--recompute needs PyTorch, which does not load: {error}") from None
    try:
        names = [f"state.{boundary}" for boundary in report.boundaries]
        rows = HiddenStates(url, names or None, storage_options=storage_options)
        picked = np.random.default_rng(seed).permutation(len(rows))[:count].tolist()
        stored = [
            StoredRow(
                input_ids=item["input_ids"].numpy().astype(np.int32),
                positions=item["positions"].numpy(),
                states={name: item[name] for name in rows.states},
            )
            for item in (rows[i] for i in sorted(picked))
        ]
    except ShardError as error:
        report.add(f"--recompute: {error}")
        return
    report.recomputed = len(stored)
    fp8 = TORCH_TO_CODE[identity.capture["dtype"]] == FP8
    report.errors = state_errors(
        stored,
        model_path,
        layers=max(report.boundaries, default=None),
        fp8_of=TORCH_DTYPES[TORCH_TO_CODE[identity.model["dtype"]]] if fp8 else None,
    )
    for state in report.errors:
        if not state.ok:
            report.add(f"--recompute: {state}")
