"""Which unit goes to whom: pure bookkeeping of leases, attempts and units that are given up."""

import dataclasses
from collections import deque
from collections.abc import Iterable

from ray_extract.records import Unit


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """One attempt at a unit, handed to a worker.

    Args:
        unit: what to extract.
        number: 1 for the first attempt.
    """

    unit: Unit
    number: int


class Leases:
    """Every unit is pending, leased, done or given up, and nothing else.

    Args:
        units: in the order in which they are leased.
        max_attempts: attempts at a unit before it is given up.
    """

    def __init__(self, units: Iterable[Unit], max_attempts: int) -> None:
        self._pending = deque(Lease(unit, 1) for unit in units)
        self._leased: dict[str, Lease] = {}
        self._max_attempts = max_attempts
        self.total = len(self._pending)
        self.done = 0
        self.given_up: dict[str, str] = {}

    def take(self) -> Lease | None:
        """The next unit to work on, or None when none is pending."""
        if not self._pending:
            return None
        lease = self._pending.popleft()
        self._leased[lease.unit.unit] = lease
        return lease

    def complete(self, lease: Lease) -> None:
        """The unit is committed."""
        del self._leased[lease.unit.unit]
        self.done += 1

    def give_back(self, lease: Lease, reason: str) -> bool:
        """The attempt failed. Returns whether the unit will be tried again; a unit tried too often is given up."""
        del self._leased[lease.unit.unit]
        if lease.number >= self._max_attempts:
            self.given_up[lease.unit.unit] = reason
            return False
        # First in line: its rows are the oldest, and a worker that just freed an extent can take it at once.
        self._pending.appendleft(Lease(lease.unit, lease.number + 1))
        return True

    def refund(self, lease: Lease) -> None:
        """The attempt never began, or ended through no fault of the unit: it does not count."""
        del self._leased[lease.unit.unit]
        self._pending.appendleft(lease)

    @property
    def pending(self) -> int:
        """Units that wait."""
        return len(self._pending)

    @property
    def leased(self) -> int:
        """Units under way."""
        return len(self._leased)

    @property
    def finished(self) -> bool:
        """Whether every unit is done or given up."""
        return not self._pending and not self._leased
