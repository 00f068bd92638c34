"""What runs workers, as the driver sees it: calls that return at once, and one event of what came of each.

Nothing here knows of Ray: see ray_fleet, and for engines without one tests/simulated_fleet.py.
"""

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from ray_extract.errors import RayExtractError
from ray_extract.leases import Lease
from ray_extract.progress import show_count


class Call(enum.Enum):
    """What a worker is asked, beside leases."""

    START = enum.auto()
    POLL = enum.auto()
    STOP = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """A worker does not answer any more: it died, or cannot be reached.

    Args:
        node_left: its node is gone, or out of reach; what ran there is not to blame.
    """

    reason: str
    node_left: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What came of a call.

    Args:
        worker: that was asked.
        call: what it was asked; the very Lease that it was given.
        value: what it answered: EngineInfo as data, Receipt, or counters.
        error: in place of a value.
    """

    worker: int
    call: Call | Lease
    value: Any = None
    error: RayExtractError | Death | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node that is there, with what it has of each resource."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


class Fleet(Protocol):
    """Workers by number. Each call but `kill` is answered by one event, unless the worker is killed before."""

    need: Mapping[str, float]
    """What a worker takes of each resource, all on one node."""

    def start(self, worker: int) -> None:
        """Make a worker, wherever and as soon as there is room for it, and start its engine."""
        ...

    def extract(self, worker: int, lease: Lease, attempt: str) -> None:
        """Extract a unit under an attempt's name; several may be under way."""
        ...

    def poll(self, worker: int) -> None:
        """Ask for its counters, as soon as it has its place."""
        ...

    def waiting(self) -> Collection[int]:
        """Workers that have no place yet, since no node had room for them."""
        ...

    def stop(self, worker: int) -> None:
        """End its engine and ask for its last counters; units under way fail."""
        ...

    def kill(self, worker: int) -> None:
        """End a worker and forget it."""
        ...

    def nodes(self) -> Sequence[Node]:
        """The nodes that are there now."""
        ...


Launch = Callable[[Callable[[Event], None]], Fleet]
"""Makes a fleet that gives its events to a function, which returns at once and may be called from any thread."""

_NODES_NAMED = 4


def shortage(need: Mapping[str, float], nodes: Sequence[Node]) -> str | None:
    """Which resources are missing for one more worker, or None if a node has room for it.

    Args:
        need: of each resource, on one node.
        nodes: that are there.
    """
    need = {name: amount for name, amount in need.items() if amount}
    if any(_has(node.free, need) for node in nodes):
        return None
    wants = " and ".join(f"{amount:g} {name}" for name, amount in need.items())
    if not any(_has(node.total, need) for node in nodes):
        missing = [name for name in need if not any(_has(node.total, {name: need[name]}) for node in nodes)]
        most = "; ".join(
            f"the most {name} of a node is {max((node.total.get(name, 0) for node in nodes), default=0):g}"
            for name in missing or need
        )
        return f"no node has {wants}: {most}, of {show_count(len(nodes), 'node')}"
    fullest_last = sorted(nodes, key=lambda node: [-node.free.get(name, 0) for name in need])
    shown = "; ".join(
        f"{node.name} {', '.join(f'{node.free.get(n, 0):g} of {node.total.get(n, 0):g} {n}' for n in need)}"
        for node in fullest_last[:_NODES_NAMED]
    )
    free = ", ".join(
        f"{sum(node.free.get(n, 0) for node in nodes):g} of {sum(node.total.get(n, 0) for node in nodes):g} {n}"
        for n in need
    )
    more = len(nodes) - _NODES_NAMED
    return f"no node has {wants} free: {free} in all; {shown}" + (
        f"; {show_count(more, 'node')} more" if more > 0 else ""
    )


def _has(has: Mapping[str, float], need: Mapping[str, float]) -> bool:
    return all(has.get(name, 0) >= amount for name, amount in need.items())
