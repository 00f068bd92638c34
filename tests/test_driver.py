"""Whole runs with simulated engines on a real Ray: what is killed, what comes back, and what the exit code says."""

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clusters
import pytest
import servers
from simulated import (
    HIDDEN,
    WAIT_S,
    Work,
    arenas,
    check_output,
    hosts,
    make_rows,
    make_work,
    parent,
    running,
    until,
)

from ray_extract import cli, driver, run
from ray_extract.fleet import Call, Event
from ray_extract.ray_fleet import RayFleet, connect
from ray_extract.run import prepare_run
from ray_extract.store import open_store

pytestmark = pytest.mark.ray

POISON, REJECT, NAN = 1, 2, 3
Command = Callable[..., tuple[int, str]]
FAST: dict[str, Any] = {"cpus": 0.25}
SINGLY: dict[str, Any] = {"max_rows": 1}  # a row a unit


def paced(tokens_per_s: int, **more: Any) -> dict[str, Any]:
    """Engines that take their time: a row of make_rows has 60 tokens on average."""
    return {**FAST, "args": {"tokens_per_s": tokens_per_s}, **more}


@pytest.fixture
def address(ray_cluster: Any) -> str:
    return str(ray_cluster.address)


@pytest.fixture
def no_leftovers() -> Iterator[Callable[[Work], list[int]]]:
    """A function that waits for a job's engine hosts; when the test ends, they and their arenas must go."""
    seen: list[tuple[Work, set[Path]]] = []

    def wait(work: Work, count: int = 1) -> list[int]:
        found: list[int] = until(lambda: h if len(h := hosts(work.mark)) >= count else None, f"{count} engine hosts")
        for pid in found:
            seen.append((work, until(lambda pid=pid: arenas(pid), "an arena")))
        return found

    yield wait
    for work, folders in seen:
        until(lambda work=work: not hosts(work.mark), "the engines' end")
        until(lambda folders=folders: not any(f.exists() for f in folders), "the arenas' end")


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and output of a run."""
    with process:
        text, _ = process.communicate(timeout=2 * WAIT_S)
    return process.returncode, text


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Command:
    """The command in this process: a function that returns its exit code, and its outputs and log as one text."""
    caplog.set_level(logging.INFO)

    def call(work: Work, *overrides: str) -> tuple[int, str]:
        caplog.clear()
        code = run.main(work.args(*overrides))
        return code, "".join([*capsys.readouterr(), caplog.text])

    return call


def bucket_client(server: servers.S3Server) -> Any:
    """A client that can make and delete buckets."""
    import botocore.session
    from botocore.config import Config

    options = server.storage_options
    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=options["endpoint"],
        region_name=options["region"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
        config=Config(s3={"addressing_style": "path"}),
    )


def attempts(work: Work) -> dict[str, str]:
    """Number of the attempt that each unit's commit names."""
    return {r.unit: r.attempt.rpartition("-")[2] for r in work.receipts()}


def test_run_stores_every_row_and_a_second_run_has_nothing_to_do(
    tmp_path: Path, address: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    work = make_work(tmp_path, make_rows(9), address, engine={**FAST, "count": 2})
    code, text = finish(work.start())
    assert code == 0, text
    tokens = sum(map(len, work.rows))
    assert "rows        9\n" in text and f"{tokens:,} tokens in" in text and "engine ready" in text
    assert len(check_output(work)) == 5
    progress = json.loads((tmp_path / "out/progress.json").read_text())
    assert (progress["state"], progress["units_done"], progress["tokens_committed"]) == ("done", 5, tokens)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["state"], summary["exit_code"], summary["units_done"]) == ("complete", 0, 5)
    assert (summary["rows"]["ok"], summary["rows"]["tokens"]) == (9, tokens)
    (node,) = summary["this_run"]["nodes"].values()
    assert 1 <= node["engines"] <= 2 and (node["units"], node["tokens"]) == (5, tokens) and node["tokens_per_s"] > 0
    assert summary["all_runs"]["tokens"] == summary["this_run"]["tokens"] == tokens
    assert not summary["this_run"]["retries"] and summary["this_run"]["lost_s"]["engine starts"] > 0
    assert cli.main(["status", work.url]) == 0
    status = capsys.readouterr().out
    assert "state       complete" in status and "5 of 5 committed" in status
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "out").rglob("*") if p.is_file())
    code, text = command(work)
    assert code == 0 and "nothing was left to extract" in text
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "out").rglob("*") if p.is_file()) == before


def test_a_shard_that_is_gone_is_an_error_until_its_commit_is_deleted(
    tmp_path: Path, address: str, command: Command
) -> None:
    work = make_work(tmp_path, make_rows(6), address, engine=FAST)
    assert command(work)[0] == 0
    shard = next((tmp_path / "out/shards").iterdir())
    commit = tmp_path / "out/commits" / f"{shard.name.split('.')[0]}.json"
    shard.unlink()
    code, text = command(work)
    assert code == 2 and f"delete commits/{commit.name}" in text
    commit.write_text(commit.read_text()[:-20])
    code, text = command(work)
    assert code == 2 and f"delete commits/{commit.name}" in text and "damaged" in text
    commit.unlink()
    code, text = command(work)
    assert code == 0, text
    check_output(work)


def test_the_plan_does_not_depend_on_the_number_of_engines(tmp_path: Path) -> None:
    work = make_work(tmp_path, make_rows(20))
    one = prepare_run(work.job("engine.count=1"))
    many = prepare_run(work.job("engine.count=3", f"output.url={tmp_path / 'other'}"))
    assert len(one.units) == 10
    assert (one.units, one.index) == (many.units, many.index)
    assert prepare_run(work.job("engine.count=3")).units == one.units  # and the output takes them


def test_more_units_than_slots_wait_for_their_turn(tmp_path: Path, address: str, command: Command) -> None:
    # Two units fit into this arena; twelve of up to 25 KiB need it.
    work = make_work(tmp_path, make_rows(12), address, engine=FAST, output={"max_rows": 1, "format": "parquet"})
    code, text = command(work, "run.arena_bytes=64KiB", "output.shard_bytes=32KiB")
    assert code == 0, text
    assert len(check_output(work)) == 12


def test_killed_actor_is_replaced_and_its_units_are_attempted_again(
    tmp_path: Path, address: str, no_leftovers: Callable[[Work], list[int]]
) -> None:
    work = make_work(tmp_path, make_rows(12), address, engine=paced(150), output=SINGLY)
    with running(work.job()) as result:
        (host,) = no_leftovers(work)
        until(work.commits, "the first commit")
        os.kill(parent(host), signal.SIGKILL)
        before = attempts(work)
        assert result.result(WAIT_S).totals.ok == 12
    check_output(work)
    assert before.items() <= attempts(work).items()
    assert set(attempts(work).values()) == {"01", "02"}
    this = json.loads((tmp_path / "out/summary.json").read_text())["this_run"]
    assert this["restarts"] == {"worker died": 1} and this["lost_s"]["attempts thrown away"] > 0
    assert this["retries"] == {"worker died": sum(number == "02" for number in attempts(work).values())}


def test_killed_engine_host_costs_its_worker_nothing(
    tmp_path: Path, address: str, no_leftovers: Callable[[Work], list[int]]
) -> None:
    work = make_work(tmp_path, make_rows(12), address, engine=paced(150), output=SINGLY)
    with running(work.job()) as result:
        (host,) = no_leftovers(work)
        worker = parent(host)
        until(work.commits, "the first commit")
        os.kill(host, signal.SIGKILL)
        (other,) = until(lambda: [pid for pid in hosts(work.mark) if pid != host], "another engine")
        assert parent(other) == worker
        assert result.result(WAIT_S).totals.ok == 12
    check_output(work)
    assert set(attempts(work).values()) == {"01"}
    assert json.loads((tmp_path / "out/progress.json").read_text())["restarts"] == 1
    this = json.loads((tmp_path / "out/summary.json").read_text())["this_run"]
    assert (this["restarts"], this["retries"]) == ({"engine died": 1}, {})


def test_units_of_an_engine_that_hangs_are_extracted_by_another_one_in_the_end(
    tmp_path: Path, address: str, no_leftovers: Callable[[Work], list[int]]
) -> None:
    work = make_work(tmp_path, make_rows(12), address, engine=paced(150, count=2), output=SINGLY)
    with running(work.job()) as result:
        host, _ = no_leftovers(work, 2)
        until(work.commits, "the first commit")
        os.kill(host, signal.SIGSTOP)
        assert result.result(WAIT_S).totals.ok == 12  # engine.stall_timeout_s is ten minutes
    check_output(work)
    assert "01b" in attempts(work).values()


def test_run_goes_on_another_node_when_its_own_is_lost(
    tmp_path: Path, ray_cluster: Any, no_leftovers: Callable[[Work], list[int]]
) -> None:
    nodes = {}
    for _ in range(2):
        node = clusters.add_node(ray_cluster, num_cpus=1, num_gpus=1)
        nodes[node.all_processes["raylet"][0].process.pid] = node
    work = make_work(tmp_path, make_rows(12), ray_cluster.address, engine=paced(150, gpus=1), output=SINGLY)
    try:
        with running(work.job()) as result:
            (host,) = no_leftovers(work)
            until(work.commits, "the first commit")
            ray_cluster.remove_node(nodes.pop(parent(parent(host))), allow_graceful=False)
            before = attempts(work)
            assert result.result(2 * WAIT_S).totals.ok == 12
    finally:
        for node in nodes.values():
            ray_cluster.remove_node(node)
    check_output(work)
    assert before.items() <= attempts(work).items()
    assert set(attempts(work).values()) == {"01", "02"}


@pytest.mark.parametrize("output", ["local", pytest.param("s3", marks=pytest.mark.s3)])
def test_killed_driver_leaves_nothing_behind_and_the_same_command_goes_on(
    output: str,
    tmp_path: Path,
    address: str,
    no_leftovers: Callable[..., list[int]],
    request: pytest.FixtureRequest,
    command: Command,
) -> None:
    where: dict[str, Any] = {"output": {"format": "raw", **SINGLY}}
    if output == "s3":
        server: servers.S3Server = request.getfixturevalue("s3")
        where = {
            "url": f"{server.url}/driver",
            "options": server.storage_options,
            "output": {"format": "parquet", **SINGLY},
        }
    work = make_work(tmp_path, make_rows(12), address, engine=paced(40, count=2), **where)
    process = work.start()
    pids = no_leftovers(work, 2)
    until(work.commits, "the first commit")
    process.kill()
    finish(process)
    before = {r.unit: r.attempt for r in work.receipts()}
    assert 0 < len(before) < 12
    until(lambda: not set(pids) & set(hosts(work.mark)), "the engines' end")
    code, text = command(work, "engine.args={}")
    assert code == 0, text
    assert f"{len(before)} of 12 units are committed already" in text
    after = {r.unit: r.attempt for r in check_output(work)}
    assert before.items() <= after.items()
    assert servers.SECRET_KEY not in text
    summary = json.loads(open_store(work.url, work.options).get("summary.json"))
    whole, this = summary["all_runs"], summary["this_run"]
    assert (whole["drives"], whole["unfinished"], this["units"]) == (2, 1, 12 - len(before))
    assert this["units"] <= whole["units"] <= 12  # what the killed driver did in its last seconds, it could not say


def test_sigterm_commits_what_is_in_flight_and_the_run_goes_on_later(
    tmp_path: Path, address: str, no_leftovers: Callable[[Work], list[int]], command: Command
) -> None:
    work = make_work(tmp_path, make_rows(16), address, engine=paced(60), output=SINGLY)
    process = work.start()
    no_leftovers(work)
    until(work.commits, "the first commit")
    process.terminate()
    code, text = finish(process)
    assert code == 3, text
    assert "SIGTERM: finishing the units in flight" in text
    done = work.commits()
    assert f"error: stopped on request with {done} of 16 units committed" in text and 1 < done < 16
    # Nothing that was begun is lost: each shard has its commit.
    assert len(list((tmp_path / "out/shards").iterdir())) == done
    assert json.loads((tmp_path / "out/progress.json").read_text())["state"] == "drained"
    code, text = command(work, "engine.args={}", "engine.count=2")
    assert code == 0, text
    check_output(work)


def at_work(
    folder: Path, address: str, no_leftovers: Callable[[Work], list[int]]
) -> tuple[Work, "subprocess.Popen[str]"]:
    """A slow run that has captured a token."""
    work = make_work(folder, make_rows(4), address, engine=paced(1))
    process = work.start()
    no_leftovers(work)
    progress = folder / "out/progress.json"
    until(lambda: progress.exists() and json.loads(progress.read_text())["tokens_captured"], "a token")
    return work, process


def test_second_sigterm_ends_at_once_and_leaves_nothing(
    tmp_path: Path, address: str, no_leftovers: Callable[[Work], list[int]]
) -> None:
    work, process = at_work(tmp_path, address, no_leftovers)
    process.terminate()
    time.sleep(1)
    assert process.poll() is None
    process.terminate()
    began = time.monotonic()
    code, text = finish(process)
    assert code == 3, text
    assert time.monotonic() - began < 30
    assert "error: ended at once, on request" in text and "Traceback" not in text
    assert work.commits() == 0


def test_ctrl_c_again_and_again_until_the_end_is_quiet_and_leaves_nothing(
    tmp_path: Path, address: str, no_leftovers: Callable[[Work], list[int]]
) -> None:
    """While it drains, stops its workers, and while Ray shuts down."""
    _, process = at_work(tmp_path, address, no_leftovers)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    code, text = finish(process)
    assert code == 3, text
    assert "error: ended at once, on request" in text
    assert "Traceback" not in text and "Exception ignored" not in text


def test_workers_that_wait_for_their_place_are_told_from_those_that_have_one(tmp_path: Path, address: str) -> None:
    work = make_work(tmp_path, make_rows(3), address, engine={"cpus": 1.5})  # of two
    prepared = prepare_run(work.job())
    connect(prepared.job)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    fleet = RayFleet(run._worker_setup(prepared, prepared.units), events.put)
    try:
        fleet.start(0)
        assert events.get(timeout=WAIT_S).call is Call.START and not fleet.waiting()
        fleet.start(1)
        until(lambda: fleet.waiting() == {1}, "the second one to wait")
        fleet.poll(0)
        assert events.get(timeout=WAIT_S).worker == 0
    finally:
        fleet.kill(0)
    until(lambda: not fleet.waiting(), "its turn")
    event = events.get(timeout=WAIT_S)
    fleet.kill(1)
    assert (event.worker, event.call, event.error) == (1, Call.START, None)


def test_rows_that_fail_are_zeroed_and_named_and_the_others_are_stored(
    tmp_path: Path, address: str, command: Command
) -> None:
    rows = make_rows(12)
    rows[2][5], rows[7][0], rows[8][9] = POISON, REJECT, NAN
    faults = {"poison_token": POISON, "reject_token": REJECT, "nan_token": NAN}
    work = make_work(tmp_path, rows, address, engine={**FAST, "args": faults})
    code, text = command(work)
    assert code == 1, text
    assert "  ok        9\n" in text
    assert "failed    3   (1 x engine_died, 1 x nonfinite, 1 x rejected)" in text
    failed = {
        2: "engine_died: the engine died 2 times with this row in flight",
        7: "rejected: rejected by the simulated engine",
        8: f"nonfinite: {HIDDEN} values are NaN or infinite",
    }
    check_output(work, failed)
    assert command(work)[0] == 1
    assert command(work, "run.max_failed_rows=3")[0] == 0


def test_two_drivers_on_one_output_commit_each_unit_once(tmp_path: Path, address: str) -> None:
    work = make_work(tmp_path, make_rows(6), address, engine=paced(100), output=SINGLY)
    processes = [work.start() for _ in range(2)]
    for code, text in map(finish, processes):
        assert code == 0, text
    receipts = check_output(work)
    assert len(receipts) == 6
    assert len(list((tmp_path / "out").glob("manifest-*"))) == 1


def test_output_of_another_job_is_refused_with_the_difference(tmp_path: Path, command: Command) -> None:
    work = make_work(tmp_path, make_rows(3))
    prepare_run(work.job())
    code, text = command(work, "capture.boundaries=[1,4]")
    assert code == 2
    assert text.count("error: ") == 1
    assert "capture.boundaries: run has [2, 4, 5], this job asks [1, 4]" in text


def test_row_too_large_for_the_arena_is_refused_and_the_mended_job_is_planned_there(
    tmp_path: Path, command: Command
) -> None:
    work = make_work(tmp_path, [*make_rows(3), [7] * 900])
    code, text = command(work, "run.arena_bytes=64KiB")
    assert code == 2
    assert "row 3" in text and "raise run.arena_bytes" in text
    assert len(prepare_run(work.job("run.arena_bytes=1MiB")).units) == 2


def test_too_little_shared_memory_is_one_error_and_leaves_nothing(
    tmp_path: Path, address: str, command: Command
) -> None:
    work = make_work(tmp_path, make_rows(3), address, engine={**FAST, "count": 2})
    code, text = command(work, "run.arena_bytes=900GiB")
    assert code == 2
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "/dev/shm has" in line and "900.06 GiB" in line and "run.arena_bytes" in line
    assert "Traceback" not in text
    assert not hosts(work.mark)
    assert json.loads((tmp_path / "out/progress.json").read_text())["state"] == "failed"


def test_the_rate_of_a_run_leaves_out_the_end_of_its_workers(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the start of its engine: it is of the time from the engine's being ready to the last commit."""
    stop, worked = driver.Driver._stop_workers, []

    def stop_late(self: driver.Driver) -> None:
        worked.append(self.tally.elapsed_s(time.monotonic()))
        time.sleep(0.5)
        stop(self)

    monkeypatch.setattr(driver.Driver, "_stop_workers", stop_late)
    summary = run.run(make_work(tmp_path, make_rows(3), address, engine=FAST).job())
    assert 0 < summary.this.serving_s <= worked[0]


def test_resources_that_no_node_has_are_named_while_the_run_waits(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver, "_CAPACITY_NOTICE_S", 0.5)
    caplog.set_level(logging.INFO)
    work = make_work(tmp_path, make_rows(3), address, engine={"cpus": 1000})
    notice = (
        "1 of 1 engines are starting or wait for capacity: no node has 1000 CPU: the most CPU of a node is 2, of 1 node"
    )

    def stop() -> None:
        with contextlib.suppress(AssertionError):
            until(lambda: notice in caplog.text, "the notice")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    began = time.monotonic()
    assert run.main(work.args()) == 3
    assert time.monotonic() - began < WAIT_S / 4
    assert notice in caplog.text


@pytest.mark.s3
def test_bucket_that_vanishes_ends_the_run_with_its_name(
    tmp_path: Path, address: str, s3: servers.S3Server, no_leftovers: Callable[[Work], list[int]]
) -> None:
    client = bucket_client(s3)
    client.create_bucket(Bucket="vanishing")
    url = "s3://vanishing/out"
    work = make_work(tmp_path, make_rows(16), address, url=url, options=s3.storage_options, engine=paced(60))
    process = work.start()
    no_leftovers(work)
    until(work.commits, "the first commit")
    client.delete_bucket(Bucket="vanishing")  # SeaweedFS takes its objects with it
    code, text = finish(process)
    assert code == 2, text
    assert "no such bucket" in next(line for line in text.splitlines() if line.startswith("error: "))
    assert "Traceback" not in text
