"""The whole product over bare SGLang: prompts file, plan, engine, shards, object store; digests checked on the way.

    python benchmarks/end_to_end.py [--cases qwen3-8b-raw,qwen3-8b-parquet] [--seconds 60] [--turns 2] [--budget 560]

A run is `python -m ray_extract.run` on a prompts file of token ids, with a local Ray, one engine actor, real shapes
with random weights and four states, into a sink that hashes what it gets (sink.py): of a raw shard every row's digest,
which must be the one that was taken on the GPU. Its rate is that of its own summary: from the engine's being ready to
the last commit, so without the engine's start and with the last shard's upload. A bare engine stays on the same GPU
beside it and gets a part of the same rows before and after each run; a run's figure is its rate over the mean of these
two. The case's is the median of its runs.

--seconds is the work of a run at the shape's usual rate; no turn is begun that would end after --budget seconds.
--smoke is for a machine without a GPU: a tiny shape and the simulated engine, and its figures mean nothing. Cases of
different shapes go into different commands. Needs a GPU of 140 GB, SGLang, and 7 GiB of /dev/shm.
"""

import argparse
import contextlib
import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bare import AloneBare
from capture import BOUNDARIES, CHUNK, KV_TOKENS
from product import Ran, arrived, differences, extract, make_rows, receipts, reset, sink, write_prompts
from results import Row, verdict, write
from shapes import SHAPES, write_shape

from ray_extract.config import Job

NOTE = (
    "A run's rate is from its engine's being ready to the last commit. CPU and memory are those of all its processes, "
    "Ray's included and the sink's not; shared memory is the arena and Ray's object store. GPU memory is beside that "
    "of the idle bare engine, and mostly SGLang's to choose. `GPU busy` is NVML's: the share of moments in which "
    "anything ran."
)
DISK_BYTES = 24 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape and a way out.

    Args:
        shape: see shapes.SHAPES.
        format: of the shards.
        goal: least ratio.
        disk: shards go to files, and no more of them than DISK_BYTES.
    """

    shape: str
    format: str
    goal: float | None
    disk: bool = False


CASES = {
    "qwen3-8b-raw": Case("qwen3-8b", "raw", 0.97),
    "qwen3-8b-parquet": Case("qwen3-8b", "parquet", 0.95),
    "qwen3-8b-disk": Case("qwen3-8b", "raw", None, disk=True),
    "deepseek-7168-raw": Case("deepseek-7168", "raw", 0.97),
    "deepseek-7168-parquet": Case("deepseek-7168", "parquet", 0.95),
}
RATES = {"qwen3-8b": 42_000, "deepseek-7168": 52_000, "tiny": 4_000}
"""Tokens a second that a bare engine makes, about: how many rows there must be."""
IN_FLIGHT = 12  # units; a Parquet shard takes several times as long to store as to capture
LEAVES_S = 45.0  # of a run beside its work: Ray's start, the engine's, their ends


def make_job(shape: str, model: Path, prompts: Path, smoke: bool) -> dict[str, Any]:
    """A job but for its output."""
    engine: dict[str, Any] = {"kind": "simulated", "device": "cpu", "args": {"tokens_per_s": RATES[shape]}}
    if not smoke:
        args = {"max_total_tokens": KV_TOKENS[shape], "mem_fraction_static": 0.85, "attention_backend": "fa3"}
        engine = {"chunked_prefill_size": CHUNK, "args": args}
    return {
        "model": {"path": str(model), "load_format": "dummy", "dtype": "bfloat16"},
        "dataset": {"paths": [str(prompts)]},
        "engine": engine,
        "capture": {"boundaries": list(BOUNDARIES[shape]), "check": "all"},
        "run": {"address": "local", "units_in_flight": 2 if smoke else IN_FLIGHT},
    }


def token_bytes(shape: str) -> int:
    """Bytes of all states of a token."""
    return (len(BOUNDARIES[shape]) + 1) * SHAPES[shape]["hidden_size"] * 2


class Bench:
    """Everything of one shape.

    Args:
        shape: see shapes.SHAPES.
        work: a folder.
        options: of the sink, which keeps its files in `work / "sink"`.
        seconds: of work in a run.
        deadline: by time.monotonic().
    """

    def __init__(
        self, shape: str, work: Path, options: dict[str, Any], seconds: float, deadline: float, smoke: bool
    ) -> None:
        self.shape, self.work, self.options, self.smoke = shape, work, options, smoke
        self.seconds, self.deadline = seconds, deadline
        shortest, longest = (20, 99) if smoke else (512, 3584)
        tokens = seconds * RATES[shape]
        self.rows = make_rows(int(tokens / (shortest + longest) * 2), shortest, longest, SHAPES[shape]["vocab_size"])
        self.parts = [self.rows[i::4] for i in range(4)]
        self.turn = 0
        model, prompts = write_shape(shape, work / "models"), write_prompts(work / "prompts.parquet", self.rows)
        self.job = make_job(shape, model, prompts, smoke)
        start = time.monotonic()
        whole = Job.model_validate({**self.job, "output": {"url": "none"}}).model_dump(mode="json")
        self.bare = AloneBare(whole, sum(len(row) for row in self.rows))
        self.bare.run(self.parts[0][: len(self.parts[0]) // 4])  # kernels are compiled and caches filled
        print(f"{shape}: bare engine ready after {time.monotonic() - start:.0f} s", flush=True)

    def run_bare(self) -> float:
        """Tokens a second of a quarter of the rows, another one each time."""
        part = self.parts[self.turn % len(self.parts)]
        self.turn += 1
        rate = sum(len(row) for row in part) / self.bare.run(part)
        print(f"{self.shape}: bare {rate:,.0f} tokens/s", flush=True)
        return rate

    def run_product(self, case: Case) -> Ran:
        """One run of the product on all rows, and the proof of what came of it.

        Raises:
            RuntimeError: it did not end well, or other bytes arrived than left the GPU.
        """
        bucket = "rows" if case.format == "raw" else "hashed"
        url = f"s3://{bucket}/run"
        shard = 16 << 10 if self.smoke else 512 << 20
        output = {"url": url, "format": case.format, "shard_bytes": shard, "storage_options": self.options}
        job = {**self.job, "output": output}
        if case.disk:
            output |= {"url": str(self.work / "out"), "storage_options": {}}
            job["dataset"] = job["dataset"] | {"limit": self.disk_rows()}
        reset(self.work / "sink", bucket)
        try:
            ran = extract(job)
            if ran.code or not ran.seconds:
                raise RuntimeError(f"the run ended with code {ran.code}:\n{ran.output[-4000:]}")
            committed = receipts(output["url"], output["storage_options"])
            rows = sum(receipt.rows for receipt in committed)
            wanted = self.disk_rows() if case.disk else len(self.rows)
            if rows != wanted or any(receipt.failures for receipt in committed):
                raise RuntimeError(f"{rows} of {wanted} rows were committed")
            if bucket == "rows" and not case.disk:
                compared, wrong = differences(arrived(self.work / "sink", bucket), committed)
                if wrong or compared != rows:
                    raise RuntimeError(f"{compared} of {rows} rows compared; {wrong[:5]}")
        finally:
            shutil.rmtree(self.work / "out", ignore_errors=True)
        return ran

    def disk_rows(self) -> int:
        """Rows whose states fit DISK_BYTES."""
        mean = sum(len(row) for row in self.rows) / len(self.rows)
        return min(len(self.rows), int(DISK_BYTES / token_bytes(self.shape) / mean))


def rows_of(name: str, shape: str, ran: list[Ran], ratios: list[float], bare: list[float]) -> list[Row]:
    """The figures of a case, of its runs until now."""
    case, rate = CASES[name], statistics.median(each.rate for each in ran)
    gib = 2**30
    return [
        Row(name, "whole/bare", round(statistics.median(ratios), 4), "ratio", case.goal),
        Row(name, "whole", round(rate), "tokens/s"),
        Row(name, "bare", round(statistics.median(bare)), "tokens/s"),
        Row(name, "states", round(rate * token_bytes(shape) / 1e9, 2), "GB/s"),
        Row(name, "runs", len(ran), f"of {statistics.median(each.seconds for each in ran):.0f} s"),
        Row(name, "CPU", round(statistics.median(each.cores for each in ran), 2), "cores", None, "lower"),
        Row(name, "peak memory", round(max(each.peak("anonymous") for each in ran) / gib, 2), "GiB", None, "lower"),
        Row(name, "peak shared memory", round(max(each.peak("shared") for each in ran) / gib, 2), "GiB", None, "lower"),
        Row(name, "peak GPU memory", round(max(each.peak("gpu") for each in ran) / gib, 1), "GiB", None, "lower"),
        Row(name, "GPU busy", round(statistics.median(each.busy for each in ran), 1), "%"),
    ]


def measure(bench: Bench, names: list[str], turns: int) -> list[Row]:
    """Bare, a run of each case, bare, ... until the turns are over or the next one would end too late."""
    ran: dict[str, list[Ran]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    bare = [bench.run_bare()]
    rows: list[Row] = []
    took = bench.seconds * 1.25 + LEAVES_S
    for name in names * turns:
        left = bench.deadline - time.monotonic()
        if took > left:
            print(f"{name}: no turn of {took:.0f} s in the {left:.0f} s that are left", flush=True)
            break
        start = time.monotonic()
        ran[name].append(bench.run_product(CASES[name]))
        bare.append(bench.run_bare())
        took = time.monotonic() - start
        ratios[name].append(ran[name][-1].rate / statistics.mean(bare[-2:]))
        print(f"{name}: whole {ran[name][-1].rate:,.0f} tokens/s, {ratios[name][-1]:.4f} of bare", flush=True)
        rows = [row for each in names if ran[each] for row in rows_of(each, bench.shape, ran[each], ratios[each], bare)]
        if not bench.smoke:
            write("end_to_end", rows, note=NOTE, join=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="qwen3-8b-raw,qwen3-8b-parquet", help=f"of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--budget", type=float, default=560.0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    names = args.cases.split(",")
    shapes = {"tiny" if args.smoke else CASES[name].shape for name in names}
    if len(shapes) > 1:
        parser.error("cases of one shape at a time")
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        work = Path(made)
        options = stack.enter_context(sink(work / "sink", 2 if args.smoke else 12))
        bench = Bench(shapes.pop(), work, options, args.seconds, deadline, args.smoke)
        stack.callback(bench.bare.stop)
        rows = measure(bench, names, args.turns)
    for row in rows:
        print(row)
    return verdict([] if args.smoke else rows)


if __name__ == "__main__":
    sys.exit(main())
