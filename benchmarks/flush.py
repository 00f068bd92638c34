"""What a captured shard costs on its way out: CPU seconds a GiB of the flushing process, and its memory.

    python benchmarks/flush.py [--cases raw-http,raw-https,...] [--runs 5] [--mib 1024] [--folder DIR]

    raw-http, raw-https               a shard of --mib, to a server of ours that keeps nothing (null_s3.py)
    parquet-http                      the same as Parquet
    multipart-http, multipart-https   a raw shard a quarter larger, which goes in parts
    parallel-http, parallel-parquet   three shards at once: raw ones in parts, and Parquet ones of a third
    disk                              a raw shard to a folder (in --folder), beside cp of the same memory with fsync

What is timed is what a worker does once a unit's rows are there, by the worker's own functions: seal, check of every
digest, upload, receipt; and the driver's commit. The digests were published before, as an engine publishes them. Other
ways take the same states without a check: `obstore` puts the memory unsigned, `s3fs` pipes it, and `torch-save` makes a
file of each row, which obstore puts.

CPU time is that of all threads of the flushing process, and of cp. Each case has a process of its own, in which its
ways take turns; a figure is the median of the runs, and a ratio that of ours to the other way's CPU time in each turn.
Memory is what the process's peak grows by in its first flush, loading the clients included. One flush more goes to
where the server hashes what it gets, which must be the shard.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import hashlib
import io
import itertools
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import s3fs
import torch
import urllib3
from obstore.store import S3Store
from results import Row, in_turns, verdict, write

from ray_extract import s3
from ray_extract.capture.arena import PAGE, Arena, ArenaSpec, Extent, new_nonce
from ray_extract.capture.digest import digest_ids, digest_tokens
from ray_extract.config import Job
from ray_extract.dataset.prepared import RowIndex
from ray_extract.engine.base import EngineInfo
from ray_extract.extractor import Captured, Clock, ExtractorSetup
from ray_extract.layout import unit_id
from ray_extract.ledger import Ledger
from ray_extract.records import RowFailure, Unit
from ray_extract.shards.image import ImageLayout, RowTable, lay_out, row_table, state_columns, write_table
from ray_extract.shards.parquet import encode
from ray_extract.shards.seal import check_digests
from ray_extract.shards.values import as_tensor
from ray_extract.store import open_store
from ray_extract.worker import Worker, WorkerSetup

HERE = Path(__file__).parent
HIDDEN, BOUNDARIES = 7168, (2, 30, 57)
KEYS = {"access_key_id": "made-up", "secret_access_key": "made-up", "region": "us-east-1"}
NOTE = (
    "Taken on a machine of two cores that ran other work meanwhile: CPU seconds varied by a tenth between runs of the "
    "command, over TLS by a fifth, and rates by more, since the server takes its part of both cores too. "
    "multipart-https has no goal: parts go through urllib3 and so OpenSSL, which takes 0.5 CPU seconds a GiB here by "
    "itself."
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of shard on a kind of way.

    Args:
        format: `raw` or `parquet`.
        scheme: of the server; `file` for a folder.
        size: of a shard's states, as a part of --mib.
        goal: most CPU seconds a GiB.
        memory: most MiB beside the image.
        requests: most at once.
        shards: flushed at once.
        others: what is measured beside it.
    """

    format: str
    scheme: str
    size: float
    goal: float | None
    memory: int
    requests: int
    shards: int = 1
    others: tuple[str, ...] = ()


CHECK = "check alone"
OTHERS = (CHECK, "obstore", "s3fs", "torch-save")
CASES = {
    "raw-http": Case("raw", "http", 0.99, 0.45, 64, 1, others=OTHERS),
    "raw-https": Case("raw", "https", 0.99, 0.65, 64, 1, others=OTHERS),
    "parquet-http": Case("parquet", "http", 0.99, 1.6, 256, 1),
    "multipart-http": Case("raw", "http", 1.25, 0.45, 64, 4, others=("obstore",)),
    "multipart-https": Case("raw", "https", 1.25, None, 64, 4, others=("obstore",)),
    "parallel-http": Case("raw", "http", 1.05, 0.45, 64, 8 + 3, shards=3),
    "parallel-parquet": Case("parquet", "http", 0.33, 1.6, 3 * 256, 3, shards=3),
    "disk": Case("raw", "file", 0.99, None, 64, 0, others=(CHECK, "cp")),
}


@dataclasses.dataclass(frozen=True)
class Shard:
    """An image whose rows were captured and are not sealed yet."""

    extent: Extent
    layout: ImageLayout
    table: RowTable


class Bench:
    """A worker without an engine, and shards in its arena.

    Args:
        case: what to flush.
        nbytes: states of a shard.
        options: of the server's store; if there are none, shards go to `folder`.
    """

    def __init__(self, case: Case, nbytes: int, options: dict[str, str], folder: Path) -> None:
        self.case, self.options = case, options
        self.numbers = itertools.count()
        url = "s3://null/run" if options else str(folder)
        job = Job.model_validate(
            {
                "model": {"path": "none"},
                "dataset": {"paths": "none"},
                "output": {"url": url, "format": case.format, "storage_options": options},
                "capture": {"boundaries": BOUNDARIES, "check": "all"},
            }
        )
        setup = ExtractorSetup(
            job=job.model_dump(mode="json"),
            boundaries=BOUNDARIES,
            dtype="BF16",
            hidden=HIDDEN,
            num_layers=61,
            vocab_size=1 << 17,
            arena_bytes=0,
            log_dir="none",
        )
        rows = RowIndex((), 0, 0, 0, 0, 0, {}, "")
        self.worker = Worker(WorkerSetup(setup, rows.to_json(), {}, "flush"))
        self.worker._info = EngineInfo("none", 1 << 17, 1, {})
        self.columns = self.worker._extractor.columns
        tables = [make_rows(nbytes, seed) for seed in range(case.shards)]
        layouts = [lay_out(table, self.columns, {"unit": "made up"}) for table in tables]
        self.arena = self.worker._extractor._arena = Arena.create(
            ArenaSpec(
                nonce=new_nonce(),
                nbytes=sum(-(-layout.nbytes // PAGE) * PAGE for layout in layouts),
                slots=case.shards,
                max_rows=max(map(len, tables)),
                writers=1,
                boundaries=BOUNDARIES,
                final=True,
                dtype="BF16",
                hidden=HIDDEN,
            )
        )
        self.shards = [self.captured(layout, table) for layout, table in zip(layouts, tables, strict=True)]
        self.gib = sum(layout.nbytes for layout in layouts) / 2**30

    def captured(self, layout: ImageLayout, table: RowTable) -> Shard:
        """An image as an engine leaves it: states in place, and what it publishes of each row."""
        extent = self.arena.allocate(layout.nbytes)
        write_table(layout, table, extent.buffer)
        self.worker._extractor._open(extent, layout, table)
        control, slot = self.arena.control, extent.slot
        noise = np.random.default_rng(0).standard_normal(16 << 20, np.float32)
        block = (noise.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        for k, column in enumerate(layout.columns):
            state = layout.state_bytes(extent.buffer, column)
            flat = state.reshape(-1)
            for at in range(0, len(flat), len(block)):
                flat[at : at + len(block)] = np.roll(block, 2 * k)[: len(flat) - at]
            for row in range(len(table)):
                kept = state[int(table.cu_kept[row]) : int(table.cu_kept[row + 1])]
                control.digest[slot, row, 1 + k] = digest_tokens(kept)
        for row in range(len(table)):
            ids = table.input_ids[int(table.cu_seqlens[row]) : int(table.cu_seqlens[row + 1])]
            control.digest[slot, row, 0] = digest_ids(ids)
        control.covered[slot, : len(table)] = np.diff(table.cu_seqlens)
        self.arena.retire(extent, lambda: True)
        return Shard(extent, layout, table)

    def flush(self) -> list[str]:
        """All shards from captured to committed; their keys."""
        if len(self.shards) == 1:
            return [self.one(self.shards[0])]
        with concurrent.futures.ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(self.one, self.shards))

    def one(self, shard: Shard) -> str:
        """What Extractor.capture, Worker.extract and the driver do with a shard from here on; its key."""
        worker, clock = self.worker, Clock()
        table = shard.table
        unit = Unit(unit_id(next(self.numbers)), 0, len(table), len(table), table.num_kept, table.num_kept, 0)
        failures: dict[int, RowFailure] = {}
        clock.lap("read")
        worker._extractor._seal(shard.extent, shard.layout, table, failures)
        assert not failures, failures
        captured = Captured(shard.layout, table, shard.extent.buffer, failures, {})
        name, key, size = worker._flush(unit, "a0", captured)
        clock.lap("flush")
        assert Ledger(worker._store).commit(worker._receipt(unit, name, key, size, captured, clock))
        return key

    @contextlib.contextmanager
    def hashed(self) -> Iterator[None]:
        """Meanwhile a server does not drop what it gets unseen."""
        usual = self.worker._store
        if self.options:
            self.worker._store = open_store("s3://hashed/run", self.options)
        yield
        self.worker._store = usual

    def stored(self, shard: Shard) -> memoryview:
        """The object that must arrive."""
        if self.case.format == "raw":
            return shard.extent.buffer
        whole = bytearray()
        for chunk in encode(shard.layout, shard.extent.buffer):
            whole += chunk
        return memoryview(whole)

    def close(self) -> None:
        """Give the shared memory back."""
        self.arena.close()


def make_rows(nbytes: int, seed: int) -> RowTable:
    """Rows of mostly 500 to 5,000 tokens whose states take `nbytes`, all of them kept."""
    rng = np.random.default_rng(seed)
    left = nbytes // sum(column.token_bytes for column in state_columns(BOUNDARIES, True, "BF16", HIDDEN))
    lengths: list[int] = []
    while left:
        lengths.append(min(left, 16 + int(rng.lognormal(7.2, 0.8))))
        left -= lengths[-1]
    ids = [rng.integers(0, 1 << 17, n, dtype=np.int32) for n in lengths]
    return row_table(range(len(ids)), ids, [np.ones(n, np.uint8) for n in lengths])


def others(bench: Bench, endpoint: str | None, folder: Path) -> dict[str, Callable[[], object]]:
    """The other ways to bring the first shard away, and the part of ours that is no upload."""
    shard, numbers = bench.shards[0], itertools.count()
    buffer, layout, table = shard.extent.buffer, shard.layout, shard.table

    def key(way: str) -> str:
        return f"{way}-{next(numbers)}"

    def check() -> None:
        assert not check_digests(layout, buffer, range(len(table)))

    def copy() -> None:
        target = folder / "copy.bin"
        subprocess.run(["cp", bench.arena.folder / "data", target], check=True)
        with target.open("rb+") as file:
            os.fsync(file.fileno())

    if endpoint is None:
        return {CHECK: check, "cp": copy}
    plain = S3Store(
        "null",
        config={"aws_endpoint_url_s3": endpoint, "unsigned_payload": True, **KEYS},
        client_options={"allow_http": True, "root_certificate": Path(os.environ["AWS_CA_BUNDLE"]).read_bytes()},
    )
    files = s3fs.S3FileSystem(
        key=KEYS["access_key_id"],
        secret=KEYS["secret_access_key"],
        endpoint_url=endpoint,
        config_kwargs={"request_checksum_calculation": "when_required"},
    )

    def by_obstore() -> None:
        obstore.put(plain, key("obstore"), buffer, use_multipart=False)

    def by_s3fs() -> None:
        files.pipe_file(f"null/{key('s3fs')}", bytes(buffer))

    def by_torch() -> None:
        for row in range(len(table)):
            first, end = int(table.cu_kept[row]), int(table.cu_kept[row + 1])
            states = {c.name: as_tensor(layout.state_bytes(buffer, c)[first:end], c.dtype) for c in layout.columns}
            ids = torch.from_numpy(table.input_ids[int(table.cu_seqlens[row]) : int(table.cu_seqlens[row + 1])])
            sink = io.BytesIO()
            torch.save({"input_ids": ids, **states}, sink)
            obstore.put(plain, key("torch"), sink.getbuffer(), use_multipart=False)

    return {CHECK: check, "obstore": by_obstore, "s3fs": by_s3fs, "torch-save": by_torch}


def report(endpoint: str) -> dict[str, Any]:
    """What the server saw since the last report."""
    with urllib3.PoolManager(ca_certs=os.environ["AWS_CA_BUNDLE"]) as pool:
        return dict(pool.request("GET", f"{endpoint}/-/report").json())


def assert_arrived(bench: Bench, keys: list[str], endpoint: str | None) -> int:
    """Compare what the server got, or a folder has, with the shards; returns the parts of the first one."""
    if endpoint is None:
        assert (Path(bench.worker._store.url) / keys[0]).read_bytes() == bench.stored(bench.shards[0])
        return 1
    objects = report(endpoint)["objects"]
    for shard, key in zip(bench.shards, keys, strict=True):
        whole, at = bench.stored(shard), 0
        for size, sha in objects[f"/hashed/run/{key}"]:
            assert sha == hashlib.sha256(whole[at : at + size]).hexdigest(), f"{key}: other bytes from {at} on"
            at += size
        assert at == whole.nbytes, f"{key}: {at} of {whole.nbytes} bytes arrived"
    commits = [path for path in objects if path.startswith("/hashed/run/commits/")]
    assert len(commits) == len(keys) and len(objects) == 2 * len(keys), list(objects)
    return len(objects[f"/hashed/run/{keys[0]}"])


def spent(action: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of this process and of children that ended, and seconds."""

    def used() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + ended.ru_utime + ended.ru_stime

    cpu, start = used(), time.perf_counter()
    action()
    return used() - cpu, time.perf_counter() - start


def peak_growth(action: Callable[[], object]) -> int:
    """MiB by which this process's peak exceeds what it held before."""

    def status(name: str) -> int:
        line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
        return int(line.split()[1])

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = status("VmRSS")
    action()
    return round((status("VmHWM") - before) / 1024)


def run_case(name: str, mib: int, runs: int, endpoints: dict[str, str], folder: Path) -> list[Row]:
    """Measure a case; in a process of its own."""
    torch.set_num_threads(1)
    s3.SINGLE_PUT_BYTES, s3._SLICE_BYTES, s3.PART_BYTES = mib << 20, mib << 16, mib << 15  # as they are, at 1024
    case = CASES[name]
    endpoint = endpoints.get(case.scheme)
    options = {"endpoint": endpoint, **KEYS} if endpoint else {}
    with contextlib.closing(Bench(case, int(case.size * (mib << 20)), options, folder)) as bench:
        if endpoint:
            report(endpoint)
        rows = [Row(name, "memory beside the image", peak_growth(bench.flush), "MiB", case.memory, "lower")]
        if endpoint:
            most = report(endpoint)["requests"]
            rows.append(Row(name, "requests at once", most, "most", case.requests, "lower"))
        with bench.hashed():
            rows.append(Row(name, "parts", assert_arrived(bench, bench.flush(), endpoint), "of a shard"))

        def turn(way: Callable[[], object]) -> tuple[float, float]:
            figures = spent(way)
            for file in folder.rglob("*.*"):  # of a folder's shards and copies; not timed
                file.unlink()
            return figures

        ways = {"": bench.flush} | others(bench, endpoint, folder)
        found = in_turns({way: functools.partial(turn, ways[way]) for way in ("", *case.others)}, runs)
    for way, figures in found.items():
        cpu, seconds = (statistics.median(each) for each in zip(*figures, strict=True))
        what, goal = (f", {way}", None) if way else ("", case.goal)
        rows.append(Row(name, f"cpu_s_per_gib{what}", round(cpu / bench.gib, 3), "CPU-s/GiB", goal, "lower"))
        rows.append(Row(name, f"rate{what}", round(bench.gib / seconds, 2), "GiB/s"))
        if way and way != CHECK:
            ratio = statistics.median(ours / other for (ours, _), (other, _) in zip(found[""], figures, strict=True))
            rows.append(Row(name, f"ratio{what}", round(ratio, 2), f"of the CPU time of {way}", None, "lower"))
    return rows


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """A server for each scheme, by its endpoint, and AWS_CA_BUNDLE set to what the second one's clients must trust."""
    certificate, key, both = (folder / name for name in ("certificate.pem", "key.pem", "both.pem"))
    openssl = "openssl req -x509 -nodes -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -subj /CN=127.0.0.1"
    extensions = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    command = [*openssl.split(), *extensions, "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    both.write_text(certificate.read_text() + key.read_text())
    os.environ["AWS_CA_BUNDLE"] = str(certificate)
    endpoints = {}
    with contextlib.ExitStack() as stack:
        for scheme, tls in (("http", []), ("https", ["--tls", both])):
            command = [sys.executable, HERE / "null_s3.py", *tls]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            server = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
            assert server.stdout is not None
            endpoints[scheme] = f"{scheme}://127.0.0.1:{server.stdout.readline().strip()}"
        yield endpoints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="of a shard; limits of the store scale with it")
    parser.add_argument("--folder", type=Path, help="on a disk, for the case `disk`")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as made, servers(Path(made)) as endpoints:
        for name in args.cases.split(","):
            folder = Path(made, name)
            folder.mkdir()
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                rows += pool.submit(run_case, name, args.mib, args.runs, endpoints, folder).result()
            for row in (each for each in rows if each.case == name):
                print(row, flush=True)
    write("flush", rows, note=NOTE, join=True)  # of fewer cases, the others stay
    return verdict(rows)


if __name__ == "__main__":
    sys.exit(main())
