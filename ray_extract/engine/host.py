"""python -m ray_extract.engine.host: the process that owns one engine.

It is a child of the worker, started by engine.process. SGLang kills the process that owns it when a scheduler dies; so
this process is what dies, and the worker with its finished extents lives. Requests come as JSON lines on stdin, answers
leave as JSON lines on what was stdout; stdout itself is turned to stderr first, since SGLang prints.

The first line in is {"job": ..., "folder": ...}; then
    {"op": "generate", "rid", "offset", "count", "dp_rank", "new_tokens"}   ids lie in the arena at byte `offset`
    {"op": "abort", "rids": [...]}
Out: {"event": "ready", ...EngineInfo}, {"event": "failed", "error", "reason"}, {"event": "answer", "rid", ...Answer}.
"""

import asyncio
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from ray_extract.capture.arena import AttachedArena
from ray_extract.engine.base import Engine, open_engine
from ray_extract.errors import RayExtractError

logger = logging.getLogger(__name__)


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    first = json.loads(sys.stdin.readline())
    # Children inherit it. A killed process leaves its semaphores in /dev/shm; by this prefix they are known as ours.
    multiprocessing.current_process()._config["semprefix"] = f"/{Path(first['folder']).name}"  # type: ignore[attr-defined]
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(first["job"], Path(first["folder"]), out))


async def _serve(job: dict[str, Any], folder: Path, out: IO[str]) -> None:
    def send(event: str, **fields: Any) -> None:
        out.write(json.dumps({"event": event, **fields}) + "\n")

    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    threading.Thread(target=_read, args=(loop, lines), daemon=True).start()
    try:
        arena = AttachedArena(folder)
        engine = open_engine(job)
        info = await engine.start(folder)
    except RayExtractError as error:
        await _end(send, type(error).__name__, str(error))
    except Exception as error:
        logger.exception("the engine did not start")
        await _end(send, "EngineError", f"{type(error).__name__}: {error}")
    send("ready", **dataclasses.asdict(info))
    tasks: set[asyncio.Task[None]] = set()
    while True:
        message = await lines.get()
        if message["op"] == "abort":
            engine.abort(message["rids"])
            continue
        ids = np.frombuffer(arena.data, dtype=np.int32, count=message["count"], offset=message["offset"]).tolist()
        task = asyncio.create_task(_answer(engine, message, ids, send))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _end(send: Callable[..., None], error: str, reason: str) -> NoReturn:
    """Say why there is no engine, and wait to be killed: the worker first notes what the processes would leave."""
    send("failed", error=error, reason=reason)
    while True:
        await asyncio.sleep(3600)


async def _answer(engine: Engine, message: dict[str, Any], ids: list[int], send: Any) -> None:
    rid = message["rid"]
    try:
        answer = await engine.generate(rid, ids, message["dp_rank"], message["new_tokens"])
    except Exception as error:
        logger.exception("request %s failed", rid)
        send("answer", rid=rid, ok=False, reason=f"{type(error).__name__}: {error}", output_ids=[])
        return
    send("answer", rid=rid, **dataclasses.asdict(answer))


def _read(loop: asyncio.AbstractEventLoop, lines: "asyncio.Queue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, json.loads(line))
    # The worker is gone or wants us gone. The engine's processes share our group; none may outlive us.
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
