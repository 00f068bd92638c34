"""Leases: whatever happens to attempts, every unit ends done or given up, never both, and is never lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.leases import Lease, Leases
from ray_extract.records import Unit


def units(count: int) -> list[Unit]:
    return [Unit(f"u{i}", i, i + 1, 1, 1, 1, 1) for i in range(count)]


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(0, 6),
    max_attempts=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(["take", "complete", "give back", "refund"]), st.integers(0, 9))),
)
def test_any_interleaving_accounts_for_every_unit(count: int, max_attempts: int, steps: list[tuple[str, int]]) -> None:
    leases = Leases(units(count), max_attempts)
    held: list[Lease] = []
    done: list[str] = []
    failures = {f"u{i}": 0 for i in range(count)}

    def check() -> None:
        assert (leases.total, leases.leased, leases.done) == (count, len(held), len(done))
        assert leases.pending + leases.leased + leases.done + len(leases.given_up) == count
        assert leases.finished == (len(done) + len(leases.given_up) == count)
        assert {u for u, n in failures.items() if n == max_attempts} == set(leases.given_up)

    def take() -> bool:
        lease = leases.take()
        assert (lease is None) == (len(held) + len(done) + len(leases.given_up) == count)
        if lease is not None:
            name = lease.unit.unit
            assert name not in {h.unit.unit for h in held} and name not in done and name not in leases.given_up
            assert lease.number == failures[name] + 1 <= max_attempts
            held.append(lease)
        return lease is not None

    for step, pick in steps:
        if step == "take":
            take()
        elif held:
            lease = held.pop(pick % len(held))
            name = lease.unit.unit
            if step == "complete":
                leases.complete(lease)
                done.append(name)
            elif step == "refund":
                leases.refund(lease)
            else:
                failures[name] += 1
                assert leases.give_back(lease, f"reason {failures[name]}") == (failures[name] < max_attempts)
        check()

    while take() or held:
        leases.complete(held[0])
        done.append(held.pop(0).unit.unit)
        check()
    assert leases.finished
    assert sorted([*done, *leases.given_up]) == sorted(failures)
    assert all(leases.given_up[u] == f"reason {max_attempts}" for u in leases.given_up)


def test_units_are_leased_in_order_and_a_failed_one_is_next() -> None:
    leases = Leases(units(3), 2)
    first, second = leases.take(), leases.take()
    assert first is not None and second is not None
    assert (first.unit.unit, second.unit.unit) == ("u0", "u1")
    leases.give_back(second, "the engine died")
    again = leases.take()
    assert again == Lease(second.unit, 2)
    last = leases.take()
    assert last is not None and last.unit.unit == "u2" and leases.take() is None


def test_a_refund_does_not_count_as_an_attempt() -> None:
    leases = Leases(units(1), 1)
    for _ in range(5):
        lease = leases.take()
        assert lease is not None and lease.number == 1
        leases.refund(lease)
    assert not leases.given_up
