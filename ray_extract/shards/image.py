"""The image of a shard: every byte's place, known before the engine runs.

An image is a safetensors file (format: https://github.com/huggingface/safetensors#format): an 8-byte little-endian
header length, a JSON header, then tensors without holes. The raw shard is the image as it is; the Parquet shard is
written from it.

With R rows, N prompt tokens, T stored tokens, K states and S kept spans:

    cu_seqlens  i64 [R+1]     row r has prompt tokens cu_seqlens[r] .. cu_seqlens[r+1]
    cu_kept     i64 [R+1]     row r has stored tokens cu_kept[r] .. cu_kept[r+1]
    cu_spans    i64 [R+1]     row r has spans cu_spans[r] .. cu_spans[r+1]
    spans       i64 [S, 2]    stored prompt positions [start, end) of a row, ascending; one whole span for `keep: all`
    row         i64 [R]       index in the prepared data set
    digest      u64 [R, 1+K]  column 0: token ids; then one for each state (capture.digest)
    sumsq       f64 [R, K]    sum of squares
    amax        f32 [R, K]    largest magnitude
    nonfinite   i32 [R, K]    NaN and infinite values
    zero        i32 [R, K]    stored tokens whose state is all zero
    input_ids   i32 [N]
    loss_mask   u8  [N]
    status      u8  [R]       records.RowStatus
    _pad.<i>    u8            so that each state starts on a page of 4096 bytes
    state.<b>   [T, H]        one for each boundary b, ascending; then `state.final`. Stored in fp8: u8 [T, H + 8], the
                              records of capture.fp8
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_extract.capture.arena import TAIL_BYTES
from ray_extract.capture.digest import splitmix64

PAGE = 4096
FORMAT_VERSION = "1"

NUMPY_DTYPES = {
    "I64": np.int64,
    "U64": np.uint64,
    "F64": np.float64,
    "F32": np.float32,
    "I32": np.int32,
    "U8": np.uint8,
}
ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U8": 1}
FP8 = "F8_E4M3"
"""Type of a column of fp8 records."""
TORCH_TO_CODE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3": FP8}
STATE_DTYPES = ("F32", "BF16", "F16", FP8)


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One stored value for each kept token.

    Args:
        name: the tensor's name, `state.<boundary>` or `state.final`.
        dtype: one of STATE_DTYPES.
        width: elements a token, H.
    """

    name: str
    dtype: str
    width: int

    @property
    def token_bytes(self) -> int:
        """Bytes a token."""
        return self.width + TAIL_BYTES if self.dtype == FP8 else self.width * ITEMSIZE[self.dtype]

    @property
    def tensor(self) -> tuple[str, int]:
        """Type and width of the column's tensor in a safetensors file."""
        return ("U8", self.token_bytes) if self.dtype == FP8 else (self.dtype, self.width)


def state_columns(boundaries: Sequence[int], final: bool, dtype: str, hidden: int) -> tuple[Column, ...]:
    """The columns of a capture: boundaries ascending, then the final state."""
    names = [f"state.{b}" for b in boundaries] + (["state.final"] if final else [])
    return tuple(Column(name, dtype, hidden) for name in names)


def states_extent(columns: Sequence[Column], kept: int) -> tuple[int, int]:
    """Bytes from one state of an image to the next, and of all states with the pads between them.

    An image ends with its last state, so its size tells where the first one begins.

    Args:
        columns: alike but for their names, at least one.
        kept: stored tokens, T.
    """
    each = kept * columns[0].token_bytes
    stride = _round_up(each, PAGE)
    return stride, stride * (len(columns) - 1) + each


@dataclasses.dataclass(frozen=True, slots=True)
class RowTable:
    """The rows of one image, flat.

    Args:
        row: i64 [R], index in the prepared data set.
        cu_seqlens, cu_kept, cu_spans: i64 [R+1].
        spans: i64 [S, 2].
        input_ids: i32 [N].
        loss_mask: u8 [N].
    """

    row: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int64]
    cu_kept: npt.NDArray[np.int64]
    cu_spans: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def num_kept(self) -> int:
        """Stored tokens of all rows."""
        return int(self.cu_kept[-1])


def mask_spans(mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Maximal runs of ones in a mask; i64 [S, 2] of [start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (mask != 0).astype(np.int8), [0]))))
    return edges.reshape(-1, 2).astype(np.int64)


def row_digest(input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8]) -> bytes:
    """SHA-256 of a row: ids as i32 little-endian, a zero byte, mask."""
    digest = hashlib.sha256(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(b"\0")
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.digest()


def kept_tokens(loss_mask: npt.NDArray[np.uint8], keep: str) -> int:
    """How many tokens of a row are stored; see kept_spans."""
    tokens, supervised = np.array([len(loss_mask)]), np.array([np.count_nonzero(loss_mask)])
    return int(kept_counts(tokens, supervised, keep)[0])


def kept_counts(tokens: npt.NDArray[np.int64], supervised: npt.NDArray[np.int64], keep: str) -> npt.NDArray[np.int64]:
    """How many tokens of each row are stored, by how many there are and how many of them are supervised."""
    if keep == "supervised":
        return supervised
    return tokens if keep == "all" else np.minimum(tokens, _count(keep))


def kept_spans(input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8], keep: str) -> npt.NDArray[np.int64]:
    """Which tokens of a row are stored.

    Args:
        input_ids, loss_mask: of the row, [n].
        keep: `all`; `supervised`, those whose mask is 1; `last`; or `random:K`, the K positions p with the smallest
            splitmix64(s + p), s being the first eight bytes of row_digest as a little-endian number.

    Returns:
        i64 [S, 2] of positions [start, end), ascending, as few as can be.
    """
    n = len(input_ids)
    if keep == "all":
        return np.array([[0, n]], np.int64)
    if keep == "supervised":
        return mask_spans(loss_mask)
    chosen = np.zeros(n, np.uint8)
    if keep == "last":
        chosen[-1] = 1
    else:
        seed = np.frombuffer(row_digest(input_ids, loss_mask)[:8], "<u8")
        keys = splitmix64(seed + np.arange(n, dtype=np.uint64))
        chosen[np.argsort(keys, kind="stable")[: _count(keep)]] = 1
    return mask_spans(chosen)


def _count(keep: str) -> int:
    """Of `last` or `random:K`."""
    return 1 if keep == "last" else int(keep.removeprefix("random:"))


def row_table(
    rows: Sequence[int],
    input_ids: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[npt.NDArray[np.uint8]],
    keep: str = "all",
) -> RowTable:
    """Flatten rows into a table.

    Args:
        rows: indices in the prepared data set, R of them.
        input_ids: i32 [n_r] for each row, n_r >= 1.
        loss_masks: u8 [n_r] for each row.
        keep: see kept_spans.
    """
    lengths = [len(ids) for ids in input_ids]
    spans = [kept_spans(ids, mask, keep) for ids, mask in zip(input_ids, loss_masks, strict=True)]
    kept = [int((s[:, 1] - s[:, 0]).sum()) for s in spans]
    return RowTable(
        row=np.asarray(rows, dtype=np.int64),
        cu_seqlens=_cumulative(lengths),
        cu_kept=_cumulative(kept),
        cu_spans=_cumulative([len(s) for s in spans]),
        spans=np.concatenate([*spans, np.empty((0, 2), np.int64)]),
        input_ids=np.concatenate([*input_ids, np.empty(0, np.int32)]).astype(np.int32, copy=False),
        loss_mask=np.concatenate([*loss_masks, np.empty(0, np.uint8)]).astype(np.uint8, copy=False),
    )


def _cumulative(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(np.asarray(counts, dtype=np.int64)))).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's place: `offset` counts from the start of the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where everything of one image lies; made by lay_out or read back by parse_layout.

    Args:
        header: the first bytes of the image, header length included.
        tensors: by name, in file order.
        nbytes: the whole image.
        metadata: the header's `__metadata__`.
    """

    header: bytes
    tensors: dict[str, Tensor]
    nbytes: int
    metadata: dict[str, str]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The state columns, in order."""
        return tuple(_column(t) for t in self.tensors.values() if t.name.startswith("state."))

    @property
    def states_offset(self) -> int:
        """Where the first state starts; everything before it, header and pads between states are `other bytes`."""
        return min(self.tensors[c.name].offset for c in self.columns)

    def small(self, buffer: memoryview, name: str) -> npt.NDArray[np.generic]:
        """A writable NumPy view of a tensor that is not a state."""
        t = self.tensors[name]
        raw = np.frombuffer(buffer, dtype=NUMPY_DTYPES[t.dtype], count=t.nbytes // ITEMSIZE[t.dtype], offset=t.offset)
        return raw.reshape(t.shape)

    def state_bytes(self, buffer: memoryview, column: Column) -> npt.NDArray[np.uint8]:
        """The bytes of a state; u8 [T, token_bytes]."""
        t = self.tensors[column.name]
        raw = np.frombuffer(buffer, dtype=np.uint8, count=t.nbytes, offset=t.offset)
        return raw.reshape(t.shape[0], column.token_bytes)

    def other_bytes(self, buffer: memoryview) -> Iterator[memoryview]:
        """Every byte of the image that is not a state, in file order."""
        at = 0
        for column in self.columns:
            t = self.tensors[column.name]
            yield buffer[at : t.offset]
            at = t.offset + t.nbytes
        yield buffer[at : self.nbytes]


def _column(tensor: Tensor) -> Column:
    if tensor.dtype == "U8":
        return Column(tensor.name, FP8, tensor.shape[1] - TAIL_BYTES)
    return Column(tensor.name, tensor.dtype, tensor.shape[1])


def lay_out(table: RowTable, columns: Sequence[Column], metadata: dict[str, str]) -> ImageLayout:
    """Decide every byte's place. Pure; the same arguments give the same image.

    Raises:
        ValueError: a column's bytes a token are not divisible by 8, which the digest and alignment need.
    """
    for column in columns:
        if column.token_bytes % 8:
            raise ValueError(f"{column.name}: {column.token_bytes} bytes a token; must be divisible by 8")
    rows, tokens, kept, states = len(table), len(table.input_ids), table.num_kept, len(columns)
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        ("cu_seqlens", "I64", (rows + 1,)),
        ("cu_kept", "I64", (rows + 1,)),
        ("cu_spans", "I64", (rows + 1,)),
        ("spans", "I64", (len(table.spans), 2)),
        ("row", "I64", (rows,)),
        ("digest", "U64", (rows, 1 + states)),
        ("sumsq", "F64", (rows, states)),
        ("amax", "F32", (rows, states)),
        ("nonfinite", "I32", (rows, states)),
        ("zero", "I32", (rows, states)),
        ("input_ids", "I32", (tokens,)),
        ("loss_mask", "U8", (tokens,)),
        ("status", "U8", (rows,)),
    ]
    metadata = {"format": "ray_extract", "version": FORMAT_VERSION, **metadata}
    # Pads depend on the header's length and the header on the pads' digits. So the header gets a fixed allowance.
    allowance = _round_up(len(json.dumps(metadata)) + 96 * (len(shapes) + 2 * states) + 256, 8)
    body = 8 + allowance
    placed: list[Tensor] = []
    at = body
    for name, dtype, shape in shapes:
        nbytes = int(np.prod(shape)) * ITEMSIZE[dtype]
        placed.append(Tensor(name, dtype, shape, at, nbytes))
        at += nbytes
    for i, column in enumerate(columns):
        pad = _round_up(at, PAGE) - at
        placed.append(Tensor(f"_pad.{i}", "U8", (pad,), at, pad))
        at += pad
        nbytes = kept * column.token_bytes
        dtype, width = column.tensor
        placed.append(Tensor(column.name, dtype, (kept, width), at, nbytes))
        at += nbytes
    tree: dict[str, object] = {"__metadata__": metadata}
    for t in placed:
        tree[t.name] = {
            "dtype": t.dtype,
            "shape": t.shape,
            "data_offsets": [t.offset - body, t.offset + t.nbytes - body],
        }
    text = json.dumps(tree, separators=(",", ":")).encode()
    if len(text) > allowance:
        raise AssertionError(f"header of {len(text)} bytes exceeds its allowance of {allowance}")
    header = allowance.to_bytes(8, "little") + text.ljust(allowance)
    return ImageLayout(header, {t.name: t for t in placed}, at, metadata)


def parse_layout(head: bytes) -> ImageLayout:
    """Read a layout from the first bytes of an image; `head` must hold the whole header.

    Raises:
        ValueError: not one of our images, or of another version.
    """
    length = int.from_bytes(head[:8], "little")
    try:
        tree = json.loads(head[8 : 8 + length])
        metadata = dict(tree.pop("__metadata__"))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError("not a safetensors file with metadata") from None
    if metadata.get("format") != "ray_extract" or metadata.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"format {metadata.get('format')!r:.40} version {metadata.get('version')!r:.40}; this release reads "
            f"ray_extract version {FORMAT_VERSION}"
        )
    body = 8 + length
    found = sorted((_tensor(name, entry, body) for name, entry in tree.items()), key=lambda t: (t.offset, t.nbytes))
    nbytes = max((t.offset + t.nbytes for t in found), default=body)
    return ImageLayout(bytes(head[:body]), {t.name: t for t in found}, nbytes, metadata)


def _tensor(name: str, entry: Any, body: int) -> Tensor:
    """An entry of a header, if its parts are of the right kinds; what they say is not judged here."""
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, end)
    except (KeyError, TypeError, ValueError):
        numbers = (None,)
    if any(type(n) is not int or not 0 <= n < 1 << 60 for n in numbers) or not isinstance(dtype, str):
        raise ValueError(f"its header has no type, shape and place of {name!r:.40}")
    return Tensor(name, dtype, shape, body + start, end - start)


def write_table(layout: ImageLayout, table: RowTable, buffer: memoryview) -> None:
    """Write the header and the row table into an image and zero everything else that is not a state."""
    for part in layout.other_bytes(buffer):
        np.frombuffer(part, dtype=np.uint8)[:] = 0
    buffer[: len(layout.header)] = layout.header
    for name in ("cu_seqlens", "cu_kept", "cu_spans", "spans", "row", "input_ids", "loss_mask"):
        layout.small(buffer, name)[...] = getattr(table, name)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
