"""Whole shards from a store, into memory or a file: only the states asked for, in chunks, several at once."""

import concurrent.futures
import contextlib
import dataclasses
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ray_extract.errors import NotFound, RayExtractError
from ray_extract.shards.base import Shard
from ray_extract.shards.image import PAGE, ImageLayout
from ray_extract.shards.raw import read_layout, read_ranges
from ray_extract.shards.reader import open_image
from ray_extract.store import Store

CHUNK_BYTES = 16 << 20
CHUNKS_AT_ONCE = 4
"""Four requests on their way fill a fast network, and wait out the first byte of one another."""


class Stopped(RayExtractError):  # noqa: N818 - it never leaves the readers
    """Whoever wanted the shard does not any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be fetched of an object.

    Args:
        size: bytes of the object.
        ranges: [start, end), ascending and apart.
    """

    size: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """What the ranges take of a disk: whole pages, and one for the file system's own notes."""
        return PAGE + sum(-(-(end - start) // PAGE) * PAGE for start, end in self.ranges)


def wanted(store: Store, key: str, format: str, names: Sequence[str]) -> Wanted:
    """What a shard takes to be opened and to read these states: of a raw one two or three small requests tell.

    Raises:
        ConfigError: no state of this name.
        ShardError: the object is truncated or altered.
        StoreError: the store failed.
    """
    if format != "raw":
        info = store.head(key)
        if info is None:
            raise NotFound(f"{store.url}/{key}: no such shard")
        return Wanted(info.size, ((0, info.size),))
    read, size = read_ranges(store, key)
    layout, _ = read_layout(f"{store.url}/{key}", read, size)
    return Wanted(size, raw_ranges(layout, names))


def raw_ranges(layout: ImageLayout, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """The ranges of a raw shard that hold its row table and these states; names that it does not have are left out."""
    states = sorted(
        (layout.tensors[name].offset, layout.tensors[name].offset + layout.tensors[name].nbytes)
        for name in set(names) & {column.name for column in layout.columns}
    )
    found = [(0, layout.states_offset)]
    for start, end in states:
        if start - found[-1][1] < PAGE:  # nothing but a pad between them
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)


def fetch(
    store: Store,
    key: str,
    ranges: Iterable[tuple[int, int]],
    write: Callable[[int, memoryview], None],
    stop: threading.Event | None = None,
) -> None:
    """Read ranges of an object in chunks.

    Args:
        store, key: the object.
        ranges: [start, end).
        write: called with a chunk's place in the object and its bytes, from several threads.
        stop: when set, no further chunk is begun.

    Raises:
        Stopped: it was stopped.
        StoreError: the store failed.
    """

    def one(start: int, length: int) -> None:
        if stop is not None and stop.is_set():
            raise Stopped(key)
        write(start, store.get_view(key, start, length))

    with concurrent.futures.ThreadPoolExecutor(CHUNKS_AT_ONCE) as pool:
        chunks = [
            pool.submit(one, at, min(CHUNK_BYTES, end - at))
            for start, end in ranges
            for at in range(start, end, CHUNK_BYTES)
        ]
        try:
            for chunk in chunks:
                chunk.result()
        finally:
            pool.shutdown(cancel_futures=True)


def fetch_to_memory(
    store: Store, key: str, format: str, names: Sequence[str], stop: threading.Event | None = None
) -> Shard:
    """A shard whose row table and states of these names lie in memory; its other states must not be read.

    Raises:
        See wanted and fetch.
    """
    want = wanted(store, key, format, names)
    # Fresh memory of the system's: what is not written to takes none.
    image = mmap.mmap(-1, want.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        image.madvise(mmap.MADV_HUGEPAGE)  # a fault for every 4 KiB would take as long as the copy
    target = np.frombuffer(image, dtype=np.uint8)

    def write(start: int, chunk: memoryview) -> None:
        np.copyto(target[start : start + len(chunk)], np.frombuffer(chunk, dtype=np.uint8))

    fetch(store, key, want.ranges, write, stop)
    return open_image(f"{store.url}/{key}", format, memoryview(image))
