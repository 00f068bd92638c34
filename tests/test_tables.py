"""The tables in docs/ are those of the result files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import results
import tables

ROOT = Path(__file__).parents[1]


def test_every_table_in_docs_is_the_one_of_its_result_file() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_cases_of_an_earlier_run_keep_their_rows_and_their_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for command, figures in (("one", {"a": 1.0, "b": 2.0}), ("two", {"c": 3.0}), ("three", {"b": 4.0})):
        rows = [results.Row(case, "captured/bare", value, "ratio") for case, value in figures.items()]
        path = results.write("made", rows, command, join=True)
    made = json.loads(path.read_text())
    assert {row["case"]: row["value"] for row in made["rows"]} == {"a": 1.0, "c": 3.0, "b": 4.0}
    assert {case: source.split(",")[0] for case, source in made["joined"].items()} == {"a": "`one`", "c": "`two`"}
    table = tables.section(made)
    assert "\nThe cases a: `one`, " in table and "\nThe cases c: `two`, " in table
    assert table.splitlines()[2].startswith("`three`, ")
