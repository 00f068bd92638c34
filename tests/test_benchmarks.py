"""The benchmarks still run, on little work: what they count, and that they measure what their result files show."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

Figures = dict[tuple[str, str], Any]


def smoke(folder: Path, name: str, *arguments: str) -> Figures:
    """What a benchmark's result file has of a short run; whether its goals were met says nothing then."""
    run = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"RAY_EXTRACT_RESULTS": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    result = folder / f"{name}.json"
    assert result.exists(), run.stdout + run.stderr
    found = json.loads(result.read_text())["rows"]
    kept = ROOT / f"benchmarks/results/{name}.json"
    if kept.exists():
        shown = {row["metric"] for row in json.loads(kept.read_text())["rows"]}
        assert {row["metric"] for row in found} == shown, "the kept results are of another benchmark: run it again"
    return {(row["case"], row["metric"]): row["value"] for row in found}


def test_placing_a_unit_is_measured(tmp_path: Path) -> None:
    found = smoke(tmp_path, "arena", "--rows=3", "--runs=1")
    assert found["long rows", "rows"] == found["short rows", "rows"] == 3
    assert found["short rows", "placing"] > 0


def test_planning_is_measured(tmp_path: Path) -> None:
    found = smoke(tmp_path, "plan", "--rows=200000", "--stored=20000")
    assert {case for case, _ in found} == {
        "units, 200,000 rows into 138 units",
        "stored, 20,000 rows into 14 units",
    }


def test_resume_and_manifest_are_measured_and_segments_spare_requests(tmp_path: Path) -> None:
    found = smoke(tmp_path, "ledger", "--units=300", "--rows=10")
    again = [
        found[f"again, 20 ms a request, {how}, 300 units of 10 rows", "requests"] for how in ("segments", "no segments")
    ]
    assert again[0] < 30 < 300 < again[1]


@pytest.mark.s3
def test_reading_is_measured_and_a_state_is_one_request(tmp_path: Path) -> None:
    found = smoke(tmp_path, "read", "--runs=1", "--shrink=40")
    assert found["stream-s3", "requests"] == found["stream-s3", "requests, alone"] == 1
