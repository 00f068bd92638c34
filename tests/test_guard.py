"""The guard: what a worker leaves when it is killed is gone within seconds, and nothing else is touched."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_extract.engine.process import session_pids

OWNER = """
import subprocess, sys, time
from pathlib import Path
from ray_extract.capture.guard import Guard
folder, small, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
guard = Guard(folder)
groups = []
for _ in range(2):
    command = ["bash", "-c", "trap '' TERM; sleep 97 & sleep 97 & wait"]
    groups.append(subprocess.Popen(command, start_new_session=True).pid)
    guard.watch_group(groups[-1])
guard.watch_file(small)
guard.watch_file(small.with_name("never made"))
if what == "dismissed":
    guard.dismiss()
print(*groups, flush=True)
time.sleep(97)
"""


@pytest.fixture
def things(tmp_path: Path) -> tuple[Path, Path]:
    """An arena's folder with files in it, and a small file of the engine."""
    folder, small = tmp_path / "arena", tmp_path / "small file"
    folder.mkdir()
    (folder / "data").write_bytes(b"1")
    small.write_bytes(b"1")
    (tmp_path / "sem.arena-x1").write_bytes(b"1")  # a semaphore of the engine, as engine.host names them
    return folder, small


@contextlib.contextmanager
def owner(things: tuple[Path, Path], what: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A worker with a guard, and the engines' process groups that it named one after the other."""
    command = [sys.executable, "-c", OWNER, *map(str, things), what]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    groups: list[int] = []
    try:
        assert process.stdout is not None
        groups = [int(word) for word in process.stdout.readline().split()]
        yield process, groups
    finally:
        process.kill()
        process.wait()
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def eventually(event: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 15
    while not event() and time.monotonic() < deadline:
        time.sleep(0.02)
    return event()


@pytest.mark.parametrize("with_children", [False, True], ids=["the worker alone", "the worker's whole process group"])
def test_a_killed_workers_folder_files_and_engine_are_gone_within_seconds(
    things: tuple[Path, Path], with_children: bool
) -> None:
    """Ray may kill an actor's children with it; the guard is not among them."""
    folder, _ = things
    with owner(things, "watched") as (process, groups):
        before, engine = groups
        assert eventually(lambda: len(session_pids(engine)) == 3)
        (os.killpg if with_children else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        assert eventually(lambda: not session_pids(engine))
        assert eventually(lambda: not list(folder.parent.iterdir()))
        # The engine that was named before is another process by now, if any.
        assert session_pids(before)


def test_a_dismissed_guard_touches_nothing(things: tuple[Path, Path]) -> None:
    folder, small = things
    with owner(things, "dismissed") as (process, groups):
        assert eventually(lambda: all(len(session_pids(group)) == 3 for group in groups))
        process.kill()
        process.wait()
        time.sleep(0.7)  # when the guard acts, it acts within milliseconds
        assert folder.exists() and small.exists() and folder.with_name("sem.arena-x1").exists()
        assert all(len(session_pids(group)) == 3 for group in groups)
