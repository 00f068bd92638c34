"""Leases: whatever happens to attempts, every row ends done or given up, never both, and is never lost."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.leases import Fate, Lease, Leases
from ray_extract.records import Unit


def units(*rows: int) -> list[Unit]:
    """Units of these many rows."""
    return [Unit(f"u{i}", 0, count, count, count, count, count) for i, count in enumerate(rows)]


def halves(unit: Unit) -> list[Unit]:
    """A unit in two; which rows they are does not matter here."""
    sizes = (unit.rows // 2, unit.rows - unit.rows // 2)
    return [Unit(f"{unit.unit}.{i}", 0, rows, rows, rows, rows, rows) for i, rows in enumerate(sizes)]


DIES = "the worker dies"
STEPS = ["take", "take", "take", "complete", "refund", "the store fails", DIES, DIES, DIES]
WORKERS = 2


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.integers(1, 5), max_size=6),
    max_attempts=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=60),
)
def test_any_interleaving_accounts_for_every_row(
    rows: list[int], max_attempts: int, steps: list[tuple[str, int]]
) -> None:
    leases = Leases(units(*rows), max_attempts)
    held: list[tuple[int, Lease]] = []  # with the worker that holds it
    done: dict[str, int] = {}
    gone: dict[str, int] = {}
    waiting = {unit.unit: unit.rows for unit in units(*rows)}
    tried: dict[str, int] = {}

    def check() -> None:
        assert (leases.leased, leases.done, set(leases.given_up)) == (len(held), len(done), set(gone))
        assert leases.pending + leases.leased + leases.done + len(leases.given_up) == leases.total
        assert leases.pending == len(waiting)
        here = [lease.unit.rows for _, lease in held]
        assert sum(here) + sum(done.values()) + sum(gone.values()) + sum(waiting.values()) == sum(rows)
        assert leases.finished == (not held and not waiting)

    def take(worker: int) -> bool:
        beside = [lease for holder, lease in held if holder == worker]
        lease = leases.take(beside)
        if lease is None:
            assert beside or not waiting
            return False
        assert not beside or not (lease.alone or any(other.alone for other in beside))
        assert waiting.pop(lease.unit.unit) == lease.unit.rows
        assert lease.doomed is None or lease.unit.rows == 1
        held.append((worker, lease))
        return True

    def fail(lease: Lease, died: bool) -> None:
        name, count = lease.unit.unit, tried.get(lease.unit.unit, 0) + 1
        tried[name] = count
        fate = leases.give_back(lease, f"reason {count}", died)
        if fate is Fate.GIVEN_UP:
            assert not died or lease.doomed
            gone[name] = lease.unit.rows
            assert leases.given_up[name] == f"reason {count}"
            return
        if fate is Fate.SPLIT:
            # One that shared its worker is not known to be at fault.
            assert died and lease.alone and lease.unit.rows > 1 and lease.number >= max(2, max_attempts)
            leases.split(lease, halves(lease.unit))
            waiting.update({part.unit: part.rows for part in halves(lease.unit)})
            return
        assert (fate is Fate.DOOMED) == (died and lease.alone and lease.unit.rows == 1 and not lease.doomed)
        assert fate is Fate.DOOMED or count <= max_attempts + 1 or lease.doomed
        waiting[name] = lease.unit.rows

    for step, pick in steps:
        if step == "take":
            take(pick % WORKERS)
        elif held:
            _, lease = held.pop(pick % len(held))
            if step == "complete":
                leases.complete(lease)
                done[lease.unit.unit] = lease.unit.rows
            elif step == "refund":
                leases.refund(lease)
                waiting[lease.unit.unit] = lease.unit.rows
            else:
                fail(lease, died=step == DIES)
        check()

    while any(take(worker) for worker in range(WORKERS)) or held:
        _, lease = held.pop(0)
        leases.complete(lease)
        done[lease.unit.unit] = lease.unit.rows
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
            lease = leases.take(held)
            if lease is None:
                break
            held.append(lease)
        if any(killers & {*range(lease.unit.first, lease.unit.end)} and not lease.doomed for lease in held):
            deaths += 1
            assert deaths <= len(killers) * (max(2, max_attempts) + 6)
            for lease in held:
                if leases.give_back(lease, "died", died=True) is Fate.SPLIT:
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
    first, second = leases.take(), leases.take()
    assert first is not None and second is not None
    assert (first.unit.unit, second.unit.unit) == ("u0", "u1")
    leases.give_back(second, "the store failed")
    assert leases.take() == Lease(second.unit, 2)
    last = leases.take()
    assert last is not None and last.unit.unit == "u2" and leases.take() is None


def test_what_may_kill_workers_comes_last_and_alone() -> None:
    leases = Leases(units(1, 1, 1), 1)
    first = leases.take()
    assert first is not None and leases.give_back(first, "died", died=True) is Fate.AGAIN
    others = [lease for lease in (leases.take(), leases.take()) if lease]
    assert [lease.unit.unit for lease in others] == ["u1", "u2"]
    assert leases.take(others) is None and leases.pending == 1
    trial = leases.take()
    assert trial == Lease(first.unit, 2, alone=True)
    leases.refund(others[0])
    assert leases.take([trial]) is None and leases.take() == others[0]


def test_a_row_that_kills_workers_even_when_it_is_only_recorded_is_given_up() -> None:
    leases = Leases(units(1), 2)
    fates = []
    while (lease := leases.take()) and len(fates) < 9:
        fates.append(leases.give_back(lease, "died", died=True))
    assert fates == [Fate.AGAIN, Fate.DOOMED, Fate.AGAIN, Fate.GIVEN_UP]
    assert leases.finished and leases.given_up == {"u0": "died"}


def test_a_refund_does_not_count_as_an_attempt() -> None:
    leases = Leases(units(1), 1)
    for _ in range(5):
        lease = leases.take()
        assert lease is not None and lease.number == 1
        leases.refund(lease)
    assert not leases.given_up
