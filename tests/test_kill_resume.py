"""Real SGLang under `python -m ray_extract.run`: kill -9 of each process in mid-run, then resume."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import numpy as np
import pytest
from rig import BOUNDARIES, TOLERANCE, prompts, relative_error

from ray_extract.ledger import Ledger
from ray_extract.readers.dataset import HiddenStates
from ray_extract.store import open_store
from ray_extract.verify import verify

pytestmark = [pytest.mark.engine, pytest.mark.ray]

MARK = "RAY_EXTRACT_KILL_TEST"
WAIT_S = 300


class Run:
    """A job of many small units on one engine, and the processes that it started."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.mark = f"{os.getpid()}-{folder.name}"
        rng = np.random.default_rng(1)
        self.rows = prompts(rng.integers(1, 200, 240).tolist(), seed=2)
        self.masks = [(np.random.default_rng(len(r)).random(len(r)) < 0.5).astype(int).tolist() for r in self.rows]
        records = ({"input_ids": r.tolist(), "loss_mask": m} for r, m in zip(self.rows, self.masks, strict=True))
        (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        job = {
            "model": {"path": str(model), "dtype": "float32"},
            "dataset": {"paths": str(folder / "rows.jsonl")},
            "engine": {
                "device": "cpu",
                "chunked_prefill_size": 128,
                "env": {"OMP_NUM_THREADS": "1"},
                "args": {"max_total_tokens": 8192},
            },
            "capture": {"boundaries": list(BOUNDARIES)},
            "output": {"url": str(self.out), "format": "raw", "shard_bytes": "768KiB"},
            "run": {"address": "local", "progress_s": 1, "max_engine_deaths": 4, "max_attempts": 4},
        }
        # JSON is YAML.
        (folder / "job.yaml").write_text(json.dumps(job))

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        environment = {**os.environ, MARK: self.mark, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        with (self.folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray_extract.run", "--config", str(self.folder / "job.yaml")],
                stdout=log,
                stderr=log,
                env=environment | {"RAY_USAGE_STATS_ENABLED": "0"},
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def commits(self) -> int:
        return len(Ledger(open_store(str(self.out))).committed_units()) if self.out.exists() else 0

    def processes(self, name: str) -> list[int]:
        """Pids of this run whose command line or title holds `name`."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and name in (entry / "cmdline").read_text():
                    environ = (entry / "environ").read_bytes().split(b"\0")
                    if f"{MARK}={self.mark}".encode() in environ:
                        found.append(int(entry.name))
        return found

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()


def wait_for(condition: Callable[[], object], what: str, run: Run) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}\n{run.log()[-3000:]}"
        time.sleep(0.05)


def kill_one(run: Run, name: str) -> None:
    """Wait for two more commits, so that work is under way, and kill a process."""
    before = run.commits()
    wait_for(lambda: run.commits() >= before + 2, f"commits before the death of {name}", run)
    pids = run.processes(name)
    assert pids, f"no process {name}"
    os.kill(pids[0], signal.SIGKILL)


def test_every_row_is_committed_once_whatever_is_killed(tmp_path: Path, checkpoints: Path) -> None:
    run = Run(tmp_path, models.tiny_model("qwen3", checkpoints))
    arenas = set(Path("/dev/shm").glob("ray_extract-*"))
    with run.started() as driver:
        for victim in ("sglang::scheduler", "ray_extract.engine.host", "ray::Worker"):
            kill_one(run, victim)
        before = run.commits()
        wait_for(lambda: run.commits() >= before + 2, "commits before the death of the driver", run)
        assert driver.poll() is None, run.log()
        driver.kill()
        driver.wait()
        at_death = run.commits()
    # The guard and the end of the pipes clean up after a driver that could not.
    wait_for(lambda: not run.processes("ray_extract.engine.host"), "the engines to end", run)
    wait_for(lambda: not run.processes("sglang::"), "the schedulers to end", run)
    wait_for(lambda: set(Path("/dev/shm").glob("ray_extract-*")) <= arenas, "the arenas to go", run)
    ledger = Ledger(open_store(str(run.out)))
    attempts = {receipt.unit: receipt.attempt for receipt in ledger.receipts()}
    with run.started() as again:
        assert again.wait(WAIT_S) == 0, run.log()[-5000:]
    after = {receipt.unit: receipt.attempt for receipt in ledger.receipts()}
    assert 0 < at_death < len(after), "the driver must die in mid-run for this test to mean anything"
    assert attempts.items() <= after.items(), "a committed unit was extracted again"

    report = verify(str(run.out))
    assert report.ok and report.rows == report.rows_ok == len(run.rows), report.lines()
    data = HiddenStates(str(run.out), check=True)
    assert sorted(data[i]["row"] for i in range(len(data))) == list(range(len(run.rows)))
    for i in range(len(data)):
        item = data[i]
        row = item["row"]
        assert item["input_ids"].tolist() == run.rows[row].tolist()
        assert item["loss_mask"].tolist() == run.masks[row]
        reference = models.hf_states(models.tiny_model("qwen3", checkpoints), run.rows[row].tolist())
        for name, boundary in [*((f"state.{b}", b) for b in BOUNDARIES), ("state.final", -1)]:
            assert relative_error(item[name].numpy(), reference[boundary]) < TOLERANCE
