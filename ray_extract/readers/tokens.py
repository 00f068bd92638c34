"""Random tokens of a run's rows, for sparse autoencoders and probes."""

import concurrent.futures
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_extract.errors import ConfigError, ShardError
from ray_extract.readers.arguments import whole
from ray_extract.readers.order import I64, Plan, cut_tokens, spans
from ray_extract.readers.rows import U8, Rows
from ray_extract.readers.stream import EpochStream, Even
from ray_extract.shards.base import Shard
from ray_extract.shards.raw import RawShard

GAP_BYTES = 1 << 20
"""Tokens of a row no further apart are one range request: reading this much takes about as long as a request waits."""
LONGEST_BYTES = 64 << 20
"""Most bytes of such a request."""

_SHARDS_AT_ONCE = 16


class TokenSampler(EpochStream):
    """Tokens of all rows in random order, as an iterable data set of batches. An item is a dict, B tokens of it:

        item        int, its number among this rank's items of the epoch
        row         i64 [B], index in the prepared data set
        row_id      list of B str
        positions   i64 [B], in the prompt
        input_ids   i64 [B]
        state.<b>   [B, H], for each state asked for

    Which tokens: of each row `tokens_per_row` stored ones, without repetition (all, if it has fewer), others in each
    epoch; or all of them. Every row takes part, so short ones have more weight a token. In which order: the rows come
    as in readers.stream, and of `mix_rows` consecutive ones the tokens are shuffled together; batches are consecutive
    tokens of that. The last batch of a rank may be smaller. What is read does not depend on the number of workers;
    positions are saved and loaded as in readers.stream.HiddenStatesStream.

    Only the tokens chosen are read: of a local raw shard, or one in the cache, the pages that hold them; from an object
    store ranges, one for those of a row that lie within a mebibyte of each other. So few tokens of long rows are best
    read without a cache, and most tokens of each row with one. A Parquet shard is read in whole rows. Digests are of
    whole rows, so they are not checked here: `ray-extract verify`, or a pass of readers.stream with check=True.

    Normalised states are multiplied by one number a state, `scales[name]`, so that over all stored tokens of the rows
    that are ok the mean of their squared norm is H, each element's mean square thus 1: the numbers come from the sums
    of squares that every shard keeps of what was captured (`sumsq`). They include the first tokens of rows, whose norm
    is a hundred times the others' in many models. Save them with what was trained, and hand them back as `normalise`.

    Args:
        url, states, storage_options, cache_dir, cache_bytes: as readers.dataset.HiddenStates.
        batch_tokens: B.
        tokens_per_row: None for all.
        normalise: True; False; or the scales of an earlier sampler, by name. True opens every shard once at the start.
        dtype: of the states; when absent, float32 for normalised ones, else the stored one (of fp8: bf16).
        mix_rows: see above.
        shuffle, mix, seed, rank, ranks, even, ahead: as readers.stream.HiddenStatesStream. `shuffle=False` leaves the
            rows in order, and their tokens shuffled.

    Attributes:
        scales: what each state is multiplied by; empty if nothing is normalised.

    Raises:
        ConfigError: a value that cannot be meant, or see readers.dataset.HiddenStates.
        ShardError, StoreError: see readers.dataset.HiddenStates.
    """

    def __init__(
        self,
        url: str,
        states: Sequence[str] | None = None,
        *,
        batch_tokens: int,
        tokens_per_row: int | None = None,
        normalise: bool | Mapping[str, float] = True,
        dtype: torch.dtype | None = None,
        mix_rows: int = 256,
        shuffle: bool = True,
        mix: int | None = 4,
        seed: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        even: Even = "off",
        storage_options: Mapping[str, Any] | None = None,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        ahead: int = 1,
    ) -> None:
        self._batch_tokens = whole("batch_tokens", batch_tokens, 1)
        self._tokens_per_row = None if tokens_per_row is None else whole("tokens_per_row", tokens_per_row, 1)
        self._mix_rows = whole("mix_rows", mix_rows, 1)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"dtype = {dtype!r}: must be one of PyTorch's types of real numbers, as torch.float32")
        rows = Rows(url, states, False, storage_options, cache_dir, cache_bytes, whole=False)
        self._dtype = dtype
        self.scales = _scales(rows, normalise)
        candidates = np.flatnonzero(rows.kept > 0).astype(np.int64)
        if not len(candidates):
            raise ConfigError(f"{rows.url}: none of its rows has stored tokens")
        self._groups: dict[tuple[int, int], tuple[I64, I64]] = {}
        self._takes = rows.kept if tokens_per_row is None else np.minimum(rows.kept, tokens_per_row)
        super().__init__(
            rows,
            candidates,
            self._takes[candidates],
            shuffle=shuffle,
            mix=mix,
            seed=seed,
            rank=rank,
            ranks=ranks,
            even=even,
            ahead=ahead,
        )

    def _settings(self) -> dict[str, Any]:
        return {
            "batch_tokens": self._batch_tokens,
            "tokens_per_row": self._tokens_per_row,
            "mix_rows": self._mix_rows,
            "normalise": self.scales,
        }

    def _items(self, order: I64) -> Plan:
        return Plan(order, *cut_tokens(self._takes[order], self._batch_tokens, self._mix_rows))

    def _make(self, plan: Plan, item: int, epoch: int, shards: Mapping[int, Shard]) -> dict[str, Any]:
        row, token = self._chosen(plan, item, epoch)
        positions, ids = np.empty(len(row), np.int64), np.empty(len(row), np.int64)
        stored = {name: np.empty((len(row), self.rows.columns[name].token_bytes), np.uint8) for name in self.states}
        place, number = self.rows.place[row], self.rows.shard_of[row]
        for which in np.unique(number).tolist():
            shard = shards[which]
            where = np.flatnonzero(number == which)
            # In the order in which they are stored, so that each shard is gone through once.
            where = where[np.argsort(shard.table.cu_kept[place[where]] + token[where], kind="stable")]
            tokens = shard.table.cu_kept[place[where]] + token[where]
            positions[where] = _positions(shard, tokens)
            ids[where] = shard.table.input_ids[shard.table.cu_seqlens[place[where]] + positions[where]]
            for name in self.states:
                stored[name][where] = _gather(self.rows, shard, name, place[where], tokens)
        return {
            "row": torch.from_numpy(self.rows.row[row]),
            "row_id": self.rows.row_ids(row),
            "positions": torch.from_numpy(positions),
            "input_ids": torch.from_numpy(ids),
            **{name: self._tensor(name, part) for name, part in stored.items()},
        }

    def _tensor(self, name: str, stored: U8) -> torch.Tensor:
        tensor = self.rows.tensor(name, stored)
        if name in self.scales:
            tensor = tensor.to(torch.float32).mul_(self.scales[name])
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def _chosen(self, plan: Plan, item: int, epoch: int) -> tuple[I64, I64]:
        """The tokens of an item, in order: i64 [B] rows, and i64 [B] places among the row's stored tokens."""
        first, end, skip = int(plan.first[item]), int(plan.end[item]), int(plan.skip[item])
        groups = [self._group(plan.order, at, epoch) for at in range(first, end, self._mix_rows)]
        row, token = (np.concatenate(parts)[skip : skip + self._batch_tokens] for parts in zip(*groups, strict=True))
        return row, token

    def _group(self, order: I64, first: int, epoch: int) -> tuple[I64, I64]:
        """The tokens chosen of a group of rows, shuffled; the last groups are remembered, since batches share them."""
        key = (epoch, first)
        if key not in self._groups:
            rows = order[first : first + self._mix_rows]
            rng = np.random.default_rng([self.seed, epoch, self.rank, first])
            takes = self._takes[rows]
            chosen = [
                rng.choice(kept, take, replace=False)
                for kept, take in zip(self.rows.kept[rows].tolist(), takes.tolist(), strict=True)
            ]
            mixed = rng.permutation(int(takes.sum()))
            while len(self._groups) >= 2:
                del self._groups[next(iter(self._groups))]
            self._groups[key] = np.repeat(rows, takes)[mixed], np.concatenate(chosen)[mixed].astype(np.int64)
        return self._groups[key]


def _positions(shard: Shard, tokens: I64) -> I64:
    """Prompt positions of stored tokens of a shard; i64 [B]."""
    ends = np.cumsum(np.diff(shard.table.spans, axis=1).reshape(-1))
    at = np.searchsorted(ends, tokens, side="right")
    return np.asarray(shard.table.spans[at, 1] - (ends[at] - tokens), dtype=np.int64)


def _gather(rows: Rows, shard: Shard, name: str, place: I64, tokens: I64) -> U8:
    """Stored bytes of a state of stored tokens of a shard, u8 [B, bytes per token].

    Args:
        place: i64 [B], the row of each, ascending.
        tokens: i64 [B], ascending.
    """
    if not isinstance(shard, RawShard):
        places, starts = np.unique(place, return_index=True)
        begin = shard.table.cu_kept
        return np.concatenate(
            [
                shard.state(name, p)[part - begin[p]]
                for p, part in zip(places.tolist(), np.split(tokens, starts[1:]), strict=True)
            ]
        )
    if not rows.by_range:
        return np.asarray(shard.tokens(name, 0, shard.table.num_kept)[tokens])
    width = shard.column(name).token_bytes
    parts = spans(tokens, max(1, GAP_BYTES // width), max(1, LONGEST_BYTES // width))
    bounds = [(int(tokens[part.start]), int(tokens[part.stop - 1]) + 1) for part in parts]
    read = rows.map([shard], [functools.partial(shard.tokens, name, start, end) for start, end in bounds])
    return np.concatenate([r[tokens[p] - start] for r, p, (start, _) in zip(read, parts, bounds, strict=True)])


def _scales(rows: Rows, normalise: bool | Mapping[str, float]) -> dict[str, float]:
    """What to multiply each state by; see TokenSampler."""
    if isinstance(normalise, Mapping):
        missing = [name for name in rows.states if name not in normalise]
        if missing:
            raise ConfigError(f"normalise: no scale of {', '.join(missing)}; it has {', '.join(normalise) or 'none'}")
        return {name: _scale(name, normalise[name]) for name in rows.states}
    if not isinstance(normalise, bool):
        raise ConfigError(f"normalise = {normalise!r}: must be True, False, or the scales of an earlier sampler")
    if not normalise:
        return {}

    def sums(number: int) -> dict[str, float]:
        shard = rows.peek(number)
        of_rows = shard.stats.sumsq[rows.place[rows.members(number)]].sum(axis=0)
        return {column.name: float(total) for column, total in zip(shard.columns, of_rows, strict=True)}

    with rows.mending(), concurrent.futures.ThreadPoolExecutor(_SHARDS_AT_ONCE if rows.remote else 1) as pool:
        found = list(pool.map(sums, range(len(rows.shards))))
    scales: dict[str, float] = {}
    for name in rows.states:
        elements = int(rows.kept.sum()) * rows.columns[name].width
        total = sum(shard[name] for shard in found)
        if not 0 <= total < math.inf:
            raise ShardError(
                f"{rows.url}: the sums of squares of {name} add up to {total}, so a shard is damaged; "
                f"`ray-extract verify {rows.url}` says which"
            )
        if total == 0:
            raise ShardError(f"{rows.url}: {name} is zero in all of its {len(rows)} rows; it cannot be normalised")
        scales[name] = float(np.sqrt(elements / total))
    return scales


def _scale(name: str, value: Any) -> float:
    """A scale that was handed in. Raises ConfigError unless it is a number that a state can be multiplied by."""
    try:
        scale = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not 0 < scale < math.inf:
        raise ConfigError(f"normalise[{name!r}] = {value!r}: must be a finite number above 0")
    return scale
