"""A fleet without Ray, processes or shards, for the driver's loop: engines that take as long as they are told to.

Engines        what they do; in the time of whoever asks
VirtualTime    time that passes only when everybody waits, and the driver's queue in it; deterministic
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import queue
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

from ray_extract import driver
from ray_extract.config import Job
from ray_extract.errors import RayExtractError
from ray_extract.fleet import Call, Death, Event, Node
from ray_extract.leases import Lease
from ray_extract.progress import Snapshot
from ray_extract.records import Receipt, Unit
from ray_extract.tally import Account

STATES = 4
NEVER = float("inf")


@dataclasses.dataclass
class Engine:
    """An engine, whichever worker it is in.

    Args:
        tokens_per_s: it runs one unit after the other.
        flush_s: from a unit's last token to its receipt's being with the driver; other units run meanwhile.
        start_s: until it is ready, once it has its place.
        wait_s: until it has that.
        copy_s: of start_s, in which it copies its model.
    """

    tokens_per_s: float = 100.0
    flush_s: float = 0.0
    start_s: float = 0.0
    wait_s: float = 0.0
    copy_s: float = 0.0
    free_at: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0  # between units
    units: int = 0


Answer = tuple[float, RayExtractError | Death | None]
"""Seconds until a call is answered, and with which error; None for a value."""


class Engines:
    """See fleet.Fleet.

    Args:
        engines: in the order in which they start; of a worker that takes another one's place, the same engine.
        clock: the time.
        later: calls a function after so many seconds.
        post: takes the events.
        change: may give another answer to a call, from its engine, the call and the answer that it would have.
        free: of each resource on the only node.
    """

    need = types.MappingProxyType({"GPU": 8.0, "CPU": 1.0})

    def __init__(
        self,
        engines: Sequence[Engine],
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], None],
        post: Callable[[Event], None],
        change: Callable[[int, Call | Lease, Answer], Answer] = lambda engine, call, answer: answer,
    ) -> None:
        self._engines, self._clock, self._later, self._post, self._change = engines, clock, later, post, change
        self._unused = list(reversed(range(len(engines))))
        self._workers: dict[int, int] = {}  # the engine of each
        self._placed: dict[int, float] = {}  # when each has its place
        self.attempts: list[tuple[int, str, str]] = []  # engine, unit and attempt of each lease
        self.calls: Counter[str] = Counter()

    def start(self, worker: int) -> None:
        """See fleet.Fleet."""
        engine = self._workers[worker] = self._unused.pop()
        self._engines[engine].free_at = 0.0
        start_s, wait_s = self._engines[engine].start_s, self._engines[engine].wait_s
        self._placed[worker] = self._clock() + wait_s
        info = {"version": "simulated", "node": "node", "start_s": start_s}
        self._answer(worker, Call.START, (wait_s + start_s, None), info)

    def extract(self, worker: int, lease: Lease, attempt: str) -> None:
        """See fleet.Fleet."""
        number, now = self._workers[worker], self._clock()
        engine, unit = self._engines[number], lease.unit
        self.attempts.append((number, unit.unit, attempt))
        if engine.free_at:
            engine.idle_s += max(0.0, now - engine.free_at)
        took = unit.tokens / engine.tokens_per_s
        engine.free_at = max(now, engine.free_at) + took
        engine.busy_s += took
        engine.units += 1
        self._answer(worker, lease, (engine.free_at + engine.flush_s - now, None), make_receipt(unit, attempt))

    def poll(self, worker: int) -> None:
        """See fleet.Fleet."""
        seconds = max(0.0, self._placed[worker] - self._clock())
        self._answer(worker, Call.POLL, (seconds, None), self._counters(worker, seconds))

    def waiting(self) -> set[int]:
        """See fleet.Fleet."""
        return {worker for worker in self._workers if self._placed[worker] > self._clock()}

    def stop(self, worker: int) -> None:
        """See fleet.Fleet."""
        self._answer(worker, Call.STOP, (0.0, None), self._counters(worker, 0.0))

    def kill(self, worker: int) -> None:
        """See fleet.Fleet."""
        self._unused.append(self._workers.pop(worker))

    def nodes(self) -> list[Node]:
        """One node, and no room in it."""
        return [Node("node", {"GPU": 8.0, "CPU": 4.0}, {"GPU": 0.0, "CPU": 3.0})]

    def _counters(self, worker: int, seconds: float) -> dict[str, int]:
        copying = self._clock() + seconds < self._placed[worker] + self._engines[self._workers[worker]].copy_s
        return {"tokens_captured": 0, "engine_starts": not copying, "arena_used": 0, "copying": copying}

    def _answer(self, worker: int, call: Call | Lease, answer: Answer, value: Any) -> None:
        self.calls["lease" if isinstance(call, Lease) else call.name] += 1
        seconds, error = self._change(self._workers[worker], call, answer)
        if seconds < NEVER:
            event = Event(worker, call, None if error else value, error)
            self._later(seconds, functools.partial(self._post, event))


@functools.lru_cache(64)
def _digests(rows: int) -> bytes:
    return bytes(8 * rows * (1 + STATES))


def make_receipt(unit: Unit, attempt: str) -> Receipt:
    """Of an attempt at which no row failed; there is no shard."""
    return Receipt(
        unit=unit.unit,
        attempt=attempt,
        key=f"shards/{unit.unit}.{attempt}.safetensors",
        format="raw",
        size=unit.nbytes,
        sha256="0" * 64,
        rows=unit.rows,
        tokens=unit.tokens,
        kept=unit.kept,
        failures=(),
        digests=_digests(unit.rows),
        environment={"ray_extract": "0.1.0", "node": "node", "engine": "simulated"},
        seconds={"read": 0.0, "wait": 0.0, "extract": 1.0, "seal": 0.1, "flush": 0.5},
    )


def make_units(*tokens: int) -> list[Unit]:
    """Units of so many tokens and one row each."""
    return [Unit(f"u{i:08d}", i, i + 1, 1, count, count, 8 * count) for i, count in enumerate(tokens)]


def make_job(engines: int, engine: Mapping[str, Any] = types.MappingProxyType({}), **run: Any) -> Job:
    """A job of so many engines.

    Args:
        engines: how many.
        engine, run: fields of these sections.
    """
    return Job.model_validate(
        {
            "model": {"path": "made-up"},
            "dataset": {"paths": ["made-up"]},
            "engine": {"kind": "simulated", "device": "cpu", "count": engines, **engine},
            "output": {"url": "made-up", "format": "raw"},
            "run": run,
        }
    )


def make_setup(job: Job, most: int) -> Any:
    """What the driver reads of a WorkerSetup; an arena holds `most` units."""
    run = job.run.model_copy(update={"units_in_flight": most})
    made = job.model_copy(update={"run": run}).model_dump(mode="json")
    return types.SimpleNamespace(extractor=types.SimpleNamespace(job=made, arena_bytes=0), rows={})


def at_once(action: Callable[..., Any], *args: Any) -> Future[Any]:
    """As ThreadPoolExecutor.submit, but it is done when this returns."""
    future: Future[Any] = Future()
    try:
        future.set_result(action(*args))
    except Exception as error:
        future.set_exception(error)
    return future


class VirtualTime:
    """Time that passes when the driver waits for its queue. Events of one moment come in their order."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._queue: list[Any] = []

    def monotonic(self) -> float:
        """As of the module time."""
        return self.now

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call a function in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._count), act))

    def put(self, item: Any) -> None:
        """As of SimpleQueue."""
        self._queue.append(item)

    def get(self, timeout: float) -> Any:
        """As of SimpleQueue."""
        end = self.now + timeout
        while not self._queue:
            if not self._events or self._events[0][0] > end:
                self.now = end
                raise queue.Empty
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self._queue.pop(0)

    def submit(self, action: Callable[..., Any], *args: Any) -> Future[Any]:
        """As of ThreadPoolExecutor; takes no time."""
        return at_once(action, *args)

    def shutdown(self, wait: bool) -> None:
        """As of ThreadPoolExecutor."""

    @contextlib.contextmanager
    def in_driver(self) -> Iterator[None]:
        """In place of the driver's clock, queue and threads."""
        with contextlib.ExitStack() as stack:
            for name, value in (
                ("time", self),
                ("queue", types.SimpleNamespace(SimpleQueue=lambda: self, Empty=queue.Empty)),
                ("ThreadPoolExecutor", lambda *_, **__: self),
            ):
                stack.enter_context(mock.patch.object(driver, name, value))
            yield


class Commits:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.store = types.SimpleNamespace(put=lambda *_, **__: None)
        self.receipts: dict[str, Receipt] = {}

    def commit(self, receipt: Receipt) -> bool:
        """As of Ledger; a second one is a mistake."""
        assert receipt.unit not in self.receipts
        self.receipts[receipt.unit] = receipt
        return True


@dataclasses.dataclass
class Drive:
    """A drive in virtual time, and what came of it.

    Args:
        units, engines, change: see Engines.
        most: units that an arena holds.
        run, engine: fields of the job's sections.
        report: see driver.Driver.
    """

    units: list[Unit]
    engines: list[Engine]
    change: Callable[[int, Call | Lease, Answer], Answer] = lambda engine, call, answer: answer
    most: int = 2
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    report: Callable[[Snapshot, Account], None] = lambda snapshot, account: None

    def __post_init__(self) -> None:
        self.time, self.commits = VirtualTime(), Commits()
        job = make_job(len(self.engines), self.engine, **self.run)
        tokens = sum(unit.tokens for unit in self.units)
        with self.time.in_driver():
            self.driver = driver.Driver(
                job,
                make_setup(job, self.most),
                self.commits,  # type: ignore[arg-type]
                self.units,
                self._launch,
                total_units=len(self.units),
                total_tokens=tokens,
                done_tokens=0,
                report=self.report,
            )

    def _launch(self, post: Callable[[Event], None]) -> Engines:
        self.fleet = Engines(self.engines, self.time.monotonic, self.time.later, post, self.change)
        return self.fleet

    def __call__(self) -> Account:
        """Run it; no unit may be given up."""
        with self.time.in_driver():
            given_up = self.driver.run()
            assert not given_up, given_up
            return self.driver.account()
