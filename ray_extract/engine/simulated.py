"""An engine without a model: made-up states through the real arena and writer, for scale and for faults.

It shows that plan, arena, driver and storage work; it says nothing about capture from a real model.
"""

import asyncio
import dataclasses
import os
import signal
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ray_extract.capture.arena import AttachedArena
from ray_extract.capture.copier import TORCH_DTYPES, CpuCopier
from ray_extract.capture.digest import splitmix64
from ray_extract.capture.writer import Writer
from ray_extract.config import Job
from ray_extract.engine.base import Answer, EngineInfo, check_simulated_args


def simulated_states(
    ids: npt.NDArray[np.int32], start: int, num_states: int, hidden: int, dtype: str
) -> list[torch.Tensor]:
    """States that depend on token id, position, state and channel: no two places hold the same.

    Args:
        ids: i32 [n].
        start: position of the first one.

    Returns:
        One tensor [n, hidden] for each state, values within +-1.
    """
    tokens = splitmix64(
        ids.astype(np.uint64) << np.uint64(32) | np.arange(start, start + len(ids), dtype=np.uint64)
    ).reshape(-1, 1)
    states = []
    for k in range(num_states):
        channels = splitmix64(np.arange(hidden, dtype=np.uint64) + np.uint64((k + 1) << 40)).reshape(1, -1)
        bits = splitmix64(tokens ^ channels)
        values = (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - 1
        states.append(torch.from_numpy(values).to(TORCH_DTYPES[dtype]))
    return states


class SimulatedEngine:
    """Chunked prefill of made-up states. engine.args: `tokens_per_s`, `max_input_tokens`, `poison_token`
    (a prompt that holds this id kills the engine), `fatal_token` (kills the worker), `reject_token` (is rejected),
    `nan_token` (gives NaN states), `hang_token` (no pass runs any more, but what is rejected still gets its answer).
    """

    def __init__(self, job: Job, rank: int = 0) -> None:
        check_simulated_args(job.engine.args)
        self._rank = rank
        self._args = job.engine.args
        self._chunk = job.engine.chunked_prefill_size
        self._writer: Writer | None = None
        self._queue: deque[tuple[str, npt.NDArray[np.int32], asyncio.Future[Answer]]] = deque()
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._progress = 0
        self._hangs = False

    async def start(self, folder: Path) -> EngineInfo:
        """See base.Engine."""
        arena = AttachedArena(folder)
        self._writer = Writer(arena, self._rank, CpuCopier(arena))
        self._loop_task = asyncio.create_task(self._run())
        return EngineInfo("simulated", int(self._args.get("max_input_tokens", 1 << 20)), 1, {"engine": "simulated"})

    async def generate(self, rid: str, input_ids: Sequence[int], dp_rank: int | None, new_tokens: int) -> Answer:
        """See base.Engine."""
        ids = np.asarray(input_ids, dtype=np.int32)
        if self._args.get("reject_token") in ids:
            return Answer(False, "rejected by the simulated engine")
        assert self._writer is not None
        self._writer.check_request(rid, ids.tolist())
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queue.append((rid, ids, future))
        self._wake.set()
        return await future

    def abort(self, rids: Sequence[str]) -> None:
        """See base.Engine."""
        gone = set(rids)
        for rid, _, future in self._queue:
            if rid in gone and not future.done():
                future.set_result(Answer(False, "aborted"))

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            tokens = self._forward()
            if self._hangs:
                return
            rate = self._args.get("tokens_per_s")
            await asyncio.sleep(tokens / rate if rate else 0)

    def _forward(self) -> int:
        """One pass of at most a chunk; only the first request in the queue may be in the middle."""
        assert self._writer is not None
        spec = self._writer.arena.spec
        rids, prefixes, counts, chunks, finished, room = [], [], [], [], [], self._chunk
        while self._queue and room:
            rid, ids, future = self._queue[0]
            if future.done():
                self._queue.popleft()
                self._progress = 0
                continue
            if self._args.get("poison_token") in ids:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._args.get("fatal_token") in ids:
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()  # until its guard or the kernel ends this process too
            if self._args.get("hang_token") in ids:
                self._hangs = True
                return 0
            part = ids[self._progress : self._progress + room]
            rids.append(rid)
            prefixes.append(self._progress)
            counts.append(len(part))
            chunks.append(part)
            room -= len(part)
            self._progress += len(part)
            if self._progress == len(ids):
                finished.append(future)
                self._queue.popleft()
                self._progress = 0
        if not counts:
            return 0
        work = self._writer.begin(rids, prefixes, counts)
        if work is not None:
            parts = [
                simulated_states(c, p, spec.num_states, spec.hidden, spec.dtype)
                for c, p in zip(chunks, prefixes, strict=True)
            ]
            states = [torch.cat(columns) for columns in zip(*parts, strict=True)]
            flat = np.concatenate(chunks)
            if "nan_token" in self._args:
                states[0][torch.from_numpy(flat == self._args["nan_token"])] = float("nan")
            self._writer.issue(work, torch.from_numpy(flat), states)
            self._writer.publish(work)
        for future in finished:
            future.set_result(Answer(True))
        return sum(counts)


class SimulatedRanks:
    """Data-parallel ranks: each is an engine of its own, and hangs alone."""

    def __init__(self, job: Job) -> None:
        self._ranks = [SimulatedEngine(job, rank) for rank in range(job.engine.dp_size)]

    async def start(self, folder: Path) -> EngineInfo:
        """See base.Engine."""
        infos = [await rank.start(folder) for rank in self._ranks]
        return dataclasses.replace(infos[0], dp_size=len(infos))

    async def generate(self, rid: str, input_ids: Sequence[int], dp_rank: int | None, new_tokens: int) -> Answer:
        """See base.Engine."""
        return await self._ranks[dp_rank or 0].generate(rid, input_ids, None, new_tokens)

    def abort(self, rids: Sequence[str]) -> None:
        """See base.Engine."""
        for rank in self._ranks:
            rank.abort(rids)
