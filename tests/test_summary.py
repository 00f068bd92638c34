"""The summary: what it says of this run and of all, and that it is there however the run ended."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from simulated import make_rows, make_work

from ray_extract import driver, ray_fleet, run
from ray_extract.errors import (
    AccessDenied,
    ArenaError,
    CaptureRefused,
    ClockSkew,
    ConfigError,
    CredentialsExpired,
    DatasetError,
    Drained,
    EngineDied,
    EngineError,
    Exit,
    IdentityMismatch,
    NotFound,
    OutOfSpace,
    PlanError,
    RayExtractError,
    ShardError,
    StoreError,
    Throttled,
    UnitsGivenUp,
)
from ray_extract.layout import drive_key
from ray_extract.ledger import Totals
from ray_extract.progress import show_count
from ray_extract.store import open_store
from ray_extract.summary import Summary, read_drives, write_summary
from ray_extract.tally import Account, Cause, NodeAccount

ONE = Account(
    1,
    90.0,
    60.0,
    3,
    6000,
    1 << 20,
    {"ok": 5, "fault": 1},
    {"worker died": 1},
    {},
    {"engine starts": 30.0},
    {"a": NodeAccount(1)},
)
TWO = dataclasses.replace(ONE, retries={}, nodes={"a": NodeAccount(2, 60.0, 3, 6000)})
TOTALS = Totals(10, 8, {"empty": 1}, {"rejected": 1}, 12000, 12000, 2 << 20)
DONE = Summary(Exit.FAILED, None, TOTALS, 6, 6, "manifest-000000.parquet", 100.0, TWO, ONE + TWO, 1)


def test_the_table_says_what_is_of_this_run_and_what_of_all() -> None:
    assert DONE.lines("/out") == [
        "rows        10",
        "  ok        8",
        "  skipped   1   (1 x empty)",
        "  failed    1   (1 x rejected)",
        "tokens      12,000",
        "shards      6, 2.10 MB (2.00 MiB)",
        "time        1m40s",
        "this run",
        "  speed     100 tokens/s, 6,000 tokens in 60 s, 1.05 MB (1.00 MiB)",
        "  node      a: 100 tokens/s an engine, 2 engines",
        "  retries   0",
        "  restarts  0",
        "  lost      0m30s engine starts",
        "all 2 runs; 1 did not say how it ended",
        "  speed     100 tokens/s, 12,000 tokens in 120 s, 2.10 MB (2.00 MiB)",
        "  node      a: 100 tokens/s an engine, 3 engines",
        "  retries   1   (1 x worker died)",
        "  restarts  0",
        "  lost      1m00s engine starts",
        "output      /out",
        "next        ray-extract verify /out",
        "retry       ray-extract retry-failed, with the arguments of this command",
    ]


def test_one_is_not_said_as_many() -> None:
    one = dataclasses.replace(ONE, nodes={"a": NodeAccount(1, 60.0, 3, 6000)})
    lines = dataclasses.replace(DONE, this=Account(), whole=one, unfinished=0).lines("/out")
    assert "speed       nothing was left to extract" in lines and "the run before" in lines
    assert "  node      a: 100 tokens/s an engine, 1 engine" in lines
    assert (show_count(1, "unit"), show_count(0, "unit"), show_count(2000, "unit")) == (
        "1 unit",
        "0 units",
        "2,000 units",
    )


def test_of_many_nodes_the_middle_and_the_ends_are_shown() -> None:
    nodes = {f"n{number:04d}": NodeAccount(1, 10.0, 1, 10 * number) for number in range(1000)}
    lines = dataclasses.replace(DONE, this=dataclasses.replace(TWO, nodes=nodes)).lines("/out")
    (line,) = [line for line in lines if "median" in line]
    assert line.startswith("  nodes     1,000: 500 tokens/s an engine (median), 0 the slowest (n0000), 999 the fastest")


def test_drives_add_up_and_one_that_was_killed_is_told_apart(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert read_drives(store) == (Account(), 0)
    for name, state, account in (("a", "done", ONE), ("b", "running", TWO)):
        store.put(drive_key(name), json.dumps({"version": 1, "state": state, **account.to_json()}).encode())
    store.put(drive_key("c"), b'{"state": "done"')
    assert read_drives(store) == (ONE + TWO, 1)


def test_a_summary_that_says_the_same_is_left_alone_and_another_is_not(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    idle = dataclasses.replace(DONE, this=Account())

    def written(summary: Summary) -> dict[str, Any]:
        write_summary(store, summary)
        found: dict[str, Any] = json.loads(store.get("summary.json"))
        return found

    stopped = dataclasses.replace(idle, code=Exit.STOPPED, reason="asked to", totals=None, manifest=None)
    assert written(stopped)["state"] == "incomplete" and written(stopped)["rows"] is None
    assert written(idle)["state"] == "complete"
    assert written(dataclasses.replace(idle, wall_s=1.0))["this_run"]["total_s"] == 100.0
    assert written(dataclasses.replace(DONE, wall_s=1.0))["this_run"]["total_s"] == 1.0
    assert written(dataclasses.replace(idle, code=Exit.OK))["exit_code"] == 0  # run.max_failed_rows was raised
    assert written(dataclasses.replace(idle, manifest="manifest-000001.parquet"))["manifest"][-9] == "1"


CODES: dict[type[RayExtractError], int] = {
    ConfigError: 2,
    DatasetError: 2,
    PlanError: 2,
    IdentityMismatch: 2,
    ArenaError: 2,
    CaptureRefused: 2,
    ShardError: 2,
    NotFound: 2,
    AccessDenied: 2,
    ClockSkew: 2,
    OutOfSpace: 2,
    UnitsGivenUp: 1,
    Drained: 3,
    StoreError: 3,
    Throttled: 3,
    CredentialsExpired: 3,
    EngineError: 3,
    EngineDied: 3,
}


@pytest.mark.parametrize("error", CODES, ids=lambda error: error.__name__)
def test_a_run_that_an_error_ends_says_so_by_its_code_and_in_its_summary(
    error: type[RayExtractError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise error("made up")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(run, "_extract", fail)
    work = make_work(tmp_path, make_rows(4))
    assert run.main(work.args()) == CODES[error]
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["state"], summary["exit_code"], summary["reason"]) == ("incomplete", CODES[error], "made up")
    assert (summary["units"], summary["units_done"], summary["rows"]) == (2, 0, None)
    assert "units       0 of 2 committed" in caplog.text


def test_a_defect_is_no_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own code for it would be that of failed rows, after which nobody tries again."""
    monkeypatch.setattr(run, "_extract", None)
    assert run.main(make_work(tmp_path, make_rows(4)).args()) == 3
    assert "error: TypeError: 'NoneType' object is not callable; what is committed stays" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("causes", "code"),
    [
        ([Cause.STORE_FAILED, Cause.STORE_FAILED], 3),
        ([Cause.STORE_FAILED, Cause.WORKER_DIED], 1),
        ([Cause.WORKER_DIED], 1),
    ],
)
def test_units_given_up_are_an_outage_if_only_the_store_failed(
    causes: list[Cause], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [f"u{number:08d}" for number in range(len(causes))]

    def drive(self: driver.Driver) -> dict[str, str]:
        for unit, cause in zip(units, causes, strict=True):
            self.tally.failed(unit, "01", cause, 0.0)
        return dict.fromkeys(units, "made up")

    monkeypatch.setattr(ray_fleet, "connect", lambda *_, **__: None)
    monkeypatch.setattr(driver.Driver, "run", drive)
    assert run.main(make_work(tmp_path, make_rows(4)).args()) == code
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    given_up = {1: "1 unit given up after 3 attempts", 2: "2 units given up after 3 attempts"}[len(units)]
    assert given_up in summary["reason"]
    assert sum(summary["this_run"]["retries"].values()) == len(units)
