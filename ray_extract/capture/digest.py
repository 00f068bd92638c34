"""The digest of captured states, and its NumPy implementation.

Over the stored bytes of one state of one row:

    D = sum over p of A(p) * (1 + sum over c of V(c) * u32[p, c])   modulo 2**64

p is the token's place among the row's stored tokens, u32 the little-endian words of its bytes,
V(c) = splitmix64(c) | 1 and A(p) = splitmix64(2**32 + p) | 1. The token ids are one more column of one word a token:
A(p) * (1 + V(0) * id), p being the position in the prompt.

It is additive, so chunks of a row combine by adding, in any order, and one pass on a GPU computes it beside the
statistics. Odd weights on 32-bit words detect every change of a single word and, by measurement, sign flips, swaps,
shifts and dropped blocks. It shows that bytes did not change on the way from the GPU to the reader; it does not show
that they are the right layer's.
"""

import functools

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK32 = np.uint64(0xFFFFFFFF)
_BLOCK_TOKENS = 32  # keeps the shifted copy of a block in cache; larger blocks run at memory speed


def splitmix64(x: Words) -> Words:
    """Finalizer of the SplitMix64 generator (Steele, Lea, Flood 2014); u64 in, u64 out."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


@functools.lru_cache(maxsize=64)
def word_weights(words: int) -> Words:
    """V(0) .. V(words - 1); u64 [words]. Read-only, since it is cached."""
    weights = splitmix64(np.arange(words, dtype=np.uint64)) | np.uint64(1)
    weights.flags.writeable = False
    return weights


def position_weights(start: int, count: int) -> Words:
    """A(start) .. A(start + count - 1); u64 [count]."""
    return splitmix64(np.arange(start, start + count, dtype=np.uint64) + np.uint64(1 << 32)) | np.uint64(1)


@functools.lru_cache(maxsize=64)
def _pair_weights(words: int) -> tuple[Words, Words]:
    v = word_weights(words)
    return v[0::2].copy(), v[1::2] - (v[0::2] << np.uint64(32))


def digest_tokens(tokens: npt.NDArray[np.uint8], start: int = 0) -> int:
    """Digest of stored tokens.

    Args:
        tokens: the bytes, u8 [count, bytes per token]; bytes per token divisible by 8.
        start: place of the first one among its row's stored tokens.

    Returns:
        The digest, 0 <= D < 2**64; 0 for no tokens.
    """
    count, width = tokens.shape
    words = tokens.view(np.uint64)
    even, odd = _pair_weights(width // 4)
    weights = position_weights(start, count)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for at in range(0, count, _BLOCK_TOKENS):
            block = words[at : at + _BLOCK_TOKENS]
            # With u64 = lo + hi * 2**32, lo * V0 + hi * V1 equals u64 * V0 + hi * (V1 - V0 * 2**32).
            sums = np.einsum("ij,j->i", block, even) + np.einsum("ij,j->i", block >> np.uint64(32), odd)
            total += (weights[at : at + _BLOCK_TOKENS] * (sums + np.uint64(1))).sum()
    return int(total)


def digest_ids(ids: npt.NDArray[np.int32], start: int = 0) -> int:
    """Digest of token ids, i32 [count]; `start` is the prompt position of the first one."""
    with np.errstate(over="ignore"):
        values = ids.astype(np.uint32).astype(np.uint64) * word_weights(1)[0] + np.uint64(1)
        return int((position_weights(start, len(ids)) * values).sum())


def add_digests(a: int, b: int) -> int:
    """The digest of two disjoint sets of tokens of one state of one row."""
    return (a + b) & 0xFFFFFFFFFFFFFFFF
