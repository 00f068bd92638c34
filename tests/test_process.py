"""The engine's process tree: it answers, its death is known, and nothing of it is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import arenas
import numpy as np
import pytest

from ray_extract.capture.arena import Arena
from ray_extract.capture.guard import Guard
from ray_extract.engine.process import (
    HOST_COMMAND,
    EngineProcess,
    kill_session,
    last_words,
    mapped_shm_files,
    session_pids,
)
from ray_extract.engine.simulated import simulated_states
from ray_extract.errors import CaptureRefused, ConfigError, EngineDied, EngineError


def wait_for(event: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not event():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def session(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# Sessions


def test_a_session_is_its_leader_and_all_below_it() -> None:
    with session("bash", "-c", "sleep 97 & (sleep 97 & wait) & wait") as leader:
        wait_for(lambda: len(session_pids(leader.pid)) == 4)
        assert leader.pid in session_pids(leader.pid)
        assert os.getpid() not in session_pids(leader.pid)


def test_a_process_name_with_spaces_and_parentheses_is_no_trouble(tmp_path: Path) -> None:
    odd = tmp_path / "x) S 1 1 ("
    odd.symlink_to("/bin/sleep")
    with session(str(odd), "97") as leader:
        wait_for(lambda: Path(f"/proc/{leader.pid}/comm").read_text().startswith("x) S"))
        assert session_pids(leader.pid) == [leader.pid]


def test_a_zombie_is_not_living() -> None:
    with session("true") as leader:
        wait_for(lambda: ") Z " in Path(f"/proc/{leader.pid}/stat").read_text())
        assert session_pids(leader.pid) == []


def test_killing_a_session_leaves_none_of_it_and_nothing_else_dies() -> None:
    stubborn = "trap '' TERM INT HUP; sleep 97 & (sleep 97 & wait) & wait"
    with session("bash", "-c", stubborn) as leader, session("sleep", "97") as bystander:
        wait_for(lambda: len(session_pids(leader.pid)) == 4)
        kill_session(leader.pid)
        assert session_pids(leader.pid) == []
        assert session_pids(bystander.pid) == [bystander.pid]


MAPPER = """
import mmap, os, sys, time
for final in sys.argv[1:]:
    temporary = final + ".new"  # as glibc makes a semaphore
    with open(temporary, "w+b") as f:
        f.truncate(4096)
        keep = globals().setdefault("maps", [])
        keep.append(mmap.mmap(f.fileno(), 4096))
    os.link(temporary, final)
    os.unlink(temporary)
print("ready", flush=True)
time.sleep(97)
"""


@pytest.fixture
def shm_names() -> Iterator[tuple[Path, Path, Path]]:
    """Names in /dev/shm: two files, and an arena's folder."""
    stem = f"/dev/shm/ray_extract-test-process-{os.getpid()}"
    paths = (Path(f"{stem}-a"), Path(f"{stem}-b"), Path(f"{stem}-arena"))
    paths[2].mkdir()
    yield paths
    for path in (*paths[:2], paths[2] / "data"):
        path.unlink(missing_ok=True)
    paths[2].rmdir()


def test_the_files_in_shm_that_a_session_maps_are_found_but_not_the_arenas(
    shm_names: tuple[Path, Path, Path],
) -> None:
    mapped, unmapped, arena = shm_names
    unmapped.write_bytes(b"1")
    with session(sys.executable, "-c", MAPPER, str(mapped), str(arena / "data")) as leader:
        assert leader.stdout is not None and leader.stdout.readline() == b"ready\n"
        assert mapped_shm_files(leader.pid, arena) == {mapped}
    assert mapped_shm_files(leader.pid, arena) == set()


# The engine host


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = arenas.make_arena(tmp_path)
    yield made
    made.close()


@contextlib.contextmanager
def engine_process(arena: Arena, logs: Path, command: tuple[str, ...], **fields: Any) -> Iterator[EngineProcess]:
    job = {
        "model": {"path": "none"},
        "dataset": {"paths": "none"},
        "output": {"url": "none"},
        "engine": {"kind": "simulated", **fields},
    }
    guard = Guard(arena.folder / "nothing")
    process = EngineProcess(job, arena.folder, fields.get("env", {}), logs, guard, command)
    try:
        yield process
    finally:
        process.kill()
        guard.dismiss()


def test_the_host_runs_rows_into_the_arena_and_its_death_fails_those_in_flight(arena: Arena, tmp_path: Path) -> None:
    live = arenas.open_image(arena, [5, 9, 3])
    ids_at = live.extent.offset + live.layout.tensors["input_ids"].offset
    args = {"reject_token": int(live.ids(2)[0]), "tokens_per_s": 500}
    with engine_process(arena, tmp_path, HOST_COMMAND, chunked_prefill_size=4, args=args) as engine:
        info = engine.wait_ready(60)
        assert (info.version, info.dp_size) == ("simulated", 1)
        futures = [
            engine.submit(live.rid(arena.spec.nonce, row), ids_at + 4 * int(live.table.cu_seqlens[row]), n)
            for row, n in enumerate((5, 9, 3))
        ]
        answers = [f.result(20) for f in futures]
        assert [a.ok for a in answers] == [True, True, False] and "rejected" in answers[2].reason
        assert arena.control.covered[live.extent.slot, :3].tolist() == [5, 9, 0]
        for k, column in enumerate(live.layout.columns):
            stored = live.layout.state_bytes(live.extent.buffer, column)[5:14].view(np.float32)
            expected = simulated_states(live.ids(1), 0, arenas.STATES, arenas.HIDDEN, "F32")[k]
            assert np.array_equal(stored, expected.numpy())

        # A row in flight, another one's answer given up, and then the host dies.
        zeros = arena.spec.nbytes // 2
        slow = engine.submit("not ours", zeros, 30_000)
        aborted = engine.submit("nor this", zeros, 30_000)
        # Answered at once and in order, so the two before it are in the engine; an abort that overtakes is lost.
        assert not engine.submit("marker", ids_at + 4 * 14, 3).result(20).ok
        engine.abort(["nor this"])
        assert aborted.result(20).reason == "aborted" and engine.alive and not slow.done()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="exit code -9"):
            slow.result(20)
        wait_for(lambda: not engine.alive)
        assert session_pids(engine.pid) == []
        with pytest.raises(EngineDied, match="the engine is gone"):
            engine.submit("too late", 0, 1).result(1)


def test_a_job_that_the_engine_refuses_comes_back_as_its_error(arena: Arena, tmp_path: Path) -> None:
    with (
        engine_process(arena, tmp_path, HOST_COMMAND, args={"tokens": 1}) as engine,
        pytest.raises(ConfigError, match=r"engine\.args\.tokens: the simulated engine knows"),
    ):
        engine.wait_ready(60)


def stub(code: str) -> tuple[str, ...]:
    """A host without an engine, which starts at once."""
    return (sys.executable, "-c", "import json, os, subprocess, sys, time\nfirst = json.loads(input())\n" + code)


READY = 'print(json.dumps({"event": "ready", "version": "stub", "max_input_tokens": 9, "dp_size": 1, '
READY += '"environment": {}}), flush=True)\n'


def test_killing_leaves_no_process_and_no_small_file(
    arena: Arena, tmp_path: Path, shm_names: tuple[Path, Path, Path]
) -> None:
    mapped = shm_names[0]
    children = f"subprocess.Popen([sys.executable, '-c', {MAPPER!r}, {str(mapped)!r}], stdout=subprocess.PIPE)"
    code = f"child = {children}\nchild.stdout.readline()\n{READY}time.sleep(97)"
    with engine_process(arena, tmp_path, stub(code)) as engine:
        engine.wait_ready(20)
        future = engine.submit("row", 0, 1)
        assert mapped.exists() and len(session_pids(engine.pid)) == 2
        engine.kill()
        assert session_pids(engine.pid) == [] and not mapped.exists() and not engine.alive
        with pytest.raises(EngineDied):
            future.result(1)
        engine.kill()  # a second time does nothing


def test_children_that_outlive_the_host_are_reaped_with_it(arena: Arena, tmp_path: Path) -> None:
    code = f"subprocess.Popen(['sleep', '97'], stdout=subprocess.DEVNULL)\n{READY}sys.stdin.readline()\nos._exit(3)"
    with engine_process(arena, tmp_path, stub(code)) as engine:
        engine.wait_ready(20)
        with pytest.raises(EngineDied, match="exit code 3"):
            engine.submit("row", 0, 1).result(20)
        assert session_pids(engine.pid) == []


@pytest.mark.parametrize("line", [b'{"event": "answ', b'{"event": "answer"}\n', b"\xff\xfe\n", b"[]\n"])
def test_a_line_that_cannot_be_read_is_the_hosts_end(arena: Arena, tmp_path: Path, line: bytes) -> None:
    """A host that is killed may leave half a line. If that ended the reader, no answer and no death would ever come."""
    code = f"{READY}sys.stdin.readline()\nos.write(1, {line!r})\nos.close(1)\ntime.sleep(97)"
    with engine_process(arena, tmp_path, stub(code)) as engine:
        engine.wait_ready(20)
        with pytest.raises(EngineDied, match="exit code -9"):
            engine.submit("row", 0, 1).result(20)
        assert not engine.alive and session_pids(engine.pid) == []


def test_a_host_that_dies_while_starting_shows_the_end_of_its_log(arena: Arena, tmp_path: Path) -> None:
    code = "print('line', *range(3), sep='\\n', file=sys.stderr)\nraise SystemExit('no such weights')"
    with engine_process(arena, tmp_path, stub(code)) as engine:
        with pytest.raises(EngineError, match=r"(?s)while starting.*exit code 1.*no such weights") as caught:
            engine.wait_ready(20)
        assert str(engine.log) in str(caught.value)


def test_a_log_shows_what_ended_a_scheduler_before_what_that_ended() -> None:
    cause = [
        "[t] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "a"',
        "  f()",
        "ValueError: why",
    ]
    after = [f"[t] other line {i}" for i in range(40)]
    assert last_words(["[t] start", *cause, *after]) == [*cause, "...", *after[-25:]]
    assert last_words(["[t] start", *cause]) == ["[t] start", *cause]
    assert last_words(after) == after[-25:]


def test_a_plugins_refusal_is_what_a_failed_start_says(arena: Arena, tmp_path: Path) -> None:
    """SGLang's own words would only be that a scheduler died."""
    record = arena.folder / "failed.1.json"
    code = f"open({str(record)!r}, 'w').write(json.dumps({{'reason': 'CaptureRefused: no setter'}}))"
    with (
        engine_process(arena, tmp_path, stub(code)) as engine,
        pytest.raises(CaptureRefused, match=r"^no setter$"),
    ):
        engine.wait_ready(20)


def test_a_host_that_is_not_ready_in_time_is_an_error_with_the_option(arena: Arena, tmp_path: Path) -> None:
    with (
        engine_process(arena, tmp_path, stub("time.sleep(97)")) as engine,
        pytest.raises(EngineError, match=r"not ready after 0 s \(engine\.start_timeout_s\)"),
    ):
        engine.wait_ready(0.2)


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"A": "\0"}])
def test_an_environment_that_no_process_can_have_is_an_error_at_once(
    arena: Arena, tmp_path: Path, env: dict[str, str]
) -> None:
    with (
        engine_process(arena, tmp_path, stub(""), env=env) as engine,
        pytest.raises(EngineError, match="the engine host could not be started"),
    ):
        engine.wait_ready(20)


def test_the_host_ends_with_all_below_it_when_its_worker_is_gone(arena: Arena) -> None:
    """The worker's end of stdin closes, however the worker died."""
    job = {"model": {"path": "n"}, "dataset": {"paths": "n"}, "output": {"url": "n"}, "engine": {"kind": "simulated"}}
    host = subprocess.Popen(
        HOST_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert host.stdin is not None and host.stdout is not None
    host.stdin.write(json.dumps({"job": job, "folder": str(arena.folder)}) + "\n")
    host.stdin.flush()
    assert json.loads(host.stdout.readline())["event"] == "ready"
    host.stdin.close()
    assert host.wait(20) == -signal.SIGKILL
    host.stdout.close()
