"""The formats are what docs/formats.md says, and what they were: outputs in tests/golden, and a reader of the page.

python tests/test_formats.py    writes tests/golden anew; only for a new version of a format
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from outputs import Output, make_output
from plain_reader import read_output, sha256_of_all_but_states

from ray_extract.readers.dataset import HiddenStates
from ray_extract.verify import verify

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "raw": {"format": "raw"},
    "raw-supervised-f32": {"format": "raw", "dtype": "float32", "keep": "supervised"},
    "raw-fp8": {"format": "raw", "dtype": "float8_e4m3"},
    "parquet": {"format": "parquet"},
    "parquet-supervised-fp8": {"format": "parquet", "dtype": "float8_e4m3", "keep": "supervised"},
}


def make(folder: Path, case: str) -> Output:
    """Rows of several pieces, a failed one, a skipped one, and one of a single token."""
    return make_output(folder, lengths=(5, 12, 0, 1, 30, 7), failed=[4], vocab=50, **CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_a_reader_written_from_the_page_reads_what_was_written_once(case):
    rows = read_output(GOLDEN / case)
    data = HiddenStates(str(GOLDEN / case), check=True)
    assert [item["row"] for item in data] == list(rows) == [0, 1, 3, 5]
    for item in data:
        plain = rows[item["row"]]
        assert item["input_ids"].tolist() == plain.input_ids.tolist()
        assert item["loss_mask"].tolist() == plain.loss_mask.tolist()
        assert item["positions"].tolist() == plain.positions.tolist()
        assert list(plain.states) == list(data.states)
        for name, values in plain.states.items():
            # Of fp8 readers give bf16, which rounds value times scale.
            tolerance = 2**-8 if "fp8" in case else 0
            np.testing.assert_allclose(item[name].float().numpy(), values, rtol=tolerance, atol=0)
            assert len(values) == 0 or 0.3 < np.std(values) < 3


@pytest.mark.parametrize("case", CASES)
def test_what_was_written_once_verifies(case):
    report = verify(str(GOLDEN / case))
    assert report.ok, report.problems
    assert (report.rows_ok, report.rows_failed, report.rows_skipped) == (4, 1, 1)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("raw")])
def test_today_the_same_rows_make_the_same_raw_shards_and_receipts(tmp_path, case):
    make(tmp_path, case)
    for kept in sorted((GOLDEN / case / "shards").iterdir()):
        assert (tmp_path / "out/shards" / kept.name).read_bytes() == kept.read_bytes(), (
            "a new format needs a new version"
        )
    for kept in sorted((GOLDEN / case / "commits").iterdir()):
        receipt = json.loads(kept.read_text())
        assert json.loads((tmp_path / "out/commits" / kept.name).read_text()) == receipt
        assert sha256_of_all_but_states(GOLDEN / case / receipt["key"]) == receipt["sha256"]


if __name__ == "__main__":
    for name in CASES:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        scratch = GOLDEN / f".{name}"
        make(scratch, name)
        (scratch / "out").rename(GOLDEN / name)
        shutil.rmtree(scratch)
    sys.exit(0)
