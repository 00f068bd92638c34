"""Manifest, token counts and _SUCCESS tell the truth whoever writes them when, after retry rounds and splits too."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from outputs import Output, check_rows, claim, commit_unit, make_output, retry, split, write_views
from watched import WatchedStore

from ray_extract import cli, layout, run
from ray_extract.dataset.prepared import RowLength
from ray_extract.errors import PlanError, ShardError
from ray_extract.ledger import Ledger, Totals, latest_manifest, read_manifest
from ray_extract.model import ModelShape
from ray_extract.plan import halve, load_plan, read_rounds, store_parts
from ray_extract.records import Split, Unit
from ray_extract.status import run_status
from ray_extract.store import LocalStore, Store
from ray_extract.verify import verify

Event = Callable[[Output], None]


def again(output: Output, store: Store) -> tuple[str, Totals]:
    """Run the job once more, on an output in which nothing is left to extract."""
    return run._to_the_end(prepared_of(output, store), run._Sofar(), rounds=False)


def prepared_of(output: Output, store: Store) -> run.Prepared:
    """As prepare_run gives it."""
    shape = ModelShape("made-up", "LlamaForCausalLM", "llama", 8, 16, "bfloat16", 4096, output.vocab, "0" * 64)
    units, rounds = load_plan(store)[1], read_rounds(store)
    return run.Prepared(output.job, shape, (1, 3), store, Ledger(store), output.index, units, rounds)


def success(output: Output) -> dict[str, object]:
    found: dict[str, object] = json.loads(output.store.get(layout.SUCCESS_KEY))
    return found


# One that is slow, and another one meanwhile


def retried(output: Output) -> None:
    retry(output, [1, 4])


def retried_in_part(output: Output) -> None:
    """A round whose second unit is not committed, by one that wrote no manifest."""
    first, _ = claim(output, [1, 4, 5])
    commit_unit(output, first)


def retried_and_split(output: Output) -> None:
    (unit,) = claim(output, [1, 4])
    for part in split(output, unit):
        commit_unit(output, part)
    write_views(output)


def operations(folder: Path) -> int:
    """How many a run takes that has nothing left to extract and no manifest yet."""
    output = make_output(folder, failed=[1, 4], finish=False)
    store = WatchedStore(output.url)
    again(output, store)
    return store.asked.total()


@pytest.mark.parametrize(
    ("meanwhile", "finish"), [(retried, False), (retried, True), (retried_in_part, True), (retried_and_split, True)]
)
def test_at_whichever_operation_a_round_comes_in_between_the_last_word_is_the_newest(
    tmp_path: Path, meanwhile: Event, finish: bool
) -> None:
    count = operations(tmp_path / "count")
    assert count > 15
    numbers = set()
    for turn in range(count):
        output = make_output(tmp_path / str(turn), failed=[1, 4], finish=finish)
        left = [turn]

        def come(name: str, key: str, output: Output = output, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                meanwhile(output)

        manifest, totals = again(output, WatchedStore(output.url, come))
        assert left[0] < 0
        if meanwhile is retried_in_part:
            # What was committed after the slow one read the commits comes with the next manifest.
            assert not verify(output.url).ok
            again(output, output.store)
            assert success(output)["failed"] == {}
        else:
            check_rows(output, [0, 1, 3, 4, 5])
            assert (manifest, totals.ok) == (latest_manifest(output.store), 5)
        assert success(output)["manifest"] == latest_manifest(output.store)
        numbers.add(latest_manifest(output.store))
    # Whether the slow one came first or the other one.
    assert len(numbers) > 1 or meanwhile is retried_in_part or finish


def test_at_whichever_operation_another_retry_comes_in_between_no_row_is_lost_and_nothing_is_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retry_slowly(output: Output, store: Store) -> run.Summary:
        def extract(prepared: run.Prepared, done: set[str], todo: list[Unit], sofar: run._Sofar) -> None:
            for unit in todo:
                if unit.unit not in Ledger(output.store).committed_units():
                    commit_unit(output, unit)

        monkeypatch.setattr(run, "_extract", extract)
        monkeypatch.setattr(run, "prepare_run", lambda job, begin: prepared_of(output, store))
        return run.retry_failed(output.job)

    output, counting = make_output(tmp_path / "count", failed=[1, 4]), WatchedStore(tmp_path / "count/out")
    retry_slowly(output, counting)
    for turn in range(counting.asked.total()):
        output = make_output(tmp_path / str(turn), failed=[1, 4])
        left = [turn]

        def come(name: str, key: str, output: Output = output, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                number = max((layout.round_of_unit(unit.unit) or 0 for unit in read_rounds(output.store)), default=0)
                retry(output, [1, 4], number + 1)

        assert retry_slowly(output, WatchedStore(output.url, come)).totals.ok == 5
        check_rows(output, [0, 1, 3, 4, 5])


# After retry rounds


def test_after_a_round_success_status_and_verify_say_what_the_new_manifest_says(tmp_path: Path) -> None:
    output = make_output(tmp_path, failed=[1, 4])
    assert success(output)["failed"] == {"incomplete": 2} and run_status(output.store).rows_failed == 2
    retry(output, [1, 4], failed=[4])
    found = success(output)
    assert (found["manifest"], found["shards"], found["ok"]) == ("manifest-000001.parquet", 4, 4)
    assert found["failed"] == {"incomplete": 1} and found["rows"] == 6
    sizes = [path.stat().st_size for path in Path(output.url, "shards").iterdir()]
    assert found["nbytes"] == sum(sizes)
    assert run_status(output.store).rows_failed == 1
    assert verify(output.url).ok


def test_status_says_that_commits_are_newer_than_the_manifest(tmp_path: Path) -> None:
    output = make_output(tmp_path, failed=[1, 4])
    assert run_status(output.store).newer == 0
    for unit in claim(output, [1, 4]):
        commit_unit(output, unit)
    status = run_status(output.store)
    assert (status.newer, status.rows_failed, status.state) == (1, 2, "complete")
    assert status.lines()[-1] == "manifest    manifest-000000.parquet (1 commit came after it, for the next one)"
    write_views(output)
    assert (run_status(output.store).newer, run_status(output.store).rows_failed) == (0, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "_SUCCESS: damaged; run the job again"),
        (b'{"manifest": 3}', "_SUCCESS: damaged; run the job again"),
        (
            b'{"manifest": "manifest-000000.parquet", "failed": {"incomplete": 2}}',
            "_SUCCESS: failed is {'incomplete': 2}, expected {'incomplete': 1}; run the job again",
        ),
    ],
)
def test_a_success_that_is_not_right_is_found_and_mended_by_the_next_run(
    tmp_path: Path, text: bytes, says: str
) -> None:
    output = make_output(tmp_path, failed=[4])
    output.store.put(layout.SUCCESS_KEY, text, create=False)
    report = verify(output.url)
    assert report.problems == [says] and "to mend   run the job again" in "\n".join(report.lines())
    again(output, output.store)
    assert verify(output.url).ok


def test_a_success_of_an_earlier_release_is_right_without_the_number_of_shards(tmp_path: Path) -> None:
    output = make_output(tmp_path, failed=[4])
    found = success(output)
    del found["shards"]
    output.store.put(layout.SUCCESS_KEY, json.dumps(found).encode(), create=False)
    assert verify(output.url).ok
    status = run_status(output.store)
    assert (status.state, status.rows_failed, status.newer) == ("complete", 1, 0)


# What is said at two in the morning


@pytest.mark.parametrize("lost", ["shard", "bytes", "commit"])
@pytest.mark.parametrize("again_", [False, True], ids=["plan", "round"])
def test_what_is_damaged_is_named_with_the_command_that_extracts_it_again(
    tmp_path: Path, lost: str, again_: bool
) -> None:
    output = make_output(tmp_path, failed=[1, 4])
    (unit,) = retry(output, [1, 4])
    name = unit.unit if again_ else "u00000001"
    shard = next(Path(output.url, "shards").glob(f"{name}.*"))
    if lost == "shard":
        shard.unlink()
    elif lost == "bytes":
        shard.write_bytes(b"x")
    else:
        Path(output.url, layout.commit_key(name)).write_bytes(b"{")
    with pytest.raises(ShardError) as caught:
        again(output, LocalStore(output.url))
    command = "run ray-extract retry-failed again" if again_ else "run the job again"
    assert re.search(rf"to extract its rows again, delete commits/{name}\.json and {command}$", str(caught.value))


@pytest.mark.parametrize("way", ["before", "after"])
def test_shards_that_are_gone_are_named_together_and_before_anything_is_extracted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """In a run that goes on, by one listing; where nothing is left to extract, before the manifest."""
    left = ["u00000049"] if way == "before" else []
    output = make_output(tmp_path, lengths=[3] * 50, rows_per_unit=1, leave_out=left)
    shards = Path(output.url, "shards")
    extracted: list[str] = []

    def extract(_: run.Prepared, done: set[str], todo: list[Unit], sofar: run._Sofar) -> None:
        extracted.extend(unit.unit for unit in todo)
        for unit in todo:
            commit_unit(output, unit)

    monkeypatch.setattr(run, "_extract", extract)
    for number in range(25):
        next(shards.glob(f"u{number:08d}.*")).unlink()
    named: list[str] = []
    for count in (25, 5):
        store = WatchedStore(output.url)
        with pytest.raises(ShardError) as caught:
            again(output, store)
        first, *lines = str(caught.value).splitlines()
        assert f": {count} committed shards are missing or damaged; to extract their rows again, delete their" in first
        assert [line[:13] for line in lines[20:]] == ["  and 5 more,"][: count > 20]
        assert way == "after" or (store.asked["list shards"], store.asked["get commits"]) == (1, 0)
        keys = [line.partition(": delete ")[2] for line in lines[:20]]
        for key in keys:
            output.store.delete(key)
        named += keys
    assert named == [layout.commit_key(f"u{number:08d}") for number in range(25)] and not extracted
    assert again(output, output.store)[1].ok == 50
    assert extracted == [f"u{number:08d}" for number in range(25)] + left


def test_a_plan_that_is_gone_from_under_its_commits_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = make_output(tmp_path)
    output.store.delete(layout.PLAN_KEY)
    for command in ("status", "verify"):
        assert cli.main([command, output.url]) == 2
        told = "plan/plan.json is missing, and units are committed (3); put it back, or run the job again, which plans"
        assert told in capsys.readouterr().err


def test_a_manifest_that_is_damaged_or_gone_is_made_again_by_the_next_run(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    path = Path(output.url, "manifest-000000.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    output.store.delete(layout.SUCCESS_KEY)
    for read in (run_status, read_manifest):
        with pytest.raises(
            ShardError,
            match=r"manifest-000000\.parquet: damaged: .*; run the job again, which writes the next manifest$",
        ):
            read(output.store)
    assert again(output, output.store)[0] == "manifest-000001.parquet"
    assert run_status(output.store).state == "complete"
    for number in (0, 1):
        output.store.delete(layout.manifest_key(number))
    assert "complete, and commits or manifests are gone; run it again" in run_status(output.store).lines()[0]
    assert again(output, output.store)[0] == "manifest-000000.parquet" and verify(output.url).ok


def test_a_commit_of_a_round_that_is_gone_is_named_with_what_may_be_done(tmp_path: Path) -> None:
    output = make_output(tmp_path, failed=[1])
    retry(output, [1])
    output.store.delete(layout.round_key(1))
    with pytest.raises(
        ShardError, match=r"commits/r0001-00000000\.json: no plan/retry-\*\.json has such a unit; if its"
    ):
        again(output, output.store)
    assert read_manifest(output.store).num_rows == 6


# What another driver wrote at the last moment


def at_last(output: Output, key: str, act: Callable[[], object]) -> WatchedStore:
    """The output, to a driver before whose first put of `key` another one acts."""
    todo = [act]

    def before(name: str, asked: str) -> None:
        if name == "put" and asked == key and todo:
            todo.pop()()

    return WatchedStore(output.url, before)


@pytest.mark.parametrize("other", ["split", "receipt"])
def test_a_split_never_replaces_what_another_driver_committed(tmp_path: Path, other: str) -> None:
    output = make_output(tmp_path, leave_out=["u00000001"])
    unit, key = output.units[1], layout.commit_key("u00000001")
    parts = ("u00000001.0", "u00000001.1")
    theirs, ours = Split(unit.unit, parts, "theirs"), Split(unit.unit, parts, "ours")

    def act() -> None:
        if other == "split":
            assert Ledger(output.store).commit_split(theirs)
        else:
            commit_unit(output, unit)

    store = at_last(output, key, act)
    # Of two splits either is as good, since both have the same parts; a receipt makes ours void.
    assert Ledger(store).commit_split(ours) == (other == "split")
    assert b"ours" not in output.store.get(key) and Ledger(store).is_split(unit.unit) == (other == "split")
    assert store.asked["put commits"] == 1


def test_the_parts_of_a_split_never_replace_those_of_another_driver(tmp_path: Path) -> None:
    output = make_output(tmp_path, rows_per_unit=3, leave_out=["u00000000"])
    unit, key = output.units[0], layout.split_key("u00000000")
    lengths = [RowLength(row, n, n, True) for row, n in ((0, 5), (1, 12), (3, 1))]
    theirs = halve(unit, lengths)
    ours = (dataclasses.replace(theirs[0], end=1), theirs[1])
    store = at_last(output, key, lambda: store_parts(output.store, unit, theirs))
    with pytest.raises(PlanError, match="there is of another release"):
        store_parts(store, unit, ours)
    assert json.loads(output.store.get(key))["units"][0]["end"] == theirs[0].end


def test_a_retry_round_never_replaces_that_of_another_driver(tmp_path: Path) -> None:
    output = make_output(tmp_path, failed=[1, 4, 5])
    theirs: list[list[Unit]] = []
    store = at_last(output, layout.round_key(1), lambda: theirs.append(claim(output, [1, 5])))
    ours = claim(dataclasses.replace(output, store=store), [4])
    assert [ours] == theirs and [unit.members for unit in ours] == [(1, 5)]
    assert read_rounds(output.store) == ours
