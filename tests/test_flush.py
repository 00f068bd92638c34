"""A short run of benchmarks/flush.py: what it counts, and that the bytes arrive, over TLS too; not its times."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_flush_sends_every_byte_once_and_copies_none(tmp_path: Path) -> None:
    """The benchmark itself compares the hashes of what arrives, and that a shard and its commit are all there is."""
    cases = ["raw-https", "multipart-https", "parquet-http"]
    run = subprocess.run(
        [sys.executable, "benchmarks/flush.py", "--mib=64", "--runs=1", "--cases", ",".join(cases)],
        cwd=ROOT,
        env=os.environ | {"RAY_EXTRACT_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    result = tmp_path / "flush.json"
    assert result.exists(), run.stdout + run.stderr
    found = {(row["case"], row["metric"]): row["value"] for row in json.loads(result.read_text())["rows"]}
    # Parts are a sixteenth of --mib, and of Parquet half of that.
    assert {case: found[case, "parts"] for case in cases} == dict(zip(cases, (1, 20, 32), strict=True))
    assert found["raw-https", "requests at once"] == found["parquet-http", "requests at once"] == 1
    assert found["multipart-https", "requests at once"] <= 4
    assert found["raw-https", "memory beside the image"] < 16  # MiB; one copy would be 63
    assert found["multipart-https", "memory beside the image"] < 48
    assert all(found[case, "cpu_s_per_gib"] > 0 for case in cases)
