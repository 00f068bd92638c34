"""One node: its GPUs as one engine, with data-parallel attention, and as engines of their own, one of which is killed.

    python benchmarks/node.py [--cases tp,dp,engines,kill] [--gpus 8] [--seconds 20] [--budget 570]

    tp        one engine over all GPUs, DeepSeek-V3's shape cut to what starts in time
    dp        the same with data-parallel attention, a rank a GPU
    engines   an engine a GPU, Qwen3-8B's shape
    kill      the same; when its first shards have come, a scheduler is killed. The others must go on, and every row be
              committed once

A run is that of end_to_end.py: `python -m ray_extract.run` on prompts of token ids into a sink that takes every row's
digests from the bytes that reach it. Bare engines stand on the same GPUs, and get a part of the same rows before and
after; `whole/bare` is the run's rate over theirs. That all ranks held the same states is part of each run: rows of
which their digests differ fail, and no row may. `start` is from the command to the first engine's being ready.

No case is begun that would end after --budget seconds; the others can be run by the same command with --cases, and
join the result. --smoke is for a machine without GPUs: a tiny shape and simulated engines.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from bare import AloneBare, Ids
from capture import BOUNDARIES, CHUNK, KV_TOKENS
from end_to_end import RATES, token_bytes
from product import Ran, arrived, differences, extract, make_rows, receipts, reset, sink, write_prompts
from results import Row, verdict, write
from shapes import SHAPES, write_shape

from ray_extract.config import Job

BUCKET = "rows"
NOTE = (
    "Of one run a case. A rate is from the first engine's being ready to the last commit. CPU and memory are those of "
    "all processes of the run, the sink's not."
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to use a node.

    Args:
        shape: see shapes.SHAPES.
        together: whether its GPUs are one engine's.
        attention: whether its ranks are data-parallel in attention.
        kill: a process of one engine in mid-run.
    """

    shape: str
    together: bool = False
    attention: bool = False
    kill: bool = False

    def engine(self, gpus: int) -> dict[str, Any]:
        """Of the job's section, for one engine."""
        if not self.together:
            return {"tp_size": 1}
        ranks = {"dp_size": gpus, "enable_dp_attention": True} if self.attention else {}
        return {"tp_size": gpus, **ranks}


CASES = {
    "tp": Case("deepseek-7168", together=True),
    "dp": Case("deepseek-7168", together=True, attention=True),
    "engines": Case("qwen3-8b"),
    "kill": Case("qwen3-8b", kill=True),
}
STARTS_S = 90.0  # bare engines, Ray and the run's engines, and their ends


def make_job(case: Case, shape: str, gpus: int, model: Path, prompts: Path, output: dict[str, Any]) -> dict[str, Any]:
    """The job of a case."""
    engine = {**case.engine(gpus), "count": 1 if case.together else gpus}
    if shape == "tiny":
        engine |= {"kind": "simulated", "device": "cpu", "args": {"tokens_per_s": RATES[shape]}, "cpus": 0.1}
    else:
        args = {"max_total_tokens": KV_TOKENS[shape], "mem_fraction_static": 0.85, "attention_backend": "fa3"}
        if case.together:
            args["disable_custom_all_reduce"] = True  # compiled for minutes at the first start otherwise
        engine |= {"chunked_prefill_size": CHUNK, "args": args}
    return {
        "model": {"path": str(model), "load_format": "dummy", "dtype": "bfloat16"},
        "dataset": {"paths": [str(prompts)]},
        "engine": engine,
        "capture": {"boundaries": list(BOUNDARIES[shape]), "check": "all"},
        "run": {"address": "local", "units_in_flight": 6 if case.together else 3, "max_engine_deaths": 3},
        "output": output,
    }


class Bares:
    """Bare engines on all GPUs, that take parts of rows at once.

    Args:
        job: as JSON-ready data, whose engine each is.
        engines: how many.
        gpus: of the node.
        tokens: most of one engine at once.
    """

    def __init__(self, job: dict[str, Any], engines: int, gpus: int, tokens: int) -> None:
        each = gpus // engines
        visible = [",".join(str(g) for g in range(i * each, (i + 1) * each)) for i in range(engines)]
        self._pool = concurrent.futures.ThreadPoolExecutor(engines)
        self._bares: list[AloneBare] = []
        starts = [self._pool.submit(AloneBare, job, tokens, {"CUDA_VISIBLE_DEVICES": seen}) for seen in visible]
        try:
            self._bares = [start.result() for start in starts]
        except BaseException:
            self._bares = [start.result() for start in starts if start.exception() is None]
            self.stop()
            raise

    def rate(self, rows: list[Ids]) -> float:
        """Tokens a second of all together."""
        parts = [rows[i :: len(self._bares)] for i in range(len(self._bares))]
        began = time.monotonic()
        list(self._pool.map(lambda bare, part: bare.run(part), self._bares, parts))
        return sum(len(row) for row in rows) / (time.monotonic() - began)

    def stop(self) -> None:
        """End them."""
        for bare in self._bares:
            bare.stop()
        self._pool.shutdown()


class Killer:
    """Kills a scheduler (or a simulated engine's host) of this process's run once some shards have come.

    Args:
        sink_folder: where the sink notes what comes.
        shards: how many.
    """

    def __init__(self, sink_folder: Path, shards: int) -> None:
        self.at = 0.0
        self._folder, self._shards = sink_folder, shards
        self._known = {process.pid for process in _engines()}  # the bare ones
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            ours = [process for process in _engines() if process.pid not in self._known]
            if ours and len(arrived(self._folder, BUCKET)) >= self._shards:
                self.at = time.time()
                os.kill(ours[0].pid, signal.SIGKILL)
                print(f"killed {ours[0].pid}", flush=True)
                return

    def stop(self) -> None:
        """Kill nobody any more."""
        self._over.set()
        self._thread.join()


def _engines() -> list[psutil.Process]:
    """Schedulers, or where there are none hosts, below this process."""
    found: dict[str, list[psutil.Process]] = {"sglang::scheduler": [], "ray_extract.engine.host": []}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            for name, processes in found.items():
                if name in line:
                    processes.append(process)
    return found["sglang::scheduler"] or found["ray_extract.engine.host"]


def measure(name: str, gpus: int, seconds: float, work: Path, options: dict[str, Any], smoke: bool) -> list[Row]:
    """One case.

    Raises:
        RuntimeError: the run did not end well, or other bytes arrived than left the GPUs.
    """
    case = CASES[name]
    shape = "tiny" if smoke else case.shape
    shortest, longest = (20, 99) if smoke else (512, 3584)
    count = int(seconds * RATES[shape] * gpus / (shortest + longest) * 2)
    rows = make_rows(count, shortest, longest, SHAPES[shape]["vocab_size"])
    model, prompts = write_shape(shape, work / "models"), write_prompts(work / f"{name}.parquet", rows)
    shard = (16 << 10) if smoke else (512 << 20)
    output = {"url": f"s3://{BUCKET}/run", "format": "raw", "shard_bytes": shard, "storage_options": options}
    job = make_job(case, shape, gpus, model, prompts, output)
    part = rows[: max(gpus, len(rows) // 4)]
    bares = Bares(
        Job.model_validate(job).model_dump(mode="json"),
        1 if case.together else gpus,
        gpus,
        sum(len(row) for row in part),
    )
    try:
        bares.rate(part[: len(part) // 4])  # kernels are compiled and caches filled
        bare = [bares.rate(part)]
        reset(work / "sink", BUCKET)
        began = time.time()
        killer = Killer(work / "sink", gpus) if case.kill else None
        ran = extract(job)
        if killer is not None:
            killer.stop()
        bare.append(bares.rate(part))
    finally:
        bares.stop()
    return figures(name, shape, ran, statistics.mean(bare), len(rows), work, options, began, killer)


def figures(
    name: str,
    shape: str,
    ran: Ran,
    bare: float,
    wanted: int,
    work: Path,
    options: dict[str, Any],
    began: float,
    killer: Killer | None,
) -> list[Row]:
    """What a run came to, if all of it arrived; raises as measure does."""
    if ran.code or not ran.seconds:
        raise RuntimeError(f"the run ended with code {ran.code}:\n{ran.output[-4000:]}")
    committed = receipts(f"s3://{BUCKET}/run", options)
    failed = sum(len(receipt.failures) for receipt in committed)
    count = sum(receipt.rows for receipt in committed)
    # A shard that was under way when its worker died may come a second time, under another attempt's name.
    compared, wrong = differences(arrived(work / "sink", BUCKET), committed)
    if wrong or failed or not compared == count == wanted:
        raise RuntimeError(f"{compared} of {wanted} rows compared, {count} committed, {failed} failed; {wrong[:5]}")
    ratio = ran.rate / bare
    found = [
        Row(name, "whole/bare", round(ratio, 4), "ratio", None if killer else 0.98),
        Row(name, "whole", round(ran.rate), "tokens/s"),
        Row(name, "bare", round(bare), "tokens/s"),
        Row(name, "states", round(ran.rate * token_bytes(shape) / 1e9, 2), "GB/s into /dev/shm and the sink"),
        Row(name, "rows compared", compared, f"of {wanted}, digests of the GPU and of what arrived", wanted),
        Row(name, "start", round(ran.ready_s), "s", None, "lower"),
        Row(name, "CPU", round(ran.cores, 2), "cores", None, "lower"),
        Row(name, "peak memory", round(ran.peak("anonymous") / 2**30, 2), "GiB", None, "lower"),
        Row(name, "peak shared memory", round(ran.peak("shared") / 2**30, 2), "GiB", None, "lower"),
    ]
    if killer is None:
        return found
    if not killer.at:
        raise RuntimeError("no engine was killed: the run was over before")
    came = sorted(file.stat().st_mtime for file in (work / "sink/records" / BUCKET / "run").rglob("*.json"))
    gaps = [later - earlier for earlier, later in itertools.pairwise(came)]
    after = [gap for gap, at in zip(gaps, came[1:], strict=False) if at > killer.at]
    return [
        *found,
        Row(name, "killed", round(killer.at - began, 1), "s after the command"),
        Row(name, "median time between shards", round(statistics.median(gaps), 2), "s", None, "lower"),
        Row(name, "longest time between shards after the kill", round(max(after, default=0), 2), "s", None, "lower"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    import torch

    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--budget", type=float, default=570.0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    deadline, took = time.monotonic() + args.budget, STARTS_S + 2 * args.seconds
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        work = Path(made)
        options = stack.enter_context(sink(work / "sink", 2 if args.smoke else 12))
        for name in args.cases.split(","):
            left = deadline - time.monotonic()
            if took > left:
                print(f"{name}: no case of {took:.0f} s in the {left:.0f} s that are left", flush=True)
                break
            began = time.monotonic()
            rows += measure(name, args.gpus, args.seconds, work, options, args.smoke)
            took = time.monotonic() - began
            for row in (each for each in rows if each.case == name):
                print(row, flush=True)
            if not args.smoke:
                write("node", rows, note=NOTE, join=True)
    return verdict([] if args.smoke else rows)


if __name__ == "__main__":
    sys.exit(main())
