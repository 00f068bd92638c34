"""The worker's end of the engine host: start it, send rows, learn of its death, and reap its whole process tree."""

import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray_extract.errors
from ray_extract.capture.guard import Guard, semaphores
from ray_extract.engine.base import Answer, EngineInfo
from ray_extract.errors import CaptureRefused, EngineDied, EngineError

logger = logging.getLogger(__name__)

_LOG_TAIL_LINES = 25
_EXCEPTION = " hit an exception: Traceback"  # how SGLang's processes log what ends them
_POLL_S = 0.5
HOST_COMMAND = (sys.executable, "-m", "ray_extract.engine.host")


def last_words(lines: Sequence[str]) -> list[str]:
    """The last lines of a log, behind the end of the first traceback that a scheduler logged if that is not among them.

    What ends a scheduler ends the processes around it, whose tracebacks come later and name no cause.
    """
    tail = list(lines[-_LOG_TAIL_LINES:])
    at = next((i for i, line in enumerate(lines) if _EXCEPTION in line), len(lines))
    if at >= len(lines) - len(tail):
        return tail
    end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith("[")), len(lines))
    return [lines[at], *lines[max(at + 1, end - _LOG_TAIL_LINES) : end], "...", *tail]


class EngineProcess:
    """One engine host and the processes below it. Thread-safe.

    Args:
        job: the job as JSON-ready data.
        folder: the arena's folder.
        env: environment variables beside the worker's own.
        log_dir: where the engine's output goes, one file an engine process.
        guard: told of what would be left behind if this process were killed.
        command: what to run as the host.
    """

    def __init__(
        self,
        job: dict[str, Any],
        folder: Path,
        env: dict[str, str],
        log_dir: Path,
        guard: Guard,
        command: Sequence[str] = HOST_COMMAND,
    ) -> None:
        self._command = list(command)
        self._job, self._folder, self._env, self._guard = job, folder, env, guard
        log_dir.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f"engine-{folder.name}-", suffix=".log", dir=log_dir)
        self.log = Path(name)
        self._log_fd = fd
        self._lock = threading.Lock()
        self._pending: dict[str, Future[Answer]] = {}
        self._ready: Future[EngineInfo] = Future()
        self._started = threading.Event()
        self._gone = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._shm_files: set[Path] = set()
        threading.Thread(target=self._run, name="ray_extract-engine", daemon=True).start()
        self._started.wait()

    def wait_ready(self, timeout_s: float) -> EngineInfo:
        """Wait until the engine serves.

        Raises:
            CaptureRefused, ConfigError: what the host says, in its words.
            EngineError: it died or was not ready in time; the message holds the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready.done():
            # A start that fails ends its processes before it says so, and a dead process shows no maps.
            self._note_shm_files()
            concurrent.futures.wait([self._ready], timeout=min(_POLL_S, max(0.0, deadline - time.monotonic())))
            if time.monotonic() > deadline and not self._ready.done():
                raise EngineError(
                    f"the engine was not ready after {timeout_s:.0f} s (engine.start_timeout_s)\n{self.log_tail()}"
                )
        return self._ready.result()

    def submit(
        self, rid: str, offset: int, count: int, dp_rank: int | None = None, new_tokens: int = 0
    ) -> Future[Answer]:
        """Send one row; its ids are i32 [count] at byte `offset` of the arena.

        Returns:
            A future of the answer; EngineDied when the engine dies first.
        """
        future: Future[Answer] = Future()
        with self._lock:
            if self._gone.is_set():
                future.set_exception(EngineDied("the engine is gone"))
                return future
            self._pending[rid] = future
        self._send(op="generate", rid=rid, offset=offset, count=count, dp_rank=dp_rank, new_tokens=new_tokens)
        return future

    def abort(self, rids: Sequence[str]) -> None:
        """Ask the engine to end these requests early; their futures still resolve."""
        self._send(op="abort", rids=list(rids))

    @property
    def alive(self) -> bool:
        """Whether the host still runs."""
        return not self._gone.is_set()

    @property
    def pid(self) -> int:
        """The host's process id, which is also its group and session."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End the host and everything below it; returns when no process of its session is left."""
        if self._gone.is_set():
            return
        assert self._process is not None
        self._note_shm_files()
        kill_session(self._process.pid)
        self._gone.wait()

    def _note_shm_files(self) -> None:
        """SGLang leaves small files of its own in /dev/shm when it is killed; find them while they are mapped."""
        found = mapped_shm_files(self.pid, self._folder) - self._shm_files
        self._shm_files |= found
        for path in found:
            self._guard.watch_file(path)

    def log_tail(self) -> str:
        """What the engine's output says of its end."""
        lines = last_words(self.log.read_text(errors="replace").splitlines())
        return "\n".join([f"the end of {self.log}:", *(f"  {line}" for line in lines)])

    def _send(self, **message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        # A broken pipe means that the host died; the reader resolves the futures.
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _run(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log_fd,
                text=True,
                errors="replace",
                start_new_session=True,
                env={**os.environ, **self._env},
            )
            self._guard.watch_group(self._process.pid)
        except (OSError, ValueError) as error:  # ValueError: a name in engine.env that no variable can have
            self._gone.set()
            self._ready.set_exception(EngineError(f"the engine host could not be started: {error}"))
            return
        finally:
            os.close(self._log_fd)
            self._started.set()
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps({"job": self._job, "folder": str(self._folder)}) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout or ():
            try:
                self._receive(json.loads(line))
            except Exception:
                # A host that is killed may leave half a line. Whatever it is, what waits here must learn of an end.
                logger.exception("the engine host said what cannot be read: %.200r", line)
                kill_session(self.pid)
        code = self._process.wait()
        kill_session(self._process.pid)
        for path in (*list(self._shm_files), *semaphores(self._folder)):
            path.unlink(missing_ok=True)
        with self._lock:
            self._gone.set()
            pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            future.set_exception(EngineDied(f"the engine host ended with exit code {code}"))
        if not self._ready.done():
            self._ready.set_exception(self._start_error("EngineError", f"exit code {code}"))

    def _receive(self, message: dict[str, Any]) -> None:
        event = message.pop("event")
        if event == "answer":
            with self._lock:
                future = self._pending.pop(message.pop("rid"), None)
            if future is not None:
                future.set_result(Answer(message["ok"], message["reason"], tuple(message["output_ids"])))
        elif event == "ready":
            self._note_shm_files()
            self._ready.set_result(EngineInfo(**message))
        else:
            self._note_shm_files()
            self._ready.set_exception(self._start_error(message["error"], message["reason"]))
            kill_session(self.pid)

    def _start_error(self, name: str, reason: str) -> Exception:
        """What a failed start is. A plugin that refuses leaves a record, of which SGLang's own error says nothing."""
        from ray_extract.engine.sglang import failure_reason

        left = failure_reason(self._folder)
        if left is not None and left.startswith("CaptureRefused: "):
            return CaptureRefused(left.removeprefix("CaptureRefused: "))
        kind: Callable[[str], Exception] = getattr(ray_extract.errors, name, EngineError)
        if kind is not EngineError:
            return kind(reason)
        return EngineError(f"the engine ended while starting: {left or reason}\n{self.log_tail()}")


def session_pids(session: int) -> list[int]:
    """Living processes of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The command may hold spaces and parentheses; fields start behind the last one: state ppid pgrp session
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def mapped_shm_files(session: int, arena: Path) -> set[Path]:
    """Files in /dev/shm that processes of a session map, other than the arena's.

    Matched by inode: glibc maps a semaphore under a temporary name and then links it to its own.
    """
    inodes: set[int] = set()
    for pid in session_pids(session):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/dev/shm/") and not fields[5].startswith(f"{arena}/"):
                    inodes.add(int(fields[4]))
    found: set[Path] = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_ino in inodes:
                found.add(path)
    return found


def kill_session(session: int) -> None:
    """SIGKILL every process of a session until none is left; a process in uninterruptible sleep is waited for."""
    warned = time.monotonic() + 30
    while pids := session_pids(session):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        if time.monotonic() > warned:
            logger.warning("processes %s of a killed engine are still there", pids)
            warned += 30
