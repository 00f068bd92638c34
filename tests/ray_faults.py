"""Whole runs on a real Ray cluster of several nodes, whose processes are killed, stopped and cut off by a seed.

The command runs as people run it, on simulated engines (see engine_faults.py). A seed says which faults, about when,
and on what cluster; who of several is hit, and what it was doing, is the machine's. After each schedule the output is
read by the product's verify and by a reader that shares no code with it: every row is there once, with the states that
it must have, or skipped or failed for the reason that it must have; nothing committed ever changed; the exit codes said
what is there; no process and no shared memory is left. Three schedules share all kinds of fault between them.

    python tests/ray_faults.py --count 200 [--first SEED] [--ray-patience] [--keep FOLDER]
"""

import argparse
import base64
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import clusters
import numpy as np
import plain_reader
import servers
from engine_faults import KINDS as ENGINE_FAULTS
from engine_faults import EngineFaults
from faulty_proxy import Do, FaultyProxy
from simulated import HIDDEN, MARK, STATES, arenas, hosts, make_rows, make_work, parent

from ray_extract.engine.process import session_pids
from ray_extract.engine.simulated import simulated_states
from ray_extract.layout import COMMITS_PREFIX, SHARDS_PREFIX, SHM_PREFIX, SUCCESS_KEY, round_of_unit
from ray_extract.ledger import read_manifest
from ray_extract.store import open_store
from ray_extract.verify import verify

# What an exit code may say of an output: the one place to change when the codes do.
SAYS = {0: {"complete"}, 1: {"rows failed", "stopped by an error"}, 3: {"stopped by an error", "stopped on request"}}

SHM = Path("/dev/shm")
REJECT = 2  # a token; see SimulatedEngine
STALL_S = 8.0
DEADLINE_S = 450.0
# A node is dead when it did not answer for about 10 s; with Ray's own settings that takes 65.
SHORT_PATIENCE = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}
REPLACED = "a worker is replaced"  # the driver's words, when it noticed

Times = dict[str, list[tuple[float | None, ...]]]  # by kind of fault, seconds to this and that, None if it never came
Wait = tuple[Callable[[], Any], float]  # what to wait for, and how long at most, in seconds
Event = Generator[Wait, Any, None]  # is sent the value that it waited for, or None


@dataclasses.dataclass
class Fault:
    """One that was done.

    Args:
        kind: which.
        at: monotonic time.
        engines: pids of the hosts that served then.
        ends_engine: whether an engine must come back.
    """

    kind: str
    at: float
    engines: frozenset[int]
    ends_engine: bool


class Nodes:
    """The worker nodes of a cluster; each has room for one engine."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        # Starting a node takes seconds, and the schedule goes on meanwhile. Ray's hooks are for the main thread only;
        # when the head ends, which has them, these nodes end too.
        cluster._shutdown_at_exit = False
        self.leaving: set[Any] = set()  # nodes that an event sees to
        self.raylets: dict[Any, subprocess.Popen[bytes]] = {}  # of all nodes that there ever were
        self._changes = ThreadPoolExecutor(1)

    def living(self) -> list[Any]:
        """Nodes whose raylet runs (or is stopped), the oldest first."""
        return [node for node, raylet in list(self.raylets.items()) if raylet.poll() is None]

    def add(self) -> "Future[Any]":
        """One more."""

        def action() -> None:
            node = clusters.add_node(self.cluster, num_cpus=1, num_gpus=1)
            self.raylets[node] = node.all_processes["raylet"][0].process

        return self._changes.submit(action)

    def remove(self, node: Any, graceful: bool) -> "Future[Any]":
        """One less."""
        return self._changes.submit(self.cluster.remove_node, node, allow_graceful=graceful)

    def mend(self) -> int:
        """Replace nodes that ended by themselves, as on a busy machine one may that Ray took for dead; how many."""
        ended = self.raylets.keys() - set(self.living()) - self.leaving
        for node in ended:
            self.leaving.add(node)
            self.remove(node, graceful=False)
            self.add()
        return len(ended)

    def settle(self, count: int) -> None:
        """Wait for changes under way, and see that `count` nodes are there."""
        self._changes.submit(lambda: None).result()
        living = [node for node in self.living() if node not in self.leaving]
        for node in self.cluster.worker_nodes - set(living[:count]):
            self.leaving.add(node)
            self.remove(node, graceful=False).result()
        for _ in range(count - len(living)):
            self.add().result()


class Schedule:
    """One run of a job, disturbed.

    Args:
        seed: says what happens.
        nodes: of the cluster; this schedule's number of them is made to be there.
        server: starts an S3 server, for schedules whose store fails.
        folder: for its files.
    """

    def __init__(self, seed: int, nodes: Nodes, server: Callable[[], servers.S3Server], folder: Path) -> None:
        self.draw = draw = random.Random(seed)
        self.nodes, self.folder = nodes, folder
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.faults: list[Fault] = []
        self.kinds = deal(seed)
        self.size = draw.randint(2, 4)
        rows, engines = draw.randint(160, 320), self.size - (draw.random() < 0.3)
        data = make_rows(rows, seed)
        self.rejected = {row: "rejected: " for row in range(rows) if draw.random() < 0.01}
        self.skipped = {row: "empty row" for row in range(rows) if draw.random() < 0.01 and row not in self.rejected}
        for row in self.rejected:
            data[row][-1] = REJECT
        for row in self.skipped:
            data[row] = []
        self.spoilt: set[str] = set()  # reasons for which rows may fail besides, until they are retried
        self.proxy: FaultyProxy | None = None
        where: dict[str, Any] = {}
        if "store_down" in self.kinds:
            options = server().storage_options
            self.proxy = FaultyProxy(options["endpoint"])
            where = {"url": f"{server().url}/{folder.name}", "options": {**options, "endpoint": self.proxy.endpoint}}
        (folder / "faults").mkdir()
        self.engine_faults = EngineFaults(folder / "faults")
        pace = sum(map(len, data)) // (12 * engines)  # 12 seconds of work
        self.work = make_work(
            folder,
            data,
            str(nodes.cluster.address),
            **where,
            engine={
                "count": engines,
                "gpus": 1,
                "cpus": 0.25,
                "args": {"tokens_per_s": pace, "reject_token": REJECT},
                "env": {MARK: f"{folder.name}-{os.getpid()}", **self.engine_faults.env()},
                "stall_timeout_s": STALL_S,
            },
            output={
                "format": draw.choice(("raw", "parquet")),
                "max_rows": draw.randint(2, 5),
                "outage_s": 120,
                "head": False,
            },
            run={"max_attempts": 6, "max_engine_deaths": 6, "drain_s": 15},
        )
        self.outage_s = draw.choice((5, 5, 15, 60))
        direct = server().storage_options if self.proxy else {}
        self.store = open_store(self.work.url, direct)
        self.units = -(-(rows - len(self.skipped)) // 5)
        self.log = folder / "log.txt"
        self.driver: subprocess.Popen[bytes] | None = None
        self.sessions: list[int] = []
        self.said = 0  # bytes of the log when the present command began
        self.asked = self.excused = self.over = False  # of the present driver: SIGTERM; a store that was down; all done
        self.commits: dict[str, tuple[float, bytes]] = {}
        self.serving: frozenset[int] = frozenset()  # pids of engine hosts
        self.history: list[tuple[float, frozenset[int]]] = []  # since when these engines served
        self.arenas: set[str] = set()  # names of folders in /dev/shm
        self.leaked: set[str] = set()
        self.actors: set[tuple[int, str]] = set()

    # The command

    def command(self, *arguments: str) -> None:
        """Begin a command on the job, in a session of its own."""
        with self.log.open("ab") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", *arguments, *self.work.args()],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env={**os.environ, "TMPDIR": str(self.folder)},  # where the engines' logs go, named for their arenas
                start_new_session=True,
            )
        self.sessions.append(self.driver.pid)
        self.said = self.log.stat().st_size
        self.asked = self.excused = False
        self.counts["commands"] += 1

    def run(self) -> None:
        """Run the job to its end, with all that is to happen meanwhile."""
        deadline = time.monotonic() + DEADLINE_S
        self.command("ray_extract.run")
        waiting = [
            (self.draw.random() * 0.9 * (number > 0), 8 * self.draw.random() ** 2, kind)
            for number, kind in enumerate(self.draw.sample(self.kinds, len(self.kinds)))
        ]
        running: list[tuple[Event, Wait, float]] = []
        while not self.over or running:
            if time.monotonic() > deadline:
                at_work = [event.gi_yieldfrom or event for event, _, _ in running]
                raise AssertionError(f"no end after {DEADLINE_S:.0f} s, {len(self.commits)} commits, in {at_work}")
            self.look()
            for one in [one for one in waiting if len(self.commits) >= one[0] * self.units]:
                waiting.remove(one)
                event = self.begin(one[2], time.monotonic() + one[1])
                wait = next(event)
                running.append((event, wait, time.monotonic() + wait[1]))
            for one in list(running):
                event, (true, _), end = one
                value = true()
                if value or time.monotonic() > end:
                    running.remove(one)
                    with contextlib.suppress(StopIteration):
                        wait = event.send(value or None)
                        running.append((event, wait, time.monotonic() + wait[1]))
            self.attend()
            self.counts["nodes that ended by themselves"] += self.nodes.mend()
            time.sleep(0.1 if self.proxy is None else 0.3)
        self.counts["events that came too late"] += len(waiting)

    def begin(self, kind: str, at: float) -> Event:
        """An event, at a time."""
        yield (lambda: time.monotonic() > at), 60.0
        yield from EVENTS[kind](self)

    def attend(self) -> None:
        """See to a command that ended: is its exit code true, and is it to be run again?"""
        assert self.driver is not None
        code = self.driver.poll()
        if code is None or self.over:
            return
        self.look()
        found = self.state()
        if code == -signal.SIGKILL or (code == -signal.SIGTERM and self.asked and self.log.stat().st_size == self.said):
            self.counts["commands that were killed, or asked to end while Python began"] += 1
        else:
            self.counts[f"exit codes {code}: {found}"] += 1
            if found not in SAYS.get(code, ()) or (found == "stopped by an error" and not self.excused):
                self.problems.append(f"exit code {code}: {found}")
                self.over = True
            if found in ("complete", "rows failed"):
                self.over = True
        if not self.over:
            self.command("ray_extract.run")

    def state(self) -> str:
        """What the output says of itself."""
        if self.store.head(SUCCESS_KEY) is not None:
            success = json.loads(self.store.get(SUCCESS_KEY))
            return "rows failed" if success["failed"] else "complete"
        return "stopped on request" if self.asked else "stopped by an error"

    # What can be seen from outside

    def look(self) -> None:
        """Note new commits and engines."""
        now = time.monotonic()
        for item in self.store.list(COMMITS_PREFIX):
            if item.key not in self.commits:
                self.commits[item.key] = now, self.store.get(item.key)
        serving, in_use = set(), set()
        for pid in hosts(self.work.mark):
            with contextlib.suppress(OSError):
                if folders := arenas(pid):
                    serving.add(pid)
                    in_use |= {folder.name for folder in folders}
                    actor = parent(pid)
                    self.actors.add((actor, started(actor)))
        self.arenas |= in_use
        if serving != self.serving:
            self.serving = frozenset(serving)
            self.history.append((now, self.serving))
        self.look_for_leaks(in_use)

    def look_for_leaks(self, in_use: set[str]) -> None:
        """Note arenas that no guard watches. The maker of another may sweep them soon, so not only at the end."""
        logs = (self.folder / "ray_extract-logs").glob(f"engine-{SHM_PREFIX}*")
        self.arenas |= {"-".join(path.name.split("-")[1:3]) for path in logs}
        left = {name for name in self.arenas - in_use if (SHM / name).exists()}
        lines = [line for _, line in processes() if "guard.py" in line] if left else []
        self.leaked |= {name for name in left if (SHM / name).exists() and not any(name in line for line in lines)}

    def attempts(self) -> dict[str, str]:
        """The key of the shard that counts, of each unit that is committed and was not split."""
        records = [json.loads(data) for _, data in self.commits.values()]
        return {record["unit"]: record["key"] for record in records if "key" in record}

    def done(self, kind: str, ends_engine: bool = False, rows_fail: str = "") -> None:
        """A fault was done just now."""
        self.faults.append(Fault(kind, time.monotonic(), self.serving, ends_engine))
        self.counts[f"fault {kind}"] += 1
        if rows_fail:
            self.spoilt.add(rows_fail)

    def replaced(self) -> int:
        """How many workers the drivers say that they replaced."""
        return self.log.read_text(errors="replace").count(REPLACED)

    # The ends of a schedule

    def retry(self) -> None:
        """Rows that a fault spoilt are retried until all are as if nothing had happened."""
        if self.state() != "rows failed" or not self.spoilt:
            return
        for line in read_manifest(self.store).to_pylist():
            if line["status"] == "failed" and not line["reason"].startswith((*self.rejected.values(), *self.spoilt)):
                self.problems.append(f"row {line['row']} failed: {line['reason']}")
        self.command("ray_extract", "retry-failed")
        assert self.driver is not None
        code = self.driver.wait(120)
        self.look()
        expected = "rows failed" if self.rejected else "complete"
        self.counts["retry rounds"] += 1
        if self.state() != expected or expected not in SAYS.get(code, ()):
            self.problems.append(f"retry-failed: exit code {code}: {self.state()}; it should be: {expected}")

    def leftovers(self) -> list[str]:
        """Processes and shared memory of ours that are still there."""
        ours = {pid for session in self.sessions for pid in session_pids(session)}
        raylets = {raylet.pid for raylet in self.nodes.raylets.values()}
        return [
            *(f"process {pid}: {line}" for pid, line in processes() if pid in ours or self.owns(pid, line, raylets)),
            *(str(path) for path in SHM.iterdir() if any(name in path.name for name in self.arenas)),
        ]

    def owns(self, pid: int, line: str, raylets: set[int]) -> bool:
        """Whether a process is an engine, a guard or an actor of this schedule."""
        with contextlib.suppress(OSError):
            return (
                f"{MARK}={self.work.mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
                or ("guard.py" in line and any(name in line for name in self.arenas))
                or (pid, started(pid)) in self.actors
                or (line.startswith("ray::Worker") and parent(pid) in raylets)
            )
        return False

    def check_leftovers(self) -> None:
        """Wait until nothing is left; what stays is a problem, and is ended."""
        self.look_for_leaks(set())
        self.problems += [f"left behind: {SHM / name}, and nobody to remove it" for name in self.leaked]
        end = time.monotonic() + 30
        while (left := self.leftovers()) and time.monotonic() < end:
            time.sleep(0.5)
        self.problems += [f"left behind: {what}" for what in left]
        for what in left:
            if what.startswith("process "):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(what.split()[1].rstrip(":")), signal.SIGKILL)

    def recovered(self) -> Times:
        """For each kind of fault, seconds to the next commit, and until as many engines served, a new one with them."""
        times: Times = defaultdict(list)
        for fault in self.faults:
            moments = [
                [at for at, _ in self.commits.values()],
                [
                    at
                    for at, serving in self.history
                    if fault.ends_engine and serving - fault.engines and len(serving) >= len(fault.engines)
                ],
            ]
            times[fault.kind].append(
                tuple(min((at - fault.at for at in some if at > fault.at), default=None) for some in moments)
            )
        return times


# Events. Each waits until it can be done, does it, says so, and sees to what follows


def an_engine(s: Schedule) -> Generator[Wait, Any, int | None]:
    """The pid of a host that serves, any of them."""
    yield (lambda: s.serving), 120.0
    return s.draw.choice(sorted(s.serving)) if s.serving else None


def a_node(s: Schedule) -> Generator[Wait, Any, Any]:
    """A node, most often one with an engine."""
    above = above_engine(s, (yield from an_engine(s)))
    found = [node for node in s.nodes.living() if node not in s.nodes.leaving]
    node = next((n for n in found if s.nodes.raylets[n].pid in above), s.draw.choice(found) if found else None)
    s.nodes.leaving.add(node)
    return node


def above_engine(s: Schedule, host: int | None) -> list[int]:
    """The pids of a host's actor, and of that one's raylet; none if one of them is gone, and init in its place."""
    with contextlib.suppress(OSError):
        if host is not None and parent(parent(host)) in {s.nodes.raylets[node].pid for node in s.nodes.living()}:
            return [parent(host), parent(parent(host))]
    return []


def kill(*pids: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal; whether one of them was there."""
    found = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            found = True
    return found


def host_killed(s: Schedule) -> Event:
    """kill -9 of an engine host."""
    host = yield from an_engine(s)
    if host and kill(host):
        s.done("host_killed", ends_engine=True)


def scheduler_killed(s: Schedule) -> Event:
    """kill -9 of a host's child; its owner ends with it."""
    host = yield from an_engine(s)
    if host and kill(*(pid for pid in session_pids(host) if pid != host)):
        s.done("scheduler_killed", ends_engine=True)


def host_stopped(s: Schedule) -> Event:
    """SIGSTOP of a host: what is sent to it waits in the pipe."""
    host = yield from an_engine(s)
    if host and kill(host, number=signal.SIGSTOP):
        s.done("host_stopped", ends_engine=True)


def actor_killed(s: Schedule) -> Event:
    """kill -9 of the process of an actor, with its engine below it."""
    host = yield from an_engine(s)
    if kill(*above_engine(s, host)[:1]):
        s.done("actor_killed", ends_engine=True)


def actor_stopped(s: Schedule) -> Event:
    """SIGSTOP of the process of an actor, whose node is well; it goes on when its units are with others."""
    above = above_engine(s, (yield from an_engine(s)))
    before = s.replaced()
    if kill(*above[:1], number=signal.SIGSTOP):
        s.done("actor_stopped", ends_engine=True)
        yield (lambda: s.over or s.replaced() > before), 120.0
        kill(*above[:1], number=signal.SIGCONT)


def driver_killed(s: Schedule) -> Event:
    """kill -9 of the driver; the same command is run again at once."""
    assert s.driver is not None
    if s.driver.poll() is None and kill(s.driver.pid):
        s.done("driver_killed", ends_engine=True)
    yield from ()


def driver_asked(s: Schedule) -> Event:
    """SIGTERM to the driver; the same command is run again as soon as it ended."""
    assert s.driver is not None
    if s.driver.poll() is None and kill(s.driver.pid, number=signal.SIGTERM):
        s.asked = True
        s.done("driver_asked", ends_engine=True)
    yield from ()


def raylet_killed(s: Schedule) -> Event:
    """kill -9 of a raylet: a node is lost. Another comes a while later."""
    node = yield from a_node(s)
    if node is None:
        return
    kill(s.nodes.raylets[node].pid)
    s.done("raylet_killed", ends_engine=True)
    later = time.monotonic() + 6 * s.draw.random()
    yield (lambda: time.monotonic() > later), 60.0
    s.nodes.remove(node, graceful=False)
    yield s.nodes.add().done, 120.0


def node_replaced(s: Schedule) -> Event:
    """A node is taken away with all its processes, and another is added, before or after."""
    node = yield from a_node(s)
    if node is None:
        return
    first, graceful = s.draw.random() < 0.5, s.draw.random() < 0.5
    if first:
        yield s.nodes.add().done, 120.0
    removal = s.nodes.remove(node, graceful)
    yield (lambda: removal.running() or removal.done()), 60.0
    s.done("node_replaced", ends_engine=True)
    yield removal.done, 120.0
    if not first:
        yield s.nodes.add().done, 120.0


def node_stopped(s: Schedule) -> Event:
    """SIGSTOP of a raylet, and often of its actors; when others committed what these hold, they go on and upload it."""
    node = yield from a_node(s)
    if node is None:
        return
    raylet, before = s.nodes.raylets[node].pid, s.replaced()
    above = [above_engine(s, host) for host in sorted(s.serving)]
    actors = {pids[0] for pids in above if raylet in pids and s.draw.random() < 0.8}
    kill(raylet, *actors, number=signal.SIGSTOP)
    s.done("node_stopped", ends_engine=True)
    shards = {item.key for item in s.store.list(SHARDS_PREFIX)}
    yield s.nodes.add().done, 120.0
    yield (lambda: s.over or s.replaced() > before), 150.0

    def late() -> set[str]:
        """Shards that came since, of units that are committed with another."""
        came = {item.key for item in s.store.list(SHARDS_PREFIX)} - shards
        return {key for key in came if s.attempts().get(key.split("/")[1].split(".")[0], key) != key}

    noticed = set(s.commits)
    yield (lambda: s.over or any("-01" not in key for key in shards_since(s, noticed))), 60.0
    kill(*actors, number=signal.SIGCONT)
    if actors:
        uploads = yield late, 15.0
        s.counts["shards that a zombie uploaded too late"] += len(uploads or ())
    kill(raylet, number=signal.SIGCONT)  # Ray took it for dead and says so: it ends, and its workers with it
    yield (lambda: node not in s.nodes.living()), 60.0
    yield s.nodes.remove(node, graceful=False).done, 60.0


def shards_since(s: Schedule, before: set[str]) -> list[str]:
    """The shards of units that were committed since."""
    units = {key.removeprefix(COMMITS_PREFIX).removesuffix(".json") for key in s.commits.keys() - before}
    return [key for unit, key in s.attempts().items() if unit in units]


def store_down(s: Schedule) -> Event:
    """Nothing comes through to the store for a while; it is done when that is over."""
    assert s.proxy is not None
    proxy, how = s.proxy, s.draw.choice((Do.RESET_BEFORE, Do.SLOW_DOWN))
    proxy.decide = lambda request: how
    up = time.monotonic() + s.outage_s
    while time.monotonic() < up:
        s.excused = True  # of each command that begins or ends meanwhile
        yield (lambda: True), 1.0
    proxy.decide = lambda request: Do.PASS
    s.done("store_down")


def in_engine(kind: str, ends_engine: bool = False, rows_fail: str = "") -> Callable[[Schedule], Event]:
    """One of engine_faults."""

    def event(s: Schedule) -> Event:
        fired = s.engine_faults.arm(kind)
        yield (lambda: fired.exists() or s.over), 120.0
        s.engine_faults.disarm(fired)
        if fired.exists():
            s.done(kind, ends_engine, rows_fail)

    return event


EVENTS: dict[str, Callable[[Schedule], Event]] = {
    "actor_killed": actor_killed,
    "actor_stopped": actor_stopped,
    "driver_asked": driver_asked,
    "driver_killed": driver_killed,
    "host_killed": host_killed,
    "host_stopped": host_stopped,
    "node_replaced": node_replaced,
    "node_stopped": node_stopped,
    "raylet_killed": raylet_killed,
    "scheduler_killed": scheduler_killed,
    "store_down": store_down,
    "hang": in_engine("hang", ends_engine=True),
    "slow": in_engine("slow"),
    "unanswered": in_engine("unanswered", ends_engine=True),
    "uncovered": in_engine("uncovered", rows_fail="incomplete: "),
    "other_ids": in_engine("other_ids", rows_fail="mismatch: "),
    "digest": in_engine("digest", ends_engine=True),
    "garbage": in_engine("garbage", ends_engine=True),
    "stray": in_engine("stray"),
}
assert EVENTS.keys() >= ENGINE_FAULTS.keys()
DECK = 3  # schedules that share the kinds between them


def deal(seed: int) -> list[str]:
    """The kinds of a schedule: all are dealt to DECK consecutive ones."""
    kinds = sorted(EVENTS)
    random.Random(seed // DECK).shuffle(kinds)
    return kinds[seed % DECK :: DECK]


# Processes


def started(pid: int) -> str:
    """When a process began, to know it from a later one of its number; OSError if it is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def processes() -> Iterator[tuple[int, str]]:
    """Pid and command line of all that are not zombies."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (line := (entry / "cmdline").read_bytes()):
                yield int(entry.name), line.replace(b"\0", b" ").decode(errors="replace").strip()


# What must be true


def check(s: Schedule) -> Iterator[str]:
    """What is wrong with the output, seen from copies of its objects."""
    copy = s.folder / "copy"
    for item in s.store.list(""):
        (copy / item.key).parent.mkdir(parents=True, exist_ok=True)
        (copy / item.key).write_bytes(s.store.get(item.key))
    for key, (_, data) in s.commits.items():
        if (copy / key).read_bytes() != data:
            yield f"{key} changed after it was there"
    lines = plain_reader.pq.ParquetFile(max(copy.glob("manifest-*.parquet"))).read().to_pylist()
    if [line["row"] for line in lines] != list(range(len(s.work.rows))):
        yield f"the manifest has rows {[line['row'] for line in lines]}"
    for line in lines:
        row = line["row"]
        status = "skipped" if row in s.skipped else "failed" if row in s.rejected else "ok"
        reason = {**s.skipped, **s.rejected}.get(row)
        if line["status"] != status or (reason is not None and not line["reason"].startswith(reason)):
            yield f"row {row} is {line['status']} ({line['reason']}), and should be {status} ({reason})"
    for row, found in plain_reader.read_output(copy).items():
        ids = np.array(s.work.rows[row], np.int32)
        wanted = simulated_states(ids, 0, len(STATES), HIDDEN, "BF16")
        if found.input_ids.tolist() != ids.tolist() or list(found.states) != list(STATES):
            yield f"row {row} has other ids or states"
        elif not all(
            np.array_equal(state, want.float().numpy())
            for state, want in zip(found.states.values(), wanted, strict=True)
        ):
            yield f"row {row} has other values than it must have"
        s.counts["rows read"] += 1
    yield from check_commits(s, copy, {line["row"] for line in lines if line["status"] != "skipped"})
    report = verify(s.work.url, s.work.options)
    if not report.ok:
        yield "\n".join(report.lines())


def check_commits(s: Schedule, copy: Path, usable: set[int]) -> Iterator[str]:
    """Each commit's shard is there as it says, and has its rows once; these are all rows, or a retry round's."""
    places: Counter[int] = Counter()
    shards = {path.name for path in (copy / "shards").iterdir()}
    for path in (copy / "commits").iterdir():
        record = json.loads(path.read_text())
        if "split" in record:
            s.counts["splits"] += 1
            continue
        shard = copy / record["key"]
        if record["unit"] != path.stem or not shard.exists() or shard.stat().st_size != record["size"]:
            yield f"{path.name} names {record['key']}, which is not there with its size"
            continue
        shards.remove(shard.name)
        rows, digests = shard_rows(shard)
        if digests != base64.b64decode(record["digests"]) or len(rows) != record["rows"]:
            yield f"{path.name} has other digests or rows than its shard"
        if record["format"] == "raw" and plain_reader.sha256_of_all_but_states(shard) != record["sha256"]:
            yield f"{path.name} has another hash than its shard"
        if round_of_unit(record["unit"]) is None:
            places.update(rows)
        elif not set(rows) <= usable:
            yield f"{path.name} has rows {rows}"
        s.counts["retries of a unit that counted"] += "-01" not in record["attempt"]
    if places != Counter(usable):
        lost, twice = usable - places.keys(), [row for row, count in places.items() if count > 1]
        yield f"of the plan's units, rows lost: {sorted(lost)}, rows twice: {twice}"
        s.counts["rows lost"] += len(lost)
        s.counts["rows twice"] += len(twice)
    s.counts["units committed"] += len(s.commits)
    s.counts["shards that no commit names"] += len(shards)


def shard_rows(path: Path) -> tuple[list[int], bytes]:
    """The rows of a shard, and their digests as bytes."""
    if path.suffix == ".parquet":
        pieces = plain_reader.pq.ParquetFile(path).read(["row", "piece", "digest"]).to_pylist()
        first = [piece for piece in pieces if piece["piece"] == 0]
        return [piece["row"] for piece in first], np.array([p["digest"] for p in first], "<u8").tobytes()
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])

    def part(name: str) -> bytes:
        first, end = header[name]["data_offsets"]
        return data[begin + first : begin + end]

    return np.frombuffer(part("row"), "<i8").tolist(), part("digest")


def run_schedule(seed: int, nodes: Nodes, server: Callable[[], servers.S3Server], folder: Path) -> Schedule:
    """One schedule in a new folder; its problems are in `problems`, each a broken rule."""
    folder.mkdir()
    schedule = Schedule(seed, nodes, server, folder)
    try:
        nodes.settle(schedule.size)
        schedule.run()
        schedule.retry()
        schedule.problems += check(schedule)
    except Exception:
        schedule.problems.append(traceback.format_exc())
    finally:
        if schedule.driver is not None and schedule.driver.poll() is None:
            schedule.driver.kill()
            schedule.driver.wait()
        for node in nodes.living():
            kill(nodes.raylets[node].pid, number=signal.SIGCONT)
        schedule.check_leftovers()
        if schedule.proxy is not None:
            schedule.proxy.close()
    schedule.counts["schedules"] += 1
    return schedule


@contextlib.contextmanager
def stage(folder: Path, ray_patience: bool = False) -> Iterator[tuple[Nodes, Callable[[], servers.S3Server]]]:
    """A cluster, and a function that starts an S3 server when it is first called."""
    with contextlib.ExitStack() as stack:
        config = {} if ray_patience else {"_system_config": SHORT_PATIENCE}
        nodes = Nodes(stack.enter_context(clusters.cluster(num_cpus=0, num_gpus=0, **config)))
        started: list[servers.S3Server] = []

        def server() -> servers.S3Server:
            if not started:
                started.append(stack.enter_context(servers.seaweedfs(folder / "seaweedfs")))
            return started[0]

        yield nodes, server


def times_to_recover(schedules: list[Times]) -> Iterator[str]:
    """A line for each kind of fault: medians and worst cases."""
    merged: Times = defaultdict(list)
    for times in schedules:
        for kind, pairs in times.items():
            merged[kind] += pairs

    def shown(values: list[float]) -> str:
        return f"{statistics.median(values):6.1f} {max(values):6.1f}" if values else f"{'-':>6} {'-':>6}"

    yield f"{'seconds to':18} {'the next commit':>15} {'a new engine':>15}   (median, longest)"
    for kind, pairs in sorted(merged.items()):
        commits, engines = ([value for value in column if value is not None] for column in zip(*pairs, strict=True))
        yield f"{kind:18} {shown(commits):>15} {shown(engines):>15}   of {len(pairs)}"


def main() -> int:
    """Run many schedules and print what happened in them."""
    parser = argparse.ArgumentParser(description="Fault schedules on a real Ray cluster.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ray-patience", action="store_true", help="nodes are dead when Ray's own settings say so")
    parser.add_argument("--keep", type=Path, help="where the files of schedules that broke a rule stay")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    times, bad = [], []
    with tempfile.TemporaryDirectory(prefix="rxf") as name, stage(Path(name), args.ray_patience) as (nodes, server):
        for seed in range(args.first, args.first + args.count):
            began = time.monotonic()
            folder = Path(name) / f"{seed:06d}"
            schedule = run_schedule(seed, nodes, server, folder)
            counts += schedule.counts
            times.append(schedule.recovered())
            took = time.monotonic() - began
            done = ", ".join(fault.kind for fault in schedule.faults)
            print(f"seed {seed}: {took:.0f} s, {schedule.size} nodes, {done}", flush=True)
            for problem in schedule.problems:
                print(f"seed {seed}: {problem}", flush=True)
            if schedule.problems:
                bad.append(seed)
                print("\n".join(schedule.log.read_text(errors="replace").splitlines()[-30:]), flush=True)
                if args.keep:
                    shutil.copytree(folder, args.keep / folder.name)
            shutil.rmtree(folder, ignore_errors=True)
    for kind, count in sorted(counts.items()):
        print(f"{count:8,} {kind}")
    print(*times_to_recover(times), sep="\n")
    print(f"{counts['rows lost']} rows lost, {counts['rows twice']} rows twice")
    print(f"{len(bad)} schedules broke a rule{f': {bad}' if bad else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
