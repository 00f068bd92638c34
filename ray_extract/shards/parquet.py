"""The Parquet shard: one line for each piece of a row, written from the image without a copy of it.

Writing or reading a value of Parquet takes its size in memory more than twice over, so a row is stored in pieces of
at most PIECE_BYTES of states. Columns, with n prompt tokens, S spans and K states:

    row            int64         index in the prepared data set
    row_in_shard   int32         place of the row in this shard
    piece          int32         0, 1, ... within the row
    start          int32         place of the piece's first token among the row's stored tokens
    n_tokens       int32         n
    status         uint8         records.RowStatus
    input_ids      list<int32>   [n]; this and the next seven are null but in piece 0
    loss_mask      binary        u8 [n]
    spans          list<int64>   [2 S]: start, end, start, end ...
    digest         list<uint64>  [1+K]
    sumsq, amax, nonfinite, zero   list<float64, float32, int32, int32>  [K]
    state.<b>      large_binary  [tokens of the piece, H] in the state's dtype, little-endian

The schema's metadata holds the image's metadata (`format`, `version` ...), `dtype` and `hidden` of the states, and for
readers of this package `ray_extract.columns` (JSON [[name, dtype, width], ...]) and `ray_extract.metadata` (JSON).
"""

import collections
import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_extract.errors import NotFound, ShardError
from ray_extract.shards.base import RowStats, Shard, ShardContents, sha256_of
from ray_extract.shards.image import FORMAT_VERSION, Column, ImageLayout, RowTable, lay_out, write_table
from ray_extract.store import Store, StoredFile

I64 = npt.NDArray[np.int64]
PIECE_BYTES = 32 << 20
"""Most bytes of all states of a piece, and of a row group.

Measured beside the image: 75 MiB with four states, 176 MiB with one (pyarrow holds a value several times); 64 MiB here
would make that 274, and the store has 64 MiB of its own.
"""

_STATS = (("sumsq", pa.float64()), ("amax", pa.float32()), ("nonfinite", pa.int32()), ("zero", pa.int32()))
_ROW_FIELDS = (
    ("row", pa.int64()),
    ("row_in_shard", pa.int32()),
    ("piece", pa.int32()),
    ("start", pa.int32()),
    ("n_tokens", pa.int32()),
    ("status", pa.uint8()),
    ("input_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.binary()),
    ("spans", pa.list_(pa.int64())),
    ("digest", pa.list_(pa.uint64())),
    *((name, pa.list_(kind)) for name, kind in _STATS),
)
_SMALL = (
    *("row", "status", "cu_seqlens", "cu_kept", "cu_spans", "spans", "input_ids", "loss_mask", "digest"),
    *(name for name, _ in _STATS),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """The lines of a Parquet shard, in order; each array is i64 [P].

    Args:
        row: place in the shard.
        piece: 0, 1, ... within the row.
        start, end: stored tokens of the row, [start, end).
    """

    row: I64
    piece: I64
    start: I64
    end: I64


def cut_pieces(kept: I64, token_bytes: int, piece_bytes: int) -> Pieces:
    """Cut rows into pieces; a row without stored tokens is one empty piece.

    Args:
        kept: i64 [R], stored tokens.
        token_bytes: bytes of all states of a token.
        piece_bytes: most bytes of a piece; one token is allowed to exceed it.
    """
    tokens = max(1, piece_bytes // token_bytes)
    counts = np.maximum(1, -(-kept // tokens))
    row = np.repeat(np.arange(len(kept), dtype=np.int64), counts)
    piece = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return Pieces(row, piece, piece * tokens, np.minimum((piece + 1) * tokens, kept[row]))


def group_pieces(nbytes: I64, group_bytes: int) -> list[tuple[int, int]]:
    """Row groups: consecutive ranges [first, end) of pieces of at most `group_bytes` together, or of a single piece."""
    groups: list[tuple[int, int]] = []
    first, total = 0, 0
    for i, size in enumerate(nbytes.tolist()):
        if i > first and total + size > group_bytes:
            groups.append((first, i))
            first, total = i, 0
        total += size
    return [*groups, (first, len(nbytes))] if len(nbytes) else groups


def write_parquet(
    store: Store, key: str, layout: ImageLayout, buffer: memoryview, *, piece_bytes: int = PIECE_BYTES
) -> int:
    """Stream a sealed image to the store as Parquet, create-if-absent. Returns the object's size in bytes.

    Takes up to five times `piece_bytes` of memory beside the image and what the store buffers.

    Raises:
        AlreadyExists: the key is taken.
        StoreError: the store failed.
    """
    return store.put_stream(key, encode(layout, buffer, piece_bytes=piece_bytes))


def encode(layout: ImageLayout, buffer: memoryview, *, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The Parquet file of a sealed image, a row group at a time, in chunks of bytes."""
    columns = layout.columns
    kept, seqlens = _cumulative(layout, buffer, "cu_kept"), _cumulative(layout, buffer, "cu_seqlens")
    token_bytes = sum(c.token_bytes for c in columns)
    pieces = cut_pieces(np.diff(kept), token_bytes, piece_bytes)
    ids_bytes = np.where(pieces.piece == 0, np.diff(seqlens)[pieces.row] * 5, 0)
    sink = _Sink()
    schema = _schema(layout)
    with pq.ParquetWriter(
        sink,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_batch_size=1,  # with the default of 1024, this many values are in memory at once
    ) as writer:
        for first, end in group_pieces((pieces.end - pieces.start) * token_bytes + ids_bytes, piece_bytes):
            writer.write_table(_table(layout, buffer, schema, pieces, first, end), row_group_size=end - first)
            yield from sink.drain()
    yield from sink.drain()


class _Sink(io.RawIOBase):
    """What pyarrow writes to: keeps the chunks until they are drained."""

    def __init__(self) -> None:
        self._chunks: collections.deque[bytes] = collections.deque()
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        chunk = bytes(data)  # pyarrow hands over bytes, for which this is no copy
        self._chunks.append(chunk)
        self._at += len(chunk)
        return len(chunk)

    def drain(self) -> Iterator[bytes]:
        while self._chunks:
            yield self._chunks.popleft()


def _cumulative(layout: ImageLayout, buffer: memoryview, name: str) -> I64:
    return layout.small(buffer, name).astype(np.int64, copy=False)


def _schema(layout: ImageLayout) -> pa.Schema:
    columns = layout.columns
    metadata = {
        "dtype": columns[0].dtype,
        "hidden": str(columns[0].width),
        **layout.metadata,
        "ray_extract.columns": json.dumps([[c.name, c.dtype, c.width] for c in columns]),
        "ray_extract.metadata": json.dumps(layout.metadata),
    }
    states = [(c.name, pa.large_binary()) for c in columns]
    return pa.schema([*_ROW_FIELDS, *states], metadata=metadata)


def _table(
    layout: ImageLayout, buffer: memoryview, schema: pa.Schema, pieces: Pieces, first: int, end: int
) -> pa.Table:
    """Lines first .. end as an Arrow table over the image."""
    row, piece = pieces.row[first:end], pieces.piece[first:end]
    heads = row[piece == 0]
    r0, r1 = (int(heads[0]), int(heads[-1]) + 1) if len(heads) else (0, 0)
    small: dict[str, npt.NDArray[Any]] = {name: layout.small(buffer, name) for name in _SMALL}
    seqlens, spans, kept = small["cu_seqlens"], small["cu_spans"], small["cu_kept"]
    ids = small["input_ids"][int(seqlens[r0]) : int(seqlens[r1])]
    mask = small["loss_mask"][int(seqlens[r0]) : int(seqlens[r1])]

    def lists(name: str, lengths: npt.NDArray[Any], values: npt.NDArray[Any]) -> pa.Array:
        """Values of the rows r0 .. r1, as a list where a row starts and null elsewhere."""
        sizes = np.zeros(len(row), np.int64)
        sizes[piece == 0] = lengths
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        kind = schema.field(name).type
        absent = pa.array(piece != 0)
        if kind == pa.binary():
            present = pa.array(piece == 0).buffers()[1]
            return pa.Array.from_buffers(kind, len(row), [present, pa.py_buffer(offsets), pa.py_buffer(values)])
        return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1), kind.value_type), type=kind, mask=absent)

    states = len(layout.columns)
    arrays: list[pa.Array] = [
        pa.array(small["row"][row]),
        pa.array(row.astype(np.int32)),
        pa.array(piece.astype(np.int32)),
        pa.array(pieces.start[first:end].astype(np.int32)),
        pa.array(np.diff(seqlens)[row].astype(np.int32)),
        pa.array(small["status"][row]),
        lists("input_ids", np.diff(seqlens)[r0:r1], ids),
        lists("loss_mask", np.diff(seqlens)[r0:r1], mask),
        lists("spans", 2 * np.diff(spans)[r0:r1], small["spans"][int(spans[r0]) : int(spans[r1])]),
        lists("digest", np.full(r1 - r0, 1 + states), small["digest"][r0:r1]),
        *(lists(name, np.full(r1 - r0, states), small[name][r0:r1]) for name, _ in _STATS),
    ]
    # Pieces follow each other in the image, so a row group's states are one range of each column's bytes.
    begins = kept[row] + pieces.start[first:end]
    tokens = np.append(begins, int(kept[row[-1]]) + int(pieces.end[end - 1])).astype(np.int64)
    for column in layout.columns:
        stored = layout.state_bytes(buffer, column)[int(tokens[0]) : int(tokens[-1])]
        offsets = pa.py_buffer((tokens - tokens[0]) * column.token_bytes)
        arrays.append(
            pa.Array.from_buffers(pa.large_binary(), len(row), [None, offsets, pa.py_buffer(stored.reshape(-1))])
        )
    return pa.Table.from_arrays(arrays, schema=schema)


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Where the P lines of a shard are.

    Args:
        begin: i64 [P+1], first stored token of the shard in each, and the end.
        group: i64 [P], row group.
        line: i64 [P], place in the row group.
    """

    begin: I64
    group: I64
    line: I64


class ParquetShard(Shard):
    """A Parquet shard. Holds the states that it decoded last: one row group, as far as asked for.

    Random reads of rows much smaller than a row group decode the whole group each time; read in order, or use raw.

    Args:
        where: the object's URL and key, for messages.
        size: bytes of the object.
        file: the open file.
        contents: see Shard.
        lines: where its pieces are.
    """

    def __init__(self, where: str, size: int, file: pq.ParquetFile, contents: ShardContents, lines: Lines) -> None:
        super().__init__(where, size, contents)
        self._file = file
        self._lines = lines
        self._group = -1
        self._decoded: dict[str, pa.ChunkedArray] = {}

    def tokens(self, name: str, start: int, end: int) -> npt.NDArray[np.uint8]:
        """See Shard.tokens. Read-only and without a copy of what was decoded, unless it takes several pieces."""
        width = self.column(name).token_bytes
        first, last = (int(i) for i in np.searchsorted(self._lines.begin, (start, end - 1), side="right") - 1)
        parts = [self._piece(name, i, width) for i in range(first, last + 1)] if start < end else []
        if len(parts) == 1:
            at = start - int(self._lines.begin[first])
            return parts[0][at : at + end - start]
        whole = np.empty((end - start, width), np.uint8)
        for i, part in enumerate(parts, first):
            begin = int(self._lines.begin[i])
            a, b = max(start, begin), min(end, begin + len(part))
            whole[a - start : b - start] = part[a - begin : b - begin]
        return whole

    def _piece(self, name: str, i: int, width: int) -> npt.NDArray[np.uint8]:
        """A state of line i of the shard; u8 [tokens, width]."""
        lines = self._lines
        tokens = int(lines.begin[i + 1] - lines.begin[i])
        with _explained(self.where):
            value = self._column(int(lines.group[i]), name)[int(lines.line[i])].as_buffer()
        nbytes = 0 if value is None else value.size
        if nbytes != tokens * width:
            raise ShardError(f"{self.where}: line {i}: {name} has {nbytes} bytes, expected {tokens * width}")
        return np.frombuffer(value, dtype=np.uint8).reshape(tokens, width)

    def sha256_other(self) -> str:
        """See Shard.sha256_other. The image's layout is a pure function of what Parquet keeps, so it is made again."""
        layout = lay_out(self.table, self.columns, self.metadata)
        # Beyond the first state an image has only states and pads of zeros.
        small = memoryview(bytearray(layout.states_offset))
        write_table(layout, self.table, small)
        layout.small(small, "digest")[...] = self.digest
        layout.small(small, "status")[...] = self.status
        for name, _ in _STATS:
            layout.small(small, name)[...] = getattr(self.stats, name)
        return sha256_of([small, *(bytes(layout.tensors[f"_pad.{k}"].nbytes) for k in range(1, len(self.columns)))])

    def _column(self, group: int, name: str) -> pa.ChunkedArray:
        if group != self._group:
            self._group, self._decoded = group, {}
        if name not in self._decoded:
            self._decoded[name] = self._file.read_row_group(group, columns=[name], use_threads=False).column(0)
        return self._decoded[name]


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn what pyarrow raises for a bad file into ShardError; our own errors pass as they are."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ShardError(f"{where}: not a whole Parquet shard: {first}") from None


def open_parquet(store: Store, key: str) -> ParquetShard:
    """Open a Parquet shard: reads its footer and everything but the states.

    Raises:
        NotFound: no such object.
        ShardError: truncated, altered, or not a Parquet shard of this release.
        StoreError: the store failed.
    """
    where, path = f"{store.url}/{key}", store.local_path(key)
    with _explained(where):
        if path is not None:
            if not path.exists():
                raise NotFound(f"{where}: no such shard")
            size = path.stat().st_size
            file = pq.ParquetFile(path, memory_map=True)
        else:
            info = store.head(key)
            if info is None:
                raise NotFound(f"{where}: no such shard")
            size = info.size
            # pre_buffer merges the small columns of a row group into one read.
            file = pq.ParquetFile(StoredFile(store, key, size), pre_buffer=True)
        return _open(where, size, file)


def open_parquet_image(where: str, image: memoryview) -> ParquetShard:
    """Open a Parquet shard whose object lies in memory; nothing is copied.

    Raises:
        ShardError: truncated, altered, or not a Parquet shard of this release.
    """
    with _explained(where):
        return _open(where, len(image), pq.ParquetFile(pa.BufferReader(pa.py_buffer(image))))


def _open(where: str, size: int, file: pq.ParquetFile) -> ParquetShard:
    with _explained(where):
        columns, metadata = _parse_schema(where, file.schema_arrow)
        names = [name for name, _ in _ROW_FIELDS]
        table = file.read(columns=names, use_threads=False)
        contents, lines = _contents(columns, metadata, table, _group_rows(file.metadata))
    return ParquetShard(where, size, file, contents, lines)


def _parse_schema(where: str, schema: pa.Schema) -> tuple[tuple[Column, ...], dict[str, str]]:
    stored = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    if stored.get("format") != "ray_extract" or stored.get("version") != FORMAT_VERSION:
        raise ShardError(
            f"{where}: format {stored.get('format')!r} version {stored.get('version')!r}; this release reads "
            f"ray_extract version {FORMAT_VERSION}"
        )
    columns = tuple(Column(*entry) for entry in json.loads(stored["ray_extract.columns"]))
    for name, kind in (*_ROW_FIELDS, *((c.name, pa.large_binary()) for c in columns)):
        if name not in schema.names or schema.field(name).type != kind:
            found = schema.field(name).type if name in schema.names else "missing"
            raise ShardError(f"{where}: column {name} is {found}, expected {kind}")
    metadata = json.loads(stored["ray_extract.metadata"])
    return columns, {str(name): str(value) for name, value in metadata.items()}


def _group_rows(metadata: pq.FileMetaData) -> list[int]:
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def _contents(
    columns: tuple[Column, ...], metadata: dict[str, str], table: pa.Table, group_rows: Sequence[int]
) -> tuple[ShardContents, Lines]:
    """Rows from lines. Raises ValueError when the lines are no rows in order."""

    def flat(name: str) -> npt.NDArray[Any]:
        return np.asarray(table.column(name).to_numpy())

    row, piece, start = flat("row_in_shard"), flat("piece"), flat("start")
    head = piece == 0
    number = np.cumsum(head) - 1
    follows = np.concatenate(([False], np.diff(piece) == 1))
    if not (np.array_equal(number, row) and (head | follows).all() and (start[head] == 0).all()):
        raise ValueError("its lines are not the pieces of rows in order")
    heads = table.filter(pa.array(head))
    if any(column.null_count for column in heads.columns):
        raise ValueError("it has nulls where values belong")

    def lists(name: str) -> tuple[npt.NDArray[Any], I64]:
        values = heads.column(name)
        lengths = pc.list_value_length(values).to_numpy()
        return pc.list_flatten(values).to_numpy(), np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    def matrix(name: str, width: int) -> npt.NDArray[Any]:
        return lists(name)[0].reshape(len(heads), width)

    input_ids, cu_seqlens = lists("input_ids")
    spans, cu_spans = lists("spans")
    spans, cu_spans = spans.reshape(-1, 2), cu_spans // 2
    kept = np.concatenate(([0], np.cumsum(np.diff(spans, axis=1))))[cu_spans]
    rows = RowTable(
        row=heads.column("row").to_numpy(),
        cu_seqlens=cu_seqlens,
        cu_kept=kept.astype(np.int64),
        cu_spans=cu_spans,
        spans=spans,
        input_ids=input_ids,
        loss_mask=np.frombuffer(b"".join(heads.column("loss_mask").to_pylist()), np.uint8),
    )
    states = len(columns)
    contents = ShardContents(
        columns=columns,
        metadata=metadata,
        table=rows,
        status=heads.column("status").to_numpy(),
        digest=matrix("digest", 1 + states),
        stats=RowStats(**{name: matrix(name, states) for name, _ in _STATS}),
    )
    place = np.arange(len(row), dtype=np.int64)
    sizes = np.asarray(group_rows, dtype=np.int64)
    lines = Lines(
        begin=np.append(rows.cu_kept[row] + start, rows.cu_kept[-1]).astype(np.int64),
        group=np.repeat(np.arange(len(sizes)), sizes),
        line=place - np.repeat(np.cumsum(sizes) - sizes, sizes),
    )
    if (np.diff(lines.begin) < 0).any():
        raise ValueError("its pieces are not in order")
    return contents, lines
