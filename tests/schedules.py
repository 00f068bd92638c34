"""Whole runs on a store, workers and drivers that fail by a seeded schedule; no Ray, no engine, no real time.

What runs is the product: run.run and run.retry_failed, and under them Driver, Leases, Ledger, the plan and Worker,
which flushes real images. In place of what they stand on are: for Ray, a fleet whose calls are fibers; for the
extractor, one that fills images from a table of known states; for the store, a dictionary; for clocks, events, locks
and thread pools, those of the simulation. A fiber is a thread that runs only while all others wait. Which one is next
is drawn at operations on the store, and so are the faults: a seed says everything that happens.

    an operation fails before it is applied, after (the answer is lost), or is applied once the caller has given it up
    a listing breaks off, or lacks what was written last
    a process ends between two operations: a driver, or a worker, whose last answer may be lost with it
    a worker that its driver took for dead, or whose driver died, goes on for a while
    an engine is slow, and its unit may be leased twice; a receipt comes twice
    a run is asked to drain; orphans are swept meanwhile
    rows that are rejected, and rows that kill their worker, until some retry round or for ever

The rules are checked while it goes on (an object never changes, a commit names an object that is there) and, after a
last run that nothing disturbs, against plain tables by a reader that shares no code with the product.

    python tests/schedules.py --count 5000 [--first SEED]
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import queue
import random
import re
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import plain_reader
from simulated_fleet import at_once

from ray_extract import (
    driver,
    extractor,
    fleet,
    leases,
    ledger,
    plan,
    ray_fleet,
    run,
    segments,
    store,
    verify,
    worker,
)
from ray_extract.capture.digest import digest_ids, digest_tokens
from ray_extract.config import Job
from ray_extract.dataset import prepared
from ray_extract.dataset.prepare import PreparedRow, row_id
from ray_extract.engine.base import EngineInfo
from ray_extract.errors import (
    CredentialsExpired,
    EngineError,
    IdentityMismatch,
    PlanError,
    RayExtractError,
    ShardError,
    StoreError,
    Throttled,
)
from ray_extract.extractor import Captured
from ray_extract.layout import (
    COMMITS_PREFIX,
    COUNTS_KEY,
    DRIVES_PREFIX,
    PROGRESS_KEY,
    SUCCESS_KEY,
    SUMMARY_KEY,
    round_of_unit,
)
from ray_extract.ledger import Ledger, orphans
from ray_extract.metrics import NoMeter
from ray_extract.model import ModelShape
from ray_extract.readers import rows as reader_rows
from ray_extract.readers.dataset import HiddenStates
from ray_extract.records import RowFailure, RowStatus
from ray_extract.shards.base import RowStats
from ray_extract.shards.image import RowTable, lay_out, state_columns, write_table
from ray_extract.shards.reader import open_shard
from ray_extract.shards.seal import seal

URL = "memory://schedules"
HIDDEN = 4
COLUMNS = state_columns((1,), True, "BF16", HIDDEN)
SHAPE = ModelShape("made-up", "LlamaForCausalLM", "llama", 8, HIDDEN, "bfloat16", 4096, 100, "0" * 64)
STEPS = 5_000  # of all fibers; the longest of 1,374 schedules took 1,685
HANG_S = 60.0  # of real time
NEVER = 99  # a round that no run comes to
AT_WORK = re.compile(r"shards/|commits/|plan/split|plan/retry|manifest|$")
TAKEN = re.compile(r"shards/|commits/|plan/split|plan/retry|manifest")
MUTABLE = re.compile(rf"{PROGRESS_KEY}|{COUNTS_KEY}|{SUCCESS_KEY}|{SUMMARY_KEY}|{DRIVES_PREFIX}.*|probe-.*")


class Killed(BaseException):
    """The process of this fiber is gone."""


class Process:
    """What dies as a whole: a driver, a worker, an operator's command."""

    def __init__(self, parent: "Process | None" = None) -> None:
        self.dead = False
        self.steps_left: int | None = None  # of one that nobody listens to any more
        self.children: list[Process] = []
        self.refs: list[Ref] = []
        if parent is not None:
            parent.children.append(self)


class Ref:
    """The result of a call of an actor."""

    def __init__(self, then: Callable[[Any, Any], None]) -> None:
        self._then = then
        self._done = False

    def settle(self, value: Any = None, error: Any = None) -> None:
        """The first result counts."""
        if not self._done:
            self._done = True
            self._then(value, error)


class Fiber:
    """A thread that runs when it is its turn."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.turn = threading.Semaphore(0)
        self.condition: Callable[[], bool] | None = None
        self.wake: float | None = None
        self.ident = 0

    @property
    def ready(self) -> bool:
        """Whether it can go on now."""
        return self.process.dead or self.condition is None or self.condition()


@dataclasses.dataclass(frozen=True)
class World:
    """What a schedule is about; drawn from the seed.

    Args:
        rows: of the data set.
        rejected, fatal: rows that fail, or kill their worker, in retry rounds before this one (0 is the plan).
        rates: of faults, for each operation; `budget` of them in all.
    """

    job: Job
    rows: list[PreparedRow]
    rejected: dict[int, int]
    fatal: dict[int, int]
    rates: dict[str, float]
    budget: int
    users: int


def draw_world(draw: random.Random) -> World:
    """The world of a schedule."""
    count = draw.randint(3, 9)
    skipped = {row for row in range(1, count) if draw.random() < 0.1}
    usable = [row for row in range(count) if row not in skipped]
    rejected = {row: draw.choice((1, 1, 2, NEVER)) for row in usable if draw.random() < 0.12}
    fatal = {row: draw.choice((1, 2, NEVER)) for row in usable if row not in rejected and draw.random() < 0.08}
    job = Job.model_validate(
        {
            "model": {"path": "made-up"},
            "dataset": {"paths": ["made-up"]},
            "engine": {"kind": "simulated", "device": "cpu", "count": draw.randint(1, 3)},
            "capture": {"boundaries": [1], "keep": draw.choice(("all", "supervised"))},
            "output": {
                "url": URL,
                "format": draw.choice(("raw", "parquet")),
                "max_rows": draw.randint(1, 4),
                "outage_s": draw.choice((0, 10, 600)),
                "head": False,
            },
            "run": {"max_attempts": draw.randint(1, 3), "units_in_flight": 2, "progress_s": 20, "drain_s": 30},
        }
    )
    kinds = ("before", "lost", "late", "read", "break", "lag", "die", "stop", "engine", "drain")
    rates = {kind: draw.choice((0.0, 0.02, 0.08)) for kind in kinds} | {"echo": 0.1, "slow": 0.2}
    return World(
        job, [made_row(row, row in skipped) for row in range(count)], rejected, fatal, rates, draw.randint(2, 40),
        draw.choice((1, 2, 2)),
    )  # fmt: skip


@lru_cache(None)
def made_row(index: int, skipped: bool) -> PreparedRow:
    """A row; the same index always has the same tokens."""
    rng = np.random.default_rng(index)
    length = 0 if skipped else int(rng.integers(1, 7))
    ids, mask = rng.integers(0, 100, length).astype(np.int32), rng.integers(0, 2, length).astype(np.uint8)
    return PreparedRow(index, row_id(ids, mask), f"made-up:{index}", ids, mask, "empty" if skipped else None)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What must be stored of a row: bytes u8 [kept, width] and values f32 of each state, digests and statistics."""

    stored: list[Any]
    values: list[Any]
    digests: list[int]
    stats: list[list[float]]


@lru_cache(None)
def truth(index: int, keep: str) -> Truth:
    """Of the row of this index."""
    row = made_row(index, False)
    rng = np.random.default_rng([7, index])
    kept = slice(None) if keep == "all" else np.flatnonzero(row.loss_mask)
    wide = [rng.standard_normal((len(row.input_ids), HIDDEN), dtype=np.float32) for _ in COLUMNS]
    short = [(np.ascontiguousarray(w[kept]).view(np.uint32) >> 16).astype(np.uint16) for w in wide]
    values = [(s.astype(np.uint32) << 16).view(np.float32) for s in short]
    stored = [s.view(np.uint8).reshape(len(s), 2 * HIDDEN) for s in short]
    stats = [
        [float(np.square(v, dtype=np.float64).sum()) for v in values],
        [float(np.abs(v).max(initial=0)) for v in values],
        [0.0 for v in values],
        [float((v == 0).all(axis=1).sum()) for v in values],
    ]
    return Truth(stored, values, [digest_ids(row.input_ids), *(digest_tokens(s) for s in stored)], stats)


class Simulation:
    """Fibers, a clock, faults, and what came of them.

    Args:
        seed: says all that happens.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.world = draw_world(self.draw)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.now = 1000.0
        self.budget = 0
        self.objects = MemoryObjects(self)
        self.drivers: list[Any] = []
        self.manifests: list[dict[int, str]] = []
        self.names = 0
        self._fibers: list[Fiber] = []
        self._current: Fiber | None = None
        self._ended = threading.Semaphore(0)
        self._steps = 0
        self._over = False

    # Fibers

    def spawn(self, process: Process, action: Callable[[], Any], then: Callable[[Any, Any], None]) -> None:
        """Run an action in a fiber; `then` gets its value or its error, unless its process is gone."""
        fiber = Fiber(process)

        def work() -> None:
            fiber.turn.acquire()
            fiber.ident = threading.get_ident()
            try:
                value, error = None, None
                self._check(fiber)
                try:
                    value = action()
                except Exception as caught:
                    error = caught
                self._check(fiber)
                then(value, error)
            except Killed:
                pass
            except BaseException:
                self.problem(traceback.format_exc())
            self._fibers.remove(fiber)
            self._next(None)

        self._fibers.append(fiber)
        threading.Thread(target=work, daemon=True).start()

    def problem(self, text: str) -> None:
        """A rule is broken."""
        self.problems.append(text)

    @property
    def process(self) -> Process | None:
        """Whose fiber runs; None for an observer, and for threads of Arrow."""
        fiber = self._current
        return fiber.process if fiber is not None and fiber.ident == threading.get_ident() else None

    def wait(self, condition: Callable[[], bool] | None = None, timeout: float | None = None) -> bool:
        """Let others run until a condition holds, or for a time; without both, one draw. Whether it holds."""
        fiber = self._current
        assert fiber is not None and fiber.ident == threading.get_ident()
        fiber.condition, fiber.wake = condition, None if timeout is None else self.now + timeout
        self._next(fiber)
        fiber.condition = fiber.wake = None
        self._check(fiber)
        return condition is None or condition()

    def _check(self, fiber: Fiber) -> None:
        if fiber.process.dead or self._over:
            raise Killed

    def _next(self, me: Fiber | None) -> None:
        """Give the turn to a fiber that is drawn, and wait for the next turn of one's own."""
        self._steps += 1
        if self._steps > STEPS and not self._over:
            self._stop(f"no end after {STEPS} steps")
        fiber = self._pick()
        self._current = fiber
        if fiber is me and fiber is not None:
            return
        (self._ended if fiber is None else fiber.turn).release()
        if me is not None:
            me.turn.acquire()

    def _pick(self) -> Fiber | None:
        if self._over:
            return self._fibers[0] if self._fibers else None
        ready = [fiber for fiber in self._fibers if fiber.ready]
        asleep = [fiber for fiber in self._fibers if fiber.wake is not None and not fiber.ready]
        if asleep and (not ready or self.draw.random() < 0.02):
            fiber = min(asleep, key=lambda fiber: fiber.wake or 0.0)
            self.now = max(self.now, fiber.wake or 0.0)
            return fiber
        if ready:
            return self.draw.choice(ready)
        if self._fibers:
            self._stop("all fibers wait for ever")
            return self._fibers[0]
        return None

    def _stop(self, why: str) -> None:
        self._over = True
        self.problem(why)

    def run(self) -> None:
        """Run all fibers to their ends."""
        self._next(None)
        if not self._ended.acquire(timeout=HANG_S):
            self._over = True
            self.problem(f"a fiber did not give its turn back for {HANG_S:.0f} s")

    # Faults

    def fault(self, kind: str, key: str = COMMITS_PREFIX) -> bool:
        """Whether this fault happens here; less often at objects that a run needs before it can do anything."""
        rate = self.world.rates[kind] * (1.0 if AT_WORK.match(key) else 0.15)
        if self.budget <= 0 or self.draw.random() >= rate:
            return False
        self.budget -= 1
        self.counts[f"fault {kind}"] += 1
        return True

    def point(self, key: str = COMMITS_PREFIX) -> None:
        """A moment between two operations: others may run, this process may end."""
        process = self.process
        if process is None:
            return
        self.counts["operations"] += 1
        if process.steps_left is not None:
            process.steps_left -= 1
            if process.steps_left < 0:
                self.kill(process)
        if self.draw.random() < 0.3:
            self.wait()
        if self.fault("die", key):
            self.kill(process)
        if process.dead:
            raise Killed

    def kill(self, process: Process) -> None:
        """End a process; its actors end too, at once or a while later."""
        process.dead = True
        self.counts["deaths"] += 1
        for ref in process.refs:
            ref.settle(error=gone(self))
        for child in process.children:
            self.leave(child)

    def leave(self, process: Process) -> None:
        """Nobody listens to an actor any more: it ends at once, or goes on for a while."""
        if process.dead or process.steps_left is not None:
            return
        for ref in process.refs:
            ref.settle(error=gone(self))
        process.steps_left = self.draw.choice((0, 0, 5, 40))


class MemoryObjects(store.Store):
    """A store in a dictionary, with the schedule's faults, that watches over the rules of what is written."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(URL)
        self._sim = sim
        self.objects: dict[str, bytes] = {}
        self._order: list[str] = []  # keys as they were created
        self._writes = 0
        self._versions: dict[str, str] = {}

    def _write(self, key: str, data: bytes, create: bool) -> None:
        sim = self._sim
        if key in self.objects:
            if create:
                sim.counts[f"taken {TAKEN.match(key)[0] if TAKEN.match(key) else 'others'}"] += 1
                raise FileExistsError(key)
            if not MUTABLE.fullmatch(key):
                sim.problem(f"{key} was overwritten")
        else:
            self._order.append(key)
        self.objects[key] = data
        self._writes += 1
        self._versions[key] = str(self._writes)
        if key.startswith("manifest-"):
            sim.manifests.append(statuses(data))
            if len(sim.manifests) > 1 and not sim.counts["fault lag"]:
                before, after = sim.manifests[-2:]
                if any(after[row] != "ok" for row in before if before[row] == "ok"):
                    sim.problem(f"{key} knows less than the manifest before it")
        if key.startswith(COMMITS_PREFIX):
            record = json.loads(data)
            if "split" not in record and len(self.objects.get(record["key"], b"")) != record["size"]:
                sim.problem(f"{key} names {record['key']}, which is not there with its size")

    def _put(self, key: str, data: memoryview, create: bool) -> None:
        sim, held = self._sim, bytes(data)
        sim.point(key)
        if sim.fault("before", key):
            raise Throttled(f"{key}: before")
        if sim.fault("stop", key):
            raise CredentialsExpired(f"{key}: stop")
        if sim.fault("late", key):
            sim.spawn(Process(), lambda: self._land(key, held, create), lambda value, error: None)
            raise StoreError(f"{key}: late")
        self._write(key, held, create)
        if sim.fault("lost", key):
            raise StoreError(f"{key}: lost")
        sim.point(key)

    def _land(self, key: str, data: bytes, create: bool) -> None:
        """A request arrives after its sender gave it up; of one that replaces, an old one would not be news."""
        self._sim.wait(timeout=self._sim.draw.choice((0.0, 1.0, 30.0)))
        if key not in self.objects and create:
            self._write(key, data, create)

    def _begin(self, key: str, create: bool) -> store.Upload:
        self._read(key)
        if create and key in self.objects:
            raise FileExistsError(key)
        return _Parts(self, key, create)

    def _read(self, key: str) -> None:
        self._sim.point(key)
        if self._sim.process is not None and self._sim.fault("read", key):
            raise StoreError(f"{key}: read")

    def _object(self, key: str) -> bytes:
        self._read(key)
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key]

    def _get(self, key: str) -> bytes:
        return self._object(key)

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return self._object(key)[start : start + length]

    def _size(self, key: str) -> int:
        return len(self._object(key))

    def _list(self, folder: str, recursive: bool) -> Iterator[store.ObjectInfo]:
        sim = self._sim
        start = f"{folder}/" if folder else ""
        self._read(start)
        late = set(self._order[-sim.draw.randint(1, 3) :]) if sim.fault("lag", start) else set()
        found = sorted(key for key in self.objects if key.startswith(start) and key not in late)
        breaks = sim.draw.randint(0, len(found)) if sim.fault("break", start) else None
        for number, key in enumerate(found):
            if number == breaks:
                raise StoreError(f"{folder}: break")
            if recursive or "/" not in key.removeprefix(start):
                yield store.ObjectInfo(key, len(self.objects[key]), self._versions[key])
        sim.point(start)

    def _delete(self, key: str) -> None:
        self._read(key)
        del self.objects[key]
        self._order.remove(key)


class _Parts(store.Upload):
    def __init__(self, objects: MemoryObjects, key: str, create: bool) -> None:
        self._objects, self._key, self._create, self._data = objects, key, create, bytearray()

    def write(self, chunk: store.Buffer) -> None:
        self._objects._read(self._key)
        self._data += chunk

    def finish(self) -> None:
        self._objects._put(self._key, memoryview(self._data), self._create)

    def abort(self) -> None:
        self._data.clear()


# What the product's modules see in place of Ray, threads, clocks and engines


class Extractor:
    """Fills images from the table of true states; its memory is overwritten as soon as it is given back."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._tokens = 0

    def start(self) -> EngineInfo:
        """May fail."""
        self._sim.point()
        if self._sim.fault("engine"):
            raise EngineError("it did not start")
        return EngineInfo("simulated", 1 << 20, 1, {})

    def stop(self) -> None:
        """Nothing to stop."""

    def progress(self) -> dict[str, int]:
        """As the true one's."""
        return {"tokens_captured": self._tokens, "engine_starts": 1, "arena_used": 0}

    @contextlib.contextmanager
    def capture(self, table: RowTable, metadata: dict[str, str], doomed: str | None = None) -> Iterator[Captured]:
        """As the true one's."""
        sim, world, keep = self._sim, self._sim.world, metadata["keep"]
        number = round_of_unit(metadata["unit"]) or 0
        if sim.fault("slow"):
            sim.wait(timeout=100.0)
        layout = lay_out(table, COLUMNS, metadata)
        buffer = memoryview(bytearray(layout.nbytes))
        write_table(layout, table, buffer)
        failures: dict[int, RowFailure] = {}
        truths = [truth(row, keep) for row in table.row.tolist()]
        for place, row in enumerate(table.row.tolist()):
            sim.point()
            if doomed is not None:
                failures[place] = RowFailure(row, RowStatus.ENGINE_DIED, doomed)
            elif number < world.fatal.get(row, 0):
                process = sim.process
                assert process is not None
                sim.counts["fatal rows met"] += 1
                sim.kill(process)
                raise Killed
            elif number < world.rejected.get(row, 0):
                failures[place] = RowFailure(row, RowStatus.REJECTED, "rejected")
            for column, part in zip(COLUMNS, truths[place].stored, strict=True):
                layout.state_bytes(buffer, column)[table.cu_kept[place] : table.cu_kept[place + 1]] = part
        if doomed is None and sim.fault("engine"):
            raise EngineError("the bytes are not those that left the device")
        lengths = np.diff(table.cu_seqlens)
        stats = [np.array([t.stats[kind] for t in truths]) for kind in range(4)]
        statuses = np.zeros(len(table), np.uint8)
        for place, failure in failures.items():
            statuses[place] = failure.status
        seal(
            layout,
            buffer,
            covered=lengths,
            n_tokens=lengths,
            digests=np.array([t.digests for t in truths], np.uint64),
            stats=RowStats(stats[0], stats[1].astype(np.float32), stats[2].astype(np.int32), stats[3].astype(np.int32)),
            statuses=statuses,
        )
        self._tokens += int(lengths.sum())
        sim.counts["images"] += 1
        try:
            yield Captured(layout, table, buffer, failures, {})
        finally:
            buffer[:] = b"\xee" * len(buffer)


class Actors:
    """A fleet whose workers are processes of the simulation."""

    need: Mapping[str, float] = {}

    def __init__(self, sim: Simulation, setup: Any, post: Callable[[fleet.Event], None]) -> None:
        self._sim, self._setup, self._post = sim, setup, post
        self._workers: dict[int, tuple[Process, worker.Worker]] = {}

    def start(self, number: int) -> None:
        """See fleet.Fleet."""
        owner = self._sim.process
        assert owner is not None
        self._workers[number] = Process(owner), worker.Worker(self._setup)
        self._ask(number, fleet.Call.START, "start")

    def extract(self, number: int, lease: leases.Lease, attempt: str) -> None:
        """See fleet.Fleet."""
        self._sim.counts["second leases"] += lease.second
        self._ask(number, lease, "extract", lease.unit, attempt, lease.doomed)

    def poll(self, number: int) -> None:
        """See fleet.Fleet."""
        self._ask(number, fleet.Call.POLL, "progress")

    def stop(self, number: int) -> None:
        """See fleet.Fleet."""
        self._ask(number, fleet.Call.STOP, "stop")

    def kill(self, number: int) -> None:
        """Its node may be out of reach, so that it goes on."""
        self._sim.leave(self._workers.pop(number)[0])

    def nodes(self) -> list[fleet.Node]:
        """None."""
        return []

    def _ask(self, number: int, call: fleet.Call | leases.Lease, method: str, *args: Any) -> None:
        sim = self._sim
        process, made = self._workers[number]

        def post(value: Any, error: Any) -> None:
            self._post(fleet.Event(number, call, value, error))

        ref = Ref(post)
        if process.dead or process.steps_left is not None:
            ref.settle(error=gone(sim))
            return
        process.refs.append(ref)

        def answer(value: Any, error: Any) -> None:
            sim.point()  # where it may die with its work done
            ref.settle(
                value, error if error is None or isinstance(error, RayExtractError) else fleet.Death(repr(error))
            )
            if method == "extract" and error is None and sim.fault("echo"):
                again = Ledger(sim.objects)
                sim.spawn(Process(), lambda: again.commit(value), lambda value, error: None)

        sim.spawn(process, lambda: getattr(made, method)(*args), answer)


def gone(sim: Simulation) -> fleet.Death:
    """How a worker is lost; sometimes with its node."""
    return fleet.Death("its actor died", node_left=sim.draw.random() < 0.3)


class Inbox:
    """queue.SimpleQueue among fibers, in any order."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        """As of SimpleQueue."""
        self._items.append(item)

    def get(self, timeout: float) -> Any:
        """As of SimpleQueue."""
        if not self._sim.wait(lambda: bool(self._items), timeout):
            raise queue.Empty
        return self._items.pop(self._sim.draw.randrange(len(self._items)))


class Event:
    """threading.Event in simulated time."""

    def __init__(self, sim: Simulation) -> None:
        self._sim, self._set = sim, False

    def set(self) -> None:
        """As of threading.Event."""
        self._set = True

    def is_set(self) -> bool:
        """As of threading.Event."""
        return self._set

    def wait(self, timeout: float) -> bool:
        """As of threading.Event."""
        return self._sim.wait(self.is_set, timeout)


class Lock:
    """threading.Lock among fibers."""

    def __init__(self, sim: Simulation) -> None:
        self._sim, self._held = sim, False

    def __enter__(self) -> None:
        self._sim.wait(lambda: not self._held)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


class Pool:
    """ThreadPoolExecutor whose tasks are fibers of the process that made it."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._open = 0

    def submit(self, action: Callable[..., Any], *args: Any) -> Future[Any]:
        """As of ThreadPoolExecutor."""
        process, future = self._sim.process, Future[Any]()
        assert process is not None
        self._open += 1

        def settle(value: Any, error: Any) -> None:
            self._open -= 1
            future.set_exception(error) if error is not None else future.set_result(value)

        self._sim.spawn(process, lambda: action(*args), settle)
        return future

    def shutdown(self, wait: bool) -> None:
        """As of ThreadPoolExecutor."""
        self._sim.wait(lambda: not self._open)


class Inline:
    """ThreadPoolExecutor that runs a task when it is submitted."""

    def __init__(self, _: int) -> None:
        pass

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, action: Callable[..., Any], *args: Any) -> Future[Any]:
        """As of ThreadPoolExecutor."""
        return at_once(action, *args)


@contextlib.contextmanager
def in_place(sim: Simulation) -> Iterator[None]:
    """The simulation's things in the product's modules."""

    def name(nbytes: int) -> str:
        sim.names += 1
        return f"{sim.names:0{2 * nbytes}x}"

    class Recorded(driver.Driver):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            sim.drivers.append((sim.process, self))

    job, world = sim.world.job, sim.world
    clock = types.SimpleNamespace(monotonic=lambda: sim.now, sleep=lambda seconds: sim.wait(timeout=seconds))
    threads = types.SimpleNamespace(
        Event=lambda: Event(sim),
        Lock=lambda: Lock(sim),
        current_thread=threading.current_thread,
        main_thread=threading.main_thread,
    )
    here: list[tuple[Any, str, Any]] = [
        (driver, "queue", types.SimpleNamespace(SimpleQueue=lambda: Inbox(sim), Empty=queue.Empty)),
        (ray_fleet, "RayFleet", functools.partial(Actors, sim)),
        (ray_fleet, "connect", lambda *_, **__: None),
        (ray_fleet, "RayMeter", lambda _: NoMeter()),
        (driver, "time", clock),
        (driver, "threading", threads),
        (driver, "ThreadPoolExecutor", lambda *_, **__: Pool(sim)),
        (driver, "Driver", Recorded),
        (driver, "secrets", types.SimpleNamespace(token_hex=name)),
        (store, "secrets", types.SimpleNamespace(token_hex=name)),
        (store, "random", types.SimpleNamespace(uniform=sim.draw.uniform)),
        (store, "time", clock),
        (extractor, "time", clock),
        (prepared, "ThreadPoolExecutor", Inline),
        (segments, "LEAST", 1),
        (ledger, "concurrent", types.SimpleNamespace(futures=types.SimpleNamespace(ThreadPoolExecutor=Inline))),
        (worker, "threading", threads),
        (worker, "time", clock),
        (worker, "Extractor", lambda _: Extractor(sim)),
        (plan, "prepare_rows", lambda store, *_: prepared.write_rows(store, world.rows, keep=job.capture.keep)),
        (run, "check_job", lambda _: (job, SHAPE, (1,), sim.objects)),
        (run, "source_fingerprint", lambda _: []),
        (run, "template_fingerprint", lambda *_: ""),
        *((module, "open_store", lambda *_: sim.objects) for module in (worker, verify, reader_rows)),
    ]
    with contextlib.ExitStack() as stack:
        for module, attribute, value in here:
            stack.enter_context(mock.patch.object(module, attribute, value))
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, level)
        yield


# Who does what


def disturbed(sim: Simulation) -> None:
    """Users who run the job again and again on a failing world, while others meddle."""
    sim.budget = sim.world.budget
    for _ in range(sim.world.users):
        sim.spawn(Process(), lambda: user(sim), no_error(sim))
    sim.spawn(Process(), lambda: operator(sim), no_error(sim))
    sim.run()


def no_error(sim: Simulation) -> Callable[[Any, Any], None]:
    """What a fiber of the tests' own ends with."""

    def then(_: Any, error: BaseException | None) -> None:
        if error is not None:
            sim.problem("".join(traceback.format_exception(error)))

    return then


def user(sim: Simulation) -> None:
    """Runs the job, or retries what failed, some times over."""
    for number in range(sim.draw.randint(1, 4)):
        command(sim, run.retry_failed if number and sim.draw.random() < 0.4 else run.run)


def command(sim: Simulation, action: Callable[[Job], run.Summary]) -> run.Summary | RayExtractError | None:
    """Run a command in a process; None if that died."""
    process, ended = Process(), []
    sim.counts[f"commands {action.__name__}"] += 1
    sim.spawn(process, lambda: action(sim.world.job), lambda value, error: ended.append(value or error))
    sim.wait(lambda: bool(ended) or process.dead)
    if not ended:
        return None
    (result,) = ended
    for child in process.children:
        sim.leave(child)
    expected = isinstance(result, run.Summary | RayExtractError)
    if isinstance(result, IdentityMismatch | PlanError) or (
        isinstance(result, ShardError) and not sim.counts["fault lag"]
    ):
        expected = False  # what nobody damaged is called damaged
    if not expected:
        sim.problem("".join(traceback.format_exception(result)))
    sim.counts[f"ended {type(result).__name__}"] += 1
    return result


def operator(sim: Simulation) -> None:
    """Asks runs to drain, and sweeps orphans, at odd times."""
    for _ in range(60):
        sim.wait(timeout=sim.draw.choice((0.0, 1.0, 5.0)))
        if sim.draw.random() < 0.1:
            with contextlib.suppress(StoreError, ShardError):
                sweep(sim)
        living = [each for process, each in sim.drivers if not process.dead]
        if living and sim.fault("drain"):
            each = sim.draw.choice(living)
            each._drain_since = sim.now
            each._drain.set()


def sweep(sim: Simulation) -> None:
    """As `ray-extract sweep --delete` does; none of them may be what a commit names."""
    lost = orphans(sim.objects)
    named = {record.get("key") for record in commits(sim).values()}
    for item in lost:
        if item.key in named:
            sim.problem(f"sweep would delete {item.key}, which is committed")
        sim.objects.delete(item.key)
        sim.counts["orphans swept"] += 1


def undisturbed(sim: Simulation) -> None:
    """The last run, and retry rounds until nothing is left that they can mend."""
    sim.budget = 0
    for process, _ in sim.drivers:
        if not process.dead:
            sim.kill(process)

    def finish() -> None:
        result = command(sim, run.run)
        for _ in range(6):
            if isinstance(result, run.Summary):
                result = command(sim, run.retry_failed)  # at least once, since a round may have been begun
            if isinstance(result, run.Summary) and sum(result.totals.failed.values()) == never:
                break
        if not isinstance(result, run.Summary):
            sim.problem(f"the last run ended with {result!r}")

    usable = [row.index for row in sim.world.rows if row.reason is None]
    never = sum(NEVER in (sim.world.rejected.get(row), sim.world.fatal.get(row)) for row in usable)
    sim.spawn(Process(), finish, no_error(sim))
    sim.run()


# What must be true


def commits(sim: Simulation) -> dict[str, dict[str, Any]]:
    """What is under commits/, by unit."""
    found = sim.objects.objects.items()
    return {
        key.removeprefix(COMMITS_PREFIX).removesuffix(".json"): json.loads(data)
        for key, data in found
        if key.startswith(COMMITS_PREFIX)
    }


def statuses(data: bytes) -> dict[int, str]:
    """What a manifest says of each row."""
    lines = plain_reader.pq.ParquetFile(io.BytesIO(data)).read(use_threads=False).to_pylist()
    return {line["row"]: line["status"] for line in lines}


class Blob(io.BytesIO):
    """An object, to the plain reader a file."""

    def read_bytes(self) -> bytes:
        """All of it."""
        return self.getvalue()


def check(sim: Simulation) -> Iterator[str]:
    """What is wrong with the output, seen from the objects alone."""
    objects, world = sim.objects.objects, sim.world
    keep = world.job.capture.keep
    usable = [row.index for row in world.rows if row.reason is None]
    never = {row for row in usable if NEVER in (world.rejected.get(row), world.fatal.get(row))}
    manifest = plain_reader.pq.ParquetFile(
        io.BytesIO(objects[max(key for key in objects if key.startswith("manifest-"))])
    )
    lines = manifest.read(use_threads=False).to_pylist()
    if [line["row"] for line in lines] != [row.index for row in world.rows]:
        yield f"the manifest has rows {[line['row'] for line in lines]}"
    states = {line["row"]: line["status"] for line in lines}
    expected = {row: "failed" if row in never else "ok" for row in usable}
    if states != {row.index: expected.get(row.index, "skipped") for row in world.rows}:
        yield f"rows are {states}; never ok: {sorted(never)}"
    named = {record["key"]: record for record in commits(sim).values() if "key" in record}
    for line in lines:
        if line["status"] != "ok":
            continue
        if line["shard"] not in named or named[line["shard"]]["unit"] != line["unit"]:
            yield f"row {line['row']} is in {line['shard']}, which no commit names"
            continue
        read = plain_reader.read_raw if line["format"] == "raw" else plain_reader.read_parquet
        found, want, row = read(Blob(objects[line["shard"]]), line), truth(line["row"], keep), world.rows[line["row"]]
        if found.input_ids.tolist() != row.input_ids.tolist() or found.loss_mask.tolist() != row.loss_mask.tolist():
            yield f"row {line['row']} has the ids or the mask of another"
        if not all(map(np.array_equal, found.states.values(), want.values)) or len(found.states) != len(COLUMNS):
            yield f"row {line['row']} has other states than it must have"
        if not found.digests == line["digests"] == want.digests:
            yield f"row {line['row']} has digests {found.digests}, the manifest {line['digests']}"
        sim.counts["rows checked"] += 1
    places: Counter[int] = Counter()
    rounds: Counter[tuple[int, int]] = Counter()
    for unit, record in commits(sim).items():
        if "split" in record:
            sim.counts["splits"] += 1
            continue
        data = objects.get(record["key"])
        if data is None or len(data) != record["size"] or record["unit"] != unit:
            yield f"the commit of {unit} names {record['key']}: {None if data is None else len(data)} bytes"
            continue
        shard = open_shard(sim.objects, record["key"], record["format"])
        if shard.sha256_other() != record["sha256"]:
            yield f"{record['key']} has another hash than its commit says"
        if record["format"] == "raw" and plain_reader.sha256_of_all_but_states(Blob(data)) != record["sha256"]:
            yield f"{record['key']} has another hash than its commit says, by the plain reader"
        held, number = shard.table.row.tolist(), round_of_unit(unit)
        places.update(held if number is None else [])
        rounds.update((number, row) for row in held if number is not None)
    if places != Counter(usable):
        yield f"rows in committed shards of the plan: {dict(places)}, usable are {usable}"
    if rounds and max(rounds.values()) > 1:
        yield f"a row is twice in a round: {rounds.most_common(1)}"
    shards = {key for key in objects if key.startswith("shards/")}
    lost = {item.key for item in orphans(sim.objects)}
    if lost & named.keys() or lost != shards - named.keys():
        yield f"orphans are {lost}, of {shards}; commits name {named.keys()}"
    summary = json.loads(objects[SUMMARY_KEY])
    ok = sum(status == "ok" for status in states.values())
    if (summary["state"], summary["rows"]["ok"], summary["units_done"]) != ("complete", ok, len(named)):
        yield f"the summary says {summary['state']}, {summary['rows']['ok']} rows, {summary['units_done']} units"
    # Drivers that died could not say all that they did; but no unit is two drivers'.
    counted = summary["all_runs"]["units"]
    if counted > len(named) or (counted < len(named) and not (sim.counts["deaths"] or sim.counts["fault late"])):
        yield f"drivers say that they committed {counted} units; {len(named)} are committed"
    sim.counts["units in accounts"] += counted
    sim.counts["orphans left"] += len(lost)
    sim.counts["duplicate attempts"] += len(shards) - len(named)
    report = verify.verify(URL)
    if not report.ok or (report.rows, report.rows_ok, report.rows_failed) != (
        len(world.rows),
        len(usable) - len(never),
        len(never),
    ):
        yield "\n".join(report.lines())
    items = HiddenStates(URL, check=True)
    if [items[i]["row"] for i in range(len(items))] != [row for row in usable if row not in never]:
        yield "the reader has other rows"


def run_schedule(seed: int) -> Simulation:
    """One schedule; its problems are in `problems`, each a broken rule."""
    sim = Simulation(seed)
    with in_place(sim):
        disturbed(sim)
        if not sim.problems:
            undisturbed(sim)
        if not sim.problems:
            sim.problems += check(sim)
    sim.counts["schedules"] += 1
    return sim


def trace(sim: Simulation) -> str:
    """A digest of everything that came of a schedule, but for what people may read of time."""
    digest = hashlib.sha256(repr(sorted(sim.counts.items())).encode())
    for key, data in sorted(sim.objects.objects.items()):
        if key not in (PROGRESS_KEY, SUMMARY_KEY):
            digest.update(key.encode() + data)
    return digest.hexdigest()


def main() -> int:
    """Run many schedules and print what happened in them."""
    parser = argparse.ArgumentParser(description="Fault schedules on the whole product, without Ray.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    bad = []
    for seed in range(args.first, args.first + args.count):
        sim = run_schedule(seed)
        counts += sim.counts
        if sim.problems:
            bad.append(seed)
            print(f"seed {seed}: {sim.problems[0]}")
    for name, count in sorted(counts.items()):
        print(f"{count:10,} {name}")
    print(f"{len(bad)} schedules broke a rule{f': {bad[:20]}' if bad else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
