"""Files become records: every format and place, nothing lost or silently skipped, wrong paths explained."""

import bz2
import gzip
import io
import json
import time

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_extract.config import DatasetConfig
from ray_extract.dataset import formats
from ray_extract.dataset.source import read_records, source_fingerprint
from ray_extract.errors import ConfigError, DatasetError
from ray_extract.store import open_store

RECORDS = [{"text": f"row {i} \N{SNOWMAN}"} for i in range(5)]


def jsonl(records=RECORDS):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


def array(records=RECORDS):
    return json.dumps(records, ensure_ascii=False, indent=1).encode()


def arrow_stream(records=RECORDS):
    sink = io.BytesIO()
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def arrow_file(records=RECORDS):
    sink = io.BytesIO()
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def parquet(records=RECORDS):
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=2, write_page_checksum=True)
    return sink.getvalue()


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
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    (tmp_path / "a.jsonl").write_bytes(b"\n" + jsonl().replace(b"\n", b"\r\n \n"))
    records = list(read_records(dataset(tmp_path / "a.jsonl")))
    assert [(r.value, r.source) for r in records] == [(v, f"a.jsonl:{n}") for n, v in enumerate(RECORDS, start=1)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "é" oops}', "malformed JSON: Expecting ',' delimiter at byte 14"),
        ('{"text": ', "malformed JSON: Expecting value at byte 9"),
        (b'{"text": "\xff"}', "malformed JSON: not UTF-8 at byte 10"),
        ("[" * 100_000, "malformed JSON: nested too deeply"),
        ('{"input_ids": [1' + "0" * 5000 + "]}", "malformed JSON: a number has too many digits"),
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


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".zst"])
def test_compressed_file_of_no_bytes_is_damaged_and_one_of_nothing_is_not(tmp_path, ending):
    (tmp_path / f"a.jsonl{ending}").touch()
    with pytest.raises(DatasetError, match=r"damaged at byte 0 .*: the file is empty"):
        list(read_records(dataset(tmp_path / f"a.jsonl{ending}")))
    nothing = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}[ending](b"")
    (tmp_path / f"b.jsonl{ending}").write_bytes(nothing)
    assert values(tmp_path / f"b.jsonl{ending}") == []


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd)])
@pytest.mark.parametrize("pack", [jsonl, array], ids=["jsonl", "json"])
def test_cut_compressed_file_is_refused_or_kept_up_to_the_cut(tmp_path, ending, compress, pack):
    noise = [{"text": np.random.default_rng(i).bytes(20).hex()} for i in range(3000)]
    path = tmp_path / f"a.{pack.__name__.replace('array', 'json')}{ending}"
    path.write_bytes(compress(pack(noise))[:-20])
    with pytest.raises(DatasetError, match=r"a\.json.*damaged at byte \d+ of what it unpacks to.*set dataset\.damaged"):
        list(read_records(dataset(path)))
    *good, last = read_records(dataset(path, damaged="keep"))
    if ending != ".bz2":  # whose blocks are of 900 kB, and those of zstd of 128
        assert len(good) > 2000
    assert [r.value for r in good if r.value] == noise[: sum(r.value is not None for r in good)]
    assert last.reason.startswith("damaged file: at byte ")
    assert f"after record {len(good)}: " in last.reason


def test_parquet_is_streamed_in_batches_with_known_columns_only(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BATCH_RECORDS", 2)
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


@pytest.mark.parametrize("chunk", [3, 7, 64, 1 << 20])
def test_elements_of_a_json_array_are_records_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    deep = {"text": '}]," \\u00e9 \N{SNOWMAN}', "n": -1.5e3, "deep": [{"a": [True, None]}]}
    odd = [*RECORDS, deep, 17, -1e9, "x", []]
    for text in (array(odd), b"\xef\xbb\xbf \n" + array(odd) + b"\n\n", json.dumps(odd).encode()):
        (tmp_path / "a.json").write_bytes(text)
        records = list(read_records(dataset(tmp_path / "a.json")))
        assert [r.value for r in records] == [v if isinstance(v, dict) else None for v in odd]
        assert [r.source for r in records] == [f"a.json:{n}" for n in range(1, len(odd) + 1)]
        assert [r.reason for r in records[6:]] == [f"not a JSON object: {t}" for t in ("int", "float", "str", "list")]


@pytest.mark.parametrize("text", [b"[]", b" [ ]\n", b"", b"  \n"])
def test_json_array_may_be_empty(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    assert values(tmp_path / "a.json") == []


def test_json_file_of_lines_is_read_as_lines(tmp_path):
    (tmp_path / "a.json").write_bytes(jsonl() + b"{oops\n")
    records = list(read_records(dataset(tmp_path / "a.json")))
    assert [r.value for r in records] == [*RECORDS, None]


@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize(
    ("text", "record", "place"),
    [
        ('[{"text": "é"}, {"text": oops}]', 1, "byte 26: Expecting value"),
        ('[{"text": "é"}, {"text": "cut', 1, "byte 26: Unterminated string starting at"),
        ('[{"text": "é"}, ', 1, "byte 17: Expecting value"),
        ('[{"text": "é"}', 1, "byte 15: Expecting ',' or ']'"),
        ('[{"text": "é"} {"text": "b"}]', 1, "byte 16: Expecting ',' or ']'"),
        ('[{"text": "é"}, ]', 1, "byte 17: Expecting value"),
        ('[{"text": "é"}] x', 1, "byte 17: more text behind the array"),
        (b'[{"text": "\xc3\xa9"}, {"text": "\xff"}]', 1, "byte 27: not UTF-8"),
        ('[{"text": ' + "[" * 100_000, 0, "byte 1: nested too deeply"),
        ('[{"text": ' + "9" * 5000 + "}]", 0, "byte 1: a number has too many digits"),
        ("[", 0, "byte 1: Expecting value"),
    ],
)
def test_malformed_array_names_byte_and_record(tmp_path, monkeypatch, text, record, place, chunk):
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    where, why = place.split(": ", 1)
    with pytest.raises(DatasetError) as caught:
        values(path)
    assert f"a.json': damaged at {where}, after record {record}: {why}; " in str(caught.value)
    *good, last = read_records(dataset(path, damaged="keep"))
    assert [r.value for r in good] == [{"text": "é"}] * record
    assert (last.value, last.source) == (None, f"a.json:{record + 1}")
    assert last.reason == f"damaged file: at {where}, after record {record}: {why}"


def test_array_larger_than_memory_is_streamed():
    def chunks():
        yield b"["
        while True:
            yield b'{"text": "' + b"x" * 10_000 + b'"},'

    records = formats.read_json(chunks())
    assert [len(next(records)[0]["text"]) for _ in range(1000)] == [10_000] * 1000


def test_long_element_is_not_parsed_at_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 1 << 10)
    (tmp_path / "a.json").write_bytes(array([{"text": "x" * (16 << 20)}]))
    began = time.process_time()
    assert len(values(tmp_path / "a.json")[0]["text"]) == 16 << 20
    assert time.process_time() - began < 5


@pytest.mark.parametrize("pack", [arrow_stream, arrow_file, parquet])
def test_columns_of_arrow_and_parquet_are_read_without_the_nulls_of_other_rows(tmp_path, pack):
    rows = [
        {
            "messages": [{"role": "user", "call": {"a": 1}}],
            "input_ids": [1, 2],
            "other": 1,
            "tools": "[]",
            "system": "s",
        },
        {"messages": [{"role": "tool", "call": {"b": [None, {"c": 2}]}}], "input_ids": [], "other": 2},
        {"messages": None, "input_ids": [3], "other": 3},
    ]
    path = tmp_path / ("a.parquet" if pack is parquet else "a.arrow")
    path.write_bytes(pack(rows))
    found = values(path)
    assert [v["messages"] for v in found] == [r["messages"] for r in rows]
    assert [v["input_ids"].tolist() for v in found] == [r["input_ids"] for r in rows]
    assert {name for v in found for name in v} == {"messages", "input_ids", "tools", "system"}
    assert (found[0]["tools"], found[0]["system"], found[1]["tools"]) == ("[]", "s", None)


@pytest.mark.parametrize("pack", [arrow_stream, arrow_file, parquet])
def test_damaged_table_is_refused_or_kept_up_to_the_damage(tmp_path, pack):
    rows = [{"text": np.random.default_rng(i).bytes(4000).hex()} for i in range(8)]
    path = tmp_path / ("a.parquet" if pack is parquet else "a.arrow")
    data = bytearray(pack(rows))
    at = data.index(rows[5]["text"][:100].encode())
    data[at : at + 9] = b"\xff" * 9
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"a\.\w+': damaged at byte \d+ or behind it.*, after record 4: "):
        values(path)
    *good, last = read_records(dataset(path, damaged="keep"))
    assert [r.value for r in good] == rows[:4]
    assert last.reason.startswith("damaged file: at byte ")


def test_arrow_stream_cut_between_batches_is_damaged(tmp_path):
    data = arrow_stream(RECORDS[:2])
    (tmp_path / "a.arrow").write_bytes(data[: -len(formats._ARROW_STREAM_END)])
    with pytest.raises(DatasetError, match=r"damaged at byte \d+, after record 2: it has no end mark"):
        values(tmp_path / "a.arrow")


def saved_by_datasets(folder, **state):
    """As save_to_disk of Hugging Face `datasets` 4 leaves it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (RECORDS[:3], RECORDS[3:]), strict=True):
        (folder / name).write_bytes(arrow_stream(part))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], **state}))
    (folder / "dataset_info.json").write_text("{}")


def test_folder_saved_by_datasets_is_a_source(tmp_path):
    saved_by_datasets(tmp_path / "ds")
    records = list(read_records(dataset(tmp_path / "ds")))
    assert [r.value for r in records] == RECORDS
    assert records[3].source == "data-00001-of-00002.arrow:1"
    assert len(source_fingerprint(dataset(tmp_path / "ds"))) == 2


def test_folder_saved_by_datasets_that_cannot_be_read_as_it_lies_says_what_to_do(tmp_path):
    saved_by_datasets(tmp_path / "indexed", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DatasetError, match=r"indexed'.*flatten_indices\(\)"):
        values(tmp_path / "indexed")
    saved_by_datasets(tmp_path / "dict" / "train")
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DatasetError, match=r"holds the splits train, test; name one, such as .*dict/train"):
        values(tmp_path / "dict")
    assert values(tmp_path / "dict" / "train") == RECORDS


def test_what_a_store_refuses_is_no_damage(monkeypatch):
    def read(*_):
        raise TimeoutError("the store is away")

    fs = fsspec.filesystem("memory")
    fs.pipe("/away/a.jsonl.gz", gzip.compress(jsonl()))
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "read", read, raising=False)
    with pytest.raises(DatasetError, match=r"cannot be read \(TimeoutError: the store is away\)"):
        values("memory://away/a.jsonl.gz", damaged="keep")


def test_globs_are_sorted_and_paths_keep_their_order(tmp_path):
    for name in ("b-10", "b-02", "a-01", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([{"text": name}]))
    (tmp_path / "b-99.jsonl").mkdir()
    got = values(tmp_path / "c.jsonl", tmp_path / "b-*.jsonl", tmp_path / "a-01.jsonl")
    assert [v["text"] for v in got] == ["c", "b-02", "b-10", "a-01"]


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    places = ["x/train/a.jsonl", "y/train/a.jsonl", "y/test/a.jsonl", "y/test/b.jsonl"]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(jsonl(RECORDS[:1]))
    paths = [tmp_path / place for place in (*places, places[3])]
    assert [r.source for r in read_records(dataset(*paths))] == [
        *("x/train/a.jsonl:1", "y/train/a.jsonl:1", "test/a.jsonl:1", "b.jsonl:1", "b.jsonl:1")
    ]
    fs = fsspec.filesystem("memory")
    for place in ("apart.jsonl", "apart/apart.jsonl"):
        fs.pipe(f"/{place}", jsonl(RECORDS[:1]))
    urls = ["memory://apart.jsonl", "memory://apart/apart.jsonl"]
    assert [r.source for r in read_records(dataset(*urls))] == ["/apart.jsonl:1", "apart/apart.jsonl:1"]


def test_file_names_of_other_bytes_and_line_breaks_make_names_that_can_be_stored(tmp_path):
    (tmp_path / "a\nb\udcff.jsonl").write_bytes(jsonl())
    assert next(read_records(dataset(tmp_path / "a*.jsonl"))).source == "a b?.jsonl:1"


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, ending):
    table = pa.Table.from_arrays([pa.array([[1]]), pa.array([[2]])], names=["input_ids"] * 2)
    with (tmp_path / f"a.{ending}").open("wb") as file:
        if ending == "parquet":
            pq.write_table(table, file)
        else:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
    with pytest.raises(DatasetError, match=r"more than one column is named input_ids; rename or drop"):
        list(read_records(dataset(tmp_path / f"a.{ending}")))


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
        ("broken.parquet", r"damaged at its end, after record 0: .*magic bytes"),
        ("broken.arrow", r"damaged at byte 0 or behind it, after record 0"),
    ],
)
def test_unreadable_path_is_explained(tmp_path, name, message):
    for other in ("a.txt", "b.parquet.gz", "broken.parquet", "broken.arrow"):
        (tmp_path / other).write_bytes(jsonl())
    with pytest.raises(DatasetError, match=message) as caught:
        values(tmp_path / name)
    assert "dataset.paths = " in str(caught.value)


def test_unknown_protocol_is_explained_without_the_urls_secrets():
    with pytest.raises(DatasetError, match=r"dataset\.paths = 'nope://host/a\.jsonl': cannot be read") as caught:
        values("nope://user:hunter2@host/a.jsonl")
    assert "hunter2" not in str(caught.value)


def test_url_that_cannot_be_parsed_is_explained_without_its_secrets():
    with pytest.raises(DatasetError, match=r"dataset\.paths = 'http://\.\.\.': cannot be read") as caught:
        values("http://user:hunter2@[host/a.jsonl")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^s3://\.\.\.: not a valid URL"):
        open_store("s3://[bucket")


def test_format_overrides_an_unknown_ending(tmp_path):
    (tmp_path / "a.txt").write_bytes(jsonl())
    assert values(tmp_path / "a.txt", format="jsonl") == RECORDS
