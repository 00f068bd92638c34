"""The yardstick: 10,000 samples of 17.3 million tokens, 992 GB of states, through the whole product on one GPU.

    python benchmarks/yardstick.py [--folder ~/yardstick] [--budget 570]

The model is six layers of DeepSeek-V3's shape with random weights (shapes.py), whose states have the shape of
Kimi-K2.5's: 4 of 7168 in bf16 a token. The sink (sink.py) takes the digest of every row's every state of the bytes that
reach it, in processes of its own, and forgets the bytes. Afterwards these must be the digests that were taken on the
GPU, which the commits hold; the ids' digests must be those of the prompts that were written; and every row must be in
one commit, and every committed shard have come once.

A run that does not end in --budget seconds, proof included, is asked to stop and shown as far as it came: the same
command goes on from there, as long as --folder is there, and `seconds` is then the sum. --smoke is for a machine
without a GPU: few short rows, a tiny shape and the simulated engine.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from end_to_end import make_job, token_bytes
from product import Ids, Ran, arrived, differences, extract, receipts, sink, write_prompts
from results import Row, verdict, write
from shapes import SHAPES, write_shape

from ray_extract.capture.digest import digest_ids
from ray_extract.layout import PROGRESS_KEY, SUCCESS_KEY
from ray_extract.ledger import read_manifest
from ray_extract.records import Receipt
from ray_extract.store import open_store

SAMPLES, TOKENS = 10_000, 17_300_000
GOAL_S = 600.0
URL = "s3://rows/run"
CASE = "10,000 samples"
PROOF_S = 25.0  # kept for the last units in flight and the proof
NOTE = (
    "Six layers of DeepSeek-V3's shape with random weights: the states have Kimi-K2.5's shape, the model is another. "
    "`seconds` is the whole command, from writing the prompts to the proof; `extraction` is from the engine's being "
    "ready to the last commit. `errors` are failed rows, and rows or shards of which other bytes reached the store "
    "than left the GPU. CPU and memory are those of the run's processes, Ray's included; the sink, which takes every "
    "row's digest again, is shown by itself. `GPU busy` is NVML's: the share of moments in which anything ran."
)


def make_lengths(samples: int, tokens: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of samples, log-normal as conversations' are, of `tokens` in all."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.7, samples)
    lengths = np.clip(np.round(drawn * tokens / drawn.sum()), 16, longest).astype(np.int64)
    left = tokens - int(lengths.sum())
    order = np.argsort(lengths)[samples // 4 : 3 * samples // 4]  # those of a middle length take what is left
    lengths[order] += left // len(order)
    lengths[order[: left % len(order)]] += 1
    assert lengths.sum() == tokens and lengths.min() > 0
    return [int(length) for length in lengths]


def prove(folder: Path, options: dict[str, Any], rows: list[Ids]) -> tuple[list[Receipt], dict[str, int], list[str]]:
    """Compare what reached the sink, what was committed, and what was asked for.

    Returns:
        The commits; the counts `tokens`, `compared`, `lost`, `twice`; and a line for each error.
    """
    store, committed, found = open_store(URL, options), receipts(URL, options), arrived(folder / "sink", "rows")
    compared, errors = differences(found, committed)
    times: Counter[int] = Counter()
    for receipt in committed:
        errors += [f"{receipt.key}: row {f.row} failed: {f.reason}" for f in receipt.failures]
        made = found[receipt.key][0]["made"][0] if receipt.key in found else {"rows": []}
        times.update(made.get("rows", []))
    complete = store.head(SUCCESS_KEY) is not None
    table = read_manifest(store).to_pylist() if complete else []
    for record in table:
        row = record["row"]
        if record["status"] != "ok" or record["digests"][0] != digest_ids(rows[row]):
            errors.append(f"row {row}: {record['status']}, or of other ids than its prompt")
    counts = {
        "tokens": sum(receipt.tokens for receipt in committed),
        "compared": compared,
        "lost": sum(row not in times for row in range(len(rows))) if complete else 0,
        "twice": sum(count > 1 for count in times.values()),
    }
    return committed, counts, errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path.home() / "yardstick")
    parser.add_argument("--budget", type=float, default=570.0)
    parser.add_argument("--in-flight", type=int, default=12, help="units; one more of 1000 MiB each is the arena")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    start = time.monotonic()
    shape, samples, tokens, longest = "deepseek-7168", SAMPLES, TOKENS, 8192
    if args.smoke:
        shape, samples, tokens, longest = "tiny", 60, 3000, 99
    folder, state = args.folder, args.folder / "before.json"
    folder.mkdir(parents=True, exist_ok=True)
    before = json.loads(state.read_text()) if state.exists() else {"commands": 0, "seconds": 0.0, "extraction": 0.0}
    rng = np.random.default_rng(1)
    vocab = SHAPES[shape]["vocab_size"]
    rows = [rng.integers(0, vocab, n).astype(np.int32) for n in make_lengths(samples, tokens, longest)]
    job = make_job(shape, write_shape(shape, folder), write_prompts(folder / "prompts.parquet", rows), args.smoke)
    with sink(folder / "sink", 2 if args.smoke else 12) as options:
        shard = 16 << 10 if args.smoke else 1000 << 20  # with its tables below what goes in one request
        job["output"] = {"url": URL, "format": "raw", "shard_bytes": shard, "storage_options": options}
        job["run"] |= {"units_in_flight": args.in_flight, "drain_s": PROOF_S / 2}
        first = sink_seconds()
        ran = extract(job, start + args.budget - PROOF_S)
        sunk = sink_seconds() - first
        committed, counts, errors = prove(folder, options, rows)
        extraction = ran.seconds
        if ran.ready and not extraction:  # it was stopped
            extraction = json.loads(open_store(URL, options).get(PROGRESS_KEY))["elapsed_s"]
    seconds = time.monotonic() - start
    total = {
        "commands": before["commands"] + 1,
        "seconds": before["seconds"] + seconds,
        "extraction": before["extraction"] + extraction,
    }
    state.write_text(json.dumps(total))
    print(*errors[:20], sep="\n")
    result = figures(shape, samples, tokens, committed, counts, errors, total, ran, sunk)
    for row in result:
        print(f"{row.metric:>32}  {row.value:>20,} {row.unit}")
    if not errors and ran.code == 0:
        shutil.rmtree(folder)  # nothing is left to go on with
    if args.smoke:
        return verdict([row for row in result if row.metric in ("samples", "errors", "lost", "twice", "rows compared")])
    write("yardstick", result, note=NOTE)
    return verdict(result)


def figures(
    shape: str,
    samples: int,
    tokens: int,
    committed: list[Receipt],
    counts: dict[str, int],
    errors: list[str],
    total: dict[str, float],
    ran: Ran,
    sunk: float,
) -> list[Row]:
    """The table, as a paper would have it."""
    states, gib = token_bytes(shape), 2**30
    kept = sum(receipt.kept for receipt in committed)
    extraction, size = total["extraction"] or math.inf, sum(receipt.size for receipt in committed)
    return [
        Row(CASE, "samples", sum(r.rows - len(r.failures) for r in committed), "committed", samples),
        Row(CASE, "tokens", counts["tokens"], "", tokens),
        Row(CASE, "bytes", kept * states, "of states", tokens * states),
        Row(
            CASE,
            "shards",
            len(committed),
            f"of {size / max(1, len(committed)) / gib:.2f} GiB",
        ),
        Row(CASE, "rows compared", counts["compared"], "GPU's digests with the store's", samples),
        Row(CASE, "errors", len(errors), "", 0, "lower"),
        Row(CASE, "lost", counts["lost"], "rows", 0, "lower"),
        Row(CASE, "twice", counts["twice"], "rows", 0, "lower"),
        Row(CASE, "seconds", round(total["seconds"], 1), f"in {total['commands']} commands", GOAL_S, "lower"),
        Row(CASE, "extraction", round(total["extraction"], 1), "s", None, "lower"),
        Row(CASE, "rate", round(counts["tokens"] / extraction), "tokens/s"),
        Row(CASE, "states", round(kept * states / extraction / 1e9, 2), "GB/s"),
        Row(CASE, "CPU", round(ran.cores, 2), "cores", None, "lower"),
        Row(CASE, "CPU of the sink", round(sunk / ran.whole, 2), "cores", None, "lower"),
        Row(CASE, "peak memory", round(ran.peak("anonymous") / gib, 2), "GiB", None, "lower"),
        Row(CASE, "peak shared memory", round(ran.peak("shared") / gib, 2), "GiB", None, "lower"),
        Row(CASE, "peak GPU memory", round(ran.peak("gpu") / gib, 1), "GiB", None, "lower"),
        Row(CASE, "GPU busy", round(ran.busy, 1), "%"),
    ]


def sink_seconds() -> float:
    """CPU seconds of this process's children that are there, which are the sink's."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    sys.exit(main())
