"""Seeded fault schedules on the whole product, see schedules.py; `python tests/schedules.py --count 5000` runs more."""

from collections import Counter

import pytest
from schedules import run_schedule, trace

SCHEDULES = range(240)
AT_ONCE = 40
KINDS = ("before", "lost", "late", "read", "break", "lag", "die", "stop", "engine", "slow", "echo", "drain")


@pytest.mark.parametrize("first", SCHEDULES[::AT_ONCE])
def test_whatever_fails_each_row_is_committed_once_with_its_bytes_and_the_run_ends(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + AT_ONCE):
        sim = run_schedule(seed)
        assert not sim.problems, f"python tests/schedules.py --first {seed} --count 1: {sim.problems[0]}"
        counts += sim.counts
    print(dict(sorted(counts.items())))
    # What does not happen is not tested.
    wanted = {*(f"fault {kind}" for kind in KINDS), "deaths", "splits", "duplicate attempts", "rows checked"}
    wanted |= {"taken commits/", "taken plan/split"}
    assert wanted <= counts.keys(), wanted - counts.keys()


def test_a_seed_says_everything_that_happens() -> None:
    assert [trace(run_schedule(seed)) for seed in range(5)] == [trace(run_schedule(seed)) for seed in range(5)]
