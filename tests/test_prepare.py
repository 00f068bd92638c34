"""Every record becomes one row, and stored rows read back as they were, whatever the parts."""

import dataclasses
import hashlib
import itertools
import json
import tracemalloc

import numpy as np
import pytest
import tiny_tokenizer as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract import layout
from ray_extract.config import Job
from ray_extract.dataset.prepare import PreparedRow, prepare, reason_kind, row_id
from ray_extract.dataset.prepared import PreparedRows, RowIndex, tokens_of, write_rows
from ray_extract.errors import AlreadyExists, ConfigError, DatasetError, NotFound, PlanError
from ray_extract.model import ModelShape
from ray_extract.store import ObjectInfo

SHAPE = ModelShape(
    path="",
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=4,
    hidden=64,
    dtype="float32",
    context_length=64,
    vocab_size=300,
    fingerprint="0" * 64,
)
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


class MemoryStore:
    """The store's contract on a dict; counts the bytes it hands out."""

    def __init__(self):
        self.objects = {}
        self.bytes_read = 0

    def put(self, key, data, *, create=True):
        if create and key in self.objects:
            raise AlreadyExists(key)
        self.objects[key] = bytes(data)

    def get(self, key):
        if key not in self.objects:
            raise NotFound(key)
        self.bytes_read += len(self.objects[key])
        return self.objects[key]

    def get_range(self, key, start, length):
        self.bytes_read += length
        return self.objects[key][start : start + length]

    def head(self, key):
        return ObjectInfo(key, len(self.objects[key])) if key in self.objects else None

    def list(self, prefix):
        return (ObjectInfo(key, len(data)) for key, data in sorted(self.objects.items()) if key.startswith(prefix))

    def delete(self, key):
        self.objects.pop(key, None)


def job(path, *, keep="all", engine=None, **dataset):
    return Job.model_validate(
        {
            "model": {"path": "m"},
            "dataset": {"paths": str(path), **dataset},
            "capture": {"keep": keep},
            "engine": engine or {},
            "output": {"url": "out"},
        }
    )


def prepared(tmp_path, records, *, shape=SHAPE, **options):
    path = tmp_path / "in.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return list(prepare(job(path, **options), shape))


def ids(n):
    return {"input_ids": list(range(n)), "loss_mask": [0] * (n - 1) + [1] * (n > 0)}


def test_every_record_becomes_one_row_in_order(tmp_path):
    tokenizer = tiny.save(tmp_path / "tok")
    records = [{"messages": CHAT}, "{oops", ids(3), {"messages": []}, {"text": "hi"}, ids(0), {"other": 1}]
    rows = prepared(tmp_path, records, shape=dataclasses.replace(SHAPE, path=str(tokenizer), context_length=200))
    assert [row.index for row in rows] == list(range(7))
    assert [row.source for row in rows] == [f"in.jsonl:{n}" for n in range(1, 8)]
    assert [row.reason and reason_kind(row.reason) for row in rows] == [
        None,
        "malformed JSON",
        None,
        "empty conversation",
        None,
        "empty row",
        "no known field",
    ]
    for row in rows:
        assert len(row.row_id) == 32
        assert len(row.input_ids) == len(row.loss_mask)
        assert (len(row.input_ids) == 0) == (row.reason is not None)


def test_token_ids_that_the_model_has_no_embedding_for_are_a_counted_reason(tmp_path):
    """One that reached the engine would end it: SGLang checks none."""
    vocab = SHAPE.vocab_size
    rows = prepared(tmp_path, [{"input_ids": [0, vocab - 1]}, {"input_ids": [1, vocab]}, {"input_ids": [-1, 1]}])
    assert [row.reason for row in rows] == [
        None,
        f"token id out of range: {vocab} with a vocabulary of {vocab}",
        f"token id out of range: -1 with a vocabulary of {vocab}",
    ]
    store = MemoryStore()
    assert write_rows(store, rows, keep="all").skipped == {"token id out of range": 2}


def test_row_id_is_the_hash_of_ids_and_mask(tmp_path):
    first, same, other, skipped, skipped_other = prepared(
        tmp_path, [ids(2), ids(2), {"input_ids": [0, 1]}, {"messages": []}, {"messages": [], "id": 1}]
    )
    plain = np.array([0, 1], "<i4").tobytes() + b"\0" + b"\0\1"
    assert first.row_id == same.row_id == hashlib.sha256(plain).hexdigest()[:32]
    assert len({first.row_id, other.row_id, skipped.row_id, skipped_other.row_id}) == 4


def test_overlong_row_is_skipped_with_both_lengths(tmp_path):
    rows = prepared(tmp_path, [ids(57), ids(56)])
    assert [row.reason for row in rows] == ["overlong: 57 > 56 tokens", None]
    assert [row.reason for row in prepared(tmp_path, [ids(57)], max_tokens=20)] == ["overlong: 57 > 20 tokens"]


def test_row_that_its_characters_show_to_be_overlong_is_treated_like_any_other(tmp_path):
    shape = dataclasses.replace(SHAPE, path=str(tiny.save(tmp_path / "tok")))
    records = [{"text": "x" * 20}, {"text": "x" * 2000}]
    rows = prepared(tmp_path, records, shape=shape, max_tokens=21)
    assert [row.reason for row in rows] == [None, "overlong: 2000 characters are more than 21 tokens"]
    with pytest.raises(
        DatasetError, match=r"in\.jsonl:2: 2000 characters are more than 21 tokens, and dataset\.overlong"
    ):
        prepared(tmp_path, records, shape=shape, max_tokens=21, overlong="refuse")
    for overlong in ("right", "left"):
        _, row = prepared(tmp_path, records, shape=shape, max_tokens=21, overlong=overlong)
        assert (len(row.input_ids), row.truncated) == (21, True)


def test_truncated_row_is_cut_and_marked_and_must_still_teach(tmp_path):
    long = {"input_ids": list(range(60)), "loss_mask": [1] * 60}
    rows = prepared(tmp_path, [long, ids(60), ids(5)], overlong="right", max_tokens=20)
    assert [(len(row.input_ids), row.truncated) for row in rows] == [(20, True), (0, False), (5, False)]
    assert rows[1].reason == "no supervised token: all of them lie beyond token 20, where the row was cut"


def test_row_without_supervised_tokens_counts_only_if_all_tokens_are_kept(tmp_path):
    records = [{"input_ids": [1, 2], "loss_mask": [0, 0]}, ids(4)]
    assert [row.reason for row in prepared(tmp_path, records)] == [None, None]
    rows = prepared(tmp_path, records, keep="supervised")
    assert [row.reason for row in rows] == ["no supervised token", None]
    assert [row.kept("supervised") for row in rows] == [0, 1]


def test_more_tokens_than_the_context_holds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.max_tokens = 57: .*rows of 56 at most"):
        prepared(tmp_path, [ids(1)], max_tokens=57)
    assert prepared(tmp_path, [ids(57)], max_tokens=57, engine={"context_length": 65})[0].reason is None
    with pytest.raises(ConfigError, match=r"engine\.context_length = 8"):
        prepared(tmp_path, [ids(1)], engine={"context_length": 8})


def test_reason_is_one_short_storable_line(tmp_path):
    [row] = prepared(tmp_path, [{"messages": [{"role": "a\nb\ud800" + "x" * 500, "content": ""}]}])
    assert len(row.reason) == 200
    assert "\n" not in row.reason
    assert reason_kind(row.reason) == "unknown role"
    write_rows(MemoryStore(), [row])


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30)
ROWS = st.lists(
    st.one_of(
        IDS.flatmap(
            lambda values: st.tuples(
                st.just(values), st.lists(st.integers(0, 1), min_size=len(values), max_size=len(values))
            )
        ),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    ),
    max_size=25,
)


def make_rows(items):
    rows = []
    for index, item in enumerate(items):
        if isinstance(item, str):
            row = PreparedRow(index, f"{index:032x}", f"f:{index}", np.empty(0, np.int32), np.empty(0, np.uint8), item)
        else:
            tokens, mask = np.array(item[0], np.int32), np.array(item[1], np.uint8)
            row = PreparedRow(index, row_id(tokens, mask), f"f:{index}", tokens, mask, truncated=len(mask) % 2 == 0)
        rows.append(row)
    return rows


def plain(row):
    return (*(getattr(row, f) for f in ("index", "row_id", "source", "reason", "truncated")), *map(list, arrays(row)))


def columns(block):
    return block.row, block.tokens, block.kept, block.usable


def arrays(row):
    assert (row.input_ids.dtype, row.loss_mask.dtype) == (np.int32, np.uint8)
    return row.input_ids, row.loss_mask


@settings(max_examples=60, deadline=None)
@given(items=ROWS, part_rows=st.integers(1, 8), part_tokens=st.integers(1, 100), data=st.data())
def test_stored_rows_read_back_equal_in_any_range(items, part_rows, part_tokens, data):
    rows, store = make_rows(items), MemoryStore()
    index = write_rows(store, iter(rows), part_rows, keep="supervised", part_tokens=part_tokens)
    assert RowIndex.from_json(json.loads(json.dumps(index.to_json()))) == index
    usable = [row for row in rows if row.reason is None]
    assert (index.rows, index.usable) == (len(rows), len(usable))
    assert index.usable + sum(index.skipped.values()) == index.rows
    assert index.tokens == sum(len(row.input_ids) for row in usable)
    assert index.kept == sum(int(row.loss_mask.sum()) for row in usable)
    assert index.truncated == sum(row.truncated for row in usable)
    reader = PreparedRows(store, index)
    first = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(first, len(rows)))
    assert [plain(row) for row in reader.read(first, end)] == [plain(row) for row in rows[first:end]]
    assert [row for block in reader.lengths() for row in zip(*map(list, columns(block)), strict=True)] == [
        (row.index, len(row.input_ids), int(row.loss_mask.sum()), row.reason is None) for row in rows
    ]
    for start, stop in itertools.pairwise([*index.starts, len(rows)]):
        assert 1 <= stop - start <= part_rows
        assert stop - start == 1 or sum(len(row.input_ids) for row in rows[start:stop]) <= part_tokens


def test_digest_notices_order_content_and_reasons_but_not_parts():
    items = [([1, 2], [0, 1]), ([3], [1]), "overlong: 9 > 8 tokens"]
    digest = write_rows(MemoryStore(), make_rows(items)).digest
    assert write_rows(MemoryStore(), make_rows(items), part_rows=1).digest == digest
    changed = [
        [items[1], items[0], items[2]],
        [([1, 2], [1, 1]), *items[1:]],
        [*items[:2], "overlong: 10 > 8 tokens"],
        items[:2],
    ]
    assert digest not in {write_rows(MemoryStore(), make_rows(other)).digest for other in changed}


def test_writing_the_same_rows_again_is_harmless_and_other_rows_are_refused():
    store = MemoryStore()
    index = write_rows(store, make_rows([([1], [1]), ([2], [1])]))
    before = dict(store.objects)
    assert write_rows(store, make_rows([([1], [1]), ([2], [1])])) == index
    assert store.objects == before
    with pytest.raises(PlanError, match=r"output\.url: plan/rows-000000\.parquet .*another data set"):
        write_rows(store, make_rows([([1], [1]), ([3], [1])]))


def test_lengths_do_not_read_ids_and_neighbours_share_one_read():
    rng = np.random.default_rng(0)
    rows = make_rows([(rng.integers(0, 2**31, 50_000), [1] * 50_000) for _ in range(40)])
    store = MemoryStore()
    index = write_rows(store, rows, part_rows=20)
    size = sum(len(data) for data in store.objects.values())
    list(PreparedRows(store, index).lengths())
    assert store.bytes_read < size / 20
    store.bytes_read = 0
    reader = PreparedRows(store, index)
    for first in range(0, 40, 5):
        reader.read(first, first + 5)
    assert store.bytes_read == size


def test_writing_holds_one_part_in_memory():
    def rows():
        for index in range(60):
            tokens, mask = np.full(100_000, index, np.int32), np.ones(100_000, np.uint8)
            yield PreparedRow(index, row_id(tokens, mask), "f:1", tokens, mask)

    tracemalloc.start()
    write_rows(MemoryStore(), rows(), part_tokens=300_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 300_000 * 5 < 60 * 100_000 * 5


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12), part_rows=st.integers(1, 5), start=st.integers(0, 4)
)
def test_the_tokens_of_parts_and_of_what_is_cut_from_them_are_those_of_the_rows(lengths, part_rows, start):
    store = MemoryStore()
    rows = make_rows([(list(range(7, 7 + n)), [n % 2] * n) for n in lengths])
    index = write_rows(store, rows, part_rows=part_rows)
    left = iter(rows)
    for part in PreparedRows(store, index).parts():
        whole = [next(left) for _ in range(part.num_rows)]
        for cut, of in ((part, whole), (part.slice(start), whole[start:]), (part.slice(0, 2), whole[:2])):
            found = tokens_of(cut)
            assert found.cu_seqlens.tolist() == np.cumsum([0, *(len(row.input_ids) for row in of)]).tolist()
            assert found.input_ids.tolist() == [token for row in of for token in row.input_ids.tolist()]
            assert found.loss_mask.tolist() == [mark for row in of for mark in row.loss_mask.tolist()]
    assert next(left, None) is None


def test_altered_part_is_noticed_when_read():
    store, other = MemoryStore(), MemoryStore()
    index = write_rows(store, make_rows([([1], [1]), ([2], [1])]))
    swapped = make_rows([([1], [1]), ([2], [1])])
    swapped[1] = dataclasses.replace(swapped[1], input_ids=np.array([3], np.int32))
    write_rows(other, swapped)
    with pytest.raises(PlanError, match=r"row 1 in plan/rows-000000\.parquet is not what its id says"):
        PreparedRows(other, index).read(0, 2)
    with pytest.raises(PlanError, match=r"row 1 in plan/rows-000000\.parquet is not what its id says"):
        list(PreparedRows(other, index).parts())
    write_rows(other := MemoryStore(), make_rows([([1], [1])]))
    with pytest.raises(PlanError, match=r"plan/rows-000000\.parquet (lacks|does not hold) rows"):
        PreparedRows(other, index).read(0, 2)
    store.objects[layout.rows_key(0)] = b"PAR1 nothing"
    for read in (lambda: PreparedRows(store, index).read(0, 1), lambda: list(PreparedRows(store, index).lengths())):
        with pytest.raises(PlanError, match="is damaged"):
            read()
    with pytest.raises(ValueError, match="rows 1 to 3 of 2"):
        PreparedRows(store, index).read(1, 3)
