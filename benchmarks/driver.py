"""Whether the driver keeps up with a thousand engines, and what sixteen give in place of one.

python benchmarks/driver.py [1000-engines] [scaling-16] [--folder DIR]

1000-engines   the product's scheduling and its real ledger in a local folder, in real time; engines are simulated in
               the same process, whose CPU time and memory are measured as a whole; there are no shards. A process of
               its own starts from a plan of 10 million rows in 100,000 units
scaling-16     whole actors on a Ray cluster of this machine, with the simulated engine at a real pace: what 16 of
               them commit a second against 16 times what one does, while all are ready and units are left
"""

import argparse
import functools
import heapq
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from results import Row, verdict, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import clusters  # before Ray
import ray
from simulated import make_work
from simulated_fleet import Engine, Engines, make_job, make_setup

from ray_extract import driver, ray_fleet, run
from ray_extract.dataset.prepared import RowIndex
from ray_extract.errors import Drained
from ray_extract.fleet import Call, Event, Fleet
from ray_extract.layout import PLAN_KEY
from ray_extract.leases import Lease
from ray_extract.ledger import Ledger
from ray_extract.plan import PLAN_VERSION, load_plan, write_units
from ray_extract.records import Unit
from ray_extract.store import open_store

UNITS, ROWS = 100_000, 100  # and rows of a unit
ENGINES, UNITS_PER_S = 1000, 700.0  # what the engines would do, all together
TOKENS = 10_000  # of a unit
FLUSH_S = 0.3

WINDOW_S = 60.0
PACE, UNIT_TOKENS = 500, 2000  # tokens a second of an engine, and of a unit
NOTE = "Taken on a machine of two cores that ran other tests meanwhile."


# A thousand engines


def make_plan(folder: Path, units: int) -> None:
    """A plan without its rows, which a driver does not read."""
    made = (Unit(f"u{i:08d}", i * ROWS, (i + 1) * ROWS, ROWS, TOKENS, TOKENS, TOKENS * 57_344) for i in range(units))
    store, rows = open_store(str(folder)), units * ROWS
    write_units(store, made)
    index = RowIndex((0,), rows, rows, units * TOKENS, units * TOKENS, 0, {}, "0" * 64)
    plan = {"version": PLAN_VERSION, "rows": index.to_json(), "units": units}
    store.put(PLAN_KEY, json.dumps(plan).encode())


class Timer:
    """Calls functions when they are due, in a thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call a function in so many seconds."""
        at = time.monotonic() + seconds
        with self._changed:
            heapq.heappush(self._due, (at, next(self._count), act))
            if self._due[0][0] == at:
                self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                act = heapq.heappop(self._due)[2]
            act()


def thousand(folder: Path, engines: int) -> None:
    """The driver in this process, from a plan; prints its figures as JSON."""
    began = time.monotonic()
    store = open_store(str(folder))
    ledger = Ledger(store)
    units = load_plan(store)[1]
    assert not ledger.committed_units()
    job, timer = make_job(engines), Timer()
    simulated = [Engine(TOKENS * UNITS_PER_S / engines, FLUSH_S) for _ in range(engines)]
    leased: list[float] = []  # when each engine got its first unit
    with_unit: set[int] = set()

    def note(engine: int, call: Call | Lease, answer: Any) -> Any:
        if isinstance(call, Lease) and engine not in with_unit:
            with_unit.add(engine)
            leased.append(time.monotonic())
        return answer

    driven = driver.Driver(
        job,
        make_setup(job, 16),
        ledger,
        units,
        lambda post: Engines(simulated, time.monotonic, timer.later, post, note),
        total_units=len(units),
        total_tokens=len(units) * TOKENS,
        done_tokens=0,
    )
    cpu = time.process_time()
    given_up = driven.run()
    wall, cpu = time.monotonic() - leased[0], time.process_time() - cpu
    assert len(ledger.committed_units()) == len(units) and not given_up
    idle = [100 * engine.idle_s / engine.busy_s for engine in simulated]
    found = {
        "start": leased[-1] - began,
        "cpu_cores": cpu / wall,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
        "commits_per_s": len(units) / wall,
        "idle": float(np.mean(idle)),
        "worst": max(idle),
    }
    sys.stdout.write(json.dumps(found))


def thousand_engines(folder: Path, units: int, engines: int) -> list[Row]:
    """The case, in a process of its own."""
    make_plan(folder, units)
    command = [sys.executable, __file__, "--phase", str(folder), "--engines", str(engines)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(text)
    case = f"{engines}-engines"
    return [
        Row(case, "cpu_cores", round(found["cpu_cores"], 2), "cores, engines' simulation included", 1.0, "lower"),
        Row(case, "rss_gib", round(found["rss_gib"], 2), "GiB", 1.5, "lower"),
        Row(case, "commits_per_s", round(found["commits_per_s"]), f"a second, {UNITS_PER_S:.0f} offered", 600),
        Row(case, "start", round(found["start"], 1), "s from the plan until each has a unit", 30, "lower"),
        Row(case, "idle", round(found["idle"], 2), "% of an engine's time, between units", 1, "lower"),
        Row(case, "idle, worst engine", round(found["worst"], 2), "% of its time"),
    ]


# Sixteen actors


class Watched:
    """A fleet, and a record of its leases and receipts.

    Args:
        post: takes the events.
        make: makes the fleet.
    """

    def __init__(self, post: Callable[[Event], None], make: Callable[[Callable[[Event], None]], Fleet]) -> None:
        self._post = post
        self.ready: list[float] = []
        self.receipts: dict[int, list[tuple[float, int]]] = {}  # of each worker: when, and tokens
        self._fleet = make(self._note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def _note(self, event: Event) -> None:
        if event.error is None and event.call is Call.START:
            self.ready.append(time.monotonic())
        elif event.error is None and isinstance(event.call, Lease):
            self.receipts.setdefault(event.worker, []).append((time.monotonic(), event.call.unit.tokens))
        self._post(event)


def rate(folder: Path, engines: int, window_s: float, address: str) -> float:
    """Tokens a second of so many actors, while all are ready and units are left."""
    seconds = window_s + 40 * engines  # for their starts
    rows = np.random.default_rng(0).integers(10, 1000, (int(seconds * engines * PACE / 1000), 1000)).tolist()
    work = make_work(
        folder,
        rows,
        address,
        engine={"count": engines, "cpus": 0.1, "chunked_prefill_size": 1000, "args": {"tokens_per_s": PACE}},
        output={"max_rows": UNIT_TOKENS // 1000},
        run={"progress_s": 5, "drain_s": 30},
    )
    watched: list[Watched] = []

    def watch(setup: Any, post: Callable[[Event], None]) -> Watched:
        watched.append(Watched(post, functools.partial(original, setup)))
        threading.Thread(target=end, daemon=True).start()
        return watched[0]

    def end() -> None:
        """Two units of each later, so that no start is in the window, and a window later, stop."""
        while len(watched[0].ready) < engines:
            time.sleep(0.1)
        time.sleep(2 * UNIT_TOKENS / PACE + window_s)
        os.kill(os.getpid(), signal.SIGTERM)

    original = ray_fleet.RayFleet
    with mock.patch.object(ray_fleet, "RayFleet", watch):
        try:
            run.run(work.job())
            raise AssertionError("the units did not last")
        except Drained:
            pass
    first = watched[0].ready[-1] + 2 * UNIT_TOKENS / PACE
    found = 0.0
    for receipts in watched[0].receipts.values():
        inside = [(at, tokens) for at, tokens in receipts if first <= at <= first + window_s]
        # From receipt to receipt, or the window would cut through units.
        found += sum(tokens for _, tokens in inside[1:]) / (inside[-1][0] - inside[0][0])
    return found


def scaling(folder: Path, engines: int, window_s: float) -> list[Row]:
    """The case."""
    with clusters.cluster(num_cpus=engines) as cluster:
        one, many = (rate(folder / str(count), count, window_s, cluster.address) for count in (1, engines))
        ray.shutdown()
    case = f"scaling-{engines}"
    return [
        Row(case, "efficiency", round(many / (engines * one), 3), "of as many times one engine's rate", 0.97),
        Row(case, "one engine", round(one), f"tokens/s, of {PACE} that it sleeps for"),
        Row(case, f"{engines} engines", round(many), "tokens/s"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="1000-engines, scaling-16; both when absent")
    parser.add_argument("--folder", help="where to make the outputs; a temporary folder when absent")
    parser.add_argument("--units", type=int, default=UNITS, help="of 1000-engines; its goals are for 100000")
    parser.add_argument("--engines", type=int, help="of a case, in place of the number in its name")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        logging.basicConfig(level=logging.INFO)
        thousand(Path(args.phase), args.engines)
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        if not args.cases or "1000-engines" in args.cases:
            rows += thousand_engines(Path(name) / "plan", args.units, args.engines or ENGINES)
        if not args.cases or "scaling-16" in args.cases:
            logging.basicConfig(level=logging.INFO)
            rows += scaling(Path(name) / "work", args.engines or 16, WINDOW_S)
    print(write("driver", rows, note=NOTE, join=True))
    return verdict(rows)


if __name__ == "__main__":
    sys.exit(main())
