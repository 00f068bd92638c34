"""The raw shard: the image as it lies in memory, which is a safetensors file."""

import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_extract.errors import NotFound, ShardError
from ray_extract.shards.base import RowStats, Shard, ShardContents, sha256_of
from ray_extract.shards.image import ITEMSIZE, ImageLayout, RowTable, parse_layout
from ray_extract.store import Store, translate

HEAD_BYTES = 64 << 10
# A thousand states take 200 KB; a longer one means that the file is something else.
MAX_HEADER_BYTES = 16 << 20

Read = Callable[[int, int], memoryview]
"""(start, length) -> that many bytes of the object."""

# Type and dimensions of the tensors that every image has.
_KINDS = {
    **dict.fromkeys(("row", "cu_seqlens", "cu_kept", "cu_spans"), ("I64", 1)),
    **dict.fromkeys(("nonfinite", "zero"), ("I32", 2)),
    **dict.fromkeys(("loss_mask", "status"), ("U8", 1)),
    "spans": ("I64", 2),
    "digest": ("U64", 2),
    "sumsq": ("F64", 2),
    "amax": ("F32", 2),
    "input_ids": ("I32", 1),
}
_NOTHING = memoryview(b"")
_TABLE = ("row", "cu_seqlens", "cu_kept", "cu_spans", "spans", "input_ids", "loss_mask")
_STATS = ("sumsq", "amax", "nonfinite", "zero")


def write_raw(store: Store, key: str, buffer: memoryview) -> int:
    """Upload a sealed image as it is, create-if-absent; nothing is copied. Returns the object's size in bytes.

    Raises:
        AlreadyExists: the key is taken.
        StoreError: the store failed.
    """
    store.put(key, buffer)
    return buffer.nbytes


class RawShard(Shard):
    """A raw shard, read by ranges or, from a local folder, by a memory map without a copy.

    Args:
        where: the object's URL and key, for messages.
        layout: where its tensors lie.
        read: reads a range of it.
        head: its first bytes, as far as they were read already.
    """

    def __init__(self, where: str, layout: ImageLayout, read: Read, head: memoryview = _NOTHING) -> None:
        self.layout = layout
        self._read = read
        self._tensors = layout.tensors
        small = head if len(head) >= layout.states_offset else read(0, layout.states_offset)
        tensor: dict[str, Any] = {name: layout.small(small, name) for name in _KINDS}
        contents = ShardContents(
            columns=layout.columns,
            metadata=layout.metadata,
            table=RowTable(**{name: tensor[name] for name in _TABLE}),
            status=tensor["status"],
            digest=tensor["digest"],
            stats=RowStats(**{name: tensor[name] for name in _STATS}),
        )
        super().__init__(where, layout.nbytes, contents)
        for column in self.columns:
            if self._tensors[column.name].shape[0] != self.table.num_kept:
                raise ShardError(
                    f"{where}: {column.name} has {self._tensors[column.name].shape[0]} tokens, "
                    f"cu_kept says {self.table.num_kept}"
                )

    def tokens(self, name: str, start: int, end: int) -> npt.NDArray[np.uint8]:
        """See Shard.tokens. A view of the memory map (private: writing to it does not reach the file) or of a range."""
        width = self.column(name).token_bytes
        part = self._read(self._tensors[name].offset + start * width, (end - start) * width)
        return np.frombuffer(part, dtype=np.uint8).reshape(end - start, width)

    def sha256_other(self) -> str:
        """See Shard.sha256_other. Reads only the bytes it hashes."""
        parts: list[bytes | memoryview] = []
        at = 0
        for column in self.columns:
            state = self._tensors[column.name]
            parts.append(self._read(at, state.offset - at))
            at = state.offset + state.nbytes
        return sha256_of(parts)


def open_raw(store: Store, key: str) -> RawShard:
    """Open a raw shard: one or two range reads remotely, a memory map locally.

    Raises:
        NotFound: no such object.
        ShardError: truncated, altered, or not a raw shard of this release.
        StoreError: the store failed.
    """
    where, path = f"{store.url}/{key}", store.local_path(key)
    return _open(where, *(_map_file(where, path) if path is not None else read_ranges(store, key)))


def open_raw_image(where: str, image: memoryview) -> RawShard:
    """Open a raw shard whose object lies in memory; nothing is copied, and its states are views of `image`.

    Raises:
        ShardError: truncated, altered, or not a raw shard of this release.
    """
    return _open(where, lambda start, length: image[start : start + length], len(image))


def _open(where: str, read: Read, size: int) -> RawShard:
    layout, head = read_layout(where, read, size)
    return RawShard(where, layout, read, head)


def read_layout(where: str, read: Read, size: int) -> tuple[ImageLayout, memoryview]:
    """Read and check a raw shard's layout.

    Args:
        where: the object's URL and key, for messages.
        read: reads a range of it.
        size: its bytes.

    Returns:
        The layout, and the object's first bytes: at least the header.

    Raises:
        ShardError: truncated, altered, or not a raw shard of this release.
        StoreError: the store failed.
    """
    head = read(0, min(size, HEAD_BYTES))
    if len(head) < 8:
        raise ShardError(f"{where}: {size} bytes are no safetensors file")
    end = 8 + int.from_bytes(head[:8], "little")
    if end - 8 > MAX_HEADER_BYTES:
        raise ShardError(f"{where}: not a safetensors file (its header would have {end - 8} bytes)")
    if end > size:
        raise ShardError(f"{where}: truncated: {size} bytes, but its header ends at {end}")
    if end > len(head):
        head = read(0, end)
    try:
        layout = parse_layout(bytes(head[:end]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"{where}: not a raw shard: {error}") from None
    _check_layout(where, layout)
    if layout.nbytes != size:
        what = "truncated" if size < layout.nbytes else "too long"
        raise ShardError(f"{where}: {what}: {size} bytes, its header says {layout.nbytes}")
    return layout, head


def image_shard(layout: ImageLayout, buffer: memoryview) -> RawShard:
    """The image in memory, through the reader's interface; nothing is copied."""
    return RawShard("image in memory", layout, lambda start, length: buffer[start : start + length])


def _map_file(where: str, path: Path) -> tuple[Read, int]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            # Copy-on-write: the tensors made from it are writable as PyTorch wants, and the file stays as it is.
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)) if size else memoryview(b"")
    except FileNotFoundError:
        raise NotFound(f"{where}: no such shard") from None
    except OSError as error:
        raise translate(error, where) from None
    return (lambda start, length: view[start : start + length]), size


def read_ranges(store: Store, key: str) -> tuple[Read, int]:
    """A way to read an object's ranges, and its size. Raises NotFound if there is no such object."""
    where, info = f"{store.url}/{key}", store.head(key)
    if info is None:
        raise NotFound(f"{where}: no such shard")

    def read(start: int, length: int) -> memoryview:
        part = store.get_view(key, start, length)
        if len(part) != length:
            raise ShardError(f"{where}: truncated: {len(part)} of {length} bytes at {start}")
        return part

    return read, info.size


def _check_layout(where: str, layout: ImageLayout) -> None:
    """That the header describes an image; parse_layout believes it. Raises ShardError naming the tensor."""
    at = len(layout.header)
    for t in layout.tensors.values():
        state = t.name.startswith("state.")
        kind = _KINDS.get(t.name, (t.dtype, 2 if state else 1))
        if (t.dtype, len(t.shape)) != kind or t.dtype not in ITEMSIZE:
            raise ShardError(
                f"{where}: {t.name:.40} is {t.dtype:.40}{list(t.shape[:4])}, which this release does not read"
            )
        expected = math.prod(t.shape) * ITEMSIZE[t.dtype]
        if t.nbytes != expected or t.offset != at:
            raise ShardError(
                f"{where}: {t.name:.40} {t.dtype}{list(t.shape)} lies at {t.offset} with {t.nbytes} bytes; "
                f"expected {at} and {expected}"
            )
        at += t.nbytes
    missing = _KINDS.keys() - layout.tensors.keys()
    if missing:
        raise ShardError(f"{where}: no tensor {', '.join(sorted(missing))}")
    if not layout.columns:
        raise ShardError(f"{where}: no states")
    if layout.tensors["spans"].shape[1] != 2:
        raise ShardError(f"{where}: spans is {list(layout.tensors['spans'].shape)}, not pairs")
