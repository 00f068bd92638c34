"""Status: what plan and commits say counts, whatever progress.json says, and whether or not it is there."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from outputs import Output, make_output

from ray_extract import cli
from ray_extract.errors import NotFound, PlanError, ShardError
from ray_extract.layout import PLAN_KEY, PROGRESS_KEY, SUCCESS_KEY, commit_key
from ray_extract.ledger import Ledger, latest_manifest
from ray_extract.progress import TIME_FORMAT
from ray_extract.status import SILENT_S, run_status, state_of


def say(output: Output, age_s: float = 0.0, **fields: Any) -> None:
    """Leave a progress.json of a driver that knew of no commit."""
    record = {
        "state": "running",
        "time": time.strftime(TIME_FORMAT, time.gmtime(time.time() - age_s)),
        "units": 3,
        "units_done": 0,
        "tokens": 55,
        "tokens_committed": 0,
        "tokens_per_s": 12.0,
        "engines_ready": 2,
        "rows_failed": 1,
    }
    output.store.put(PROGRESS_KEY, json.dumps(record | fields).encode(), create=False)


def complete(output: Output, **fields: Any) -> None:
    """Say that the run is complete, with two failed rows."""
    record = {"manifest": latest_manifest(output.store), "failed": {"incomplete": 2}}
    output.store.put(SUCCESS_KEY, json.dumps(record | fields).encode(), create=False)


@pytest.mark.parametrize("text", [None, "", "{", "{}", "[]", '{"state": "running", "time": "soon"}'])
def test_plan_and_commits_are_enough(tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    output = make_output(tmp_path, leave_out=["u00000001"])
    if text is not None:
        output.store.put(PROGRESS_KEY, text.encode())
    assert cli.main(["status", output.url]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "state       unknown: no readable progress.json says whether a driver works on it; run it again to go on"
    )
    assert out[1:] == [
        "units       2 of 3 committed",
        "tokens      24 of 55",
        "failed rows unknown",
        "manifest    none yet",
    ]
    assert cli.main(["status", "--json", output.url]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["state"] == "unknown" and (record["units"], record["units_done"]) == (3, 2)
    assert (record["tokens"], record["tokens_committed"], record["rows_failed"]) == (55, 24, None)


def test_commits_count_where_progress_is_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = make_output(tmp_path, leave_out=["u00000001"])
    say(output, age_s=10)
    status = run_status(output.store)
    assert (status.state, status.units_done, status.tokens_committed, status.rows_failed) == ("running", 2, 24, 1)
    assert status.age_s == pytest.approx(10, abs=5)
    lines = status.lines()
    assert lines[0].startswith("state       running (its driver was heard of 0m1")
    assert "speed       12 tokens/s, 2 engines ready" in lines
    record = status.to_json()
    assert (record["units_done"], record["tokens_committed"], record["tokens_per_s"]) == (2, 24, 12.0)


def test_a_driver_that_was_killed_does_not_run_for_ever(tmp_path: Path) -> None:
    output = make_output(tmp_path, leave_out=["u00000001"])
    say(output, age_s=3 * 3600)
    (line, *_) = run_status(output.store).lines()
    assert line.startswith("state       silent: its driver ended without a word, or cannot write here; run it again")
    assert "heard of 3h00m ago" in line


@pytest.mark.parametrize("said", ["drained", "failed", "done", "running"])
def test_engines_of_a_driver_that_ended_have_no_speed(tmp_path: Path, said: str) -> None:
    output = make_output(tmp_path, leave_out=["u00000001"])
    say(output, age_s=2 * SILENT_S, state=said)
    lines = run_status(output.store).lines()
    assert not any("tokens/s" in line for line in lines)
    assert ("summary.json say why" in lines[0]) == (said == "failed")


def test_a_driver_that_died_over_the_manifest_is_not_waited_for(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    output.store.delete(SUCCESS_KEY)
    say(output, age_s=3 * 3600, state="done")
    assert "its driver makes the manifest; if it has ended, run it again" in run_status(output.store).lines()[0]


@pytest.mark.parametrize(
    ("success", "whole", "said", "age_s", "state"),
    [
        (True, True, "done", 9e9, "complete"),
        (True, True, None, None, "complete"),
        (True, False, "done", 5, "damaged"),
        (True, False, "running", 5, "running"),
        (True, False, "running", 2 * SILENT_S, "damaged"),
        (False, True, "done", 5, "done"),
        (False, False, "running", SILENT_S, "running"),
        (False, False, "draining", SILENT_S + 1, "silent"),
        (False, False, "drained", 9e9, "drained"),
        (False, False, "failed", 9e9, "failed"),
        (False, False, None, None, "unknown"),
    ],
)
def test_the_state_is_the_outputs_before_it_is_the_drivers(
    success: bool, whole: bool, said: str | None, age_s: float | None, state: str
) -> None:
    assert state_of(success, whole, said, age_s) == state


def test_failed_rows_are_those_of_the_latest_manifest(tmp_path: Path) -> None:
    output = make_output(tmp_path, failed=[4])
    complete(output)
    assert (run_status(output.store).state, run_status(output.store).rows_failed) == ("complete", 2)
    # Its driver ended before it could say what the latest manifest says.
    complete(output, manifest="manifest-000009.parquet")
    say(output, rows_failed=7)
    assert run_status(output.store).rows_failed == 1
    path = Path(output.url, "manifest-000000.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ShardError, match=r"manifest-000000\.parquet: damaged"):
        run_status(output.store)
    path.unlink()
    assert run_status(output.store).rows_failed == 7


def test_a_run_without_a_plan_and_one_with_a_damaged_one(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    output.store.put(PLAN_KEY, b"{", create=False)
    with pytest.raises(PlanError, match="is damaged"):
        run_status(output.store)
    output.store.delete(PLAN_KEY)
    for unit in Ledger(output.store).committed_units():
        output.store.delete(commit_key(unit))
    assert run_status(output.store).lines()[0] == "state       planning: it has begun, and has no plan yet"
    output.store.delete("run.json")
    with pytest.raises(NotFound, match=r"no run\.json there; not the output of a run, or none has begun"):
        run_status(output.store)
