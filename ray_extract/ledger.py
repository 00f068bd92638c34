"""What is done: the run's identity, one commit per unit, numbered manifests, and what adds up to what.

    run.json                 whose output this is; create-if-absent, another identity is refused
    commits/<unit>.json      the unit's only commit point, a Receipt or a Split; create-if-absent, kept for ever
    manifest-<n>.parquet     one row for each row of the data set; never overwritten, readers take the highest
    _SUCCESS                 the run is complete

A shard may exist twice, a row is committed once: readers open only what commits, and so manifests, name. Two drivers
on one output are harmless: both may extract a unit, one commit wins.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_extract import layout
from ray_extract.config import Job
from ray_extract.dataset.prepare import PreparedRow
from ray_extract.errors import AlreadyExists, IdentityMismatch, ShardError
from ray_extract.model import ModelShape
from ray_extract.records import Receipt, Split, Unit
from ray_extract.shards.image import FORMAT_VERSION, TORCH_TO_CODE, Column, state_columns
from ray_extract.store import ObjectInfo, Store, put_once

log = logging.getLogger(__name__)

IDENTITY_VERSION = 1

# Commits read at once: at 20 ms a request on S3, 100,000 take half a minute in place of half an hour, and making their
# manifest takes longer.
_READERS = 64
_BATCH_ROWS = 8192

# Engine arguments that change the states themselves, unlike those of speed and size.
_STATE_ARGS = (
    "enable_tf32_matmul",
    "json_model_override_args",
    "kt_method",
    "kt_weight_path",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
    "modelopt_checkpoint_restore_path",
    "modelopt_quant",
    "quantization_param_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "torchao_config",
)

MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("n_tokens", pa.int64(), nullable=False),
        pa.field("kept", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("unit", pa.string()),
        pa.field("shard", pa.string()),
        pa.field("format", pa.string()),
        pa.field("row_in_shard", pa.int32()),
        pa.field("token_offset", pa.int64()),
        pa.field("digests", pa.list_(pa.uint64())),
    ]
)
"""Columns of a manifest, one row for each row of the data set, in order.

row, row_id, source, n_tokens: as prepared; n_tokens is 0 for skipped rows.
kept: stored tokens.
status: `ok`, `skipped` (not usable, in no shard) or `failed` (zeroed in its shard).
reason: why not ok; the text before the first colon is its kind.
unit, shard, format: where the row is; shard is the object's key. Null for skipped rows, like all that follow. A row
    that failed and was retried is where it is ok; if nowhere, where it failed last.
row_in_shard: its place among the shard's rows.
token_offset: its first token in the shard's states.
digests: u64 [1 + states], see capture.digest; the first one is of the token ids.

The schema's metadata of a manifest in a store is `format` and `version`, and `ray_extract.columns`: JSON
[[name, dtype, width], ...] of the shards' states in order, see shards.image.
"""
MANIFEST_FORMAT, MANIFEST_VERSION = "ray_extract manifest", "1"


@dataclasses.dataclass(frozen=True, slots=True)
class RunIdentity:
    """What must be the same for two jobs to share an output; each section holds JSON values.

    Args:
        dataset: fingerprints of the sources, template and mask, limits, field names.
        model: weights, types, and the kind of engine.
        capture: which states of which tokens.
        plan: what units are made by.
        format: of the shards.
    """

    dataset: dict[str, Any]
    model: dict[str, Any]
    capture: dict[str, Any]
    plan: dict[str, Any]
    format: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Inverse of to_json."""
        return cls(**record)


def run_identity(
    job: Job, shape: ModelShape, boundaries: Sequence[int], sources: Sequence[Mapping[str, Any]], template_sha: str
) -> RunIdentity:
    """The identity of a job. What only moves work (paths, engines, parallelism, chunk size) is no part of it.

    Args:
        job: the job.
        shape: its model.
        boundaries: the resolved ones, ascending.
        sources: a fingerprint of each input file, in order.
        template_sha: hash of the chat template in use.
    """
    data, engine = job.dataset, job.engine
    identity = RunIdentity(
        dataset={
            "sources": [dict(source) for source in sources],
            "template": template_sha,
            "fields": data.fields.model_dump(),
            "mask": data.mask,
            "max_tokens": data.max_tokens,
            # Bounds the rows only where max_tokens does not.
            "context_length": None if data.max_tokens else engine.context_length or shape.context_length,
            "overlong": data.overlong,
            "limit": data.limit,
        },
        model={
            "fingerprint": shape.fingerprint,
            "architecture": shape.architecture,
            "num_layers": shape.num_layers,
            "dtype": shape.dtype,
            "quantization": job.model.quantization,
            "weights": "random" if job.model.load_format == "dummy" else "checkpoint",
            "engine": engine.kind,
            "args": {name: engine.args[name] for name in _STATE_ARGS if name in engine.args},
        },
        capture={
            "boundaries": list(boundaries),
            "final": job.capture.final,
            "keep": job.capture.keep,
            "dtype": job.capture.stored_dtype(shape.dtype),
            "hidden": shape.hidden,
        },
        plan={"shard_bytes": int(job.output.shard_bytes), "max_rows": job.output.max_rows},
        format={"shards": job.output.format, "image": FORMAT_VERSION},
    )
    # As it will be read back, so that tuples and lists do not differ.
    return RunIdentity.from_json(json.loads(json.dumps(identity.to_json())))


def stored_columns(identity: RunIdentity) -> tuple[Column, ...]:
    """The states in each of a run's shards, in order."""
    capture = identity.capture
    return state_columns(capture["boundaries"], capture["final"], TORCH_TO_CODE[capture["dtype"]], capture["hidden"])


def diff(run: RunIdentity, job: RunIdentity) -> list[str]:
    """Where two identities differ, one readable line a field; empty if nowhere."""
    before, after = dict(_leaves("", run.to_json())), dict(_leaves("", job.to_json()))
    names = list(dict.fromkeys([*before, *after]))
    lines = []
    for name in names:
        run_has, job_asks = _shown(before, name), _shown(after, name)
        if run_has != job_asks:
            words = _HASHES.get(name.rpartition(".")[2]) if name in before and name in after else None
            meaning = f"{words}; " if words else ""
            lines.append(f"{name}: {meaning}run has {run_has}, this job asks {job_asks}")
    return lines


# What another value of a hash means, by the last part of its name.
_HASHES = {
    "sha256": "the file has other content",
    "template": "the chat template is another one",
    "fingerprint": "the checkpoint is another one, by its config.json or its weights",
}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from _leaves(f"{name}[{i}]", item)
    else:
        yield name, value


def _shown(leaves: Mapping[str, Any], name: str) -> str:
    return json.dumps(leaves[name]) if name in leaves else "nothing"


class Ledger:
    """The commits under one output."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def claim(self, identity: RunIdentity, environment: Mapping[str, str]) -> None:
        """Make the output ours, or find that it is.

        Args:
            identity: must equal that of the run that is there, if one is.
            environment: versions and hardware; a difference is only logged.

        Raises:
            IdentityMismatch: the output belongs to another run.
        """
        record = {"version": IDENTITY_VERSION, "identity": identity.to_json(), "environment": dict(environment)}
        try:
            self.store.put(layout.RUN_KEY, json.dumps(record, indent=2).encode())
            return
        except AlreadyExists:
            found, then = self._read_run()
        lines = diff(found, identity)
        if lines:
            raise IdentityMismatch(
                f"{self.store.url} holds another run; choose another output.url, or the old settings:\n  "
                + "\n  ".join(lines)
            )
        for name in sorted({*then, *environment}):
            if then.get(name) != environment.get(name):
                log.warning(
                    "this run began with %s %s, and goes on with %s", name, then.get(name), environment.get(name)
                )

    def identity(self) -> RunIdentity | None:
        """Whose output this is; None if nobody's yet."""
        return self._read_run()[0] if self.store.head(layout.RUN_KEY) else None

    def _read_run(self) -> tuple[RunIdentity, dict[str, str]]:
        try:
            record = json.loads(self.store.get(layout.RUN_KEY))
            version = record["version"]
            if version == IDENTITY_VERSION:
                return RunIdentity.from_json(record["identity"]), dict(record["environment"])
        except (ValueError, KeyError, TypeError):
            version = "unreadable"
        raise IdentityMismatch(
            f"{self.store.url}/{layout.RUN_KEY}: version {version}; this release reads {IDENTITY_VERSION}. "
            "Choose another output.url, or the release that began the run"
        )

    def commit(self, receipt: Receipt) -> bool:
        """Commit a unit, once.

        Returns:
            True if the unit's commit is this attempt's, now or already (a retry after a lost answer); False if another
            attempt won, whose shard counts and ours does not.
        """
        text = json.dumps(receipt.to_json(), sort_keys=True).encode()
        if put_once(self.store, layout.commit_key(receipt.unit), text):
            return True
        winner = self._read_commit(receipt.unit)
        if isinstance(winner, Receipt) and winner.attempt == receipt.attempt:
            return True
        log.warning(
            "unit %s: %s was committed before %s; is another driver on this output?",
            receipt.unit,
            "its split" if isinstance(winner, Split) else f"attempt {winner.attempt}",
            receipt.attempt,
        )
        return False

    def commit_split(self, split: Split) -> bool:
        """Say that a unit is extracted in parts, once.

        Returns:
            True if that is the unit's commit, of whomever; False if an attempt at the whole unit won.
        """
        text = json.dumps(split.to_json(), sort_keys=True).encode()
        return put_once(self.store, layout.commit_key(split.unit), text) or self.is_split(split.unit)

    def is_split(self, unit: str) -> bool:
        """Whether a unit's commit says that it is extracted in parts."""
        return self.store.head(layout.commit_key(unit)) is not None and isinstance(self._read_commit(unit), Split)

    def committed_units(self) -> set[str]:
        """The units that have a commit, those that were split included."""
        return set(self._commits())

    def receipt(self, unit: str) -> Receipt | None:
        """A unit's commit, or None if it has none or was split."""
        found = self._read_commit(unit) if self.store.head(layout.commit_key(unit)) else None
        return None if isinstance(found, Split) else found

    def receipts(self) -> Iterator[Receipt]:
        """As commits, without units that were split: their parts have their own."""
        return (commit for commit in self.commits() if isinstance(commit, Receipt))

    def commits(self) -> Iterator[Receipt | Split]:
        """All commits, ordered by unit, so those of retry rounds first; a few are read ahead in parallel."""
        units = iter(sorted(self._commits()))
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            # Bounded, since 100,000 receipts may be tens of gigabytes of digests.
            ahead = [pool.submit(self._read_commit, unit) for unit in itertools.islice(units, 2 * _READERS)]
            while ahead:
                yield ahead.pop(0).result()
                ahead += [pool.submit(self._read_commit, unit) for unit in itertools.islice(units, 1)]

    def whole_receipts(self) -> Iterator[Receipt]:
        """As receipts, after a look whether each commit's shard is there with its size; the bytes are verify's to read.

        Raises:
            ShardError: a shard is missing or has another size.
        """
        sizes = {item.key: item.size for item in self.store.list(layout.SHARDS_PREFIX)}
        for receipt in self.receipts():
            size = sizes.get(receipt.key)
            if size != receipt.size:
                found = "is missing" if size is None else f"has {size} bytes and was committed with {receipt.size}"
                raise ShardError(
                    f"{self.store.url}/{receipt.key} {found}; to extract its rows again, delete "
                    f"{layout.commit_key(receipt.unit)} and run the same command"
                )
            yield receipt

    def _commits(self) -> Iterator[str]:
        for item in self.store.list(layout.COMMITS_PREFIX):
            unit = layout.unit_of_commit(item.key)
            if unit is not None:
                yield unit

    def _read_commit(self, unit: str) -> Receipt | Split:
        key = layout.commit_key(unit)
        try:
            record = json.loads(self.store.get(key))
            return Split.from_json(record) if "split" in record else Receipt.from_json(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(
                f"{self.store.url}/{key}: not a commit that this release reads ({error}); if it is damaged, delete it "
                "and run the same command to extract its rows again"
            ) from None


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """What became of the rows of a data set.

    Args:
        rows: all rows.
        ok: those with states.
        skipped, failed: the others, by kind of reason.
        tokens: prompt tokens of the rows that are ok.
        kept: their stored tokens.
        nbytes: bytes of the shards.
    """

    rows: int = 0
    ok: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    kept: int = 0
    nbytes: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            rows=self.rows + other.rows,
            ok=self.ok + other.ok,
            skipped=dict(Counter(self.skipped) + Counter(other.skipped)),
            failed=dict(Counter(self.failed) + Counter(other.failed)),
            tokens=self.tokens + other.tokens,
            kept=self.kept + other.kept,
            nbytes=self.nbytes + other.nbytes,
        )

    def check(self) -> None:
        """Raises ShardError unless rows = ok + skipped + failed."""
        skipped, failed = sum(self.skipped.values()), sum(self.failed.values())
        if self.rows != self.ok + skipped + failed:
            raise ShardError(f"{self.rows} rows, but {self.ok} ok + {skipped} skipped + {failed} failed: rows got lost")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return dataclasses.asdict(self)


def count(part: pa.Table | pa.RecordBatch) -> Totals:
    """Totals of a part of a manifest; nbytes is 0, since a manifest does not know the sizes of shards."""
    status = part.column("status")
    ok = pc.equal(status, "ok")

    def kinds(which: str) -> dict[str, int]:
        reasons = part.filter(pc.equal(status, which)).column("reason").to_pylist()
        return dict(Counter((reason or "unknown").partition(":")[0] for reason in reasons))

    def total(name: str) -> int:
        return int(pc.sum(part.filter(ok).column(name)).as_py() or 0)

    return Totals(
        rows=part.num_rows,
        ok=int(pc.sum(ok).as_py() or 0),
        skipped=kinds("skipped"),
        failed=kinds("failed"),
        tokens=total("n_tokens"),
        kept=total("kept"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RowHead:
    """A prepared row without its tokens: what a manifest says of every row.

    Args:
        index, row_id, source: as prepared.
        n_tokens: prompt tokens.
        kept: tokens whose states are stored.
        reason: why the row is skipped, or None.
    """

    index: int
    row_id: str
    source: str
    n_tokens: int
    kept: int
    reason: str | None

    @classmethod
    def of(cls, row: PreparedRow, keep: str) -> Self:
        """The head of a prepared row under `capture.keep`."""
        return cls(row.index, row.row_id, row.source, len(row.input_ids), row.kept(keep), row.reason)


Retry = tuple[Unit, Receipt]
"""A unit of a retry round, and its commit."""


def take_retries(receipts: Iterator[Receipt], rounds: Iterable[Unit]) -> tuple[list[Retry], Iterator[Receipt]]:
    """Take the commits of retry rounds off all commits.

    Args:
        receipts: ordered by unit, see Ledger.receipts.
        rounds: the units of all rounds.

    Returns:
        Those of the rounds, in their order, and the others.

    Raises:
        ShardError: a commit is of a round that is not there.
    """
    units = {unit.unit: unit for unit in rounds}
    retries: list[Retry] = []
    for receipt in receipts:
        if layout.round_of_unit(receipt.unit) is None:
            return retries, itertools.chain([receipt], receipts)
        if receipt.unit not in units:
            raise ShardError(f"{layout.commit_key(receipt.unit)}: no retry round has such a unit; delete it")
        retries.append((units[receipt.unit], receipt))
    return retries, receipts


def mended(retries: Iterable[Retry]) -> frozenset[int]:
    """The rows that retry rounds made ok."""
    return frozenset(
        row
        for unit, receipt in retries
        for row in {*(unit.members or ())} - {failure.row for failure in receipt.failures}
    )


def manifest_rows(
    rows: Iterable[RowHead], units: Iterable[Unit], receipts: Iterable[Receipt], retries: Iterable[Retry] = ()
) -> Iterator[dict[str, Any]]:
    """Join rows, plan and commits, all in order, into records of MANIFEST_SCHEMA; streaming, one unit in memory.

    The receipt of a unit is taken before the unit's rows. Of a row's places, that of the plan and those of retry rounds
    in their order, the first one where it is ok counts; if there is none, the last one.

    Args:
        rows: every row of the data set, by index from 0.
        units: the plan, by first row.
        receipts: one for each unit, in the plan's order (more would be of another plan).
        retries: what is committed of retry rounds, in their order; all in memory.

    Raises:
        ShardError: a unit is not committed, or plan, rows and commits do not fit each other.
    """
    source = _Counted(rows)
    again: dict[int, list[_Places]] = {}
    retried = [_Places(unit, receipt) for unit, receipt in retries]
    for places in retried:
        for row in places.unit.members or ():
            again.setdefault(row, []).append(places)
    done = iter(receipts)
    for unit in units:
        yield from (_skipped(row) for row in source.until(unit.first))
        receipt = next(done, None)
        if receipt is None or receipt.unit != unit.unit:
            found = f"; {receipt.unit} is next" if receipt else ""
            raise ShardError(f"unit {unit.unit} (rows {unit.first} to {unit.end}) has no commit{found}; run again")
        yield from _unit_rows(source.until(unit.end), _Places(unit, receipt), again)
    yield from (_skipped(row) for row in source.until(None))
    for places in retried:
        places.finish()
    extra = next(done, None)
    if extra is not None:
        raise ShardError(f"commit of unit {extra.unit}: the plan has no such unit")


class _Counted:
    """Rows that come one by one, each with the index that is due."""

    def __init__(self, rows: Iterable[RowHead]) -> None:
        self._rows = iter(rows)
        self._next = 0

    def until(self, end: int | None) -> Iterator[RowHead]:
        while end is None or self._next < end:
            row = next(self._rows, None)
            if row is None:
                if end is not None:
                    raise ShardError(f"row {self._next} is missing: the plan has rows up to {end}")
                return
            if row.index != self._next:
                raise ShardError(f"row {row.index} came where row {self._next} was due")
            self._next += 1
            yield row


def _skipped(row: RowHead) -> dict[str, Any]:
    if row.reason is None:
        raise ShardError(f"row {row.index} is usable, but in no unit of the plan")
    return {**_head(row), "status": "skipped", "reason": row.reason}


def _head(row: RowHead) -> dict[str, Any]:
    return {
        "row": row.index,
        "row_id": row.row_id,
        "source": row.source,
        "n_tokens": row.n_tokens,
        "kept": row.kept,
    }


def _unit_rows(
    rows: Iterable[RowHead], places: "_Places", again: Mapping[int, Sequence["_Places"]]
) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row.reason is not None:
            yield _skipped(row)
            continue
        record = places.take(row)
        for other in again.get(row.index, ()):
            later = other.take(row)
            if record["status"] != "ok":
                record = later
        yield record
    places.finish()


class _Places:
    """The rows of a unit, which come one by one, and where in its shard they are."""

    def __init__(self, unit: Unit, receipt: Receipt) -> None:
        if receipt.rows != unit.rows or not unit.rows or len(receipt.digests) % (8 * unit.rows):
            raise ShardError(
                f"commit of unit {unit.unit}: {receipt.rows} rows and {len(receipt.digests)} bytes of digests, where "
                f"the plan has {unit.rows} rows"
            )
        self.unit, self._receipt = unit, receipt
        self._digests = np.frombuffer(receipt.digests, dtype="<u8").reshape(unit.rows, -1)
        self._failures = {failure.row: failure for failure in receipt.failures}
        self._place = self._tokens = 0

    def take(self, row: RowHead) -> dict[str, Any]:
        """The record of the next row."""
        unit, place = self.unit, self._place
        if place == unit.rows:
            raise ShardError(f"unit {unit.unit}: more usable rows than the {unit.rows} planned")
        failure = self._failures.pop(row.index, None)
        self._place += 1
        self._tokens += row.kept
        return {
            **_head(row),
            "status": "failed" if failure else "ok",
            "reason": f"{failure.status.name.lower()}: {failure.reason}" if failure else None,
            "unit": unit.unit,
            "shard": self._receipt.key,
            "format": self._receipt.format,
            "row_in_shard": place,
            "token_offset": self._tokens - row.kept,
            "digests": self._digests[place],
        }

    def finish(self) -> None:
        """Raise ShardError unless all rows came."""
        unit = self.unit
        if self._place != unit.rows or self._tokens != unit.kept:
            raise ShardError(
                f"unit {unit.unit}: {self._place} usable rows with {self._tokens} stored tokens, {unit.rows} and "
                f"{unit.kept} planned"
            )
        if self._failures:
            raise ShardError(
                f"commit of unit {unit.unit}: reports rows that it does not hold: {sorted(self._failures)}"
            )


def write_manifest(
    store: Store,
    rows: Iterable[RowHead],
    units: Iterable[Unit],
    receipts: Iterable[Receipt],
    retries: Sequence[Retry] = (),
) -> tuple[str, Totals]:
    """Write the next manifest, or find that the latest one says the same.

    Args:
        store: the output.
        rows, units, receipts, retries: see manifest_rows; receipts and retries as take_retries divides them.

    Returns:
        Its key, and what became of the rows.

    Raises:
        ShardError: see manifest_rows, or nobody has claimed the output; nothing is written.
    """
    identity = Ledger(store).identity()
    if identity is None:
        raise ShardError(f"{store.url}: no {layout.RUN_KEY}, so nothing says which states the shards hold")
    columns = [[c.name, c.dtype, c.width] for c in stored_columns(identity)]
    metadata = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "ray_extract.columns": json.dumps(columns)}
    sizes = [receipt.size for _, receipt in retries]

    def measured() -> Iterator[Receipt]:
        for receipt in receipts:
            sizes.append(receipt.size)
            yield receipt

    # A file, since a lost race for a number means sending it again.
    with tempfile.TemporaryFile() as file:
        totals = Totals()
        with pq.ParquetWriter(file, MANIFEST_SCHEMA.with_metadata(metadata), compression="zstd") as writer:
            records = manifest_rows(rows, units, measured(), retries)
            while batch := list(itertools.islice(records, _BATCH_ROWS)):
                part = pa.RecordBatch.from_pylist(batch, schema=MANIFEST_SCHEMA)
                totals += count(part)
                writer.write_batch(part)
        totals = dataclasses.replace(totals, nbytes=sum(sizes))
        totals.check()
        size = file.tell()

        def chunks() -> Iterator[bytes]:
            file.seek(0)
            return iter(lambda: file.read(1 << 20), b"")

        return _put_numbered(store, size, chunks), totals


def _put_numbered(store: Store, size: int, chunks: Callable[[], Iterator[bytes]]) -> str:
    number = max(_manifest_numbers(store), default=-1)
    if number >= 0 and _equal(store, layout.manifest_key(number), size, chunks()):
        return layout.manifest_key(number)
    while True:
        number += 1
        key = layout.manifest_key(number)
        try:
            store.put_stream(key, chunks())
        except AlreadyExists:
            # Another driver's, or ours after a lost answer.
            if _equal(store, key, size, chunks()):
                return key
        else:
            return key


def _equal(store: Store, key: str, size: int, chunks: Iterable[bytes]) -> bool:
    info = store.head(key)
    if info is None or info.size != size:
        return False
    at = 0
    for chunk in chunks:
        if store.get_range(key, at, len(chunk)) != chunk:
            return False
        at += len(chunk)
    return True


def _manifest_numbers(store: Store) -> Iterator[int]:
    for item in store.list("", recursive=False):
        number = layout.manifest_number(item.key)
        if number is not None:
            yield number


def latest_manifest(store: Store) -> str | None:
    """Key of the manifest to read, or None before the first one."""
    number = max(_manifest_numbers(store), default=None)
    return None if number is None else layout.manifest_key(number)


def read_manifest(store: Store) -> pa.Table:
    """The latest manifest, see MANIFEST_SCHEMA.

    Raises:
        ShardError: there is none yet, it is damaged, or of another release.
    """
    key = latest_manifest(store)
    if key is None:
        raise ShardError(f"{store.url}: no manifest; the run has not finished, or this is not an output of ray_extract")
    try:
        # Not read_table, whose threads abort a process that ends while they start ("terminate called without ...").
        table = pq.ParquetFile(pa.BufferReader(store.get(key))).read(use_threads=False)
        metadata = {name.decode(): text.decode() for name, text in (table.schema.metadata or {}).items()}
        found = metadata.get("format"), metadata.get("version")
        if found != (MANIFEST_FORMAT, MANIFEST_VERSION):
            raise ShardError(
                f"{store.url}/{key}: format {found[0]!r:.40} version {found[1]!r:.40}; this release reads "
                f"{MANIFEST_FORMAT!r} {MANIFEST_VERSION!r}"
            )
        manifest_columns(table)
        return table.cast(MANIFEST_SCHEMA.with_metadata(table.schema.metadata))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{store.url}/{key}: damaged: {error}") from None


def manifest_columns(manifest: pa.Table) -> tuple[Column, ...]:
    """The states in each shard that a manifest names, in order."""
    return tuple(Column(*entry) for entry in json.loads(manifest.schema.metadata[b"ray_extract.columns"]))


def write_success(store: Store, summary: Mapping[str, Any]) -> None:
    """Say that the run is complete. What an earlier completion said stays."""
    text = json.dumps(dict(summary), indent=2, sort_keys=True).encode()
    if not put_once(store, layout.SUCCESS_KEY, text):
        log.info("%s/%s is there already", store.url, layout.SUCCESS_KEY)


def orphans(store: Store) -> list[ObjectInfo]:
    """Shards that lost: their unit's commit names another attempt, or parts.

    Shards of units without a commit are not among them, since whoever wrote them may be about to commit.
    """
    shards: dict[str, list[ObjectInfo]] = {}
    for item in store.list(layout.SHARDS_PREFIX):
        # A unit's name may hold dots, those of an attempt and an ending do not.
        unit = item.key.removeprefix(layout.SHARDS_PREFIX).rsplit(".", 2)[0]
        shards.setdefault(unit, []).append(item)
    return [
        item
        for commit in Ledger(store).commits()
        for item in shards.get(commit.unit, [])
        if isinstance(commit, Split) or item.key != commit.key
    ]
