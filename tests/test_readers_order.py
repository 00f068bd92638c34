"""The plan of an epoch: every row once over all ranks and workers, budgets kept, and never more shards than said."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_extract.readers.order import Plan, cut_tokens, divide, epoch_order, pack, spans, turns, uses

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60).map(lambda values: np.array(values, np.int64))
MIXES = st.sampled_from([0, 1, 2, 3, 7, None])


def shards_of(rows, per_shard):
    return np.arange(rows, dtype=np.int64) // per_shard


def row_plan(order, bounds):
    return Plan(order, bounds[:-1], bounds[1:], np.zeros(len(bounds) - 1, np.int64))


@given(
    LENGTHS, st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), MIXES, st.integers(0, 3), st.none() | st.just(60)
)
def test_every_row_is_read_once_over_all_ranks_and_workers(lengths, per_shard, ranks, workers, mix, epoch, budget):
    shard_of = shards_of(len(lengths), per_shard)
    weights = lengths if budget else np.ones_like(lengths)
    orders = epoch_order(shard_of, weights, ranks=ranks, seed=5, epoch=epoch, mix=mix)
    seen = []
    for order in orders:
        bounds = pack(lengths[order], budget) if budget else np.arange(len(order) + 1)
        plan = row_plan(order, bounds)
        for worker in range(workers):
            for run in turns(worker, workers, len(plan), len(plan)):
                seen += [row for item in run.tolist() for row in plan.rows(item).tolist()]
    assert sorted(seen) == list(range(len(lengths)))


@given(st.integers(0, 40), st.integers(1, 9))
def test_ranks_get_equally_many_rows_give_or_take_one(rows, ranks):
    sizes = np.diff(divide(np.ones(rows, np.int64), ranks))
    assert sizes.sum() == rows and sizes.max() - sizes.min() <= 1


@given(LENGTHS, st.integers(1, 9))
def test_ranks_get_equally_many_tokens_give_or_take_a_row(lengths, ranks):
    bounds = divide(lengths, ranks)
    shares = [lengths[a:b].sum() for a, b in itertools.pairwise(bounds)]
    assert sum(shares) == lengths.sum()
    assert all(abs(share - lengths.sum() / ranks) <= lengths.max() for share in shares)


@given(LENGTHS, st.integers(1, 120))
def test_a_batch_keeps_the_budget_and_takes_what_fits(lengths, budget):
    bounds = pack(lengths, budget)
    assert bounds[0] == 0 and bounds[-1] == len(lengths) and (np.diff(bounds) > 0).all()
    for start, end in itertools.pairwise(bounds):
        assert lengths[start:end].sum() <= budget or end - start == 1
        assert end == len(lengths) or lengths[start : end + 1].sum() > budget


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.sampled_from([1, 2, 3, 7]), st.integers(0, 9))
def test_no_more_shards_are_in_use_at_once_than_said(rows, per_shard, ranks, mix, seed):
    shard_of = shards_of(rows, per_shard)
    for order in epoch_order(shard_of, np.ones(rows, np.int64), ranks=ranks, seed=seed, epoch=0, mix=mix):
        number = shard_of[order]
        first = {s: int(np.flatnonzero(number == s)[0]) for s in set(number.tolist())}
        last = {s: int(np.flatnonzero(number == s)[-1]) for s in first}
        for at in range(len(order)):
            assert sum(first[s] <= at <= last[s] for s in first) <= mix


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.sampled_from([0, 1, 3]), st.integers(0, 9))
def test_a_shard_is_read_by_one_rank_or_by_ranks_beside_each_other(rows, per_shard, ranks, mix, seed):
    shard_of = shards_of(rows, per_shard)
    orders = epoch_order(shard_of, np.ones(rows, np.int64), ranks=ranks, seed=seed, epoch=0, mix=mix)
    opened = sum(len(set(shard_of[order].tolist())) for order in orders)
    assert opened <= len(set(shard_of.tolist())) + ranks - 1


def test_the_seed_and_the_epoch_decide_the_order():
    def order(seed, epoch, mix=3):
        return epoch_order(shards_of(60, 6), np.ones(60, np.int64), ranks=1, seed=seed, epoch=epoch, mix=mix)[
            0
        ].tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) and order(1, 0) != order(2, 0)
    assert order(1, 0, mix=None) != order(1, 1, mix=None)
    assert order(1, 0, mix=0) == order(2, 7, mix=0) == list(range(60))


def test_rows_of_a_shard_are_spread_among_those_of_mix_shards():
    order = epoch_order(shards_of(4000, 100), np.ones(4000, np.int64), ranks=1, seed=0, epoch=0, mix=4)[0]
    middle = (order // 100)[1000:3000]
    # Of neighbours that come from one of four shards at random, one in four is of the same shard.
    assert 0.2 < (middle[1:] == middle[:-1]).mean() < 0.3
    for shard in np.unique(middle).tolist():
        at = np.flatnonzero(order // 100 == shard)
        assert at[-1] - at[0] < 5 * 100


@given(LENGTHS, st.integers(1, 9), st.integers(1, 80), st.integers(1, 4), st.data())
def test_a_worker_knows_when_it_needs_each_shard(lengths, per_shard, budget, workers, data):
    order = data.draw(st.permutations(range(len(lengths)))) if len(lengths) < 20 else list(range(len(lengths)))
    order = np.array(order, np.int64)
    shard_of = shards_of(len(lengths), per_shard)
    plan = row_plan(order, pack(lengths[order], budget))
    worker = data.draw(st.integers(0, workers - 1))
    items = np.arange(worker, len(plan), workers)
    expected = {}
    for place, item in enumerate(items.tolist()):
        for shard in shard_of[plan.rows(item)].tolist():
            expected[shard] = (expected.get(shard, (place,))[0], place)
    found = uses(plan, items, shard_of)
    assert dict(
        zip(found.shard.tolist(), zip(found.first.tolist(), found.last.tolist(), strict=True), strict=True)
    ) == (expected)
    assert found.first.tolist() == sorted(found.first.tolist())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_padded_epoch_starts_over(workers):
    runs = [turns(worker, workers, 4, 10) for worker in range(workers)]
    queues = [[item for run in of_worker for item in run.tolist()] for of_worker in runs]
    assert [queues[i % workers][i // workers] for i in range(10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert all((np.diff(run) > 0).all() for of_worker in runs for run in of_worker)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 5))
def test_batches_of_tokens_follow_each_other_without_a_gap(takes, batch, group):
    takes = np.array(takes, np.int64)
    first, end, skip = cut_tokens(takes, batch, group)
    total = int(takes.sum())
    assert len(first) == -(-total // batch)
    for i in range(len(first)):
        before = int(takes[: first[i]].sum())
        assert first[i] % group == 0 and (end[i] % group == 0 or end[i] == len(takes))
        assert before + skip[i] == i * batch
        assert before + int(takes[first[i] : end[i]].sum()) >= min((i + 1) * batch, total)
    assert (np.diff(first) >= 0).all() and (np.diff(end) >= 0).all()


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 40), st.integers(1, 80))
def test_tokens_close_to_each_other_are_one_read(tokens, gap, longest):
    tokens = np.array(sorted(tokens), np.int64)
    parts = spans(tokens, gap, longest)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(tokens)))
    for part in parts:
        inside = tokens[part]
        assert inside[-1] - inside[0] < longest and (np.diff(inside) <= gap).all()
