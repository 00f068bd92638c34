"""The Triton kernels against the NumPy path: on a GPU where there is one, otherwise in Triton's interpreter on the CPU.
Triton decides when it is imported whether it interprets, so the kernels run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ray_extract.capture.arena import Arena, ArenaSpec, AttachedArena
from ray_extract.capture.copier import CpuCopier
from ray_extract.capture.fp8 import encode
from ray_extract.capture.rows import kept_pieces, take_segment
from ray_extract.capture.writer import Entry, Sums, Work
from ray_extract.shards.image import mask_spans

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
HIDDEN, STATES, TOKENS, MAX_TOKENS = 24, 2, 24, 64

CHILD = """
import sys
import weakref
from pathlib import Path
import torch
from ray_extract.capture.digest_cuda import SumsBuffer, device_weights

folder = Path(sys.argv[1])
device = torch.device(sys.argv[2])
for case in torch.load(folder / "cases.pt", weights_only=False):
    case["states"] = [state.to(device) for state in case["states"]]
    hidden, itemsize, fp8 = case["states"][0].shape[1], case["states"][0].element_size(), "FP8" in case["name"]
    weights = device_weights(hidden + 8 if fp8 else hidden * itemsize, device)
    buffer = SumsBuffer(device, case["max_tokens"], len(case["states"]), weights, fp8)
    for _ in range(1 + (case["name"] == "F16-whole")):  # a buffer is used again
        assert buffer.free
        ids = case["ids"].to(device, copy=True)
        buffer.take(case["work"], ids)
        ids.zero_()  # SGLang overwrites its input buffer as soon as the pass has ended
        assert not buffer.free
        states = [state.clone() for state in case["states"]]
        held = [weakref.ref(state) for state in states]
        stored = [state.clone() for state in buffer.launch(case["work"], states)]
        buffer.record()
        del states
        assert all(ref() is not None for ref in held)  # the copies may still read them
        sums = buffer.wait()
        assert all(ref() is None for ref in held)
    sums = {"digest": sums.digest.view("int64")} | {n: getattr(sums, n) for n in ("sumsq", "amax", "nonfinite", "zero")}
    arrays = {name: torch.from_numpy(array) for name, array in sums.items()}
    torch.save({"stored": [s.view(torch.uint8).cpu() for s in stored]} | arrays, folder / f"{case['name']}.pt")
"""


def states_of(dtype: torch.dtype, hidden: int, packed: bool) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(hidden)
    values = torch.randn((TOKENS, STATES * hidden), generator=made) * 3
    values[[2, *range(10, 14)]] = 0
    values[3, ::2] = -0.0
    values[5, 0] = float("nan")
    values[6, 1] = float("inf")
    values[7, hidden] = float("-inf")
    values[8] = float("nan")
    values = values.to(dtype)
    states = list(torch.split(values, hidden, dim=1))
    return states if packed else [s.contiguous() for s in states]


def work_of(segments: list[tuple[int, int, npt.NDArray[np.uint8]]]) -> Work:
    """Entries of (prefix, count, loss mask) segments; every token that is not masked is stored."""
    entries, source = [], 0
    for row, (prefix, count, mask) in enumerate(segments):
        take = take_segment(source, prefix, count, len(mask), prefix)
        source += count
        if take is not None:
            pieces = tuple((p.source, p.kept, p.count) for p in kept_pieces(take, mask_spans(mask)))
            entries.append(Entry(0, 1, row, take.source, take.position, take.count, pieces))
    return Work(source, entries, [], [])


def all_kept(n: int) -> npt.NDArray[np.uint8]:
    return np.ones(n, np.uint8)


def some_kept(n: int, seed: int) -> npt.NDArray[np.uint8]:
    return (np.random.default_rng(seed).random(n) < 0.5).astype(np.uint8)


WORKS = {
    "whole": work_of([(0, 9, all_kept(9)), (0, 1, all_kept(1)), (0, 14, all_kept(14))]),
    # a later chunk, a decode row that is not ours, rows of which some or no tokens are stored
    "spans": work_of(
        [(100, 9, some_kept(140, 0)), (7, 1, all_kept(7)), (0, 11, some_kept(17, 1)), (3, 3, np.zeros(20, np.uint8))]
    ),
}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    torch.save(
        [
            {"name": name, "work": work, "ids": ids_of(), "states": states, "max_tokens": MAX_TOKENS}
            for name, work, states in cases()
        ],
        folder / "cases.pt",
    )
    gpu = torch.cuda.is_available()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), "cuda" if gpu else "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "0" if gpu else "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return folder


def ids_of() -> torch.Tensor:
    ids = torch.randint(0, 1 << 31, (TOKENS,), generator=torch.Generator().manual_seed(7))
    ids[0], ids[1] = 0, (1 << 31) - 1
    return ids


def cases() -> list[tuple[str, Work, list[torch.Tensor]]]:
    found = [
        (f"{code}-{kind}", WORKS[kind], states_of(dtype, HIDDEN, packed=kind == "spans"))
        for code, dtype in DTYPES.items()
        for kind in WORKS
    ]
    # 4,504 elements of 16 bits are 2,252 words: two blocks, the second one not full
    found.append(("BF16-wide", WORKS["spans"], states_of(torch.bfloat16, 4504, True)))
    return found + [(f"{name}-FP8", work, states) for name, work, states in found]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case[0])
def test_the_kernels_equal_the_reference(
    computed: Path, tmp_path: Path, case: tuple[str, Work, list[torch.Tensor]]
) -> None:
    name, work, states = case
    hidden = states[0].shape[1]
    spec = ArenaSpec("a", 4096, 1, 1, 1, (1, 2), True, name.partition("-")[0], hidden, "FP8" in name)
    arena = Arena.create(spec, tmp_path)
    ids = ids_of()[: work.num_tokens].numpy().astype(np.int32)
    stored = [encode(s) if spec.fp8 else s for s in states]
    want: Sums = CpuCopier(AttachedArena(arena.folder))._sums(work, ids, states, stored)
    got = torch.load(computed / f"{name}.pt", weights_only=False)
    kept = [source + i for e in work.entries for source, _, count in e.pieces for i in range(count)]
    for ours, theirs in zip(got["stored"], stored, strict=True):
        assert ours[kept].equal(theirs.contiguous().view(torch.uint8)[kept])
    assert np.array_equal(got["digest"].numpy().view(np.uint64), want.digest)
    assert np.array_equal(got["amax"].numpy(), want.amax)
    assert np.array_equal(got["nonfinite"].numpy(), want.nonfinite)
    assert np.array_equal(got["zero"].numpy(), want.zero)
    np.testing.assert_allclose(got["sumsq"].numpy(), want.sumsq, rtol=1e-5)
    assert want.nonfinite.any() and want.zero.any()
    arena.close()
