"""Units that kill their workers: they are split until the row at fault is found, and the rest is stored."""

import dataclasses
from pathlib import Path
from typing import Any

import clusters  # noqa: F401 - before ray
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs import check_rows, claim, commit_unit, make_output, split, write_views
from simulated import Work, check_output, make_rows, make_work
from test_ledger import make_receipt

from ray_extract import cli, driver, layout, run
from ray_extract.dataset.prepared import Lengths, RowLength
from ray_extract.errors import PlanError
from ray_extract.ledger import Ledger, orphans
from ray_extract.model import ModelShape
from ray_extract.plan import halve, load_plan, plan_retry, plan_units, store_parts
from ray_extract.records import Split, Unit
from ray_extract.verify import verify

LIMITS = {"token_bytes": 8, "shard_bytes": 1000, "max_rows": 50}


@given(kept=st.lists(st.integers(0, 9), min_size=2, max_size=40), data=st.data())
def test_halves_hold_the_rows_of_the_whole_down_to_single_ones(kept: list[int], data: st.DataObject) -> None:
    rows = [RowLength(row, n + 1, n, data.draw(st.booleans())) for row, n in enumerate(kept)]
    usable = [row for row in rows if row.usable]
    lengths = [Lengths.of(rows)]
    units = [*plan_units(lengths, **LIMITS), *plan_retry(lengths, {row.row for row in usable}, 1, **LIMITS)]
    for unit in units:
        todo, singles = [(unit, usable)], []
        while todo:
            whole, members = todo.pop()
            if whole.rows == 1:
                singles.append(members[0])
                continue
            parts = halve(whole, members)
            middle = next(i for i, row in enumerate(members) if row.row >= parts[1].first)
            for part, of in zip(parts, (members[:middle], members[middle:]), strict=True):
                assert (part.first, part.end, part.rows) == (of[0].row, of[-1].row + 1, len(of))
                assert part.tokens == sum(row.tokens for row in of)
                assert part.kept == sum(row.kept for row in of) and part.nbytes == 8 * part.kept
                assert part.members == (None if unit.members is None else tuple(row.row for row in of))
                assert layout.ancestors(part.unit)[-1] == whole.unit
                assert layout.unit_of_split(layout.split_key(part.unit)) == part.unit
                todo.append((part, of))
            assert abs(parts[0].rows - parts[1].rows) <= 1
            assert whole.unit < parts[0].unit < parts[1].unit < layout.unit_id(1)
        assert sorted(singles) == usable


def test_a_unit_is_committed_whole_or_as_split_and_never_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = make_output(tmp_path, leave_out=["u00000000", "u00000001"])
    ledger, (one, other, _) = Ledger(output.store), output.units
    split(output, one)
    assert not ledger.commit(make_receipt(one, "a"))
    assert "its split was committed before a" in caplog.text
    assert ledger.receipt(one.unit) is None and ledger.is_split(one.unit)
    # Another driver's reason may differ; the parts do not.
    assert ledger.commit_split(Split(one.unit, ("u00000000.0", "u00000000.1"), "something else"))
    assert ledger.commit(make_receipt(other, "a"))
    assert not ledger.commit_split(Split(other.unit, ("u00000001.0", "u00000001.1"), ""))
    assert [receipt.unit for receipt in ledger.receipts()] == ["u00000001", "u00000002"]


def test_parts_count_once_the_commit_says_so(tmp_path: Path) -> None:
    output = make_output(tmp_path, leave_out=["u00000001"])
    unit = output.units[1]
    parts = halve(unit, [RowLength(3, 1, 1, True), RowLength(4, 30, 30, True)])
    store_parts(output.store, unit, parts)
    assert load_plan(output.store)[1] == output.units
    split(output, unit)
    assert load_plan(output.store)[1] == [output.units[0], *parts, output.units[2]]
    with pytest.raises(PlanError, match=r"plan/split-u00000001\.json there is of another release"):
        store_parts(output.store, unit, [dataclasses.replace(parts[0], end=9), parts[1]])
    output.store.put(layout.split_key(unit.unit), b"{", create=False)
    with pytest.raises(PlanError, match=r"delete it and commits/u00000001\.\*"):
        load_plan(output.store)


@pytest.mark.parametrize("format", ["raw", "parquet"])
def test_readers_verify_and_sweep_take_a_split_unit_for_its_parts(tmp_path: Path, format: str) -> None:
    output = make_output(tmp_path, format=format, leave_out=["u00000000"], rows_per_unit=3, failed=[4, 5])
    whole = output.units[0]  # rows 0, 1 and 3
    late = layout.shard_key(whole.unit, "late", format)
    output.store.put(late, b"x")
    assert orphans(output.store) == []
    first, second = split(output, whole)
    (problem,) = verify(output.url).problems
    assert problem.startswith("2 units without a commit, such as u00000000.0: the run is not finished")
    for unit in (*split(output, first), second):
        commit_unit(output, unit, failed=[1])
    write_views(output)
    check_rows(output, [0, 3])
    assert [item.key for item in orphans(output.store)] == [late]
    (again,) = claim(output, [1, 4, 5])
    first, second = split(output, again)
    assert (first.members, second.members) == ((1, 4), (5,))
    commit_unit(output, first)
    commit_unit(output, second, failed=[5])
    write_views(output)
    check_rows(output, [0, 1, 3, 4])
    assert [item.key for item in orphans(output.store)] == [late]
    output.store.delete(layout.commit_key(second.unit))
    assert any(second.unit in problem for problem in verify(output.url).problems)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_run_goes_on_with_the_parts_of_a_unit_that_another_driver_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    output = make_output(tmp_path, leave_out=["u00000000", "u00000001", "u00000002"])
    shape = ModelShape("made-up", "LlamaForCausalLM", "llama", 8, 16, "bfloat16", 4096, output.vocab, "0" * 64)
    store = output.store
    prepared = run.Prepared(output.job, shape, (1, 3), store, Ledger(store), output.index, output.units, [])
    leased: list[list[str]] = []

    def extract(_: run.Prepared, done: set[str], todo: list[Unit], sofar: Any) -> None:
        leased.append([unit.unit for unit in todo])
        for unit in todo:
            if unit.unit == "u00000001":
                split(output, unit)
            else:
                commit_unit(output, unit)

    monkeypatch.setattr(run, "_extract", extract)
    if when == "before":
        split(output, output.units[1])
    summary = run._complete(prepared, 0.0, rounds=False)
    assert summary.totals is not None and summary.totals.ok == 5
    assert (summary.units, summary.units_done) == (4, 4)
    parts = ["u00000001.0", "u00000001.1"]
    expected = [["u00000000", "u00000001", "u00000002"], parts]
    assert leased == (expected if when == "meanwhile" else [["u00000000", *parts, "u00000002"]])
    check_rows(output, [0, 1, 3, 4, 5])


# Runs

FATAL = 4
WORKER_DIED = "engine_died: its worker died each time, at last with no other row in flight"


@pytest.fixture
def work(tmp_path: Path, ray_cluster: Any) -> Work:
    """A job whose row 1 kills its workers; its two units of two rows are in flight at once."""
    rows = make_rows(4)
    rows[1][5] = FATAL
    engine = {"cpus": 0.25, "args": {"fatal_token": FATAL}}
    run_ = {"max_attempts": 1, "progress_s": 0.2}
    return make_work(tmp_path, rows, str(ray_cluster.address), engine=engine, run=run_)


@pytest.mark.ray
def test_a_row_that_kills_its_workers_is_found_and_the_others_are_stored(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(work.args()) == 1
    assert "failed    1   (1 x engine_died)" in capsys.readouterr().out
    receipts = check_output(work, {1: WORKER_DIED})
    assert [receipt.unit for receipt in receipts] == ["u00000000.0", "u00000000.1", "u00000001"]
    assert cli.main(["status", work.url]) == 0
    out = capsys.readouterr().out
    assert "state       complete (" in out and "3 of 3 committed" in out
    assert cli.main(["retry-failed", *work.args("engine.args.fatal_token=-1")]) == 0
    check_output(work)


@pytest.mark.ray
def test_a_run_that_was_killed_after_a_split_goes_on_with_the_parts(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(driver.Driver, "_settle_split", killed)
        run.run(work.job())
    assert "u00000000.0" in {unit.unit for unit in run.prepare_run(work.job()).units}
    assert run.run(work.job("engine.args.fatal_token=-1")).totals.ok == 4
    assert {receipt.unit for receipt in check_output(work)} == {"u00000000.0", "u00000000.1", "u00000001"}


@pytest.mark.ray
def test_workers_that_die_whatever_they_do_stop_the_run(
    work: Work, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "_WORKER_DEATHS_WITHOUT_A_ROW", 2)
    assert run.main(work.args(f"engine.args.fatal_token={work.rows[2][0]}")) == 3
    assert "2 workers died, and no row was extracted meanwhile: its actor died" in capsys.readouterr().err
