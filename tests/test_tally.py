"""What a drive counts: each loss once and under its cause, and sums over drives."""

import json

from ray_extract.records import Receipt, RowFailure, RowStatus
from ray_extract.tally import Account, Cause, Loss, NodeAccount, Tally


def receipt(unit: str, node: str = "a", tokens: int = 100, failed: int = 0, wait: float = 0.0) -> Receipt:
    failures = tuple(RowFailure(row, RowStatus.REJECTED, "no") for row in range(failed))
    return Receipt(
        unit=unit,
        attempt="x-01",
        key=f"shards/{unit}",
        format="raw",
        size=1000,
        sha256="",
        rows=2,
        tokens=tokens,
        kept=tokens,
        failures=failures,
        digests=b"",
        environment={"node": node},
        seconds={"wait": wait, "extract": 1.0},
    )


def test_two_engines_are_counted_by_node_and_at_their_own_times() -> None:
    tally = Tally(100.0)
    tally.asked(1, 100.0)
    tally.asked(2, 100.0)
    tally.ready(1, "a", start_s=8.0, now=110.0)
    tally.ready(2, "b", start_s=9.0, now=130.0)
    for number, (node, now) in enumerate([("a", 120.0), ("a", 140.0), ("b", 150.0)]):
        tally.leased(f"u{number}", "01", now - 5)
        tally.committed(receipt(f"u{number}", node, failed=number, wait=0.5), "01", True, now)
    account = tally.account(150.0)
    assert (account.wall_s, account.serving_s) == (50.0, 40.0)
    assert (account.units, account.tokens, account.nbytes) == (3, 300, 3000)
    assert account.rows == {"ok": 3, "rejected": 3}
    assert account.nodes == {"a": NodeAccount(1, 40.0, 2, 200), "b": NodeAccount(1, 20.0, 1, 100)}
    assert account.nodes["a"].tokens_per_s == 5.0 and account.tokens_per_s == 7.5
    assert account.lost_s == {Loss.CAPACITY: 2.0 + 21.0, Loss.EXTENTS: 1.5}
    assert not account.retries and not account.restarts
    # Stopping the workers takes its time too, and is not served.
    tally.ended(170.0)
    assert (tally.account(180.0).wall_s, tally.account(180.0).serving_s) == (80.0, 40.0)


def test_what_fails_is_counted_under_its_cause_with_the_time_since_its_lease() -> None:
    tally = Tally(0.0)
    tally.asked(1, 0.0)
    tally.ready(1, "a", 0.0, 0.0)
    tally.leased("u0", "01", 1.0)
    tally.failed("u0", "01", Cause.WORKER_DIED, 4.0)
    tally.failed("u0", "01", Cause.STORE_FAILED, 5.0)  # it could not be split either, which took no lease
    tally.leased("u0", "02", 5.0)
    tally.leased("u1", "01", 5.0)
    tally.replaced(Cause.WORKER_DIED)
    assert tally.failures == {"u0": Cause.STORE_FAILED}
    tally.committed(receipt("u0"), "02", True, 6.0)
    tally.committed(receipt("u1"), "01", False, 7.0)
    tally.leased("u2", "01", 7.0)
    tally.outage(2.5)
    assert Loss.ATTEMPTS in tally.account(8.0).lost_s and tally.account(8.0).lost_s[Loss.ATTEMPTS] == 3.0 + 2.0
    tally.ended(9.0)
    account = tally.account(9.0)
    assert account.retries == {Cause.WORKER_DIED: 1, Cause.STORE_FAILED: 1, Cause.OVERTAKEN: 1}
    assert account.restarts == {Cause.WORKER_DIED: 1}
    assert account.lost_s == {Loss.ATTEMPTS: 3.0 + 2.0 + 2.0, Loss.OUTAGES: 2.5}
    assert account.units == 1 and not tally.failures


def test_of_two_attempts_at_once_only_the_second_one_home_is_thrown_away() -> None:
    tally = Tally(0.0)
    tally.leased("u0", "01", 1.0)
    tally.leased("u0", "01b", 20.0)
    tally.committed(receipt("u0"), "01b", True, 24.0)
    tally.overtaken("u0", "01", 31.0)
    account = tally.account(31.0)
    assert account.units == 1 and account.retries == {Cause.OVERTAKEN: 1}
    assert account.lost_s == {Loss.ATTEMPTS: 30.0} and not tally.failures


def test_a_worker_counts_by_its_last_word_whether_it_is_there_or_gone() -> None:
    def tell(tally: Tally) -> None:
        for starts in (1, 4):
            tally.counted(1, {"engine_starts": starts, "engine_stalls": starts // 4, "start_s": 30.0, "outage_s": 4.0})

    wanted = {Cause.ENGINE_DIED: 2, Cause.ENGINE_STALLED: 1}
    for leave in (False, True):
        tally = Tally(0.0)
        tally.asked(1, 0.0)
        tally.ready(1, "a", 30.0, 30.0)
        tell(tally)
        if leave:
            tally.gone(1, 50.0)
        account = tally.account(50.0)
        assert account.restarts == wanted and account.nodes["a"].engine_s == 20.0
        assert account.lost_s == {Loss.STARTS: 30.0, Loss.OUTAGES: 4.0}
        assert tally.account(50.0) == account, "to look must change nothing"


def test_a_worker_that_never_came_is_time_lost_to_capacity() -> None:
    tally = Tally(0.0)
    tally.asked(1, 2.0)
    tally.gone(1, 12.0)
    tally.replaced(Cause.NOT_STARTED)
    account = tally.account(12.0)
    assert account.lost_s == {Loss.CAPACITY: 10.0} and account.serving_s == 0.0 and account.tokens_per_s == 0.0


def test_accounts_add_up_and_pass_through_json() -> None:
    one = Account(
        1, 10.0, 8.0, 2, 200, 20, {"ok": 4}, {"a": 1}, {"b": 2}, {"c": 1.5}, {"n": NodeAccount(1, 8.0, 2, 200)}
    )
    two = Account(
        1,
        5.0,
        2.0,
        1,
        50,
        5,
        {"ok": 1, "fault": 1},
        {"a": 2, "d": 1},
        {},
        {"c": 1.0},
        {"n": NodeAccount(1, 2.0, 1, 50)},
    )
    total = one + two
    assert (total.drives, total.wall_s, total.tokens, total.retries) == (2, 15.0, 250, {"a": 3, "d": 1})
    assert total.rows == {"ok": 5, "fault": 1}
    assert total.lost_s == {"c": 2.5} and total.nodes == {"n": NodeAccount(2, 10.0, 3, 250)}
    assert Account() + one == one == one + Account()
    for account in (one, total, Account()):
        assert Account.from_json(json.loads(json.dumps(account.to_json()))) == account
