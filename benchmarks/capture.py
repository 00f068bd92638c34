"""What capture costs: prefill with every state captured, digested and measured, over bare prefill of the same rows.

    python benchmarks/capture.py [--cases qwen3-8b,short-rows,deepseek-7168,long-row] [--pairs 5]

Two engines of a shape stand on the same GPUs, one without the plugin and one with it, and take turns; the others idle.
Both get the same rows through the same pipe. A pair's figure is the ratio of the two rates; the result is the median of
the pairs. Weights are random. Needs GPUs of 140 GB, 16 or 30 GiB of /dev/shm for each setting, and SGLang. By default
the cases run that need as many GPUs as there are, one or two; on two, name the others to run them too.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bare import Bare
from results import Row, write
from shapes import SHAPES, write_shape

from ray_extract.config import Job
from ray_extract.engine.process import EngineProcess, session_pids
from ray_extract.extractor import Extractor, ExtractorSetup
from ray_extract.shards.image import RowTable, row_table

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of rows on a shape.

    Args:
        shape: see shapes.SHAPES.
        rows: how many.
        shortest, longest: tokens, uniform.
        goal: least ratio.
        parallel: of the job's engine section.
    """

    shape: str
    rows: int
    shortest: int
    longest: int
    goal: float
    parallel: tuple[tuple[str, int], ...] = ()

    @property
    def gpus(self) -> int:
        """That its engines run on."""
        return dict(self.parallel).get("tp_size", 1)

    @property
    def setting(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        """What its two engines are; cases of one setting share them."""
        return self.shape, self.parallel


_TP2 = (("tp_size", 2),)
_DP2 = (("tp_size", 2), ("dp_size", 2), ("enable_dp_attention", True))
CASES = {
    "qwen3-8b": Case("qwen3-8b", 100, 512, 3584, 0.99),
    "short-rows": Case("qwen3-8b", 3000, 16, 128, 0.97),
    "deepseek-7168": Case("deepseek-7168", 100, 512, 3584, 0.99),
    "long-row": Case("deepseek-7168", 1, 131072, 131072, 0.98),
    "qwen3-8b-tp2": Case("qwen3-8b", 200, 512, 3584, 0.98, _TP2),
    "deepseek-7168-tp2": Case("deepseek-7168", 200, 512, 3584, 0.98, _TP2),
    "deepseek-7168-dp2": Case("deepseek-7168", 200, 512, 3584, 0.98, _DP2),
}
BOUNDARIES = {"qwen3-8b": (2, 18, 33), "deepseek-7168": (2, 3, 5), "tiny": (2, 4, 5)}
KV_TOKENS = {"qwen3-8b": 65536, "deepseek-7168": 163840}
ARENA_BYTES = {"qwen3-8b": 14 << 30, "deepseek-7168": 28 << 30}  # 200 rows of 3,584 tokens at most
CHUNK = 8192


class Pair:
    """A captured and a bare engine of one setting on the same GPUs.

    Args:
        case: of the setting.
        work: a folder.
        arena_bytes: for the largest image.
        args: more arguments of the engines.
        simulated: whether the engines only make states up.
    """

    def __init__(self, case: Case, work: Path, arena_bytes: int, args: dict[str, Any], simulated: bool = False) -> None:
        shape = case.shape
        path = write_shape(shape, work)
        self.peaks = Path(tempfile.mkdtemp(prefix="peaks-", dir=work))
        if case.gpus > 1:
            args = args | {"disable_custom_all_reduce": True}  # compiled for minutes at the first start otherwise
        paths = os.pathsep.join([str(HERE / "peak_memory"), os.environ.get("PYTHONPATH", "")])
        env = {"PYTHONPATH": paths, "RAY_EXTRACT_PEAK_MEMORY": str(self.peaks)}
        engine = {"args": {"max_total_tokens": KV_TOKENS.get(shape), "mem_fraction_static": 0.85} | args}
        if simulated:
            engine = {"kind": "simulated", "device": "cpu"}
        job = Job.model_validate(
            {
                "model": {"path": str(path), "load_format": "dummy", "dtype": "bfloat16"},
                "dataset": {"paths": "none"},
                "output": {"url": "none"},
                "capture": {"boundaries": BOUNDARIES[shape], "check": "off"},
                "engine": {
                    "chunked_prefill_size": CHUNK,
                    "env": env,
                    **engine,
                    **dict(case.parallel),
                },
            }
        )
        self.job = job.model_dump(mode="json")
        config = SHAPES[shape]
        self.extractor = Extractor(
            ExtractorSetup(
                job=self.job,
                boundaries=BOUNDARIES[shape],
                dtype="BF16",
                hidden=config["hidden_size"],
                num_layers=config["num_hidden_layers"],
                vocab_size=config["vocab_size"],
                arena_bytes=arena_bytes,
                log_dir=str(work / "logs"),
            )
        )
        self.vocab = config["vocab_size"]
        self.chunk_bytes = CHUNK * (len(BOUNDARIES[shape]) + 1) * config["hidden_size"] * 2
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            started = time.monotonic()
            captured = pool.submit(self.extractor.start)
            while (guard := self.extractor._guard) is None and not captured.done():
                time.sleep(0.1)
            arena = self.extractor._arena
            assert arena is not None and guard is not None, captured.exception()
            self.arena = arena
            self.bare = Bare(self.job, arena, guard, env, work / "logs")
            took = time.monotonic() - started
            print(f"{shape} {case.parallel}: {captured.result()}, both after {took:.0f} s", flush=True)
        record = arena.folder / "plugin.0.0.json"
        self.registration = json.loads(record.read_text()) if record.exists() else {}

    def stop(self) -> None:
        self.bare.process.kill()
        self.extractor.stop()

    def run_bare(self, table: RowTable) -> float:
        """Seconds for all rows."""
        return self.bare.run(np.split(table.input_ids, table.cu_seqlens[1:-1]))

    def run_captured(self, table: RowTable) -> float:
        """Seconds for all rows, from the first request to the retired extent."""
        with self.extractor.capture(table, {}) as captured:
            assert not captured.failures, list(captured.failures.values())[:3]
            return captured.seconds["extract"]

    def memory_over_bare(self) -> int | None:
        """MiB of the captured engine's peak of allocated GPU memory above the bare one's."""
        time.sleep(1.5)  # two turns of peak_memory
        engine = self.extractor._engine
        assert engine is not None

        def peak(host: EngineProcess) -> int:
            files = [self.peaks / str(pid) for pid in session_pids(host.pid)]
            return sum(int(file.read_text()) for file in files if file.exists())

        captured, bare = peak(engine), peak(self.bare.process)
        return round((captured - bare) / 2**20) if captured and bare else None


def make_rows(case: Case, vocab: int, seed: int) -> RowTable:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(case.shortest, case.longest + 1, case.rows)
    ids = [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]
    return row_table(range(case.rows), ids, [np.ones(n, np.uint8) for n in lengths])


def measure(name: str, pair: Pair, pairs: int) -> list[Row]:
    case = CASES[name]
    table = make_rows(case, pair.vocab, 0)
    tokens = len(table.input_ids)
    pair.run_bare(table), pair.run_captured(table)  # kernels are compiled and caches filled
    before = dict(pair.extractor.progress())
    ratios, bare, captured = [], [], []
    for i in range(pairs):
        order = (pair.run_bare, pair.run_captured) if i % 2 == 0 else (pair.run_captured, pair.run_bare)
        seconds = {run.__name__: run(table) for run in order}
        bare.append(tokens / seconds["run_bare"])
        captured.append(tokens / seconds["run_captured"])
        ratios.append(captured[-1] / bare[-1])
        print(f"{name}: bare {bare[-1]:,.0f}, captured {captured[-1]:,.0f} tok/s, {ratios[-1]:.4f}", flush=True)
    after = pair.extractor.progress()
    passes = after["passes"] - before["passes"]

    def a_pass(counter: str) -> float:
        return (after[counter] - before[counter]) / passes

    over = pair.memory_over_bare()
    three = round(3 * pair.chunk_bytes / 2**20)
    memory = [] if over is None else [Row(name, "peak device memory over bare", over, "MiB", three, "lower")]
    return [
        Row(name, "captured/bare", round(statistics.median(ratios), 4), "ratio", case.goal),
        Row(name, "bare", round(statistics.median(bare)), "tokens/s"),
        Row(name, "captured", round(statistics.median(captured)), "tokens/s"),
        Row(name, "hook", round(a_pass("hook_us") / 1000, 3), "ms a forward", None, "lower"),
        Row(name, "wait", round(a_pass("wait_us") / 1000, 3), "ms a forward", None, "lower"),
        Row(name, "copies", round(a_pass("copies"), 1), "a forward", None, "lower"),
        Row(name, "bytes", round(a_pass("copied_bytes") / 2**20, 1), "MiB a forward"),
        *memory,
        Row(name, "arena registered", pair.registration["register_gib"], "GiB"),
        Row(name, "registration", pair.registration["register_s"], "s, beside the loading of weights", None, "lower"),
        Row(name, "registration waited for", pair.registration["register_wait_s"], "s", None, "lower"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    import torch

    here = min(torch.cuda.device_count(), 2)
    parser.add_argument("--cases", default=",".join(name for name, case in CASES.items() if case.gpus == here))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--attention", default="fa3")
    args = parser.parse_args()
    names = args.cases.split(",")
    settings = {CASES[name].setting: CASES[name] for name in names}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(len(settings)) as pool:
        engine = {"attention_backend": args.attention}
        starts = {
            setting: pool.submit(Pair, case, Path(folder), ARENA_BYTES[case.shape], engine)
            for setting, case in settings.items()
        }
        pairs = {key: start.result() for key, start in starts.items()}
        try:
            for setting in settings:
                pair = pairs[setting]
                for name in [n for n in names if CASES[n].setting == setting]:
                    try:
                        rows += measure(name, pair, args.pairs)
                    except BaseException:
                        print(pair.extractor._engine and pair.extractor._engine.log_tail(), flush=True)
                        raise
                    write("capture", rows, join=True)
                pairs.pop(setting).stop()  # a long row of the next shape takes most of the GPU
        finally:
            for pair in pairs.values():
                pair.stop()
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
