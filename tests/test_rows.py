"""Which tokens of a pass are taken: any schedule of passes against a model that looks at one token at a time."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.capture.rows import GapError, Take, kept_pieces, merge_runs, take_segment
from ray_extract.shards.image import mask_spans


@dataclasses.dataclass
class NaiveRow:
    """Takes a position when it is the next one; positions that skip one fault the row for ever."""

    num_tokens: int
    taken: list[int] = dataclasses.field(default_factory=list)

    def see(self, prefix: int, count: int) -> list[int] | None:
        """Offsets in the segment that are taken; None for a gap."""
        offsets = []
        for offset in range(count):
            position = prefix + offset
            if position >= self.num_tokens or position < len(self.taken):
                continue
            if position > len(self.taken):
                return None
            self.taken.append(position)
            offsets.append(offset)
        # A decode row's own position is past the prompt, but shows that what lies between was never computed.
        return None if prefix > len(self.taken) and len(self.taken) < self.num_tokens else offsets


@settings(max_examples=300, deadline=None)
@given(data=st.data(), num_tokens=st.integers(1, 40))
def test_any_schedule_takes_each_position_once_in_order_or_reports_the_gap(
    data: st.DataObject, num_tokens: int
) -> None:
    """Prompts, chunks, retraction to any earlier place, decode rows, overlap's extra row and prefix-cache hits."""
    naive, issued = NaiveRow(num_tokens), 0
    for _ in range(data.draw(st.integers(1, 12))):
        # Mostly where the row stands; else anywhere, which is retraction (lower), decode or a cache hit (higher).
        prefix = data.draw(st.just(issued) | st.integers(0, num_tokens + 3))
        count, source = data.draw(st.integers(1, 45)), data.draw(st.integers(0, 5))
        expected = naive.see(prefix, count)
        if expected is None:
            with pytest.raises(GapError):
                take_segment(source, prefix, count, num_tokens, issued)
            return
        take = take_segment(source, prefix, count, num_tokens, issued)
        got = [] if take is None else list(range(take.source - source, take.source - source + take.count))
        assert got == expected
        if take is not None:
            assert take.position == issued
            issued = take.end
        assert naive.taken == list(range(issued))


def test_a_prefix_cache_hit_names_the_positions_that_are_missing() -> None:
    with pytest.raises(GapError, match="positions 3 to 7 were never computed"):
        take_segment(0, prefix=7, count=4, num_tokens=20, issued=3)


@settings(max_examples=300, deadline=None)
@given(
    mask=st.lists(st.integers(0, 1), min_size=1, max_size=40),
    cut=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    source=st.integers(0, 9),
)
def test_pieces_are_the_kept_tokens_of_a_take(mask: list[int], cut: tuple[int, int], source: int) -> None:
    position = cut[0] % len(mask)
    take = Take(source, position, min(cut[1], len(mask) - position))
    expected = {
        source + p - position: sum(mask[:p]) for p in range(position, take.end) if mask[p]
    }  # token of the pass -> place among the stored tokens
    pieces = kept_pieces(take, mask_spans(np.array(mask, np.uint8)))
    got = [(p.source + i, p.kept + i) for p in pieces for i in range(p.count)]
    assert len(got) == len(expected) and dict(got) == expected
    assert all(p.count > 0 for p in pieces)
    assert all(a.source + a.count < b.source for a, b in itertools.pairwise(pieces))


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 5), st.booleans()), max_size=15))
def test_merging_keeps_every_tokens_place_and_leaves_nothing_to_merge(
    pieces: list[tuple[int, int, int, bool]],
) -> None:
    sources, targets, counts, at, end = [], [], [], 0, 0
    for skip, target, count, adjacent in pieces:
        at += 0 if adjacent else skip
        sources.append(at)
        targets.append(end if adjacent else target)
        counts.append(count)
        at, end = at + count, targets[-1] + count

    def places(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(s + i, t + i) for s, t, n in runs for i in range(n)]

    runs = merge_runs(sources, targets, counts)
    assert places(runs) == places(list(zip(sources, targets, counts, strict=True)))
    assert not any(s + n == s2 and t + n == t2 for (s, t, n), (s2, t2, _) in itertools.pairwise(runs))


def test_consecutive_rows_leave_in_one_copy() -> None:
    assert merge_runs([0, 5, 7], [40, 45, 47], [5, 2, 1]) == [(0, 40, 8)]
