"""The output of a run as a stream of rows or packed batches: shuffled, divided over ranks, resumable, read ahead.

An epoch of a rank is a sequence of items, fixed by the manifest, the seed, the epoch and the number of ranks; see
readers.order. A position in it is one number. The workers of a DataLoader take the items in turn, and it hands them out
in turn, so the sequence, and a position in it, do not depend on how many they are.
"""

import abc
import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from ray_extract.errors import ConfigError
from ray_extract.readers.arguments import whole
from ray_extract.readers.order import I64, Plan, Uses, epoch_order, pack, turns, uses
from ray_extract.readers.rows import Rows
from ray_extract.shards.base import Shard

STATE_VERSION = 1

Even = Literal["off", "drop", "pad"]
LongRows = Literal["error", "drop", "alone"]

# Places in the memory that the workers of a DataLoader share with the process that made the stream: a persistent worker
# would otherwise see neither set_epoch nor load_state_dict.
_EPOCH, _START, _CLAIM, _WORKERS = range(4)


@dataclasses.dataclass(frozen=True, slots=True)
class _Position:
    """A place in an epoch: of a rank (worker 0 of 1), or of one worker of several.

    Args:
        epoch: which.
        next: number of the next item.
        worker, workers: whose.
    """

    epoch: int
    next: int
    worker: int
    workers: int


class EpochStream(IterableDataset[dict[str, Any]], abc.ABC):
    """Items of epochs: what readers.stream and readers.tokens have in common.

    Args:
        rows: what is read.
        candidates: i64 [n], the rows that may be in an epoch.
        weights: i64 [n], see order.divide.
        shuffle, mix, seed, rank, ranks, even, ahead: see HiddenStatesStream.

    Raises:
        ConfigError: a value that cannot be meant.
    """

    def __init__(
        self,
        rows: Rows,
        candidates: I64,
        weights: I64,
        *,
        shuffle: bool,
        mix: int | None,
        seed: int,
        rank: int | None,
        ranks: int | None,
        even: Even,
        ahead: int,
    ) -> None:
        super().__init__()
        if (rank is None) != (ranks is None):
            raise ConfigError("rank and ranks go together; without both, those of torch.distributed are taken")
        if rank is None or ranks is None:
            there = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if there else (0, 1)
        rank, ranks = whole("rank", rank), whole("ranks", ranks)
        if rank >= ranks:
            raise ConfigError(f"rank = {rank}: must be in 0 .. {ranks - 1}, ranks being {ranks}")
        if even not in ("off", "drop", "pad"):
            raise ConfigError(f"even = {even!r}: must be off, drop or pad")
        mix = None if mix is None else whole("mix", mix)
        if mix == 0 and shuffle:
            raise ConfigError("mix = 0: must be at least 1, or None for a uniform order; or shuffle=False")
        self.rows = rows
        self.states = rows.states
        self.seed = whole("seed", seed)
        self.rank = rank
        self.ranks = ranks
        self._candidates = candidates
        self._weights = weights
        self._mix = mix if shuffle else 0
        self._even = even
        self._ahead = whole("ahead", ahead)
        self._shared = torch.zeros(4, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._passes = 0
        self._at: _Position | None = None
        self._own: _Position | None = None
        self._planned: tuple[int, Plan, int] | None = None

    @abc.abstractmethod
    def _items(self, order: I64) -> Plan:
        """Divide a rank's rows into items; a function of the rows alone."""

    @abc.abstractmethod
    def _make(self, plan: Plan, item: int, epoch: int, shards: Mapping[int, Shard]) -> dict[str, Any]:
        """Make an item, all shards of whose rows are open."""

    @abc.abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Further arguments that decide what an epoch is, for state_dict."""

    def __len__(self) -> int:
        """Items of this rank in the current epoch, those before a resumed position included."""
        return self._plan(int(self._shared[_EPOCH]))[1]

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return int(self._shared[_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; each has its own order. Call it before each pass, as with PyTorch's
        DistributedSampler: without, the same epoch comes again. Setting the current epoch keeps a loaded position.

        Raises:
            ConfigError: it is negative.
        """
        epoch = whole("epoch", epoch)
        if epoch != int(self._shared[_EPOCH]):
            self._place(epoch, 0)

    def _place(self, epoch: int, start: int) -> None:
        self._shared[:] = torch.tensor([epoch, start, 0, 0])
        self._at = self._own = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the last item that this stream yielded in this process; plain numbers and strings.

        In the main process of a DataLoader with workers, the stream has yielded nothing and cannot tell; there use
        state_after, or torchdata's StatefulDataLoader, which asks each worker.

        Raises:
            ConfigError: the items were yielded in workers.
        """
        if int(self._shared[_WORKERS]) and get_worker_info() is None:
            raise ConfigError(
                "the items were read in the workers of a DataLoader, which reads ahead; take state_after(item) "
                'with the "item" of the last batch that was used, or use torchdata\'s StatefulDataLoader'
            )
        at = self._at
        if at is None:
            at = _Position(int(self._shared[_EPOCH]), int(self._shared[_START]), 0, 1)
        return self._state(at)

    def state_after(self, item: int, epoch: int | None = None) -> dict[str, Any]:
        """The position after an item of this rank, by its `item` number, in the current epoch or the one given.

        Raises:
            ConfigError: the epoch has no such item.
        """
        epoch = int(self._shared[_EPOCH]) if epoch is None else whole("epoch", epoch)
        total = self._plan(epoch)[1]
        item = whole("item", item)
        if item >= total:
            raise ConfigError(f"item = {item}: epoch {epoch} has {total} items on this rank, from 0 on")
        return self._state(_Position(epoch, item + 1, 0, 1))

    def _state(self, at: _Position) -> dict[str, Any]:
        return {"version": STATE_VERSION, **dataclasses.asdict(at), "of": dict(self._identity)}

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """What a position is a position of."""
        rows = hashlib.sha256()
        for part in (self._candidates, self.rows.row, self.rows.n_tokens, self.rows.kept, self.rows.shard_of):
            rows.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return {
            "rows": rows.hexdigest()[:16],
            "seed": self.seed,
            "mix": self._mix,
            "ranks": self.ranks,
            "even": self._even,
            **self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position: the next pass yields what an uninterrupted one would have. The pass after it is whole.

        A position of one rank is valid on all, if they took equally many items.

        Raises:
            ConfigError: it is of another data set, or of other arguments; the message names them. Or no position.
        """
        if not isinstance(state, Mapping) or "version" not in state:
            raise ConfigError("the state is none that state_dict or state_after gave")
        if state["version"] != STATE_VERSION:
            raise ConfigError(f"state version {state['version']!r}: this release reads {STATE_VERSION}")
        mine, its = self._identity, state.get("of")
        if not isinstance(its, Mapping):
            raise ConfigError("the state does not say of which stream it is; it is damaged")
        different = [name for name in mine if its.get(name, "nothing") != mine[name]]
        if different:
            shown = "; ".join(f"{name} was {its.get(name)!r} and is {mine[name]!r}" for name in different)
            raise ConfigError(f"the state is of another stream: {shown}")
        at = _Position(*(whole(f"state[{f.name!r}]", state.get(f.name)) for f in dataclasses.fields(_Position)))
        if get_worker_info() is not None:
            self._own, self._at = at, at
        elif at.workers > 1:
            raise ConfigError(
                f"the state is of worker {at.worker} of {at.workers}; load it through the DataLoader that saved it"
            )
        else:
            self._place(at.epoch, at.next)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass over the current epoch, from the loaded position if there is one.

        Raises:
            ConfigError: more workers on an object store than memory should hold its shards for; a state of another
                number of workers.
            ShardError, StoreError: see readers.dataset.HiddenStates.
        """
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self.rows.in_memory and workers > 1:
            raise ConfigError(
                f"{self.rows.url}: each of {workers} workers would hold shards of the object store in memory; "
                "give cache_dir and cache_bytes, which they share, or take one worker"
            )
        self._at = at = self._begin(worker, workers, info.seed - info.id if info is not None else 0)
        self._shared[_WORKERS] = workers if info is not None else 0
        plan, total = self._plan(at.epoch)
        return self._pass(plan, at, turns(at.next, workers, len(plan), total))

    def _begin(self, worker: int, workers: int, base_seed: int) -> _Position:
        """Where this process begins a pass.

        A loaded position is for one pass. Its workers may start at any time, so the first one puts the pass's name
        (the DataLoader draws a seed for each) beside the position, and another pass finds that it is not meant.
        """
        self._passes += 1
        own, self._own = self._own, None
        if own is not None:
            if (own.worker, own.workers) != (worker, workers) and own.workers > 1:
                raise ConfigError(
                    f"the state is of worker {own.worker} of {own.workers}, this is {worker} of {workers}; "
                    "resume with the same num_workers"
                )
            return _Position(own.epoch, own.next if own.workers > 1 else own.next + worker, worker, workers)
        name = (base_seed + self._passes) % (1 << 62) + 1
        start = int(self._shared[_START])
        if start and int(self._shared[_CLAIM]) in (0, name):
            self._shared[_CLAIM] = name
        else:
            start = 0
        return _Position(int(self._shared[_EPOCH]), start + worker, worker, workers)

    def _plan(self, epoch: int) -> tuple[Plan, int]:
        """This rank's plan of an epoch, and how many items it yields."""
        if self._planned is None or self._planned[0] != epoch:
            shard_of = self.rows.shard_of[self._candidates]
            orders = epoch_order(shard_of, self._weights, ranks=self.ranks, seed=self.seed, epoch=epoch, mix=self._mix)
            plan = self._items(self._candidates[orders[self.rank]])
            total = len(plan)
            if self._even != "off":
                counts = [len(self._items(self._candidates[order])) for order in orders]
                total = min(counts) if self._even == "drop" else max(counts)
                if self._even == "pad" and not min(counts):
                    raise ConfigError(
                        f"even = 'pad': {self.ranks} ranks have more than the {sum(counts)} items there are; a rank "
                        "without any has nothing to repeat"
                    )
            self._planned = epoch, plan, total
        return self._planned[1], self._planned[2]

    def _pass(self, plan: Plan, at: _Position, runs: Sequence[I64]) -> Iterator[dict[str, Any]]:
        for items in runs:
            with _Window(self.rows, uses(plan, items, self.rows.shard_of), self._ahead) as window:
                for place, item in enumerate(items.tolist()):
                    with self.rows.mending():
                        made = self._make(plan, item, at.epoch, window.at(place)) | {"item": at.next}
                    window.leave(place)
                    self._at = at = dataclasses.replace(at, next=at.next + at.workers)
                    yield made


class _Window:
    """The open shards of a sequence of items: each is opened at its first use, or ahead of it, and let go at its last.

    Args:
        rows: whose shards.
        needs: when they are used.
        ahead: shards that are fetched before their first use, if opening them takes long.
    """

    def __init__(self, rows: Rows, needs: Uses, ahead: int) -> None:
        self._rows = rows
        self._needs = list(zip(needs.shard.tolist(), needs.first.tolist(), needs.last.tolist(), strict=True))
        self._ahead = ahead if rows.remote else 0
        self._next = 0  # of _needs, to be opened
        self._open: dict[int, Shard] = {}
        self._coming: dict[int, concurrent.futures.Future[Shard]] = {}
        self._last: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        for number, _, last in self._needs:
            self._last[last].append(number)
        self._due = 0  # of _needs, those whose first use has come
        self._stop = threading.Event()
        # One at a time, in the order of their use: a fetch alone fills the network.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ray_extract-ahead")

    def __enter__(self) -> "_Window":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def at(self, place: int) -> Mapping[int, Shard]:
        """The open shards, by number; those that the item in this place needs are among them."""
        begun = self._due
        while self._due < len(self._needs) and self._needs[self._due][1] <= place:
            self._due += 1
        if self._ahead:
            while self._next < min(self._due + self._ahead, len(self._needs)):
                number = self._needs[self._next][0]
                self._coming[number] = self._pool.submit(self._rows.open, number, self._stop)
                self._next += 1
        for number, _, _ in self._needs[begun : self._due]:
            coming = self._coming.pop(number, None)
            self._open[number] = coming.result() if coming is not None else self._rows.open(number)
        return self._open

    def leave(self, place: int) -> None:
        """Let go of what no later item needs."""
        for number in self._last.pop(place, ()):
            del self._open[number]


class HiddenStatesStream(EpochStream):
    """Rows of a run with their hidden states as an iterable data set: shuffled, divided over ranks, read ahead.

    Without `max_tokens` an item is a row, as an item of readers.dataset.HiddenStates with one entry more:

        item        int, its number among this rank's items of the epoch

    With `max_tokens` an item is a batch without padding, of B rows with n prompt tokens and k stored ones together
    (the same under `keep: all`):

        item        as above
        row         i64 [B], indices in the prepared data set
        row_id      list of B str
        input_ids   i64 [n]
        loss_mask   u8 [n]
        positions   i64 [k], positions of the stored tokens in their prompts
        cu_seqlens  i32 [B + 1], row b has the prompt tokens cu_seqlens[b] .. cu_seqlens[b + 1]
        cu_kept     i32 [B + 1], and the stored tokens cu_kept[b] .. cu_kept[b + 1]
        max_seqlen  int, the most prompt tokens of a row
        state.<b>   [k, H] in the stored dtype (of fp8: in bf16), for each state asked for

    So give a DataLoader `batch_size=None`.

    Order. An epoch has every row once. Shards come in a random order, and what comes next is a row, not seen yet, of
    one of about `mix` shards at random: rows of one shard are spread over as many rows as `mix` shards have (the first
    and the last ones of a rank over fewer). With `mix=None` the order is a uniformly random permutation of all rows,
    for local folders, where jumping is cheap. `shuffle=False` is the order of the data set. The order follows from
    seed, epoch and ranks, and not from how many workers there are.

    Ranks get consecutive parts of the shuffled order, cut so that they have equally many rows, give or take one, or,
    with `max_tokens`, prompt tokens, give or take a row. So a shard is read by one rank, or two. The numbers of items
    may differ a little; `even="drop"` leaves out the last items of ranks that have more than the one with the fewest,
    and `even="pad"` lets ranks that have fewer than the one with the most repeat their first ones. Batches are
    consecutive rows of a rank's order, as many as fit into `max_tokens` prompt tokens.

    Position. In the process that iterates, `state_dict()` is the position after the last item, and after
    `load_state_dict` the next pass yields exactly what would have come. With a plain DataLoader, `num_workers` may be
    anything, and change: save `state_after(batch["item"])` of the last batch used, load it into the stream before
    `iter(loader)`. torchdata's StatefulDataLoader saves and loads by itself, with the same `num_workers`. A position
    saved on one rank is valid on all.

    Shards of an object store are fetched whole, though only with the states asked for, `ahead` shards before their
    first use, in a thread: into memory, which takes up to `mix + ahead` shards, or into cache_dir, from which they are
    mapped. Rows are then views: copy what is to be kept, or all of its shard stays. Several workers need the cache.

    Args:
        url, states, check, storage_options, cache_dir, cache_bytes: as readers.dataset.HiddenStates.
        max_tokens: most prompt tokens of a batch; rows come one by one when absent.
        long_rows: what becomes of rows of more than max_tokens: `error`, `drop`, or `alone`, a batch of its own.
        shuffle, mix, seed: see Order.
        rank, ranks: which part of how many; those of torch.distributed, if it is initialized, when absent.
        even: `off`, `drop` or `pad`: see above.
        ahead: shards fetched ahead from an object store.

    Raises:
        ConfigError: a value that cannot be meant, a row that is too long, or see readers.dataset.HiddenStates.
        ShardError, StoreError: see readers.dataset.HiddenStates.
    """

    def __init__(
        self,
        url: str,
        states: Sequence[str] | None = None,
        *,
        max_tokens: int | None = None,
        long_rows: LongRows = "error",
        shuffle: bool = True,
        mix: int | None = 4,
        seed: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        even: Even = "off",
        check: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        ahead: int = 1,
    ) -> None:
        rows = Rows(url, states, check, storage_options, cache_dir, cache_bytes, whole=True)
        max_tokens = None if max_tokens is None else whole("max_tokens", max_tokens, 1)
        candidates = _candidates(rows, max_tokens, long_rows)
        self._max_tokens = max_tokens
        self._long_rows = long_rows
        lengths = rows.n_tokens[candidates]
        super().__init__(
            rows,
            candidates,
            np.ones_like(lengths) if max_tokens is None else lengths,
            shuffle=shuffle,
            mix=mix,
            seed=seed,
            rank=rank,
            ranks=ranks,
            even=even,
            ahead=ahead,
        )

    def _settings(self) -> dict[str, Any]:
        return {"max_tokens": self._max_tokens}

    def _items(self, order: I64) -> Plan:
        if self._max_tokens is None:
            bounds = np.arange(len(order) + 1)
        else:
            bounds = pack(self.rows.n_tokens[order], self._max_tokens)
        return Plan(order, bounds[:-1], bounds[1:], np.zeros(len(bounds) - 1, np.int64))

    def _make(self, plan: Plan, item: int, epoch: int, shards: Mapping[int, Shard]) -> dict[str, Any]:
        indices = plan.rows(item).tolist()
        opened = [shards[int(self.rows.shard_of[index])] for index in indices]
        if self._max_tokens is None:
            return self.rows.items(indices, opened)[0]
        return _packed(self.rows, indices, opened)


def _candidates(rows: Rows, max_tokens: int | None, long_rows: LongRows) -> I64:
    """The rows that take part. Raises ConfigError if some are too long and that is an error, or none is left."""
    if long_rows not in ("error", "drop", "alone"):
        raise ConfigError(f"long_rows = {long_rows!r}: must be error, drop or alone")
    everything = np.arange(len(rows), dtype=np.int64)
    if max_tokens is None:
        return everything
    fits = rows.n_tokens <= max_tokens
    if fits.all() or long_rows == "alone":
        return everything
    if long_rows == "error" or not fits.any():
        raise ConfigError(
            f"max_tokens = {max_tokens}: {int((~fits).sum())} of {len(rows)} rows are longer, up to "
            f'{int(rows.n_tokens.max())} tokens; raise it, or pass long_rows="drop", or "alone": batches of their own'
        )
    return everything[fits]


def _packed(rows: Rows, indices: Sequence[int], opened: Sequence[Shard]) -> dict[str, Any]:
    """A batch of rows one after the other; see HiddenStatesStream."""
    read = rows.read(indices, opened, rows.states)
    heads = [rows.head(index, shard) for index, (shard, _) in zip(indices, read, strict=True)]
    seqlens = [len(head["input_ids"]) for head in heads]
    batch: dict[str, Any] = {
        "row": torch.tensor([head["row"] for head in heads]),
        "row_id": [head["row_id"] for head in heads],
        **{name: torch.cat([head[name] for head in heads]) for name in ("input_ids", "loss_mask", "positions")},
        "cu_seqlens": _cumulative(seqlens),
        "cu_kept": _cumulative([len(head["positions"]) for head in heads]),
        "max_seqlen": max(seqlens),
    }
    for name in rows.states:
        batch[name] = rows.tensor(name, np.concatenate([stored[name] for _, stored in read]))
    return batch


def _cumulative(counts: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32))
