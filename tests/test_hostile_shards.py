"""Shards made to do harm: a clear error, or what was written; never a traceback, a hang or much memory."""

import json
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import MemoryStore, make_image

from ray_extract.errors import ShardError
from ray_extract.shards.raw import MAX_HEADER_BYTES
from ray_extract.shards.reader import open_image, open_shard

IMAGE = make_image([5, 12, 7], keep="supervised", dtype="F8_E4M3")
WHOLE = bytes(IMAGE.buffer)
LENGTH = int.from_bytes(WHOLE[:8], "little")
TREE = json.loads(WHOLE[8 : 8 + LENGTH])
TENSORS = [name for name in TREE if name != "__metadata__"]
OURS = b'{"__metadata__":{"format":"ray_extract","version":"1"'

NASTY = st.sampled_from(
    [-1, 0, 1, 7, 2**31, 2**63, 2**64, 2**70, 1.5, float("nan"), True, None, "", "U8", "state.1", [], {}, [0], [[0]]]
) | st.lists(st.integers(-(2**65), 2**65), min_size=1, max_size=3)


def places(tree, path=()):
    """Where something can be put in a tree of lists and dicts."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def with_header(text: bytes, length: int | None = None) -> bytes:
    """The shard with another header text, padded to the old one's length if it is shorter."""
    text = text.ljust(LENGTH)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + WHOLE[8 + LENGTH :]


def judge(data: bytes) -> None:
    store = MemoryStore()
    store.objects["a"] = data
    for opened in (
        lambda: open_shard(store, "a", "raw"),
        lambda: open_image("memory://test/a", "raw", memoryview(data)),
    ):
        try:
            shard = opened()
            for column in shard.columns:
                for row in range(shard.rows):
                    shard.state(column.name, row)
            shard.differences(range(shard.rows))
        except ShardError as error:
            assert str(error).startswith("memory://test/a: ") and len(str(error)) < 1000
        else:
            # What has no meaning for values may be another: text for people, pads, the header's spelling. And the
            # states' names: the manifest has those, see test_reader.
            for name in ("row", "cu_seqlens", "cu_kept", "cu_spans", "spans", "input_ids", "loss_mask"):
                assert np.array_equal(getattr(shard.table, name), getattr(IMAGE.table, name))
            assert [(c.dtype, c.width) for c in shard.columns] == [(c.dtype, c.width) for c in IMAGE.columns]
            for ours, theirs in zip(shard.columns, IMAGE.columns, strict=True):
                for row in range(shard.rows):
                    assert np.array_equal(shard.state(ours.name, row), IMAGE.state(theirs.name, row))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(places(TREE))), NASTY), min_size=1, max_size=2), st.booleans())
def test_any_value_in_any_place_of_the_header(changes, drop):
    tree = json.loads(json.dumps(TREE))
    for path, value in changes:
        at = tree
        try:
            for key in path[:-1]:
                at = at[key]
            if drop:
                del at[path[-1]]
            else:
                at[path[-1]] = value
        except (KeyError, TypeError, IndexError):  # an earlier change took the place away
            continue
    judge(with_header(json.dumps(tree).encode()))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TENSORS), st.sampled_from(TENSORS))
def test_tensors_that_overlap_or_change_places(one, other):
    tree = json.loads(json.dumps(TREE))
    tree[one]["data_offsets"] = tree[other]["data_offsets"]
    judge(with_header(json.dumps(tree).encode()))
    tree[one], tree[other] = TREE[other], TREE[one]
    judge(with_header(json.dumps(tree).encode()))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1) | st.none())
def test_any_bytes_as_a_header_of_any_length(text, length):
    judge(with_header(text, length))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 1_000_000,
        b'{"__metadata__":' + b'{"a":' * 500_000,
        OURS + b'},"state.1":{"dtype":"U8","shape":[' + b"9" * 5000 + b"]}}",
        b'{"a":' + b'"\xff\xfe"' + b"}",
        OURS + b',"n":' + b"1," * 2_000_000,
        json.dumps(TREE).encode().replace(b'"row":', b'"row":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},"row":'),
    ],
    ids=["deep list", "deep object", "a number of 5000 digits", "bad UTF-8", "unfinished", "a name twice"],
)
def test_header_bombs(text):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    judge(with_header(text))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


def test_a_header_that_says_it_is_longer_than_any_of_ours_is_not_read():
    store = MemoryStore()
    store.objects["a"] = with_header(b"{}", MAX_HEADER_BYTES + 1)
    with pytest.raises(ShardError, match=r"a: not a safetensors file \(its header would have \d+ bytes\)"):
        open_shard(store, "a", "raw")
    assert sum(length for _, _, length in store.reads) <= len(WHOLE)
