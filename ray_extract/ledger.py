"""What is done: the run's identity, one commit per unit, numbered manifests, and what adds up to what.

    run.json                 whose output this is; create-if-absent, another identity is refused
    commits/<unit>.json      the unit's only commit point, a Receipt or a Split; create-if-absent, kept for ever
    segments/*.parquet       many commits in one object, see segments.py; only a cache
    manifest-<n>.parquet     one row for each row of the data set; never overwritten, readers take the highest
    _SUCCESS                 the run is complete; what became of its rows by the latest manifest

A shard may exist twice, a row is committed once: readers open only what commits, and so manifests, name. Two drivers
on one output are harmless: both may extract a unit, one commit wins.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import logging
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_extract import layout
from ray_extract.config import Job
from ray_extract.dataset.prepared import tokens_of
from ray_extract.errors import AlreadyExists, IdentityMismatch, NotFound, ShardError
from ray_extract.model import ModelShape
from ray_extract.records import Receipt, RowFailure, Split, Unit
from ray_extract.segments import Folded, Folding
from ray_extract.shards.image import (
    FORMAT_VERSION,
    PAGE,
    TORCH_TO_CODE,
    Column,
    kept_counts,
    state_columns,
    states_extent,
)
from ray_extract.store import ObjectInfo, Store, StoredFile, put_once

log = logging.getLogger(__name__)

IDENTITY_VERSION = 1

# Commits read at once: at 20 ms a request on S3, 100,000 take half a minute in place of half an hour. Small ones are
# read several in a row by each reader, since handing over one costs more than parsing it.
_READERS = 64
_READ_AT_ONCE, _READ_BYTES = 16, 64 << 10

_NAMED = 20
"""Shards that an error names; more are counted."""

_NO_PLAN = "; plan/ is damaged: put it back as it was, or choose another output.url"

_GROUP_ROWS = 64 << 10  # of a row group of a manifest, at least
_CHUNK_BYTES = 8 << 20  # of a manifest, sent or compared
# Columns that a dictionary makes smaller.
_REPETITIVE = ["source", "status", "reason", "unit", "shard", "format", "states_offset", "states_stride"]

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
        pa.field("states_offset", pa.int64()),
        pa.field("states_stride", pa.int64()),
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
states_offset, states_stride: where the first state begins in a raw shard, and how many bytes later the next one; null
    for a Parquet shard.
digests: u64 [1 + states], see capture.digest; the first one is of the token ids.

The schema's metadata of a manifest in a store is `format` and `version`, and `ray_extract.columns`: JSON
[[name, dtype, width], ...] of the shards' states in order, see shards.image.
"""
MANIFEST_FORMAT, MANIFEST_VERSION = "ray_extract manifest", "2"


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
            # Where the files are and how they are read is no part of it; what is in them is in `sources`.
            **data.model_dump(exclude={"paths", "format", "chat_template", "processes", "storage_options"}),
            # Bounds the rows only where max_tokens does not.
            "context_length": None if data.max_tokens else engine.context_length or shape.context_length,
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

    def claimed(self) -> RunIdentity:
        """Whose output this is. Raises ShardError if it is nobody's."""
        found = self.identity()
        if found is None:
            raise ShardError(f"{self.store.url}: no {layout.RUN_KEY}, so nothing says which states the shards hold")
        return found

    def _read_run(self) -> tuple[RunIdentity, dict[str, str]]:
        try:
            record = json.loads(self.store.get(layout.RUN_KEY))
            version = record["version"]
            if version == IDENTITY_VERSION:
                return RunIdentity.from_json(record["identity"]), dict(record["environment"])
        except (ValueError, KeyError, TypeError):
            raise IdentityMismatch(
                f"{self.store.url}/{layout.RUN_KEY}, which says whose output this is, is damaged: put it back as it "
                "was; or, if the job is surely the one that began here, delete it and run the job again, which writes "
                "it anew"
            ) from None
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
        return isinstance(self._find_commit(unit), Split)

    def listing(self) -> dict[str, ObjectInfo]:
        """The units that have a commit, in order, those that were split included; and the objects that are these."""
        items = sorted(self.store.list(layout.COMMITS_PREFIX), key=lambda item: item.key)
        found = {layout.unit_of_commit(item.key): item for item in items}
        return {unit: found[unit] for unit in sorted(filter(None, found))}

    def committed_units(self) -> set[str]:
        """The units that have a commit, those that were split included."""
        return set(self.listing())

    def receipt(self, unit: str) -> Receipt | None:
        """A unit's commit, or None if it has none or was split."""
        found = self._find_commit(unit)
        return None if isinstance(found, Split) else found

    def receipts(self, listing: Mapping[str, ObjectInfo] | None = None, *, fold: bool = False) -> Iterator[Receipt]:
        """As commits, without units that were split: their parts have their own."""
        return (commit for commit in self.commits(listing, fold=fold) if isinstance(commit, Receipt))

    def commits(
        self, listing: Mapping[str, ObjectInfo] | None = None, *, fold: bool = False
    ) -> Iterator[Receipt | Split]:
        """Commits, ordered by unit, so those of retry rounds first.

        From segments as far as these have them, else one by one, a few read ahead in parallel.

        Args:
            listing: which ones; all that are there now when absent.
            fold: store those that no segment had as segments.
        """
        if listing is None:
            listing = self.listing()
        folding = Folding(self.store) if fold else None
        for unit, commit, folded in self._texts(listing):
            if folding is not None and not folded:
                folding.add(unit, listing[unit].version, commit)
            yield self._parse_commit(unit, commit)
        if folding is not None:
            folding.finish()

    def _texts(self, listing: Mapping[str, ObjectInfo]) -> Iterator[tuple[str, bytes, bool]]:
        """Unit, commit, and whether it is from a segment."""
        folded = Folded(self.store, listing)
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            # Bounded, since 100,000 receipts may be tens of gigabytes of digests.
            ahead: deque[tuple[list[str], list[bytes] | concurrent.futures.Future[list[bytes]]]] = deque()
            few: list[str] = []
            nbytes = 0
            for unit, item in listing.items():
                commit = folded.take(unit)
                if few and (commit is not None or len(few) == _READ_AT_ONCE or nbytes + item.size > _READ_BYTES):
                    ahead.append((few, pool.submit(self._read_commits, few)))
                    few, nbytes = [], 0
                if commit is None:
                    few.append(unit)
                    nbytes += item.size
                else:
                    ahead.append(([unit], [commit]))
                while len(ahead) > 2 * _READERS:
                    yield from _settled(*ahead.popleft())
            if few:
                ahead.append((few, pool.submit(self._read_commits, few)))
            while ahead:
                yield from _settled(*ahead.popleft())

    def _read_commits(self, units: Sequence[str]) -> list[bytes]:
        return [self.store.get(layout.commit_key(unit)) for unit in units]

    def whole_receipts(self, listing: Mapping[str, ObjectInfo]) -> Iterator[Receipt]:
        """As receipts, after a look whether each commit's shard is there with its size; the bytes are verify's to read.

        Folds what is read into segments.

        Args:
            listing: which ones.

        Raises:
            ShardError: after the last receipt: shards are missing or have another size.
        """
        sizes = {item.key: item.size for item in self.store.list(layout.SHARDS_PREFIX)}
        wrong = []
        for receipt in self.receipts(listing, fold=True):
            size = sizes.get(receipt.key)
            if size != receipt.size:
                found = "is missing" if size is None else f"has {size} bytes and was committed with {receipt.size}"
                wrong.append((receipt.unit, f"{receipt.key} {found}"))
            yield receipt
        self._require_none(wrong)

    def require_shards(self, units: Iterable[str]) -> None:
        """Look whether there is a shard of each of these units; no commit is read for it.

        So of a unit of which several attempts left a shard it may be the wrong one; that is whole_receipts' to see.

        Args:
            units: that have a commit, and were not split.

        Raises:
            ShardError: of some there is none.
        """
        there = {layout.unit_of_shard(item.key) for item in self.store.list(layout.SHARDS_PREFIX)}
        self._require_none([(unit, f"the shard of {unit} is missing") for unit in units if unit not in there])

    def _require_none(self, wrong: Sequence[tuple[str, str]]) -> None:
        """Raises ShardError for shards that are not as committed, each a unit and what is wrong."""
        if len(wrong) == 1:
            ((unit, what),) = wrong
            raise ShardError(f"{self.store.url}: {what}; {_remedy(unit)}")
        if wrong:
            lines = [f"{what}: delete {layout.commit_key(unit)}" for unit, what in wrong[:_NAMED]]
            if len(wrong) > _NAMED:
                lines.append(
                    f"and {len(wrong) - _NAMED:,} more, which are named once these are mended; if all shards are gone, "
                    f"delete all files in {layout.COMMITS_PREFIX}"
                )
            raise ShardError(
                f"{self.store.url}: {len(wrong):,} committed shards are missing or damaged; to extract their rows "
                f"again, delete their commits and {run_again(unit for unit, _ in wrong)}:\n  " + "\n  ".join(lines)
            )

    def _find_commit(self, unit: str) -> Receipt | Split | None:
        try:
            return self._read_commit(unit)
        except NotFound:
            return None

    def _read_commit(self, unit: str) -> Receipt | Split:
        return self._parse_commit(unit, self.store.get(layout.commit_key(unit)))

    def _parse_commit(self, unit: str, text: bytes) -> Receipt | Split:
        try:
            record = json.loads(text)
            return Split.from_json(record) if "split" in record else Receipt.from_json(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(
                f"{self.store.url}/{layout.commit_key(unit)}: not a commit that this release reads ({error}); if it is "
                f"damaged: {_remedy(unit)}"
            ) from None


def _settled(
    units: Sequence[str], commits: "list[bytes] | concurrent.futures.Future[list[bytes]]"
) -> Iterator[tuple[str, bytes, bool]]:
    folded = isinstance(commits, list)
    found = commits if isinstance(commits, list) else commits.result()
    return ((unit, commit, folded) for unit, commit in zip(units, found, strict=True))


def _remedy(unit: str) -> str:
    """How the rows of a unit are extracted again."""
    return f"to extract its rows again, delete {layout.commit_key(unit)} and {run_again([unit])}"


def run_again(units: Iterable[str]) -> str:
    """Which commands extract units again whose commits were deleted."""
    retried = {layout.round_of_unit(unit) is not None for unit in units}
    if retried == {True}:
        return "run ray-extract retry-failed again"
    return "run the job, and ray-extract retry-failed, again" if True in retried else "run the job again"


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
            raise ShardError(
                f"{layout.commit_key(receipt.unit)}: no plan/retry-*.json has such a unit; if its round was deleted to "
                "do without it, delete this too"
            )
        retries.append((units[receipt.unit], receipt))
    return retries, receipts


def mended(retries: Iterable[Retry]) -> frozenset[int]:
    """The rows that retry rounds made ok."""
    return frozenset(
        row
        for unit, receipt in retries
        for row in {*(unit.members or ())} - {failure.row for failure in receipt.failures}
    )


def manifest_parts(
    parts: Iterable[pa.Table],
    units: Iterable[Unit],
    receipts: Iterable[Receipt],
    retries: Iterable[Retry] = (),
    *,
    keep: str,
    columns: Sequence[Column],
) -> Iterator[tuple[pa.Table, pa.RecordBatch]]:
    """Join rows, plan and commits, all in order, to what a manifest says; streaming, a part and its units in memory.

    Of a row's places, that of the plan and those of retry rounds in their order, the first one where it is ok counts;
    if there is none, the last one.

    Args:
        parts: every row of the data set, by index from 0, see PreparedRows.parts.
        units: the plan, by first row.
        receipts: one for each unit, in the plan's order (more would be of another plan).
        retries: what is committed of retry rounds, in their order; all in memory.
        keep: `capture.keep`.
        columns: the states in each shard, see stored_columns.

    Yields:
        Each part, and the same rows by MANIFEST_SCHEMA.

    Raises:
        ShardError: a unit is not committed, or plan, rows and commits do not fit each other.
    """
    join = _Join(units, receipts, retries, keep, columns)
    for part in parts:
        yield part, join.part(part)
    join.finish()


class _Join:
    """See manifest_parts."""

    def __init__(
        self,
        units: Iterable[Unit],
        receipts: Iterable[Receipt],
        retries: Iterable[Retry],
        keep: str,
        columns: Sequence[Column],
    ) -> None:
        self._units, self._receipts = iter(units), iter(receipts)
        self._keep, self._columns = keep, columns
        self._retried = [_Places(unit, receipt, columns) for unit, receipt in retries]
        self._again: dict[int, list[_Places]] = {}
        for places in self._retried:
            for row in places.unit.members or ():
                self._again.setdefault(row, []).append(places)
        self._again_rows = np.array(sorted(self._again), np.int64)
        self._due = 0  # the next row
        self._planned = 0  # rows up to here are in the units that came
        self._next = next(self._units, None)
        self._open: list[_Places] = []  # of units whose rows have not all come

    def part(self, part: pa.Table) -> pa.RecordBatch:
        """The next rows."""
        first, end = self._due, self._due + part.num_rows
        index = part.column("index").to_numpy()
        for at in np.flatnonzero(index != np.arange(first, end))[:1]:
            raise ShardError(f"row {index[at]} came where row {first + at} was due{_NO_PLAN}")
        self._due = end
        usable = part.column("reason").is_null().to_numpy()
        cu_seqlens, _, mask = tokens_of(part)
        tokens = np.diff(cu_seqlens)
        kept = kept_counts(tokens, np.diff(np.append(0, np.cumsum(mask != 0))[cu_seqlens]), self._keep)

        rows = first + np.flatnonzero(usable)
        units = self._until(end)
        spots = _spots(rows, kept[usable], units, 1 + len(self._columns))
        sources = [*units]
        failures = _failures(rows, spots, units)
        low, high = np.searchsorted(self._again_rows, (first, end)).tolist()
        for row in self._again_rows[low:high].tolist():
            at = int(np.searchsorted(rows, row))
            if at < len(rows) and rows[at] == row:
                self._retry(row, at, int(kept[row - first]), spots, sources, failures)
        self._open = [places for places in units if places.unit.end > end]
        for places in units:
            if places.unit.end <= end:
                places.finish()
        return _batch(part, usable, tokens, kept, spots, sources, failures)

    def _until(self, end: int) -> list["_Places"]:
        """The units with rows that came just now, or may have some, with their receipts."""
        found = self._open
        while self._next is not None and self._next.first < end:
            unit = self._next
            if unit.first < self._planned:
                raise ShardError(f"unit {unit.unit}: begins at row {unit.first}, within the unit before{_NO_PLAN}")
            receipt = next(self._receipts, None)
            if receipt is None or receipt.unit != unit.unit:
                raise ShardError(
                    f"unit {unit.unit} (rows {unit.first} to {unit.end}) has no commit"
                    + (f"; {receipt.unit} is next" if receipt else "")
                    + "; run the job again"
                )
            found.append(_Places(unit, receipt, self._columns))
            self._planned = unit.end
            self._next = next(self._units, None)
        return found

    def _retry(
        self,
        row: int,
        at: int,
        kept: int,
        spots: "_Spots",
        sources: list["_Places"],
        failures: dict[int, RowFailure],
    ) -> None:
        """Take a row where a retry round has it, if it is not ok before."""
        for places in self._again[row]:
            place, offset, digests, failure = places.take(row, kept)
            if at in failures:
                sources.append(places)
                spots.source[at], spots.place[at], spots.offset[at] = len(sources) - 1, place, offset
                spots.digests[at] = digests
                if failure is None:
                    del failures[at]
                else:
                    failures[at] = failure

    def finish(self) -> None:
        """Raise ShardError unless everything came."""
        late = [*(places.unit for places in self._open), *([self._next] if self._next else [])]
        if late:
            raise ShardError(f"row {self._due} is missing: the plan has rows up to {late[0].end}{_NO_PLAN}")
        for places in self._retried:
            places.finish()
        extra = next(self._receipts, None)
        if extra is not None:
            raise ShardError(f"{layout.commit_key(extra.unit)}: the plan has no such unit; delete it")


class _Places:
    """A unit, whose rows come in order, and its shard."""

    def __init__(self, unit: Unit, receipt: Receipt, columns: Sequence[Column]) -> None:
        states = len(columns)
        if receipt.rows != unit.rows or not unit.rows or len(receipt.digests) != 8 * (1 + states) * unit.rows:
            raise ShardError(
                f"commit of unit {unit.unit}: {receipt.rows} rows and {len(receipt.digests)} bytes of digests, where "
                f"the plan has {unit.rows} rows of {states} states; {_remedy(unit.unit)}"
            )
        self.states_offset: int | None = None
        self.states_stride: int | None = None
        if receipt.format == "raw":
            self.states_stride, nbytes = states_extent(columns, unit.kept)
            self.states_offset = receipt.size - nbytes
        self.unit, self.receipt = unit, receipt
        self.digests = np.frombuffer(receipt.digests, dtype="<u8").reshape(unit.rows, 1 + states)
        self.failures = {failure.row: failure for failure in receipt.failures}
        self.came = self.tokens = 0

    def come(self, rows: int, tokens: int) -> None:
        """Note the next rows, and their stored tokens."""
        self.came += rows
        self.tokens += tokens
        if self.came > self.unit.rows:
            raise ShardError(f"unit {self.unit.unit}: more usable rows than the {self.unit.rows} planned{_NO_PLAN}")

    def take(self, row: int, kept: int) -> tuple[int, int, npt.NDArray[np.uint64], RowFailure | None]:
        """Place, token offset, digests and failure of the next row."""
        place, offset = self.came, self.tokens
        self.come(1, kept)
        return place, offset, self.digests[place], self.failures.pop(row, None)

    def finish(self) -> None:
        """Raise ShardError unless all rows came."""
        unit = self.unit
        if self.came != unit.rows or self.tokens != unit.kept:
            raise ShardError(
                f"unit {unit.unit}: {self.came} usable rows with {self.tokens} stored tokens, {unit.rows} and "
                f"{unit.kept} planned{_NO_PLAN}"
            )
        if self.failures:
            raise ShardError(
                f"commit of unit {unit.unit}: reports rows that it does not hold: {sorted(self.failures)}; "
                f"{_remedy(unit.unit)}"
            )
        if self.states_offset is not None and (self.states_offset <= 0 or self.states_offset % PAGE):
            raise ShardError(
                f"commit of unit {unit.unit}: a raw shard of {unit.kept} stored tokens cannot have {self.receipt.size} "
                f"bytes; {_remedy(unit.unit)}"
            )


class _Spots(NamedTuple):
    """Where usable rows are: number of the source, place and first token there; and digests u64 [rows, 1 + states]."""

    source: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]


def _spots(rows: npt.NDArray[np.int64], kept: npt.NDArray[np.int64], units: Sequence[_Places], width: int) -> _Spots:
    """Find rows, the next of these units, and note that they came."""
    firsts, ends = (np.array([getattr(places.unit, name) for places in units], np.int64) for name in ("first", "end"))
    source = np.searchsorted(firsts, rows, "right") - 1
    inside = source >= 0
    inside[inside] = rows[inside] < ends[source[inside]]
    if not inside.all():
        raise ShardError(f"row {rows[~inside][0]} is usable, but in no unit of the plan{_NO_PLAN}")
    before = np.array([(places.came, places.tokens) for places in units], np.int64).reshape(-1, 2)
    bounds = np.searchsorted(source, np.arange(len(units) + 1))
    tokens = np.append(0, np.cumsum(kept))
    digests = [np.empty((0, width), np.uint64)]
    for places, start, end in zip(units, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        came = places.came
        places.come(end - start, int(tokens[end] - tokens[start]))
        digests.append(places.digests[came : places.came])
    return _Spots(
        source,
        np.arange(len(rows)) - bounds[source] + before[source, 0],
        tokens[:-1] - tokens[bounds[source]] + before[source, 1],
        np.concatenate(digests),
    )


def _failures(rows: npt.NDArray[np.int64], spots: _Spots, units: Sequence[_Places]) -> dict[int, RowFailure]:
    """The failures among rows, by place; those that are left belong to later rows, or to none."""
    found = {}
    for number, places in enumerate(units):
        for row in [*places.failures]:
            at = int(np.searchsorted(rows, row))
            if at < len(rows) and rows[at] == row and spots.source[at] == number:
                found[at] = places.failures.pop(row)
    return found


def _batch(
    part: pa.Table,
    usable: npt.NDArray[np.bool_],
    tokens: npt.NDArray[np.int64],
    kept: npt.NDArray[np.int64],
    spots: _Spots,
    sources: Sequence[_Places],
    failures: Mapping[int, RowFailure],
) -> pa.RecordBatch:
    """Rows of a manifest."""
    failed = np.flatnonzero(usable)[sorted(failures)]
    kind = np.where(usable, 0, 1)
    kind[failed] = 2
    reason = part.column("reason").combine_chunks()
    if failures:
        texts = reason.to_pylist()
        for row, (_, failure) in zip(failed.tolist(), sorted(failures.items()), strict=True):
            texts[row] = f"{failure.status.name.lower()}: {failure.reason}"
        reason = pa.array(texts, pa.string())

    def spread(values: npt.NDArray[Any], type: pa.DataType) -> pa.Array:
        """Values of usable rows; null for the others."""
        wide = np.zeros(len(usable), values.dtype)
        wide[usable] = values
        return pa.array(wide, type, mask=~usable)

    receipts, source = [places.receipt for places in sources], spread(spots.source, pa.int64())
    width = spots.digests.shape[1]
    ends = pa.array(width * np.append(0, np.cumsum(usable)), pa.int32())
    columns = {
        "row": part.column("index"),
        "row_id": part.column("row_id"),
        "source": part.column("source"),
        "n_tokens": pa.array(tokens, pa.int64()),
        "kept": pa.array(kept, pa.int64()),
        "status": pa.array(["ok", "skipped", "failed"]).take(pa.array(kind)),
        "reason": reason,
        "unit": pa.array([receipt.unit for receipt in receipts], pa.string()).take(source),
        "shard": pa.array([receipt.key for receipt in receipts], pa.string()).take(source),
        "format": pa.array([receipt.format for receipt in receipts], pa.string()).take(source),
        "row_in_shard": spread(spots.place, pa.int32()),
        "token_offset": spread(spots.offset, pa.int64()),
        "states_offset": pa.array([places.states_offset for places in sources], pa.int64()).take(source),
        "states_stride": pa.array([places.states_stride for places in sources], pa.int64()).take(source),
        "digests": pa.ListArray.from_arrays(
            ends, pa.array(spots.digests.reshape(-1)), mask=pa.array(~usable), type=pa.list_(pa.uint64())
        ),
    }
    return pa.record_batch(
        [
            column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            for column in (columns[name] for name in MANIFEST_SCHEMA.names)
        ],
        schema=MANIFEST_SCHEMA,
    )


def write_manifest(
    store: Store, identity: RunIdentity, after: int, batches: Iterable[pa.RecordBatch]
) -> tuple[str, Totals] | None:
    """Write the manifest after another one, or find that the latest one says the same.

    A number is taken by whoever read the commits after the manifest before was there, and by nobody else: so a manifest
    knows all that earlier ones do, however slow its driver was.

    Args:
        store: the output.
        identity: of the run.
        after: number of the latest manifest before the commits were listed, see last_manifest.
        batches: all rows, see manifest_parts.

    Returns:
        Its key, and what became of the rows, without nbytes; None if another driver took the number meanwhile, so that
        all has to be read again.

    Raises:
        ShardError: see manifest_parts; nothing is written.
    """
    columns = [[c.name, c.dtype, c.width] for c in stored_columns(identity)]
    metadata = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "ray_extract.columns": json.dumps(columns)}
    with tempfile.TemporaryFile() as file:
        totals = Totals()
        with pq.ParquetWriter(
            file, MANIFEST_SCHEMA.with_metadata(metadata), compression="zstd", use_dictionary=_REPETITIVE
        ) as writer:
            for group in _groups(batches):
                totals += count(group)
                writer.write_table(group)
        totals.check()
        size = file.tell()

        def chunks() -> Iterator[bytes]:
            file.seek(0)
            return iter(lambda: file.read(_CHUNK_BYTES), b"")

        if after >= 0 and _equal(store, layout.manifest_key(after), size, chunks()):
            return layout.manifest_key(after), totals
        key = layout.manifest_key(after + 1)
        try:
            store.put_stream(key, chunks())
        except AlreadyExists:
            # Another driver's; or ours after a lost answer, or one like it.
            if not _equal(store, key, size, chunks()):
                return None
        return key, totals


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Row groups of a manifest."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        group.append(batch)
        if sum(each.num_rows for each in group) >= _GROUP_ROWS:
            yield pa.Table.from_batches(group)
            group = []
    if group:
        yield pa.Table.from_batches(group)


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


def last_manifest(store: Store) -> int:
    """Number of the latest manifest; -1 before the first one."""
    numbers = (layout.manifest_number(item.key) for item in store.list("", recursive=False))
    return max((number for number in numbers if number is not None), default=-1)


def latest_manifest(store: Store) -> str | None:
    """Key of the manifest to read, or None before the first one."""
    number = last_manifest(store)
    return None if number < 0 else layout.manifest_key(number)


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
                f"{MANIFEST_FORMAT!r} {MANIFEST_VERSION!r}; if another release wrote it, run the job again "
                "with this one: it extracts nothing, and writes the manifest anew"
            )
        manifest_columns(table)
        return table.cast(MANIFEST_SCHEMA.with_metadata(table.schema.metadata))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(store, key, error) from None


def failed_rows(store: Store, key: str) -> int:
    """Rows that a manifest has as failed; reads that column only.

    Raises:
        ShardError: it is damaged.
    """
    info = store.head(key)
    try:
        if info is None:
            raise ValueError("it is gone")
        file = StoredFile(store, key, info.size)
        status = pq.ParquetFile(file).read(columns=["status"], use_threads=False).column("status")
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _damaged(store, key, error) from None
    return int(pc.sum(pc.equal(status, "failed")).as_py() or 0)


def _damaged(store: Store, key: str, error: Exception) -> ShardError:
    return ShardError(f"{store.url}/{key}: damaged: {error}; run the job again, which writes the next manifest")


def manifest_columns(manifest: pa.Table) -> tuple[Column, ...]:
    """The states in each shard that a manifest names, in order."""
    return tuple(Column(*entry) for entry in json.loads(manifest.schema.metadata[b"ray_extract.columns"]))


def write_success(store: Store, manifest: str, shards: int, totals: Totals) -> None:
    """Say that the run is complete, in place of what was said of an earlier manifest.

    Args:
        store: the output.
        manifest: key of the latest one.
        shards: committed ones when it was made. A round that changed no row may make more for the same manifest.
        totals: of all rows.
    """
    text = json.dumps({"manifest": manifest, "shards": shards, **totals.to_json()}, indent=2, sort_keys=True).encode()
    if not put_once(store, layout.SUCCESS_KEY, text):
        store.put(layout.SUCCESS_KEY, text, create=False)


def read_success(store: Store) -> dict[str, Any]:
    """What the run said when it was complete, see write_success; empty if it was not, or that is damaged.

    Earlier releases did not say `shards`.
    """
    try:
        found = json.loads(store.get(layout.SUCCESS_KEY))
    except (NotFound, ValueError):
        return {}
    kinds = {"manifest": str, "failed": dict, "shards": int}
    right = isinstance(found, dict) and all(isinstance(found.get(n, 0), kind) for n, kind in kinds.items())
    return found if right else {}


def success_problems(store: Store, manifest: str | None, totals: Totals) -> Iterator[str]:
    """Where _SUCCESS, if it is there, does not say what became of the rows.

    Args:
        store: the output.
        manifest: key of the latest one.
        totals: of all rows; nbytes is not looked at.
    """
    if store.head(layout.SUCCESS_KEY) is not None:
        found = read_success(store)
        if not found:
            yield f"{layout.SUCCESS_KEY}: damaged; run the job again"
        for name, value in {"manifest": manifest, **totals.to_json(), "nbytes": found.get("nbytes")}.items():
            if name in found and found[name] != value:
                yield f"{layout.SUCCESS_KEY}: {name} is {found[name]}, expected {value}; run the job again"


def orphans(store: Store) -> list[ObjectInfo]:
    """Shards that lost: their unit's commit names another attempt, or parts.

    Shards of units without a commit are not among them, since whoever wrote them may be about to commit.

    Raises:
        ShardError: a commit is damaged.
    """
    shards: dict[str, list[ObjectInfo]] = {}
    for item in store.list(layout.SHARDS_PREFIX):
        shards.setdefault(layout.unit_of_shard(item.key), []).append(item)
    return [
        item
        for commit in Ledger(store).commits()
        for item in shards.get(commit.unit, [])
        if isinstance(commit, Split) or item.key != commit.key
    ]
