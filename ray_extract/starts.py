"""What follows when an engine does not start: pure decisions."""

import enum
from collections import Counter

_TRIES = 3  # starts of one engine in a row
_ALL_TRIES = 16  # of all engines in a row, while none serves
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


class Start(enum.Enum):
    """What follows."""

    AGAIN = enum.auto()  # after a pause, see Starts.pause_s
    WITHOUT = enum.auto()  # the run goes on without this engine
    STOP = enum.auto()


class Starts:
    """Counts the starts that failed.

    An engine that does not start again and again is done without, as long as another serves or may still start: one
    broken node must not end a run. Where none serves the run stops early, since then it is most likely the job.

    Args:
        engines: how many there are.
    """

    def __init__(self, engines: int) -> None:
        self._left = engines
        self._limit = min(max(_TRIES, engines), _ALL_TRIES)
        self._failed: Counter[int] = Counter()
        self._useless: Counter[int] = Counter()  # starts of each engine in a row of which nothing came
        self._in_a_row = 0
        self._any = False  # whether one ever served

    def ready(self, engine: int) -> None:
        """It started."""
        self._any = True
        self._in_a_row = 0
        del self._failed[engine]

    def failed(self, engine: int, serving: int, for_good: bool) -> Start:
        """It did not start.

        Args:
            engine: which of them.
            serving: how many do.
            for_good: its error says that another try will end alike.
        """
        self._in_a_row += 1
        self._failed[engine] += 1
        if not serving and ((for_good and not self._any) or self._in_a_row >= self._limit):
            return Start.STOP
        if self._failed[engine] < _TRIES:
            return Start.AGAIN
        self._left -= 1
        return Start.WITHOUT if self._left else Start.STOP

    def useless(self, engine: int) -> None:
        """Its worker started, and ended before it had extracted anything.

        The pause grows as for a start that failed. But the engine is not done without for it: a row may be what kills
        its workers, and be found by that, see leases.Leases.
        """
        self._useless[engine] += 1

    def useful(self, engine: int) -> None:
        """Its worker extracted a unit."""
        del self._useless[engine]

    def pause_s(self, engine: int) -> float:
        """Seconds before it is started again."""
        failed = self._failed[engine] + self._useless[engine]
        return min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(max(0, failed - 1), 10))
