"""Leases: whatever happens to attempts, every row ends done or given up, never both, and is never lost."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.leases import AHEAD_S, Depth, Ending, Fate, Lease, Leases, Rate
from ray_extract.records import Unit

DEATH = Ending.DIED


def units(*rows: int) -> list[Unit]:
    """Units of these many rows."""
    return [Unit(f"u{i}", 0, count, count, count, count, count) for i, count in enumerate(rows)]


def halves(unit: Unit) -> list[Unit]:
    """A unit in two; which rows they are does not matter here."""
    sizes = (unit.rows // 2, unit.rows - unit.rows // 2)
    return [Unit(f"{unit.unit}.{i}", 0, rows, rows, rows, rows, rows) for i, rows in enumerate(sizes)]


DIES, LEFT = "the worker dies", "the node leaves"
STEPS = ["take", "take", "take", "receive", "receive", "commit", "refund", "the store fails", DIES, DIES, LEFT, "wait"]
WORKERS = 3


@settings(max_examples=1000, deadline=None)
@given(
    rows=st.lists(st.integers(1, 5), max_size=6),
    max_attempts=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=80),
)
def test_any_interleaving_accounts_for_every_row_and_commits_none_twice(
    rows: list[int], max_attempts: int, steps: list[tuple[str, int]]
) -> None:
    leases = Leases(units(*rows), max_attempts)
    now = 0.0
    held: list[tuple[int, Lease]] = []  # with the worker that holds it
    committing: list[Lease] = []
    done: dict[str, int] = {}
    gone: dict[str, int] = {}
    waiting = {unit.unit: unit.rows for unit in units(*rows)}
    counted: dict[str, int] = {}  # failures that count against a unit
    first_failed: dict[str, bool] = {}  # of a unit whose second lease goes on: whether its failure counts
    names: set[tuple[str, str]] = set()

    def under_way() -> dict[str, int]:
        return {lease.unit.unit: lease.unit.rows for lease in [*(each for _, each in held), *committing]}

    def check() -> None:
        here = {name: count for name, count in under_way().items() if name not in done}
        assert (leases.leased, leases.done, set(leases.given_up)) == (len(here), len(done), set(gone))
        assert leases.pending + leases.leased + leases.done + len(leases.given_up) == leases.total
        assert leases.pending == len(waiting)
        assert sum(here.values()) + sum(done.values()) + sum(gone.values()) + sum(waiting.values()) == sum(rows)
        assert leases.finished == (not here and not waiting)
        assert not waiting.keys() & (here.keys() | done.keys() | gone.keys()) and not done.keys() & gone.keys()

    def begin(worker: int, lease: Lease) -> None:
        held.append((worker, lease))
        assert (lease.unit.unit, lease.attempt) not in names  # or their shards would have one name
        names.add((lease.unit.unit, lease.attempt))

    def take(worker: int) -> bool:
        beside = [lease for holder, lease in held if holder == worker]
        lease = leases.take(beside, now)
        if lease is not None:
            assert not beside or not (lease.alone or any(other.alone for other in beside))
            assert waiting.pop(lease.unit.unit) == lease.unit.rows
            assert lease.doomed is None or lease.unit.rows == 1
            assert not lease.second
            begin(worker, lease)
            return True
        assert beside or not waiting
        stragglers = [] if beside else leases.take_stragglers(1, now)
        for again in stragglers:
            assert not waiting and again.second and not again.alone and not again.doomed
            others = [(who, other) for who, other in held if other.unit == again.unit]
            assert [(who != worker, other.second) for who, other in others] == [(True, False)]
            assert not any(other.unit == again.unit for other in committing)
            begin(worker, again)
        return bool(stragglers)

    def fail(lease: Lease, ending: Ending) -> None:
        name = lease.unit.unit
        fate = leases.give_back(lease, ending.name, ending)
        counts = ending is not Ending.NODE_LEFT or lease.spared >= 3
        if name in done:
            assert fate is Fate.NOTHING
            return
        if name in under_way():
            assert fate is Fate.NOTHING
            if not lease.second:
                first_failed[name] = counts
            return
        if lease.second:  # what counts is how the first one ended, if it failed at all
            counts = first_failed.pop(name, False)
        counted[name] = counted.get(name, 0) + counts
        if fate is Fate.GIVEN_UP:
            assert counted[name] >= max_attempts
            gone[name] = lease.unit.rows
        elif fate is Fate.SPLIT:
            # One that shared its worker is not known to be at fault.
            assert lease.alone and lease.unit.rows > 1 and lease.number >= max(2, max_attempts)
            assert ending is DEATH or lease.spared == 3
            leases.split(lease, halves(lease.unit))
            for part in halves(lease.unit):
                waiting[part.unit], counted[part.unit] = part.rows, counted[name] - 1
        else:
            assert fate is Fate.AGAIN or (fate is Fate.DOOMED and lease.alone and lease.unit.rows == 1)
            assert fate is Fate.DOOMED or lease.doomed or counted[name] <= max_attempts + 1
            waiting[name] = lease.unit.rows

    def receive(pick: int) -> None:
        _, lease = held.pop(pick % len(held))
        name = lease.unit.unit
        others = name in done or any(other.unit == lease.unit for other in committing)
        assert leases.receive(lease, now) != others
        if not others:
            committing.append(lease)

    def commit(pick: int) -> None:
        lease = committing.pop(pick % len(committing))
        leases.complete(lease)
        assert lease.unit.unit not in done
        done[lease.unit.unit] = lease.unit.rows

    endings = {"the store fails": Ending.FAILED, DIES: DEATH, LEFT: Ending.NODE_LEFT}
    for step, pick in steps:
        now += 1.0
        if step == "take":
            take(pick % WORKERS)
        elif step == "wait":
            now += 100.0
        elif step == "commit" and committing:
            commit(pick)
        elif step == "the store fails" and committing and pick % 2:
            fail(committing.pop(pick % len(committing)), Ending.FAILED)
        elif step == "receive" and held:
            receive(pick)
        elif step == "refund" and held:
            _, lease = held.pop(pick % len(held))
            leases.refund(lease)
            if lease.unit.unit in under_way() and not lease.second:
                first_failed.pop(lease.unit.unit, None)
            elif lease.unit.unit not in under_way() and lease.unit.unit not in done:
                first_failed.pop(lease.unit.unit, None)
                waiting[lease.unit.unit] = lease.unit.rows
        elif step in endings and held:
            fail(held.pop(pick % len(held))[1], endings[step])
        check()

    while any(take(worker) for worker in range(WORKERS)) or held or committing:
        now += 1.0
        receive(0) if held else commit(0)
        check()
    assert leases.finished and sum(done.values()) + sum(gone.values()) == sum(rows)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    max_attempts=st.integers(1, 3),
    in_flight=st.integers(1, 4),
    data=st.data(),
)
def test_of_workers_that_rows_kill_exactly_these_rows_are_doomed(
    rows: list[int], max_attempts: int, in_flight: int, data: st.DataObject
) -> None:
    """One worker, which dies whenever it holds a row that kills; parts are ranges of one count of all rows."""
    starts = [sum(rows[:i]) for i in range(len(rows) + 1)]
    whole = [Unit(f"u{i}", a, b, b - a, b - a, b - a, b - a) for i, (a, b) in enumerate(itertools.pairwise(starts))]
    killers = data.draw(st.sets(st.integers(0, starts[-1] - 1), max_size=3))
    leases = Leases(whole, max_attempts)
    extracted: list[int] = []
    doomed: list[int] = []
    deaths = 0
    while not leases.finished:
        held: list[Lease] = []
        while len(held) < in_flight:
            lease = leases.take(held, 0.0)
            if lease is None:
                break
            held.append(lease)
        if any(killers & {*range(lease.unit.first, lease.unit.end)} and not lease.doomed for lease in held):
            deaths += 1
            assert deaths <= len(killers) * (max(2, max_attempts) + 6)
            for lease in held:
                if leases.give_back(lease, "died", DEATH) is Fate.SPLIT:
                    middle = (lease.unit.first + lease.unit.end) // 2
                    bounds = ((lease.unit.first, middle), (middle, lease.unit.end))
                    leases.split(lease, [Unit(f"{lease.unit.unit}.{a}", a, b, *[b - a] * 4) for a, b in bounds])
        else:
            for lease in held:
                (doomed if lease.doomed else extracted).extend(range(lease.unit.first, lease.unit.end))
                leases.complete(lease)
    assert sorted(doomed) == sorted(killers)
    assert sorted(extracted + doomed) == list(range(starts[-1]))
    assert not leases.given_up and leases.total == leases.done


def test_units_are_leased_in_order_and_a_failed_one_is_next() -> None:
    leases = Leases(units(1, 1, 1), 2)
    first, second = leases.take([], 0.0), leases.take([], 0.0)
    assert first is not None and second is not None
    assert (first.unit.unit, second.unit.unit) == ("u0", "u1")
    leases.give_back(second, "the store failed")
    assert leases.take([], 0.0) == Lease(second.unit, 2)
    last = leases.take([], 0.0)
    assert last is not None and last.unit.unit == "u2" and leases.take([], 0.0) is None


def test_what_may_kill_workers_comes_last_and_alone() -> None:
    leases = Leases(units(1, 1, 1), 1)
    first = leases.take([], 0.0)
    assert first is not None and leases.give_back(first, "died", DEATH) is Fate.AGAIN
    others = [lease for lease in (leases.take([], 0.0), leases.take([], 0.0)) if lease]
    assert [lease.unit.unit for lease in others] == ["u1", "u2"]
    assert leases.take(others, 0.0) is None and leases.pending == 1
    trial = leases.take([], 0.0)
    assert trial == Lease(first.unit, 2, alone=True)
    leases.refund(others[0])
    assert leases.take([trial], 0.0) is None and leases.take([], 0.0) == Lease(others[0].unit, 2, spared=1)


def test_a_row_that_kills_workers_even_when_it_is_only_recorded_is_given_up() -> None:
    leases = Leases(units(1), 2)
    fates = []
    while (lease := leases.take([], 0.0)) and len(fates) < 9:
        fates.append(leases.give_back(lease, "died", DEATH))
    assert fates == [Fate.AGAIN, Fate.DOOMED, Fate.AGAIN, Fate.GIVEN_UP]
    assert leases.finished and leases.given_up == {"u0": "died"}


def test_neither_a_refund_nor_a_node_that_left_counts_as_an_attempt() -> None:
    leases = Leases(units(1), 1)
    for number in range(1, 4):
        lease = leases.take([], 0.0)
        assert lease is not None and (lease.number, lease.alone) == (number, False)
        leases.refund(lease) if number == 1 else leases.give_back(lease, "gone", Ending.NODE_LEFT)
    assert not leases.given_up


def test_a_unit_whose_nodes_leave_each_time_is_tried_alone_in_the_end() -> None:
    """It may be what takes them down."""
    leases = Leases(units(2), 2)
    fates, alone = [], []
    while fates.count(Fate.SPLIT) == 0:
        lease = leases.take([], 0.0)
        assert lease is not None
        alone.append(lease.alone)
        fates.append(leases.give_back(lease, "gone", Ending.NODE_LEFT))
    assert alone == [False] * 4 + [True]


def straggling() -> tuple[Leases, Lease]:
    """Two units of a hundred tokens; one took ten seconds, and the other, returned, is under way since second 0."""
    leases = Leases(units(100, 100), 3)
    first, second = leases.take([], 0.0), leases.take([], 0.0)
    assert first is not None and second is not None and leases.receive(first, 10.0)
    leases.complete(first)
    return leases, second


def test_a_straggler_is_leased_once_more_when_it_takes_twice_what_its_tokens_deserve() -> None:
    leases, slow = straggling()
    assert leases.take_stragglers(9, 20.0) == []
    (again,) = leases.take_stragglers(9, 20.1)
    assert again == Lease(slow.unit, 1, second=True) and (slow.attempt, again.attempt) == ("01", "01b")
    assert leases.take_stragglers(9, 99.0) == []  # and not a third time
    assert leases.receive(again, 25.0) and not leases.receive(slow, 26.0)
    leases.complete(again)
    assert leases.finished and leases.done == 2


def test_nothing_is_leased_twice_while_units_wait_or_nobody_idles_or_nothing_tells_how_long_units_take() -> None:
    leases = Leases(units(1, 1), 3)
    first = leases.take([], 0.0)
    assert first is not None and leases.take_stragglers(9, 999.0) == []  # a unit waits
    second = leases.take([], 0.0)
    assert second is not None and leases.take_stragglers(9, 999.0) == []  # no pace
    assert leases.receive(first, 1.0)
    assert leases.take_stragglers(0, 999.0) == []
    assert len(leases.take_stragglers(9, 999.0)) == 1  # and not the one whose commit is under way


def test_the_failure_of_a_second_lease_does_not_count_and_that_of_the_first_counts_once_both_failed() -> None:
    leases, slow = straggling()
    (again,) = leases.take_stragglers(1, 99.0)
    assert leases.give_back(again, "died", DEATH) is Fate.NOTHING
    assert leases.give_back(slow, "failed") is Fate.AGAIN
    assert leases.take([], 100.0) == Lease(slow.unit, 2)
    leases, slow = straggling()
    (again,) = leases.take_stragglers(1, 99.0)
    assert leases.give_back(slow, "failed") is Fate.NOTHING and not leases.pending
    assert leases.give_back(again, "died", DEATH) is Fate.AGAIN
    assert leases.take([], 100.0) == Lease(slow.unit, 2)


def test_a_unit_is_not_lost_when_the_faster_lease_cannot_be_committed() -> None:
    leases, slow = straggling()
    (again,) = leases.take_stragglers(1, 99.0)
    assert leases.receive(again, 100.0) and not leases.receive(slow, 101.0)
    assert leases.give_back(again, "its commit failed") is Fate.AGAIN
    assert leases.take([], 102.0) == Lease(slow.unit, 2, spared=1)


def test_the_second_lease_counts_when_the_first_one_cannot_be_committed() -> None:
    leases, slow = straggling()
    (again,) = leases.take_stragglers(1, 99.0)
    assert leases.receive(slow, 100.0) and leases.give_back(slow, "its commit failed") is Fate.NOTHING
    assert leases.receive(again, 101.0)
    leases.complete(again)
    assert leases.finished


def test_a_worker_holds_seconds_of_work_between_the_least_and_the_most_units() -> None:
    depth = Depth(2, 5)
    held = [Lease(unit, 1) for unit in units(10, 10, 10, 10, 10)]

    def holds(tokens_per_s: float) -> int:
        return next((n for n in range(6) if not depth.room(held[:n], tokens_per_s)), 6)

    assert [holds(tokens / AHEAD_S) for tokens in (0, 20, 21, 40, 1e9)] == [2, 2, 3, 4, 5]


def test_a_rate_is_of_what_came_after_the_first_receipt() -> None:
    rate = Rate()
    assert rate.tokens_per_s == 0.0
    rate.add(1000, 5.0)
    assert rate.tokens_per_s == 0.0
    rate.add(30, 5.0)
    assert rate.tokens_per_s == 0.0  # both at once tell nothing
    rate.add(30, 7.0)
    assert rate.tokens_per_s == 30.0
