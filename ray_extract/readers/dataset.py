"""The output of a run as a map-style PyTorch data set. Needs neither ray nor sglang."""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from ray_extract.errors import ConfigError
from ray_extract.readers.arguments import whole
from ray_extract.readers.rows import Rows
from ray_extract.shards.base import Shard


class HiddenStates(Dataset[dict[str, Any]]):
    """Rows with their hidden states, in the order of the data set; failed and skipped rows are not among them.

    An item is a dict:

        row         int, index in the prepared data set
        row_id      str
        input_ids   i64 [n]
        loss_mask   u8 [n]
        positions   i64 [kept], prompt positions of the stored tokens; 0 .. n-1 under `keep: all`
        state.<b>   [kept, H] in the stored dtype (of fp8: in bf16), for each state asked for

    Rows differ in length, so use `DataLoader(..., batch_size=None)` or a collate function. States of raw shards in a
    local folder are views of a private memory map: nothing is read before it is used, and writing to them does not
    reach the file. But the next read of the row by this data set sees it: clone a state before you change it in place.
    Each open Parquet shard keeps its last row group decoded (32 MiB), so shuffled reads of short rows are quicker from
    raw shards.

    From an object store a state of a row of a raw shard is one range request, and those of an item, or of all items of
    a DataLoader's batch, are on their way at the same time; opening a shard takes two or three more. For more than one
    pass, or most of the rows, give a cache: a shard is then fetched when its first row is asked for, without the states
    that were not asked for, and memory-mapped. Processes of a host may share the folder. `readers.stream` reads whole
    shards ahead. An object store cannot be used in forked workers: give the DataLoader
    `multiprocessing_context="spawn"`.

    That a shard is the manifest's (its rows, lengths and sealed digests) is compared when it is opened.

    Args:
        url: the output of a run, `output.url` of its job.
        states: names such as `state.2` and `state.final`; all of the shard when absent.
        check: recompute the digests of each row that is read (about 0.2 CPU-seconds a GiB).
        storage_options: as `output.storage_options`.
        open_shards: most shards kept open.
        cache_dir: a folder on a local disk for shards of an object store, or of a slow file system.
        cache_bytes: most bytes in it; the shard opened longest ago goes first.

    Raises:
        ConfigError: no such state, no usable row, or one of cache_dir and cache_bytes without the other.
        ShardError: no manifest: the run has not finished.
        StoreError: the store failed.
    """

    def __init__(
        self,
        url: str,
        states: Sequence[str] | None = None,
        check: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        open_shards: int = 8,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self._limit = whole("open_shards", open_shards, 1)
        self._rows = Rows(url, states, check, storage_options, cache_dir, cache_bytes, whole=False)
        self.states = self._rows.states
        self._open: collections.OrderedDict[int, Shard] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item; negative indices count from the end.

        Raises:
            ConfigError: the index is no whole number.
            IndexError: outside the data set.
            ShardError: the shard is not the one of the manifest, or, with check, its bytes are not what was captured.
            StoreError: the store failed.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several items, as a DataLoader with a batch size asks for; raises as __getitem__ does."""
        places = [self._place(index) for index in indices]
        with self._rows.mending():
            return self._rows.items(places, [self._shard(int(self._rows.shard_of[place])) for place in places])

    def state(self, index: int, name: str) -> torch.Tensor:
        """One state of one row, [kept, H], without the rest of the item.

        Of a raw shard on an object store this is one request: the manifest says where the bytes are, and the shard is
        not opened.

        Raises:
            ConfigError: the index is no whole number, or no such state is read.
            IndexError: outside the data set.
            ShardError: the shard is truncated, or, with check, the bytes are not what was captured.
            StoreError: the store failed.
        """
        if name not in self.states:
            raise ConfigError(f"name = {name!r}: the states that are read are {', '.join(self.states)}")
        with self._rows.mending():
            return self._rows.tensor(name, self._rows.stored(self._place(index), name, self._shard))

    def _place(self, index: Any) -> int:
        if isinstance(index, slice):
            raise ConfigError(
                f"index = {index}: rows come one by one; a part of them is torch.utils.data.Subset(data, range(...))"
            )
        size, number = len(self), whole("index", index, None)
        if not -size <= number < size:
            raise IndexError(f"row {number} of {size}")
        return number % size

    def lengths(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of each item, for samplers that batch by length; i64 [len]."""
        return self._rows.n_tokens

    def _shard(self, number: int) -> Shard:
        if self._rows.renew():
            self._open.clear()
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        shard = self._open[number] = self._rows.open(number)
        if len(self._open) > self._limit:
            self._open.popitem(last=False)
        return shard

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": collections.OrderedDict()}
