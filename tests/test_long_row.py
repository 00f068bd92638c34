"""The longest row that is promised, 128K tokens of hidden 8192: 2 GiB a state, more than one write or int32 takes."""

import json
import shutil
from pathlib import Path

import images
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ray_extract.config import Job
from ray_extract.dataset.prepared import PreparedRows
from ray_extract.layout import shard_key
from ray_extract.ledger import Ledger, run_identity
from ray_extract.model import ModelShape
from ray_extract.plan import load_or_make_plan
from ray_extract.readers.dataset import HiddenStates
from ray_extract.records import Receipt
from ray_extract.shards.base import RowStats
from ray_extract.shards.image import lay_out, row_table, state_columns, write_table
from ray_extract.shards.parquet import PIECE_BYTES, write_parquet
from ray_extract.shards.raw import write_raw
from ray_extract.shards.seal import sha256_other
from ray_extract.shards.stats import StateStats
from ray_extract.store import open_store
from ray_extract.verify import verify
from ray_extract.views import write_views

TOKENS, HIDDEN, NAME = 1 << 17, 8192, "state.3"
MARKED = (0, 1, 65_535, 65_536, TOKENS - 2, TOKENS - 1)  # the other tokens are zeros, which take no memory


def room(folder: Path) -> str:
    """Why there is no room for this test, or nothing."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory, disk = int(fields["MemAvailable"].split()[0]) << 10, shutil.disk_usage(folder).free
    return f"{memory >> 30} GiB of memory and {disk >> 30} of disk are free" if min(memory, disk) < 6 << 30 else ""


@pytest.mark.parametrize("format", ["raw", "parquet"])
def test_a_row_of_128k_tokens_goes_from_the_plan_to_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    if reason := room(tmp_path):
        pytest.skip(reason)
    ids = np.random.default_rng(0).integers(0, 1000, TOKENS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": ids.tolist(), "loss_mask": [1] * TOKENS}) + "\n")
    job = Job.model_validate(
        {
            "model": {"path": "made-up"},
            "dataset": {"paths": str(tmp_path / "rows.jsonl")},
            "capture": {"boundaries": [3], "final": False},
            "output": {"url": str(tmp_path / "out"), "format": format},
        }
    )
    shape = ModelShape("made-up", "LlamaForCausalLM", "llama", 8, HIDDEN, "bfloat16", 2 * TOKENS, 1000, "0" * 64)
    (column,) = columns = state_columns([3], False, "BF16", HIDDEN)
    store = open_store(job.output.url)
    ledger = Ledger(store)
    ledger.claim(run_identity(job, shape, [3], [], ""), {})
    index, (unit,) = load_or_make_plan(store, job, shape, column.token_bytes)
    assert (unit.tokens, unit.nbytes) == (TOKENS, 2 << 30)
    (row,) = PreparedRows(store, index).read(0, 1)

    table = row_table([0], [row.input_ids], [row.loss_mask])
    layout = lay_out(table, columns, {"unit": unit.unit})
    buffer = memoryview(bytearray(layout.nbytes))
    write_table(layout, table, buffer)
    state = layout.state_bytes(buffer, column)
    marks = np.random.default_rng(1).standard_normal((len(MARKED), HIDDEN), dtype=np.float32)
    state[list(MARKED)] = (marks.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    monkeypatch.setattr(images, "true_stats", lambda *_: stats_of(state))  # which has no room for fp64
    images.seal_image(table, columns, buffer, layout)

    key = shard_key(unit.unit, "a0", format)
    size = write_raw(store, key, buffer) if format == "raw" else write_parquet(store, key, layout, buffer)
    digests = layout.small(buffer, "digest").tobytes()
    sha256 = sha256_other(layout, buffer)
    ledger.commit(Receipt(unit.unit, "a0", key, format, size, sha256, 1, TOKENS, TOKENS, (), digests, {}, {}))
    written = write_views(ledger, index, [unit], [], -1, ledger.listing())
    assert written is not None
    assert (written.totals.ok, written.totals.kept, written.totals.nbytes) == (1, TOKENS, size)
    if format == "parquet":
        assert pq.ParquetFile(tmp_path / "out" / key).metadata.num_rows == (2 << 30) // PIECE_BYTES

    report = verify(job.output.url)
    assert report.ok and report.kept == TOKENS, report.problems
    item = HiddenStates(job.output.url, check=True)[0]
    assert item[NAME].shape == (TOKENS, HIDDEN) and item["input_ids"].tolist() == ids.tolist()
    raw = item[NAME].view(torch.uint8)
    assert all(np.array_equal(raw[token].numpy(), state[token]) for token in MARKED)
    assert not item[NAME][2:65_535].any() and not item[NAME][65_537 : TOKENS - 2].any()
    shutil.rmtree(tmp_path / "out")


def stats_of(state: np.ndarray) -> RowStats:
    """Statistics of the one row and state."""
    sums = StateStats()
    sums.add(state, "BF16")
    return RowStats(
        np.array([[sums.sumsq]]),
        np.array([[sums.amax]], np.float32),
        np.array([[sums.nonfinite]], np.int32),
        np.array([[sums.zero]], np.int32),
    )
