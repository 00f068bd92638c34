"""What is missing for an engine, and what Ray's errors mean; starts that fail."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
from simulated import make_work
from simulated_fleet import make_units

from ray_extract import ray_fleet, run
from ray_extract.errors import EngineError, Exit, StoreError
from ray_extract.fleet import Death, Node, shortage
from ray_extract.ray_fleet import connect, translate
from ray_extract.starts import Start, Starts


def node(name: str, gpus: float, free: float, cpus: float = 4, free_cpus: float = 4) -> Node:
    """A node with GPUs and CPUs."""
    return Node(name, {"GPU": gpus, "CPU": cpus}, {"GPU": free, "CPU": free_cpus})


EIGHT = {"GPU": 8.0, "CPU": 1.0}


def test_nothing_is_missing_when_one_node_has_room() -> None:
    assert shortage(EIGHT, [node("a", 8, 0), node("b", 8, 8)]) is None
    assert shortage({"GPU": 0.0, "CPU": 1.0}, [Node("a", {"CPU": 2}, {"CPU": 1})]) is None


def test_a_resource_that_no_node_has_is_named_with_the_most_that_one_has() -> None:
    nodes = [node("a", 4, 4), node("b", 2, 2)]
    assert shortage(EIGHT, nodes) == "no node has 8 GPU and 1 CPU: the most GPU of a node is 4, of 2 nodes"
    assert shortage(EIGHT, []) == (
        "no node has 8 GPU and 1 CPU: the most GPU of a node is 0; the most CPU of a node is 0, of 0 nodes"
    )
    apart = [node("a", 8, 8, cpus=0.5, free_cpus=0.5), node("b", 0, 0)]  # each is there, but not on one node
    assert shortage(EIGHT, apart) == (
        "no node has 8 GPU and 1 CPU: the most GPU of a node is 8; the most CPU of a node is 4, of 2 nodes"
    )


def test_what_is_free_is_said_of_the_nodes_that_have_most() -> None:
    nodes = [node("a", 8, 2), node("b", 8, 7), *(node(f"c{i}", 8, 0, free_cpus=1) for i in range(4))]
    assert shortage(EIGHT, nodes) == (
        "no node has 8 GPU and 1 CPU free: 9 of 48 GPU, 12 of 24 CPU in all; b 7 of 8 GPU, 4 of 4 CPU; a 2 of 8 GPU, "
        "4 of 4 CPU; c0 0 of 8 GPU, 1 of 4 CPU; c1 0 of 8 GPU, 1 of 4 CPU; 2 nodes more"
    )


def died(text: str) -> ray.exceptions.ActorDiedError:
    """As Ray 2.60 makes it."""
    error = ray.exceptions.ActorDiedError()
    error.error_msg = text
    return error


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (died("because its worker process has died. ... consider enabling ... to prevent node deaths"), False),
        (died("The actor died because its node has died. Node Id: 3380"), True),
        (ray.exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError", None), True),
        (ray.exceptions.WorkerCrashedError(), False),
    ],
)
def test_a_node_that_left_is_told_from_an_actor_that_died(error: Exception, left: bool) -> None:
    found = translate(error)
    assert isinstance(found, Death) and found.node_left is left


def test_an_error_of_ours_comes_out_of_rays_as_it_was() -> None:
    cause = StoreError("the store is down")
    wrapped = ray.exceptions.RayTaskError("extract", "Traceback ...", cause).as_instanceof_cause()
    assert str(wrapped) != "the store is down" and translate(wrapped) is cause


def test_pauses_grow_to_a_minute_and_begin_anew_once_the_engine_started() -> None:
    starts = Starts(100)
    pauses = []
    for _ in range(8):
        assert starts.failed(7, serving=0, for_good=False) is (Start.AGAIN if len(pauses) < 2 else Start.WITHOUT)
        pauses.append(starts.pause_s(7))
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    starts.ready(7)
    assert starts.pause_s(7) == 2 and starts.failed(7, serving=0, for_good=True) is Start.AGAIN


def test_pauses_grow_while_nothing_comes_of_starts_and_the_engine_is_not_given_up_for_it() -> None:
    starts = Starts(2)
    pauses = []
    for _ in range(2000):
        starts.ready(0)
        starts.useless(0)
        pauses.append(starts.pause_s(0))
    assert pauses[:7] == [2, 4, 8, 16, 32, 60, 60] and pauses[-1] == 60
    assert starts.failed(0, serving=0, for_good=False) is Start.AGAIN and starts.pause_s(1) == 2
    starts.ready(0)
    starts.useful(0)
    assert starts.pause_s(0) == 2


def test_a_run_without_any_engine_left_stops() -> None:
    starts = Starts(2)
    for engine in (0, 1):
        starts.ready(engine)
    found = [starts.failed(engine, serving=1, for_good=False) for engine in (0, 0, 0, 1, 1, 1)]
    assert found == [Start.AGAIN, Start.AGAIN, Start.WITHOUT, Start.AGAIN, Start.AGAIN, Start.STOP]


def test_an_arena_for_small_units_holds_more_of_them() -> None:
    small = make_units(*[1000] * 100)  # of about a MiB with all that is around their states
    assert run.images_at_once(small, 2, run.arena_size(small, 2)) == 16
    bound = run.image_bound(small[0])
    assert run.images_at_once(small, 2, 5 * bound) == 4 and run.images_at_once(small, 2, bound) == 2
    assert run.arena_size(small, 20) == 21 * bound
    few = small[:5]
    assert run.arena_size(few, 2) == 5 * bound
    large = make_units(*[20_000_000] * 100)
    assert run.arena_size(large, 2) == 3 * run.image_bound(large[0])
    assert run.images_at_once(large, 2, run.arena_size(large, 2)) == 2


def test_a_ray_that_does_not_start_is_a_reason_to_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen")  # as Ray does

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test's cluster may serve this process
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(EngineError, match=r"Ray did not start .* timed out during startup.*run the same") as raised:
        connect(make_work(tmp_path, [[1]], "local").job())
    assert raised.value.exit_code == Exit.STOPPED


@pytest.mark.parametrize("address", ["local", "127.0.0.1:1"])
def test_the_handler_of_sigterm_that_ray_sets_is_not_ours(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the process with 15, in the middle of a manifest too."""
    struck = False

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        if struck:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(ray_fleet, "_running_cluster", lambda named: None if named == "local" else named)
    job = make_work(tmp_path, [[1]], address).job()
    with run.interruptible():
        ours = signal.getsignal(signal.SIGTERM)
        connect(job)
        assert signal.getsignal(signal.SIGTERM) is ours
        struck = True
        with pytest.raises(KeyboardInterrupt):
            connect(job)
        assert signal.getsignal(signal.SIGTERM) is ours
