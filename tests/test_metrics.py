"""What is told to Prometheus: the table, the driver's view of a drive, and a worker's of its units."""

import dataclasses
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meters import Recorder
from simulated import make_rows, make_work
from simulated_fleet import Answer, Drive, Engine, make_units
from test_progress import HALF

from ray_extract import metrics, run, store, worker
from ray_extract.errors import StoreError
from ray_extract.fleet import Call, Death
from ray_extract.leases import Lease
from ray_extract.metrics import METRICS, DriveMetrics, Kind, NoMeter
from ray_extract.run import prepare_run
from ray_extract.shards.image import Column
from ray_extract.tally import Account, Cause, Loss, NodeAccount


def test_names_say_kind_and_unit_as_prometheus_has_it() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 15
    for metric in METRICS:
        assert metric.name.startswith("ray_extract_") and metric.text and metric.unit, metric.name
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert ("_seconds" in metric.name) == metric.unit.startswith("s"), metric.name
        assert ("_bytes" in metric.name) == (metric.unit == "bytes"), metric.name
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM), metric.name


def test_no_tag_has_more_values_than_there_are_nodes_and_states() -> None:
    tags = {metric.tag for metric in METRICS if not metric.values}
    assert tags == {None, "node", "state"}


def test_no_tag_is_one_that_prometheus_gives_a_pod() -> None:
    """It would be renamed to exported_..., and no query would find it."""
    given = {"job", "instance", "namespace", "pod", "container", "endpoint", "ray_io_cluster", "ray_io_node_type"}
    assert not {tag for metric in METRICS for tag in metric.tags} & given


def test_a_recorder_and_no_meter_take_what_a_meter_takes() -> None:
    for meter in (Recorder(), NoMeter()):
        meter.add(metrics.BYTES, 1)
        meter.set(metrics.ENGINES, 1)
        meter.observe(metrics.FLUSH, 1)


def test_counters_rise_by_what_is_new_and_never_fall() -> None:
    meter = Recorder()
    tell = DriveMetrics(meter)
    assert meter.of(metrics.RETRIES) == {}
    assert ("ray_extract_retries_total", "store_failed") in meter.values, "it must be 0 before the first one"
    account = Account(
        nbytes=10,
        rows={"ok": 5, "nonfinite": 1},
        retries={Cause.STORE_FAILED: 1},
        restarts={Cause.ENGINE_STALLED: 2},
        lost_s={Loss.STARTS: 8.0, Loss.CAPACITY: 50.0},
        nodes={"a": NodeAccount(tokens=100)},
    )
    tell(HALF, account)
    tell(HALF, account)
    less = dataclasses.replace(account, nbytes=4, lost_s={Loss.STARTS: 3.0})  # a worker went, and its last word with it
    tell(HALF, less)
    tell(
        HALF, dataclasses.replace(account, nbytes=12, nodes={"a": NodeAccount(tokens=150), "b": NodeAccount(tokens=7)})
    )
    assert meter.of(metrics.BYTES) == {None: 12}
    assert meter.of(metrics.TOKENS) == {"a": 150, "b": 7}
    assert meter.of(metrics.ROWS) == {"ok": 5, "nonfinite": 1}
    assert meter.of(metrics.RETRIES) == {"store_failed": 1}
    assert meter.of(metrics.RESTARTS) == {"engine_stalled": 2}
    assert meter.of(metrics.LOST) == {"starts": 8.0}
    DriveMetrics(meter)(HALF, account)  # another drive of the same process
    assert meter.of(metrics.BYTES) == {None: 22}


def test_gauges_are_the_snapshots() -> None:
    meter = Recorder()
    DriveMetrics(meter)(HALF, Account())
    found = [meter.of(metric).get(None, 0) for metric in METRICS if metric.tag is None and metric.kind is Kind.GAUGE]
    assert found[:-3] == [10, 5, 0, 2, 2_000_000, 1_000_000, 4, 3]
    assert meter.of(metrics.LAST_COMMIT)[None] == pytest.approx(time.time() - 2.0, abs=5)


def test_a_drive_is_told_with_what_it_does_and_once_more_when_it_ends() -> None:
    meter = Recorder()
    tell = DriveMetrics(meter)
    seen: list[tuple[float, float, float]] = []  # engines ready, units in flight, seconds since a commit

    def report(snapshot: Any, account: Account) -> None:
        tell(snapshot, account)
        seen.append((snapshot.engines_ready, snapshot.units_in_flight, snapshot.idle_s))

    def die_once(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        if isinstance(call, Lease) and call.unit.unit == "u00000003" and call.number == 1:
            return 1.0, Death("killed")
        return answer

    drive = Drive(make_units(*[1000] * 20), [Engine(), Engine()], die_once, report=report)
    account = drive()
    assert meter.of(metrics.ROWS) == {"ok": 20}
    assert meter.of(metrics.TOKENS) == {"node": 20_000}
    assert meter.of(metrics.BYTES) == {None: account.nbytes} and account.nbytes > 0
    assert meter.of(metrics.RESTARTS) == {"worker_died": 1}
    assert meter.of(metrics.RETRIES) == {"worker_died": 2}
    assert meter.of(metrics.UNITS_COMMITTED) == meter.of(metrics.UNITS) == {None: 20}
    assert max(ready for ready, _, _ in seen) == 2 and seen[-1][:2] == (0, 0)
    assert 4 <= max(flying for _, flying, _ in seen) <= 6, "two an engine, and those that are being committed"
    assert 5 <= max(idle for _, _, idle in seen) <= 10, "a unit takes ten seconds"


def test_a_run_that_hangs_shows_how_long_ago_it_committed() -> None:
    seen: list[float] = []

    def hang(engine: int, call: Call | Lease, answer: Answer) -> Answer:
        if isinstance(call, Lease) and call.unit.unit != "u00000000":
            return 300.0, answer[1]
        return answer

    Drive(make_units(100, 100), [Engine()], hang, report=lambda snapshot, _: seen.append(snapshot.idle_s))()
    assert 290 < max(seen) <= 300
    assert all(later - sooner <= 6 for sooner, later in itertools.pairwise(seen)), "told every run.progress_s"


def test_a_mean_square_is_of_the_rows_that_are_ok_and_of_finite_ones_only() -> None:
    columns = (Column("state.2", "BF16", 4), Column("state.final", "F8_E4M3", 4))
    sumsq = np.array([[12.0, 2.0], [0.0, 0.0], [12.0, math.inf]])
    assert worker.mean_squares(sumsq, 3, columns) == {"state.2": 2.0}
    sumsq[2, 1] = math.nan
    assert worker.mean_squares(sumsq, 3, columns) == {"state.2": 2.0}
    assert worker.mean_squares(np.zeros((2, 2)), 0, columns) == {}


def test_a_worker_counts_each_error_of_its_store_though_the_next_try_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare_run(make_work(tmp_path, make_rows(2)).job())
    meter = Recorder()
    made = worker.Worker(run._worker_setup(prepared, prepared.units), meter)
    assert ("ray_extract_store_errors_total", "upload") in meter.values and not meter.of(metrics.STORE_ERRORS)
    monkeypatch.setattr(store.random, "uniform", lambda *_: 0.0)
    errors = [StoreError("away"), StoreError("still")]

    def of(unit: Any) -> list[Any]:
        if errors:
            raise errors.pop()
        return original(unit)

    original = made._rows.of
    monkeypatch.setattr(made._rows, "of", of)
    assert len(made._table(prepared.units[0])) == 2
    assert meter.of(metrics.STORE_ERRORS) == {"read": 2}


def test_a_worker_tells_its_arena_when_it_is_asked(tmp_path: Path) -> None:
    prepared = prepare_run(make_work(tmp_path, make_rows(2)).job())
    meter = Recorder()
    setup = run._worker_setup(prepared, prepared.units)
    worker.Worker(setup, meter).progress()
    assert meter.of(metrics.ARENA) == {None: setup.extractor.arena_bytes}
    assert meter.values["ray_extract_arena_used_bytes", None] == 0
    assert setup.run == str(tmp_path / "out")
