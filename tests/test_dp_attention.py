"""Data-parallel attention: ranks of uneven and of no rows, whose batches SGLang pads and gathers for the experts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rig import CHUNK, TOLERANCE, Rig, prompts, rig, with_plugin

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(checkpoints: Path) -> Iterator[Rig]:
    parallel = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    with rig("qwen3_moe", checkpoints, env=with_plugin("padded_batches"), **parallel) as made:
        yield made


@pytest.mark.parametrize(
    "lengths",
    [
        (1, 350, CHUNK, CHUNK - 1, 7 * CHUNK // 2, 7, 2 * CHUNK, 30),
        (7 * CHUNK // 2,),
        (1,),
        (600, 1, 1, 1),
        (5,) * 40,
    ],
    ids=["unequal rows", "one rank idle", "one token", "a long row beside short ones", "many short rows"],
)
def test_each_rank_writes_its_own_rows(engine: Rig, lengths: tuple[int, ...]) -> None:
    rows = prompts(lengths)
    result = engine.run(rows)
    assert not result.failures and engine.errors(rows, result).max() < TOLERANCE


def test_rows_go_to_both_ranks_in_blocks_that_leave_in_few_copies(engine: Rig) -> None:
    control = engine.extractor._arena.control  # type: ignore[union-attr]
    before, copies = control.counters[:, 0].copy(), control.counters[:, 2].copy()
    engine.run(prompts((5,) * 40))
    passes, copied = control.counters[:, 0] - before, control.counters[:, 2] - copies
    assert (passes > 0).all()
    assert np.array_equal(copied, passes * (engine.extractor._arena.spec.num_states))  # type: ignore[union-attr]
