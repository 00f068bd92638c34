"""Files become records: every format and place, nothing lost or silently skipped, wrong paths explained."""

import bz2
import gzip
import io
import json

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_extract.config import DatasetConfig
from ray_extract.dataset import source
from ray_extract.dataset.source import read_records, source_fingerprint
from ray_extract.errors import DatasetError

RECORDS = [{"text": f"row {i} \N{SNOWMAN}"} for i in range(5)]


def jsonl(records=RECORDS):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


def dataset(*paths, **options):
    return DatasetConfig(paths=tuple(str(p) for p in paths), **options)


def values(*paths, **options):
    return [record.value for record in read_records(dataset(*paths, **options))]


def test_jsonl_records_are_named_by_file_and_number(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl()[:-1])
    records = list(read_records(dataset(tmp_path / "a.jsonl")))
    assert [r.value for r in records] == RECORDS
    assert [r.source for r in records] == [f"a.jsonl:{n}" for n in range(1, 6)]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_lines_survive_any_chunk_size_and_blank_ones_do_not_count(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    (tmp_path / "a.jsonl").write_bytes(b"\n" + jsonl().replace(b"\n", b"\r\n \n"))
    records = list(read_records(dataset(tmp_path / "a.jsonl")))
    assert [(r.value, r.source) for r in records] == [(v, f"a.jsonl:{n}") for n, v in enumerate(RECORDS, start=1)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "é" oops}', "malformed JSON: Expecting ',' delimiter at byte 14"),
        ('{"text": ', "malformed JSON: Expecting value at byte 9"),
        (b'{"text": "\xff"}', "malformed JSON: not UTF-8 at byte 10"),
        ("[" * 100_000, "malformed JSON: RecursionError"),
        ("[1]", "not a JSON object: list"),
        ("null", "not a JSON object: NoneType"),
    ],
)
def test_malformed_line_is_a_record_with_a_reason(tmp_path, line, reason):
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(jsonl() + raw + b"\n" + jsonl())
    records = list(read_records(dataset(tmp_path / "a.jsonl")))
    assert len(records) == 11
    assert (records[5].value, records[5].reason, records[5].source) == (None, reason, "a.jsonl:6")
    assert records[6].value == RECORDS[0]


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


def two_frames(data):
    half = len(data) // 2
    return zstd(data[:half]) + zstd(data[half:])


@pytest.mark.parametrize(
    ("ending", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd), (".zst", two_frames)],
)
def test_compressed_jsonl_is_read_to_its_end(tmp_path, ending, compress):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compress(jsonl()))
    assert values(path) == RECORDS


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_cut_compressed_file_is_an_error_not_a_short_data_set(tmp_path, ending, compress):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compress(jsonl(RECORDS * 1000))[:-20])
    with pytest.raises(DatasetError, match=r"dataset\.paths = .*a\.jsonl.*cannot be read"):
        list(read_records(dataset(path)))


def test_parquet_is_streamed_in_batches_with_known_columns_only(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BATCH_RECORDS", 2)
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}], "input_ids": list(range(i)), "other": b"x"}
        for i in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    records = list(read_records(dataset(tmp_path / "a.parquet")))
    assert [r.source for r in records] == [f"a.parquet:{n}" for n in range(1, 6)]
    for row, record in zip(rows, records, strict=True):
        assert set(record.value) == {"messages", "input_ids"}
        assert record.value["messages"] == row["messages"]
        assert isinstance(record.value["input_ids"], np.ndarray)
        assert record.value["input_ids"].tolist() == row["input_ids"]


def test_parquet_without_a_known_column_names_what_it_has(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"it has prompt; name the right ones in dataset\.fields"):
        values(tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet", fields={"text": "prompt"}) == [{"prompt": "a"}]


def test_globs_are_sorted_and_paths_keep_their_order(tmp_path):
    for name in ("b-10", "b-02", "a-01", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([{"text": name}]))
    (tmp_path / "b-99.jsonl").mkdir()
    got = values(tmp_path / "c.jsonl", tmp_path / "b-*.jsonl", tmp_path / "a-01.jsonl")
    assert [v["text"] for v in got] == ["c", "b-02", "b-10", "a-01"]


def test_file_whose_name_looks_like_a_glob_is_itself(tmp_path):
    (tmp_path / "a[1].jsonl").write_bytes(jsonl())
    assert values(tmp_path / "a[1].jsonl") == RECORDS


def test_limit_counts_records_of_all_files_and_reads_no_further(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([*RECORDS[:1]]) + b"oops\n")
    (tmp_path / "b.jsonl").write_bytes(jsonl())
    records = list(read_records(dataset(tmp_path / "*.jsonl", limit=4)))
    assert [r.source for r in records] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "b.jsonl:2"]


def test_fsspec_urls_and_storage_options_are_used():
    fs = fsspec.filesystem("memory")
    fs.pipe("/in/a.jsonl.gz", gzip.compress(jsonl()))
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(RECORDS), sink)
    fs.pipe("/in/b.parquet", sink.getvalue())
    assert values("memory://in/*") == RECORDS * 2
    assert values("simplecache::memory://in/b.parquet", storage_options={"memory": {}}) == RECORDS


def test_fingerprint_is_of_content_and_order_not_of_names(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    (tmp_path / "b.jsonl").write_bytes(jsonl(RECORDS[:2]))
    first = source_fingerprint(dataset(tmp_path / "*.jsonl"))
    assert [f["size"] for f in first] == [len(jsonl()), len(jsonl(RECORDS[:2]))]
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "x.jsonl").write_bytes(jsonl())
    moved = source_fingerprint(dataset(tmp_path / "moved" / "x.jsonl", tmp_path / "b.jsonl"))
    assert moved == first
    assert source_fingerprint(dataset(tmp_path / "b.jsonl", tmp_path / "a.jsonl")) == first[::-1] != first


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "no such file, or nothing matches"),
        ("*.nothing", "no such file, or nothing matches"),
        ("", r"a folder; name its files, such as .*/\*\.jsonl"),
        ("a.txt", r"unknown ending; .*dataset\.format"),
        ("b.parquet.gz", "unknown ending"),
        ("broken.parquet", "cannot be read"),
    ],
)
def test_unreadable_path_is_explained(tmp_path, name, message):
    for other in ("a.txt", "b.parquet.gz", "broken.parquet"):
        (tmp_path / other).write_bytes(jsonl())
    with pytest.raises(DatasetError, match=message) as caught:
        values(tmp_path / name)
    assert "dataset.paths = " in str(caught.value)


def test_unknown_protocol_is_explained_without_the_urls_secrets():
    with pytest.raises(DatasetError, match=r"dataset\.paths = 'nope://host/a\.jsonl': cannot be read") as caught:
        values("nope://user:hunter2@host/a.jsonl")
    assert "hunter2" not in str(caught.value)


def test_format_overrides_an_unknown_ending(tmp_path):
    (tmp_path / "a.txt").write_bytes(jsonl())
    assert values(tmp_path / "a.txt", format="jsonl") == RECORDS
