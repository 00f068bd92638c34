"""Damaged input: whatever happens to a file, every record of it is a row, usable or with a reason, or it is refused."""

import bz2
import gzip

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_prepare import SHAPE, MemoryStore, job
from test_source import array, arrow_file, arrow_stream, jsonl, parquet

from ray_extract.config import DatasetConfig
from ray_extract.dataset.parts import prepare_rows
from ray_extract.dataset.prepared import PreparedRows
from ray_extract.dataset.source import read_records
from ray_extract.errors import DatasetError

RECORDS = [
    {"input_ids": list(range(i, i + n)), "loss_mask": [0] * (n - n // 2) + [1] * (n // 2), "text": None}
    for i, n in enumerate([3, 9, 1, 70, 4, 4, 12, 5, 30, 2, 8])
]


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


KINDS = {
    "a.jsonl": jsonl,
    "a.json": array,
    "a.jsonl.gz": lambda records: gzip.compress(jsonl(records), mtime=0),
    "a.json.gz": lambda records: gzip.compress(array(records), mtime=0),
    "a.jsonl.bz2": lambda records: bz2.compress(jsonl(records)),
    "a.jsonl.zst": lambda records: zstd(jsonl(records)),
    "a.json.zst": lambda records: zstd(array(records)),
    "a.parquet": parquet,
    "stream.arrow": arrow_stream,
    "file.arrow": arrow_file,
}
WHOLE = {name: pack(RECORDS) for name, pack in KINDS.items()}

# At a place, which is a share of the file: cut it off, overwrite, insert, or take out.
DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(["cut", "write", "insert", "remove"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)
    ),
    min_size=1,
    max_size=3,
)


def damaged(data, damage):
    data = bytearray(data)
    for kind, share, text in damage:
        at = int(share * len(data))
        if kind == "cut":
            del data[at:]
        elif kind == "write":
            data[at : at + len(text)] = text
        elif kind == "insert":
            data[at:at] = text
        else:
            del data[at : at + len(text)]
    return bytes(data)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(damage=DAMAGE, dedup=st.booleans(), shuffle=st.booleans())
@example(damage=[("write", 0.5, b"\x80")], dedup=False, shuffle=False)  # a name in a.parquet is not UTF-8 then
@example(damage=[("write", 0.07984893832555208, b"\x01")], dedup=False, shuffle=False)  # stream.arrow: 2^56 bytes
def test_rows_are_usable_or_have_a_reason_whatever_is_damaged(tmp_path_factory, name, damage, dedup, shuffle):
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(damaged(WHOLE[name], damage))
    records = {}
    for policy in ("keep", "refuse"):
        try:
            records[policy] = list(read_records(DatasetConfig(paths=(str(path),), damaged=policy)))
        except DatasetError as error:
            assert str(path) in str(error)
            assert policy == "refuse" or "none of the columns" in str(error)
    if "keep" not in records:
        assert "refuse" not in records
        return
    ended = [r.reason for r in records["keep"] if r.reason and r.reason.startswith("damaged file")]
    assert bool(ended) == ("refuse" not in records)
    assert [r.source for r in records["keep"]] == [f"{name}:{n}" for n in range(1, len(records["keep"]) + 1)]

    store = MemoryStore()
    asked = job(path, damaged="keep", dedup=dedup, shuffle=shuffle)
    index = prepare_rows(store, asked, SHAPE)
    assert index.rows == len(records["keep"])
    assert index.usable + sum(index.skipped.values()) == index.rows
    rows = PreparedRows(store, index).read(0, index.rows)
    assert sum(row.reason is None for row in rows) == index.usable
    assert sorted(row.source for row in rows) == sorted(record.source for record in records["keep"])
    assert all((len(row.input_ids) > 0) == (row.reason is None) for row in rows)


@pytest.mark.parametrize(("name", "ended"), [("a.jsonl", b"\n"), ("a.json", b"},")])
@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1), text=st.binary(min_size=1, max_size=9))
def test_records_before_the_damage_are_all_kept(tmp_path_factory, name, ended, share, text):
    path = tmp_path_factory.mktemp("damaged") / name
    whole = WHOLE[name][: int(share * len(WHOLE[name]))]
    path.write_bytes(whole + text)
    found = [r.value for r in read_records(DatasetConfig(paths=(str(path),), damaged="keep"))]
    assert found[: whole.count(ended)] == RECORDS[: whole.count(ended)]
