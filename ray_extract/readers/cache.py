"""Shards of an object store in a local folder, up to a number of bytes; for all processes of a host together.

    <folder>/<name>.safetensors      a whole shard, or one with holes where states that nobody asked for would be
    <folder>/.<name>.<bytes>.part    one that is being fetched, and what it will take
    <folder>/.locks/                 `space`, held to open, evict and reserve; `00` .. `ff`, held to fetch

`<name>` hashes the output's URL, the shard's key and the states. A file gets its name when it is whole and on the disk,
so a process or a machine that dies leaves no torn one. Each fetch holds its lock, which the system drops with the
process: two processes never fetch a shard twice, and a `.part` whose lock is free is a dead one's and goes.

The least recently opened file is evicted first. One that is still mapped somewhere stays readable there, and its bytes
come back when the last tensor made from it is gone; the folder itself never holds more than the bound.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ray_extract.errors import ConfigError, NotFound, ShardError, StoreError
from ray_extract.layout import EXTENSIONS
from ray_extract.readers.arguments import whole
from ray_extract.readers.fetch import fetch, wanted
from ray_extract.shards.base import Shard
from ray_extract.shards.reader import open_shard
from ray_extract.store import LocalStore, Store, translate

log = logging.getLogger(__name__)

_PART = re.compile(r"^\.([0-9a-f]{32})\.(\d+)\.[0-9a-f]+\.part$")
_FILE = re.compile(r"^[0-9a-f]{32}\.[a-z]+$")
_BLOCK = 512  # st_blocks counts these, whatever the file system's own
_WAIT_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A file of the folder: the bytes that it takes or will take, and when it was opened last."""

    path: Path
    nbytes: int
    used_ns: int


class ShardCache:
    """A folder of shards. Holds no lock and no open file between calls; threads and processes may share it.

    Args:
        folder: made if it does not exist. On a local disk: file locks and memory maps decide.
        max_bytes: most bytes in it.

    Raises:
        ConfigError: no such folder can be made, or max_bytes is no positive number.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self.max_bytes = whole("cache_bytes", max_bytes, 1)
        self.folder = Path(folder).expanduser().absolute()
        self._locks = self.folder / ".locks"
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cache_dir = {self.folder}: cannot be made: {error.strerror}") from None

    def open(
        self,
        store: Store,
        key: str,
        format: str,
        names: Sequence[str],
        *,
        again: bool = False,
        stop: threading.Event | None = None,
    ) -> Shard:
        """Open a shard, fetching it first if it is not here, or not whole.

        Args:
            store, key, format: the object.
            names: its states that will be read. The others are not fetched, and must not be read.
            again: fetch it in any case: what is here is known to be damaged.
            stop: see fetch.

        Raises:
            ConfigError: it takes more than max_bytes, or has no such state.
            ShardError: the object itself is truncated or altered.
            StoreError: the store failed, or the disk is full.
        """
        name = _name(store.url, key, names)
        path = self.folder / f"{name}.{EXTENSIONS.get(format, format)}"
        where = f"{store.url}/{key}"
        shard = None if again else self._hit(path, where, format)
        if shard is not None:
            return shard
        with self._lock(name[:2]):
            # Somebody else may have fetched it while we waited.
            shard = None if again else self._hit(path, where, format)
            return shard if shard is not None else self._fetch(path, store, key, format, names, stop)

    def _hit(self, path: Path, where: str, format: str) -> Shard | None:
        with self._lock("space", fcntl.LOCK_SH):  # or it could be evicted between its name and its opening
            try:
                os.utime(path)
                return _open(path, where, format)
            except (FileNotFoundError, NotFound):
                return None
            except ShardError as error:
                log.warning("%s: damaged, and fetched again: %s", path, error)
                path.unlink(missing_ok=True)
                return None

    def _fetch(
        self, path: Path, store: Store, key: str, format: str, names: Sequence[str], stop: threading.Event | None
    ) -> Shard:
        want = wanted(store, key, format, names)
        part = self._reserve(path, key, want.nbytes)
        try:
            with _disk(part), part.open("r+b") as file:
                file.truncate(want.size)
                fd = file.fileno()

                def write(start: int, chunk: memoryview) -> None:
                    with _disk(part):
                        while chunk:
                            done = os.pwrite(fd, chunk, start)
                            chunk, start = chunk[done:], start + done

                fetch(store, key, want.ranges, write, stop)
                os.fsync(fd)
            with self._lock("space", fcntl.LOCK_SH):
                part.replace(path)
                return _open(path, f"{store.url}/{key}", format)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _reserve(self, path: Path, key: str, nbytes: int) -> Path:
        """Make room, by evicting and if need be by waiting for other fetches to end, and take it.

        Waits for nothing while it holds room, so fetches cannot wait for each other.
        """
        if nbytes > self.max_bytes:
            raise ConfigError(
                f"cache_bytes = {self.max_bytes}: {key} takes {nbytes}; raise it, or ask for fewer states"
            )
        while True:
            with self._lock("space"):
                taken = nbytes + sum(self._parts(path.stem))
                if taken <= self.max_bytes:
                    files = sorted(self._files(), key=lambda entry: entry.used_ns)
                    for entry in evicted(files, self.max_bytes - taken):
                        entry.path.unlink(missing_ok=True)
                    part = self.folder / f".{path.stem}.{nbytes}.{secrets.token_hex(4)}.part"
                    with _disk(part):
                        part.touch(exist_ok=False)
                    return part
            time.sleep(_WAIT_S)

    def _files(self) -> Iterator[_Entry]:
        for path in self.folder.iterdir():
            if _FILE.match(path.name):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    yield _Entry(path, stat.st_blocks * _BLOCK, stat.st_mtime_ns)

    def _parts(self, own: str) -> Iterator[int]:
        """Bytes of the fetches on their way; what dead ones left is removed. We hold the lock of `own`."""
        for path in list(self.folder.iterdir()):
            match = _PART.match(path.name)
            if match is None:
                continue
            if match[1][:2] == own[:2]:
                path.unlink(missing_ok=True)
                continue
            try:
                with self._lock(match[1][:2], fcntl.LOCK_EX | fcntl.LOCK_NB):
                    path.unlink(missing_ok=True)
            except BlockingIOError:
                yield int(match[2])

    @contextlib.contextmanager
    def _lock(self, name: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Each holder opens the file anew, so that threads exclude each other too."""
        with _disk(self._locks):
            self._locks.mkdir(parents=True, exist_ok=True)  # somebody may have emptied the folder
            file = (self._locks / name).open("ab")
        with file:
            fcntl.flock(file, how)
            yield


def evicted(files: Sequence[_Entry], room: int) -> list[_Entry]:
    """Which files must go so that the rest takes at most `room` bytes: the first ones."""
    total = sum(entry.nbytes for entry in files)
    gone: list[_Entry] = []
    for entry in files:
        if total <= room:
            break
        gone.append(entry)
        total -= entry.nbytes
    return gone


def _name(url: str, key: str, names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([url, key, *sorted(names)]).encode()).hexdigest()[:32]


def _open(path: Path, where: str, format: str) -> Shard:
    try:
        shard = open_shard(LocalStore(path.parent), path.name, format)
    except ShardError as error:
        raise ShardError(str(error).replace(str(path), where)) from None  # the copy is right if it was just fetched
    shard.where = where
    return shard


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn what the file system says into our errors: a full disk is OutOfSpace."""
    try:
        yield
    except (BlockingIOError, FileNotFoundError, StoreError):
        raise
    except OSError as error:
        raise translate(error, str(path)) from None
