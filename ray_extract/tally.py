"""What a drive did and what it lost, counted by cause: pure bookkeeping, whose caller brings the clock.

The driver tells a Tally what happens. An Account is what a Tally has counted; accounts of several drives add up.
"""

import dataclasses
import enum
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

from ray_extract.records import Receipt, RowStatus


class Cause(enum.StrEnum):
    """Why an attempt at a unit failed, or a worker or an engine was replaced."""

    WORKER_DIED = "worker died"
    NODE_LEFT = "node left"
    SILENT = "worker did not answer"
    NOT_STARTED = "worker did not start"
    ENGINE_FAILED = "engine failed for good, or its states were damaged"
    ENGINE_DIED = "engine died"  # and its worker started another one
    ENGINE_STALLED = "engine stalled"
    STORE_FAILED = "store failed"
    OVERTAKEN = "another attempt was first"  # another driver's, or our own second one


class Loss(enum.StrEnum):
    """What time was lost to. Units and engines lose theirs side by side, so it may be more than went by."""

    CAPACITY = "nodes and workers that did not come"  # of an engine, until its worker began to start it
    STARTS = "engine starts"  # of an engine
    EXTENTS = "waiting for shared memory"  # of a unit
    OUTAGES = "store outages"  # of a unit, beyond the seconds for which the store's client tries again by itself
    ATTEMPTS = "attempts thrown away"  # of a unit, since it was leased


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAccount:
    """What a node did.

    Args:
        engines: that served there.
        engine_s: seconds for which they did, added up.
        units, tokens: committed from there.
    """

    engines: int = 0
    engine_s: float = 0.0
    units: int = 0
    tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Of one engine."""
        return self.tokens / self.engine_s if self.engine_s else 0.0

    def __add__(self, other: "NodeAccount") -> "NodeAccount":
        return NodeAccount(
            engines=self.engines + other.engines,
            engine_s=self.engine_s + other.engine_s,
            units=self.units + other.units,
            tokens=self.tokens + other.tokens,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """What one drive did, or several.

    Args:
        drives: how many.
        wall_s: seconds that they took, added up.
        serving_s: of these, from the first engine's being ready to the last commit, or until now while it works.
        units, tokens, nbytes: committed, prompt tokens of their rows that are ok, and bytes of their shards.
        rows: of these units, by RowStatus in lower case.
        retries: attempts at units that failed, by Cause.
        restarts: workers and engines that were replaced, by Cause.
        lost_s: seconds by Loss.
        nodes: by name.
    """

    drives: int = 0
    wall_s: float = 0.0
    serving_s: float = 0.0
    units: int = 0
    tokens: int = 0
    nbytes: int = 0
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    retries: Mapping[str, int] = dataclasses.field(default_factory=dict)
    restarts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lost_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nodes: Mapping[str, NodeAccount] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Of all engines together, while they served."""
        return self.tokens / self.serving_s if self.serving_s else 0.0

    def __add__(self, other: "Account") -> "Account":
        names = sorted({*self.nodes, *other.nodes})
        nothing = NodeAccount()
        return Account(
            drives=self.drives + other.drives,
            wall_s=self.wall_s + other.wall_s,
            serving_s=self.serving_s + other.serving_s,
            units=self.units + other.units,
            tokens=self.tokens + other.tokens,
            nbytes=self.nbytes + other.nbytes,
            rows=dict(Counter(self.rows) + Counter(other.rows)),
            retries=dict(Counter(self.retries) + Counter(other.retries)),
            restarts=dict(Counter(self.restarts) + Counter(other.restarts)),
            lost_s={
                name: self.lost_s.get(name, 0.0) + other.lost_s.get(name, 0.0)
                for name in sorted({*self.lost_s, *other.lost_s})
            },
            nodes={name: self.nodes.get(name, nothing) + other.nodes.get(name, nothing) for name in names},
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form, with the rates."""
        record: dict[str, Any] = _rounded(dataclasses.asdict(self))
        for name, node in self.nodes.items():
            record["nodes"][name]["tokens_per_s"] = round(node.tokens_per_s, 1)
        return {**record, "tokens_per_s": round(self.tokens_per_s, 1)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of to_json. Raises KeyError or TypeError for what is none."""
        fields = {field.name: record[field.name] for field in dataclasses.fields(cls)}
        names = [field.name for field in dataclasses.fields(NodeAccount)]
        nodes = {node: NodeAccount(**{name: of[name] for name in names}) for node, of in fields["nodes"].items()}
        return cls(**{**fields, "nodes": nodes})


class Tally:
    """Counts one drive. A method's `now` is of one monotonic clock, in seconds; outage may come from any thread.

    Args:
        now: when the drive began.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._first_ready: float | None = None
        self._last_commit: float | None = None
        self._over = False
        self._workers: dict[int, _Worker] = {}
        self._leased: dict[tuple[str, str], float] = {}
        self._sums: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        self._lost: dict[Loss, float] = dict.fromkeys(Loss, 0.0)
        self._nodes: dict[str, NodeAccount] = {}
        self._lock = threading.Lock()
        self.failures: dict[str, Cause] = {}
        """Why the last attempt failed at each unit that has no commit since."""

    def asked(self, worker: int, now: float) -> None:
        """A worker was asked for; `worker` tells it from the others that there are."""
        self._workers[worker] = _Worker(now)

    def arrived(self, worker: int, now: float) -> None:
        """It has its place on a node, and begins to start its engine."""
        self._workers[worker].arrived = now

    def ready(self, worker: int, node: str, start_s: float, now: float) -> None:
        """It serves, on this node; its engine took `start_s` to start."""
        self._first_ready = now if self._first_ready is None else self._first_ready
        known = self._workers[worker]
        known.node, known.ready = node, now
        self._lost[Loss.CAPACITY] += max(0.0, now - known.asked - start_s)

    def counted(self, worker: int, counters: Mapping[str, Any]) -> None:
        """What it says of itself, see worker.Worker.progress; the last word counts."""
        self._workers[worker].counters = counters

    def gone(self, worker: int, now: float) -> None:
        """It is not ours any more."""
        self._add(self._workers.pop(worker), now, self._restarts, self._lost, self._nodes)

    def replaced(self, cause: Cause) -> None:
        """A worker is replaced."""
        self._restarts[cause] += 1

    def leased(self, unit: str, attempt: str, now: float) -> None:
        """An attempt at a unit begins."""
        self._leased[unit, attempt] = now

    def failed(self, unit: str, attempt: str, cause: Cause, now: float) -> None:
        """It failed."""
        self.failures[unit] = cause
        self._retries[cause] += 1
        self._throw_away(unit, attempt, now)

    def overtaken(self, unit: str, attempt: str, now: float) -> None:
        """It did not fail, but another one was first."""
        self._retries[Cause.OVERTAKEN] += 1
        self._throw_away(unit, attempt, now)

    def committed(self, receipt: Receipt, attempt: str, won: bool, now: float) -> None:
        """The unit is committed: by this attempt, or by another driver's."""
        self._last_commit = now
        self.failures.pop(receipt.unit, None)
        self._lost[Loss.EXTENTS] += receipt.seconds.get("wait", 0.0)
        if not won:
            self.overtaken(receipt.unit, attempt, now)
            return
        del self._leased[receipt.unit, attempt]
        self._sums.update(units=1, tokens=receipt.tokens, nbytes=receipt.size)
        self._rows[RowStatus.OK.name.lower()] += receipt.rows - len(receipt.failures)
        self._rows.update(failure.status.name.lower() for failure in receipt.failures)
        node = receipt.environment.get("node", "unknown")
        self._nodes[node] = self._nodes.get(node, NodeAccount()) + NodeAccount(units=1, tokens=receipt.tokens)

    def ended(self, now: float) -> None:
        """The drive is over; attempts under way come to nothing."""
        self._over = True
        for unit, attempt in list(self._leased):
            self._throw_away(unit, attempt, now)

    def outage(self, seconds: float) -> None:
        """The driver waited for the store."""
        with self._lock:
            self._lost[Loss.OUTAGES] += seconds

    @property
    def nbytes(self) -> int:
        """Bytes of the shards that are committed."""
        return self._sums["nbytes"]

    @property
    def rows_failed(self) -> int:
        """Rows in them that are not ok."""
        return sum(count for status, count in self._rows.items() if status != RowStatus.OK.name.lower())

    def elapsed_s(self, now: float) -> float:
        """Seconds since the first engine was ready; 0 before."""
        return 0.0 if self._first_ready is None else now - self._first_ready

    def idle_s(self, now: float) -> float:
        """Seconds since the last commit, or, before one, since the first engine was ready."""
        return now - self._last_commit if self._last_commit is not None else self.elapsed_s(now)

    def account(self, now: float) -> Account:
        """What is counted so far, with the workers that there are."""
        sums, restarts, lost, nodes = self._sums, self._restarts.copy(), dict(self._lost), dict(self._nodes)
        for worker in self._workers.values():
            self._add(worker, now, restarts, lost, nodes)
        return Account(
            drives=1,
            wall_s=now - self._began,
            serving_s=self._serving_s(now),
            units=sums["units"],
            tokens=sums["tokens"],
            nbytes=sums["nbytes"],
            rows={status: count for status, count in self._rows.items() if count},
            retries=dict(self._retries),
            restarts={cause: count for cause, count in restarts.items() if count},
            lost_s={loss: seconds for loss, seconds in lost.items() if seconds},
            nodes=nodes,
        )

    def _serving_s(self, now: float) -> float:
        if self._first_ready is None:
            return 0.0
        # The workers' end is no part of it.
        end = self._last_commit if self._over and self._last_commit is not None else now
        return max(0.0, end - self._first_ready)

    def _throw_away(self, unit: str, attempt: str, now: float) -> None:
        self._lost[Loss.ATTEMPTS] += now - self._leased.pop((unit, attempt), now)

    @staticmethod
    def _add(
        worker: "_Worker",
        now: float,
        restarts: Counter[str],
        lost: dict[Loss, float],
        nodes: dict[str, NodeAccount],
    ) -> None:
        counters = worker.counters
        stalls = counters.get("engine_stalls", 0)
        restarts[Cause.ENGINE_STALLED] += stalls
        restarts[Cause.ENGINE_DIED] += max(0, counters.get("engine_starts", 1) - 1 - stalls)
        lost[Loss.OUTAGES] += counters.get("outage_s", 0.0)
        if worker.ready is None:
            arrived = now if worker.arrived is None else worker.arrived
            lost[Loss.CAPACITY] += arrived - worker.asked
            lost[Loss.STARTS] += now - arrived
        else:
            lost[Loss.STARTS] += counters.get("start_s", 0.0)
            served = NodeAccount(engines=1, engine_s=now - worker.ready)
            nodes[worker.node] = nodes.get(worker.node, NodeAccount()) + served


@dataclasses.dataclass(slots=True)
class _Worker:
    """A worker as it was last heard of; times as of the tally."""

    asked: float
    arrived: float | None = None
    ready: float | None = None
    node: str = ""
    counters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _rounded(inner) for name, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value
