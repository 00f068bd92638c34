"""What a unit costs the host before its first token is computed: every byte's place in shared memory.

    python benchmarks/arena.py [--runs 7] [--rows 4096]

    long rows    a unit of 1,730 tokens a row, as conversations have
    short rows   one of 100 tokens a row

A unit is what 4 states of 4096 in bf16 fill half a GiB with, at most --rows rows. What is timed is what the extractor
does: kept spans and row table, layout and header, room in the arena, the table's bytes, and the control page (of an
arena whose states are never touched). `safetensors` makes a file of the same table in memory, without states; a run's
ratio is of the two, and the result is the median of the runs. `share of a core` is at 50,000 tokens a second.
"""

import argparse
import statistics
import sys
import time

import numpy as np
from results import Row, in_turns, write
from safetensors.numpy import save

from ray_extract.capture.arena import TABLES, Arena, ArenaSpec, new_nonce
from ray_extract.shards.image import RowTable, lay_out, row_table, state_columns, write_table

TOKENS_PER_S = 50_000
UNIT_BYTES = 512 << 20
COLUMNS = state_columns((2, 18, 33), True, "BF16", 4096)


def place(arena: Arena, table: RowTable) -> None:
    """Bring a unit's table into the arena, make its extent live, and give it back."""
    layout = lay_out(table, COLUMNS, {"unit": "u00000000"})
    extent = arena.allocate(layout.nbytes)
    write_table(layout, table, extent.buffer)
    states = [layout.tensors[column.name].offset for column in COLUMNS]
    arena.open(extent, len(table), states, {name: layout.tensors[name].offset for name in TABLES})
    arena.retire(extent, lambda: True)
    arena.free(extent)


def measure(case: str, tokens: int, most: int, runs: int) -> list[Row]:
    """One length of rows."""
    rows = min(most, UNIT_BYTES // sum(tokens * column.token_bytes for column in COLUMNS))
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 100_000, tokens, dtype=np.int32) for _ in range(rows)]
    masks = [np.ones(tokens, np.uint8)] * rows
    arena = Arena.create(ArenaSpec(new_nonce(), 2 * UNIT_BYTES, 2, rows, 1, (2, 18, 33), True, "BF16", 4096))

    def ours() -> float:
        began = time.perf_counter()
        place(arena, row_table(range(rows), ids, masks))
        return (time.perf_counter() - began) / rows * 1e6

    def plain() -> float:
        began = time.perf_counter()
        lengths = np.array([len(each) for each in ids])
        save({"lengths": lengths, "input_ids": np.concatenate(ids), "loss_mask": np.concatenate(masks)})
        return (time.perf_counter() - began) / rows * 1e6

    try:
        found = in_turns({"ours": ours, "plain": plain}, runs)
    finally:
        arena.close()
    ratio = statistics.median(a / b for a, b in zip(found["ours"], found["plain"], strict=True))
    mine = statistics.median(found["ours"])
    return [
        Row(case, "rows", rows, "of a unit"),
        Row(case, "placing", round(mine, 2), "µs a row", None, "lower"),
        Row(case, "safetensors", round(statistics.median(found["plain"]), 2), "µs a row", None, "lower"),
        Row(case, "ratio", round(ratio, 1), "of safetensors' time", None, "lower"),
        Row(case, "share of a core", round(mine * TOKENS_PER_S / tokens / 1e4, 2), "%", 1.0, "lower"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4096, help="most of a unit")
    args = parser.parse_args()
    rows = measure("long rows", 1730, args.rows, args.runs) + measure("short rows", 100, args.rows, args.runs)
    print(write("arena", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
