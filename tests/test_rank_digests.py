"""A state that is one tensor-parallel rank's partial sum must not pass for a state.

SGLang leaves a layer's all-reduce to the next layer where flashinfer's fused kernel is to be used, in passes of at most
2,048 tokens; GLM-4-MoE's capture reads the residual stream in between. The fusion is forced off, and if it were not,
the ranks' digests would tell: plugin `deferred_reduce` decides so on the CPU, and SGLang's own code does the rest.
"""

from pathlib import Path

import pytest
from rig import TOLERANCE, TWO_CORES, nothing_left, prompts, rig, with_plugin

from ray_extract.errors import CaptureRefused
from ray_extract.extractor import Extractor
from ray_extract.records import RowStatus

pytestmark = pytest.mark.engine

LENGTHS = (1, 350, 64, 63, 7)


def test_ranks_that_reduce_in_time_hold_equal_states(checkpoints: Path) -> None:
    with rig("glm4_moe", checkpoints, tp_size=2, env=TWO_CORES) as made:
        rows = prompts(LENGTHS)
        result = made.run(rows)
        assert not result.failures and made.errors(rows, result).max() < TOLERANCE


def test_an_engine_whose_layers_hand_over_partial_sums_is_refused(checkpoints: Path) -> None:
    refused = pytest.raises(
        CaptureRefused, match=r"canary: tensor-parallel rank 1 differs from rank 0 in state\.2, state\.4, state\.5: "
    )
    with nothing_left(), refused, rig("glm4_moe", checkpoints, tp_size=2, env=with_plugin("deferred_reduce")):
        pass


def test_partial_sums_in_later_passes_fail_their_rows(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without the comparison they would be stored, and be far from Hugging Face's."""
    compared = Extractor._ranks_differ
    monkeypatch.setattr(Extractor, "_ranks_differ", lambda *args: {})
    with rig("glm4_moe", checkpoints, tp_size=2, env=with_plugin("deferred_reduce")) as made:
        rows = prompts(LENGTHS)
        stored = made.run(rows)
        assert not stored.failures
        errors = made.errors(rows, stored)
        assert errors[:, :-2].min() > 0.1 and errors[:, -2:].max() < TOLERANCE
        monkeypatch.setattr(Extractor, "_ranks_differ", compared)
        failures = made.run(rows).failures
        assert len(failures) == len(rows)
        assert {failure.status for failure in failures.values()} == {RowStatus.FAULT}
        assert "one rank's partial sum" in failures[0].reason
