"""Names: they go there and back, sort as they count, and no request id is the beginning of another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_extract import layout
from ray_extract.capture.arena import new_nonce
from ray_extract.layout import RequestId, extent_prefix, parse_rid

NONCE = st.text("0123456789abcdef", min_size=12, max_size=12)
RIDS = st.builds(
    RequestId, NONCE, st.integers(0, 9999), st.integers(0, 2_000_000), st.integers(0, 10**8 - 1), st.integers(0, 99)
)


@given(rid=RIDS)
def test_a_request_id_goes_there_and_back(rid: RequestId) -> None:
    assert parse_rid(str(rid)) == rid
    assert str(rid).startswith(extent_prefix(rid.nonce, rid.slot, rid.generation))


@given(a=RIDS, b=RIDS)
def test_no_request_id_is_the_beginning_of_another(a: RequestId, b: RequestId) -> None:
    """SGLang aborts by prefix: aborting `0:1` took `0:10` too."""
    near = RequestId(a.nonce, a.slot, a.generation * 10 + 1, a.row, a.attempt)  # one digit more, past a million
    for one, other in ((a, b), (b, a), (a, near), (near, a)):
        if one != other:
            assert not str(other).startswith(str(one))
        extent = (one.nonce, one.slot, one.generation)
        if extent != (other.nonce, other.slot, other.generation):
            assert not str(other).startswith(extent_prefix(*extent))


@given(a=RIDS, b=RIDS)
def test_request_ids_have_one_width_below_a_million_generations(a: RequestId, b: RequestId) -> None:
    if max(a.generation, b.generation) < 10**6:
        assert len(str(a)) == len(str(b))


@given(rid=RIDS, tail=st.text(min_size=1, max_size=3))
def test_what_is_not_exactly_a_request_id_is_none(rid: RequestId, tail: str) -> None:
    text = str(rid)
    for other in (text + tail, text[:-1], text[1:], text.upper(), text.replace(".", ":"), "health"):
        assert parse_rid(other) is None
    assert parse_rid(text + "\n") is None
    # Digits of other scripts are digits to Python, not to us.
    assert parse_rid(text[:-3] + "\u0661\u0662.") is None


def test_the_hundredth_try_wraps_to_keep_the_width() -> None:
    assert str(RequestId("a", 0, 1, 2, 100)) == str(RequestId("a", 0, 1, 2, 0))


def test_nonces_parse_and_differ() -> None:
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    assert all(parse_rid(str(RequestId(n, 0, 1, 0, 0))) is not None for n in nonces)


@given(a=st.integers(0, 10**6 - 1), b=st.integers(0, 10**6 - 1))
def test_names_sort_as_their_numbers(a: int, b: int) -> None:
    for name in (layout.rows_key, layout.unit_id, layout.manifest_key):
        assert (name(a) < name(b)) == (a < b)


@given(number=st.integers(0, 10**6 - 1))
def test_keys_go_there_and_back(number: int) -> None:
    assert layout.manifest_number(layout.manifest_key(number)) == number
    unit = layout.unit_id(number)
    for name in (unit, f"{unit}.0", f"{unit}.1.0"):
        assert layout.unit_of_commit(layout.commit_key(name)) == name
    for stray in ("commits/.nfs0001", "commits/x.tmp", "commits/u00000001.json.part", "commits/e/u00000001.json"):
        assert layout.unit_of_commit(stray) is None


@pytest.mark.parametrize("key", ["manifest-1.parquet", "manifest-000001.parquet.tmp", "a/manifest-000001.parquet"])
def test_other_keys_are_no_manifests(key: str) -> None:
    assert layout.manifest_number(key) is None


def test_shards_carry_the_ending_of_their_format() -> None:
    assert layout.shard_key("u1", "a1", "raw") == "shards/u1.a1.safetensors"
    assert layout.shard_key("u1", "a1", "parquet") == "shards/u1.a1.parquet"
