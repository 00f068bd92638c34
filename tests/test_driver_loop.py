"""The driver's loop with simulated engines in virtual time: who gets what, what is leased twice, what is said."""

import dataclasses
import logging
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from simulated_fleet import NEVER, Answer, Drive, Engine, make_units

from ray_extract.errors import CaptureRefused, Drained, EngineDied, EngineError, RayExtractError, StoreError
from ray_extract.fleet import Call, Death, Event
from ray_extract.leases import Lease

BEGAN = 1000.0  # of virtual time


def committed(drive: Drive) -> dict[str, str]:
    """Number of the attempt that each unit's commit names."""
    return {unit: receipt.attempt.rpartition("-")[2] for unit, receipt in drive.commits.receipts.items()}


def test_engines_do_not_wait_between_units_however_small() -> None:
    def idle(most: int) -> float:
        engines = [Engine(tokens_per_s=20_000, flush_s=0.06) for _ in range(4)]
        drive = Drive(make_units(*[100] * 12_000), engines, most=most)  # five milliseconds each
        drive()
        assert len(drive.commits.receipts) == 12_000
        return sum(engine.idle_s for engine in engines) / sum(engine.busy_s for engine in engines)

    assert idle(16) < 0.01
    assert idle(2) > 5  # what it would be if two units were all


def test_large_units_are_held_two_at_a_time() -> None:
    engines = [Engine(tokens_per_s=100, flush_s=0.5)]
    held: list[int] = []

    def count(_: int, call: Call | Lease, answer: Answer) -> Answer:
        held.append(sum(len(worker.leases) for worker in drive.driver._workers.values()))
        return answer

    drive = Drive(make_units(*[1000] * 10), engines, count, most=16)
    drive()
    assert max(held) == 2 and engines[0].idle_s == 0


def test_faster_engines_take_more_and_all_end_together() -> None:
    engines = [Engine(tokens_per_s=rate) for rate in (100, 100, 300, 500)]
    drive = Drive(make_units(*[100] * 1000), engines)
    account = drive()
    assert [round(engine.units, -1) for engine in engines] == [100, 100, 300, 500]
    assert account.serving_s < 1.03 * 100 and account.tokens == 100_000


def test_a_unit_whose_engine_hangs_is_extracted_by_another_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def hang(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        return (NEVER, None) if engine == 0 and isinstance(call, Lease) else answer

    drive = Drive(make_units(*[100] * 40), [Engine(), Engine()], hang)
    account = drive()
    assert account.tokens == 4000 and drive.driver._leases.done == 40
    assert Counter(committed(drive).values()) == {"01": 38, "01b": 2}
    assert account.serving_s < 38 + 10 + 2 * 2  # alone, and until it was clear that the other one hangs
    assert caplog.text.count("takes long and is extracted by another worker too") == 2


def test_the_slower_of_two_attempts_is_dropped_and_its_failure_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def drag(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        if not isinstance(call, Lease):
            return answer
        slow = {
            ("u00000000", False): (60.0, None),
            ("u00000001", False): (70.0, StoreError("it failed at last")),
            ("u00000009", False): (100.0, None),  # the run goes on long enough to hear of both
            ("u00000009", True): (50.0, StoreError("it failed too")),
        }
        return slow.get((call.unit.unit, call.second), answer)

    drive = Drive(make_units(*[100] * 10), [Engine(), Engine(), Engine()], drag, run={"max_attempts": 1})
    drive()
    numbers = dict.fromkeys(committed(drive), "01") | {"u00000000": "01b", "u00000001": "01b"}
    assert committed(drive) == numbers
    late = f"u00000000.{drive.driver._nonce}-01.safetensors came too late and stays for ray-extract sweep"
    assert late in caplog.text
    assert [r.message.partition(" failed,")[0] for r in caplog.records if "makes up for" in r.message] == [
        "unit u00000009, attempt 01b",
        "unit u00000001, attempt 01",
    ]
    assert drive.driver._committed_tokens == 1000 and drive.driver._leases.done == 10


def test_the_run_begins_with_the_engines_that_are_there_and_takes_those_that_join() -> None:
    engines = [Engine(), Engine(wait_s=50), Engine(wait_s=100), Engine(wait_s=1e6)]
    drive = Drive(make_units(*[100] * 200), engines)
    drive()
    assert [engine.units for engine in engines] == pytest.approx([117, 67, 17, 0], abs=2)
    assert drive.time.now - BEGAN < 130


def failing(engines: set[int], error: RayExtractError | Death, times: int = 10**6) -> Any:
    """Starts of these engines that fail, each so often; and how often each did."""
    seen: Counter[int] = Counter()

    def change(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        if call is Call.START and engine in engines and seen[engine] < times:
            seen[engine] += 1
            return 1.0, error
        return answer

    return change, seen


def test_an_engine_that_does_not_start_is_tried_again_and_then_done_without(caplog: pytest.LogCaptureFixture) -> None:
    change, seen = failing({1}, CaptureRefused("another SGLang is there"))
    starts: list[float] = []

    def note(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        starts.extend([drive.time.now - BEGAN] * (engine == 1 and call is Call.START))
        return change(engine, call, answer)

    drive = Drive(make_units(*[100] * 100), [Engine(), Engine()], note)
    drive()
    assert len(drive.commits.receipts) == 100 and seen == {1: 3}
    assert starts == pytest.approx([0.0, 1 + 2, 3 + 1 + 4], abs=1.0)
    said = [record.message for record in caplog.records if "another SGLang" in record.message]
    assert [message.partition(": ")[0] for message in said] == [
        "an engine did not start, and is started again in 2 s",
        "an engine did not start, and is started again in 4 s",
        "an engine did not start again and again; the run goes on without it",
    ]


@pytest.mark.parametrize(
    ("error", "engines", "starts"),
    [
        (EngineError("it crashed"), 1, 3),
        (EngineError("it crashed"), 1000, 16),
        (Death("its actor died"), 2, 3),
        (CaptureRefused("another SGLang is there"), 1000, 1),
    ],
)
def test_a_run_of_which_no_engine_starts_ends_with_the_reason(error: Any, engines: int, starts: int) -> None:
    change, _ = failing(set(range(engines)), error)
    drive = Drive(make_units(*[100] * 1000), [Engine(start_s=number) for number in range(engines)], change)
    reason = error.reason if isinstance(error, Death) else str(error)
    with pytest.raises(type(error) if isinstance(error, CaptureRefused) else EngineError, match=reason):
        drive()
    assert drive.driver._starts._in_a_row == starts
    assert not drive.commits.receipts


def test_engines_whose_nodes_leave_while_they_start_are_waited_for() -> None:
    change, seen = failing({0, 1}, Death("its node has died", node_left=True), times=20)
    drive = Drive(make_units(*[100] * 10), [Engine(), Engine()], change)
    drive()
    assert seen == {0: 20, 1: 20} and len(drive.commits.receipts) == 10


def test_units_of_nodes_that_leave_are_leased_again_without_counting() -> None:
    left = 0

    def leave(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        nonlocal left
        assert drive.driver._deaths == 0
        if isinstance(call, Lease) and call.unit.unit == "u00000003" and left < 3:
            assert not call.alone
            left += 1
            return 0.5, Death("its node has died", node_left=True)
        return answer

    drive = Drive(make_units(*[100] * 8), [Engine(), Engine()], leave, run={"max_attempts": 1})
    drive()
    assert committed(drive)["u00000003"] == "04"


def test_units_of_a_worker_that_died_go_to_those_that_wait() -> None:
    def die(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        if isinstance(call, Lease) and call.unit.unit == "u00000003" and call.number == 1:
            return 5.0, Death("its actor died")
        return (1e6, None) if call is Call.START and drive.time.now > BEGAN else answer

    drive = Drive(make_units(*[100] * 4), [Engine(), Engine()], die)
    assert drive().serving_s < 8


@pytest.mark.parametrize("node_left", [False, True])
def test_workers_that_die_as_soon_as_they_are_ready_are_replaced_with_growing_pauses(node_left: bool) -> None:
    """Until one has extracted a unit; what leaves with its node is not to blame."""
    starts: list[float] = []

    def die(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        starts.extend([drive.time.now - BEGAN] * (engine == 0 and call is Call.START))
        # The eighth worker lives for half a minute, and the eleventh to the end.
        dies = len(starts) < 8 or (len(starts) < 11 and drive.time.now - BEGAN > starts[7] + 30)
        return (0.1, Death("its actor died", node_left)) if engine == 0 and isinstance(call, Lease) and dies else answer

    drive = Drive(make_units(*[1000] * 40), [Engine(), Engine()], die, run={"max_attempts": 100})
    drive()
    pauses = [0, 0, 0, 0, 0, 0, 0] if node_left else [2, 4, 8, 16, 32, 60, 60]
    assert np.diff(starts[:8]) == pytest.approx([pause + 0.1 for pause in pauses], abs=0.6)
    assert np.diff(starts[8:11]) == pytest.approx([0.1, 0.1] if node_left else [2.1, 4.1], abs=0.6)


def test_a_worker_that_answers_nothing_any_more_is_replaced() -> None:
    def hang(_: int, call: Call | Lease, answer: Answer) -> Answer:
        silent = drive.driver._made == 1 and drive.time.now > BEGAN + 20
        return (NEVER, None) if silent and call is not Call.START else answer

    drive = Drive(make_units(*[1000] * 8), [Engine()], hang, engine={"stall_timeout_s": 60})
    account = drive()
    assert account.restarts == {"worker did not answer": 1} and len(drive.commits.receipts) == 8
    assert 60 < account.serving_s < 80 + 60 + 30 + 10  # it is asked every five seconds


@pytest.mark.parametrize("answers", [False, True])
def test_a_worker_that_hangs_while_it_starts_is_replaced_and_one_that_waits_for_its_place_is_not(
    answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole process hangs, or only what starts the engine."""
    starts = 0

    def hang(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        nonlocal starts
        starts += engine == 0 and call is Call.START
        hangs = call is Call.START or (call is Call.POLL and not answers)
        return (NEVER, None) if engine == 0 and starts <= 2 and hangs else answer

    engines = [Engine(), Engine(), Engine(wait_s=1e6)]
    drive = Drive(make_units(*[1000] * 60), engines, hang, engine={"start_timeout_s": 100})
    account = drive()
    assert account.restarts == {"worker did not start": 2} and len(drive.commits.receipts) == 60
    # The time-out, a minute more, a look every five seconds, and then pauses.
    assert drive.time.now - BEGAN == pytest.approx((600 + 2 * 165 + 2 + 4) / 2 + 2.5, abs=15)
    assert engines[0].units > 5 and engines[2].units == 0
    said = "was not ready after 16"
    assert [said in r.message and "start_timeout_s = 100" in r.message for r in caplog.records].count(True) == 2
    lost = account.lost_s["engine starts"] if answers else account.lost_s["nodes and workers that did not come"]
    assert lost > 2 * 160


def test_a_worker_that_waited_long_for_its_place_is_not_taken_for_one_that_hangs() -> None:
    engines = [Engine(), Engine(wait_s=1000)]
    drive = Drive(make_units(*[1000] * 200), engines, engine={"stall_timeout_s": 60}, run={"progress_s": 0.1})
    assert not drive().restarts and engines[1].units > 40


def test_a_worker_that_copies_its_model_may_take_longer_than_an_engine_may_to_start() -> None:
    drive = Drive(make_units(*[100] * 5), [Engine(start_s=500, copy_s=450)], engine={"start_timeout_s": 60})
    assert not drive().restarts


def test_an_engine_that_died_does_not_count_as_one_that_serves() -> None:
    def die(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        if isinstance(call, Lease):
            return 1.0, Death("its actor died")
        return (1.0, EngineError("it crashed")) if call is Call.START and drive.time.now > BEGAN else answer

    drive = Drive(make_units(100, 100), [Engine(), Engine(start_s=1e6)], die)
    with pytest.raises(EngineError, match="it crashed"):
        drive()


def test_what_is_missing_is_said_while_engines_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    drive = Drive(make_units(*[100] * 100), [Engine(), Engine(wait_s=1e6)])
    drive()
    said = [record.message for record in caplog.records if "wait for capacity" in record.message]
    assert len(said) == 3  # in 100 seconds
    assert said[0] == (
        "1 of 2 engines are starting or wait for capacity: no node has 8 GPU and 1 CPU free: 0 of 8 GPU, 3 of 4 CPU in "
        "all; node 0 of 8 GPU, 3 of 4 CPU"
    )


def test_an_event_costs_the_same_with_a_thousand_engines() -> None:
    """In calls of functions, which do not depend on the machine."""

    def calls_an_event(engines: int) -> float:
        units = make_units(*[100] * (5 * engines))
        drive = Drive(units, [Engine(flush_s=0.1) for _ in range(engines)], run={"progress_s": 1000})
        calls = 0

        def count(frame: Any, what: str, _: Any) -> None:
            nonlocal calls
            calls += what == "call" and frame.f_code.co_filename.endswith(("driver.py", "leases.py"))

        sys.setprofile(count)
        try:
            drive()
        finally:
            sys.setprofile(None)
        return calls / sum(drive.fleet.calls.values())

    assert calls_an_event(1000) < 1.2 * calls_an_event(10)


def drain(drive: Drive) -> None:
    """What a signal does."""
    drive.driver._drain_since = drive.time.now
    drive.driver._drain.set()


def test_a_drained_run_leases_nothing_more() -> None:
    drive = Drive(make_units(*[100] * 100), [Engine(), Engine()])
    drive.time.later(10.0, lambda: drain(drive))
    with pytest.raises(Drained, match="of 100 units committed"):
        drive()
    assert 20 <= len(drive.commits.receipts) <= 24 and drive.time.now - BEGAN < 13


def test_a_unit_that_is_in_flight_when_the_run_stops_is_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    """It is alone with its worker, so that one more failure would split it."""

    def change(_: int, call: Call | Lease, answer: Answer) -> Answer:
        if isinstance(call, Lease):
            return (1.0, Death("its actor died")) if call.number == 1 else (NEVER, None)
        if call is Call.STOP:
            (worker,) = drive.driver._workers.values()
            drive.driver._inbox.put(lambda: drive.driver._settle(failed(worker.number, worker.leases[0])))
        return answer

    def failed(worker: int, lease: Lease) -> Event:
        assert lease.alone
        return Event(worker, lease, error=EngineDied("it is stopping"))

    units = [dataclasses.replace(unit, rows=2) for unit in make_units(100)]
    drive = Drive(units, [Engine()], change, run={"max_attempts": 1, "drain_s": 1})
    drive.time.later(10.0, lambda: drain(drive))
    with pytest.raises(Drained, match="with 0 of 1 units committed"):
        drive()
    assert "is split" not in caplog.text and drive.driver._leases.leased == 1
