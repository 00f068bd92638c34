"""Without a GPU these tests are not collected; on two they run on two. What they prove goes to a result file."""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import results

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


class Ratios:
    """Errors over those of Hugging Face's bf16, for each mode.

    Attributes:
        whole: whether every mode was to run, and not a selection.
    """

    def __init__(self) -> None:
        self.whole = False
        self._found: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, mode: str, ratio: float) -> None:
        self._found[mode].append(ratio)

    def rows(self, factor: float) -> list[results.Row]:
        """The worst and the median of each mode."""
        rows = []
        for mode, found in self._found.items():
            rows.append(
                results.Row(mode, "worst error / Hugging Face bf16's", round(max(found), 3), "ratio", factor, "lower")
            )
            rows.append(results.Row(mode, "median", round(statistics.median(found), 3), "ratio", None, "lower"))
            rows.append(results.Row(mode, "ratios taken", len(found), ""))
        return rows


@pytest.fixture(scope="session")
def ratios(request: pytest.FixtureRequest) -> Iterator[Ratios]:
    """Collects, and writes benchmarks/results/truth-gpu.json, or truth-gpu-x2.json, unless a selection ran."""
    began = time.monotonic()
    found = Ratios()
    yield found
    wall = results.Row("whole suite", "wall time", round(time.monotonic() - began), "s", 480, "lower")
    failed = results.Row("whole suite", "tests failed", request.session.testsfailed, "", 0, "lower")
    if found.whole:
        name = "truth-gpu" if torch.cuda.device_count() == 1 else "truth-gpu-x2"
        results.write(name, [*found.rows(1.2), failed, wall], "python -m pytest tests/gpu")
