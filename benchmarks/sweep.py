"""Rate by row length, 16 to 131,072 tokens, captured and bare in turns on one start of both engines.

    python benchmarks/sweep.py [--tokens 262144] [--turns 2] [--budget 540]

The engines are those of capture.py. A length gets --tokens tokens of rows at once, and no more than 4,096 rows. The
rate of bare prefill falls with length by itself, since attention grows; what capture adds shows in the ratio.
--smoke is for a machine without a GPU: a tiny shape and the simulated engine.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from capture import Case, Pair, make_rows
from results import Row, write

MOST_ROWS = 4096


def case_of(shape: str, length: int, tokens: int) -> Case:
    """Rows of one length."""
    return Case(shape, max(1, min(MOST_ROWS, tokens // length)), length, length, 0.0)


def measure(pair: Pair, case: Case, turns: int) -> list[Row]:
    """Medians of the turns; the first one, which compiles kernels, is dropped."""
    table = make_rows(case, pair.vocab, 0)
    found: list[tuple[float, float]] = []
    for turn in range(turns + 1):
        ways = (pair.run_bare, pair.run_captured)
        seconds = {way.__name__: way(table) for way in (ways if turn % 2 else reversed(ways))}
        found.append((seconds["run_bare"], seconds["run_captured"]))
    bare, captured = (len(table.input_ids) / statistics.median(each) for each in zip(*found[1:], strict=True))
    name = f"{case.longest} tokens"
    ratio = statistics.median(b / c for b, c in found[1:])
    print(f"{name}: bare {bare:,.0f}, captured {captured:,.0f} tok/s, {ratio:.4f}", flush=True)
    return [
        Row(name, "bare", round(bare), "tokens/s"),
        Row(name, "captured", round(captured), "tokens/s"),
        Row(name, "captured/bare", round(ratio, 4), "ratio"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--budget", type=float, default=540.0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    shape, tokens, longest, arena = "deepseek-7168", args.tokens, 131_072, 16 << 30
    if args.smoke:
        shape, tokens, longest, arena = "tiny", 2048, 1024, 64 << 20
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(case_of(shape, 16, tokens), Path(folder), arena, {"attention_backend": "fa3"}, args.smoke)
        try:
            length, took = 16, 0.0
            while length <= longest and time.monotonic() + took < deadline:
                start = time.monotonic()
                rows += measure(pair, case_of(shape, length, tokens), args.turns)
                length, took = 2 * length, 2 * (time.monotonic() - start)
                if not args.smoke:
                    write("sweep", rows)
        finally:
            pair.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
