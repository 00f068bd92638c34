"""Small arenas outside /dev/shm with open images of random rows."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import images
import numpy as np
import numpy.typing as npt

from ray_extract.capture.arena import TABLES, Arena, ArenaSpec, Extent, new_nonce
from ray_extract.layout import RequestId
from ray_extract.shards.image import FP8, ImageLayout, RowTable, lay_out, state_columns, write_table

HIDDEN, BOUNDARIES, MAX_ROWS, SLOTS = 8, (2, 5), 6, 3
STATES = len(BOUNDARIES) + 1


@dataclasses.dataclass
class Live:
    """An open image, as its owner knows it."""

    extent: Extent
    layout: ImageLayout
    table: RowTable

    def rid(self, nonce: str, row: int) -> str:
        return str(RequestId(nonce, self.extent.slot, self.extent.generation, row, 0))

    def ids(self, row: int) -> npt.NDArray[np.int32]:
        return self.table.input_ids[self.table.cu_seqlens[row] : self.table.cu_seqlens[row + 1]]


def make_arena(root: Path, dtype: str = "F32", writers: int = 1, fp8: bool = False, ranks: int = 1) -> Arena:
    return Arena.create(
        ArenaSpec(new_nonce(), 1 << 18, SLOTS, MAX_ROWS, writers, BOUNDARIES, True, dtype, HIDDEN, fp8, ranks), root
    )


def open_image(arena: Arena, lengths: Sequence[int], keep: str = "all", seed: int = 0) -> Live:
    table = images.make_table(lengths, keep, seed)
    layout = lay_out(table, state_columns(BOUNDARIES, True, FP8 if arena.spec.fp8 else arena.spec.dtype, HIDDEN), {})
    extent = arena.allocate(layout.nbytes)
    write_table(layout, table, extent.buffer)
    states = [layout.tensors[c.name].offset for c in layout.columns]
    arena.open(extent, len(table), states, {name: layout.tensors[name].offset for name in TABLES})
    return Live(extent, layout, table)
