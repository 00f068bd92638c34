"""The draft's vocabulary: the most frequent supervised tokens, ties by id, and maps that agree with each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_extract.errors import ConfigError
from ray_extract.readers.vocab import add_counts, vocab_maps


def test_only_supervised_tokens_count():
    counts = np.zeros(6, np.int64)
    add_counts(counts, np.array([1, 1, 5, 2]), np.array([1, 1, 1, 0]))
    add_counts(counts, np.array([5]), np.array([1]))
    assert counts.tolist() == [0, 2, 0, 0, 0, 2]


@pytest.mark.parametrize("token", [-1, 6])
def test_a_token_outside_the_vocabulary_is_refused(token):
    counts = np.zeros(6, np.int64)
    with pytest.raises(ConfigError, match=f"token id {token} is outside the vocabulary of 6 tokens"):
        add_counts(counts, np.array([2, token]), np.array([1, 1]))
    assert not counts.any()
    add_counts(counts, np.array([2, token]), np.array([1, 0]))


def test_equal_counts_take_the_lower_id_and_unseen_tokens_fill_up():
    d2t, t2d = vocab_maps(np.array([0, 3, 0, 0, 3, 7]), 4)
    assert (d2t + np.arange(4)).tolist() == [0, 1, 4, 5]
    assert t2d.tolist() == [True, True, False, False, True, True]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_maps_agree_and_no_left_out_token_is_more_frequent(counted, data):
    counts = np.array(counted, np.int64)
    size = data.draw(st.integers(1, len(counts)))
    d2t, t2d = vocab_maps(counts, size)
    chosen = d2t + np.arange(size)
    assert chosen.tolist() == np.flatnonzero(t2d).tolist()
    assert counts[~t2d].max(initial=0) <= counts[t2d].min()


@pytest.mark.parametrize("size", [0, 4])
def test_a_draft_vocabulary_larger_than_the_targets_is_refused(size):
    with pytest.raises(ConfigError, match=r"must be within 1\.\.3"):
        vocab_maps(np.zeros(3, np.int64), size)
