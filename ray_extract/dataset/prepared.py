"""Prepared rows on the store: Parquet parts under `plan/`, and an index of them.

A part has the columns index i64, row_id string, source string, n_tokens i32, kept i32, truncated bool, reason string
(null for usable rows), input_ids list<i32>, loss_mask binary. Lengths are read without the ids, by range requests.
"""

import dataclasses
import hashlib
import io
import itertools
import json
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_extract import layout
from ray_extract.dataset.prepare import PreparedRow, reason_kind, row_id
from ray_extract.errors import AlreadyExists, NotFound, PlanError
from ray_extract.records import Unit
from ray_extract.store import Store, StoredFile

T = TypeVar("T")
R = TypeVar("R")

PART_ROWS = 1 << 16  # reading the lengths of a part takes some requests, however few its rows are
PART_TOKENS = 4 << 20  # 21 MB of ids and masks, which a worker reads for a unit's rows

ROWS_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("n_tokens", pa.int32(), nullable=False),
        pa.field("kept", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("input_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("loss_mask", pa.binary(), nullable=False),
    ]
)
REPLAN = f"delete it and {layout.PLAN_KEY}, and run the job again, which plans the same rows anew"
"""The way out of a damaged plan. Commits stay: the same data set and configuration give the same rows and units."""

_ABOUT = b"ray_extract"  # in the metadata of a part
_READERS = 8  # parts of which some columns are read at once
_LENGTH_COLUMNS = ["index", "n_tokens", "kept", "reason"]


class RowLength(NamedTuple):
    """What planning needs of a row."""

    row: int
    tokens: int
    kept: int
    usable: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """What planning needs of consecutive rows.

    Args:
        row: i64 [R], index of each.
        tokens, kept: i64 [R], prompt tokens, and those whose states are stored.
        usable: bool [R].
    """

    row: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    kept: npt.NDArray[np.int64]
    usable: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Iterable[RowLength]) -> Self:
        """From one record a row."""
        columns = np.array([tuple(row) for row in rows], np.int64).reshape(-1, 4)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3] != 0)

    def where(self, chosen: npt.NDArray[np.bool_] | slice) -> Self:
        """Some of the rows."""
        return type(self)(self.row[chosen], self.tokens[chosen], self.kept[chosen], self.usable[chosen])

    def then(self, other: Self) -> Self:
        """These rows and other ones."""
        return type(self)(
            np.concatenate((self.row, other.row)),
            np.concatenate((self.tokens, other.tokens)),
            np.concatenate((self.kept, other.kept)),
            np.concatenate((self.usable, other.usable)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RowIndex:
    """What the prepared rows are, as a whole.

    Args:
        starts: index of the first row of each part.
        rows: all rows, the skipped ones included.
        usable: rows without a skip reason.
        tokens: prompt tokens of the usable rows.
        kept: tokens of the usable rows whose states are stored.
        truncated: usable rows of which a part was cut off.
        skipped: rows by kind of reason.
        digest: sha256 hex over the ids and reasons of all rows in order; the identity of the data set.
        supervised: supervised tokens of the usable rows.
        unsupervised: usable rows without any.
        histogram: usable rows by length: item b counts those of 2^(b-1) to 2^b - 1 tokens.
        examples: for each kind of reason the first row: source, the reason's details, the rendering if that shows why.
    """

    starts: tuple[int, ...]
    rows: int
    usable: int
    tokens: int
    kept: int
    truncated: int
    skipped: dict[str, int]
    digest: str
    supervised: int = 0
    unsupervised: int = 0
    histogram: tuple[int, ...] = ()
    examples: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {**dataclasses.asdict(self), "starts": list(self.starts), "histogram": list(self.histogram)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Inverse of to_json."""
        tuples = {"starts": tuple(record["starts"]), "histogram": tuple(record.get("histogram", ()))}
        return cls(**{**record, **tuples})


def write_rows(
    store: Store,
    rows: Iterable[PreparedRow],
    part_rows: int = PART_ROWS,
    *,
    keep: str = "all",
    part_tokens: int = PART_TOKENS,
) -> RowIndex:
    """Store rows in parts of at most `part_rows` rows and about `part_tokens` tokens; one part is in memory at a time.

    A part that exists already must hold the same rows (an earlier attempt, or another driver of the same job).

    Args:
        store: where to.
        rows: in order, indices from 0.
        part_rows, part_tokens: size of a part.
        keep: `capture.keep`, for the counts of stored tokens.

    Raises:
        PlanError: the store holds parts of another data set.
        StoreError: writing failed.
    """
    tally = _Tally()
    part: list[PreparedRow] = []
    tokens = 0
    for row in rows:
        if part and (len(part) >= part_rows or tokens + len(row.input_ids) > part_tokens):
            put_table(store, layout.rows_key(len(tally.starts)), rows_table(part, keep))
            tally.starts.append(part[0].index)
            part, tokens = [], 0
        tally.add(row, row.kept(keep))
        part.append(row)
        tokens += len(row.input_ids)
    if part:
        put_table(store, layout.rows_key(len(tally.starts)), rows_table(part, keep))
        tally.starts.append(part[0].index)
    return tally.index()


def put_part(store: Store, key: str, rows: list[PreparedRow], keep: str, identity: str) -> None:
    """Store rows as one object, which says what they are and by what identity they were prepared. As put_table.

    Args:
        store, key: where.
        rows: consecutive ones; at least one.
        keep: `capture.keep`.
        identity: of the preparation.
    """
    tally = _Tally(rows[0].index)
    tally.starts.append(rows[0].index)
    for row in rows:
        tally.add(row, row.kept(keep))
    about = json.dumps({"identity": identity, "rows": tally.index().to_json()})
    put_table(store, key, rows_table(rows, keep).replace_schema_metadata({_ABOUT: about}))


def part_index(store: Store, key: str, identity: str, holds: tuple[int, int] | None = None) -> RowIndex:
    """What put_part said of a part.

    Args:
        store, key: where it is.
        identity: of the preparation that it must be of.
        holds: number of its first row and of its rows, if known.

    Raises:
        PlanError: it is of another preparation, or damaged.
        StoreError: it cannot be read.
    """
    return _about(_open(store, key), key, identity, holds)


def _about(part: Any, key: str, identity: str, holds: tuple[int, int] | None = None) -> RowIndex:
    try:
        tree = json.loads((part.schema_arrow.metadata or {})[_ABOUT])
        found = RowIndex.from_json(tree["rows"])
        if tree["identity"] == identity and holds in (None, (found.starts[0], found.rows)):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise PlanError(
        f"output.url: {key} there was prepared from another data set, configuration or tokenizer, or by another "
        "release of transformers, and its planning did not finish; choose another output.url, or delete its folder "
        "plan/"
    )


def sum_up(store: Store, keys: Iterable[str], identity: str) -> RowIndex:
    """What all rows are, from the parts that hold them in order. Raises as part_index does."""

    def read(key: str) -> tuple[RowIndex, bytes]:
        part = _open(store, key)
        try:
            ids, reasons = (column.to_pylist() for column in part.read(columns=["row_id", "reason"]).columns)
        except pa.ArrowException as error:
            raise _damaged(key, error) from None
        marks = (_mark(name, reason) for name, reason in zip(ids, reasons, strict=True))
        return _about(part, key, identity), b"".join(marks)

    digest = hashlib.sha256()
    total = _Tally().index()
    for index, marks in _in_order(read, keys, _READERS):
        digest.update(marks)
        total = _merged(total, index)
    return dataclasses.replace(total, digest=digest.hexdigest())


def _merged(left: RowIndex, right: RowIndex) -> RowIndex:
    """Of consecutive rows; the digest is left as it is."""
    numbers = ("rows", "usable", "tokens", "kept", "truncated", "supervised", "unsupervised")
    lengths = itertools.zip_longest(left.histogram, right.histogram, fillvalue=0)
    return dataclasses.replace(
        left,
        starts=(*left.starts, *right.starts),
        skipped=dict(sorted((Counter(left.skipped) + Counter(right.skipped)).items())),
        histogram=tuple(map(sum, lengths)),
        examples=dict(sorted({**right.examples, **left.examples}.items())),
        **{name: getattr(left, name) + getattr(right, name) for name in numbers},
    )


def _mark(name: str, reason: str | None) -> bytes:
    """What the digest of all rows has of one."""
    return f"{name}\0{reason or ''}\n".encode()


class _Tally:
    def __init__(self, first: int = 0) -> None:
        self.starts: list[int] = []
        self._first = first
        self._rows = self._usable = self._tokens = self._kept = self._truncated = 0
        self._supervised = self._unsupervised = 0
        self._lengths: Counter[int] = Counter()
        self._skipped: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._digest = hashlib.sha256()

    def add(self, row: PreparedRow, kept: int) -> None:
        if row.index != self._first + self._rows:
            raise ValueError(f"row {row.index} came where row {self._first + self._rows} was due")
        self._rows += 1
        self._digest.update(_mark(row.row_id, row.reason))
        if row.reason is not None:
            kind = reason_kind(row.reason)
            self._skipped[kind] += 1
            if kind not in self._examples:
                rendered = f", rendered as {row.rendered}" if row.rendered else ""
                self._examples[kind] = f"{row.source}{row.reason.removeprefix(kind)}{rendered}"
            return
        supervised = int(np.count_nonzero(row.loss_mask))
        self._usable += 1
        self._tokens += len(row.input_ids)
        self._kept += kept
        self._truncated += row.truncated
        self._supervised += supervised
        self._unsupervised += not supervised
        self._lengths[len(row.input_ids).bit_length()] += 1

    def index(self) -> RowIndex:
        return RowIndex(
            starts=tuple(self.starts),
            rows=self._rows,
            usable=self._usable,
            tokens=self._tokens,
            kept=self._kept,
            truncated=self._truncated,
            skipped=dict(sorted(self._skipped.items())),
            digest=self._digest.hexdigest(),
            supervised=self._supervised,
            unsupervised=self._unsupervised,
            histogram=tuple(self._lengths[bits] for bits in range(max(self._lengths, default=-1) + 1)),
            examples=dict(sorted(self._examples.items())),
        )


def rows_table(rows: list[PreparedRow], keep: str) -> Any:
    """Rows as a part has them."""
    offsets = np.cumsum([0, *(len(row.input_ids) for row in rows)], dtype=np.int32)
    ids = pa.array(np.concatenate([row.input_ids for row in rows]), type=pa.int32())
    columns = [
        pa.array([row.index for row in rows], type=pa.int64()),
        pa.array([row.row_id for row in rows], type=pa.string()),
        pa.array([row.source for row in rows], type=pa.string()),
        pa.array([len(row.input_ids) for row in rows], type=pa.int32()),
        pa.array([row.kept(keep) for row in rows], type=pa.int32()),
        pa.array([row.truncated for row in rows], type=pa.bool_()),
        pa.array([row.reason for row in rows], type=pa.string()),
        pa.ListArray.from_arrays(offsets, ids, type=ROWS_SCHEMA.field("input_ids").type),
        pa.array([row.loss_mask.tobytes() for row in rows], type=pa.binary()),
    ]
    return pa.Table.from_arrays(columns, schema=ROWS_SCHEMA)


def put_table(store: Store, key: str, table: Any) -> None:
    """Store a table as Parquet, create-if-absent; an equal one in its place is as good.

    Raises:
        PlanError: another table is there.
        StoreError: writing failed.
    """
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, write_statistics=False)
    try:
        store.put(key, sink.getbuffer(), create=True)
    except AlreadyExists:
        # Tables, not bytes: another release of pyarrow may write the same rows in other bytes.
        there = read_table(store, key)
        if not there.equals(table) or there.schema.metadata != table.schema.metadata:
            raise PlanError(
                f"output.url: {key} there is from another data set or configuration, whose planning did not finish; "
                "choose another output.url, or delete its folder plan/"
            ) from None


def read_table(store: Store, key: str) -> Any:
    """Read a Parquet object whole.

    Raises:
        PlanError: it is missing, or not Parquet.
        StoreError: it cannot be read.
    """
    try:
        data = store.get(key)
    except NotFound:
        raise PlanError(f"output.url: {key} is missing; {REPLAN}") from None
    try:
        # As in ledger.read_manifest: the threads of pq.read_table can abort a process that ends soon after.
        return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except pa.ArrowException as error:
        raise _damaged(key, error) from None


def _open(store: Store, key: str) -> Any:
    """A Parquet object to read some columns of."""
    info = store.head(key)
    if info is None:
        raise PlanError(f"output.url: {key} is missing; {REPLAN}")
    try:
        return pq.ParquetFile(StoredFile(store, key, info.size))
    except pa.ArrowException as error:
        raise _damaged(key, error) from None


def _damaged(key: str, error: Exception) -> PlanError:
    return PlanError(f"output.url: {key} is damaged ({error}); {REPLAN}")


def _in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """What a function makes of each item, in order; `threads` of them are made ahead."""
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[R]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class PreparedRows:
    """Random access to stored rows; keeps the part read last. Not thread-safe.

    Args:
        store: where they are.
        index: what they are.
        key: names their parts.
    """

    def __init__(self, store: Store, index: RowIndex, key: Callable[[int], str] = layout.rows_key) -> None:
        self._store = store
        self._index = index
        self._key = key
        self._cached: tuple[int, Any] | None = None

    def read(self, first: int, end: int) -> list[PreparedRow]:
        """Rows first <= index < end, the skipped ones included; their ids are checked against their tokens.

        Raises:
            ValueError: outside the data set.
            PlanError: a part is damaged.
            StoreError: a part cannot be read.
        """
        if not 0 <= first <= end <= self._index.rows:
            raise ValueError(f"rows {first} to {end} of {self._index.rows}")
        found: list[PreparedRow] = []
        while first < end:
            part = bisect_right(self._index.starts, first) - 1
            start, stop = self._bounds(part)
            upto = min(end, stop)
            found += _rows_of(self._part(part).slice(first - start, upto - first), self._key(part))
            first = upto
        return found

    def of(self, unit: Unit) -> list[PreparedRow]:
        """The rows of a unit. Raises as read does."""
        if unit.members is not None:
            return [row for index in unit.members for row in self.read(index, index + 1)]
        return [row for row in self.read(unit.first, unit.end) if row.reason is None]

    def parts(self) -> Iterator[Any]:
        """Stream all rows, a stored part at a time, and one read ahead; their ids are checked against their tokens.

        Raises:
            PlanError: a part is damaged.
            StoreError: a part cannot be read.
        """
        for number, part in enumerate(_in_order(self._read_part, range(len(self._index.starts)), 1)):
            _check_ids(part, self._key(number))
            yield part

    def stream(self) -> Iterator[PreparedRow]:
        """All rows in order. Raises as read does."""
        for part in range(len(self._index.starts)):
            yield from self.read(*self._bounds(part))

    def ids(self) -> Iterator[tuple[int, str]]:
        """Stream index and id of the usable rows, without reading their tokens. Raises as lengths does."""
        for table in self._columns(["index", "row_id", "reason"]):
            rows, names, reasons = (column.to_pylist() for column in table.columns)
            yield from ((row, name) for row, name, reason in zip(rows, names, reasons, strict=True) if reason is None)

    def lengths(self) -> Iterator[Lengths]:
        """Stream the lengths of all rows, a part at a time, without reading their ids.

        Raises:
            PlanError: a part is damaged.
            StoreError: a part cannot be read.
        """
        for table in self._columns(_LENGTH_COLUMNS):
            row, tokens, kept = (table.column(name).to_numpy().astype(np.int64) for name in _LENGTH_COLUMNS[:3])
            yield Lengths(row, tokens, kept, table.column("reason").is_null().to_numpy())

    def skipped(self) -> Iterator[tuple[str, str]]:
        """Stream source and reason of all skipped rows, without reading ids. Raises as lengths does."""
        for table in self._columns(["source", "reason"]):
            for source, reason in zip(*(column.to_pylist() for column in table.columns), strict=True):
                if reason is not None:
                    yield source, reason

    def _columns(self, names: list[str]) -> Iterator[Any]:
        def read(part: int) -> Any:
            key = self._key(part)
            try:
                return _open(self._store, key).read(columns=names)
            except pa.ArrowException as error:
                raise _damaged(key, error) from None

        return _in_order(read, range(len(self._index.starts)), _READERS)

    def _bounds(self, part: int) -> tuple[int, int]:
        starts = self._index.starts
        return starts[part], starts[part + 1] if part + 1 < len(starts) else self._index.rows

    def _part(self, part: int) -> Any:
        if self._cached is None or self._cached[0] != part:
            self._cached = None  # so that two parts are never in memory at once
            self._cached = part, self._read_part(part)
        return self._cached[1]

    def _read_part(self, part: int) -> Any:
        key = self._key(part)
        table = read_table(self._store, key).combine_chunks()
        start, stop = self._bounds(part)
        if not table.schema.equals(ROWS_SCHEMA) or not np.array_equal(table.column("index"), np.arange(start, stop)):
            raise PlanError(f"output.url: {key} does not hold rows {start} to {stop - 1}; {REPLAN}")
        return table


class RowTokens(NamedTuple):
    """The tokens of the rows of a part, one after the other.

    Args:
        cu_seqlens: i64 [R+1]; row r has tokens cu_seqlens[r] to cu_seqlens[r+1].
        input_ids: i32 [T].
        loss_mask: u8 [T].
    """

    cu_seqlens: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


def tokens_of(part: Any) -> RowTokens:
    """The tokens of a part, which are not copied. Raises PlanError where ids and masks differ in length."""
    ids, masks = (part.column(name).combine_chunks() for name in ("input_ids", "loss_mask"))
    ends = ids.offsets.to_numpy().astype(np.int64)
    lengths = pc.binary_length(masks).to_numpy()
    if not np.array_equal(np.diff(ends), lengths):
        raise PlanError("output.url: prepared rows have masks of other lengths; choose another output.url")
    if not ends[-1:].any():
        return RowTokens(np.zeros(len(ids) + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))
    start = int(np.frombuffer(masks.buffers()[1], np.int32)[masks.offset])
    loss_mask = np.frombuffer(masks.buffers()[2], np.uint8)[start : start + int(lengths.sum())]
    return RowTokens(ends - ends[0], ids.values.to_numpy()[ends[0] : ends[-1]], loss_mask)


def _check_ids(part: Any, key: str) -> None:
    """As _rows_of does, of all rows of a part at once."""
    cu_seqlens, ids, mask = tokens_of(part)
    tokens, marks = ids.astype("<i4", copy=False).tobytes(), mask.tobytes()  # of these, slices are cheap
    names, skipped = part.column("row_id").to_pylist(), part.column("reason").is_valid().to_pylist()
    for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        if not skipped[row]:
            digest = hashlib.sha256(tokens[4 * start : 4 * end])
            digest.update(b"\0")
            digest.update(marks[start:end])
            if digest.hexdigest()[:32] != names[row]:
                raise _wrong_id(part.column("index")[row].as_py(), key)


def _wrong_id(row: int, key: str) -> PlanError:
    return PlanError(f"output.url: row {row} in {key} is not what its id says; {REPLAN}")


def _rows_of(table: Any, key: str) -> Iterator[PreparedRow]:
    small = table.select(["index", "row_id", "source", "reason", "truncated", "loss_mask"]).to_pylist()
    for values, ids in zip(small, table.column("input_ids"), strict=True):
        row = PreparedRow(
            index=values["index"],
            row_id=values["row_id"],
            source=values["source"],
            input_ids=ids.values.to_numpy(),
            loss_mask=np.frombuffer(values["loss_mask"], dtype=np.uint8),
            reason=values["reason"],
            truncated=values["truncated"],
        )
        if row.reason is None and row_id(row.input_ids, row.loss_mask) != row.row_id:
            raise _wrong_id(row.index, key)
        yield row
