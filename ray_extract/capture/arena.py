"""The arena: shared memory that holds whole shard images, and the control file beside it. Both ends are here.

The owner (the worker) makes one folder in /dev/shm:

    lock        held by flock while the owner lives; a folder whose lock is free is a leftover, whoever's pid it names
                (pids mean nothing across containers that share /dev/shm)
    spec.json   ArenaSpec, read by the capture plugin in the engine's processes
    data        the images; extents are ranges of it, allocated first fit in multiples of a page
    control     fixed arrays, one field one writer (see _FIELDS)

An extent lives in a slot of the control file. Its generation is odd while it is live and even while it is free. A
writer pins a slot (busy word, full barrier, generation read again) before it writes and unpins after it published; the
owner retires a slot by raising the generation, then waits until no busy word names it. So nothing is written into an
extent after retire() returns, by whatever delay, and no timer decides anything. A dead writer's words are cleared
only by the owner, once it has seen the writer's exit.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import mmap
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ray_extract.errors import ArenaError
from ray_extract.layout import SHM_PREFIX

logger = logging.getLogger(__name__)

PAGE = 4096
TAIL_BYTES = 8
"""Bytes behind the values of a token that is stored in fp8, see capture.fp8."""
TABLES = ("cu_seqlens", "cu_kept", "cu_spans", "spans", "input_ids")
SHM_ROOT = Path("/dev/shm")


@dataclasses.dataclass(frozen=True, slots=True)
class ArenaSpec:
    """What both ends must agree on.

    Args:
        nonce: names this arena in request ids; lower-case letters and digits.
        nbytes: size of the data file.
        slots: most live extents.
        max_rows: most rows of one extent.
        writers: capture writers, one for each data-parallel rank.
        ranks: attention-tensor-parallel ranks of each, the first of which writes states and all of which digest them.
        boundaries: boundaries to capture, ascending.
        final: whether the final state is captured too, as the last one.
        dtype: safetensors code of the states as the engine computes them.
        hidden: elements of a state.
        fp8: whether they are stored as records of capture.fp8.
    """

    nonce: str
    nbytes: int
    slots: int
    max_rows: int
    writers: int
    boundaries: tuple[int, ...]
    final: bool
    dtype: str
    hidden: int
    fp8: bool = False
    ranks: int = 1

    @property
    def num_states(self) -> int:
        """States captured for each token."""
        return len(self.boundaries) + self.final

    def to_json(self) -> str:
        """The text of spec.json."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the spec of an arena's folder."""
        fields = json.loads((folder / "spec.json").read_text())
        fields["boundaries"] = tuple(fields["boundaries"])
        return cls(**fields)


def new_nonce() -> str:
    """A fresh name for an arena: twelve lower-case hexadecimal digits."""
    return secrets.token_hex(6)


COUNTERS = ("passes", "tokens", "copies", "copied_bytes", "hook_us", "wait_us")

# name, dtype, shape; S = slots, R = max_rows, K = states, W = writers, P = the other ranks of a writer.
_FIELDS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    # written by the owner, while the slot is free
    ("generation", np.uint64, ("S",)),
    ("num_rows", np.uint64, ("S",)),
    ("state_base", np.uint64, ("S", "K")),  # byte offsets in `data`
    ("table_base", np.uint64, ("S", "tables")),
    # written by the plugin, while the slot is pinned; reset by the owner while it is free
    ("busy", np.uint64, ("S", "B")),  # one word a rank
    ("digest", np.uint64, ("S", "R", "K1")),
    ("sumsq", np.float64, ("S", "R", "K")),
    ("amax", np.float32, ("S", "R", "K")),
    ("nonfinite", np.int32, ("S", "R", "K")),
    ("zero", np.int32, ("S", "R", "K")),
    ("covered", np.uint32, ("S", "R")),
    ("fault", np.uint8, ("S", "R")),
    ("rank_digest", np.uint64, ("S", "R", "P", "K1")),  # as `digest`, of the states that each other rank held
    # written by the plugin at any time, never reset
    ("counters", np.uint64, ("W", "C")),
)
_PER_ROW = ("digest", "sumsq", "amax", "nonfinite", "zero", "covered", "fault", "rank_digest")


class Control:
    """NumPy views of the control file; each is [slots, ...], but `counters` is [writers, counters]."""

    generation: npt.NDArray[np.uint64]
    num_rows: npt.NDArray[np.uint64]
    state_base: npt.NDArray[np.uint64]
    table_base: npt.NDArray[np.uint64]
    busy: npt.NDArray[np.uint64]
    digest: npt.NDArray[np.uint64]
    sumsq: npt.NDArray[np.float64]
    amax: npt.NDArray[np.float32]
    nonfinite: npt.NDArray[np.int32]
    zero: npt.NDArray[np.int32]
    covered: npt.NDArray[np.uint32]
    fault: npt.NDArray[np.uint8]
    rank_digest: npt.NDArray[np.uint64]
    counters: npt.NDArray[np.uint64]

    def __init__(self, spec: ArenaSpec, buffer: mmap.mmap) -> None:
        for name, dtype, shape, offset in _control_layout(spec)[0]:
            count = int(np.prod(shape))
            setattr(self, name, np.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(shape))

    @staticmethod
    def nbytes(spec: ArenaSpec) -> int:
        """Size of the control file."""
        return _control_layout(spec)[1]


def _control_layout(spec: ArenaSpec) -> tuple[list[tuple[str, Any, tuple[int, ...], int]], int]:
    sizes = {
        "S": spec.slots,
        "C": len(COUNTERS),
        "R": spec.max_rows,
        "K": spec.num_states,
        "K1": spec.num_states + 1,
        "W": spec.writers,
        "B": spec.writers * spec.ranks,
        "P": spec.ranks - 1,
        "tables": len(TABLES),
    }
    fields, at = [], 0
    for name, dtype, axes in _FIELDS:
        shape = tuple(sizes[a] for a in axes)
        fields.append((name, dtype, shape, at))
        at += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64
    return fields, at


_barrier_lock = threading.Lock()


def full_barrier() -> None:
    """Order all earlier stores before all later loads.

    Acquiring a lock is an atomic read-modify-write with sequential consistency in CPython, which on x86 and on
    64-bit Arm with LSE orders a store before a later load of another address.
    """
    with _barrier_lock:
        pass


@dataclasses.dataclass(slots=True)
class Extent:
    """A range of the arena in a slot. `buffer` is its memory; `generation` is 0 until it is opened."""

    slot: int
    offset: int
    nbytes: int
    buffer: memoryview
    generation: int = 0


class Arena:
    """The owner's end."""

    def __init__(self, folder: Path, spec: ArenaSpec, lock: int, data: mmap.mmap, control: mmap.mmap) -> None:
        self.folder = folder
        self.spec = spec
        self._lock_fd = lock
        self._data = data
        self._view = memoryview(data)
        self._control_map = control
        self.control = Control(spec, control)
        self._changed = threading.Condition()
        self._taken: dict[int, tuple[int, int]] = {}  # slot -> (offset, rounded size)
        self._queue: list[object] = []  # allocation is first come, first served, so that a large unit is not starved

    @classmethod
    def create(cls, spec: ArenaSpec, root: Path = SHM_ROOT) -> Self:
        """Make the folder and reserve all of its memory now, so that a full /dev/shm is an error and never SIGBUS.

        Raises:
            ArenaError: not enough space; the message says how much is missing and how to raise it.
        """
        sweep(root)
        needed = spec.nbytes + Control.nbytes(spec)
        final = root / f"{SHM_PREFIX}{spec.nonce}"
        folder = root / f".{SHM_PREFIX}{spec.nonce}"
        lock = -1
        try:
            free = shutil.disk_usage(root).free
            if free < needed:
                raise ArenaError(_no_space(root, needed, free))
            folder.mkdir(mode=0o700)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "spec.json").write_text(spec.to_json())
            data = _allocate_file(folder / "data", spec.nbytes)
            control = _allocate_file(folder / "control", Control.nbytes(spec))
            folder.rename(final)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if lock >= 0:
                os.close(lock)
            if error.errno == errno.ENOSPC:
                raise ArenaError(_no_space(root, needed, shutil.disk_usage(root).free)) from None
            raise ArenaError(f"{root}: cannot make the arena: {error}") from error
        return cls(final, spec, lock, data, control)

    def close(self) -> None:
        """Remove the folder. The memory goes back when the last process that maps it is gone."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)

    def allocate(self, nbytes: int, cancelled: Callable[[], bool] = lambda: False) -> Extent:
        """Wait for a free slot and range; this wait is the only backpressure there is.

        Raises:
            ArenaError: the image can never fit, or `cancelled` became true.
        """
        size = -(-nbytes // PAGE) * PAGE
        if size > self.spec.nbytes:
            raise ArenaError(f"an image of {size} bytes in an arena of {self.spec.nbytes}; raise run.arena_bytes")
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while True:
                    if cancelled():
                        raise ArenaError("allocation cancelled: the worker is stopping")
                    if self._queue[0] is ticket:
                        place = self._find(size)
                        if place is not None:
                            slot, offset = place
                            self._taken[slot] = (offset, size)
                            return Extent(slot, offset, nbytes, self._view[offset : offset + nbytes])
                    self._changed.wait(1.0)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _find(self, size: int) -> tuple[int, int] | None:
        slot = next((s for s in range(self.spec.slots) if s not in self._taken), None)
        if slot is None:
            return None
        at = 0
        for offset, taken in sorted(self._taken.values()):
            if offset - at >= size:
                break
            at = offset + taken
        return (slot, at) if self.spec.nbytes - at >= size else None

    def open(self, extent: Extent, num_rows: int, states: list[int], tables: dict[str, int]) -> None:
        """Make an extent live, after its row table is written.

        Args:
            extent: from allocate().
            num_rows: rows of the image, at most spec.max_rows.
            states: offsets in the image of the states, in the order of spec.
            tables: offsets in the image of the tensors named in TABLES.
        """
        if num_rows > self.spec.max_rows:
            raise ArenaError(f"{num_rows} rows in one image; this arena holds {self.spec.max_rows}")
        control, slot = self.control, extent.slot
        for name in _PER_ROW:
            getattr(control, name)[slot, :num_rows] = 0
        control.num_rows[slot] = num_rows
        control.state_base[slot] = [extent.offset + s for s in states]
        control.table_base[slot] = [extent.offset + tables[name] for name in TABLES]
        full_barrier()
        control.generation[slot] += np.uint64(1)
        extent.generation = int(control.generation[slot])

    def retire(self, extent: Extent, alive: Callable[[], bool]) -> None:
        """Return when no writer can touch the extent any more.

        Args:
            alive: whether the processes that may pin this extent still run. If false, they are known to be gone, and
                their words are cleared.
        """
        control, slot = self.control, extent.slot
        if extent.generation == 0 or int(control.generation[slot]) != extent.generation:
            return
        control.generation[slot] += np.uint64(1)
        full_barrier()
        while control.busy[slot].any():
            if not alive():
                # Only of this slot: a new engine may already pin others.
                control.busy[slot] = 0
            else:
                time.sleep(0.0005)

    def clear_writers(self) -> None:
        """Forget the pins of writers whose exit is confirmed."""
        self.control.busy[:] = 0

    def reset_row(self, extent: Extent, row: int) -> None:
        """Forget what a dead writer published of a row, before the row is sent to the next engine."""
        for name in _PER_ROW:
            getattr(self.control, name)[extent.slot, row] = 0

    def free(self, extent: Extent) -> None:
        """Give the range back. The extent must be retired, and nobody may read its buffer."""
        extent.buffer.release()
        with self._changed:
            del self._taken[extent.slot]
            self._changed.notify_all()

    def counters(self) -> dict[str, int]:
        """What the writers counted, summed: see COUNTERS; times in microseconds."""
        return dict(zip(COUNTERS, self.control.counters.sum(axis=0).tolist(), strict=True))

    def tokens_by_writer(self) -> list[int]:
        """Tokens that each writer ever had in a forward pass."""
        found: list[int] = self.control.counters[:, COUNTERS.index("tokens")].tolist()
        return found

    @property
    def used_bytes(self) -> int:
        """Bytes in extents now."""
        return sum(size for _, size in self._taken.values())


class AttachedArena:
    """The other end: an arena mapped by a process of the engine.

    Args:
        folder: the arena's folder in /dev/shm.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = ArenaSpec.load(folder)
        self.data = _map_file(folder / "data", self.spec.nbytes)
        self.control = Control(self.spec, _map_file(folder / "control", Control.nbytes(self.spec)))

    def table(self, slot: int) -> dict[str, npt.NDArray[Any]]:
        """The row table of a slot's image; valid while the slot is pinned or its request is running."""
        bases = [int(b) for b in self.control.table_base[slot]]
        rows = int(self.control.num_rows[slot])

        def view(name: str, dtype: Any, count: int) -> npt.NDArray[Any]:
            return np.frombuffer(self.data, dtype=dtype, count=count, offset=bases[TABLES.index(name)])

        cu = {name: view(name, np.int64, rows + 1) for name in ("cu_seqlens", "cu_kept", "cu_spans")}
        spans = view("spans", np.int64, 2 * int(cu["cu_spans"][-1])).reshape(-1, 2)
        ids = view("input_ids", np.int32, int(cu["cu_seqlens"][-1]))
        return {**cu, "spans": spans, "input_ids": ids}


def sweep(root: Path = SHM_ROOT) -> list[str]:
    """Remove the arenas of dead owners; returns their names."""
    removed = []
    for folder in _leftovers(root):
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
        logger.info("removed the arena of a dead owner: %s", folder.name)
    return removed


def _leftovers(root: Path) -> Iterator[Path]:
    for pattern in (f"{SHM_PREFIX}*", f".{SHM_PREFIX}*"):
        for folder in root.glob(pattern):
            try:
                fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                # No lock yet: either being made this moment, or its maker died before the lock. Only age tells.
                if _is_old(folder):
                    yield folder
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            else:
                # A maker opens the lock a moment before it holds it, and writes the spec after that.
                if (folder / "spec.json").exists() or _is_old(folder):
                    yield folder
            finally:
                os.close(fd)


def _is_old(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > 60
    except OSError:
        return False


def _allocate_file(path: Path, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _map_file(path: Path, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _no_space(root: Path, needed: int, free: int) -> str:
    return (
        f"{root} has {free / 2**30:.2f} GiB free and the arena needs {needed / 2**30:.2f} GiB: lower run.arena_bytes "
        f"or output.shard_bytes, or enlarge {root} (mount -o remount,size=...; docker --shm-size; in Kubernetes an "
        "emptyDir with medium: Memory)"
    )
