"""Images with made-up states for tests, sealed as a run seals them, and a store without files."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ray_extract.capture.digest import digest_ids, digest_tokens
from ray_extract.capture.fp8 import decode, encode
from ray_extract.records import RowStatus
from ray_extract.shards.base import RowStats
from ray_extract.shards.image import (
    FP8,
    Column,
    ImageLayout,
    RowTable,
    lay_out,
    row_table,
    state_columns,
    write_table,
)
from ray_extract.shards.seal import seal
from ray_extract.store import ObjectInfo


@dataclasses.dataclass(frozen=True)
class Image:
    """A sealed image and what it was made from."""

    layout: ImageLayout
    buffer: memoryview
    table: RowTable
    columns: tuple[Column, ...]
    statuses: npt.NDArray[np.uint8]

    def state(self, name: str, row: int) -> npt.NDArray[np.uint8]:
        """Bytes of a row's state, by plain indexing."""
        column = next(c for c in self.columns if c.name == name)
        return self.layout.state_bytes(self.buffer, column)[self.table.cu_kept[row] : self.table.cu_kept[row + 1]]


def make_table(lengths: Iterable[int], keep: str = "all", seed: int = 0, first_row: int = 0) -> RowTable:
    """A table of rows of these lengths with random ids and masks."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 1 << 17, n, dtype=np.int32) for n in lengths]
    masks = [rng.integers(0, 2, n).astype(np.uint8) for n in lengths]
    return row_table(range(first_row, first_row + len(ids)), ids, masks, keep)


def true_digests(
    layout: ImageLayout, buffer: memoryview, table: RowTable, columns: Iterable[Column]
) -> npt.NDArray[np.uint64]:
    """What a correct engine publishes; u64 [R, 1+K]."""
    digests = []
    for row in range(len(table)):
        ids = table.input_ids[table.cu_seqlens[row] : table.cu_seqlens[row + 1]]
        states = [
            digest_tokens(layout.state_bytes(buffer, c)[table.cu_kept[row] : table.cu_kept[row + 1]]) for c in columns
        ]
        digests.append([digest_ids(ids), *states])
    return np.array(digests, dtype=np.uint64)


def true_stats(layout: ImageLayout, buffer: memoryview, table: RowTable, columns: Iterable[Column]) -> RowStats:
    """What an engine publishes beside them; in fp8, one that computed just what is stored."""
    found: list[list[tuple[float, float, int, int]]] = []
    for row in range(len(table)):
        found.append([])
        for column in columns:
            stored = layout.state_bytes(buffer, column)[table.cu_kept[row] : table.cu_kept[row + 1]]
            raw = torch.from_numpy(stored.copy())
            if not len(raw):
                found[-1].append((0.0, 0.0, 0, 0))
                continue
            kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(column.dtype)
            values = raw.view(kind).double() if kind else decode(raw, torch.float32).double()
            bad = ~values.isfinite()
            values[bad] = 0
            zero = (values == 0).all(dim=1) & ~bad.any(dim=1)
            squares = math.fsum(values.square().flatten().tolist())  # the same on every machine
            found[-1].append((squares, float(values.abs().max()), int(bad.sum()), int(zero.sum())))
    sumsq, amax, nonfinite, zero = (np.array([[s[i] for s in r] for r in found]) for i in range(4))
    return RowStats(sumsq, amax.astype(np.float32), nonfinite.astype(np.int32), zero.astype(np.int32))


def seal_image(
    table: RowTable,
    columns: tuple[Column, ...],
    buffer: memoryview,
    layout: ImageLayout,
    failed: Iterable[int] = (),
) -> Image:
    """Seal an image whose states are filled; the rows in `failed` are INCOMPLETE."""
    lengths = np.diff(table.cu_seqlens)
    covered = lengths.copy()
    covered[list(failed)] -= 1
    statuses = seal(
        layout,
        buffer,
        covered=covered,
        n_tokens=lengths,
        digests=true_digests(layout, buffer, table, columns),
        stats=true_stats(layout, buffer, table, columns),
        statuses=np.full(len(table), RowStatus.OK, np.uint8),
    )
    return Image(layout, buffer, table, columns, statuses)


def make_image(
    lengths: Iterable[int],
    *,
    keep: str = "all",
    boundaries: tuple[int, ...] = (1, 3),
    dtype: str = "BF16",
    hidden: int = 16,
    failed: Iterable[int] = (),
    seed: int = 0,
    first_row: int = 0,
) -> Image:
    """A sealed image of rows of these lengths with small random finite states."""
    table = make_table(lengths, keep, seed, first_row)
    columns = state_columns(boundaries, True, dtype, hidden)
    layout = lay_out(table, columns, {"model": "made-up", "unit": "u00000000"})
    buffer = memoryview(bytearray(layout.nbytes))
    write_table(layout, table, buffer)
    rng = np.random.default_rng(seed + 1)
    for column in columns:
        state = layout.state_bytes(buffer, column)
        values = rng.standard_normal((len(state), hidden)).astype(np.float32)
        if dtype == FP8:
            state[:] = encode(torch.from_numpy(values)).numpy()
        elif dtype == "BF16":
            state[:] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(state.shape)
        else:
            state[:] = values.astype({"F32": np.float32, "F16": np.float16}[dtype]).view(np.uint8).reshape(state.shape)
    return seal_image(table, columns, buffer, layout, failed)


class MemoryStore:
    """A store without local files, which counts what is read."""

    url = "memory://test"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reads: list[tuple[str, int, int]] = []

    def put(self, key: str, data: bytes | memoryview, create: bool = True) -> None:
        """Keep the bytes."""
        assert not (create and key in self.objects)
        self.objects[key] = bytes(data)

    def put_stream(self, key: str, chunks: Iterable[bytes], create: bool = True) -> int:
        """Keep the bytes; their number."""
        self.put(key, b"".join(chunks), create)
        return len(self.objects[key])

    def get(self, key: str) -> bytes:
        """All bytes."""
        return self.objects[key]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """A range, counted in `reads`."""
        self.reads.append((key, start, length))
        return self.objects[key][start : start + length]

    def get_view(self, key: str, start: int, length: int) -> memoryview:
        """The same as a view."""
        return memoryview(self.get_range(key, start, length))

    def head(self, key: str) -> ObjectInfo | None:
        """The size, or None."""
        return ObjectInfo(key, len(self.objects[key])) if key in self.objects else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects under a prefix."""
        return (ObjectInfo(k, len(v)) for k, v in sorted(self.objects.items()) if k.startswith(prefix))

    def delete(self, key: str) -> None:
        """Forget an object."""
        del self.objects[key]

    def local_path(self, key: str) -> Path | None:
        """There are no files here."""
        return None
