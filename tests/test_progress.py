"""Progress: what the line and the JSON say of a run."""

import dataclasses
import json

import pytest

from ray_extract.progress import Snapshot

HALF = Snapshot(
    units=10,
    units_done=5,
    units_given_up=0,
    units_in_flight=2,
    rows_failed=0,
    tokens=2_000_000,
    tokens_committed=1_000_000,
    tokens_captured=100,
    bytes_committed=1,
    engines=4,
    engines_ready=3,
    restarts=0,
    arena_used=1,
    arena_bytes=4,
    elapsed_s=60.0,
    idle_s=2.0,
    tokens_per_s=1000.0,
)


def test_a_line_says_how_far_how_fast_and_how_long() -> None:
    assert HALF.line() == (
        "units 5/10 · 50 % of 2,000,000 tokens · 1,000 tok/s · engines 3/4 · arena 25 % · 16m40s to go"
    )


def test_trouble_is_shown_only_when_there_is_some() -> None:
    trouble = dataclasses.replace(HALF, rows_failed=2, units_given_up=1, restarts=3).line()
    for part in ("failed rows 2", "given up 1", "restarts 3"):
        assert part in trouble and part.split()[0] not in HALF.line()


@pytest.mark.parametrize(
    ("tokens_per_s", "expected"), [(0.0, None), (100.0, 10_000.0), (1e12, pytest.approx(0, abs=1e-3))]
)
def test_the_time_to_go_follows_the_rate(tokens_per_s: float, expected: float | None) -> None:
    assert dataclasses.replace(HALF, tokens_per_s=tokens_per_s).eta_s == expected


def test_hours_are_shown_from_an_hour_on() -> None:
    assert "2h46m to go" in dataclasses.replace(HALF, tokens_per_s=100.0).line()


def test_an_empty_or_standing_run_has_a_line() -> None:
    line = dataclasses.replace(HALF, tokens=0, tokens_committed=0, tokens_per_s=0.0, arena_bytes=0).line()
    assert "100 % of 0 tokens" in line and "to go" not in line and "arena" not in line


def test_the_json_holds_every_number_and_the_state() -> None:
    record = json.loads(json.dumps(HALF.to_json("draining")))
    assert record["state"] == "draining" and record["version"] == 1 and record["time"].endswith("Z")
    assert record["eta_s"] == 1000.0
    assert {k: record[k] for k in dataclasses.asdict(HALF)} == dataclasses.asdict(HALF)
