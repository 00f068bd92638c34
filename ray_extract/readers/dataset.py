"""The output of a run as a map-style PyTorch data set. Needs neither ray nor sglang."""

import collections
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset

from ray_extract.errors import ConfigError, ShardError
from ray_extract.ledger import read_manifest
from ray_extract.shards.base import Shard
from ray_extract.shards.reader import open_shard
from ray_extract.store import open_store

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}


def as_tensor(stored: npt.NDArray[np.uint8], dtype: str) -> torch.Tensor:
    """Stored bytes of a state, u8 [kept, bytes per token], as a writable tensor [kept, H] of a safetensors dtype.

    Shares the memory of a writable array (a private memory map); read-only ones (a range read, a decoded Parquet
    value, which a cache may hand out again) are copied.
    """
    return torch.from_numpy(stored if stored.flags.writeable else stored.copy()).view(TORCH_DTYPES[dtype])


class HiddenStates(Dataset[dict[str, Any]]):
    """Rows with their hidden states, in the order of the data set; failed and skipped rows are not among them.

    An item is a dict:

        row         int, index in the prepared data set
        row_id      str
        input_ids   i64 [n]
        loss_mask   u8 [n]
        positions   i64 [kept], prompt positions of the stored tokens; 0 .. n-1 under `keep: all`
        state.<b>   [kept, H] in the stored dtype, for each state asked for

    Rows differ in length, so use `DataLoader(..., batch_size=None)` or a collate function. States of raw shards in a
    local folder are views of a private memory map: nothing is read before it is used, and writing to them does not
    reach the file. Each open Parquet shard keeps its last row group decoded (32 MiB), so shuffled reads of short rows
    are quicker from raw shards. An object store cannot be used in forked workers: give the DataLoader
    `multiprocessing_context="spawn"`.

    Args:
        url: the output of a run, `output.url` of its job.
        states: names such as `state.2` and `state.final`; all of the shard when absent.
        check: recompute the digests of each row that is read (about 0.2 CPU-seconds a GiB).
        storage_options: as `output.storage_options`.
        open_shards: most shards kept open.

    Raises:
        ConfigError: no such state, or no usable row.
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
    ) -> None:
        if open_shards < 1:
            raise ConfigError(f"open_shards = {open_shards}: must be at least 1")
        self._options = dict(storage_options or {})
        self._check = check
        self._limit = open_shards
        self._start(url)
        manifest = read_manifest(self._store)
        rows = manifest.filter(pc.equal(manifest.column("status"), "ok")).sort_by("row")
        if not len(rows):
            raise ConfigError(f"{self._url}: none of the manifest's {len(manifest)} rows is ok")
        keys = rows.column("shard").dictionary_encode().combine_chunks()
        formats = rows.column("format")
        self._row = rows.column("row").to_numpy()
        self._row_id = rows.column("row_id").combine_chunks()
        self._n_tokens = rows.column("n_tokens").to_numpy()
        self._place = rows.column("row_in_shard").to_numpy()
        self._digests = rows.column("digests").combine_chunks()
        self._shard_of = keys.indices.to_numpy()
        first = np.unique(self._shard_of, return_index=True)[1]
        self._shards = [
            (key, formats[at].as_py()) for key, at in zip(keys.dictionary.to_pylist(), first.tolist(), strict=True)
        ]
        opened = self._shard(0)
        self.states = tuple(states) if states is not None else tuple(c.name for c in opened.columns)
        for name in self.states:
            opened.column(name)

    def _start(self, url: str) -> None:
        self._store = open_store(url, self._options)
        self._url = self._store.url
        self._pid = os.getpid()
        self._open: collections.OrderedDict[int, Shard] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The item; negative indices count from the end.

        Raises:
            IndexError: outside the data set.
            ShardError: the shard is not the one of the manifest, or, with check, its bytes are not what was captured.
            StoreError: the store failed.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        number, place, row = int(self._shard_of[index]), int(self._place[index]), int(self._row[index])
        shard = self._shard(number)
        if place >= shard.rows or shard.table.row[place] != row:
            raise ShardError(f"{self._url}/{shard.key}: line {place} is not row {row}, as the manifest says")
        if self._check:
            self._verify(index, shard, place)
        item: dict[str, Any] = {
            "row": row,
            "row_id": self._row_id[index].as_py(),
            "input_ids": torch.from_numpy(shard.input_ids(place).astype(np.int64)),
            "loss_mask": torch.from_numpy(shard.loss_mask(place).copy()),
            "positions": torch.from_numpy(shard.positions(place)),
        }
        for name in self.states:
            item[name] = as_tensor(shard.state(name, place), shard.column(name).dtype)
        return item

    def lengths(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of each item, for samplers that batch by length; i64 [len]."""
        return np.asarray(self._n_tokens, dtype=np.int64)

    def _verify(self, index: int, shard: Shard, place: int) -> None:
        wrong = shard.differences([place], self.states).get(place, [])
        if self._digests[index].as_py() != shard.digest[place].tolist():
            wrong.append("the manifest's digests")
        if wrong:
            raise ShardError(
                f"{self._url}/{shard.key}: row {int(self._row[index])}: {', '.join(wrong)} are not what was captured"
            )

    def _shard(self, number: int) -> Shard:
        if os.getpid() != self._pid:
            self._after_fork()
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        key, format = self._shards[number]
        shard = open_shard(self._store, key, format)
        self._open[number] = shard
        if len(self._open) > self._limit:
            self._open.popitem(last=False)
        return shard

    def _after_fork(self) -> None:
        # The clients of object stores run on threads, which a fork does not copy: a read would hang for ever.
        if self._store.local_path("") is None:
            raise ConfigError(
                f"{self._url}: an object store cannot be read in a forked worker; "
                'pass multiprocessing_context="spawn" to the DataLoader'
            )
        self._start(self._url)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_store", "_open", "_pid"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start(self._url)
