"""Progress of a run: a view of counters, as a line for people and as JSON for programs. Owns no state of the run."""

import dataclasses
import time
from typing import Any

TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Of progress.json, in UTC."""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The run at one moment.

    Args:
        units, units_done, units_given_up: of the whole run, earlier runs included.
        units_in_flight: leased to engines.
        rows_failed: rows of committed units that are not OK, of this run.
        tokens: prompt tokens to extract, of the whole run.
        tokens_committed: tokens of committed units, earlier runs included.
        tokens_captured: tokens captured by this run, in units that may not be committed yet.
        bytes_committed: bytes of the shards committed by this run.
        engines, engines_ready: asked for, and serving.
        restarts: engine starts beyond the first of each worker, and workers replaced.
        arena_used, arena_bytes: shared memory of all workers.
        elapsed_s: since extraction began.
        idle_s: since the last commit of this run, or since extraction began.
        tokens_per_s: captured, over the last minute.
    """

    units: int
    units_done: int
    units_given_up: int
    units_in_flight: int
    rows_failed: int
    tokens: int
    tokens_committed: int
    tokens_captured: int
    bytes_committed: int
    engines: int
    engines_ready: int
    restarts: int
    arena_used: int
    arena_bytes: int
    elapsed_s: float
    idle_s: float
    tokens_per_s: float

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the present rate; None while nothing moves."""
        left = self.tokens - self.tokens_committed
        return left / self.tokens_per_s if self.tokens_per_s > 0 else None

    def to_json(self, state: str) -> dict[str, Any]:
        """What progress.json holds; `state` is running, draining, drained, done or failed."""
        return {
            "version": 1,
            "state": state,
            "time": time.strftime(TIME_FORMAT, time.gmtime()),
            **dataclasses.asdict(self),
            "eta_s": self.eta_s,
        }

    def line(self) -> str:
        """One line for a log."""
        share = 100 * self.tokens_committed / self.tokens if self.tokens else 100.0
        parts = [
            f"units {self.units_done}/{self.units}",
            f"{share:.0f} % of {self.tokens:,} tokens",
            f"{self.tokens_per_s:,.0f} tok/s",
            f"engines {self.engines_ready}/{self.engines}",
            f"arena {100 * self.arena_used / self.arena_bytes:.0f} %" if self.arena_bytes else "",
            f"failed rows {self.rows_failed}" if self.rows_failed else "",
            f"given up {self.units_given_up}" if self.units_given_up else "",
            f"restarts {self.restarts}" if self.restarts else "",
            f"{show_seconds(self.eta_s)} to go" if self.eta_s is not None else "",
        ]
        return " · ".join(part for part in parts if part)


def show_count(number: int, noun: str) -> str:
    """So many of something: `1 unit`, `2,000 units`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_seconds(seconds: float) -> str:
    """Seconds for people: `2h46m`, or `0m05s`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
