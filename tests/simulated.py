"""Jobs for the simulated engine, what their output must be, and how to find and kill their processes."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_extract.config import Job, load_job
from ray_extract.engine.simulated import simulated_states
from ray_extract.layout import HEAD_KEY
from ray_extract.ledger import Ledger, read_manifest
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.head import load_token_counts
from ray_extract.records import Receipt
from ray_extract.run import Summary, run
from ray_extract.shards.reader import open_shard
from ray_extract.store import open_store
from ray_extract.verify import verify

HIDDEN = 16
STATES = ("state.2", "state.4", "state.5", "state.final")  # eagle3 of 8 layers
MARK = "RAY_EXTRACT_TEST"  # an environment variable by which a job's engine hosts are known
WAIT_S = 120.0

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": HIDDEN,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}


@dataclasses.dataclass(frozen=True)
class Work:
    """A job file, its data and its output.

    Args:
        folder: of its files.
        config: the job file.
        rows: token ids of every row.
        url, options: the output.
        mark: value of MARK in the environment of its engine hosts.
    """

    folder: Path
    config: Path
    rows: list[list[int]]
    url: str
    options: dict[str, Any]
    mark: str

    def job(self, *overrides: str) -> Job:
        """The job, with overrides."""
        return load_job(self.config, overrides)

    def args(self, *overrides: str) -> list[str]:
        """Arguments of the command."""
        return ["--config", str(self.config), *overrides]

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """`python -m ray_extract.run` as a process, both outputs in one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "ray_extract.run", *self.args(*overrides)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def receipts(self) -> list[Receipt]:
        """What is committed."""
        return list(Ledger(open_store(self.url, self.options)).receipts())

    def commits(self) -> int:
        """How many units are committed."""
        return len(Ledger(open_store(self.url, self.options)).committed_units())


def make_work(
    folder: Path,
    rows: Iterable[Iterable[int]],
    address: str | None = None,
    *,
    url: str | None = None,
    options: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    output: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> Work:
    """Write a model, data and a job file: by default raw shards of two rows in a local folder, one engine.

    Args:
        rows: token ids.
        address: of the Ray cluster.
        url, options: of the output.
        engine, output, run: more fields of these sections of the job.
    """
    model, data, mark = folder / "model", folder / "rows.jsonl", f"{folder.name}-{os.getpid()}"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(_CONFIG))
    listed = [list(ids) for ids in rows]
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in listed))
    url, options = url or str(folder / "out"), dict(options or {})
    tree = {
        "model": {"path": str(model), "load_format": "dummy"},
        "dataset": {"paths": [str(data)], "processes": 1},  # else it looks for a cluster, and there may be others
        "engine": {
            "kind": "simulated",
            "device": "cpu",
            "chunked_prefill_size": 64,
            "env": {MARK: mark},
            **(engine or {}),
        },
        "output": {"url": url, "format": "raw", "max_rows": 2, "storage_options": options, **(output or {})},
        "run": {"address": address, "progress_s": 0.5, **(run or {})},
    }
    config = folder / "job.yaml"
    config.write_text(json.dumps(tree))  # YAML reads JSON
    return Work(folder, config, listed, url, options, mark)


def make_rows(count: int, seed: int = 0) -> list[list[int]]:
    """Rows of 20 to 99 tokens, ids from 10 to 999: those below are for faults."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 1000, length).tolist() for length in rng.integers(20, 100, count)]


def check_output(work: Work, failed: Mapping[int, str] | None = None) -> list[Receipt]:
    """Assert that every row is there once, with the states that it must have, or failed for the reason it must have.

    Args:
        failed: a part of the reason, for each row that must have failed.

    Returns:
        The commits.
    """
    failed = failed or {}
    report = verify(work.url, work.options)
    assert report.ok, report.lines()
    assert (report.rows, report.rows_ok, report.rows_failed) == (
        len(work.rows),
        len(work.rows) - len(failed),
        len(failed),
    )
    # That they are right, if they are there, verify says.
    assert load_token_counts(work.url, work.options).rows == report.rows_ok
    assert open_store(work.url, work.options).head(HEAD_KEY) is None  # it would be another model's than the states
    items = HiddenStates(work.url, storage_options=work.options, check=True)
    assert [items[i]["row"] for i in range(len(items))] == [i for i in range(len(work.rows)) if i not in failed]
    assert items.states == STATES
    for item in (items[i] for i in range(len(items))):
        ids = np.array(work.rows[item["row"]], np.int32)
        assert item["input_ids"].tolist() == ids.tolist()
        for name, wanted in zip(STATES, simulated_states(ids, 0, len(STATES), HIDDEN, "BF16"), strict=True):
            assert item[name].dtype == torch.bfloat16
            assert item[name].equal(wanted), f"row {item['row']}, {name}"
    store = open_store(work.url, work.options)
    for row in read_manifest(store).to_pylist():
        if row["row"] in failed:
            assert row["status"] == "failed" and failed[row["row"]] in row["reason"], row
            shard = open_shard(store, row["shard"], row["format"])
            assert not any(shard.state(name, row["row_in_shard"]).any() for name in STATES)
    receipts = work.receipts()
    assert len({r.unit for r in receipts}) == len(receipts)
    return receipts


def hosts(mark: str) -> list[int]:
    """Living engine hosts of a job."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and b"ray_extract.engine.host" in (entry / "cmdline").read_bytes()
                and f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
    return sorted(found)


def parent(pid: int) -> int:
    """The process that started this one: a host's is its worker."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def arenas(pid: int) -> set[Path]:
    """Folders of the arenas that a process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    files = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/ray_extract-" in line]
    return {Path(name.removesuffix(" (deleted)")).parent for name in files}


def until(true: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait until a value is true, and return it."""
    end = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < end, f"waited {timeout_s:.0f} s for: {what}"
        time.sleep(0.1)
    return value


@contextlib.contextmanager
def running(job: Job) -> Iterator[Future[Summary]]:
    """Run a job in a thread; the body may disturb it and takes the result."""
    future: Future[Summary] = Future()

    def work() -> None:
        try:
            future.set_result(run(job))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield future
    thread.join(WAIT_S)
    assert not thread.is_alive(), "the run did not end"
