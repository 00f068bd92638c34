"""Which tokens of a forward pass belong where. Pure: no tensor, no SGLang, no shared memory.

A forward pass is a flat list of tokens in segments, one segment a request: tokens `prefix .. prefix + count` of the
request's sequence. That holds for whole prompts, for chunks, for mixed batches (decode rows are segments of one token
at a position beyond the prompt) and for prompts that are prefilled again after retraction.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Take:
    """Tokens of one segment that are captured now.

    Args:
        source: index of the first one in the forward pass.
        position: its position in the prompt.
        count: tokens, at least 1.
    """

    source: int
    position: int
    count: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.position + self.count


def take_segment(source: int, prefix: int, count: int, num_tokens: int, issued: int) -> Take | None:
    """Decide what to take of a segment, so that each prompt position is written exactly once.

    Tokens below `issued` were taken before (retraction prefills again, and its bytes differ in the last bits); tokens
    at `num_tokens` and beyond are not of the prompt (decode rows, the extra row of overlap scheduling).

    Args:
        source: index of the segment's first token in the forward pass.
        prefix: position of that token in the request's sequence.
        count: tokens of the segment.
        num_tokens: length of the prompt.
        issued: positions already taken, 0 .. issued.

    Returns:
        What to take, or None for nothing.

    Raises:
        GapError: positions between `issued` and the segment were never seen.
    """
    end = min(prefix + count, num_tokens)
    if end <= issued:
        return None
    if prefix > issued:
        raise GapError(issued, prefix)
    return Take(source + issued - prefix, issued, end - issued)


class GapError(ValueError):
    """Positions [expected, got) of a prompt were not captured and will not come again (a prefix-cache hit)."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"positions {expected} to {got} were never computed")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a forward pass that lie consecutively among a row's stored tokens.

    Args:
        source: index of the first one in the forward pass.
        kept: its place among the row's stored tokens.
        count: tokens.
    """

    source: int
    kept: int
    count: int


def kept_pieces(take: Take, spans: Ints) -> list[Piece]:
    """The part of a take that is stored.

    Args:
        take: tokens of a row.
        spans: i64 [S, 2], the row's kept prompt positions [start, end), ascending and disjoint.
    """
    pieces, kept = [], 0
    for start, end in spans.tolist():
        low, high = max(start, take.position), min(end, take.end)
        if low < high:
            pieces.append(Piece(take.source + low - take.position, kept + low - start, high - low))
        kept += end - start
    return pieces


def merge_runs(sources: list[int], targets: list[int], counts: list[int]) -> list[tuple[int, int, int]]:
    """Join pieces that are adjacent on both sides, in order of source, so that neighbouring rows make one copy.

    Args:
        sources: first token of each piece in the forward pass, ascending.
        targets: first stored token of each piece in the image.
        counts: tokens of each piece.

    Returns:
        (source, target, count) of each run.
    """
    runs: list[tuple[int, int, int]] = []
    for source, target, count in zip(sources, targets, counts, strict=True):
        if runs:
            s, t, n = runs[-1]
            if s + n == source and t + n == target:
                runs[-1] = (s, t, n + count)
                continue
        runs.append((source, target, count))
    return runs
