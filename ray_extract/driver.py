"""The driver: leases units to workers, commits what they hand back, replaces what dies.

Workers are Ray actors that Ray never restarts: a method that Ray runs a second time would extract twice, so the driver
itself makes a new actor and leases the unit again under another attempt name.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import ray
import ray.exceptions
from ray._private.services import canonicalize_bootstrap_address

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
from ray_extract.layout import PROGRESS_KEY, drive_key
from ray_extract.leases import Fate, Lease, Leases
from ray_extract.ledger import Ledger
from ray_extract.plan import halve, store_parts
from ray_extract.progress import Snapshot
from ray_extract.records import Receipt, Split, Unit
from ray_extract.store import outlast
from ray_extract.tally import Account, Cause, Tally
from ray_extract.worker import Worker, WorkerSetup

logger = logging.getLogger(__name__)

_COMMITTERS = 8  # commits under way at once; one is a small PUT
_WORKER_DEATHS_IN_A_ROW = 3  # workers that may fail to start, one after the other, before the run stops
# Workers of each engine that may die before another row is extracted. A row that kills workers takes max_attempts and
# then one for each halving of its unit; more is no row's fault.
_WORKER_DEATHS_WITHOUT_A_ROW = 30
_CAPACITY_NOTICE_S = 30.0
_STOP_TIMEOUT_S = 30.0
_STOP_STARTING_S = 3.0  # for workers that are not ready: one that waits for capacity never answers
_RATE_WINDOW_S = 60.0  # a forward pass on a CPU takes longer than a progress line is apart
_KNOCK_S = 10.0
_LOCAL_OBJECT_STORE = 200 << 20  # no state passes Ray's object store, and it takes room in /dev/shm


@dataclasses.dataclass(slots=True)
class _Actor:
    """A worker's actor as the driver sees it."""

    handle: Any
    started: Any  # ObjectRef of start(), until it is ready
    ready: bool = False
    asked: float = dataclasses.field(default_factory=time.monotonic)
    leases: dict[Any, Lease] = dataclasses.field(default_factory=dict)
    counters: dict[str, Any] = dataclasses.field(default_factory=dict)
    poll: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a drive did.

    Args:
        given_up: units without a commit, and why.
        tokens: prompt tokens of the units committed by this drive.
        seconds: from the first engine's being ready to the last commit.
    """

    given_up: dict[str, str]
    tokens: int
    seconds: float


class Driver:
    """Drives one run.

    Args:
        job: the job.
        setup: what workers need.
        ledger: where commits go.
        todo: units without a commit.
        total_units, total_tokens, done_tokens: of the whole run, for progress.
    """

    def __init__(
        self,
        job: Job,
        setup: WorkerSetup,
        ledger: Ledger,
        todo: Sequence[Unit],
        *,
        total_units: int,
        total_tokens: int,
        done_tokens: int,
    ) -> None:
        self._job, self._setup, self._ledger = job, setup, ledger
        self._leases = Leases(todo, job.run.max_attempts)
        self._nonce = secrets.token_hex(4)
        self.tally = Tally(time.monotonic())
        self._engines = min(job.engine.count, max(1, len(todo)))
        self._actors: list[_Actor] = []
        self._commits: dict[Future[bool], tuple[Lease, Receipt]] = {}
        self._splits: dict[Future[tuple[Unit, ...]], tuple[Lease, str]] = {}
        self._committer = ThreadPoolExecutor(_COMMITTERS, thread_name_prefix="commit")
        self._drain = threading.Event()
        self._drain_since = 0.0
        self._ending = threading.Event()
        self._view: Future[None] | None = None  # progress on its way to the store
        self._failure: RayExtractError | None = None
        self._dead_starts = 0
        self._deaths = 0  # of workers since a row was extracted
        self._gone_tokens = 0  # captured by workers that are gone
        self._gone_starts = 0
        self._total_units, self._total_tokens = total_units, total_tokens
        self._before_units, self._before_tokens = total_units - len(todo), done_tokens
        self._committed_tokens = 0
        self._committed_bytes = 0
        self._failed_rows = 0
        self._first_ready: float | None = None
        self._last_commit: float | None = None
        self._last_tick = 0.0
        self._history: deque[tuple[float, int]] = deque()  # (time, tokens captured) of the last _RATE_WINDOW_S
        self._notice = 0.0

    def run(self) -> Outcome:
        """Extract and commit every unit.

        Raises:
            Drained: asked to stop; everything finished is committed.
            RayExtractError: an error whose verdict is stop.
        """
        state = "failed"
        try:
            with self._signals():
                self._actors = [self._new_actor() for _ in range(self._engines)]
                while not self._over():
                    self._step()
            state = self._end_state()
        finally:
            self._ending.set()
            self._stop_workers()
            self._committer.shutdown(wait=True)
            self.tally.ended(time.monotonic())
            self._write_view(*self._view_texts(state))
        if self._failure is not None:
            raise self._failure
        if self._drain.is_set() and not self._leases.finished:
            raise Drained(
                f"stopped on request with {self._before_units + self._leases.done} of {self._total_units} units "
                "committed; run the same command again to go on"
            )
        seconds = 0.0
        if self._first_ready is not None and self._last_commit is not None:
            seconds = self._last_commit - self._first_ready
        return Outcome(dict(self._leases.given_up), self._committed_tokens, seconds)

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
        idle = not self._commits and not self._splits and not any(a.leases for a in self._actors)
        if self._failure is not None or self._drain.is_set():
            return idle or time.monotonic() - self._drain_since > self._job.run.drain_s
        return False

    def _step(self) -> None:
        if not self._drain.is_set() and self._failure is None:
            self._lease()
        waiting = [ref for a in self._actors for ref in (a.started, a.poll, *a.leases) if ref is not None]
        if waiting:
            done, _ = ray.wait(waiting, num_returns=1, timeout=0.5)
            for ref in done:
                self._settle(ref)
        else:
            time.sleep(0.05)
        self._settle_commits()
        self._settle_splits()
        self._tick()

    def _lease(self) -> None:
        for actor in self._actors:
            while actor.ready and len(actor.leases) < self._job.run.units_in_flight:
                lease = self._leases.take(actor.leases.values())
                if lease is None:
                    break
                attempt = f"{self._nonce}-{lease.number:02d}"
                self.tally.leased(lease.unit.unit, time.monotonic())
                actor.leases[actor.handle.extract.remote(lease.unit, attempt, lease.doomed)] = lease

    def _settle(self, ref: Any) -> None:
        actor = next((a for a in self._actors if ref in (a.started, a.poll) or ref in a.leases), None)
        if actor is None:
            return  # of an actor that was replaced in this very round
        try:
            value = ray.get(ref)
        except RayExtractError as error:
            # Ray's stand-in for an error that a task raised carries the traceback as its text, and the error itself.
            self._settle_error(actor, ref, getattr(error, "cause", error))
            return
        except ray.exceptions.RayActorError as error:
            # Died or only unavailable: either way its calls may have run, and the node may be gone without Ray's
            # knowing yet. A new actor and new attempt names are right in every case.
            self._replace(actor, f"its actor died: {_first_line(error)}", Cause.WORKER_DIED)
            return
        except ray.exceptions.RayError as error:
            if ref == actor.poll:
                actor.poll = None
            else:
                logger.exception("a worker failed in a way that it should not")
                self._replace(actor, _first_line(error), Cause.WORKER_DIED)
            return
        if ref == actor.started:
            actor.started, actor.ready, self._dead_starts = None, True, 0
            self._first_ready = self._first_ready or time.monotonic()
            self.tally.ready(id(actor), value["node"], value["start_s"], time.monotonic())
            logger.info(
                "engine ready after %.0f s: %s", time.monotonic() - actor.asked, value.get("version", "unknown")
            )
        elif ref == actor.poll:
            actor.counters, actor.poll = value, None
            self.tally.counted(id(actor), value)
        else:
            lease = actor.leases.pop(ref)
            self._commits[self._committer.submit(self._commit, value)] = (lease, value)

    def _commit(self, receipt: Receipt) -> bool:
        what = f"committing {receipt.unit}"
        patience = self._job.output.outage_s
        return outlast(lambda: self._ledger.commit(receipt), patience, self._ending, what, self.tally.outage)

    def _settle_error(self, actor: _Actor, ref: Any, error: RayExtractError) -> None:
        if ref == actor.poll:
            actor.poll = None
            return
        if ref == actor.started:
            if isinstance(error, ArenaError | CaptureRefused | ConfigError):
                self._stop(error)
                actor.started = None
            else:
                self._replace(actor, str(error), Cause.NOT_STARTED)
            return
        if isinstance(error, EngineError):
            self._replace(actor, str(error), Cause.ENGINE_FAILED)
            return
        lease = actor.leases.pop(ref)
        if error.verdict is Verdict.STOP:
            self._leases.refund(lease)
            self._stop(error)
        else:
            self._again(lease, str(error), Cause.STORE_FAILED)

    def _settle_commits(self) -> None:
        for future in [f for f in self._commits if f.done()]:
            lease, receipt = self._commits.pop(future)
            try:
                won = future.result()
            except StoreError as error:
                if error.verdict is Verdict.STOP:
                    self._leases.refund(lease)
                    self._stop(error)
                else:
                    # The shard is there under this attempt's name; without a commit it counts for nothing.
                    self._again(lease, f"its commit failed: {error}", Cause.STORE_FAILED)
                continue
            # Lost to another driver's commit or won: the unit is committed.
            self.tally.committed(receipt, won, time.monotonic())
            self._leases.complete(lease)
            self._last_commit = time.monotonic()
            self._committed_tokens += lease.unit.tokens
            self._committed_bytes += receipt.size
            self._failed_rows += len(receipt.failures)
            if receipt.tokens:
                self._deaths = 0

    def _again(self, lease: Lease, reason: str, cause: Cause, died: bool = False) -> None:
        unit, number = lease.unit, lease.number
        self.tally.failed(unit.unit, cause, time.monotonic())
        fate = self._leases.give_back(lease, reason, died)
        if fate is Fate.AGAIN:
            logger.warning("unit %s, attempt %d failed and is leased again: %s", unit.unit, number, reason)
        elif fate is Fate.SPLIT:
            logger.warning("unit %s is split after %d attempts: %s", unit.unit, number, reason)
            self._splits[self._committer.submit(self._split, unit, reason)] = lease, reason
        elif fate is Fate.DOOMED:
            logger.error("unit %s: its row is recorded as failed after %d attempts: %s", unit.unit, number, reason)
        else:
            logger.error("unit %s is given up after %d attempts: %s", unit.unit, number, reason)

    def _split(self, unit: Unit, reason: str) -> tuple[Unit, ...]:
        """Commit a unit as split; returns its parts, or none if the whole was committed meanwhile."""

        def split() -> tuple[Unit, ...]:
            store, keep = self._ledger.store, self._job.capture.keep
            rows = PreparedRows(store, RowIndex.from_json(self._setup.rows)).of(unit)
            parts = halve(unit, [RowLength(r.index, len(r.input_ids), r.kept(keep), True) for r in rows])
            store_parts(store, unit, parts)
            won = self._ledger.commit_split(Split(unit.unit, tuple(part.unit for part in parts), reason))
            return parts if won else ()

        return outlast(split, self._job.output.outage_s, self._ending, f"splitting {unit.unit}")

    def _settle_splits(self) -> None:
        for future in [f for f in self._splits if f.done()]:
            lease, reason = self._splits.pop(future)
            try:
                parts = future.result()
            except RayExtractError as error:
                self._again(lease, f"{reason}; it could not be split: {error}", Cause.STORE_FAILED)
                continue
            if parts:
                self._leases.split(lease, parts)
                self._total_units += len(parts) - 1
            else:
                self._leases.complete(lease)

    def _replace(self, actor: _Actor, reason: str, cause: Cause) -> None:
        """Give back an actor's units and make a new actor in its place."""
        self.tally.replaced(cause if actor.started is None else Cause.NOT_STARTED)
        if actor.started is not None:
            self._dead_starts += 1
            if self._dead_starts >= _WORKER_DEATHS_IN_A_ROW:
                actor.started = None
                self._stop(EngineError(f"{self._dead_starts} workers in a row did not start: {reason}"))
                return
        elif self._failure is None:
            self._deaths += 1
            if self._deaths >= _WORKER_DEATHS_WITHOUT_A_ROW * self._engines:
                self._stop(EngineError(f"{self._deaths} workers died, and no row was extracted meanwhile: {reason}"))
        logger.warning("a worker is replaced: %s", reason)
        for lease in actor.leases.values():
            self._again(lease, reason, cause, died=True)
        self._forget(actor)
        if self._failure is None and not self._drain.is_set():
            self._actors.append(self._new_actor())

    def _forget(self, actor: _Actor) -> None:
        self._gone_tokens += actor.counters.get("tokens_captured", 0)
        self._gone_starts += actor.counters.get("engine_starts", 1)
        self.tally.counted(id(actor), actor.counters)
        self.tally.gone(id(actor), time.monotonic())
        ray.kill(actor.handle)
        self._actors.remove(actor)

    def _new_actor(self) -> _Actor:
        job = self._job
        handle = (
            ray.remote(Worker)
            .options(
                num_gpus=job.num_gpus,
                num_cpus=job.engine.cpus,
                max_restarts=0,
                max_task_retries=0,
                # each unit in flight, start or stop, and progress
                max_concurrency=job.run.units_in_flight + 2,
            )
            .remote(self._setup)
        )
        actor = _Actor(handle, handle.start.remote())
        self.tally.asked(id(actor), time.monotonic())
        return actor

    def _stop(self, error: RayExtractError) -> None:
        if self._failure is None:
            self._failure = error
            self._drain_since = time.monotonic()
            logger.error("the run stops; units in flight may finish")

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._last_tick < self._job.run.progress_s:
            return
        for actor in self._actors:
            if actor.ready and actor.poll is None:
                actor.poll = actor.handle.progress.remote()
        self._last_tick = now
        self._history.append((now, self._captured()))
        while now - self._history[0][0] > _RATE_WINDOW_S:
            self._history.popleft()
        if any(a.ready for a in self._actors):
            logger.info(self._snapshot().line())
        self._say_capacity(now)
        if self._view is None or self._view.done():  # a store that does not answer must not hold up the leases
            texts = self._view_texts("draining" if self._drain.is_set() else "running")
            self._view = self._committer.submit(self._write_view, *texts)

    def _say_capacity(self, now: float) -> None:
        late = [a for a in self._actors if not a.ready and now - a.asked > _CAPACITY_NOTICE_S]
        if not late or now - self._notice < _CAPACITY_NOTICE_S:
            return
        self._notice = now
        need = {"GPU": self._job.num_gpus, "CPU": self._job.engine.cpus}
        free, have = ray.available_resources(), ray.cluster_resources()
        wants = ", ".join(f"{amount:g} {name}" for name, amount in need.items() if amount)
        if all(free.get(name, 0) >= amount for name, amount in need.items()):
            logger.info("%d engines are still starting, after %.0f s", len(late), now - min(a.asked for a in late))
            return
        shown = ", ".join(f"{free.get(name, 0):g} of {have.get(name, 0):g} {name}" for name in need)
        logger.info(
            "%d engines are starting or wait for capacity: each needs %s on one node; free in the cluster: %s",
            len(late),
            wants,
            shown,
        )

    def _captured(self) -> int:
        return self._gone_tokens + sum(int(a.counters.get("tokens_captured", 0)) for a in self._actors)

    def _rate(self) -> float:
        if len(self._history) < 2:
            return 0.0
        (then, before), (now, captured) = self._history[0], self._history[-1]
        return max(0, captured - before) / (now - then)

    def _snapshot(self) -> Snapshot:
        starts = self._gone_starts + sum(a.counters.get("engine_starts", 1) for a in self._actors)
        return Snapshot(
            units=self._total_units,
            units_done=self._before_units + self._leases.done,
            units_given_up=len(self._leases.given_up),
            rows_failed=self._failed_rows,
            tokens=self._total_tokens,
            tokens_committed=self._before_tokens + self._committed_tokens,
            tokens_captured=self._captured(),
            bytes_committed=self._committed_bytes,
            engines=self._engines,
            engines_ready=sum(a.ready for a in self._actors),
            restarts=max(0, starts - self._engines),
            arena_used=sum(a.counters.get("arena_used", 0) for a in self._actors),
            arena_bytes=self._setup.extractor.arena_bytes * len(self._actors),
            elapsed_s=round(time.monotonic() - self._first_ready, 1) if self._first_ready else 0.0,
            tokens_per_s=round(self._rate(), 1),
        )

    def _view_texts(self, state: str) -> tuple[str, str]:
        """progress.json and what the run's summary takes of this drive, should it be killed."""
        progress = self._snapshot().to_json(state)
        account = {"version": 1, "state": state, **self.account().to_json()}
        return json.dumps(progress, indent=2), json.dumps(account, indent=2)

    def _write_view(self, progress: str, account: str) -> None:
        try:
            self._ledger.store.put(PROGRESS_KEY, progress.encode(), create=False)
            self._ledger.store.put(drive_key(self._nonce), account.encode(), create=False)
        except StoreError as error:
            # Only a view: the run goes on without it.
            logger.warning("progress could not be written: %s", error)

    def _stop_workers(self) -> None:
        stops = {actor.handle.stop.remote(): actor for actor in self._actors}
        ready = [ref for ref, actor in stops.items() if actor.ready]
        if ready:
            ray.wait(ready, num_returns=len(ready), timeout=_STOP_TIMEOUT_S)
        if stops:
            done, _ = ray.wait(list(stops), num_returns=len(stops), timeout=_STOP_STARTING_S)
            for ref in done:
                # One that died has left the counters of its last poll.
                with contextlib.suppress(RayExtractError, ray.exceptions.RayError):
                    stops[ref].counters = ray.get(ref)
        for actor in list(self._actors):
            self._forget(actor)

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


def connect(job: Job) -> None:
    """Connect to the Ray cluster of the job, or to the running one, or start a local one.

    Raises:
        ConfigError: run.address (or RAY_ADDRESS) names no cluster that lets us in.
    """
    if ray.is_initialized():
        return
    address = _running_cluster(job.run.address or os.environ.get("RAY_ADDRESS"))
    if address is not None:
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ray.exceptions.AuthenticationError) as error:
            raise ConfigError(
                f"run.address = {address!r}: {_first_line(error)}; is it a Ray head of this version, and if it asks "
                "for a token, are RAY_AUTH_MODE=token and RAY_AUTH_TOKEN set?"
            ) from None
        return
    cpus = max(os.cpu_count() or 1, math.ceil(job.engine.count * job.engine.cpus))
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=_LOCAL_OBJECT_STORE,
        logging_level=logging.WARNING,
    )


def _running_cluster(named: str | None) -> str | None:
    """host:port of the cluster that is named, or of the running one; None to start a local one.

    Knocks before Ray does: Ray tries an address where nobody listens for five minutes, and then ends the process.
    """
    if named == "local":
        return None
    if named is not None and "://" in named:
        raise ConfigError(f"run.address = {named!r}: give host:port of the head node (Ray's own port is 6379)")
    try:
        address = canonicalize_bootstrap_address(named or "auto")
    except (ValueError, OSError):  # a ConnectionError is an OSError: no cluster runs here
        address = None
    if address is None:
        if named is not None:
            raise ConfigError(f"run.address = {named!r}: no Ray cluster there; give host:port, or local to start one")
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, ValueError) as error:
        if named is not None:
            raise ConfigError(f"run.address = {named!r}: no Ray cluster answers there: {error}") from None
        logger.warning("the last Ray cluster of this machine, %s, does not answer; starting a local one", address)
        return None
    return str(address)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
