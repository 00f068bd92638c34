"""What users would take instead of this project, on the same GPU, rows and states.

    python benchmarks/peers.py [--ways ours,ours-torch-save,transformers-strong,...] [--seconds 40]

    ours                    capture, digest check, raw shards of half a GiB
    ours-torch-save         the same capture and check, then one file by torch.save a sample
    transformers-strong     Transformers without padding: rows packed to 8,192 tokens, attention by FlashAttention 3 (or
                            what there is of it), only the wanted states, by hooks; copies to pinned memory on a stream
                            of their own, torch.save a sample in four threads meanwhile
    transformers-collector  the usual loop: eight rows padded, output_hidden_states=True, .cpu(), torch.save a sample
    return_hidden_states    SGLang's own, which has the last state alone; torch.save a sample

A way is a process of its own, alone on the GPU, and takes rows for about --seconds after a warm-up; loading is not
counted, and its files go to memory (/dev/shm) and are deleted as they come, so that no disk is measured. Weights are
random, of Qwen3-8B's shape; four states a token, of 4096 in bf16. `speedup` is ours over the way's tokens a second. The
parts are seconds of the way's own clock, as a share of the whole; those of several threads add up to more than one.
--smoke is for a machine without a GPU: a tiny shape, the simulated engine, and no SGLang.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capture import BOUNDARIES, CHUNK, KV_TOKENS
from end_to_end import make_job, token_bytes
from product import SHM, Ids, make_rows
from results import Row, write
from shapes import SHAPES, write_shape

from ray_extract.config import Job
from ray_extract.engine.process import kill_session
from ray_extract.extractor import Captured, Extractor, ExtractorSetup
from ray_extract.shards.image import row_table
from ray_extract.shards.raw import write_raw
from ray_extract.shards.values import as_tensor
from ray_extract.store import LocalStore

BATCH = 8
WRITERS = 4
UNITS = 6  # in flight
WITHOUT = "the same without states, not counted"
LIMIT_S = 240.0  # of a way, loading included
NOTE = (
    "Each way alone on the GPU, one after the other; files go to memory. return_hidden_states has one state of four. "
    "A part is the time in it over the way's whole time, of all threads together."
)


class Parts:
    """Seconds by name, of several threads."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time of the context."""
        start = time.monotonic()
        yield
        self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add some."""
        with self._lock:
            self.seconds[name] += seconds


class Task:
    """What a way has to do.

    Args:
        shape: of the model.
        folder: for its files, deleted as they come.
    """

    def __init__(self, shape: str, folder: Path, smoke: bool) -> None:
        self.shape, self.folder, self.smoke = shape, folder, smoke
        self.boundaries, self.config = BOUNDARIES[shape], SHAPES[shape]
        self.model = write_shape(shape, folder)
        self.device = "cpu" if smoke else "cuda"
        self.parts = Parts()
        shortest, longest = (20, 99) if smoke else (512, 3584)
        self.rows = make_rows(800 if smoke else 4000, shortest, longest, self.config["vocab_size"])

    def save(self, row: int, ids: Ids, states: dict[str, torch.Tensor]) -> None:
        """One file a sample."""
        with self.parts.time("torch.save"):
            path = self.folder / f"{row}.pt"
            torch.save({"input_ids": torch.from_numpy(ids), **states}, path)
            path.unlink()

    def names(self) -> list[str]:
        """Of the states."""
        return [*(f"state.{b}" for b in self.boundaries), "state.final"]


Step = Callable[[list[tuple[int, Ids]]], None]


@contextlib.contextmanager
def ours(task: Task, store: Callable[[Task, Captured], None]) -> Iterator[Step]:
    """Our capture; a step takes many rows and has UNITS units in flight."""
    sizes = 1 << 18 if task.smoke else 512 << 20
    job = make_job(task.shape, task.model, Path("none"), task.smoke)
    job["output"] = {"url": "none"}
    job["run"] = {"units_in_flight": UNITS}
    extractor = Extractor(
        ExtractorSetup(
            job=Job.model_validate(job).model_dump(mode="json"),
            boundaries=task.boundaries,
            dtype="BF16",
            hidden=task.config["hidden_size"],
            num_layers=task.config["num_hidden_layers"],
            vocab_size=task.config["vocab_size"],
            arena_bytes=(UNITS + 1) * (sizes + (64 << 20)),
            log_dir=str(Path(tempfile.gettempdir(), "ray_extract-logs")),
        )
    )
    extractor.start()

    def unit(rows: list[tuple[int, Ids]]) -> None:
        table = row_table(
            [i for i, _ in rows], [ids for _, ids in rows], [np.ones(len(ids), np.uint8) for _, ids in rows]
        )
        with extractor.capture(table, {}) as captured:
            assert not captured.failures, captured.failures
            store(task, captured)
        for name in ("wait", "extract", "seal"):
            task.parts.add(name, captured.seconds[name])

    def step(rows: list[tuple[int, Ids]]) -> None:
        most = sizes // token_bytes(task.shape)
        units: list[list[tuple[int, Ids]]] = [[]]
        for row in rows:
            if units[-1] and sum(len(ids) for _, ids in units[-1]) + len(row[1]) > most:
                units.append([])
            units[-1].append(row)
        with concurrent.futures.ThreadPoolExecutor(UNITS) as pool:
            list(pool.map(unit, units))

    try:
        yield step
    finally:
        extractor.stop()


def as_shard(task: Task, captured: Captured) -> None:
    """Ours: one raw file."""
    store, key = LocalStore(task.folder), f"{int(captured.table.row[0])}.safetensors"
    with task.parts.time("write"):
        write_raw(store, key, captured.buffer)
    store.delete(key)


def as_pickles(task: Task, captured: Captured) -> None:
    """Ours, and then a pickle of each row."""
    layout, table = captured.layout, captured.table
    states = {c.name: as_tensor(layout.state_bytes(captured.buffer, c), c.dtype) for c in layout.columns}
    for place in range(len(table)):
        kept = slice(int(table.cu_kept[place]), int(table.cu_kept[place + 1]))
        ids = table.input_ids[int(table.cu_seqlens[place]) : int(table.cu_seqlens[place + 1])]
        # Without clone() torch.save would write the whole shard's storage for each row.
        task.save(int(table.row[place]), ids, {name: state[kept].clone() for name, state in states.items()})


def load_transformers(task: Task, attention: str) -> Any:
    """The model with random weights, made where it runs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(task.model)
    with torch.device(task.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    return model.to(task.device).eval()


@contextlib.contextmanager
def collector(task: Task) -> Iterator[Step]:
    """The usual loop. A step's rows are padded, eight together; of the logits only the last ones are computed."""
    model = load_transformers(task, "sdpa")

    def step(rows: list[tuple[int, Ids]]) -> None:
        for batch in (rows[at : at + BATCH] for at in range(0, len(rows), BATCH)):
            longest = max(len(ids) for _, ids in batch)
            ids, mask = np.zeros((2, len(batch), longest), np.int64)
            for place, (_, row) in enumerate(batch):
                ids[place, : len(row)], mask[place, : len(row)] = row, 1
            with task.parts.time("forward"), torch.inference_mode():
                out = model(
                    input_ids=torch.from_numpy(ids).to(task.device),
                    attention_mask=torch.from_numpy(mask).to(task.device),
                    output_hidden_states=True,
                    use_cache=False,
                    logits_to_keep=1,
                )
                synchronize(task)
            with task.parts.time("copy"):
                states = [out.hidden_states[b].cpu() for b in (*task.boundaries, -1)]
            for place, (row, its) in enumerate(batch):
                cut = {n: s[place, : len(its)].clone() for n, s in zip(task.names(), states, strict=True)}
                task.save(row, its, cut)

    yield step


@contextlib.contextmanager
def strong(task: Task) -> Iterator[Step]:
    """Transformers as well as it goes."""
    kernel, varlen = best_attention(task)
    print(f"transformers-strong: attention by {kernel}", flush=True)
    lengths: list[Any] = [None, 0]  # cumulative ones of the present pack, and the longest

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Any, None]:
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
        return varlen(q, k, v, lengths[0], lengths[1], scaling)[None], None

    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("packed", attention)
    AttentionMaskInterface.register("packed", lambda *_, **__: None)
    model = load_transformers(task, "packed").model
    held: dict[str, torch.Tensor] = {}
    names = task.names()
    for boundary, name in zip(task.boundaries, names, strict=False):
        model.layers[boundary].register_forward_pre_hook(functools.partial(keep_input, held, name), with_kwargs=True)
    model.norm.register_forward_hook(lambda _, __, out: held.__setitem__("state.final", out))
    cuda = not task.smoke
    side = torch.cuda.Stream() if cuda else None
    width, pinned = task.config["hidden_size"], queue_of_buffers(task, len(names))
    writers = concurrent.futures.ThreadPoolExecutor(WRITERS)

    def write(rows: list[tuple[int, Ids]], buffer: torch.Tensor, events: list[Any]) -> None:
        if events:
            events[-1].synchronize()
            task.parts.add("GPU, copies included", events[0].elapsed_time(events[-1]) / 1000)
        at = 0
        for row, ids in rows:
            states = {name: buffer[k, at : at + len(ids)].clone() for k, name in enumerate(names)}
            task.save(row, ids, states)
            at += len(ids)
        pinned.append(buffer)

    def forward(rows: list[tuple[int, Ids]]) -> Any:
        while not pinned:
            with task.parts.time("wait for GPU and files"):
                time.sleep(0.001)
        buffer = pinned.popleft()
        with task.parts.time("launch"), torch.inference_mode():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if side is not None else 0)]
            if events:
                events[0].record()
            counts = [len(ids) for _, ids in rows]
            ids = torch.from_numpy(np.concatenate([ids for _, ids in rows])).to(task.device, torch.long)
            places = torch.cat([torch.arange(n) for n in counts]).to(task.device)
            ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=task.device)
            lengths[:] = [ends, max(counts)]
            model(input_ids=ids[None], position_ids=places[None], use_cache=False)
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
                for k, name in enumerate(names):
                    state = held[name].reshape(-1, width)
                    buffer[k, : len(state)].copy_(state, non_blocking=True)
                    if side is not None:
                        state.record_stream(side)
                if side is not None:
                    events[-1].record(side)
            held.clear()
        return writers.submit(write, rows, buffer, events)

    def step(rows: list[tuple[int, Ids]]) -> None:
        packs: list[list[tuple[int, Ids]]] = [[]]
        for row in rows:
            if packs[-1] and sum(len(ids) for _, ids in packs[-1]) + len(row[1]) > CHUNK:
                packs.append([])
            packs[-1].append(row)
        for written in [forward(pack) for pack in packs]:
            written.result()

    yield step
    writers.shutdown()


def keep_input(held: dict[str, torch.Tensor], name: str, _: Any, args: Any, kwargs: Any) -> None:
    """A hook: what enters a layer."""
    held[name] = args[0] if args else kwargs["hidden_states"]


def queue_of_buffers(task: Task, states: int) -> collections.deque[torch.Tensor]:
    """Pinned memory for packs on their way to files."""
    size = (states, CHUNK, task.config["hidden_size"])
    return collections.deque(
        torch.empty(size, dtype=torch.bfloat16, pin_memory=not task.smoke) for _ in range(WRITERS + 2)
    )


Varlen = Callable[[Any, Any, Any, Any, int, float | None], Any]


def best_attention(task: Task) -> tuple[str, Varlen]:
    """The first attention over packed rows that is there and right; q [T, heads, d], k and v [T, kv heads, d]."""

    def flash3(module: str) -> Varlen:
        import importlib

        function = importlib.import_module(module).flash_attn_varlen_func

        def call(q: Any, k: Any, v: Any, ends: Any, longest: int, scale: float | None) -> Any:
            out = function(
                q=q,
                k=k,
                v=v,
                cu_seqlens_q=ends,
                cu_seqlens_k=ends,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                softmax_scale=scale,
                causal=True,
            )
            return out[0] if isinstance(out, tuple) else out

        return call

    def torchs() -> Varlen:
        from torch.nn.attention.varlen import varlen_attn

        def call(q: Any, k: Any, v: Any, ends: Any, longest: int, scale: float | None) -> Any:
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
            return varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))

        return call

    tries: dict[str, Callable[[], Varlen]] = {
        "FlashAttention 3 of sgl_kernel": lambda: flash3("sgl_kernel.flash_attn"),
        "FlashAttention 3 of sglang": lambda: flash3("sglang.jit_kernel.flash_attention"),
        "FlashAttention 2 of flash_attn": lambda: flash3("flash_attn"),
        "torch's varlen_attn": torchs,
    }
    heads, groups = task.config["num_attention_heads"], task.config["num_key_value_heads"]
    width = task.config.get("head_dim") or task.config["hidden_size"] // heads
    ends = torch.tensor([0, 70, 200], dtype=torch.int32, device=task.device)
    q, k, v = (torch.randn(200, n, width, dtype=torch.bfloat16, device=task.device) for n in (heads, groups, groups))
    wanted = packed_sdpa(q, k, v, ends, 130, None)
    for name, load in tries.items():
        try:
            function = load()
            error = float((function(q, k, v, ends, 130, None).float() - wanted.float()).abs().max())
        except Exception as why:  # not there, not for this GPU, or of another signature: the next one
            print(f"transformers-strong: no {name}: {type(why).__name__}: {str(why)[:200]}", flush=True)
            continue
        if error < 0.05:
            return name, function
        print(f"transformers-strong: {name} is off by {error}", flush=True)
    return "SDPA, row by row", packed_sdpa


def packed_sdpa(q: Any, k: Any, v: Any, ends: Any, longest: int, scale: float | None) -> Any:
    """PyTorch's attention, a call for each row."""
    cuts = ends.tolist()
    outs = []
    for first, end in itertools.pairwise(cuts):
        parts = [each[first:end].transpose(0, 1)[None] for each in (q, k, v)]
        outs.append(
            torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)[0]
        )
    return torch.cat([out.transpose(0, 1) for out in outs])


@contextlib.contextmanager
def sglang_own(task: Task) -> Iterator[Step]:
    """SGLang's own answer: Python lists through its sockets."""
    import sglang

    engine = sglang.Engine(
        model_path=str(task.model),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        disable_cuda_graph=True,
        chunked_prefill_size=CHUNK,
        max_total_tokens=KV_TOKENS[task.shape],
        mem_fraction_static=0.85,
        attention_backend="fa3",
        enable_return_hidden_states=True,
        log_level="warning",
    )

    def step(rows: list[tuple[int, Ids]]) -> None:
        for batch in (rows[at : at + BATCH] for at in range(0, len(rows), BATCH)):
            sampling = {"max_new_tokens": 1, "temperature": 0.0}
            lists = [ids.tolist() for _, ids in batch]
            with task.parts.time(WITHOUT):  # what prefill alone takes of the time below
                engine.generate(input_ids=lists, sampling_params=sampling)
            with task.parts.time("generate"):
                answers = engine.generate(input_ids=lists, sampling_params=sampling, return_hidden_states=True)
            for (row, ids), answer in zip(batch, answers, strict=True):
                with task.parts.time("lists to tensors"):
                    parts = [
                        torch.as_tensor(each, dtype=torch.bfloat16) for each in answer["meta_info"]["hidden_states"]
                    ]
                    state = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])[: len(ids)]
                assert len(state) == len(ids), f"{len(state)} states of {len(ids)} tokens"
                task.save(row, ids, {"state.final": state})

    try:
        yield step
    finally:
        engine.shutdown()


def synchronize(task: Task) -> None:
    """Wait for the GPU."""
    if not task.smoke:
        torch.cuda.synchronize()


WAYS: dict[str, tuple[Callable[[Task], Any], int]] = {
    "ours": (lambda task: ours(task, as_shard), 800),
    "ours-torch-save": (lambda task: ours(task, as_pickles), 400),
    "transformers-strong": (strong, 200),
    "transformers-collector": (collector, BATCH),
    "return_hidden_states": (sglang_own, BATCH),
}
"""How to open a way, and how many rows it gets in one step."""


def measure(name: str, shape: str, seconds: float, smoke: bool) -> dict[str, Any]:
    """Run one way in this process: tokens, seconds and parts of them."""
    open_way, step_rows = WAYS[name]
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        task = Task(shape, Path(folder), smoke)
        numbered = list(enumerate(task.rows))
        with open_way(task) as step:
            step(numbered[:step_rows][: max(BATCH, step_rows // 8)])  # kernels are compiled, memory is taken
            task.parts = Parts()
            tokens, start = 0, time.monotonic()
            # Ours fills and drains its pipeline once a step, so its steps are long.
            for at in itertools.cycle(range(0, len(numbered) - step_rows + 1, step_rows)):
                step(numbered[at : at + step_rows])
                tokens += sum(len(ids) for _, ids in numbered[at : at + step_rows])
                if time.monotonic() - start > seconds:
                    break
            took = time.monotonic() - start
        parts = dict(task.parts.seconds)
        return {"tokens": tokens, "seconds": took - parts.get(WITHOUT, 0.0), "parts": parts}


def rows_of(found: dict[str, dict[str, Any]]) -> list[Row]:
    """The table, of the ways until now."""
    rates = {name: each["tokens"] / each["seconds"] for name, each in found.items()}
    rows = []
    for name, each in found.items():
        rows.append(Row(name, "rate", round(rates[name]), "tokens/s"))
        if name != "ours" and "ours" in rates:
            rows.append(Row(name, "speedup", round(rates["ours"] / rates[name], 2), "of ours over it"))
        for part, seconds in each["parts"].items():
            rows.append(Row(name, f"in {part}", round(seconds / each["seconds"], 3), "of its time", None, "lower"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = "tiny" if args.smoke else "qwen3-8b"
    if args.way:
        print("RESULT", json.dumps(measure(args.way, shape, args.seconds, args.smoke)), flush=True)
        return 0
    found: dict[str, dict[str, Any]] = {}
    for name in args.ways.split(","):
        if args.smoke and name == "return_hidden_states":
            continue
        command = [sys.executable, __file__, "--way", name, "--seconds", str(args.seconds)]
        start = time.monotonic()
        lines = run_way([*command, *(["--smoke"] if args.smoke else [])])
        result = next((line for line in lines if line.startswith("RESULT ")), None)
        if result is None:
            print(f"{name}: no result after {time.monotonic() - start:.0f} s", flush=True)
            continue
        found[name] = json.loads(result.removeprefix("RESULT "))
        print(f"{name}: {found[name]}, {time.monotonic() - start:.0f} s in all", flush=True)
        if not args.smoke:
            write("peers", rows_of(found), note=NOTE)
    for row in rows_of(found):
        print(row)
    return 0 if len(found) >= len(args.ways.split(",")) - args.smoke else 1


def run_way(command: list[str]) -> list[str]:
    """The lines that a way printed; it is ended after LIMIT_S."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        timer = threading.Timer(LIMIT_S, kill_session, [process.pid])
        timer.start()
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            print(f"  {line}", end="", flush=True)
        timer.cancel()
    return lines


if __name__ == "__main__":
    sys.exit(main())
