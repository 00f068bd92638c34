"""A checkpoint at a URL, copied once to a folder of each node.

    <model.cache_dir>/<fingerprint>/          one content, wherever it came from
        config.json, *.safetensors ...        each under its name when it is whole, as <name>.part until then
        .staged.json                          names and sizes; written last, when the whole was compared
    <model.cache_dir>/<fingerprint>.lock      held by who copies; the kernel frees it when that process is gone

Files in subfolders, and the same weights in other forms than safetensors, are not copied. Nothing is ever deleted here
but a copy that proves wrong: engines may be reading.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ray_extract.config import ModelConfig
from ray_extract.errors import ConfigError, StoreError, Verdict
from ray_extract.store import open_store, outlast

logger = logging.getLogger(__name__)

T = TypeVar("T")

WEIGHTS = ".safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".tflite")
_MARKER = ".staged.json"
_FILES = 8  # copied at once; one stream of an object store gives 50 to 100 MB/s
_BLOCK = 32 << 20  # of one request
_PATIENCE_S = 600.0
_POLL_S = 1.0


def is_url(path: str) -> bool:
    """Whether model.path names a store rather than a folder or a hub's model."""
    return "://" in path


def cache_folder(cfg: ModelConfig, fingerprint: str) -> Path:
    """Where a node keeps the checkpoint with this fingerprint."""
    return Path(cfg.cache_dir).expanduser() / fingerprint[:32]


class RemoteCheckpoint:
    """The files of a checkpoint at a URL.

    Args:
        cfg: where.
        stopping: ends the patience with a store that fails.

    Raises:
        ConfigError: there is none, or it may not be read; as every method does.
        StoreError: the store fails in ways that may pass, and did so for ten minutes; as every method does.
    """

    def __init__(self, cfg: ModelConfig, stopping: threading.Event | None = None) -> None:
        self.url = cfg.path
        self.stopping = stopping or threading.Event()
        self._store = open_store(cfg.path, cfg.storage_options)
        found = self._patiently(lambda: list(self._store.list("", recursive=False)), "listing")
        self._sizes = {item.key: item.size for item in found if not item.key.endswith(_OTHER_WEIGHTS)}

    def names(self) -> list[str]:
        """Of all files, sorted."""
        return sorted(self._sizes)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self._sizes[name]

    def read(self, name: str, start: int, length: int) -> bytes:
        """Exactly these bytes."""
        return self._patiently(lambda: self._store.get_range(name, start, length), f"reading {name} of")

    def _patiently(self, action: Callable[[], T], what: str) -> T:
        try:
            return outlast(action, _PATIENCE_S, self.stopping, f"{what} {self.url}")
        except StoreError as error:
            if error.verdict is Verdict.STOP:
                raise ConfigError(f"model.path = {self.url!r}: {error}") from None
            raise


def stage(
    cfg: ModelConfig, fingerprint: str, compare: Callable[[Path], bool], stopping: threading.Event | None = None
) -> Path:
    """Copy a checkpoint to this node, unless that is done; who comes second waits for who came first.

    Args:
        cfg: where it is, and where to.
        fingerprint: of its content.
        compare: whether a folder's content is the one with the fingerprint.
        stopping: gives up.

    Returns:
        The folder.

    Raises:
        ConfigError: it is not there, not readable, no more what it was, or there is no room for it.
        StoreError: the store failed for too long.
    """
    folder = cache_folder(cfg, fingerprint)
    if _is_staged(folder):
        return folder
    remote = RemoteCheckpoint(cfg, stopping)
    with _locked(folder, cfg, remote.stopping):
        if _is_staged(folder):
            return folder
        began = time.monotonic()
        names = [name for name in remote.names() if cfg.load_format != "dummy" or not name.endswith(WEIGHTS)]
        _copy(remote, names, folder, cfg)
        if not compare(folder):
            shutil.rmtree(folder)
            raise ConfigError(
                f"model.path = {cfg.path!r}: the checkpoint there is no more the one that this run began with; was it "
                "replaced meanwhile?"
            )
        sizes = {name: remote.size(name) for name in names}
        _write(folder / _MARKER, json.dumps(sizes).encode())
        logger.info(
            "%s: %d files, %.2f GiB, are in %s after %.0f s",
            cfg.path,
            len(sizes),
            sum(sizes.values()) / 2**30,
            folder,
            time.monotonic() - began,
        )
    return folder


def stage_files(remote: RemoteCheckpoint, names: Iterable[str], cfg: ModelConfig, fingerprint: str) -> Path:
    """Copy some files only, for who runs no engine. Returns and raises as stage."""
    folder = cache_folder(cfg, fingerprint)
    with _locked(folder, cfg, remote.stopping):
        _copy(remote, list(names), folder, cfg)
    return folder


def _is_staged(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MARKER).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


@contextlib.contextmanager
def _locked(folder: Path, cfg: ModelConfig, stopping: threading.Event) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder.with_suffix(".lock").open("ab")
    except OSError as error:
        raise ConfigError(f"model.cache_dir = {cfg.cache_dir!r}: cannot be written ({error.strerror})") from None
    waits = False
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    logger.info("another process of this node copies %s; waiting for it", cfg.path)
                waits = True
            if stopping.wait(_POLL_S):
                raise StoreError(f"{cfg.path}: stopped while another process copied it")
        yield


def _copy(remote: RemoteCheckpoint, names: list[str], folder: Path, cfg: ModelConfig) -> None:
    """Copy files that are not there with their sizes; those that were begun go on."""
    todo = [name for name in names if not _has_size(folder / name, remote.size(name))]
    need = sum(remote.size(name) - _whole(_part(folder / name)) for name in todo)
    try:
        free = shutil.disk_usage(folder).free
        if need > free:
            raise OSError(errno.ENOSPC, f"{need / 2**30:.2f} GiB are to be copied, {free / 2**30:.2f} GiB are free")
        with ThreadPoolExecutor(_FILES, thread_name_prefix="stage") as pool:
            halted = threading.Event()
            try:
                for _ in pool.map(lambda name: _copy_file(remote, name, folder / name, halted), todo):
                    pass
            finally:
                halted.set()
    except OSError as error:
        raise ConfigError(
            f"model.cache_dir = {cfg.cache_dir!r}: {cfg.path} cannot be copied there: {error.strerror}; free some "
            "space, or name another folder"
        ) from None


def _copy_file(remote: RemoteCheckpoint, name: str, path: Path, halted: threading.Event) -> None:
    part, size = _part(path), remote.size(name)
    with part.open("r+b" if part.exists() else "w+b") as file:
        at = min(_whole(part), size)
        file.truncate(at)
        file.seek(at)
        while at < size:
            if halted.is_set() or remote.stopping.is_set():
                raise StoreError(f"{remote.url}: stopped while it was copied")
            block = remote.read(name, at, min(_BLOCK, size - at))
            file.write(block)
            file.flush()
            os.fdatasync(file.fileno())  # or a power cut could leave a length without its bytes
            at += len(block)
    part.replace(path)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _whole(part: Path) -> int:
    """Bytes of a file that was begun which are surely there: all blocks but the last, which may have been cut off."""
    return max(0, part.stat().st_size // _BLOCK - 1) * _BLOCK if part.exists() else 0


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _write(path: Path, data: bytes) -> None:
    part = _part(path)
    part.write_bytes(data)
    part.replace(path)
