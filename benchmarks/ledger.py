"""What the ledger costs where a run has very many units.

    python benchmarks/ledger.py [--units 100000] [--rows 10] [--folder DIR]

    resume     from the command to the first unit's being known: identity, plan, and which units have a commit
    manifest   commits and prepared rows joined into manifest and token counts, with a look at every shard's size

The output lies in a local folder and is made by the run's own code, but for the shards: a commit is real, and its shard
is a file of one byte. Each case is a process of its own, whose peak of resident memory is shown with its time.
"""

import argparse
import concurrent.futures
import functools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
from results import Row, write

from ray_extract import run
from ray_extract.config import Job
from ray_extract.layout import shard_key
from ray_extract.ledger import Ledger
from ray_extract.records import Receipt, Unit

GOAL_S = 10.0  # of a resume at 100,000 units
STATES = 4
NOTE = "Taken on a machine of two cores that ran other tests meanwhile: each core had several processes to run."
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 16,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}


def job(folder: Path, rows: int) -> Job:
    """The job of an output with `rows` rows a unit."""
    return Job.model_validate(
        {
            "model": {"path": str(folder / "model"), "load_format": "dummy"},
            "dataset": {"paths": [str(folder / "rows.jsonl")]},
            "engine": {"kind": "simulated", "device": "cpu"},
            "output": {"url": str(folder / "out"), "format": "raw", "max_rows": rows, "head": False},
        }
    )


def make_output(folder: Path, units: int, rows: int) -> None:
    """Plan an output and commit all its units but the last one."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as file:
        for ids in rng.integers(0, 1000, (units * rows, 4)).tolist():
            file.write(json.dumps({"input_ids": ids}) + "\n")
    prepared = run.prepare_run(job(folder, rows))
    assert len(prepared.units) == units
    (folder / "out/shards").mkdir()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for _ in pool.map(functools.partial(commit, folder, prepared.ledger), prepared.units[:-1]):
            pass


def commit(folder: Path, ledger: Ledger, unit: Unit) -> None:
    """Commit a unit with a shard of one byte."""
    key = shard_key(unit.unit, "0123abcd-01", "raw")
    (folder / "out" / key).write_bytes(b"x")
    receipt = Receipt(
        unit=unit.unit,
        attempt="0123abcd-01",
        key=key,
        format="raw",
        size=1,
        sha256="0" * 64,
        rows=unit.rows,
        tokens=unit.tokens,
        kept=unit.kept,
        failures=(),
        digests=np.random.default_rng(unit.first).bytes(8 * unit.rows * (1 + STATES)),
        environment={"ray_extract": "0.1.0", "node": "node", "engine": "simulated"},
        seconds={"read": 0.0, "wait": 0.0, "extract": 1.0, "seal": 0.1, "flush": 0.5},
    )
    ledger.commit(receipt)


def phase(case: str, folder: Path, rows: int) -> None:
    """Run a case in this process, and print its seconds and MiB."""
    began = time.monotonic()

    def extract(prepared: run.Prepared, done: set[str], todo: list[Unit]) -> tuple[int, float]:
        """In place of engines."""
        if case == "resume":
            assert len(todo) == 1
            report(began)
            sys.exit(0)
        raise AssertionError("nothing is left to extract")

    with mock.patch.object(run, "_extract", extract):
        assert run.run(job(folder, rows)).totals.rows
    report(began)


def report(began: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": time.monotonic() - began, "mib": peak}))


def measured(case: str, folder: Path, rows: int) -> dict[str, float]:
    """A case in a process of its own."""
    command = [sys.executable, __file__, "--phase", case, "--folder", str(folder), "--rows", str(rows)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=10, help="rows of a unit")
    parser.add_argument("--folder", help="where to make the output; a temporary folder when absent")
    parser.add_argument("--phase", choices=["resume", "manifest"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        phase(args.phase, Path(args.folder), args.rows)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make_output(folder, args.units, args.rows)
        found = {"resume": measured("resume", folder, args.rows)}
        last = run.prepare_run(job(folder, args.rows))
        commit(folder, last.ledger, last.units[-1])
        found["manifest"] = measured("manifest", folder, args.rows)
    rows = []
    for case, figures in found.items():
        shown = f"{case}, {args.units:,} units of {args.rows} rows"
        goal = GOAL_S if case == "resume" and args.units == 100_000 else None
        rows.append(Row(shown, "time", round(figures["seconds"], 1), "s", goal, "lower"))
        rows.append(Row(shown, "peak memory", round(figures["mib"]), "MiB"))
    path = write("ledger", rows)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": NOTE}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
