"""Which unit goes to whom: pure bookkeeping of leases, attempts, units that are split and units that are given up."""

import dataclasses
import enum
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from ray_extract.records import Unit

AHEAD_S = 3.0
"""Work that a worker holds: a unit's flush and the way to the driver and back take less, so its engine never waits."""
_STRAGGLES = 2.0  # times as long as its tokens deserve
_STRAGGLES_S = 10.0  # at least: a unit that takes less is not worth a second engine
_PACES = 101  # receipts whose pace counts
_RATES = 8  # of one worker
_LOST_NODES = 3  # that a unit may lose before the next is held against it: it may be what kills them


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """One attempt at a unit, handed to a worker.

    Args:
        unit: what to extract.
        number: 1 for the first attempt.
        alone: the worker holds no other unit meanwhile, so that its death is this one's.
        doomed: why the only row is not to be extracted any more, but stored as failed; else None.
        spared: attempts before this one that ended with their node, through no fault of the unit.
        second: another worker holds this attempt too, and takes too long; whoever is first counts.
    """

    unit: Unit
    number: int
    alone: bool = False
    doomed: str | None = None
    spared: int = 0
    second: bool = False

    @property
    def attempt(self) -> str:
        """What tells its shards from those of other leases of the unit by the same driver."""
        return f"{self.number:02d}{'b' if self.second else ''}"


class Fate(enum.Enum):
    """What becomes of a unit at which an attempt failed."""

    AGAIN = enum.auto()
    SPLIT = enum.auto()  # by the caller, see Leases.split; until then it stays leased
    DOOMED = enum.auto()  # its row is leased once more, to be stored as failed
    GIVEN_UP = enum.auto()
    NOTHING = enum.auto()  # another lease of it goes on, or was faster


class Ending(enum.Enum):
    """How an attempt failed."""

    FAILED = enum.auto()  # by itself: what failed is the store
    DIED = enum.auto()  # with its worker
    NODE_LEFT = enum.auto()  # with its worker's node


@dataclasses.dataclass(slots=True)
class _UnderWay:
    """A unit that is leased.

    Args:
        lease: the attempt.
        since: when it began, in seconds.
        holders: who has it: False for the worker that got it first, True for the second one.
        won: whose receipt is being committed, if one is.
        doubled: a second worker got it.
        failure: how the first worker failed while the second one went on.
    """

    lease: Lease
    since: float
    holders: set[bool] = dataclasses.field(default_factory=lambda: {False})
    won: bool | None = None
    doubled: bool = False
    failure: tuple[str, Ending] | None = None


class Leases:
    """Every unit is pending, leased (to two workers at most), done or given up; a split one becomes its parts.

    Times are seconds of one clock, which the caller reads.

    Args:
        units: in the order in which they are leased.
        max_attempts: attempts at a unit before it is given up, or split if its worker died.
    """

    def __init__(self, units: Iterable[Unit], max_attempts: int) -> None:
        self._pending = deque(Lease(unit, 1) for unit in units)
        self._trials: deque[Lease] = deque()  # to be leased alone, and last: they may kill workers that others are in
        self._leased: dict[str, _UnderWay] = {}  # those that began first come first
        self._paces: deque[float] = deque(maxlen=_PACES)  # seconds a token, from lease to receipt
        self._max_attempts = max_attempts
        self.total = len(self._pending)
        self.done = 0
        self.given_up: dict[str, str] = {}

    def take(self, beside: Collection[Lease], now: float) -> Lease | None:
        """The next unit for a worker, or None when there is none for it.

        Args:
            beside: what the worker holds already.
            now: the time.
        """
        if any(lease.alone for lease in beside):
            return None
        if self._pending:
            lease = self._pending.popleft()
        elif self._trials and not beside:
            lease = self._trials.popleft()
        else:
            return None
        self._leased[lease.unit.unit] = _UnderWay(lease, now)
        return lease

    def take_stragglers(self, most: int, now: float) -> list[Lease]:
        """Units that other workers have had for much longer than their tokens deserve, for workers without any.

        None while units wait, or where nothing tells how long a unit takes. Each attempt is leased twice at most, and
        not at all if it may be what kills workers.
        """
        if self.pending or not self._paces:
            return []
        pace = statistics.median(self._paces)
        found: list[Lease] = []
        for held in self._leased.values():
            if len(found) == most:
                break
            lease = held.lease
            overdue = now - held.since > max(_STRAGGLES_S, _STRAGGLES * pace * lease.unit.tokens)
            if overdue and held.holders and held.won is None and not (held.doubled or lease.alone or lease.doomed):
                held.doubled = True
                held.holders.add(True)
                found.append(dataclasses.replace(lease, second=True))
        return found

    def receive(self, lease: Lease, now: float) -> bool:
        """An attempt succeeded.

        Returns:
            Whether its receipt is to be committed; False if that of another lease of the unit was here before.
        """
        held = self._leased.get(lease.unit.unit)
        if held is None:
            return False
        if held.won is not None:
            held.holders.discard(lease.second)
            return False
        held.won = lease.second
        if not lease.second:
            self._paces.append((now - held.since) / max(1, lease.unit.tokens))
        return True

    def complete(self, lease: Lease) -> None:
        """The unit is committed."""
        del self._leased[lease.unit.unit]
        self.done += 1

    def give_back(self, lease: Lease, reason: str, ending: Ending = Ending.FAILED) -> Fate:
        """The attempt failed; what is next depends on whether the worker died.

        A unit that is tried too often is given up if not; what failed then is the store. If the worker died, one more
        attempt may follow that is alone, and if it died in one of these, the unit is split, or its only row doomed.
        What becomes of a second lease never counts.
        """
        held = self._leave(lease, (reason, ending))
        if held is None:
            return Fate.NOTHING
        if held.failure is None:
            self._requeue(held.lease, spared=True)
            return Fate.AGAIN
        lease, (reason, ending) = held.lease, held.failure
        if ending is Ending.NODE_LEFT and lease.spared < _LOST_NODES:
            self._requeue(lease, spared=True)
            return Fate.AGAIN
        died = ending is not Ending.FAILED
        tries = lease.number - lease.spared
        if tries < self._max_attempts or (died and not lease.alone):
            alone = died and tries + 1 >= self._max_attempts
            self._requeue(dataclasses.replace(lease, alone=alone), spared=False)
            return Fate.AGAIN
        if not died or lease.doomed is not None:
            del self._leased[lease.unit.unit]
            self.given_up[lease.unit.unit] = reason
            return Fate.GIVEN_UP
        if lease.unit.rows > 1:
            return Fate.SPLIT
        why = f"its worker died each time, at last with no other row in flight: {reason}"
        self._requeue(dataclasses.replace(lease, alone=False, doomed=why), spared=False)
        return Fate.DOOMED

    def split(self, lease: Lease, parts: Sequence[Unit]) -> None:
        """The unit is committed as split; each of its parts is tried alone, and that is its last attempt."""
        del self._leased[lease.unit.unit]  # nobody has it: only what was alone is split, and that is not leased twice
        self._trials.extend(dataclasses.replace(lease, unit=part) for part in parts)
        self.total += len(parts) - 1

    def refund(self, lease: Lease) -> None:
        """The attempt ended through no fault of the unit: it does not count."""
        held = self._leave(lease, None)
        if held is not None:
            self._requeue(held.lease, spared=True)

    def _leave(self, lease: Lease, failure: tuple[str, Ending] | None) -> _UnderWay | None:
        """Take a lease from its holder; returns the unit's record if nobody has it any more."""
        held = self._leased.get(lease.unit.unit)
        if held is None:
            return None
        held.holders.discard(lease.second)
        if held.won is lease.second:  # it was its commit that failed
            held.won = None
        if not lease.second:
            held.failure = failure
        return None if held.holders else held

    def _requeue(self, lease: Lease, spared: bool) -> None:
        # First in line: its rows are the oldest, and a worker that just freed an extent can take it at once.
        del self._leased[lease.unit.unit]
        lease = dataclasses.replace(lease, number=lease.number + 1, spared=lease.spared + spared)
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


class Rate:
    """How fast a worker is, over its last receipts."""

    def __init__(self) -> None:
        self._receipts: deque[tuple[float, int]] = deque(maxlen=_RATES)

    def add(self, tokens: int, now: float) -> None:
        """A receipt came."""
        self._receipts.append((now, tokens))

    @property
    def tokens_per_s(self) -> float:
        """0 while it is unknown."""
        if len(self._receipts) < 2:
            return 0.0
        seconds = self._receipts[-1][0] - self._receipts[0][0]
        tokens = sum(tokens for _, tokens in self._receipts) - self._receipts[0][1]
        return tokens / seconds if seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Depth:
    """How much a worker holds.

    Args:
        least: units that it always has.
        most: units that its arena holds.
    """

    least: int
    most: int

    def room(self, held: Collection[Lease], tokens_per_s: float) -> bool:
        """Whether a worker of this rate is to get another unit beside those that it holds."""
        if len(held) < self.least:
            return True
        return len(held) < self.most and sum(lease.unit.tokens for lease in held) < AHEAD_S * tokens_per_s
