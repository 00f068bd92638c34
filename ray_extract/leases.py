"""Which unit goes to whom: pure bookkeeping of leases, attempts, units that are split and units that are given up."""

import dataclasses
import enum
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from ray_extract.records import Unit


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """One attempt at a unit, handed to a worker.

    Args:
        unit: what to extract.
        number: 1 for the first attempt.
        alone: the worker holds no other unit meanwhile, so that its death is this one's.
        doomed: why the only row is not to be extracted any more, but stored as failed; else None.
    """

    unit: Unit
    number: int
    alone: bool = False
    doomed: str | None = None


class Fate(enum.Enum):
    """What becomes of a unit at which an attempt failed."""

    AGAIN = enum.auto()
    SPLIT = enum.auto()  # by the caller, see Leases.split; until then it stays leased
    DOOMED = enum.auto()  # its row is leased once more, to be stored as failed
    GIVEN_UP = enum.auto()


class Leases:
    """Every unit is pending, leased, done or given up, and nothing else; a split one becomes its parts.

    Args:
        units: in the order in which they are leased.
        max_attempts: attempts at a unit before it is given up, or split if its worker died.
    """

    def __init__(self, units: Iterable[Unit], max_attempts: int) -> None:
        self._pending = deque(Lease(unit, 1) for unit in units)
        self._trials: deque[Lease] = deque()  # to be leased alone, and last: they may kill workers that others are in
        self._leased: dict[str, Lease] = {}
        self._max_attempts = max_attempts
        self.total = len(self._pending)
        self.done = 0
        self.given_up: dict[str, str] = {}

    def take(self, beside: Collection[Lease] = ()) -> Lease | None:
        """The next unit for a worker, or None when there is none for it.

        Args:
            beside: what the worker holds already.
        """
        if any(lease.alone for lease in beside):
            return None
        if self._pending:
            lease = self._pending.popleft()
        elif self._trials and not beside:
            lease = self._trials.popleft()
        else:
            return None
        self._leased[lease.unit.unit] = lease
        return lease

    def complete(self, lease: Lease) -> None:
        """The unit is committed."""
        del self._leased[lease.unit.unit]
        self.done += 1

    def give_back(self, lease: Lease, reason: str, died: bool = False) -> Fate:
        """The attempt failed; what is next depends on whether the worker died.

        A unit that is tried too often is given up if not; what failed then is the store. If the worker died, one more
        attempt may follow that is alone, and if it died in one of these, the unit is split, or its only row doomed.
        """
        if lease.number < self._max_attempts or (died and not lease.alone):
            self._requeue(dataclasses.replace(lease, number=lease.number + 1, alone=died and self._last(lease)))
            return Fate.AGAIN
        if not died or lease.doomed is not None:
            del self._leased[lease.unit.unit]
            self.given_up[lease.unit.unit] = reason
            return Fate.GIVEN_UP
        if lease.unit.rows > 1:
            return Fate.SPLIT
        why = f"its worker died each time, at last with no other row in flight: {reason}"
        self._requeue(Lease(lease.unit, lease.number + 1, doomed=why))
        return Fate.DOOMED

    def _last(self, lease: Lease) -> bool:
        """Whether the next attempt is the last one."""
        return lease.number + 1 >= self._max_attempts

    def split(self, lease: Lease, parts: Sequence[Unit]) -> None:
        """The unit is committed as split; each of its parts is tried alone, and that is its last attempt."""
        del self._leased[lease.unit.unit]
        self._trials.extend(Lease(part, lease.number, alone=True) for part in parts)
        self.total += len(parts) - 1

    def refund(self, lease: Lease) -> None:
        """The attempt never began, or ended through no fault of the unit: it does not count."""
        self._requeue(lease)

    def _requeue(self, lease: Lease) -> None:
        # First in line: its rows are the oldest, and a worker that just freed an extent can take it at once.
        del self._leased[lease.unit.unit]
        (self._trials if lease.alone else self._pending).appendleft(lease)

    @property
    def pending(self) -> int:
        """Units that wait."""
        return len(self._pending) + len(self._trials)

    @property
    def leased(self) -> int:
        """Units under way."""
        return len(self._leased)

    @property
    def finished(self) -> bool:
        """Whether every unit is done or given up."""
        return not self.pending and not self._leased
