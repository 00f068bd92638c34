"""The input in parts: each a range of its records, tokenized by itself and stored once, wherever and whenever.

Where a part begins and ends follows from the records alone, and so does every byte of it. So it does not matter how
many processes or nodes prepare parts, nor how often they are killed: what is stored already is not prepared again.

Only one process reads the input. A part says by what identity it was prepared, see `identity_of`; one that another data
set, configuration or tokenizer made is refused, whatever its name.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from ray_extract import layout
from ray_extract.config import Job
from ray_extract.dataset.arrange import arrange, duplicates
from ray_extract.dataset.chat import template_fingerprint
from ray_extract.dataset.prepare import Preparer, token_limit
from ray_extract.dataset.prepared import PreparedRows, RowIndex, part_index, put_part, sum_up, write_rows
from ray_extract.dataset.source import SourceRecord, read_records, source_fingerprint
from ray_extract.errors import ConfigError, DatasetError
from ray_extract.model import ModelShape
from ray_extract.store import Store, open_store

PART_RECORDS = 1 << 16
PART_CHARS = 4 << 20
"""About a million tokens: seconds of a process's work, and what a worker reads for the rows of a unit."""

_AHEAD_CHARS = 512 << 20  # in parts that are read and not stored yet
_ID_CHARS = 4  # what a ready token id counts, so that parts of them have as many tokens
_PACKAGES = ("transformers", "tokenizers", "jinja2")
_VERSION = 1  # of what is stored: raise it when the same records would give other rows


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Consecutive records of the input.

    Args:
        number: of the part, from 0.
        first: number of its first record, from 0.
        records: at least one.
        chars: about how many characters they have.
    """

    number: int
    first: int
    records: list[SourceRecord]
    chars: int


def cut(records: Iterable[SourceRecord], most: int, most_chars: int) -> Iterator[Part]:
    """Cut the input into parts of at most `most` records and, if they have more than one, `most_chars` characters."""
    number = first = chars = 0
    held: list[SourceRecord] = []
    for record in records:
        size = _chars(record.value)
        if held and (len(held) >= most or chars + size > most_chars):
            yield Part(number, first, held, chars)
            number, first, chars, held = number + 1, first + len(held), 0, []
        held.append(record)
        chars += size
    if held:
        yield Part(number, first, held, chars)


def _chars(value: Any) -> int:
    """About how many characters a record has; it may be nested deeper than Python calls."""
    chars, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, dict):
            chars += sum(map(len, item))
            todo += item.values()
        elif isinstance(item, np.ndarray) or (isinstance(item, list) and item and isinstance(item[0], int)):
            chars += _ID_CHARS * len(item)
        elif isinstance(item, list):
            todo += item
        else:
            chars += 1
    return chars


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What parts are prepared by, wherever that is.

    Args:
        job, shape: what to prepare.
        identity: of the preparation.
        tokenizer: what `tokenizer_of` found where the input is read.
    """

    job: Job
    shape: ModelShape
    identity: str
    tokenizer: Mapping[str, str]

    def key(self, part: int) -> str:
        """Where a part is stored."""
        return (layout.input_key if _arranged(self.job) else layout.rows_key)(part)


def tokenizer_of(job: Job, shape: ModelShape) -> dict[str, str]:
    """What turns records into tokens on this machine: files by their hash, packages by their versions."""
    found = {"files": template_fingerprint(job.model, job.dataset, shape.path)}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def identity_of(job: Job, shape: ModelShape, sources: Sequence[Mapping[str, Any]], tokenizer: Mapping[str, str]) -> str:
    """Hex SHA-256 of all that decides the rows of parts.

    Args:
        job, shape: what to prepare.
        sources: see source.source_fingerprint.
        tokenizer: see tokenizer_of.
    """
    elsewhere = {"paths", "format", "chat_template", "storage_options", "processes", "dedup", "shuffle"}
    facts = {
        "version": _VERSION,
        "sources": [dict(source) for source in sources],
        "tokenizer": dict(tokenizer),
        "dataset": job.dataset.model_dump(mode="json", exclude=elsewhere),
        "limit": token_limit(job, shape),
        "vocabulary": shape.vocab_size,
        "keep": job.capture.keep,
        "arranged": _arranged(job),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class PartWriter:
    """Prepares parts and stores them.

    Args:
        setup: what by.
        store: where to.
    """

    def __init__(self, setup: Setup, store: Store) -> None:
        self._setup, self._store = setup, store
        self._prepare = Preparer(setup.job, setup.shape)

    def write(self, part: Part) -> None:
        """Prepare a part and store it, create-if-absent; the same one in its place is as good.

        Raises:
            ConfigError, DatasetError: the data set as a whole cannot be prepared.
            PlanError: another part is there.
            StoreError: writing failed.
        """
        rows = [self._prepare(part.first + place, record) for place, record in enumerate(part.records)]
        put_part(self._store, self._setup.key(part.number), rows, self._setup.job.capture.keep, self._setup.identity)


class Pool(Protocol):
    """Whoever prepares parts."""

    @property
    def slots(self) -> int:
        """Parts that are prepared at once; 0 if each is stored when submit returns."""
        ...

    def submit(self, part: Part) -> "concurrent.futures.Future[None]":
        """Prepare and store a part. Of the future's errors, RecursionError says that the part could not be sent."""
        ...


OpenPool = Callable[[Setup, Store], AbstractContextManager[Pool]]
"""Makes a pool for a preparation and the store it goes to; what is not done when it is closed is left."""


def prepare_rows(
    store: Store, job: Job, shape: ModelShape, identity: str | None = None, pool: OpenPool | None = None
) -> RowIndex:
    """Prepare what of a data set is not stored yet, and put its rows in their order, see arrange.

    Args:
        store: where to.
        job, shape: what to prepare.
        identity: see identity_of; found out if absent, for which every byte of the input is read.
        pool: who prepares the parts; absent, `dataset.processes` of this machine.

    Raises:
        ConfigError, DatasetError: the data set as a whole cannot be prepared.
        PlanError: parts of another data set, configuration or tokenizer are there.
        StoreError: reading or writing failed.
    """
    tokenizer = tokenizer_of(job, shape)
    if identity is None:
        identity = identity_of(job, shape, source_fingerprint(job.dataset), tokenizer)
    setup = Setup(job, shape, identity, tokenizer)
    with (pool or here)(setup, store) as opened:
        count = _write_parts(store, setup, opened)
    index = sum_up(store, map(setup.key, range(count)), identity)
    if not _arranged(job):
        return index
    rows = PreparedRows(store, index, setup.key)
    again = duplicates(rows.ids(), index.rows) if job.dataset.dedup else None
    arranged = write_rows(store, arrange(rows, job.dataset, again), keep=job.capture.keep)
    examples = dict(index.examples)  # the first ones of the input, whatever the order now
    if again is not None and again.any():
        first = int(again.argmax())
        examples["duplicate"] = rows.read(first, first + 1)[0].source
    return dataclasses.replace(arranged, examples=dict(sorted(examples.items())))


def discard_inputs(store: Store, keys: Iterable[str]) -> None:
    """Delete those of these objects that are parts whose rows were put in another order, and stored so."""
    for key in keys:
        if layout.is_input(key):
            store.delete(key)


def _arranged(job: Job) -> bool:
    return job.dataset.dedup or job.dataset.shuffle


def _write_parts(store: Store, setup: Setup, pool: Pool) -> int:
    """Returns the number of parts, all of them stored."""
    there = {item.key for item in store.list("plan/")}
    local = PartWriter(setup, store)
    ahead: collections.deque[tuple[Part, concurrent.futures.Future[None]]] = collections.deque()
    count = chars = 0

    def settle() -> int:
        part, future = ahead.popleft()
        try:
            future.result()
        except RecursionError:  # what is sent to a process may be less deep than JSON
            local.write(part)
        return part.chars

    # In order, so that of several errors the same one is told each time.
    for part in cut(read_records(setup.job.dataset), PART_RECORDS, PART_CHARS):
        count += 1
        key = setup.key(part.number)
        if key in there:
            part_index(store, key, setup.identity, (part.first, len(part.records)))
            continue
        ahead.append((part, pool.submit(part)))
        chars += part.chars
        while ahead and (len(ahead) > 2 * pool.slots or chars > _AHEAD_CHARS):
            chars -= settle()
    while ahead:
        settle()
    return count


@contextlib.contextmanager
def here(setup: Setup, store: Store) -> Iterator[Pool]:
    """A pool of `dataset.processes` processes of this machine; for one, this one does it."""
    processes = setup.job.dataset.processes
    count = len(os.sched_getaffinity(0)) if processes == "cluster" else processes or 1
    if count == 1:
        yield _ThisProcess(setup, store)
        return
    # Not forked, since threads of Arrow and fsspec run here.
    executor = concurrent.futures.ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), _begin, (setup, store.url, store_options(setup.job, store))
    )
    try:
        yield _Processes(executor, count)
    except concurrent.futures.BrokenExecutor:
        raise DatasetError(
            f"dataset.processes = {count}: one of them died, perhaps for want of memory; ask for fewer, and run the "
            "same command again to go on with the parts that are missing"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def store_options(job: Job, store: Store) -> dict[str, Any]:
    """What another process opens this store with."""
    return {} if store.local_path("") is not None else dict(job.output.storage_options)


class _ThisProcess:
    slots = 0

    def __init__(self, setup: Setup, store: Store) -> None:
        self._writer = PartWriter(setup, store)

    def submit(self, part: Part) -> "concurrent.futures.Future[None]":
        self._writer.write(part)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        return done


@dataclasses.dataclass(frozen=True, slots=True)
class _Processes:
    executor: concurrent.futures.ProcessPoolExecutor
    slots: int

    def submit(self, part: Part) -> "concurrent.futures.Future[None]":
        return self.executor.submit(_write, part)


_writer: PartWriter  # of a process of the pool


def _begin(setup: Setup, url: str, options: dict[str, Any]) -> None:
    global _writer
    # Else it would wait for work for ever, were the driver killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _writer = PartWriter(setup, open_store(url, options))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write(part: Part) -> None:
    _writer.write(part)


def check_tokenizer(setup: Setup, where: str) -> None:
    """Whether this machine turns records into tokens as the one that reads the input.

    Args:
        setup: of the preparation, with this machine's folder of the model.
        where: the machine's name.

    Raises:
        ConfigError: it does not.
    """
    found = tokenizer_of(setup.job, setup.shape)
    names = sorted(n for n in {*found, *setup.tokenizer} if found.get(n) != setup.tokenizer.get(n))
    if names:
        shown = ", ".join(
            "other files of the tokenizer or template"
            if name == "files"
            else f"{name} {found.get(name)}, the driver {setup.tokenizer.get(name)}"
            for name in names
        )
        raise ConfigError(
            f"dataset.processes: node {where} has {shown}, so its rows might differ; make them the same on all nodes, "
            "or set dataset.processes = 1 to tokenize on the driver's node alone"
        )
