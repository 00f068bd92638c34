"""The arena: extents, what a full /dev/shm and a killed owner leave, and the generation that ends every late write."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.capture import arena as module
from ray_extract.capture.arena import PAGE, Arena, ArenaSpec, AttachedArena, Control, Extent, new_nonce, sweep
from ray_extract.capture.writer import Fault
from ray_extract.errors import ArenaError

STATES = [0, PAGE]
TABLES = dict.fromkeys(module.TABLES, 0)
DEAD: Callable[[], bool] = lambda: False  # noqa: E731
ALIVE: Callable[[], bool] = lambda: True  # noqa: E731


def make_spec(pages: int = 8, slots: int = 4, writers: int = 2) -> ArenaSpec:
    return ArenaSpec(new_nonce(), pages * PAGE, slots, 6, writers, (2,), True, "F32", 8)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(make_spec(), tmp_path)
    yield made
    made.close()


def wait_for(event: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not event():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# Extents


@settings(max_examples=60, deadline=None)
@given(
    pages=st.integers(1, 12),
    slots=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(1, 12 * PAGE), st.integers(0, 20)), max_size=30),
)
def test_extents_of_any_sizes_lie_first_fit_apart_and_inside(
    tmp_path_factory: pytest.TempPathFactory, pages: int, slots: int, steps: list[tuple[int, int]]
) -> None:
    arena = Arena.create(make_spec(pages, slots), tmp_path_factory.mktemp("arena"))
    arena._changed.wait = lambda timeout=None: True  # type: ignore[method-assign]  # who would wait looks again at once
    live: dict[int, Extent] = {}
    try:
        for nbytes, victim in steps:
            if victim < 8 and live:
                arena.free(live.pop(sorted(live)[victim % len(live)]))
            size = -(-nbytes // PAGE) * PAGE
            taken = np.zeros(pages, bool)
            for e in live.values():
                taken[e.offset // PAGE : -(-(e.offset + e.nbytes) // PAGE)] = True
            fits = [at for at in range(pages - size // PAGE + 1) if not taken[at : at + size // PAGE].any()]
            if size > pages * PAGE:
                with pytest.raises(ArenaError, match=r"raise run\.arena_bytes"):
                    arena.allocate(nbytes)
            elif not fits or len(live) == slots:
                with pytest.raises(ArenaError, match="cancelled"):
                    arena.allocate(nbytes, cancelled=give_up_at_once())
            else:
                extent = arena.allocate(nbytes)
                assert extent.offset == PAGE * fits[0]
                assert extent.slot not in live and extent.slot < slots and len(extent.buffer) == nbytes
                live[extent.slot] = extent
            assert arena.used_bytes == sum(-(-e.nbytes // PAGE) * PAGE for e in live.values())
        for extent in live.values():
            arena.free(extent)
        whole = arena.allocate(pages * PAGE)
        assert (whole.offset, whole.nbytes) == (0, arena.spec.nbytes)
    finally:
        arena.close()


def give_up_at_once() -> Callable[[], bool]:
    """False once, so that the allocation looks for a place, then True."""
    answers = iter([False])
    return lambda: next(answers, True)


def test_a_large_image_is_not_overtaken_by_small_ones_that_would_fit(arena: Arena) -> None:
    first, second = arena.allocate(4 * PAGE), arena.allocate(2 * PAGE)
    order: list[str] = []

    def take(name: str, pages: int) -> None:
        extent = arena.allocate(pages * PAGE)
        order.append(name)
        arena.free(extent)

    threads = []
    for name, pages in (("large", 8), ("small", 1), ("smaller", 1)):
        threads.append(threading.Thread(target=take, args=(name, pages)))
        threads[-1].start()
        wait_for(lambda: len(arena._queue) == len(threads))
    arena.free(second)
    time.sleep(0.05)
    assert order == []
    arena.free(first)
    for thread in threads:
        thread.join(20)
    assert order == ["large", "small", "smaller"]


def test_a_waiting_allocation_that_is_cancelled_lets_the_next_one_through(arena: Arena) -> None:
    held = arena.allocate(5 * PAGE)
    stop = threading.Event()
    failed: list[str] = []

    def large() -> None:
        try:
            arena.allocate(8 * PAGE, stop.is_set)
        except ArenaError as error:
            failed.append(str(error))

    thread = threading.Thread(target=large)
    thread.start()
    wait_for(lambda: len(arena._queue) == 1)
    stop.set()
    small = arena.allocate(PAGE)
    thread.join(20)
    assert failed == ["allocation cancelled: the worker is stopping"] and small.offset == held.nbytes


def test_an_extent_whose_buffer_is_still_lent_is_not_given_to_others(arena: Arena) -> None:
    extent = arena.allocate(8 * PAGE)
    lent = pyarrow.py_buffer(extent.buffer)  # NumPy's views do not hold it
    with pytest.raises(BufferError):
        arena.free(extent)
    assert arena.used_bytes == 8 * PAGE
    del lent
    arena.free(extent)
    with pytest.raises(ValueError, match="released memoryview"):
        extent.buffer[0] = 1


# Shared memory that is full, or left behind


def leaves_nothing(root: Path) -> bool:
    return list(root.iterdir()) == []


def test_a_small_shm_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=PAGE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ArenaError) as caught:
        Arena.create(make_spec(), tmp_path)
    for word in (str(tmp_path), "GiB free", "run.arena_bytes", "--shm-size", "emptyDir with medium: Memory"):
        assert word in str(caught.value)
    assert leaves_nothing(tmp_path)


@pytest.mark.parametrize("full_at", [1, 2], ids=["data", "control"])
def test_shm_that_fills_up_meanwhile_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: int
) -> None:
    real, calls = os.posix_fallocate, []

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ArenaError, match=r"lower run\.arena_bytes"):
        Arena.create(make_spec(), tmp_path)
    assert leaves_nothing(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_root_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="nowhere: cannot make the arena"):
        Arena.create(make_spec(), tmp_path / "nowhere")


def test_memory_is_reserved_when_the_arena_is_made(arena: Arena) -> None:
    for name, nbytes in (("data", arena.spec.nbytes), ("control", Control.nbytes(arena.spec))):
        status = (arena.folder / name).stat()
        assert status.st_size == nbytes and status.st_blocks * 512 >= nbytes


def test_nobody_else_can_read_the_states_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Arena.create(make_spec(), tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (made.folder, *made.folder.iterdir())}
    made.close()
    assert modes[made.folder.name] == 0o700
    assert {name: modes[name] for name in ("data", "control", "lock")} == dict.fromkeys(
        ("data", "control", "lock"), 0o600
    )


def test_both_ends_agree_on_the_spec(arena: Arena) -> None:
    assert AttachedArena(arena.folder).spec == arena.spec


OWNER = """
import sys, time
from pathlib import Path
from ray_extract.capture.arena import Arena, ArenaSpec
arena = Arena.create(ArenaSpec(sys.argv[2], 8192, 2, 2, 1, (2,), True, "F32", 8), Path(sys.argv[1]))
print("made", flush=True)
time.sleep(120)
"""


def test_only_the_folders_of_dead_owners_are_swept(tmp_path: Path) -> None:
    mine = Arena.create(make_spec(), tmp_path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), "theirs"], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "made\n"
        assert sweep(tmp_path) == []
        owner.send_signal(signal.SIGKILL)
        owner.wait(20)
        assert sweep(tmp_path) == ["ray_extract-theirs"]
        assert [p.name for p in tmp_path.iterdir()] == [mine.folder.name]
    finally:
        owner.kill()
        owner.wait()
        mine.close()
    assert leaves_nothing(tmp_path)


def test_a_folder_being_made_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    """Between making the folder or opening its lock, and holding the lock, its owner looks dead."""
    bare, unlocked, halfway = (tmp_path / f".ray_extract-{name}" for name in ("bare", "unlocked", "halfway"))
    other = tmp_path / "somebody-else"
    for folder in (bare, unlocked, halfway, other):
        folder.mkdir()
    (unlocked / "lock").touch()
    (halfway / "lock").touch()
    (halfway / "spec.json").touch()  # written under the lock: its owner died
    assert sweep(tmp_path) == [halfway.name]
    for folder in (bare, unlocked, other):
        os.utime(folder, (0, 0))
    assert sorted(sweep(tmp_path)) == [bare.name, unlocked.name]
    assert other.exists()


# Generations


def test_a_generation_is_odd_while_its_extent_is_live_and_never_comes_back(arena: Arena) -> None:
    seen = []
    for _ in range(3):
        extent = arena.allocate(2 * PAGE)
        slot = extent.slot
        arena.open(extent, 3, STATES, TABLES)
        assert extent.generation == int(arena.control.generation[slot])
        seen.append(extent.generation)
        arena.retire(extent, ALIVE)
        assert int(arena.control.generation[slot]) == extent.generation + 1
        arena.retire(extent, ALIVE)  # a second time does nothing
        assert int(arena.control.generation[slot]) == extent.generation + 1
        arena.free(extent)
    assert seen == [1, 3, 5]


def test_retiring_an_extent_that_was_never_opened_does_nothing(arena: Arena) -> None:
    arena.retire(arena.allocate(PAGE), ALIVE)
    assert not arena.control.generation.any()


def test_opening_gives_the_writer_clean_marks_and_the_right_addresses(arena: Arena) -> None:
    arena.allocate(PAGE)
    extent = arena.allocate(3 * PAGE)
    for name in module._PER_ROW:
        getattr(arena.control, name)[:] = 7
    arena.open(extent, 4, STATES, {name: 8 * i for i, name in enumerate(module.TABLES)})
    other = AttachedArena(arena.folder).control
    for name in module._PER_ROW:
        marks = getattr(other, name)
        assert not marks[extent.slot, :4].any() and (marks[extent.slot, 4:] == 7).all()
        assert (np.delete(marks, extent.slot, axis=0) == 7).all()
    assert other.state_base[extent.slot].tolist() == [PAGE, 2 * PAGE]
    assert other.table_base[extent.slot].tolist() == [PAGE + 8 * i for i in range(5)]
    assert int(other.num_rows[extent.slot]) == 4


def test_too_many_rows_are_refused(arena: Arena) -> None:
    with pytest.raises(ArenaError, match="7 rows in one image; this arena holds 6"):
        arena.open(arena.allocate(PAGE), 7, STATES, TABLES)


def test_retire_waits_until_a_pinned_writer_is_done(arena: Arena) -> None:
    extent = arena.allocate(PAGE)
    arena.open(extent, 1, STATES, TABLES)
    writer = AttachedArena(arena.folder).control
    writer.busy[extent.slot, 1] = extent.generation
    thread = threading.Thread(target=arena.retire, args=(extent, ALIVE))
    thread.start()
    wait_for(lambda: int(writer.generation[extent.slot]) == extent.generation + 1)
    thread.join(0.1)
    assert thread.is_alive()
    writer.busy[extent.slot, 1] = 0
    thread.join(20)
    assert not thread.is_alive()


def test_retire_clears_a_dead_writer_from_its_own_slot_only(arena: Arena) -> None:
    """By then a new engine may pin other slots."""
    extents = [arena.allocate(PAGE) for _ in range(2)]
    for extent in extents:
        arena.open(extent, 1, STATES, TABLES)
        arena.control.busy[extent.slot] = extent.generation
    arena.retire(extents[0], DEAD)
    assert not arena.control.busy[extents[0].slot].any()
    assert (arena.control.busy[extents[1].slot] == extents[1].generation).all()
    arena.clear_writers()
    assert not arena.control.busy.any()


def test_resetting_a_row_forgets_that_row_only(arena: Arena) -> None:
    extent = arena.allocate(PAGE)
    arena.open(extent, 3, STATES, TABLES)
    for name in module._PER_ROW:
        getattr(arena.control, name)[extent.slot] = int(Fault.GAP)
    arena.reset_row(extent, 1)
    for name in module._PER_ROW:
        marks = getattr(arena.control, name)[extent.slot]
        assert not marks[1].any() and marks[0].all() and marks[2].all()
