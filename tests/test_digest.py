"""The digest: its definition, its additivity, and what it catches."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.capture.digest import add_digests, digest_ids, digest_tokens

MASK = (1 << 64) - 1


def splitmix(x):
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def naive(tokens, start):
    """The definition, in Python integers."""
    total = 0
    for p, token in enumerate(tokens, start=start):
        words = [int.from_bytes(token[i : i + 4].tobytes(), "little") for i in range(0, len(token), 4)]
        total += (splitmix((1 << 32) + p) | 1) * (1 + sum((splitmix(c) | 1) * w for c, w in enumerate(words)))
    return total & MASK


def tokens_of(count, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 70),
    width=st.sampled_from([8, 16, 24, 120]),
    start=st.integers(0, 1 << 21),
    seed=st.integers(0, 1000),
)
def test_the_digest_is_its_definition(count, width, start, seed):
    tokens = tokens_of(count, width, seed)
    assert digest_tokens(tokens, start) == naive(tokens, start)


@given(ids=st.lists(st.integers(0, (1 << 31) - 1), max_size=50), start=st.integers(0, 1 << 21))
def test_the_digest_of_ids_is_its_definition(ids, start):
    weight = splitmix(0) | 1
    expected = sum((splitmix((1 << 32) + p) | 1) * (1 + weight * i) for p, i in enumerate(ids, start=start)) & MASK
    assert digest_ids(np.array(ids, np.int32), start) == expected


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 90), cuts=st.lists(st.integers(0, 90), max_size=6), order=st.randoms())
def test_chunks_of_any_split_add_up_in_any_order(count, cuts, order):
    tokens = tokens_of(count, 24, count)
    bounds = sorted({0, count, *(c for c in cuts if c < count)})
    parts = [digest_tokens(tokens[a:b], a) for a, b in itertools.pairwise(bounds)]
    order.shuffle(parts)
    total = 0
    for part in parts:
        total = add_digests(total, part)
    assert total == digest_tokens(tokens)


def _flip_bit(t):
    t[7, 5] ^= 1


def _flip_signs(t):
    t.view(np.uint16)[...] ^= 0x8000


def _swap_tokens(t):
    t[[3, 4]] = t[[4, 3]]


def _swap_words(t):
    words = t.view(np.uint32)
    words[9, [0, 1]] = words[9, [1, 0]]


def _shift_by_one(t):
    t[...] = np.roll(t, 1, axis=0)


def _shift_elements(t):
    t[...] = np.roll(t.reshape(-1), 2).reshape(t.shape)


def _zero_token(t):
    t[11] = 0


def _zero_block(t):
    t[8:40] = 0


def _repeat_token(t):
    t[21] = t[20]


def _reverse(t):
    t[...] = t[::-1].copy()


def _exchange_bytes(t):
    t[...] = t.view(np.uint16).byteswap().view(np.uint8).reshape(t.shape)


@pytest.mark.parametrize(
    "corrupt",
    [
        *(_flip_bit, _flip_signs, _swap_tokens, _swap_words, _shift_by_one, _shift_elements),
        *(_zero_token, _zero_block, _repeat_token, _reverse, _exchange_bytes),
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_a_corruption_changes_the_digest(corrupt):
    for seed in range(20):
        tokens = tokens_of(50, 64, seed)
        before = digest_tokens(tokens)
        corrupt(tokens)
        assert digest_tokens(tokens) != before


def test_a_missing_or_added_zero_token_changes_the_digest():
    tokens = np.zeros((5, 16), np.uint8)
    assert len({digest_tokens(tokens[:n]) for n in range(6)}) == 6
