"""What planning costs where a data set has very many rows.

    python benchmarks/plan.py [--rows 100000000] [--stored 4000000]

    units    lengths into units, the lengths being made on the spot
    stored   the same with the lengths of prepared rows on a local disk

Each case is a process of its own, whose peak of resident memory is shown with its rate. A row has 100 tokens on
average, a token 8 KiB of states.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from results import Row, verdict, write

from ray_extract.dataset.prepared import PART_ROWS, PART_TOKENS, ROWS_SCHEMA, Lengths, PreparedRows, RowIndex, put_table
from ray_extract.layout import rows_key
from ray_extract.plan import plan_units, write_units
from ray_extract.store import Store, open_store

RATE_GOAL = 1e6
MEMORY_GOAL = 1024.0  # MiB, of 100 million rows
LIMITS = {"token_bytes": 8192, "shard_bytes": 1 << 30, "max_rows": 8192}
TOKENS = 199  # most of a row
BLOCK = min(PART_ROWS, PART_TOKENS // 100)
NOTE = "Taken on a machine of two cores that ran other tests meanwhile: each core had several processes to run."


def made(rows: int) -> Iterator[Lengths]:
    """Lengths of rows, one in ten of them skipped."""
    rng = np.random.default_rng(0)
    for first in range(0, rows, BLOCK):
        count = min(BLOCK, rows - first)
        tokens = rng.integers(1, TOKENS, count, endpoint=True)
        yield Lengths(np.arange(first, first + count), tokens, tokens, rng.random(count) > 0.1)


def make_rows(store: Store, rows: int) -> None:
    """Prepared rows on a store, without going through a tokenizer; ids are one a row, since nobody reads them here."""
    for number, block in enumerate(made(rows)):
        count = len(block.row)
        columns = {
            "index": block.row,
            "row_id": pa.repeat("0" * 32, count),
            "source": pa.repeat("rows.jsonl:1", count),
            "n_tokens": block.tokens.astype(np.int32),
            "kept": block.kept.astype(np.int32),
            "truncated": pa.repeat(pa.scalar(False), count),
            "reason": pa.array(np.where(block.usable, None, "overlong: 9 > 8 tokens"), pa.string()),
            "input_ids": pa.ListArray.from_arrays(
                np.arange(count + 1, dtype=np.int32),
                pa.repeat(pa.scalar(1, pa.int32()), count),
                type=ROWS_SCHEMA.field("input_ids").type,
            ),
            "loss_mask": pa.repeat(pa.scalar(b"\1"), count),
        }
        put_table(store, rows_key(number), pa.table(columns, schema=ROWS_SCHEMA))


def phase(case: str, folder: Path, rows: int) -> None:
    """Run a case in this process, and print its seconds, MiB and units."""
    store = open_store(str(folder))
    lengths = made(rows)
    if case == "stored":
        starts = tuple(range(0, rows, BLOCK))
        lengths = PreparedRows(store, RowIndex(starts, rows, 0, 0, 0, 0, {}, "")).lengths()
    began = time.monotonic()
    units = list(plan_units(lengths, **LIMITS))
    write_units(store, units)
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "mib": peak, "units": len(units)}))


def measured(case: str, folder: Path, rows: int) -> list[Row]:
    """The figures of a case in a process of its own."""
    command = [sys.executable, __file__, "--phase", case, "--folder", str(folder), "--rows", str(rows)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    shown = f"{case}, {rows:,} rows into {found['units']:,} units"
    return [
        Row(shown, "rate", round(rows / found["seconds"]), "rows/s", RATE_GOAL),
        Row(shown, "peak memory", round(found["mib"]), "MiB", MEMORY_GOAL, "lower"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--stored", type=int, default=4_000_000)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--phase", choices=["units", "stored"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        phase(args.phase, Path(args.folder), args.rows)
        return 0
    with tempfile.TemporaryDirectory() as made_units, tempfile.TemporaryDirectory() as stored:
        rows = measured("units", Path(made_units), args.rows)
        make_rows(open_store(stored), args.stored)
        rows += measured("stored", Path(stored), args.stored)
    print(write("plan", rows, note=NOTE))
    return verdict(rows)


if __name__ == "__main__":
    sys.exit(main())
