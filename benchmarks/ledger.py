"""What the ledger costs where a run has very many units.

    python benchmarks/ledger.py [--units 100000] [--rows 10] [--folder DIR]

    resume     from the command to the first unit's being known: identity, plan, and which units have a commit
    manifest   commits and prepared rows joined into manifest and token counts, with a look at every shard's size
    again      the same command once more, which finds all of that done

The output lies in a local folder and is made by the run's own code, but for the shards: a commit is real, and its shard
is a file that is one hole. Each case is a process of its own, whose peak of resident memory is shown with its time.
`again` is also run as on an object store, without segments and with them: each request takes 20 ms more, and a listing
is one for each 1,000 keys.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from results import Row, write

from ray_extract import run
from ray_extract.config import Job
from ray_extract.layout import shard_key
from ray_extract.ledger import Ledger, stored_columns
from ray_extract.records import Receipt, Unit
from ray_extract.shards.image import states_extent
from ray_extract.store import LocalStore, ObjectInfo

GOALS_S = {"resume": 10.0, "manifest": 20.0}  # at 100,000 units of 10 rows
LATENCY_S = 0.02
PAGE = 1000  # keys of a listing
STATES = 4
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
    """Commit a unit with a shard that is one hole."""
    key = shard_key(unit.unit, "0123abcd-01", "raw")
    nbytes = 4096 + states_extent(stored_columns(ledger.claimed()), unit.kept)[1]
    with (folder / "out" / key).open("wb") as file:
        file.truncate(nbytes)
    receipt = Receipt(
        unit=unit.unit,
        attempt="0123abcd-01",
        key=key,
        format="raw",
        size=nbytes,
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


class SlowStore(LocalStore):
    """A folder whose requests take as long as an object store's, and are counted."""

    requests = 0
    _lock = threading.Lock()

    def _request(self) -> None:
        with self._lock:
            SlowStore.requests += 1
        time.sleep(LATENCY_S)

    def _put(self, key: str, data: memoryview, create: bool) -> None:
        self._request()
        super()._put(key, data, create)

    def _get(self, key: str) -> bytes:
        self._request()
        return super()._get(key)

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        self._request()
        return super()._get_range(key, start, length)

    def _size(self, key: str) -> int:
        self._request()
        return super()._size(key)

    def _list(self, folder: str, recursive: bool) -> Iterator[ObjectInfo]:
        for number, item in enumerate(super()._list(folder, recursive)):
            if number % PAGE == 0:
                self._request()
            yield item


def phase(case: str, folder: Path, rows: int, slow: bool) -> None:
    """Run a case in this process, and print its seconds, MiB and requests."""
    began = time.monotonic()

    def extract(prepared: run.Prepared, done: set[str], todo: list[Unit], sofar: object) -> None:
        """In place of engines."""
        if case == "resume":
            assert len(todo) == 1
            report(began)
            sys.exit(0)
        raise AssertionError("nothing is left to extract")

    store = mock.patch.object(run, "open_store", lambda url, options: SlowStore(url))
    with store if slow else contextlib.nullcontext(), mock.patch.object(run, "_extract", extract):
        assert run.run(job(folder, rows)).totals.rows
    report(began)


def report(began: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "seconds": time.monotonic() - began,
        "cpu": usage.ru_utime + usage.ru_stime,
        "mib": usage.ru_maxrss / 1024,
        "requests": SlowStore.requests,
    }
    print(json.dumps(figures))


def measured(case: str, folder: Path, rows: int, slow: bool = False) -> dict[str, float]:
    """A case in a process of its own."""
    command = [sys.executable, __file__, "--phase", case, "--folder", str(folder), "--rows", str(rows)]
    command += ["--slow"] if slow else []
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=10, help="rows of a unit")
    parser.add_argument("--folder", help="where to make the output; a temporary folder when absent")
    parser.add_argument("--phase", choices=["resume", "manifest", "again"], help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        phase(args.phase, Path(args.folder), args.rows, args.slow)
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make_output(folder, args.units, args.rows)
        found = {"resume": measured("resume", folder, args.rows)}
        found["resume, 20 ms a request"] = measured("resume", folder, args.rows, slow=True)
        last = run.prepare_run(job(folder, args.rows))
        commit(folder, last.ledger, last.units[-1])
        found["manifest"] = measured("manifest", folder, args.rows)
        found["again, 20 ms a request, segments"] = measured("again", folder, args.rows, slow=True)
        shutil.rmtree(folder / "out/segments")
        found["again, 20 ms a request, no segments"] = measured("again", folder, args.rows, slow=True)
    rows = []
    for case, figures in found.items():
        shown = f"{case}, {args.units:,} units of {args.rows} rows"
        goal = GOALS_S.get(case) if (args.units, args.rows) == (100_000, 10) else None
        rows.append(Row(shown, "time", round(figures["seconds"], 1), "s", goal, "lower"))
        rows.append(Row(shown, "CPU time", round(figures["cpu"], 1), "s", better="lower"))
        rows.append(Row(shown, "peak memory", round(figures["mib"]), "MiB", better="lower"))
        if figures["requests"]:
            rows.append(Row(shown, "requests", figures["requests"], "requests", better="lower"))
    load = f"Processes that wanted to run, by the load average: {before:.1f} before, {os.getloadavg()[0]:.1f} after."
    print(write("ledger", rows, note=load))


if __name__ == "__main__":
    main()
