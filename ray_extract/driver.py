"""The driver: leases units to workers, commits what they hand back, replaces what dies.

One thread decides, and acts on one event at a time: an answer of a worker, a commit that is done. What it does for an
event does not grow with the number of workers or units.
"""

import contextlib
import dataclasses
import functools
import heapq
import json
import logging
import queue
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

from ray_extract import logs
from ray_extract.config import Job
from ray_extract.dataset.prepared import PreparedRows, RowIndex, RowLength
from ray_extract.errors import (
    ArenaError,
    CaptureRefused,
    ConfigError,
    Drained,
    EngineError,
    RayExtractError,
    StoreError,
    Verdict,
)
from ray_extract.fleet import Call, Death, Event, Launch, shortage
from ray_extract.layout import PROGRESS_KEY, drive_key
from ray_extract.leases import Depth, Ending, Fate, Lease, Leases, Rate
from ray_extract.ledger import Ledger
from ray_extract.plan import halve, store_parts
from ray_extract.progress import Snapshot
from ray_extract.records import Receipt, Split, Unit
from ray_extract.starts import Start, Starts
from ray_extract.store import outlast
from ray_extract.tally import Account, Cause, Tally
from ray_extract.worker import WorkerSetup

logger = logging.getLogger(__name__)

_COMMITTERS = 32  # commits under way at once; one is a small PUT, of 30 ms and more on S3
# Workers of each engine that may die before another row is extracted. A row that kills workers takes max_attempts and
# then one for each halving of its unit; more is no row's fault.
_WORKER_DEATHS_WITHOUT_A_ROW = 30
_CAPACITY_NOTICE_S = 30.0
_STOP_TIMEOUT_S = 30.0
_STOP_STARTING_S = 3.0  # for workers that are not ready: one that waits for capacity never answers
_LATE_START_S = 60.0  # beyond engine.start_timeout_s, at which a worker itself says why its engine did not start
_RATE_WINDOW_S = 60.0  # a forward pass on a CPU takes longer than a progress line is apart
_LOOK_S = 1.0  # between looks for stragglers
_IDLE_S = 0.5  # between looks at the clock


@dataclasses.dataclass(slots=True)
class _Worker:
    """A worker as the driver sees it.

    Args:
        number: of this worker; one that takes its place gets another.
        engine: which of the engines it is, from 0.
        asked: when it was asked for.
        starts: while it is not ready, since when it may be starting its engine.
        useful: whether it extracted a unit.
        polled: when it was asked for its counters and has not answered yet; else None.
    """

    number: int
    engine: int
    asked: float
    starts: float
    ready: bool = False
    useful: bool = False
    leases: list[Lease] = dataclasses.field(default_factory=list)
    rate: Rate = dataclasses.field(default_factory=Rate)
    counters: dict[str, Any] = dataclasses.field(default_factory=dict)
    polled: float | None = None

    @property
    def engine_starts(self) -> int:
        """How often it started its engine, a first time that is still to come included."""
        return max(1, int(self.counters.get("engine_starts", 1)))


class Driver:
    """Drives one run.

    Args:
        job: the job.
        setup: what workers need.
        ledger: where commits go.
        todo: units without a commit.
        launch: makes the fleet of workers.
        total_units, total_tokens, done_tokens: of the whole run, for progress.
        report: is told of the drive every run.progress_s, and when it ends; metrics.DriveMetrics.
    """

    def __init__(
        self,
        job: Job,
        setup: WorkerSetup,
        ledger: Ledger,
        todo: Sequence[Unit],
        launch: Launch,
        *,
        total_units: int,
        total_tokens: int,
        done_tokens: int,
        report: Callable[[Snapshot, Account], None] = lambda snapshot, account: None,
    ) -> None:
        self._job, self._setup, self._ledger = job, setup, ledger
        self._leases = Leases(todo, job.run.max_attempts)
        # A worker's own job says what its arena holds, see run.images_at_once.
        self._depth = Depth(job.run.units_in_flight, setup.extractor.job["run"]["units_in_flight"])
        self._report = report
        self._nonce = secrets.token_hex(4)
        self.tally = Tally(time.monotonic())
        self._engines = min(job.engine.count, max(1, len(todo)))
        self._starts = Starts(self._engines)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._fleet = launch(lambda event: self._inbox.put(functools.partial(self._settle, event)))
        self._workers: dict[int, _Worker] = {}
        self._made = 0  # workers, so far
        self._serving = 0  # workers that are ready
        self._later: list[tuple[float, int]] = []  # engines that start again, and when; a heap
        self._hungry: dict[int, None] = {}  # workers for which nothing was left, the longest waiting first
        self._committer = ThreadPoolExecutor(_COMMITTERS, thread_name_prefix="commit")
        self._drain = threading.Event()
        self._drain_since = 0.0
        self._ending = threading.Event()
        self._view: Future[None] | None = None  # progress on its way to the store
        self._failure: RayExtractError | None = None
        self._deaths = 0  # of workers since a row was extracted
        self._gone_tokens = 0  # captured by workers that are gone
        self._gone_starts = 0
        self._total_units, self._total_tokens = total_units, total_tokens
        self._before_units, self._before_tokens = total_units - len(todo), done_tokens
        self._committed_tokens = 0
        self._last_tick = 0.0
        self._last_look = 0.0
        self._history: deque[tuple[float, int]] = deque()  # (time, tokens captured) of the last _RATE_WINDOW_S
        self._notice = 0.0

    def run(self) -> dict[str, str]:
        """Extract and commit every unit; returns those without a commit, and why.

        Raises:
            Drained: asked to stop; everything finished is committed.
            RayExtractError: an error whose verdict is stop.
        """
        state = "failed"
        try:
            with self._signals():
                for engine in range(self._engines):
                    self._start(engine)
                while not self._over():
                    self._step()
            state = self._end_state()
        finally:
            self._ending.set()
            self._stop_workers()
            self._committer.shutdown(wait=True)
            self.tally.ended(time.monotonic())
            self._write_view(*self._views(state))
        if self._failure is not None:
            raise self._failure
        if self._drain.is_set() and not self._leases.finished:
            raise Drained(
                f"stopped on request with {self._before_units + self._leases.done} of {self._total_units} units "
                "committed; run the same command again to go on"
            )
        return dict(self._leases.given_up)

    def account(self) -> Account:
        """What this drive did, so far."""
        return self.tally.account(time.monotonic())

    def _end_state(self) -> str:
        if self._failure is not None or self._leases.given_up:
            return "failed"
        return "done" if self._leases.finished else "drained"

    def _over(self) -> bool:
        if self._leases.finished:
            return True
        if self._leasing:
            return False
        return not self._leases.leased or time.monotonic() - self._drain_since > self._job.run.drain_s

    @property
    def _leasing(self) -> bool:
        """Whether workers get units, and new workers are made."""
        return self._failure is None and not self._drain.is_set() and not self._ending.is_set()

    def _step(self) -> None:
        self._turn(_IDLE_S)
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            self._start(heapq.heappop(self._later)[1])
        if now - self._last_look >= _LOOK_S:
            self._last_look = now
            self._lease_stragglers(now)
        self._tick(now)

    def _turn(self, timeout_s: float) -> bool:
        """Act on the next event, if one comes in time."""
        try:
            act = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return False
        act()
        return True

    # Leases

    def _feed(self, worker: _Worker) -> None:
        """Give a worker what it has room for."""
        while self._leasing and self._depth.room(worker.leases, worker.rate.tokens_per_s):
            lease = self._leases.take(worker.leases, time.monotonic())
            if lease is None:
                self._hungry[worker.number] = None
                return
            self._extract(worker, lease)
        self._hungry.pop(worker.number, None)

    def _feed_hungry(self) -> None:
        """Units came back: some worker may have been waiting for them."""
        for number in list(self._hungry):
            if not self._leases.pending:
                return
            self._feed(self._workers[number])

    def _extract(self, worker: _Worker, lease: Lease) -> None:
        worker.leases.append(lease)
        self.tally.leased(lease.unit.unit, lease.attempt, time.monotonic())
        self._fleet.extract(worker.number, lease, f"{self._nonce}-{lease.attempt}")

    def _lease_stragglers(self, now: float) -> None:
        if not self._leasing:
            return
        idle = [worker for number in self._hungry if not (worker := self._workers[number]).leases]
        for worker, lease in zip(idle, self._leases.take_stragglers(len(idle), now), strict=False):
            _log(lease).info("unit %s takes long and is extracted by another worker too", lease.unit.unit)
            self._extract(worker, lease)

    def _again(self, lease: Lease, reason: str, cause: Cause, ending: Ending = Ending.FAILED) -> None:
        unit, attempt = lease.unit, lease.attempt
        log = _log(lease)
        self.tally.failed(unit.unit, attempt, cause, time.monotonic())
        fate = self._leases.give_back(lease, reason, ending)
        if fate is Fate.NOTHING:
            log.info("unit %s, attempt %s failed, which another one makes up for: %s", unit.unit, attempt, reason)
        elif fate is Fate.AGAIN:
            log.warning("unit %s, attempt %s failed and is leased again: %s", unit.unit, attempt, reason)
            self._feed_hungry()
        elif fate is Fate.SPLIT:
            log.warning("unit %s is split after attempt %s: %s", unit.unit, attempt, reason)
            future = self._committer.submit(self._split, unit, reason)
            self._when_done(future, functools.partial(self._settle_split, lease, reason, future))
        elif fate is Fate.DOOMED:
            log.error("unit %s: its row is recorded as failed after attempt %s: %s", unit.unit, attempt, reason)
            self._feed_hungry()
        else:
            log.error("unit %s is given up after attempt %s: %s", unit.unit, attempt, reason)

    # Events

    def _when_done(self, future: "Future[Any]", act: Callable[[], None]) -> None:
        future.add_done_callback(lambda _: self._inbox.put(act))

    def _settle(self, event: Event) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return  # it was replaced meanwhile
        call, error = event.call, event.error
        if error is not None and self._ending.is_set():
            # It fails because it is stopped, which is no fault of the units that are in it.
            if call is Call.STOP or isinstance(error, Death):
                self._forget(worker)
        elif call is Call.POLL or call is Call.STOP:
            worker.polled = None
            if event.value:
                self._hear(worker, event.value)
            if call is Call.STOP:
                self._forget(worker)
            elif isinstance(error, Death):
                self._replace(worker, error, _cause(error))
        elif isinstance(call, Lease):
            self._settle_lease(worker, call, event.value, error)
        elif error is None:
            self._settle_start(worker, event.value)
        else:
            self._start_failed(worker, error)

    def _hear(self, worker: _Worker, counters: dict[str, Any]) -> None:
        now = time.monotonic()
        if not worker.ready:
            if not worker.counters:
                self.tally.arrived(worker.number, now)
            if not worker.counters or counters.get("copying"):
                worker.starts = now
        worker.counters = counters
        self.tally.counted(worker.number, counters)

    def _settle_lease(
        self, worker: _Worker, lease: Lease, receipt: Receipt, error: RayExtractError | Death | None
    ) -> None:
        if isinstance(error, Death):
            self._replace(worker, error, _cause(error))
            return
        if isinstance(error, EngineError):
            self._replace(worker, Death(str(error)), Cause.ENGINE_FAILED)
            return
        worker.leases.remove(lease)
        now = time.monotonic()
        if error is None:
            worker.rate.add(lease.unit.tokens, now)
            worker.useful = True
            self._starts.useful(worker.engine)
            if self._leases.receive(lease, now):
                future = self._committer.submit(self._commit, receipt)
                self._when_done(future, functools.partial(self._settle_commit, lease, receipt, future))
            else:
                self.tally.overtaken(lease.unit.unit, lease.attempt, now)
                _log(lease).info("%s came too late and stays for ray-extract sweep", receipt.key)
        else:
            self._attempt_failed(lease, error, str(error))
        self._feed(worker)

    def _attempt_failed(self, lease: Lease, error: RayExtractError, reason: str) -> None:
        if error.verdict is Verdict.STOP:
            self._leases.refund(lease)
            self._stop(error)
        else:
            self._again(lease, reason, Cause.STORE_FAILED)

    def _commit(self, receipt: Receipt) -> bool:
        what, patience = f"committing {receipt.unit}", self._job.output.outage_s
        with logs.about(unit=receipt.unit, attempt=receipt.attempt):
            return outlast(lambda: self._ledger.commit(receipt), patience, self._ending, what, self.tally.outage)

    def _settle_commit(self, lease: Lease, receipt: Receipt, future: "Future[bool]") -> None:
        try:
            won = future.result()
        except StoreError as error:
            # The shard is there under this attempt's name; without a commit it counts for nothing.
            self._attempt_failed(lease, error, f"its commit failed: {error}")
            return
        # Lost to another driver's commit or won: the unit is committed.
        self._leases.complete(lease)
        self.tally.committed(receipt, lease.attempt, won, time.monotonic())
        self._committed_tokens += lease.unit.tokens
        if receipt.tokens:
            self._deaths = 0

    def _split(self, unit: Unit, reason: str) -> tuple[Unit, ...]:
        """Commit a unit as split; returns its parts, or none if the whole was committed meanwhile."""

        def split() -> tuple[Unit, ...]:
            store, keep = self._ledger.store, self._job.capture.keep
            rows = PreparedRows(store, RowIndex.from_json(self._setup.rows)).of(unit)
            parts = halve(unit, [RowLength(r.index, len(r.input_ids), r.kept(keep), True) for r in rows])
            store_parts(store, unit, parts)
            won = self._ledger.commit_split(Split(unit.unit, tuple(part.unit for part in parts), reason))
            return parts if won else ()

        with logs.about(unit=unit.unit):
            return outlast(split, self._job.output.outage_s, self._ending, f"splitting {unit.unit}")

    def _settle_split(self, lease: Lease, reason: str, future: "Future[tuple[Unit, ...]]") -> None:
        try:
            parts = future.result()
        except RayExtractError as error:
            self._again(lease, f"{reason}; it could not be split: {error}", Cause.STORE_FAILED)
            return
        if parts:
            self._leases.split(lease, parts)
            self._total_units += len(parts) - 1
            self._feed_hungry()
        else:
            self._leases.complete(lease)

    # Workers

    def _start(self, engine: int) -> None:
        if self._leasing:
            now = time.monotonic()
            worker = _Worker(self._made, engine, now, now)
            self._made += 1
            self._workers[worker.number] = worker
            self.tally.asked(worker.number, now)
            self._fleet.start(worker.number)

    def _settle_start(self, worker: _Worker, info: dict[str, Any]) -> None:
        now = time.monotonic()
        worker.ready = True
        worker.polled = None if worker.polled is None else now
        self._serving += 1
        self._starts.ready(worker.engine)
        self.tally.ready(worker.number, info["node"], info["start_s"], now)
        _log(worker).info("engine ready after %.0f s: %s", now - worker.asked, info.get("version", "unknown"))
        self._feed(worker)

    def _start_failed(self, worker: _Worker, error: RayExtractError | Death) -> None:
        self._forget(worker)
        if not self._leasing:
            return
        self.tally.replaced(Cause.NOT_STARTED)
        engine = worker.engine
        if isinstance(error, Death) and error.node_left:
            _log(worker).warning("the node of an engine that started is gone; it waits for another: %s", error.reason)
            heapq.heappush(self._later, (time.monotonic() + self._starts.pause_s(engine), engine))
            return
        reason = error.reason if isinstance(error, Death) else str(error)
        final = error if isinstance(error, ArenaError | CaptureRefused | ConfigError) else None
        then = self._starts.failed(engine, self._serving, final is not None)
        if then is Start.STOP:
            self._stop(final or EngineError(f"no engine starts: {reason}"))
        elif then is Start.AGAIN:
            pause = self._starts.pause_s(engine)
            _log(worker).warning("an engine did not start, and is started again in %.0f s: %s", pause, reason)
            heapq.heappush(self._later, (time.monotonic() + pause, engine))
        else:
            _log(worker).error("an engine did not start again and again; the run goes on without it: %s", reason)

    def _replace(self, worker: _Worker, death: Death, cause: Cause) -> None:
        """Give back a worker's units and make a new one in its place."""
        if not worker.ready:
            self._start_failed(worker, death)
            return
        if self._failure is None and not death.node_left:
            self._deaths += 1
            if self._deaths >= _WORKER_DEATHS_WITHOUT_A_ROW * self._engines:
                died = f"{self._deaths} workers died, and no row was extracted meanwhile"
                self._stop(EngineError(f"{died}: {death.reason}"))
        pause = 0.0
        if not worker.useful and not death.node_left:
            self._starts.useless(worker.engine)
            pause = self._starts.pause_s(worker.engine)
        _log(worker).warning("a worker is replaced%s: %s", f" in {pause:.0f} s" if pause else "", death.reason)
        self.tally.replaced(cause)
        self._forget(worker)
        for lease in worker.leases:
            self._again(lease, death.reason, cause, Ending.NODE_LEFT if death.node_left else Ending.DIED)
        heapq.heappush(self._later, (time.monotonic() + pause, worker.engine))

    def _forget(self, worker: _Worker) -> None:
        self._gone_tokens += worker.counters.get("tokens_captured", 0)
        self._gone_starts += worker.engine_starts
        self._serving -= worker.ready
        self.tally.counted(worker.number, worker.counters)
        self.tally.gone(worker.number, time.monotonic())
        self._fleet.kill(worker.number)
        del self._workers[worker.number]
        self._hungry.pop(worker.number, None)

    def _stop(self, error: RayExtractError) -> None:
        if self._failure is None:
            self._failure = error
            self._drain_since = time.monotonic()
            logger.error("the run stops; units in flight may finish")

    def _stop_workers(self) -> None:
        for worker in self._workers.values():
            self._fleet.stop(worker.number)
        began = time.monotonic()
        while self._workers:
            patience = _STOP_TIMEOUT_S if self._serving else _STOP_STARTING_S
            if not self._turn(max(0.0, began + patience - time.monotonic())):
                break
        for worker in list(self._workers.values()):
            self._forget(worker)

    # Views

    def _tick(self, now: float) -> None:
        if now - self._last_tick < self._job.run.progress_s:
            return
        self._replace_silent(now)
        for worker in self._workers.values():
            if worker.polled is None:
                worker.polled = now
                self._fleet.poll(worker.number)
        self._last_tick = now
        self._history.append((now, self._captured()))
        while now - self._history[0][0] > _RATE_WINDOW_S:
            self._history.popleft()
        if self._serving:
            logger.info(self._snapshot().line())
        self._say_capacity(now)
        texts = self._views("draining" if self._drain.is_set() else "running")
        if self._view is None or self._view.done():  # a store that does not answer must not hold up the leases
            self._view = self._committer.submit(self._write_view, *texts)

    def _replace_silent(self, now: float) -> None:
        """Of a process that hangs Ray says nothing, as long as its node answers."""
        silence, start = self._job.engine.stall_timeout_s, self._job.engine.start_timeout()
        late = [w for w in self._workers.values() if not w.ready and now - w.starts > start + _LATE_START_S]
        # One that has its place and does not answer looks like one that waits for it; to ask Ray takes time.
        waiting = self._fleet.waiting() if not all(w.counters for w in late) else ()
        for worker in late:
            if worker.number in waiting:
                worker.starts = now
            else:
                reason = f"it was not ready after {now - worker.starts:.0f} s (engine.start_timeout_s = {start:.0f})"
                self._replace(worker, Death(reason), Cause.NOT_STARTED)
        for worker in list(self._workers.values()):
            if worker.ready and worker.polled is not None and now - worker.polled > silence:
                reason = f"it did not answer for {silence:.0f} s (engine.stall_timeout_s)"
                self._replace(worker, Death(reason), Cause.SILENT)

    def _say_capacity(self, now: float) -> None:
        late = [now - w.asked for w in self._workers.values() if not w.ready and now - w.asked > _CAPACITY_NOTICE_S]
        if not late or now - self._notice < _CAPACITY_NOTICE_S:
            return
        self._notice = now
        missing = shortage(self._fleet.need, self._fleet.nodes())
        if missing is None:
            logger.info("%d of %d engines are still starting, after %.0f s", len(late), self._engines, max(late))
        else:
            logger.info("%d of %d engines are starting or wait for capacity: %s", len(late), self._engines, missing)

    def _captured(self) -> int:
        return self._gone_tokens + sum(int(w.counters.get("tokens_captured", 0)) for w in self._workers.values())

    def _rate(self) -> float:
        if len(self._history) < 2:
            return 0.0
        (then, before), (now, captured) = self._history[0], self._history[-1]
        return max(0, captured - before) / (now - then)

    def _snapshot(self) -> Snapshot:
        starts = self._gone_starts + sum(worker.engine_starts for worker in self._workers.values())
        now = time.monotonic()
        return Snapshot(
            units=self._total_units,
            units_done=self._before_units + self._leases.done,
            units_given_up=len(self._leases.given_up),
            units_in_flight=self._leases.leased,
            rows_failed=self.tally.rows_failed,
            tokens=self._total_tokens,
            tokens_committed=self._before_tokens + self._committed_tokens,
            tokens_captured=self._captured(),
            bytes_committed=self.tally.nbytes,
            engines=self._engines,
            engines_ready=self._serving,
            restarts=max(0, starts - self._engines),
            arena_used=sum(w.counters.get("arena_used", 0) for w in self._workers.values()),
            arena_bytes=self._setup.extractor.arena_bytes * len(self._workers),
            elapsed_s=round(self.tally.elapsed_s(now), 1),
            idle_s=round(self.tally.idle_s(now), 1),
            tokens_per_s=round(self._rate(), 1),
        )

    def _views(self, state: str) -> tuple[str, str]:
        """progress.json and what the run's summary takes of this drive, should it be killed; the report is told too."""
        snapshot, account = self._snapshot(), self.account()
        self._report(snapshot, account)
        record = {"version": 1, "state": state, **account.to_json()}
        return json.dumps(snapshot.to_json(state), indent=2), json.dumps(record, indent=2)

    def _write_view(self, progress: str, account: str) -> None:
        try:
            self._ledger.store.put(PROGRESS_KEY, progress.encode(), create=False)
            self._ledger.store.put(drive_key(self._nonce), account.encode(), create=False)
        except StoreError as error:
            # Only a view: the run goes on without it.
            logger.warning("progress could not be written: %s", error)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT drains, the second one ends at once."""

        def handle(number: int, _frame: FrameType | None) -> None:
            if self._drain.is_set():
                raise KeyboardInterrupt
            self._drain_since = time.monotonic()
            self._drain.set()
            logger.warning(
                "%s: finishing the units in flight, at most %.0f s; once more to end at once",
                signal.Signals(number).name,
                self._job.run.drain_s,
            )

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _log(what: "Lease | _Worker") -> "logging.LoggerAdapter[logging.Logger]":
    """A logger whose lines say which unit and attempt, or which engine, they are about."""
    if isinstance(what, Lease):
        return logging.LoggerAdapter(logger, {"unit": what.unit.unit, "attempt": what.attempt})
    return logging.LoggerAdapter(logger, {"engine": what.engine})


def _cause(death: Death) -> Cause:
    return Cause.NODE_LEFT if death.node_left else Cause.WORKER_DIED
