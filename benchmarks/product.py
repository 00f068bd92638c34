"""The whole product as a benchmark runs it: `python -m ray_extract.run` into a sink of ours, and what it used."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from ray_extract.ledger import Ledger
from ray_extract.records import Receipt
from ray_extract.store import open_store

Ids = npt.NDArray[np.int32]

HERE = Path(__file__).parent
SHM = Path("/dev/shm")
_KEYS = {"access_key_id": "made-up", "secret_access_key": "made-up", "region": "us-east-1"}
_READY = " I engine ready after "
_SPEED = re.compile(r"^ *speed +([\d,]+) tokens/s, ([\d,]+) tokens in", re.MULTILINE)
_SAMPLE_S = 0.5
START_S = 180.0


@dataclasses.dataclass(frozen=True)
class Sample:
    """What all processes of a run had used at one moment.

    Args:
        time: time.monotonic().
        cpu: seconds of all processes since their starts.
        anonymous: bytes of memory that are no file's.
        shared: bytes more in /dev/shm than before the run.
        gpu: bytes more on the GPU than before the run.
        busy: percent of the last moments in which the GPU ran something, by NVML.
    """

    time: float
    cpu: float
    anonymous: int
    shared: int
    gpu: int
    busy: float


@dataclasses.dataclass(frozen=True)
class Ran:
    """One invocation.

    Args:
        code: its exit code.
        tokens: committed.
        seconds: from the engine's being ready to the last commit, by the run's own summary; 0 without one.
        whole: of the command.
        ready_s: from the command to the first engine's being ready; 0 if none was.
        samples: of the time between these, as far as it is known.
        output: what it printed, both ways.
    """

    code: int
    tokens: int
    seconds: float
    whole: float
    ready_s: float
    samples: list[Sample]
    output: str

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def cores(self) -> float:
        """CPU cores used by all processes of the run."""
        first, last = self.samples[0], self.samples[-1]
        return (last.cpu - first.cpu) / (last.time - first.time) if last.time > first.time else 0.0

    def peak(self, name: str) -> int:
        """Largest of a field, of all samples."""
        return max((int(getattr(sample, name)) for sample in self.samples), default=0)

    @property
    def busy(self) -> float:
        """Mean percent of the GPU's busy time."""
        return sum(sample.busy for sample in self.samples) / max(1, len(self.samples))


class Gpu:
    """The first GPU by NVML; zeros where there is none."""

    def __init__(self) -> None:
        self._device: Any = None
        with contextlib.suppress(Exception):  # no package, or no driver
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._device = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    def used(self) -> int:
        """Bytes, of all processes."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used) if self._device else 0

    def busy(self) -> float:
        """Percent of the last moments in which it ran something."""
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu) if self._device else 0.0


class Sampler:
    """Samples the processes below one, from a thread."""

    def __init__(self, pid: int) -> None:
        self.samples: list[Sample] = []
        self._root, self._gpu, self._ended = psutil.Process(pid), Gpu(), threading.Event()
        self._before = shutil.disk_usage(SHM).used, self._gpu.used()
        self._cpu: dict[tuple[int, float], float] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> list[Sample]:
        """All samples."""
        self._ended.set()
        self._thread.join()
        return self.samples

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.samples.append(self._sample())

    def _sample(self) -> Sample:
        anonymous = 0
        for process in (self._root, *self._root.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError, IndexError):  # it ended, or is a zombie
                times = process.cpu_times()
                # Of a process that ended, what it had used stays.
                self._cpu[process.pid, process.create_time()] = times.user + times.system
                status = Path(f"/proc/{process.pid}/status").read_text()
                anonymous += 1024 * int(status.partition("RssAnon:")[2].split()[0])
        shared, gpu = shutil.disk_usage(SHM).used - self._before[0], self._gpu.used() - self._before[1]
        return Sample(time.monotonic(), sum(self._cpu.values()), anonymous, shared, gpu, self._gpu.busy())


def make_rows(count: int, shortest: int, longest: int, vocab: int, seed: int = 0) -> list[Ids]:
    """Token ids of uniform length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in rng.integers(shortest, longest + 1, count)]


def write_prompts(path: Path, rows: Sequence[Ids]) -> Path:
    """A prompts file of token ids."""
    pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), path, row_group_size=1024)
    return path


@contextlib.contextmanager
def sink(folder: Path, processes: int = 12) -> Iterator[dict[str, Any]]:
    """A sink of ours; yields the storage options that lead to it."""
    command = [sys.executable, str(HERE / "sink.py"), "--folder", str(folder), "--processes", str(processes)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as server:
        assert server.stdout is not None and server.stdin is not None
        yield {"endpoint": f"http://127.0.0.1:{server.stdout.readline().strip()}", **_KEYS}
        server.stdin.close()


def extract(job: dict[str, Any], deadline: float = math.inf) -> Ran:
    """Run a job as its users do.

    Args:
        job: the job file's content.
        deadline: by time.monotonic(); then the run is asked to stop. So it is if its engine is not ready in START_S.
    """
    start, ready, lines = time.monotonic(), [0.0], []
    # Some machines' memory grows as it is used; Ray would take it for full and kill the worker.
    env = {**os.environ, "RAY_memory_monitor_refresh_ms": "0"}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write(json.dumps(job))  # YAML reads JSON
        config.flush()
        command = [sys.executable, "-m", "ray_extract.run", "--config", config.name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        sampler = Sampler(process.pid)

        def read() -> None:
            for line in process.stdout or ():
                lines.append(line)
                print(f"  {time.monotonic() - start:6.1f} {line}", end="", flush=True)
                if _READY in line and not ready[0]:
                    ready[0] = time.monotonic()

        reader = threading.Thread(target=read)
        reader.start()
        asked = False
        while (code := process.poll()) is None:
            now = time.monotonic()
            if not asked and (now > deadline or (not ready[0] and now - start > START_S)):
                process.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(0.05)
        reader.join()
    output, samples = "".join(lines), sampler.stop()
    speed = _SPEED.search(output)
    rate, tokens = (int(group.replace(",", "")) for group in speed.groups()) if speed else (0, 0)
    seconds = tokens / rate if rate else 0.0
    if ready[0]:
        samples = [s for s in samples if ready[0] <= s.time <= ready[0] + (seconds or math.inf)] or samples
    return Ran(code, tokens, seconds, time.monotonic() - start, ready[0] and ready[0] - start, samples, output)


def reset(folder: Path, bucket: str) -> None:
    """Forget a bucket."""
    for kind in ("objects", "records"):
        shutil.rmtree(folder / kind / bucket, ignore_errors=True)


def arrived(folder: Path, bucket: str) -> dict[str, list[dict[str, Any]]]:
    """The records of shards that came, by key under the run's prefix; of one key more than one if it came again."""
    found: dict[str, list[dict[str, Any]]] = {}
    root = folder / "records" / bucket / "run"
    for file in root.rglob("*.json"):
        key = file.relative_to(root).as_posix().rsplit(".", 2)[0]
        found.setdefault(key, []).append(json.loads(file.read_text()))
    return found


def receipts(url: str, options: dict[str, Any]) -> list[Receipt]:
    """What is committed."""
    return list(Ledger(open_store(url, options)).receipts())


def differences(found: dict[str, list[dict[str, Any]]], committed: Sequence[Receipt]) -> tuple[int, list[str]]:
    """Compare what raw shards' bytes came to with the digests that were taken on the device.

    Returns:
        Rows compared, and a line for each thing that is wrong: a shard that did not come, came twice or with another
        size, and a row of another digest.
    """
    rows, wrong = 0, []
    for receipt in committed:
        came = found.get(receipt.key, [])
        if len(came) != 1 or came[0]["size"] != receipt.size:
            wrong.append(f"{receipt.key}: came {len(came)} times, of {[each['size'] for each in came]} bytes")
            continue
        made = came[0]["made"][0]
        if "error" in made:
            wrong.append(f"{receipt.key}: {made['error']}")
            continue
        wanted = np.frombuffer(receipt.digests, np.uint64).reshape(receipt.rows, -1)
        failed = {failure.row for failure in receipt.failures}
        for row, ours, theirs in itertools.zip_longest(made["rows"], wanted.tolist(), made["digests"]):
            rows += 1
            if row not in failed and ours != theirs:
                wrong.append(f"{receipt.key}: row {row}: {theirs} came, {ours} left the device")
    return rows, wrong
