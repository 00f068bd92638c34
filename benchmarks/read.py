"""What the readers cost over the plainest way to the same bytes.

    python benchmarks/read.py [--cases sequential,random-row,stream-s3] [--runs 7] [--shrink 1] [--folder DIR]

    sequential   all states of all rows of a shard, through HiddenStates, over safetensors' safe_open of the same shard
    random-row   one state of a random row, through HiddenStates, over a pread of its bytes
    stream-s3    HiddenStatesStream from SeaweedFS on this machine, over plain GETs of the same objects; and how many
                 requests a state of a row takes, as part of an item of an open shard and alone

Each way is run in turns with the other, in one thread, on files that are in the page cache, and copies what it reads
into the same memory (the streams only hold it: the GETs do no more). A run's figure is the ratio of the two; the result
is the median of the runs. The shards are made up and committed as a run commits them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
from results import Row, in_turns, verdict, write
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from proxies import CountingProxy
from servers import seaweedfs

from ray_extract.layout import manifest_key, shard_key
from ray_extract.ledger import MANIFEST_FORMAT, MANIFEST_SCHEMA, MANIFEST_VERSION
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.stream import HiddenStatesStream
from ray_extract.shards.image import lay_out, row_table, state_columns, states_extent, write_table
from ray_extract.shards.raw import write_raw
from ray_extract.store import open_store

NOTE = (
    "Taken on a machine of two cores that ran other tests meanwhile, so rates vary; ratios are of turns that "
    "follow each other. For stream-s3 the server runs on the same two cores."
)


def make_run(url: str, options: dict[str, Any], *, shards: int, rows: int, tokens: int, hidden: int) -> int:
    """Write shards of rows of one length with four bf16 states each, and the manifest; returns the bytes of states."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    store = open_store(url, options)
    columns = state_columns((2, 30, 57), True, "BF16", hidden)
    rng = np.random.default_rng(0)
    lines: list[dict[str, Any]] = []
    for number in range(shards):
        first = number * rows
        ids = [rng.integers(0, 100_000, tokens, dtype=np.int32) for _ in range(rows)]
        table = row_table(range(first, first + rows), ids, [np.ones(tokens, np.uint8)] * rows)
        layout = lay_out(table, columns, {"unit": f"u{number:08d}"})
        buffer = memoryview(bytearray(layout.nbytes))
        write_table(layout, table, buffer)
        for column in columns:
            state = layout.state_bytes(buffer, column).reshape(-1)
            state[:] = rng.integers(0, 256, len(state), dtype=np.uint8)
        layout.small(buffer, "digest")[...] = 1  # not checked here
        key = shard_key(f"u{number:08d}", "a0", "raw")
        write_raw(store, key, buffer)
        lines += [
            {
                "row": first + place,
                "row_id": f"r{first + place}",
                "source": "made up",
                "n_tokens": tokens,
                "kept": tokens,
                "status": "ok",
                "unit": f"u{number:08d}",
                "shard": key,
                "format": "raw",
                "row_in_shard": place,
                "token_offset": place * tokens,
                "states_offset": layout.states_offset,
                "states_stride": states_extent(columns, rows * tokens)[0],
                "digests": [1] * (1 + len(columns)),
            }
            for place in range(rows)
        ]
    sink = pa.BufferOutputStream()
    metadata = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "ray_extract.columns": json.dumps([[c.name, c.dtype, c.width] for c in columns]),
    }
    pq.write_table(pa.Table.from_pylist(lines, schema=MANIFEST_SCHEMA.with_metadata(metadata)), sink)
    store.put(manifest_key(0), sink.getvalue().to_pybytes())
    return shards * rows * tokens * hidden * 2 * len(columns)


def timed(action: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def ratio(found: dict[str, list[float]], ours: str, plain: str) -> float:
    """The median of the runs' ratios."""
    return statistics.median(a / b for a, b in zip(found[ours], found[plain], strict=True))


def sequential(folder: Path, runs: int, shrink: int) -> list[Row]:
    """All states of all rows."""
    url, tokens = str(folder / "sequential"), 1730 // shrink
    nbytes = make_run(url, {}, shards=1, rows=20, tokens=tokens, hidden=7168)
    path = next((folder / "sequential" / "shards").iterdir())
    target = torch.empty(tokens, 7168, dtype=torch.bfloat16).fill_(1)

    def ours() -> None:
        data = HiddenStates(url)
        for index in range(len(data)):
            item = data[index]
            for name in data.states:
                target.copy_(item[name])

    def plain() -> None:
        with safe_open(path, framework="pt") as file:
            for name in ("state.2", "state.30", "state.57", "state.final"):
                state = file.get_tensor(name)
                for at in range(0, len(state), tokens):
                    target.copy_(state[at : at + tokens])

    found = in_turns({"ours": lambda: nbytes / timed(ours), "plain": lambda: nbytes / timed(plain)}, runs)
    return [
        Row("sequential", "ratio", round(ratio(found, "ours", "plain"), 3), "of the rate of safe_open", 0.9),
        Row("sequential", "HiddenStates", gigabytes(found["ours"]), "GB/s"),
        Row("sequential", "safe_open", gigabytes(found["plain"]), "GB/s"),
    ]


def gigabytes(rates: list[float]) -> float:
    """The median in GB/s."""
    return round(statistics.median(rates) / 1e9, 2)


def random_row(folder: Path, runs: int, shrink: int) -> list[Row]:
    """One state of a random row."""
    rows = []
    for case, count, tokens, hidden, goal in (
        ("random-row", 24, 1730 // shrink, 7168, 1.5),
        ("random-row, short", 400, 64, 4096, None),
    ):
        url = str(folder / case)
        make_run(url, {}, shards=1, rows=count, tokens=tokens, hidden=hidden)
        found = in_turns(_row_ways(url, count, tokens, hidden), runs)
        size = tokens * hidden * 2
        what = f"of the time of a pread of {size / 1e6:.3g} MB"
        rows += [
            Row(case, "ratio", round(ratio(found, "ours", "plain"), 3), what, goal, "lower"),
            Row(case, "HiddenStates", round(statistics.median(found["ours"]) * 1e3, 3), "ms", None, "lower"),
            Row(case, "pread", round(statistics.median(found["plain"]) * 1e3, 3), "ms", None, "lower"),
        ]
    return rows


def _row_ways(url: str, count: int, tokens: int, hidden: int) -> dict[str, Callable[[], float]]:
    """Each row once, in a random order, of a shard opened anew: no page of it was touched by this mapping."""
    store = open_store(url)
    key = next(item.key for item in store.list("shards/"))
    columns = state_columns((2, 30, 57), True, "BF16", hidden)
    table = row_table(range(count), [np.zeros(tokens, np.int32)] * count, [np.ones(tokens, np.uint8)] * count)
    offset = lay_out(table, columns, {"unit": "u00000000"}).tensors["state.30"].offset
    size = tokens * hidden * 2
    target = torch.empty(tokens, hidden, dtype=torch.bfloat16).fill_(1)
    into = memoryview(target.view(torch.uint8).numpy()).cast("B")
    rng = np.random.default_rng(0)

    def ours() -> float:
        data = HiddenStates(url, ["state.30"])
        order = rng.permutation(count).tolist()
        return statistics.median(timed(lambda i=i: target.copy_(data[i]["state.30"])) for i in order)

    def plain() -> float:
        fd = os.open(store.local_path(key) or "", os.O_RDONLY)
        try:
            order = rng.permutation(count).tolist()
            return statistics.median(timed(lambda i=i: os.preadv(fd, [into], offset + i * size)) for i in order)
        finally:
            os.close(fd)

    return {"ours": ours, "plain": plain}


def stream_s3(folder: Path, runs: int, shrink: int) -> list[Row]:
    """Whole shards, and single rows, of an S3 server."""
    with seaweedfs(folder / "weed") as server:
        url, options = f"{server.url}/run", server.storage_options
        nbytes = make_run(url, options, shards=4, rows=10, tokens=431 // shrink, hidden=7168)
        store: Any = open_store(url, options)
        keys = [item.key for item in store.list("shards/")]

        def plain() -> None:
            for key in keys:
                obstore.get(store._store, key).bytes()

        def stream(**cache: Any) -> None:
            for item in HiddenStatesStream(url, storage_options=options, **cache):
                del item

        def cached() -> None:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                stream(cache_dir=cache, cache_bytes=8 << 30)

        found = in_turns(
            {
                "ours": lambda: nbytes / timed(stream),
                "plain": lambda: nbytes / timed(plain),
                "cached": lambda: nbytes / timed(cached),
            },
            runs,
        )
        with CountingProxy(options["endpoint"]) as proxy:
            data = HiddenStates(
                url, ["state.30", "state.final"], storage_options={**options, "endpoint": proxy.endpoint}
            )
            for index in range(0, len(data), 10):
                data[index]  # opens each shard
            proxy.requests.clear()
            picked = np.random.default_rng(0).permutation(len(data)).tolist()
            for index in picked:
                data[index]
            requests = len(proxy.requests) / (len(picked) * 2)
            data = HiddenStates(url, storage_options={**options, "endpoint": proxy.endpoint})
            proxy.requests.clear()
            for index in picked:
                data.state(index, "state.30")
            alone = len(proxy.requests) / len(picked)
    return [
        Row("stream-s3", "ratio", round(ratio(found, "ours", "plain"), 3), "of the rate of obstore.get", 0.8),
        Row(
            "stream-s3",
            "ratio, into cache_dir",
            round(ratio(found, "cached", "plain"), 3),
            "of the rate of obstore.get",
        ),
        Row("stream-s3", "HiddenStatesStream", gigabytes(found["ours"]), "GB/s"),
        Row("stream-s3", "obstore.get", gigabytes(found["plain"]), "GB/s"),
        Row("stream-s3", "requests", requests, "a state and row, shards being open", 1, "lower"),
        Row("stream-s3", "requests, alone", alone, "a state and row, given the manifest", 1, "lower"),
    ]


CASES = {"sequential": sequential, "random-row": random_row, "stream-s3": stream_s3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--shrink", type=int, default=1, help="divides rows' lengths; the goals are for 1")
    parser.add_argument("--folder", type=Path, help="for 4 GB of shards; removed at the end")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in args.cases.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rows += CASES[name](Path(folder), args.runs, args.shrink)
    for row in rows:
        print(row)
    if args.cases == ",".join(CASES):
        write("read", rows, note=NOTE)
    return verdict(rows)


if __name__ == "__main__":
    sys.exit(main())
