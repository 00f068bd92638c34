"""A real SGLang engine on the CPU behind an Extractor, and what its images hold, for the engine tests."""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import numpy as np
from numpy.typing import NDArray

from ray_extract.capture.arena import Extent
from ray_extract.config import Job
from ray_extract.engine.base import Answer
from ray_extract.extractor import Captured, Extractor, ExtractorSetup
from ray_extract.records import RowFailure
from ray_extract.shards.image import row_table
from ray_extract.shards.values import as_tensor

BOUNDARIES = (2, 4, 5, models.LAYERS)  # the last one is what the final norm reads
CHUNK = 64
TOLERANCE = 1e-5
TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

# A file to which what was measured is written, a line each; for version_suite.py.
ERRORS = "RAY_EXTRACT_TEST_ERRORS"

Ids = NDArray[np.int32]


def with_plugin(name: str) -> dict[str, str]:
    """Environment of an engine that loads a plugin of tests/sglang_plugins beside ours, on two cores."""
    folders = [str(Path(__file__).parent / "sglang_plugins" / name), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), **TWO_CORES}


@dataclasses.dataclass(frozen=True)
class Result:
    """What came back of one call.

    Args:
        states: for each row its K states, fp32 [kept, hidden]; zero for a failed row.
        failures: by place.
    """

    states: list[list[NDArray[np.float32]]]
    failures: dict[int, RowFailure]


class Rig:
    """One engine.

    Args:
        family: see models.FAMILIES.
        cache: where tiny checkpoints are made.
        engine: fields of the job's engine section.
        env: of the engine's processes.
        stored_dtype: what the plan stores, if it is not fp8.
        fp8: whether states are stored in fp8.
    """

    def __init__(
        self,
        family: str,
        cache: Path,
        *,
        env: dict[str, str] | None = None,
        args: Any = None,
        stored_dtype: str = "F32",
        fp8: bool = False,
        **engine: Any,
    ) -> None:
        self.model = models.tiny_model(family, cache)
        threads = {"OMP_NUM_THREADS": "1"}
        job = Job.model_validate(
            {
                "model": {"path": str(self.model), "dtype": "float32"},
                "dataset": {"paths": "none"},
                "output": {"url": "none"},
                "capture": {"boundaries": BOUNDARIES, "dtype": "float8_e4m3" if fp8 else "model"},
                "engine": {
                    "device": "cpu",
                    "chunked_prefill_size": CHUNK,
                    "start_timeout_s": 400,
                    "env": threads | (env or {}),
                    "args": {"max_total_tokens": 8192, **(args or {})},
                    **engine,
                },
            }
        )
        setup = ExtractorSetup(
            job=job.model_dump(mode="json"),
            boundaries=BOUNDARIES,
            dtype=stored_dtype,
            hidden=models.HIDDEN,
            num_layers=models.LAYERS,
            vocab_size=models.VOCAB,
            arena_bytes=64 << 20,
            log_dir=str(cache / "logs"),
        )
        self.extractor = Extractor(setup)
        self.info = self.extractor.start()

    def run(self, rows: Sequence[Ids], masks: Sequence[NDArray[np.uint8]] | None = None, keep: str = "all") -> Result:
        """Capture rows and copy the states out."""
        masks = masks or [np.ones(len(ids), np.uint8) for ids in rows]
        table = row_table(range(len(rows)), rows, masks, keep)
        with self.extractor.capture(table, {}) as captured:
            return copy_out(captured)

    def side_request(self, ids: Ids, new_tokens: int, number: int = 0) -> Future[Answer]:
        """A request that is none of ours, decoding beside the rows; its ids go through the canary's extent."""
        extent: Extent = self.extractor._canary  # type: ignore[assignment]
        at = extent.nbytes - (number + 1) * 65536
        np.frombuffer(extent.buffer, np.int32, len(ids), at)[:] = ids
        return self.extractor._engine.submit(  # type: ignore[union-attr]
            f"side-{number}-{os.getpid()}", extent.offset + at, len(ids), None, new_tokens
        )

    def errors(self, rows: Sequence[Ids], result: Result) -> NDArray[np.float64]:
        """Largest relative error of a token for each row and state, against Hugging Face in fp32; [rows, K]."""
        found = np.zeros((len(rows), len(BOUNDARIES) + 1))
        for i, ids in enumerate(rows):
            reference = models.hf_states(self.model, ids.tolist())
            for k, boundary in enumerate((*BOUNDARIES, -1)):
                found[i, k] = relative_error(result.states[i][k], reference[boundary])
        if ERRORS in os.environ:
            with Path(os.environ[ERRORS]).open("a") as file:
                file.write(f"{self.info.version} {found.max(initial=0):.1e}\n")
        return found


@contextmanager
def rig(family: str, cache: Path, **options: Any) -> Iterator[Rig]:
    """A rig that is gone afterwards, with everything that it left in shared memory."""
    with nothing_left():
        made = Rig(family, cache, **options)
        try:
            yield made
        finally:
            made.extractor.stop()


@contextmanager
def nothing_left() -> Iterator[None]:
    """What is done in it leaves nothing in shared memory, neither ours nor SGLang's nor Python's.

    What others on this machine make meanwhile is known by their processes, which do not have this session's mark.
    """

    def names() -> set[str]:
        found = (path.name for path in Path("/dev/shm").iterdir())
        return {name for name in found if name.startswith(("ray_extract-", "sglang_", "sem."))}

    before = names()
    os.environ[SESSION] = str(os.getpid())
    yield
    deadline = time.monotonic() + 60  # others' processes die too, and their guards clean up after them, slowly if niced
    while (left := names() - before - _names_of_others()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, sorted(left)


SESSION = "RAY_EXTRACT_TEST_SESSION"


def _names_of_others() -> set[str]:
    """Names in /dev/shm that living processes outside of this session use.

    A semaphore is known by its inode: the process that made it maps it under another name, which it had before.
    """
    mark = f"{SESSION}={os.getpid()}".encode()
    found, inodes = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) == os.getpid() or mark in (process / "environ").read_bytes():
                continue
            maps = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
            used = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
        except OSError:
            continue
        mapped = [(inode, path) for *_, inode, path in (fields for fields in maps if len(fields) == 6)]
        inodes |= {int(inode) for inode, path in mapped if path.startswith("/dev/shm/")}
        used += [path for _, path in mapped]
        found |= {path.split("/")[3] for path in used if path.startswith("/dev/shm/")}
    with os.scandir("/dev/shm") as entries:
        return found | {entry.name for entry in entries if entry.inode() in inodes}


def copy_out(captured: Captured) -> Result:
    """Copy the states of an image while it is lent."""
    cu, layout = captured.table.cu_kept, captured.layout
    states = [
        [
            as_tensor(layout.state_bytes(captured.buffer, column)[cu[row] : cu[row + 1]].copy(), column.dtype)
            .float()
            .numpy()
            for column in layout.columns
        ]
        for row in range(len(captured.table))
    ]
    return Result(states, dict(captured.failures))


def relative_error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """Largest norm of the difference over norm of the reference, over tokens."""
    assert got.shape == want.shape
    size = np.linalg.norm(want.astype(np.float64), axis=1)
    return float((np.linalg.norm(got.astype(np.float64) - want, axis=1) / size).max())


def prompts(lengths: Sequence[int], seed: int = 0) -> list[Ids]:
    """Random prompts of the tiny vocabulary."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, models.VOCAB, n).astype(np.int32) for n in lengths]
