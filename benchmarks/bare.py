"""Bare prefill: an engine without the capture plugin, which gets rows through the same pipe as the product's."""

import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_extract.capture.arena import PAGE, Arena, ArenaSpec, new_nonce
from ray_extract.capture.guard import Guard
from ray_extract.config import Job
from ray_extract.engine.process import HOST_COMMAND, EngineProcess
from ray_extract.extractor import route

HERE = Path(__file__).parent
START_S = 600.0

Ids = npt.NDArray[np.int32]


class Bare:
    """A bare engine.

    Args:
        job: as JSON-ready data.
        arena: where its rows' ids go.
        guard: of that arena.
        env: environment variables beside this process's own.
        logs: where it logs.
    """

    def __init__(self, job: dict[str, Any], arena: Arena, guard: Guard, env: dict[str, str], logs: Path) -> None:
        self._engine, self._arena = Job.model_validate(job).engine, arena
        command = [sys.executable, str(HERE / "bare_host.py")]
        simulated = self._engine.kind == "simulated"  # which captures no row that has no name of ours
        self.process = EngineProcess(job, arena.folder, env, logs, guard, HOST_COMMAND if simulated else command)
        self.process.wait_ready(START_S)

    def run(self, rows: Sequence[Ids]) -> float:
        """Seconds for all rows, sent at once."""
        flat = np.concatenate(rows)
        extent = self._arena.allocate(flat.nbytes)
        np.frombuffer(extent.buffer, np.int32)[:] = flat
        ends = np.cumsum([len(row) for row in rows])
        start = time.monotonic()
        ranks = route([len(row) for row in rows], self._engine.dp_size)
        answers = [
            self.process.submit(f"bare-{start}-{i}", extent.offset + 4 * int(end - len(row)), len(row), rank)
            for i, (row, end, rank) in enumerate(zip(rows, ends, ranks, strict=True))
        ]
        for answer in answers:
            assert answer.result(START_S).ok
        seconds = time.monotonic() - start
        self._arena.free(extent)
        return seconds


class AloneBare:
    """A bare engine with an arena of its own, for ids alone.

    Args:
        job: as JSON-ready data.
        tokens: most in flight.
        env: environment variables beside this process's own.
    """

    def __init__(self, job: dict[str, Any], tokens: int, env: Mapping[str, str] = types.MappingProxyType({})) -> None:
        spec = ArenaSpec(
            nonce=new_nonce(),
            nbytes=-(-4 * tokens // PAGE) * PAGE,
            slots=1,
            max_rows=1,
            writers=1,
            boundaries=(1,),
            final=False,
            dtype="BF16",
            hidden=8,
        )
        self._arena = Arena.create(spec)
        self._guard = Guard(self._arena.folder)
        try:
            logs = Path(tempfile.gettempdir(), "ray_extract-logs")
            self._bare = Bare(job, self._arena, self._guard, dict(env), logs)
        except BaseException:
            self.stop()
            raise
        self.run = self._bare.run

    def stop(self) -> None:
        """End the engine and give the shared memory back."""
        if hasattr(self, "_bare"):
            self._bare.process.kill()
        self._arena.close()
        self._guard.dismiss()
