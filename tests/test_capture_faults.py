"""Faults of capture in a real SGLang scheduler: the rows that are hit fail with a reason, and nothing else happens.

Never a hang, never a wrong row, and never a restart of the engine for the sake of a row.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import models
import numpy as np
import pytest
from faults import POINTS, Faults
from rig import CHUNK, TOLERANCE, Ids, Result, Rig, nothing_left, prompts, rig

from ray_extract.capture.writer import FAULT_TEXT, Fault
from ray_extract.errors import ArenaError, CaptureRefused, EngineError
from ray_extract.records import RowFailure, RowStatus
from ray_extract.shards.image import row_table

pytestmark = pytest.mark.engine

LENGTHS = (1, 350, CHUNK, CHUNK - 1, 7 * CHUNK // 2, 7, 2 * CHUNK, 30)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def engine(faults: Faults, checkpoints: Path) -> Iterator[Rig]:
    with rig("llama", checkpoints, env=faults.env()) as made:
        yield made


def in_time(made: Rig, rows: list[Ids]) -> Result:
    """Run rows; a hang is a failed test and not a stuck one."""
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(made.run(rows)), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "the rows hang"
    return found[0]


def assert_right_but(made: Rig, rows: list[Ids], result: Result, failed: set[int]) -> None:
    """Every row is as Hugging Face has it, except those that failed, which are zero."""
    assert set(result.failures) == failed
    good = [i for i in range(len(rows)) if i not in failed]
    assert not any(state.any() for i in failed for state in result.states[i])
    errors = made.errors([rows[i] for i in good], Result([result.states[i] for i in good], {}))
    assert errors.max(initial=0) < TOLERANCE, errors
    assert made.extractor.progress()["engine_starts"] == 1


REASONS = {
    "states": FAULT_TEXT[Fault.NO_STATES],
    "issue": FAULT_TEXT[Fault.COPY_FAILED],
    "wait": FAULT_TEXT[Fault.COPY_FAILED],
}


@pytest.mark.parametrize("point", POINTS)
def test_an_exception_in_a_hook_fails_the_rows_of_that_pass_and_no_others(
    engine: Rig, faults: Faults, point: str
) -> None:
    rows = prompts(LENGTHS, seed=1)
    faults.arm(point)
    result = in_time(engine, rows)
    assert faults.fired(point)
    assert 0 < len(result.failures) < len(rows)
    assert {f.status for f in result.failures.values()} == {RowStatus.FAULT}
    reason = REASONS.get(point, FAULT_TEXT[Fault.HOOK_FAILED])
    assert {f.reason for f in result.failures.values()} == {reason}
    assert_right_but(engine, rows, result, set(result.failures))
    assert_right_but(engine, rows, in_time(engine, rows), set())


def test_a_fault_in_the_middle_of_a_row_fails_that_row_alone(engine: Rig, faults: Faults) -> None:
    """A row of many chunks goes on in later passes, which must neither heal it nor hide the first reason."""
    rows = prompts((20 * CHUNK, 9), seed=2)
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(engine.run(rows)), daemon=True)
    before = engine.extractor.progress()["passes"]
    thread.start()
    while engine.extractor.progress()["passes"] < before + 3:
        time.sleep(0.001)
    faults.arm("runs")
    thread.join(60)
    assert found and faults.fired("runs")
    assert found[0].failures == {0: RowFailure(0, RowStatus.FAULT, FAULT_TEXT[Fault.HOOK_FAILED])}
    assert_right_but(engine, rows, found[0], {0})


# Bad rows: they would end the scheduler, so they must not reach it.

BAD = {
    "the first id beyond the vocabulary": ([5, models.VOCAB, 7], f"token id out of range: {models.VOCAB}"),
    "a huge id": ([5, 2**31 - 1], f"token id out of range: {2**31 - 1}"),
    "a negative id": ([5, -1, 7], "token id out of range: -1"),
    "no tokens": ([], "no tokens"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_row_that_would_end_the_engine_is_failed_before_it(engine: Rig, what: str) -> None:
    ids, reason = BAD[what]
    rows = prompts((40, 1, 90), seed=3)
    rows[1] = np.array(ids, np.int32)
    result = in_time(engine, rows)
    assert result.failures[1].status is RowStatus.REJECTED and result.failures[1].reason.startswith(reason)
    assert_right_but(engine, rows, result, {1})


def test_an_over_long_row_is_failed_before_the_engine(engine: Rig) -> None:
    longest = engine.info.max_input_tokens
    rows = prompts((40, longest + 1, 90), seed=4)
    result = in_time(engine, rows)
    assert result.failures[1].reason == f"{longest + 1} tokens; this engine runs at most {longest}"
    assert_right_but(engine, rows, result, {1})


# A full arena


def test_an_image_that_can_never_fit_is_refused_and_the_engine_serves_on(engine: Rig) -> None:
    rows = prompts((4000,) * 40, seed=5)
    table = row_table(range(40), rows, [np.ones(len(r), np.uint8) for r in rows])
    with pytest.raises(ArenaError, match=r"raise run\.arena_bytes"), engine.extractor.capture(table, {}):
        pass
    small = prompts(LENGTHS, seed=6)
    assert_right_but(engine, small, in_time(engine, small), set())


def test_an_image_waits_while_others_hold_the_arena_and_is_right_then(engine: Rig) -> None:
    arena = engine.extractor._arena
    assert arena is not None
    held = arena.allocate(arena.spec.nbytes - arena.used_bytes)
    rows = prompts(LENGTHS, seed=7)
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(engine.run(rows)), daemon=True)
    thread.start()
    while not arena._queue:
        time.sleep(0.001)
    thread.join(0.2)
    assert thread.is_alive() and not found
    arena.free(held)
    thread.join(60)
    assert found
    assert_right_but(engine, rows, found[0], set())


# Engines that must not serve


def test_a_fault_while_the_model_is_loaded_ends_the_start_with_its_reason(faults: Faults, checkpoints: Path) -> None:
    with nothing_left(), pytest.raises(EngineError, match="RuntimeError: injected at load_model"):
        Rig("llama", checkpoints, env=faults.env("load_model"))


def test_a_plugin_that_cannot_be_imported_is_refused_with_the_reason(faults: Faults, checkpoints: Path) -> None:
    """SGLang logs it and serves on."""
    refused = pytest.raises(CaptureRefused, match=r"runs without the capture plugin: .*capture\.hooks")
    with nothing_left(), refused:
        Rig("llama", checkpoints, env=faults.env("import"))


def test_a_hook_that_sglang_could_not_install_is_noticed_by_the_canary(faults: Faults, checkpoints: Path) -> None:
    """SGLang logs it and serves on; answers would leave before their states are there."""
    with nothing_left(), pytest.raises(CaptureRefused, match=r"canary: 0 of 33 tokens were captured"):
        Rig("llama", checkpoints, env=faults.env("process_batch_result"))


# An owner that is gone

OWNER = """
import json, sys
from pathlib import Path
from rig import Rig, prompts
made = Rig("llama", Path(sys.argv[1]), env=json.loads(sys.argv[2]))
print("serving", flush=True)
sys.stdin.readline()
made.run(prompts((300, 20)))
"""
MARK = "RAY_EXTRACT_FAULT_TEST"


def marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def test_a_worker_killed_while_a_pass_runs_leaves_no_process_and_no_shared_memory(
    faults: Faults, checkpoints: Path, tmp_path: Path
) -> None:
    mark = f"{os.getpid()}-{tmp_path.name}"
    with nothing_left(), (tmp_path / "log").open("w") as log:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(checkpoints), json.dumps(faults.env())],
            cwd=Path(__file__).parent,
            env={**os.environ, MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert owner.stdin is not None and owner.stdout is not None
            assert owner.stdout.readline() == "serving\n", (tmp_path / "log").read_text()
            faults.arm("stall")
            owner.stdin.write("\n")
            owner.stdin.flush()
            faults.wait_for("stalled")
            names = " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in marked(mark))
            assert "sglang::scheduler" in names and "ray_extract.engine.host" in names
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
        deadline = time.monotonic() + 30
        while left := marked(mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
