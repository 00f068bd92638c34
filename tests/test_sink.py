"""benchmarks/sink.py: the digests it takes of what comes are the product's, and other bytes are found."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import product
from sink import RowDigests

from ray_extract.capture.digest import digest_ids, digest_tokens
from ray_extract.errors import AlreadyExists, NotFound, StoreError
from ray_extract.ledger import Ledger
from ray_extract.records import Receipt
from ray_extract.shards.image import lay_out, row_table, state_columns, write_table
from ray_extract.store import open_store

LENGTHS = (1, 300, 17, 64)


def shard() -> tuple[bytearray, np.ndarray[Any, np.dtype[np.uint64]]]:
    """A raw shard of rows 7, 8, ... with made-up states, and its rows' digests."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 1000, n).astype(np.int32) for n in LENGTHS]
    table = row_table(range(7, 7 + len(ids)), ids, [np.ones(n, np.uint8) for n in LENGTHS])
    layout = lay_out(table, state_columns((2, 4), True, "BF16", 24), {})
    image = bytearray(layout.nbytes)
    view = memoryview(image)
    write_table(layout, table, view)
    digests = np.zeros((len(ids), 4), np.uint64)
    for k, column in enumerate(layout.columns):
        state = layout.state_bytes(view, column)
        state[:] = rng.integers(0, 256, state.shape, np.uint8)
        for row in range(len(ids)):
            digests[row, 1 + k] = digest_tokens(state[int(table.cu_kept[row]) : int(table.cu_kept[row + 1])])
    digests[:, 0] = [digest_ids(each) for each in ids]
    return image, digests


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A sink's folder, and the options of its store."""
    with product.sink(tmp_path, processes=2) as options:
        yield tmp_path, options


def receipt(key: str, size: int, digests: np.ndarray[Any, np.dtype[np.uint64]]) -> Receipt:
    rows = len(digests)
    return Receipt("u00000000", "a", key, "raw", size, "", rows, 382, 382, (), digests.tobytes(), {}, {})


@pytest.mark.parametrize("cuts", [(1 << 30,), (5, 9000, 77, 4096, 1 << 30), (333,) * 1000])
def test_blocks_of_any_size_come_to_the_rows_digests(cuts: tuple[int, ...]) -> None:
    image, digests = shard()
    body, at = RowDigests(), 0
    for count in cuts:
        body.update(memoryview(image)[at : at + count])
        at += count
    assert body.hexdigest() == {"rows": [7, 8, 9, 10], "digests": digests.tolist()}


def test_a_shard_that_is_cut_short_is_no_shard() -> None:
    image, _ = shard()
    body = RowDigests()
    body.update(memoryview(image)[:-1])
    assert "cut short" in body.hexdigest()["error"]


def test_a_byte_that_changed_on_its_way_to_the_sink_is_found(served: tuple[Path, dict[str, Any]]) -> None:
    folder, options = served
    store, (image, digests) = open_store("s3://rows/run", options), shard()
    store.put("shards/good.safetensors", image)
    good = receipt("shards/good.safetensors", len(image), digests)
    image[-1] ^= 1
    store.put("shards/bad.safetensors", image)
    bad = dataclasses.replace(good, key="shards/bad.safetensors")
    found = product.arrived(folder, "rows")
    assert product.differences(found, [good]) == (4, [])
    compared, wrong = product.differences(found, [bad])
    assert compared == 4 and len(wrong) == 1 and "row 10" in wrong[0]


def test_a_shard_that_never_came_is_found(served: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = served
    _, digests = shard()
    compared, wrong = product.differences(product.arrived(folder, "rows"), [receipt("shards/x", 1, digests)])
    assert compared == 0 and "came 0 times" in wrong[0]


def test_the_ledgers_objects_outlive_the_sink(tmp_path: Path) -> None:
    image, digests = shard()
    with product.sink(tmp_path, processes=2) as options:
        store = open_store("s3://rows/run", options)
        store.put("shards/one.safetensors", image)
        assert Ledger(store).commit(receipt("shards/one.safetensors", len(image), digests))
        with pytest.raises(AlreadyExists):
            store.put("shards/one.safetensors", image)
        store.put_stream("plan/rows.parquet", [bytes([k]) * (20 << 20) for k in range(3)])  # in parts
    with product.sink(tmp_path, processes=2) as options:
        store = open_store("s3://rows/run", options)
        assert [item.size for item in store.list("shards/")] == [len(image)]
        ledger = Ledger(store)
        assert [r.size for r in ledger.whole_receipts(ledger.listing())] == [len(image)]
        assert store.get_range("plan/rows.parquet", (20 << 20) - 1, 2) == b"\x00\x01"
        with pytest.raises(NotFound):
            store.get("plan/units.parquet")
        store.delete("plan/rows.parquet")
        assert store.head("plan/rows.parquet") is None
        with pytest.raises(StoreError):  # never the zeros that stand for a shard
            store.get("shards/one.safetensors")
