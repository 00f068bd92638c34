"""The header of a safetensors file (https://github.com/huggingface/safetensors#format), written and read.

For files whose tensors are too large to hold in memory, or that are objects on a store: the library has neither.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray_extract.errors import NotFound, ShardError
from ray_extract.store import Store

WRITTEN_AGAIN = "delete it and run the same command, which writes it again"
"""What to do about a damaged one of the objects that stored_header reads."""

MAX_HEADER_BYTES = 100_000_000
"""What the format allows."""

ITEMSIZE = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}

Read = Callable[[int, int], bytes]
"""(start, length) -> that many bytes of the file, or fewer at its end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies; `offset` counts from the start of the file, `dtype` is safetensors' code."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """A file's header.

    Args:
        text: its first bytes, as far as the first tensor.
        tensors: by name, in the order of the file.
        metadata: the header's `__metadata__`.
        nbytes: of the whole file.
    """

    text: bytes
    tensors: dict[str, Place]
    metadata: dict[str, str]
    nbytes: int


def make_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> Header:
    """Lay out a file. The same arguments give the same bytes.

    Args:
        tensors: name, safetensors code and shape of each, in the order of the file; those of wider types first, so that
            each is aligned.
        metadata: to store along.
    """
    tree: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        tree[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(tree, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    whole = len(text).to_bytes(8, "little") + text
    return _header(whole, tree)


def parse_header(read: Read, size: int) -> Header:
    """Read a header.

    Args:
        read: reads a range of the file.
        size: of the file.

    Raises:
        ValueError: not a whole safetensors file.
    """
    prefix = read(0, 8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
        raise ValueError("not a whole safetensors file (an unfinished download, or a Git LFS pointer?)")
    text = read(8, length)
    try:
        found = _header(prefix + text, json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("its header is not that of a safetensors file") from None
    if found.nbytes != size:
        raise ValueError(f"{size} bytes, and its header says {found.nbytes}")
    return found


def stored_header(store: Store, key: str, format: str, version: str) -> Header:
    """The header of an object that says what it is.

    Args:
        store, key: the object.
        format, version: what its metadata must say.

    Raises:
        NotFound: no such object.
        ShardError: it is damaged, something else, or of another release.
        StoreError: the store failed.
    """
    info = store.head(key)
    if info is None:
        raise NotFound(f"{store.url}/{key}: no such object")
    size = info.size
    try:
        header = parse_header(lambda start, length: store.get_range(key, start, min(length, size - start)), size)
    except ValueError as error:
        raise ShardError(f"{store.url}/{key}: damaged: {error}; {WRITTEN_AGAIN}") from None
    found = header.metadata.get("format"), header.metadata.get("version")
    if found != (format, version):
        raise ShardError(
            f"{store.url}/{key}: format {found[0]!r} version {found[1]!r}; this release reads {format!r} {version!r}"
        )
    return header


def _header(text: bytes, tree: Mapping[str, Any]) -> Header:
    tensors: dict[str, Place] = {}
    entries = [(name, entry) for name, entry in tree.items() if name != "__metadata__"]
    for name, entry in sorted(entries, key=lambda item: tuple(item[1]["data_offsets"])):
        start, end = entry["data_offsets"]
        place = Place(name, entry["dtype"], tuple(entry["shape"]), len(text) + start, end - start)
        if place.dtype in ITEMSIZE and place.nbytes != math.prod(place.shape) * ITEMSIZE[place.dtype]:
            raise ValueError(f"{name} has {place.nbytes} bytes")
        tensors[name] = place
    nbytes = max((t.offset + t.nbytes for t in tensors.values()), default=len(text))
    return Header(text, tensors, dict(tree.get("__metadata__") or {}), nbytes)
