"""The guard: a small process that cleans up after a worker that was killed, when nobody else can.

A worker that dies by SIGKILL (the node's memory killer, Ray ending an actor whose driver is gone) cannot give its
shared memory back. The guard holds the other end of a pipe; when the pipe ends without the word `done`, the worker is
dead: the guard kills the engine's process group, and removes the arena's folder and the small files of the engine. It
is a grandchild in a session of its own, since Ray may kill an actor's children with it. Standard library only; it runs
without site-packages.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path


class Guard:
    """The worker's end.

    Args:
        folder: removed when the worker dies.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._process.wait()  # the child forks and ends; the grandchild holds the pipe

    def watch_group(self, group: int) -> None:
        """Name the process group of the running engine; replaces the one named before."""
        self._say(f"group {group}")

    def watch_file(self, path: Path) -> None:
        """Name a file of the engine that would be left behind."""
        self._say(f"file {path}")

    def dismiss(self) -> None:
        """The worker cleaned up itself."""
        self._say("done")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def semaphores(folder: Path) -> list[Path]:
    """What the engine's processes would leave of Python's semaphores; engine.host gives them the folder's name."""
    return list(folder.parent.glob(f"sem.{folder.name}-*"))


def main() -> None:
    """Wait for the end of the pipe."""
    folder = Path(sys.argv[1])
    if os.fork():
        return
    os.setsid()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    group, files = 0, []
    for line in sys.stdin:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "done":
            return
        if word == "group":
            group = int(value)
        else:
            files.append(Path(value))
    if group:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for path in (*files, *semaphores(folder)):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
