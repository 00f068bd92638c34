"""Retry rounds: failed rows are extracted again, each row counts once, and every view says the same."""

import concurrent.futures
import dataclasses
import functools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clusters  # noqa: F401 - before ray
import exports
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import Output, check_rows, claim, make_output, retry
from simulated import Work, check_output, make_rows, make_work
from test_ledger import STATES, claimed, make_receipt, make_units, put_manifest
from test_ledger import make_rows as make_heads

from ray_extract import cli, layout, run
from ray_extract.dataset.prepare import PreparedRow
from ray_extract.dataset.prepared import Lengths, RowLength
from ray_extract.errors import IdentityMismatch, PlanError, ShardError
from ray_extract.exporters.export import Request, export
from ray_extract.ledger import Ledger, Retry, latest_manifest, mended, orphans, read_manifest
from ray_extract.plan import plan_retry, read_rounds
from ray_extract.records import Receipt, RowFailure, RowStatus, Unit
from ray_extract.store import open_store
from ray_extract.verify import verify

LIMITS = {"token_bytes": 8, "shard_bytes": 80, "max_rows": 4}


# Which rows make which units


@given(lengths=st.lists(st.integers(0, 12), max_size=40), data=st.data(), number=st.integers(1, 9999))
def test_each_failed_row_is_in_one_unit_of_a_round_and_no_other_row_is(
    lengths: list[int], data: st.DataObject, number: int
) -> None:
    rows = [RowLength(i, n, n, n > 0) for i, n in enumerate(lengths)]
    usable = [row.row for row in rows if row.usable]
    failed = data.draw(st.sets(st.sampled_from(usable)) if usable else st.just(set()))
    units = plan_retry([Lengths.of(rows)], failed, number, **LIMITS)
    assert [row for unit in units for row in unit.members or ()] == sorted(failed)
    for unit in units:
        members = [rows[row] for row in unit.members or ()]
        assert (unit.first, unit.end, unit.rows) == (members[0].row, members[-1].row + 1, len(members))
        assert unit.tokens == unit.kept == sum(row.kept for row in members) and unit.nbytes == 8 * unit.kept
        assert unit.rows <= 4 and (unit.rows == 1 or unit.nbytes <= 80)


@given(round_number=st.integers(1, 9999), unit=st.integers(0, 10**8 - 1), planned=st.integers(0, 10**8 - 1))
def test_units_of_rounds_are_told_from_planned_ones_and_sort_before_them(
    round_number: int, unit: int, planned: int
) -> None:
    retried = layout.retry_unit_id(round_number, unit)
    assert layout.unit_of_commit(layout.commit_key(retried)) == retried
    assert layout.round_of_unit(retried) == round_number and layout.round_of_unit(layout.unit_id(planned)) is None
    assert layout.round_of_key(layout.round_key(round_number)) == round_number
    assert retried < layout.unit_id(planned)
    if round_number > 1:
        assert layout.retry_unit_id(round_number - 1, 10**8 - 1) < retried


# What a manifest says of a row that is in several shards


def lengths_of(rows: Sequence[PreparedRow]) -> Lengths:
    """What planning needs of rows whose tokens are all stored."""
    return Lengths.of(RowLength(row.index, len(row.input_ids), len(row.input_ids), row.reason is None) for row in rows)


def commit(ledger: Ledger, unit: Unit, rows: Sequence[int], bad: set[int]) -> Receipt:
    """Commit a unit of these rows; its digests tell unit and place."""
    receipt = make_receipt(unit, "a", [RowFailure(row, RowStatus.FAULT, unit.unit) for row in rows if row in bad])
    seed = sum(unit.unit.encode()) << 32
    digests = np.arange(unit.rows * (1 + STATES), dtype="<u8") + np.uint64(seed)
    receipt = dataclasses.replace(receipt, digests=digests.tobytes())
    assert ledger.commit(receipt)
    return receipt


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_each_row_is_listed_once_where_it_was_ok_first_and_else_where_it_failed_last(data: st.DataObject) -> None:
    heads = make_heads(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12)))
    units = make_units(heads, data.draw(st.integers(1, 4)))
    usable = [head.index for head in heads if head.reason is None]

    def subsets(of: Sequence[int]) -> Any:
        return st.sets(st.sampled_from(of)) if of else st.just(set())

    ledger = claimed()
    where: dict[int, list[tuple[Receipt, int, int, bool]]] = {row: [] for row in usable}

    def place(unit: Unit, rows: Sequence[int], bad: set[int]) -> Receipt:
        receipt, tokens = commit(ledger, unit, rows, bad), 0
        for at, row in enumerate(rows):
            where[row].append((receipt, at, tokens, row not in bad))
            tokens += len(heads[row].input_ids)
        return receipt

    bad = data.draw(subsets(usable))
    for unit in units:
        place(unit, [row for row in usable if unit.first <= row < unit.end], bad)
    retries: list[Retry] = []
    for number in range(1, data.draw(st.integers(0, 3)) + 1):
        # Any rows: another driver's round may hold some that are ok by now.
        rows = data.draw(subsets(usable))
        bad = data.draw(subsets(sorted(rows)))
        for unit in plan_retry([lengths_of(heads)], rows, number, **LIMITS):
            if data.draw(st.booleans()):  # else it is not committed yet
                retries.append((unit, place(unit, unit.members or (), bad)))
    receipts = [receipt for receipt in ledger.receipts() if receipt.unit[0] == "u"]
    _, totals = put_manifest(ledger, heads, units, receipts, retries, part_rows=data.draw(st.integers(1, 5)))
    table = read_manifest(ledger.store).to_pylist()
    assert [line["row"] for line in table] == list(range(len(heads)))
    for row, places in where.items():
        receipt, at, tokens, ok = next((p for p in places if p[3]), places[-1])
        line = table[row]
        assert (line["status"], line["unit"], line["shard"]) == ("ok" if ok else "failed", receipt.unit, receipt.key)
        assert (line["row_in_shard"], line["token_offset"]) == (at, tokens)
        assert line["digests"] == np.frombuffer(receipt.digests, "<u8").reshape(-1, 1 + STATES)[at].tolist()
        assert line["reason"] == (None if ok else f"fault: {receipt.unit}")
    failed = {line["row"] for line in table if line["status"] == "failed"}
    assert failed == {f.row for r in ledger.receipts() if r.unit[0] == "u" for f in r.failures} - mended(retries)
    assert totals.rows == totals.ok + sum(totals.skipped.values()) + len(failed)


def test_a_round_that_does_not_fit_its_commit_or_its_rows_makes_no_manifest() -> None:
    heads = make_heads([3, 0, 5])
    ledger = claimed()
    (unit,) = make_units(heads, 4)
    base = [commit(ledger, unit, [0, 2], {2})]
    (round_unit,) = plan_retry([lengths_of(heads)], {2}, 1, **LIMITS)
    receipt = make_receipt(round_unit, "a")
    for wrong, says in (
        ((round_unit, dataclasses.replace(receipt, rows=2)), "plan has 1 rows"),
        ((dataclasses.replace(round_unit, kept=4), receipt), "5 stored tokens, 1 and 4 planned"),
        ((dataclasses.replace(round_unit, members=(1,)), receipt), "0 usable rows"),
        ((round_unit, make_receipt(round_unit, "a", [RowFailure(0, RowStatus.FAULT, "x")])), r"not hold: \[0\]"),
    ):
        with pytest.raises(ShardError, match=says):
            put_manifest(ledger, heads, [unit], base, [wrong])
    assert latest_manifest(ledger.store) is None


# What is made of an output with rounds


@pytest.mark.parametrize("format", ["raw", "parquet"])
@pytest.mark.parametrize("keep", ["all", "supervised"])
def test_readers_verify_and_counts_find_a_row_where_a_round_mended_it(tmp_path: Path, format: str, keep: str) -> None:
    # Rows 1, 4 and 5 are of three units, and row 2 is skipped.
    output = make_output(tmp_path, format=format, keep=keep, failed=[1, 4, 5])
    (first, second) = retry(output, [1, 4, 5], failed=[4])
    assert (first.members, second.members) == ((1, 4), (5,))
    check_rows(output, [0, 1, 3, 5])
    assert verify(output.url).failed == {"incomplete": 1}
    retry(output, [4], number=2)
    check_rows(output, [0, 1, 3, 4, 5])
    assert latest_manifest(output.store) == "manifest-000002.parquet"
    assert orphans(output.store) == []


def test_an_export_of_a_mended_run_has_the_rows_that_were_lacking(tmp_path: Path) -> None:
    output = exports.make_run(tmp_path, failed=[0, 6])
    retry(output, [0, 6])
    whole = exports.make_run(tmp_path / "whole")
    for run_, name in ((output, "mended"), (whole, "never failed")):
        export(Request(run_.url, "specforge-eagle3", str(tmp_path / name)))

    def files(name: str) -> dict[str, bytes]:
        paths = (tmp_path / name).rglob("*.ckpt*")
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in paths}

    assert files("mended") == files("never failed") != {}


def test_sweep_takes_the_attempts_that_lost_in_a_round_and_nothing_that_counts(tmp_path: Path) -> None:
    output = make_output(tmp_path, failed=[1, 4])
    (unit,) = retry(output, [1, 4])
    late = layout.shard_key(unit.unit, "late", "raw")
    output.store.put(late, b"x")
    output.store.put(layout.shard_key(layout.retry_unit_id(2, 0), "begun", "raw"), b"x")
    assert [item.key for item in orphans(output.store)] == [late]


def damage(output: Output, unit: Unit) -> None:
    path = Path(output.url) / layout.shard_key(unit.unit, "a0", "raw")
    data = bytearray(path.read_bytes())
    data[data.index(output.stored[1]["state.3"][:5].tobytes()) + 33] ^= 2
    path.write_bytes(data)


def remove_commit(output: Output, unit: Unit) -> None:
    output.store.delete(layout.commit_key(unit.unit))


def remove_round(output: Output, unit: Unit) -> None:
    output.store.delete(layout.round_key(1))


def old_manifest(output: Output, unit: Unit) -> None:
    output.store.delete(layout.manifest_key(1))


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (damage, "r0001-00000000.*row 1: state.3 differ from what was captured"),
        (remove_commit, "1 unit without a commit, such as r0001-00000000: the retry round is not finished"),
        (remove_round, "commits/r0001-00000000.json: the plan has no such unit"),
        (old_manifest, "manifest: row 4: status, reason, unit, shard.* not as in plan and commits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_verify_finds_what_is_wrong_with_a_round(tmp_path: Path, harm: Any, found: str) -> None:
    output = make_output(tmp_path, failed=[1, 4])
    (unit,) = retry(output, [1, 4])
    assert verify(output.url).ok
    harm(output, unit)
    report = verify(output.url)
    assert any(re.search(found, problem) for problem in report.problems), report.problems
    mends = [line for line in report.lines() if "retry-failed again, which extracts their rows anew" in line]
    assert len(mends) == (harm is damage)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"version": 9}', b'{"version": 1, "units": [{}]}'])
def test_a_damaged_round_is_an_error_with_its_way_out(tmp_path: Path, text: bytes) -> None:
    output = make_output(tmp_path, failed=[1])
    output.store.put(layout.round_key(3), text)
    with pytest.raises(PlanError, match=r"plan/retry-0003\.json cannot be used .* commits/r0003-\*\.json"):
        read_rounds(output.store)


def test_of_two_that_claim_a_round_at_once_one_makes_it_for_both(tmp_path: Path) -> None:
    output = make_output(tmp_path, failed=[1, 4, 5])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, other = pool.map(functools.partial(claim, output), ({1, 4, 5}, {4, 5}))
    assert one == other == read_rounds(output.store)


# Runs


REJECT, NAN = 2, 3
MENDED = "engine.args={reject_token: -1, nan_token: -1}"  # merged with those of the job file


@pytest.fixture
def broken(tmp_path: Path, ray_cluster: Any) -> Work:
    """A complete run of 12 rows, of which 2, 7 and 8 failed; without its engine's faults they will not."""
    rows = make_rows(12)
    rows[2][5], rows[7][0], rows[8][9] = NAN, REJECT, NAN
    faults = {"reject_token": REJECT, "nan_token": NAN}
    work = make_work(tmp_path, rows, str(ray_cluster.address), engine={"cpus": 0.25, "args": faults})
    assert run.main(work.args()) == 1
    return work


@pytest.mark.ray
def test_each_round_extracts_what_still_fails_and_the_last_one_leaves_nothing(
    broken: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["retry-failed", *broken.args("engine.args.nan_token=-1")]) == 1
    out = capsys.readouterr().out
    assert "  ok        11\n" in out and "failed    1   (1 x rejected)" in out and "shards      8," in out
    assert "\nretry       ray-extract retry-failed, " in out
    check_output(broken, {7: "rejected by the simulated engine"})
    first = {receipt.unit for receipt in broken.receipts()}
    assert cli.main(["retry-failed", *broken.args(MENDED)]) == 0
    receipts = check_output(broken)
    (receipt,) = (receipt for receipt in receipts if receipt.unit not in first)
    assert (receipt.unit, receipt.rows) == ("r0002-00000000", 1)
    capsys.readouterr()
    assert cli.main(["status", broken.url]) == 0
    status = capsys.readouterr().out
    assert "state       complete (" in status and "6 of 6 committed" in status
    assert "retries     3 of 3 units of retry rounds committed\nfailed rows 0\n" in status
    # Nothing is left to do, for it and for the run's own command.
    before = sorted((p, p.stat().st_mtime_ns) for p in Path(broken.url).rglob("*") if p.is_file())
    assert cli.main(["retry-failed", *broken.args()]) == 0
    out = capsys.readouterr().out
    assert "nothing was left to extract" in out and "retry-failed" not in out
    assert run.main(broken.args()) == 0
    assert sorted((p, p.stat().st_mtime_ns) for p in Path(broken.url).rglob("*") if p.is_file()) == before


@pytest.mark.ray
def test_a_round_that_was_claimed_and_not_finished_is_finished_and_no_other_is_claimed(
    broken: Work, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = broken.job(MENDED)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "_extract", killed)
        run.retry_failed(job)
    assert not verify(broken.url).ok
    assert run.main(broken.args()) == 1  # the run itself is as complete as it was
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "write_views", killed)
        run.retry_failed(job)
    assert not verify(broken.url).ok  # the manifest is old
    assert run.retry_failed(job).this.tokens == 0
    check_output(broken)
    assert [layout.round_of_unit(unit.unit) for unit in read_rounds(open_store(broken.url))] == [1, 1]
    # A commit of the round that somebody deletes is extracted again.
    (Path(broken.url) / "commits/r0001-00000001.json").unlink()
    capsys.readouterr()
    assert cli.main(["status", broken.url]) == 0
    status = capsys.readouterr().out
    assert "state       complete (" in status and "retries     1 of 2 units" in status
    assert run.retry_failed(job).totals.ok == 12
    check_output(broken)


@pytest.mark.ray
def test_two_that_retry_at_once_are_harmless(broken: Work) -> None:
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ray_extract",
                "retry-failed",
                *broken.args(MENDED, "engine.args.tokens_per_s=50"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        text, _ = process.communicate(timeout=240)
        assert process.returncode == 0, text
    check_output(broken)


def test_a_run_that_is_not_complete_or_not_there_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = make_work(tmp_path, make_rows(3))
    assert cli.main(["retry-failed", *work.args()]) == 2
    assert "no run there; begin it with ray-extract run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    run.prepare_run(work.job())
    assert cli.main(["retry-failed", *work.args()]) == 2
    assert "2 of 2 units are not committed; finish the run" in capsys.readouterr().err
    assert not list((tmp_path / "out/plan").glob("retry-*"))
    with pytest.raises(IdentityMismatch, match=r"capture\.final: run has true"):
        run.retry_failed(work.job("capture.final=false"))
    open_store(work.url).put("commits/u00000000.json", b"{}")
    (tmp_path / "out/plan/plan.json").unlink()
    assert cli.main(["retry-failed", *work.args()]) == 2
    assert "plan/plan.json is missing, and units are committed (1); put it back" in capsys.readouterr().err
