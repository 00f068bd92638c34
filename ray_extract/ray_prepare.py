"""Prepares parts of the input as Ray tasks, on all CPUs of a cluster.

Plain tasks rather than Ray Data: a part is stored by the task that made it, under the name that its number gives, so
order needs no care and no row comes back; and what is under way is bounded here. Ray Data would hold blocks in its
object store, and would have to be told to keep their order.

A task that dies with its process or node is run again by Ray, which may be: its part is created once.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import socket
from collections.abc import Iterator
from typing import Any

import ray
import ray.exceptions

from ray_extract.dataset.parts import Part, PartWriter, Pool, Setup, check_tokenizer, store_options
from ray_extract.errors import EngineError, RayExtractError
from ray_extract.model import describe_model
from ray_extract.staging import is_url
from ray_extract.store import Store, open_store


@contextlib.contextmanager
def cluster(setup: Setup, store: Store) -> Iterator[Pool]:
    """A pool of the tasks that the connected cluster has CPUs for. See parts.OpenPool."""
    pool = _Tasks(setup, store)
    try:
        yield pool
    finally:
        pool.cancel()


class _Tasks:
    def __init__(self, setup: Setup, store: Store) -> None:
        self._task = ray.remote(_write).options(num_cpus=1, scheduling_strategy="SPREAD")
        self._how = ray.put((setup, store.url, store_options(setup.job, store)))
        self._under_way: set[Any] = set()

    @property
    def slots(self) -> int:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, part: Part) -> "concurrent.futures.Future[None]":
        told: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            ref = self._task.remote(self._how, part)
        except Exception as error:
            if not isinstance(error.__cause__, RecursionError):
                raise
            told.set_exception(error.__cause__)
            return told
        self._under_way.add(ref)
        ref.future().add_done_callback(functools.partial(self._answer, ref, told))
        return told

    def cancel(self) -> None:
        for ref in list(self._under_way):
            ray.cancel(ref)

    def _answer(
        self, ref: Any, told: "concurrent.futures.Future[None]", done: "concurrent.futures.Future[None]"
    ) -> None:
        """Runs in a thread of Ray's."""
        self._under_way.discard(ref)
        error = done.exception()
        if error is None:
            told.set_result(None)
        elif isinstance(error, ray.exceptions.RayTaskError):
            # Ray's stand-in for an error that a task raised carries the error itself.
            told.set_exception(error.cause if isinstance(error.cause, RayExtractError) else error)
        else:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            told.set_exception(
                EngineError(
                    f"a part of the data set was not prepared: {first}; run the same command again to go on with the "
                    "parts that are missing"
                )
            )


def _write(how: tuple[Setup, str, dict[str, Any]], part: Part) -> None:
    """The task."""
    global _writer
    setup, url, options = how
    if _writer is None or _writer[0] != setup.identity:
        shape = describe_model(setup.job.model) if is_url(setup.job.model.path) else setup.shape
        setup = dataclasses.replace(setup, shape=shape)
        check_tokenizer(setup, socket.gethostname())
        _writer = setup.identity, PartWriter(setup, open_store(url, options))
    _writer[1].write(part)


_writer: tuple[str, PartWriter] | None = None  # of the process, which has one task after another
