"""Seeded faults on a real Ray cluster, see ray_faults.py; `make faults` runs two hundred schedules."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_faults import DECK, EVENTS, deal, run_schedule, stage, times_to_recover

pytestmark = [pytest.mark.ray, pytest.mark.s3]

SEEDS = range(37 * DECK, 38 * DECK)  # each kind of fault once, on few nodes, and a store that is back after 5 s


@pytest.fixture(scope="module")
def on_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with stage(tmp_path_factory.mktemp("stage")) as nodes_and_server:
        yield nodes_and_server


def test_the_kinds_of_fault_are_dealt_to_the_schedules_so_that_each_comes_once() -> None:
    for first in range(0, 40, DECK):
        assert Counter(kind for seed in range(first, first + DECK) for kind in deal(seed)) == Counter(EVENTS.keys())


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_dies_each_row_is_stored_once_and_nothing_is_left(seed: int, on_stage: Any, tmp_path: Path) -> None:
    schedule = run_schedule(seed, *on_stage, tmp_path / "run")
    print(dict(schedule.counts), *times_to_recover([schedule.recovered()]), sep="\n")
    problems = "\n".join([*schedule.problems, *schedule.log.read_text(errors="replace").splitlines()[-30:]])
    assert not schedule.problems, f"python tests/ray_faults.py --first {seed} --count 1: {problems}"
    assert schedule.counts["units committed"] and schedule.counts["rows read"]
    # What does not happen is not tested; one may come too late.
    assert {fault.kind for fault in schedule.faults} <= set(deal(seed))
    assert len(schedule.faults) >= len(deal(seed)) - 1
