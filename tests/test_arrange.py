"""Which rows a plan takes, and in which order: seeded, counted by reason, and the same every time."""

import collections
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prepare import MemoryStore, ids, job, prepared

from ray_extract.dataset.arrange import arrange, duplicates, shuffled
from ray_extract.dataset.prepare import PreparedRow, chance, reason_kind, row_id
from ray_extract.dataset.prepared import PreparedRows, write_rows
from ray_extract.errors import DatasetError


def row(index, tokens=(1,), reason=None):
    tokens = np.array(tokens, np.int32)
    mask = np.ones(len(tokens), np.uint8)
    return PreparedRow(index, row_id(tokens, mask), f"f:{index + 1}", tokens, mask, reason)


def skipped(index):
    return row(index, (), "empty row")


def plain(row):
    return row.source, row.row_id, row.reason, row.input_ids.tolist(), row.loss_mask.tolist()


def arranged(rows, **dataset):
    """Rows that were stored, arranged."""
    store = MemoryStore()
    index = write_rows(store, rows, part_rows=7)
    stored = PreparedRows(store, index)
    return list(arrange(stored, job("x", **dataset).dataset, duplicates(stored.ids(), index.rows)))


def reasons(rows):
    return dict(collections.Counter(reason_kind(row.reason) for row in rows if row.reason))


ROWS = st.lists(st.none() | st.integers(0, 9), max_size=40).map(
    lambda items: [skipped(i) if item is None else row(i, [item] * (item + 1)) for i, item in enumerate(items)]
)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 3))
def test_shuffled_rows_are_the_same_rows_numbered_anew(rows, seed):
    found = list(shuffled(iter(rows), seed))
    assert [r.index for r in found] == list(range(len(rows)))
    assert sorted(map(plain, found), key=str) == sorted(map(plain, rows), key=str)
    assert [plain(r) for r in shuffled(iter(rows), seed)] == [plain(r) for r in found]


def test_order_is_random_and_follows_the_seed():
    rows = [row(i) for i in range(2000)]
    first, other = ([int(r.source[2:]) for r in shuffled(iter(rows), seed)] for seed in (0, 1))
    assert first != other
    assert first == sorted(range(1, 2001), key=lambda number: chance(0, "shuffle", number - 1))
    for order in (first, other):
        assert abs(np.corrcoef(order, np.arange(2000))[0, 1]) < 0.1
        # Each tenth, as a shard may be, is a sample of all: its mean is within five standard errors.
        for tenth in np.array_split(order, 10):
            assert abs(np.mean(tenth) - 1000.5) < 5 * 577 / np.sqrt(200)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_of_equal_rows_the_first_is_kept_and_the_others_are_counted(rows):
    found = arranged(rows, dedup=True)
    assert [(r.index, r.source) for r in found] == [(r.index, r.source) for r in rows]
    seen = set()
    for before, after in zip(rows, found, strict=True):
        if before.reason is None and before.row_id in seen:
            assert (after.reason, len(after.input_ids), len(after.loss_mask)) == ("duplicate", 0, 0)
        else:
            assert plain(after) == plain(before)
        seen |= {before.row_id} if before.reason is None else set()


def test_rows_wait_outside_memory():
    def rows():
        for index in range(400):
            yield row(index, np.full(50_000, index % 390))

    tracemalloc.start()
    again = duplicates(((r.index, r.row_id) for r in rows()), 400)
    found = sum(r.reason is None for r in shuffled((r for r in rows() if not again[r.index]), 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 390
    assert peak < 40 * 50_000 * 5  # of 400


def test_sample_is_of_about_its_size_seeded_and_counted(tmp_path):
    records = [ids(3)] * 2000
    rows = prepared(tmp_path, records, sample=0.1)
    assert reasons(rows).keys() == {"not sampled"}
    chosen = [r.index for r in rows if r.reason is None]
    assert 150 < len(chosen) < 250
    assert [r.index for r in prepared(tmp_path, records, sample=0.1) if r.reason is None] == chosen
    assert [r.index for r in prepared(tmp_path, records, sample=0.1, seed=1) if r.reason is None] != chosen
    # A larger sample holds the smaller one, and more input does not change what was chosen.
    assert set(chosen) < {r.index for r in prepared(tmp_path, records, sample=0.5) if r.reason is None}
    assert [r.index for r in prepared(tmp_path, records[:500], sample=0.1) if r.reason is None] == [
        i for i in chosen if i < 500
    ]


def test_filters_count_what_they_leave_out(tmp_path):
    records = [
        {"input_ids": [1] * n, "loss_mask": [1] * m + [0] * (n - m)} for n, m in ((2, 2), (5, 1), (5, 3), (9, 0))
    ]
    rows = prepared(tmp_path, records, min_tokens=3, min_supervised=2)
    assert [r.reason for r in rows] == [
        "too short: 2 < 3 tokens",
        "too few supervised tokens: 1 < 2",
        None,
        "too few supervised tokens: 0 < 2",
    ]
    index = write_rows(MemoryStore(), rows)
    assert index.skipped == {"too few supervised tokens": 2, "too short": 1}
    assert index.examples == {
        "too short": "in.jsonl:1: 2 < 3 tokens",
        "too few supervised tokens": "in.jsonl:2: 1 < 2",
    }


def test_row_cut_at_its_beginning_keeps_its_end(tmp_path):
    long = {"input_ids": list(range(60)), "loss_mask": [1] + [0] * 39 + [1] * 20}
    early = {"input_ids": list(range(60)), "loss_mask": [1] * 20 + [0] * 40}
    rows = prepared(tmp_path, [long, early, ids(5)], overlong="left", max_tokens=20)
    assert [(r.input_ids.tolist(), r.truncated) for r in rows] == [
        (list(range(40, 60)), True),
        ([], False),
        (list(range(5)), False),
    ]
    assert rows[1].reason == "no supervised token: all of them lie before the last 20, where the row was cut"


def test_overlong_row_is_refused_on_request(tmp_path):
    with pytest.raises(DatasetError, match=r"^in\.jsonl:2: 21 tokens are more than 20, and dataset\.overlong = refuse"):
        prepared(tmp_path, [ids(20), ids(21)], overlong="refuse", max_tokens=20)


def test_rows_without_supervised_tokens_are_counted_where_all_are_kept(tmp_path):
    index = write_rows(MemoryStore(), prepared(tmp_path, [{"input_ids": [1], "loss_mask": [0]}, ids(3), ids(9)]))
    assert (index.unsupervised, index.supervised, index.tokens) == (1, 2, 13)
    assert index.histogram == (0, 1, 1, 0, 1)
    assert job("x").dataset.min_supervised == 0
