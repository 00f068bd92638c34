"""Raw and Parquet shards: equal to the image bit for bit, bounded in memory, and loud about altered bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from images import MemoryStore, make_image, make_table, true_digests

from ray_extract.errors import ConfigError, NotFound, ShardError
from ray_extract.records import RowStatus
from ray_extract.shards import base
from ray_extract.shards.base import RowStats
from ray_extract.shards.image import FP8, lay_out, state_columns, write_table
from ray_extract.shards.parquet import cut_pieces, encode, group_pieces, write_parquet
from ray_extract.shards.raw import HEAD_BYTES, write_raw
from ray_extract.shards.reader import open_shard
from ray_extract.shards.seal import check_digests, seal, sha256_other
from ray_extract.shards.values import as_tensor
from ray_extract.store import open_store

PIECE = 3 * 16 * 2 * 10  # ten tokens of three bf16 states of 16
FORMATS = ["raw", "parquet"]


def write(store, key, image, format, piece_bytes=PIECE):
    """Write an image in a format; the size."""
    if format == "raw":
        return write_raw(store, key, image.buffer)
    return write_parquet(store, key, image.layout, image.buffer, piece_bytes=piece_bytes)


@pytest.fixture(params=["local", "remote"])
def store(request, tmp_path):
    """A folder, read by memory maps, and a store that has only range reads."""
    return open_store(str(tmp_path / "out"), {}) if request.param == "local" else MemoryStore()


def assert_equal(shard, image):
    """The shard says what the image says, to the bit."""
    table = image.table
    assert shard.rows == len(table)
    assert shard.columns == image.columns
    assert shard.metadata == image.layout.metadata
    for name in ("row", "cu_seqlens", "cu_kept", "cu_spans", "spans", "input_ids", "loss_mask"):
        got, expected = getattr(shard.table, name), getattr(table, name)
        assert got.dtype == expected.dtype and np.array_equal(got, expected), name
    for name in ("status", "digest"):
        assert np.array_equal(getattr(shard, name), image.layout.small(image.buffer, name)), name
    for name in ("sumsq", "amax", "nonfinite", "zero"):
        got, expected = getattr(shard.stats, name), image.layout.small(image.buffer, name)
        assert got.dtype == expected.dtype and np.array_equal(got, expected), name
    for row in range(len(table)):
        for column in image.columns:
            assert np.array_equal(shard.state(column.name, row), image.state(column.name, row)), (column.name, row)
        assert shard.differences([row]) == {}
    assert shard.differences(range(shard.rows)) == {}
    assert shard.sha256_other() == sha256_other(image.layout, image.buffer)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("keep", ["all", "supervised", "last", "random:3"])
def test_a_shard_reads_back_equal_to_its_image(store, format, keep):
    image = make_image([5, 1, 37, 10, 11, 3], keep=keep, failed=[3], first_row=70)
    size = write(store, "shards/a", image, format)
    shard = open_shard(store, "shards/a", format)
    assert_equal(shard, image)
    assert shard.size == size == store.head("shards/a").size


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    keep=st.sampled_from(["all", "supervised", "last", "random:3"]),
    dtype=st.sampled_from(["BF16", "F16", "F32", FP8]),
    piece_tokens=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_any_image_survives_parquet_in_pieces_of_any_size(lengths, keep, dtype, piece_tokens, seed):
    image = make_image(lengths, keep=keep, dtype=dtype, seed=seed, failed=[len(lengths) // 2])
    memory = MemoryStore()
    token_bytes = sum(c.token_bytes for c in image.columns)
    write(memory, "a", image, "parquet", piece_bytes=piece_tokens * token_bytes)
    assert_equal(open_shard(memory, "a", "parquet"), image)


@given(
    kept=st.lists(st.integers(0, 50), min_size=1, max_size=20).map(lambda k: np.array(k, np.int64)),
    token_bytes=st.integers(1, 40),
    piece_bytes=st.integers(1, 400),
)
def test_pieces_cover_every_token_once_and_groups_every_piece(kept, token_bytes, piece_bytes):
    pieces = cut_pieces(kept, token_bytes, piece_bytes)
    tokens = pieces.end - pieces.start
    for row, count in enumerate(kept):
        mine = pieces.row == row
        covered = [t for a, b in zip(pieces.start[mine], pieces.end[mine], strict=True) for t in range(a, b)]
        assert covered == list(range(count))
        assert list(pieces.piece[mine]) == list(range(mine.sum()))
    assert (tokens * token_bytes <= max(piece_bytes, token_bytes)).all()
    groups = group_pieces(tokens * token_bytes, piece_bytes)
    assert [i for a, b in groups for i in range(a, b)] == list(range(len(tokens)))
    for a, b in groups:
        assert b - a == 1 or tokens[a:b].sum() * token_bytes <= piece_bytes


def test_raw_is_the_image_and_opens_with_safetensors(tmp_path):
    image = make_image([5, 9])
    store = open_store(str(tmp_path), {})
    write(store, "a.safetensors", image, "raw")
    assert (tmp_path / "a.safetensors").read_bytes() == bytes(image.buffer)
    tensors = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert tensors["state.final"].dtype == torch.bfloat16
    assert tensors["state.final"].shape == (14, 16)


def test_fp8_states_open_with_safetensors_as_bytes_that_a_line_decodes(tmp_path):
    image = make_image([5, 9], dtype=FP8)
    write(open_store(str(tmp_path), {}), "a.safetensors", image, "raw")
    records = safetensors.torch.load_file(tmp_path / "a.safetensors")["state.final"]
    assert records.dtype == torch.uint8 and records.shape == (14, 16 + 8)
    values = records[:, :16].view(torch.float8_e4m3fn).float() * records[:, 16:20].contiguous().view(torch.float32)
    assert values[5:].bfloat16().equal(as_tensor(image.state("state.final", 1), FP8))
    assert 0.5 < values.std() < 1.5


def test_parquet_is_readable_without_this_package(tmp_path):
    image = make_image([5, 25])
    store = open_store(str(tmp_path), {})
    write(store, "a.parquet", image, "parquet")
    table = pq.read_table(tmp_path / "a.parquet", columns=["row", "piece", "start", "input_ids", "state.3"])
    assert table.column("piece").to_pylist() == [0, 0, 1, 2]
    assert table.column("start").to_pylist() == [0, 0, 10, 20]
    assert table.column("input_ids").to_pylist()[1] == image.table.input_ids[5:].tolist()
    assert table.column("input_ids").to_pylist()[2] is None
    assert b"".join(table.column("state.3").to_pylist()[1:]) == image.state("state.3", 1).tobytes()
    metadata = table.schema.metadata
    assert (metadata[b"dtype"], metadata[b"hidden"], metadata[b"format"]) == (b"BF16", b"16", b"ray_extract")
    assert metadata[b"model"] == b"made-up"
    assert json.loads(metadata[b"ray_extract.columns"]) == [[c.name, "BF16", 16] for c in image.columns]
    group = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    chunk = group.column(group.num_columns - 1)
    assert chunk.compression == "UNCOMPRESSED" and "RLE_DICTIONARY" not in chunk.encodings and not chunk.is_stats_set


def test_a_remote_raw_row_is_read_by_its_range_alone():
    memory = MemoryStore()
    image = make_image([50, 50, 50])
    write(memory, "a", image, "raw")
    shard = open_shard(memory, "a", "raw")
    memory.reads.clear()
    shard.state("state.3", 1)
    assert memory.reads == [("a", image.layout.tensors["state.3"].offset + 50 * 32, 50 * 32)]


def test_a_remote_parquet_row_reads_only_its_row_group_and_column():
    memory = MemoryStore()
    image = make_image([50] * 20, hidden=512)
    write(memory, "a", image, "parquet", piece_bytes=50 * 3 * 1024)
    shard = open_shard(memory, "a", "parquet")
    opened = sum(length for _, _, length in memory.reads)
    assert opened < 0.5 * len(memory.objects["a"]), "opening must not read the states"
    memory.reads.clear()
    shard.state("state.3", 7)
    assert 50 * 1024 <= sum(length for _, _, length in memory.reads) < 2 * 50 * 1024
    memory.reads.clear()
    shard.state("state.3", 7)
    assert memory.reads == []


def test_a_header_longer_than_the_first_read_is_read_whole():
    memory = MemoryStore()
    table = make_table([3, 4])
    columns = state_columns((1,), True, "BF16", 8)
    layout = lay_out(table, columns, {"note": "x" * (2 * HEAD_BYTES)})
    buffer = memoryview(bytearray(layout.nbytes))
    write_table(layout, table, buffer)
    memory.put("a", buffer)
    assert open_shard(memory, "a", "raw").metadata["note"] == "x" * (2 * HEAD_BYTES)


def test_writing_to_a_mapped_state_does_not_reach_the_file(tmp_path):
    image = make_image([8])
    store = open_store(str(tmp_path), {})
    write(store, "a", image, "raw")
    open_shard(store, "a", "raw").state("state.1", 0)[:] = 0
    assert (tmp_path / "a").read_bytes() == bytes(image.buffer)


def test_checking_in_small_blocks_finds_the_same(store, monkeypatch):
    image = make_image([5, 1, 37, 10, 11, 3], keep="supervised", failed=[3])
    image.state("state.3", 2)[11, 4] ^= 1
    image.state("state.final", 3)[1, 4] = 1
    write(store, "a", image, "parquet")
    write(store, "b", image, "raw")
    for tokens in (1, 2, 7, 1000):
        monkeypatch.setattr(base, "BLOCK_BYTES", tokens * 32)
        for key, format in (("a", "parquet"), ("b", "raw")):
            found = open_shard(store, key, format).differences(range(6))
            assert found == {2: ["state.3"], 3: ["state.final"]}, (tokens, format)


@pytest.mark.parametrize("format", FORMATS)
def test_any_range_of_tokens_across_rows_and_pieces_reads_equal(store, format):
    image = make_image([5, 1, 37, 10])
    write(store, "a", image, format)
    shard = open_shard(store, "a", format)
    whole = image.layout.state_bytes(image.buffer, image.columns[1])
    for start in range(0, 54, 3):
        for end in range(start, 54, 4):
            assert np.array_equal(shard.tokens("state.3", start, end), whole[start:end]), (start, end)


# --- failed rows and the seal


def test_failed_rows_keep_their_place_with_zeroed_states():
    image = make_image([5, 6, 7], failed=[1])
    assert image.statuses.tolist() == [RowStatus.OK, RowStatus.INCOMPLETE, RowStatus.OK]
    assert not image.state("state.3", 1).any()
    assert image.state("state.3", 0).any() and image.state("state.3", 2).any()
    digest = image.layout.small(image.buffer, "digest")
    assert not digest[1].any() and digest[0].all() and digest[2].all()
    assert check_digests(image.layout, image.buffer, range(3)) == []
    image.state("state.3", 1)[2, 3] = 1
    assert check_digests(image.layout, image.buffer, range(3)) == [1]


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        ("covered", RowStatus.INCOMPLETE),
        ("ids", RowStatus.MISMATCH),
        ("nonfinite", RowStatus.NONFINITE),
        ("rejected", RowStatus.REJECTED),
    ],
)
def test_the_seal_accepts_no_row_that_is_not_proven(spoil, status):
    image = make_image([5, 6])
    lengths = np.diff(image.table.cu_seqlens)
    covered = lengths.copy()
    digests = true_digests(image.layout, image.buffer, image.table, image.columns)
    stats = RowStats(
        np.ones((2, 3)), np.ones((2, 3), np.float32), np.zeros((2, 3), np.int32), np.zeros((2, 3), np.int32)
    )
    statuses = np.zeros(2, np.uint8)
    if spoil == "covered":
        covered[1] = 0
    elif spoil == "ids":
        digests[1, 0] += np.uint64(2)
    elif spoil == "nonfinite":
        stats.nonfinite[1, 2] = 1
    else:
        statuses[1] = RowStatus.REJECTED
    final = seal(
        image.layout,
        image.buffer,
        covered=covered,
        n_tokens=lengths,
        digests=digests,
        stats=stats,
        statuses=statuses,
    )
    assert final.tolist() == [RowStatus.OK, status]
    assert not image.state("state.1", 1).any() and image.state("state.1", 0).any()
    assert image.layout.small(image.buffer, "sumsq").tolist() == [[1.0] * 3, [0.0] * 3]


def test_a_flipped_byte_in_the_image_is_found_before_upload():
    image = make_image([5, 6, 7, 8])
    image.state("state.final", 2)[3, 1] ^= 4
    assert check_digests(image.layout, image.buffer, range(4)) == [2]
    assert check_digests(image.layout, image.buffer, [0, 1, 3]) == []


# --- altered shards


@pytest.mark.parametrize("format", FORMATS)
def test_a_byte_flipped_in_a_stored_state_is_found(store, format):
    image = make_image([5, 40, 7])
    memory = MemoryStore()
    write(memory, "a", image, format)
    data = bytearray(memory.objects["a"])
    needle = image.state("state.3", 1).tobytes()[: 10 * 32]
    at = data.index(needle) + 77
    data[at] ^= 1
    store.put("b", bytes(data))
    shard = open_shard(store, "b", format)
    assert shard.differences(range(3)) == {1: ["state.3"]}
    assert shard.differences([1], names=["state.1"]) == {}
    assert shard.differences([0, 2]) == {}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cut", [0, 4, 100, 3000, -4096, -100, -1])
def test_a_truncated_shard_is_an_error_with_its_key(store, format, cut):
    image = make_image([50, 40, 70], hidden=64)
    memory = MemoryStore()
    size = write(memory, "a", image, format)
    store.put("shards/b", memory.objects["a"][: cut if cut >= 0 else size + cut])
    with pytest.raises(ShardError, match="shards/b: "):
        open_shard(store, "shards/b", format)


def test_truncated_and_prolonged_raw_shards_say_by_how_much(store):
    image = make_image([5])
    store.put("a", bytes(image.buffer[:-5]))
    with pytest.raises(ShardError, match=f"a: truncated: {len(image.buffer) - 5} bytes, .* {len(image.buffer)}"):
        open_shard(store, "a", "raw")
    store.put("b", bytes(image.buffer) + b"more")
    with pytest.raises(ShardError, match="b: too long"):
        open_shard(store, "b", "raw")


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_flipped_anywhere_outside_the_states_are_never_silent(format):
    image = make_image([5, 12, 7], keep="supervised")
    memory = MemoryStore()
    write(memory, "a", image, format)
    whole = open_shard(memory, "a", format)
    expected = sha256_other(image.layout, image.buffer)
    assert whole.sha256_other() == expected
    rng = np.random.default_rng(3)
    size = len(memory.objects["a"])
    header = range(len(image.layout.header.rstrip())) if format == "raw" else range(size - 6000, size)
    other = range(image.layout.states_offset if format == "raw" else size)
    for at in [*rng.choice(header, 400), *rng.choice(other, 300)]:
        data = bytearray(memory.objects["a"])
        data[at] ^= 1 << int(rng.integers(8))
        memory.objects["b"] = bytes(data)
        try:
            shard = open_shard(memory, "b", format)
            found = shard.sha256_other() != expected or shard.differences(range(shard.rows))
        except ShardError:
            found = True
        # Parquet has bytes without meaning to a reader of values (padding, writer's name); those may change unseen.
        if not found:
            assert format == "parquet"
            assert_equal(shard, image)


@pytest.mark.parametrize("format", FORMATS)
def test_other_files_and_missing_keys_are_named(store, format):
    store.put("a", b"PAR1" + b"no shard at all" * 100 + b"PAR1")
    with pytest.raises(ShardError, match="a: not a"):
        open_shard(store, "a", format)
    with pytest.raises(NotFound, match="gone: no such shard"):
        open_shard(store, "gone", format)
    with pytest.raises(ShardError, match="format 'zarr'"):
        open_shard(store, "a", "zarr")


def test_an_unknown_state_is_a_clear_error(store):
    write(store, "a", make_image([5]), "raw")
    with pytest.raises(ConfigError, match=r"no state 'state\.9'; it has state\.1, state\.3, state\.final"):
        open_shard(store, "a", "raw").state("state.9", 0)


# --- memory

_MEASURE = """
import mmap, resource, sys, tempfile
import numpy as np
import pyarrow, pyarrow.parquet
from ray_extract.shards.image import lay_out, state_columns, write_table
from ray_extract.shards.parquet import write_parquet
from ray_extract.store import open_store
from images import make_table

out, states = sys.argv[1], int(sys.argv[2])
hidden = 7168 // states * 4
tokens = (600 << 20) // (states * hidden * 2)
table = make_table([tokens // 3, tokens // 3, *([200] * (tokens // 600))])
layout = lay_out(table, state_columns(tuple(range(1, states)), True, "BF16", hidden), {})
file = tempfile.TemporaryFile(dir=out)
file.truncate(layout.nbytes)
buffer = memoryview(mmap.mmap(file.fileno(), layout.nbytes))
write_table(layout, table, buffer)
np.frombuffer(buffer, np.uint8)[::4096].sum()  # every page is resident, so the peak from here on is the writer's own
store = open_store(out, {})
store.put_stream("warm", iter([b"x"]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = write_parquet(store, "a.parquet", layout, buffer)
print(size, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("states", [1, 4])
def test_the_parquet_writer_needs_bounded_memory_beside_the_image(tmp_path, states):
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), str(states)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    size, peak_mib = (int(word) for word in done.stdout.split())
    print(states, "states:", peak_mib, "MiB")
    assert size > 590 << 20
    assert peak_mib < 192, f"{peak_mib} MiB beside the image"


def test_chunks_come_a_row_group_at_a_time():
    image = make_image([40] * 10)
    chunks = encode(image.layout, image.buffer, piece_bytes=PIECE)
    first = next(chunks)
    assert first.startswith(b"PAR1")
    taken = len(first) + sum(len(next(chunks)) for _ in range(20))
    assert taken < 0.5 * len(image.buffer)
