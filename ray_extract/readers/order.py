"""In which order an epoch has its rows, who reads which, and what is read together. Pure functions of arrays.

Everything follows from the manifest, the seed and the epoch, so every rank and every worker knows the whole plan, and
none has to ask another.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def epoch_order(shard_of: I64, weights: I64, *, ranks: int, seed: int, epoch: int, mix: int | None) -> list[I64]:
    """Each rank's rows of an epoch, in order: every row in exactly one rank.

    Without shuffling (mix 0) the ranks get consecutive parts of the data set. With it, shards come in a random order
    and rows in a random order within them, and the ranks get consecutive parts of that: a shard is read by one rank,
    or by two at a border. Then each rank moves each of its rows back by a random way of up to `mix` shards, so that
    what comes next is a row of one of `mix` shards at random; never more than `mix` shards are in use at once. Without
    a bound (mix None) the order is a uniformly random permutation of all rows.

    Args:
        shard_of: i64 [N], shard of each row.
        weights: i64 [N], what a row counts in dividing them: see divide.
        ranks, seed, epoch: not negative.
        mix: see above.

    Returns:
        For each rank, i64 numbers of rows in 0 .. N-1.
    """
    count = len(shard_of)
    rng = np.random.default_rng([seed, epoch])
    if mix == 0:
        order = np.arange(count, dtype=np.int64)
    elif mix is None:
        order = rng.permutation(count)
    else:
        shards, number = np.unique(shard_of, return_inverse=True)
        order = np.lexsort((rng.random(count), rng.permutation(len(shards))[number]))
    bounds = divide(weights[order], ranks)
    parts = [order[bounds[rank] : bounds[rank + 1]] for rank in range(ranks)]
    if mix is None or mix < 2:
        return parts
    way = mix * rng.random(count)
    return [_moved(part, shard_of, way[bounds[r] : bounds[r + 1]]) for r, part in enumerate(parts)]


def _moved(part: I64, shard_of: I64, way: npt.NDArray[np.float64]) -> I64:
    """Rows that come shard after shard, each moved back by a way in shards."""
    steps = np.concatenate(([0], np.cumsum(np.diff(shard_of[part]) != 0))) if len(part) else np.empty(0)
    return part[np.argsort(steps + way, kind="stable")]


def divide(weights: I64, parts: int) -> I64:
    """Cut a sequence into consecutive parts of about equal weight; i64 [parts + 1], bounds.

    Part p ends where the weights before it reach its share. With equal weights the sizes differ by one at most.
    """
    total = np.concatenate(([0], np.cumsum(weights)))
    # In whole numbers: the smallest index whose sum is at least total * p / parts.
    bounds = np.searchsorted(total, [-(-int(total[-1]) * part // parts) for part in range(parts + 1)])
    bounds[-1] = len(weights)
    return bounds.astype(np.int64)


def pack(lengths: I64, budget: int) -> I64:
    """Cut a sequence into consecutive batches of at most `budget`, each as long as it can be; i64 [B + 1], bounds.

    One that is larger than the budget is a batch of its own.
    """
    total = np.concatenate(([0], np.cumsum(lengths)))
    bounds = [0]
    while bounds[-1] < len(lengths):
        end = int(np.searchsorted(total, total[bounds[-1]] + budget, side="right")) - 1
        bounds.append(max(end, bounds[-1] + 1))
    return np.asarray(bounds, dtype=np.int64)


def cut_tokens(takes: I64, batch: int, group: int) -> tuple[I64, I64, I64]:
    """Cut the tokens of rows into batches, where the tokens of each `group` consecutive rows are in any order.

    Args:
        takes: i64 [n], tokens of each row.
        batch: tokens of a batch; the last one may be smaller.
        group: rows.

    Returns:
        first, end, skip of Plan, for each batch.
    """
    total = np.concatenate(([0], np.cumsum(takes)))
    begins = np.arange(0, int(total[-1]), batch, dtype=np.int64)
    lasts = np.minimum(begins + batch, total[-1]) - 1
    first = (np.searchsorted(total, begins, side="right") - 1) // group * group
    end = ((np.searchsorted(total, lasts, side="right") - 1) // group + 1) * group
    return first, np.minimum(end, len(takes)), begins - total[first]


def spans(tokens: I64, gap: int, longest: int) -> list[slice]:
    """Parts of ascending numbers that are worth one read: no further apart than `gap`, and at most `longest` in all."""
    found: list[slice] = []
    start = 0
    values = tokens.tolist()
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] - values[i - 1] > gap or values[i] - values[start] >= longest:
            found.append(slice(start, i))
            start = i
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a rank yields in an epoch: I items.

    Args:
        order: i64 [n], its rows.
        first, end: i64 [I], item i is made of the rows order[first[i]:end[i]], or of some of them; both ascending.
        skip: i64 [I], how many of those rows' tokens belong to earlier items; where items are whole rows, 0.
    """

    order: I64
    first: I64
    end: I64
    skip: I64

    def __len__(self) -> int:
        return len(self.first)

    def rows(self, item: int) -> I64:
        """The rows that an item is made of."""
        return self.order[int(self.first[item]) : int(self.end[item])]


@dataclasses.dataclass(frozen=True, slots=True)
class Uses:
    """Which shards a sequence of items needs, and when. M shards, by first use.

    Args:
        shard: i64 [M].
        first, last: i64 [M], places in the sequence.
    """

    shard: I64
    first: I64
    last: I64


def uses(plan: Plan, items: I64, shard_of: I64) -> Uses:
    """When the items of a worker, ascending numbers, need which shards."""
    empty = np.empty(0, np.int64)
    if not len(items):
        return Uses(empty, empty, empty)
    places = np.arange(len(plan.order))
    # Items are ranges of rows whose ends ascend: the first that reaches a row, and the last that begins before it.
    first = np.searchsorted(plan.end[items], places, side="right")
    last = np.searchsorted(plan.first[items], places, side="right") - 1
    used = first <= last
    shards, number = np.unique(shard_of[plan.order[used]], return_inverse=True)
    begins = np.full(len(shards), len(items), np.int64)
    ends = np.full(len(shards), -1, np.int64)
    np.minimum.at(begins, number, first[used])
    np.maximum.at(ends, number, last[used])
    by_first = np.argsort(begins, kind="stable")
    return Uses(shards[by_first], begins[by_first], ends[by_first])


def turns(start: int, step: int, count: int, total: int) -> list[I64]:
    """The items of one worker, as runs of ascending numbers.

    Args:
        start: its first item.
        step: from each of its items to the next: the number of workers, which take turns.
        count: items that exist; beyond them, an epoch that is padded starts over.
        total: items that the rank yields.
    """
    mine = np.arange(start, total, step, dtype=np.int64)
    if not len(mine):
        return []
    return np.split(mine % count, np.flatnonzero(np.diff(mine // count)) + 1)
