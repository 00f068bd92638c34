"""The rows of a finished run that are ok, and how their states are reached: by map, by range, or whole shards."""

import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ray_extract.capture.digest import digest_ids, digest_tokens
from ray_extract.errors import ConfigError, NotFound, ShardError, StoreError
from ray_extract.ledger import manifest_columns, read_manifest
from ray_extract.readers.cache import ShardCache
from ray_extract.readers.fetch import fetch_to_memory
from ray_extract.shards.base import Shard
from ray_extract.shards.image import Column
from ray_extract.shards.raw import RawShard
from ray_extract.shards.reader import open_shard
from ray_extract.shards.values import as_tensor
from ray_extract.store import Store, open_store

log = logging.getLogger(__name__)

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

REQUESTS_AT_ONCE = 16
"""Range requests on their way: what waits for the first byte does not use the network."""


class Rows:
    """The rows that are ok, in the order of the data set, numbered 0 .. N-1, and the S shards that hold them.

    Where a shard's bytes come from:

        a local folder          a private memory map
        with cache_dir          a map of a copy there, of the states asked for; fetched when it is opened
        an object store         requests for what is read, as it is read; with `whole`, memory that is filled when the
                                shard is opened

    Args:
        url, states, check, storage_options, cache_dir, cache_bytes: see readers.dataset.HiddenStates.
        whole: fetch whole shards.

    Attributes:
        url: the store's, absolute.
        states: names of the states that are read.
        row: i64 [N], index in the prepared data set.
        n_tokens, kept: i64 [N], prompt tokens and stored ones.
        place: i64 [N], place in the shard.
        shard_of: i64 [N], number of the shard.
        shards: (key, format) of each.
        remote: whether opening a shard takes long enough to do it ahead.
        by_range: whether each read of a raw shard is a request.
        in_memory: whether whole shards are held in memory.

    Raises:
        ConfigError: no such state, no usable row, or half a cache.
        ShardError: no manifest: the run has not finished.
        StoreError: the store failed.
    """

    def __init__(
        self,
        url: str,
        states: Sequence[str] | None,
        check: bool,
        storage_options: Mapping[str, Any] | None,
        cache_dir: str | Path | None,
        cache_bytes: int | None,
        whole: bool,
    ) -> None:
        if (cache_dir is None) != (cache_bytes is None):
            raise ConfigError("cache_dir and cache_bytes go together: a folder, and how many bytes it may take")
        self.cache = ShardCache(cache_dir, cache_bytes) if cache_dir is not None and cache_bytes is not None else None
        self._check = check
        self._whole = whole
        self._options = dict(storage_options or {})
        self._start(url)
        manifest = read_manifest(self._store)
        rows = manifest.filter(pc.equal(manifest.column("status"), "ok")).sort_by("row")
        if not len(rows):
            raise ConfigError(f"{self.url}: none of the manifest's {len(manifest)} rows is ok")

        def numbers(name: str) -> I64:
            return np.asarray(rows.column(name).to_numpy(), dtype=np.int64)

        self.row, self.n_tokens, self.kept = numbers("row"), numbers("n_tokens"), numbers("kept")
        self.place = numbers("row_in_shard")
        self._token_offset = numbers("token_offset")
        self._states_at = np.stack(
            [np.asarray(pc.fill_null(rows.column(f"states_{name}"), 0), np.int64) for name in ("offset", "stride")]
        )
        self._row_id = rows.column("row_id").combine_chunks()
        self._digests = _matrix(self.url, rows.column("digests"))
        keys = rows.column("shard").dictionary_encode().combine_chunks()
        self.shard_of: I64 = np.asarray(keys.indices.to_numpy(), dtype=np.int64)
        first = np.unique(self.shard_of, return_index=True)[1]
        formats = rows.column("format")
        self.shards: list[tuple[str, str]] = [
            (key, formats[at].as_py()) for key, at in zip(keys.dictionary.to_pylist(), first.tolist(), strict=True)
        ]
        self._by_shard = np.argsort(self.shard_of, kind="stable")
        self._ends = np.cumsum(np.bincount(self.shard_of, minlength=len(self.shards)))
        self._stored = manifest_columns(manifest)
        there = {column.name: column for column in self._stored}
        if isinstance(states, str):
            raise ConfigError(f"states = {states!r}: must be a list of names, such as [{states!r}]")
        for name in states or ():
            if name not in there:
                raise ConfigError(f"{self.url}: no state {name!r}; it has {', '.join(there)}")
        self.states = tuple(there) if states is None else tuple(dict.fromkeys(states))
        self.columns: dict[str, Column] = {name: there[name] for name in self.states}

    def _start(self, url: str) -> None:
        self._store: Store = open_store(os.fspath(url), self._options)
        self.url = self._store.url
        self._pid = os.getpid()
        on_requests = self.cache is None and self._store.local_path("") is None
        self.by_range, self.in_memory = on_requests and not self._whole, on_requests and self._whole
        self.remote = self.cache is not None or on_requests

    def __len__(self) -> int:
        return len(self.row)

    def row_id(self, index: int) -> str:
        """Id of a row."""
        return str(self._row_id[index].as_py())

    def row_ids(self, indices: I64) -> list[str]:
        """Ids of many rows."""
        return list(self._row_id.take(pa.array(indices)).to_pylist())

    def members(self, number: int) -> I64:
        """The rows of a shard, ascending; i64."""
        start = int(self._ends[number - 1]) if number else 0
        return self._by_shard[start : int(self._ends[number])]

    def open(self, number: int, stop: threading.Event | None = None) -> Shard:
        """Open a shard and compare it with the manifest; a damaged copy in the cache is fetched again.

        Args:
            number: of the shard.
            stop: gives up a fetch when set.

        Raises:
            ShardError: it is not the shard of the manifest, truncated or altered.
            StoreError: the store failed.
            fetch.Stopped: it was stopped.
        """
        store = self._here()
        key, format = self.shards[number]
        if self.cache is None:
            if self.in_memory:
                shard = fetch_to_memory(store, key, format, self.states, stop)
            else:
                shard = open_shard(store, key, format)
            self._agree(number, shard)
            return shard
        shard = self.cache.open(store, key, format, self.states, stop=stop)
        try:
            self._agree(number, shard)
        except ShardError as error:
            shard = self._again(number, error, stop)
        return shard

    def peek(self, number: int) -> Shard:
        """Open a shard for its row table alone: nothing is fetched whole. Raises as open does."""
        shard = open_shard(self._here(), *self.shards[number])
        self._agree(number, shard)
        return shard

    def _again(self, number: int, error: ShardError, stop: threading.Event | None = None) -> Shard:
        """Fetch a shard anew whose copy in the cache is wrong."""
        assert self.cache is not None
        log.warning("the copy in %s is damaged, and fetched again: %s", self.cache.folder, error)
        shard = self.cache.open(self._here(), *self.shards[number], self.states, again=True, stop=stop)
        self._agree(number, shard)
        return shard

    def stored(self, index: int, name: str, open: Callable[[int], Shard]) -> U8:
        """One state of one row, checked if so asked: one request where a raw shard is read by ranges.

        Args:
            index: the row.
            name: of the state.
            open: opens a shard by its number, where it is read otherwise.

        Returns:
            The stored bytes, u8 [kept, bytes per token].

        Raises:
            ShardError: truncated, or, with check, not what was captured.
            StoreError: the store failed.
        """
        number, kept = int(self.shard_of[index]), int(self.kept[index])
        key, format = self.shards[number]
        if not self.by_range or format != "raw" or not kept:
            return self.read([index], [open(number)], [name])[0][1][name]
        column = self.columns[name]
        nth, width = self._stored.index(column), column.token_bytes
        offset, stride = self._states_at[:, index].tolist()
        start = offset + nth * stride + int(self._token_offset[index]) * width
        store, where = self._here(), f"{self.url}/{key}"
        try:
            part = store.get_view(key, start, kept * width)
        except NotFound:
            raise
        except StoreError:
            info = store.head(key)
            if info is not None and info.size < start + kept * width:
                raise ShardError(
                    f"{where}: truncated: {info.size} bytes, and a row ends at {start + kept * width}"
                ) from None
            raise
        stored = np.frombuffer(part, np.uint8).reshape(kept, width)
        if self._check and digest_tokens(stored) != self._digests[index, 1 + nth]:
            raise ShardError(f"{where}: row {int(self.row[index])}: {name} are not what was captured")
        return stored

    def read(
        self, indices: Sequence[int], shards: Sequence[Shard], states: Sequence[str]
    ) -> list[tuple[Shard, dict[str, U8]]]:
        """States of rows, checked if so asked.

        Args:
            indices: the rows.
            shards: the open shard of each.
            states: their names.

        Returns:
            For each row its shard (another one, if the copy in the cache turned out to be damaged), and the stored
            bytes of each state, u8 [kept, bytes per token].

        Raises:
            ShardError: with check, a row's bytes are not what was captured.
            StoreError: the store failed.
        """
        places = self.place[np.asarray(indices, dtype=np.int64)].tolist()
        parts = self.map(
            shards,
            [
                functools.partial(shard.state, name, place)
                for shard, place in zip(shards, places, strict=True)
                for name in states
            ],
        )
        width = len(states)
        found: list[tuple[Shard, dict[str, U8]]] = []
        for i, (index, shard) in enumerate(zip(indices, shards, strict=True)):
            stored = dict(zip(states, parts[i * width : (i + 1) * width], strict=True))
            found.append(self._checked(index, shard, stored) if self._check else (shard, stored))
        return found

    def map(self, shards: Sequence[Shard], reads: Sequence[Callable[[], U8]]) -> list[U8]:
        """Run reads of these shards, several at once where each is a request."""
        if self.by_range and len(reads) > 1 and all(isinstance(shard, RawShard) for shard in shards):
            return list(self._pool.map(lambda read: read(), reads))
        return [read() for read in reads]

    def head(self, index: int, shard: Shard) -> dict[str, Any]:
        """Everything of an item but its states; see readers.dataset.HiddenStates."""
        place = int(self.place[index])
        return {
            "row": int(self.row[index]),
            "row_id": self.row_id(index),
            "input_ids": torch.from_numpy(shard.input_ids(place).astype(np.int64)),
            "loss_mask": torch.from_numpy(shard.loss_mask(place).copy()),
            "positions": torch.from_numpy(shard.positions(place)),
        }

    def items(self, indices: Sequence[int], shards: Sequence[Shard]) -> list[dict[str, Any]]:
        """Items, see readers.dataset.HiddenStates; raises as read does."""
        return [
            self.head(index, shard) | {name: self.tensor(name, part) for name, part in stored.items()}
            for index, (shard, stored) in zip(indices, self.read(indices, shards, self.states), strict=True)
        ]

    def tensor(self, name: str, stored: U8) -> torch.Tensor:
        """Stored bytes of a state as a tensor [kept, H]; see as_tensor."""
        return as_tensor(stored, self.columns[name].dtype)

    def _checked(self, index: int, shard: Shard, stored: dict[str, U8]) -> tuple[Shard, dict[str, U8]]:
        place = int(self.place[index])
        error = self._difference(index, shard, stored)
        number = int(self.shard_of[index])
        # The copy may have been fetched again for another of its rows, by us or by another process.
        for again in (self.open, functools.partial(self._again, error=error)) if error and self.cache else ():
            shard = again(number)
            stored = {name: shard.state(name, place) for name in stored}
            error = self._difference(index, shard, stored)
            if error is None:
                break
        if error is not None:
            raise error
        return shard, stored

    def _difference(self, index: int, shard: Shard, stored: dict[str, U8]) -> ShardError | None:
        place = int(self.place[index])
        sealed = shard.digest[place].tolist()
        wrong = [] if digest_ids(shard.input_ids(place)) == sealed[0] else ["input_ids"]
        for digest, column in zip(sealed[1:], shard.columns, strict=True):
            if column.name in stored and digest_tokens(stored[column.name]) != digest:
                wrong.append(column.name)
        if not wrong:
            return None
        where = f"{shard.where}: row {int(self.row[index])}"
        return ShardError(f"{where}: {', '.join(wrong)} are not what was captured")

    def _agree(self, number: int, shard: Shard) -> None:
        """Raise ShardError unless the shard's row table says of its rows what the manifest says."""
        if shard.columns != self._stored:
            raise ShardError(
                f"{shard.where}: its states are {_shown(shard.columns)}; the manifest says {_shown(self._stored)}"
            )
        members = self.members(number)
        place = self.place[members]

        def at(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            """Values of the rows' places; of one beyond the end, whatever: `row` below says so."""
            return values[np.minimum(place, shard.rows - 1)] if shard.rows else np.full(len(place), -1)

        wrong = (place >= shard.rows) | (at(shard.table.row) != self.row[members])
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ShardError(f"{shard.where}: line {place[i]} is not row {self.row[members[i]]}, as the manifest says")
        for what, differs in (
            ("digests", _differs(at(shard.digest), self._digests[members])),
            ("n_tokens", at(np.diff(shard.table.cu_seqlens)) != self.n_tokens[members]),
            ("kept", at(np.diff(shard.table.cu_kept)) != self.kept[members]),
        ):
            if differs.any():
                row = self.row[members[int(np.argmax(differs))]]
                raise ShardError(f"{shard.where}: row {row}: the manifest's {what} are not what was captured")

    @contextlib.contextmanager
    def mending(self) -> Iterator[None]:
        """Say of a damaged or missing shard what to do about it."""
        try:
            yield
        except (ShardError, NotFound) as error:
            raise type(error)(
                f"{error}; to extract its rows again, delete the unit's file in commits/ and run the same command; "
                f"`ray-extract verify {self.url}` finds all such shards"
            ) from None

    def renew(self) -> bool:
        """Open the store anew in a forked process; returns whether this is one. Raises ConfigError on object stores."""
        if os.getpid() == self._pid:
            return False
        # The clients of object stores run on threads, which a fork does not copy: a read would hang for ever.
        if self._store.local_path("") is None:
            raise ConfigError(
                f"{self.url}: an object store cannot be read in a forked worker; "
                'pass multiprocessing_context="spawn" to the DataLoader'
            )
        self._start(self.url)
        self.__dict__.pop("_pool", None)
        return True

    def _here(self) -> Store:
        self.renew()
        return self._store

    @functools.cached_property
    def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="ray_extract-read")

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_store", "_pid", "_pool"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start(self.url)


def _shown(columns: Sequence[Column]) -> str:
    return ", ".join(f"{c.name} ({c.dtype} x {c.width})" for c in columns)


def _matrix(url: str, digests: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """A column of lists of one length as u64 [N, length]."""
    lengths = pc.unique(pc.list_value_length(digests)).to_pylist()
    if len(lengths) != 1 or lengths[0] is None:
        raise ShardError(f"{url}: the manifest has rows of {lengths} digests; they should be alike")
    return np.asarray(pc.list_flatten(digests).to_numpy(), dtype=np.uint64).reshape(-1, lengths[0])


def _differs(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows of two matrices differ; all, if their widths do."""
    if found.shape != expected.shape:
        return np.ones(len(expected), np.bool_)
    return np.asarray((found != expected).any(axis=1))
