"""What a run tells Prometheus: the table of its metrics, and the driver's as a view of its snapshot and account.

The driver tells its own once every run.progress_s; a worker tells its own unit by unit, and its arena's use when the
driver asks for its counters. Who takes the values is a Meter (ray_fleet.RayMeter): nothing here knows Ray.

docs/metrics.md has the table; `python tests/metrics_page.py` writes it.
"""

import dataclasses
import enum
import time
from collections.abc import Mapping
from typing import Protocol

from ray_extract.progress import Snapshot
from ray_extract.records import RowStatus
from ray_extract.tally import Account, Cause, Loss

RUN = "run"
"""The tag of every metric: the URL of the run's output."""


class Kind(enum.StrEnum):
    """How Prometheus takes a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Args:
        name: as Prometheus has it. Ray puts `ray_` before the name that it is given.
        kind: of it.
        unit: of its value.
        text: what it is.
        tag: what tells its series apart, beside RUN; None if nothing does.
        values: of the tag, where they are known: their counters begin at 0, since the rate of a counter that begins
            with its first event misses that.
        buckets: upper bounds of a histogram's.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    tag: str | None = None
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """Names of its tags."""
        return (RUN,) if self.tag is None else (RUN, self.tag)


class Meter(Protocol):
    """Takes values, from any thread."""

    def add(self, metric: Metric, amount: float, tag: str | None = None) -> None:
        """Raise a counter, by 0 to make it known."""
        ...

    def set(self, metric: Metric, value: float, tag: str | None = None) -> None:
        """Set a gauge."""
        ...

    def observe(self, metric: Metric, value: float, tag: str | None = None) -> None:
        """Add a value to a histogram."""
        ...


class NoMeter:
    """A Meter that takes nothing down."""

    def add(self, metric: Metric, amount: float, tag: str | None = None) -> None:
        """See Meter."""

    def set(self, metric: Metric, value: float, tag: str | None = None) -> None:
        """See Meter."""

    def observe(self, metric: Metric, value: float, tag: str | None = None) -> None:
        """See Meter."""


def _slug(cause: str) -> str:
    """A Cause or Loss as a tag's value, which stays when its words change."""
    return cause.name.lower() if isinstance(cause, enum.Enum) else cause


_CAUSES = tuple(map(_slug, Cause))
# That of engines that wait for capacity shrinks when they get it, and the gauges of engines say it.
_LOSSES = tuple(_slug(loss) for loss in Loss if loss is not Loss.CAPACITY)

# Of the whole run, what earlier drivers on the output did included

UNITS = Metric(
    "ray_extract_units_planned", Kind.GAUGE, "units", "units of the plan; one that is split counts as its parts"
)
UNITS_COMMITTED = Metric("ray_extract_units_committed", Kind.GAUGE, "units", "of these, committed")
UNITS_GIVEN_UP = Metric(
    "ray_extract_units_given_up", Kind.GAUGE, "units", "of these, given up for this time after run.max_attempts"
)
UNITS_IN_FLIGHT = Metric(
    "ray_extract_units_in_flight", Kind.GAUGE, "units", "of these, with engines now, or being committed"
)
TOKENS_PLANNED = Metric("ray_extract_tokens_planned", Kind.GAUGE, "tokens", "prompt tokens of the plan")
TOKENS_COMMITTED = Metric("ray_extract_tokens_committed", Kind.GAUGE, "tokens", "prompt tokens of committed units")
ENGINES = Metric("ray_extract_engines_wanted", Kind.GAUGE, "engines", "engines that the driver asks for")
ENGINES_READY = Metric("ray_extract_engines_ready", Kind.GAUGE, "engines", "engines that serve; 0 when the driver ends")
LAST_COMMIT = Metric(
    "ray_extract_last_commit_timestamp_seconds",
    Kind.GAUGE,
    "s since 1970",
    "when the last unit was committed; before the first one, when the first engine was ready, and before that, now",
)

# Of one driver

TOKENS = Metric(
    "ray_extract_tokens_total", Kind.COUNTER, "tokens", "prompt tokens of rows that are ok, in committed units", "node"
)
ROWS = Metric(
    "ray_extract_rows_total",
    Kind.COUNTER,
    "rows",
    "rows of committed units",
    "status",
    tuple(status.name.lower() for status in RowStatus),
)
BYTES = Metric("ray_extract_bytes_total", Kind.COUNTER, "bytes", "bytes of committed shards")
RETRIES = Metric(
    "ray_extract_retries_total", Kind.COUNTER, "attempts", "attempts at units that came to nothing", "cause", _CAUSES
)
RESTARTS = Metric(
    "ray_extract_restarts_total", Kind.COUNTER, "restarts", "workers and engines that were replaced", "cause", _CAUSES
)
LOST = Metric(
    "ray_extract_lost_seconds_total",
    Kind.COUNTER,
    "s",
    "time that units and engines lost, side by side, so that it may be more than went by",
    "loss",
    _LOSSES,
)

# Of one worker

ARENA = Metric("ray_extract_arena_bytes", Kind.GAUGE, "bytes", "shared memory of an engine for shard images")
ARENA_USED = Metric("ray_extract_arena_used_bytes", Kind.GAUGE, "bytes", "of this, in images now")
FLUSH = Metric(
    "ray_extract_flush_seconds",
    Kind.HISTOGRAM,
    "s",
    "from a sealed image to a stored shard, one unit",
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
STAGES = Metric(
    "ray_extract_stage_seconds_total",
    Kind.COUNTER,
    "s",
    "time of units in each stage; those of an engine overlap",
    "stage",
    ("read", "wait", "extract", "seal", "flush"),
)
STORE_ERRORS = Metric(
    "ray_extract_store_errors_total",
    Kind.COUNTER,
    "errors",
    "of the store, after its client's own tries; each is tried again for up to output.outage_s",
    "operation",
    ("read", "upload"),
)
MEAN_SQUARE = Metric(
    "ray_extract_mean_square",
    Kind.GAUGE,
    "1",
    "mean square of the values of a state, over the rows that are ok of the last unit in which it was finite",
    "state",
)

METRICS = tuple(value for value in list(vars().values()) if isinstance(value, Metric))


def begin(meter: Meter, *metrics: Metric) -> None:
    """Let counters begin at 0."""
    for metric in metrics:
        for value in metric.values or (None,):
            meter.add(metric, 0, value)


class DriveMetrics:
    """Tells a meter of one drive: gauges as they are, counters as far as they rose since the last time.

    Args:
        meter: takes the values. Its counters go on from drive to drive, as those of a process do.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._told: dict[tuple[str, str | None], float] = {}
        begin(meter, ROWS, BYTES, RETRIES, RESTARTS, LOST)

    def __call__(self, snapshot: Snapshot, account: Account) -> None:
        """What is known now."""
        for metric, value in (
            (UNITS, snapshot.units),
            (UNITS_COMMITTED, snapshot.units_done),
            (UNITS_GIVEN_UP, snapshot.units_given_up),
            (UNITS_IN_FLIGHT, snapshot.units_in_flight),
            (TOKENS_PLANNED, snapshot.tokens),
            (TOKENS_COMMITTED, snapshot.tokens_committed),
            (ENGINES, snapshot.engines),
            (ENGINES_READY, snapshot.engines_ready),
            (LAST_COMMIT, time.time() - snapshot.idle_s),
        ):
            self._meter.set(metric, value)
        self._raise(BYTES, {None: account.nbytes})
        self._raise(TOKENS, {name: node.tokens for name, node in account.nodes.items()})
        self._raise(ROWS, account.rows)
        self._raise(RETRIES, account.retries)
        self._raise(RESTARTS, account.restarts)
        self._raise(LOST, {loss: seconds for loss, seconds in account.lost_s.items() if loss != Loss.CAPACITY})

    def _raise(self, metric: Metric, totals: Mapping[str, float] | Mapping[None, float]) -> None:
        for value, total in totals.items():
            tag = None if value is None else _slug(value)
            # What a worker said last may be less than it had done, so a sum can fall when it is gone.
            rise = total - self._told.get((metric.name, tag), 0)
            if rise > 0:
                self._told[metric.name, tag] = total
                self._meter.add(metric, rise, tag)
