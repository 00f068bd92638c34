"""Every row committed once: identity, commits, manifests, totals."""

import concurrent.futures
import dataclasses
import io
import logging
import threading
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract import layout
from ray_extract.config import Job
from ray_extract.dataset.prepare import PreparedRow
from ray_extract.dataset.prepared import rows_table
from ray_extract.errors import IdentityMismatch, ShardError, StoreError
from ray_extract.ledger import (
    MANIFEST_SCHEMA,
    Ledger,
    Retry,
    RunIdentity,
    Totals,
    count,
    diff,
    last_manifest,
    latest_manifest,
    manifest_parts,
    orphans,
    read_manifest,
    read_success,
    run_identity,
    stored_columns,
    write_manifest,
    write_success,
)
from ray_extract.model import ModelShape
from ray_extract.records import Receipt, RowFailure, RowStatus, Unit
from ray_extract.shards.image import states_extent
from ray_extract.store import LocalStore, Store, open_store

SHAPE = ModelShape("/m", "LlamaForCausalLM", "llama", 12, 64, "bfloat16", 4096, 1000, "f00d")
SOURCES = [{"size": 10, "sha256": "aa"}, {"size": 20, "sha256": "bb"}]
ENVIRONMENT = {"sglang": "0.5.20"}


def memory() -> Store:
    """An empty store."""
    return open_store(f"memory://{uuid.uuid4().hex}/out")


def job(**changes: Any) -> Job:
    """A small job; `capture__final=False` changes one field."""
    tree: dict[str, Any] = {
        "model": {"path": "/m"},
        "dataset": {"paths": ["/d/a.jsonl", "/d/b.jsonl"]},
        "output": {"url": "/o"},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        tree.setdefault(section, {})[field] = value
    return Job.model_validate(tree)


def identity(boundaries: Sequence[int] = (2, 6, 9), sources: Any = SOURCES, **changes: Any) -> RunIdentity:
    """The identity of that job."""
    return run_identity(job(**changes), SHAPE, boundaries, sources, "template")


COLUMNS = stored_columns(identity())
STATES = len(COLUMNS)


def make_receipt(unit: Unit, attempt: str, failures: Sequence[RowFailure] = ()) -> Receipt:
    """What an attempt at a unit hands back; its digests tell row and unit."""
    digests = np.arange(unit.rows * (1 + STATES), dtype="<u8") + 1000 * unit.first
    return Receipt(
        unit=unit.unit,
        attempt=attempt,
        key=layout.shard_key(unit.unit, attempt, "raw"),
        format="raw",
        size=4096 + states_extent(COLUMNS, unit.kept)[1],
        sha256="00",
        rows=unit.rows,
        tokens=unit.tokens,
        kept=unit.kept,
        failures=tuple(failures),
        digests=digests.tobytes(),
        environment={},
        seconds={},
    )


def make_rows(lengths: Sequence[int]) -> list[PreparedRow]:
    """Rows of these lengths; 0 means skipped."""
    return [
        PreparedRow(
            i,
            f"id{i}",
            f"a.jsonl:{i}",
            np.zeros(n, np.int32),
            np.ones(n, np.uint8),
            None if n else "overlong: 9 > 8 tokens",
        )
        for i, n in enumerate(lengths)
    ]


def make_units(rows: Sequence[PreparedRow], size: int) -> list[Unit]:
    """A plan with `size` usable rows a unit."""
    usable = [row for row in rows if row.reason is None]
    units = []
    for number, at in enumerate(range(0, len(usable), size)):
        group = usable[at : at + size]
        kept = sum(len(row.input_ids) for row in group)
        units.append(
            Unit(layout.unit_id(number), group[0].index, group[-1].index + 1, len(group), kept, kept, 8 * kept)
        )
    return units


ROWS = make_rows([3, 0, 5, 2, 0, 0, 7, 1, 0])
UNITS = make_units(ROWS, 2)


# Identity


def test_what_only_moves_work_is_no_part_of_the_identity() -> None:
    moved = identity(
        model__path="/elsewhere",
        dataset__paths=["s3://bucket/copy.jsonl", "/d/b.jsonl"],
        dataset__processes=8,
        output__url="/other",
        engine__count=8,
        engine__tp_size=4,
        engine__chunked_prefill_size=512,
        engine__args={"mem_fraction_static": 0.5},
        run__max_attempts=9,
        capture__check="off",
    )
    assert diff(identity(), moved) == []
    assert moved == identity()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (identity(boundaries=(1, 6, 9)), "capture.boundaries: run has [2, 6, 9], this job asks [1, 6, 9]"),
        (identity(capture__final=False), "capture.final: run has true, this job asks false"),
        (identity(capture__keep="supervised"), 'capture.keep: run has "all", this job asks "supervised"'),
        (identity(dataset__mask="all"), 'dataset.mask: run has "assistant", this job asks "all"'),
        (identity(dataset__shuffle=True), "dataset.shuffle: run has false, this job asks true"),
        (identity(dataset__seed=1), "dataset.seed: run has 0, this job asks 1"),
        (identity(dataset__damaged="keep"), 'dataset.damaged: run has "refuse", this job asks "keep"'),
        (identity(dataset__limit=5), "dataset.limit: run has null, this job asks 5"),
        (identity(dataset__fields={"text": "body"}), 'dataset.fields.text: run has "text", this job asks "body"'),
        (identity(engine__context_length=99), "dataset.context_length: run has 4096, this job asks 99"),
        (identity(engine__kind="simulated"), 'model.engine: run has "sglang", this job asks "simulated"'),
        (identity(model__load_format="dummy"), 'model.weights: run has "checkpoint", this job asks "random"'),
        (identity(model__quantization="fp8"), 'model.quantization: run has null, this job asks "fp8"'),
        (
            identity(engine__args={"kv_cache_dtype": "fp8_e5m2"}),
            'model.args.kv_cache_dtype: run has nothing, this job asks "fp8_e5m2"',
        ),
        (
            # SGLang has more ways to quantize than model.quantization.
            identity(engine__args={"torchao_config": "int4wo-128"}),
            'model.args.torchao_config: run has nothing, this job asks "int4wo-128"',
        ),
        (identity(output__max_rows=7), "plan.max_rows: run has 8192, this job asks 7"),
        (identity(output__format="raw"), 'format.shards: run has "parquet", this job asks "raw"'),
        (
            identity(sources=[SOURCES[0], {"size": 20, "sha256": "cc"}]),
            'dataset.sources[1].sha256: the file has other content; run has "bb", this job asks "cc"',
        ),
    ],
)
def test_a_difference_is_one_line_that_says_both_sides(changed: RunIdentity, line: str) -> None:
    assert diff(identity(), changed) == [line]


def test_a_missing_source_is_a_difference() -> None:
    assert diff(identity(), identity(sources=SOURCES[:1])) == [
        "dataset.sources[1].size: run has 20, this job asks nothing",
        'dataset.sources[1].sha256: run has "bb", this job asks nothing',
    ]


def test_a_claimed_output_takes_the_same_job_again_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    store = memory()
    assert Ledger(store).identity() is None
    Ledger(store).claim(identity(), ENVIRONMENT)
    with caplog.at_level(logging.WARNING):
        Ledger(store).claim(identity(), ENVIRONMENT)
    assert not caplog.records
    with pytest.raises(IdentityMismatch) as caught:
        Ledger(store).claim(identity(boundaries=[1, 6, 9]), ENVIRONMENT)
    assert "capture.boundaries: run has [2, 6, 9], this job asks [1, 6, 9]" in str(caught.value)
    assert "another output.url" in str(caught.value)
    assert Ledger(store).identity() == identity()


def test_another_environment_is_only_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    store = memory()
    Ledger(store).claim(identity(), ENVIRONMENT)
    with caplog.at_level(logging.WARNING):
        Ledger(store).claim(identity(), {"sglang": "0.5.21"})
    assert [record.getMessage() for record in caplog.records] == [
        "this run began with sglang 0.5.20, and goes on with 0.5.21"
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"version": 2}', r"out/run\.json: version 2; this release reads 1\. Choose another output\.url"),
        *(
            (
                content,
                r"out/run\.json, which says whose output this is, is damaged: put it back .* or, .* delete it and run",
            )
            for content in (b"", b"{}", b'{"version": 1, "ide', b"[]", b'{"version": 1, "identity": {}}')
        ),
    ],
)
def test_a_run_that_is_damaged_or_of_another_release_is_refused_with_the_way_out(content: bytes, told: str) -> None:
    store = memory()
    store.put(layout.RUN_KEY, content)
    for ask in (lambda: Ledger(store).claim(identity(), ENVIRONMENT), Ledger(store).identity):
        with pytest.raises(IdentityMismatch, match=told):
            ask()


# Commits


def test_a_unit_is_committed_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(memory())
    assert ledger.receipt(UNITS[0].unit) is None
    assert ledger.commit(make_receipt(UNITS[0], "a"))
    with caplog.at_level(logging.WARNING):
        assert not ledger.commit(make_receipt(UNITS[0], "b"))
    assert "attempt a was committed before b" in caplog.text
    assert ledger.receipt(UNITS[0].unit) == make_receipt(UNITS[0], "a")
    assert ledger.committed_units() == {UNITS[0].unit}


def test_eight_drivers_commit_a_unit_and_one_wins(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def race(attempt: str) -> bool:
        barrier.wait()
        return Ledger(LocalStore(tmp_path)).commit(make_receipt(UNITS[0], attempt))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        won = dict(zip("abcdefgh", pool.map(race, "abcdefgh"), strict=True))
    winner = Ledger(LocalStore(tmp_path)).receipt(UNITS[0].unit)
    assert [attempt for attempt, did in won.items() if did] == [winner.attempt if winner else None]


def test_a_commit_whose_answer_was_lost_counts_when_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(memory())
    put = ledger.store.put

    def lossy(*args: Any, **kwargs: Any) -> None:
        put(*args, **kwargs)
        raise StoreError("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.store, "put", lossy)
        with pytest.raises(StoreError, match="lost"):
            ledger.commit(make_receipt(UNITS[0], "a"))
    assert ledger.commit(make_receipt(UNITS[0], "a"))
    # The worker may have measured its seconds again; the attempt is what counts.
    assert ledger.commit(dataclasses.replace(make_receipt(UNITS[0], "a"), seconds={"flush": 2.0}))


def test_receipts_come_in_the_order_of_units() -> None:
    ledger = Ledger(memory())
    numbers = [*range(99, -1, -3), *range(1, 100, 3)]
    for number in numbers:
        ledger.commit(make_receipt(dataclasses.replace(UNITS[0], unit=layout.unit_id(number)), "a"))
    assert [receipt.unit for receipt in ledger.receipts()] == [layout.unit_id(n) for n in sorted(numbers)]


def test_a_damaged_commit_is_named() -> None:
    store = memory()
    store.put(layout.commit_key("u00000000"), b'{"version": 9}')
    with pytest.raises(ShardError, match=r"commits/u00000000\.json"):
        list(Ledger(store).receipts())


def test_orphans_are_shards_that_lost_and_nothing_else() -> None:
    store = memory()
    ledger = Ledger(store)
    split = dataclasses.replace(UNITS[1], unit=f"{UNITS[1].unit}.0")
    for unit, attempts in ((UNITS[0], "abc"), (split, "ab"), (UNITS[2], "ab")):
        for attempt in attempts:
            store.put(make_receipt(unit, attempt).key, b"shard")
    ledger.commit(make_receipt(UNITS[0], "b"))
    ledger.commit(make_receipt(split, "a"))
    assert sorted(item.key for item in orphans(store)) == sorted(
        [make_receipt(UNITS[0], "a").key, make_receipt(UNITS[0], "c").key, make_receipt(split, "b").key]
    )


# Manifests


def claimed() -> Ledger:
    """The ledger of a run that has begun."""
    ledger = Ledger(memory())
    ledger.claim(identity(), {})
    return ledger


def put_manifest(ledger: Ledger, *args: Any, **more: Any) -> tuple[str, Totals]:
    """Write the next manifest, with nobody in the way."""
    written = try_manifest(ledger, *args, **more)
    assert written is not None
    return written


def try_manifest(
    ledger: Ledger,
    rows: Sequence[PreparedRow],
    units: Sequence[Unit],
    receipts: Iterable[Receipt] | None = None,
    retries: Sequence[Retry] = (),
    part_rows: int = 3,
) -> tuple[str, Totals] | None:
    """Write the next manifest, of all commits if no others are given."""
    after, store = last_manifest(ledger.store), ledger.store
    parts = [rows_table(list(rows[at : at + part_rows]), "all") for at in range(0, len(rows), part_rows)]
    joined = manifest_parts(
        parts, units, ledger.receipts() if receipts is None else receipts, retries, keep="all", columns=COLUMNS
    )
    return write_manifest(store, ledger.claimed(), after, (batch for _, batch in joined))


def commit_all(ledger: Ledger, attempt: str = "a", failures: Sequence[RowFailure] = ()) -> None:
    """Commit every unit; each gets the failures among its rows."""
    for unit in UNITS:
        ledger.commit(make_receipt(unit, attempt, [f for f in failures if unit.first <= f.row < unit.end]))


def test_a_manifest_has_every_row_in_order_and_says_where_it_is() -> None:
    ledger = claimed()
    commit_all(ledger, failures=[RowFailure(3, RowStatus.NONFINITE, "7 values")])
    key, totals = put_manifest(ledger, ROWS, UNITS)
    assert key == "manifest-000000.parquet"
    table = read_manifest(ledger.store)
    assert table.schema.equals(MANIFEST_SCHEMA)
    rows = table.to_pylist()
    assert [row["row"] for row in rows] == list(range(9))
    assert [row["status"] for row in rows] == [
        "ok", "skipped", "ok", "failed", "skipped", "skipped", "ok", "ok", "skipped",
    ]  # fmt: skip
    assert rows[3] == {
        "row": 3,
        "row_id": "id3",
        "source": "a.jsonl:3",
        "n_tokens": 2,
        "kept": 2,
        "status": "failed",
        "reason": "nonfinite: 7 values",
        "unit": UNITS[1].unit,
        "shard": f"shards/{UNITS[1].unit}.a.safetensors",
        "format": "raw",
        "row_in_shard": 0,
        "token_offset": 0,
        "states_offset": 4096,
        "states_stride": 4096,
        "digests": [3000, 3001, 3002, 3003, 3004],
    }
    # A failed row keeps its place, so the next one starts behind it, over two skipped ones.
    assert (rows[6]["row_in_shard"], rows[6]["token_offset"], rows[6]["digests"][0]) == (1, 2, 3005)
    assert rows[8] == {
        **dict.fromkeys(MANIFEST_SCHEMA.names),
        "row": 8,
        "row_id": "id8",
        "source": "a.jsonl:8",
        "n_tokens": 0,
        "kept": 0,
        "status": "skipped",
        "reason": "overlong: 9 > 8 tokens",
    }
    assert totals == Totals(rows=9, ok=4, skipped={"overlong": 4}, failed={"nonfinite": 1}, tokens=16, kept=16)
    assert count(table) == totals


def test_manifests_are_numbered_and_never_overwritten() -> None:
    ledger = claimed()
    assert latest_manifest(ledger.store) is None
    with pytest.raises(ShardError, match="no manifest"):
        read_manifest(ledger.store)
    commit_all(ledger)
    first, _ = put_manifest(ledger, ROWS, UNITS)
    before = ledger.store.get(first)
    renamed = [dataclasses.replace(row, source="renamed") for row in ROWS]
    second, _ = put_manifest(ledger, renamed, UNITS)
    assert (first, second) == ("manifest-000000.parquet", "manifest-000001.parquet")
    assert ledger.store.get(first) == before
    assert latest_manifest(ledger.store) == second
    assert set(read_manifest(ledger.store).column("source").to_pylist()) == {"renamed"}


def test_a_manifest_of_an_older_release_is_refused_and_followed_by_one_of_this() -> None:
    ledger = claimed()
    commit_all(ledger)
    key, _ = put_manifest(ledger, ROWS, UNITS)
    now = read_manifest(ledger.store)
    before = now.drop_columns(["states_offset", "states_stride"])
    sink = io.BytesIO()
    pq.write_table(before.replace_schema_metadata({**now.schema.metadata, b"version": b"1"}), sink)
    ledger.store.put(key, sink.getvalue(), create=False)
    with pytest.raises(ShardError, match=r"version '1'; this release reads .* '2'; .*run the job again with this one"):
        read_manifest(ledger.store)
    assert put_manifest(ledger, ROWS, UNITS)[0] == "manifest-000001.parquet"
    assert read_manifest(ledger.store).equals(now)


def test_the_same_manifest_again_is_the_same_object() -> None:
    ledger = claimed()
    commit_all(ledger)
    keys = {put_manifest(ledger, ROWS, UNITS)[0] for _ in range(2)}
    assert keys == {"manifest-000000.parquet"}


@pytest.mark.parametrize("theirs", ["another", "the same"])
def test_a_number_that_another_driver_took_meanwhile_is_theirs(monkeypatch: pytest.MonkeyPatch, theirs: str) -> None:
    ledger = claimed()
    commit_all(ledger)
    put_manifest(ledger, ROWS, UNITS)
    same = ledger.store.get(layout.manifest_key(0))
    data = same if theirs == "the same" else b"another driver's"
    ledger.store.delete(layout.manifest_key(0))
    put_stream = ledger.store.put_stream

    def late(key: str, chunks: Any, **kwargs: Any) -> int:
        ledger.store.put(key, data)
        return put_stream(key, chunks, **kwargs)

    monkeypatch.setattr(ledger.store, "put_stream", late)
    written = try_manifest(ledger, ROWS, UNITS)
    assert (written and written[0]) == (layout.manifest_key(0) if theirs == "the same" else None)
    assert ledger.store.get(layout.manifest_key(0)) == data
    assert last_manifest(ledger.store) == 0


@pytest.mark.parametrize(
    ("rows", "units", "says"),
    [
        (ROWS[:-3], UNITS, "row 6 is missing"),
        (ROWS[1:], UNITS, "row 1 came where row 0 was due"),
        ([*ROWS[:2], *ROWS[3:]], UNITS, "row 3 came where row 2 was due"),
        (ROWS[:7], UNITS[:-1], "the plan has no such unit"),
        (ROWS, UNITS[1:], "usable, but in no unit"),
        (ROWS, [UNITS[0], UNITS[2]], "usable, but in no unit"),
        (ROWS, [dataclasses.replace(UNITS[0], rows=3), *UNITS[1:]], "plan has 3 rows"),
        (ROWS, [dataclasses.replace(UNITS[0], kept=9), *UNITS[1:]], "9 planned"),
        (ROWS[:6], [dataclasses.replace(UNITS[0], end=4), *UNITS[2:]], "more usable rows than the 2 planned"),
        (ROWS, [dataclasses.replace(UNITS[0], end=4), *UNITS[1:]], "begins at row 3, within the unit before"),
    ],
)
def test_rows_plan_and_commits_that_do_not_fit_make_no_manifest(
    rows: list[PreparedRow], units: list[Unit], says: str
) -> None:
    ledger = claimed()
    commit_all(ledger)
    with pytest.raises(ShardError, match=says):
        put_manifest(ledger, rows, units)
    assert latest_manifest(ledger.store) is None


@pytest.mark.parametrize("wrong", [-8, 8, -4096])
def test_a_commit_whose_shard_cannot_hold_its_tokens_makes_no_manifest(wrong: int) -> None:
    ledger = claimed()
    for unit in UNITS:
        receipt = make_receipt(unit, "a")
        ledger.commit(dataclasses.replace(receipt, size=receipt.size + wrong * (unit is UNITS[1])))
    with pytest.raises(ShardError, match=f"commit of unit {UNITS[1].unit}: a raw shard of .* cannot have .* bytes; "):
        put_manifest(ledger, ROWS, UNITS)
    assert latest_manifest(ledger.store) is None


def test_an_uncommitted_unit_makes_no_manifest() -> None:
    ledger = claimed()
    for unit in (UNITS[0], UNITS[2]):
        ledger.commit(make_receipt(unit, "a"))
    with pytest.raises(ShardError, match=f"unit {UNITS[1].unit} .* has no commit"):
        put_manifest(ledger, ROWS, UNITS)
    assert latest_manifest(ledger.store) is None


def test_a_commit_that_reports_a_strange_row_makes_no_manifest() -> None:
    ledger = claimed()
    ledger.commit(make_receipt(UNITS[0], "a", [RowFailure(6, RowStatus.FAULT, "x")]))
    with pytest.raises(ShardError, match=r"does not hold: \[6\]"):
        put_manifest(ledger, ROWS[:3], UNITS[:1])


def test_a_data_set_without_usable_rows_has_a_manifest_too() -> None:
    store = claimed().store
    _, totals = put_manifest(Ledger(store), make_rows([0, 0]), [])
    assert totals == Totals(rows=2, skipped={"overlong": 2})
    assert read_manifest(store).num_rows == 2


def test_rows_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(ShardError, match=r"5 rows, but 2 ok \+ 1 skipped \+ 1 failed"):
        Totals(rows=5, ok=2, skipped={"overlong": 1}, failed={"fault": 1}).check()


def test_success_is_that_of_the_latest_manifest() -> None:
    store = claimed().store
    assert read_success(store) == {}
    write_success(store, layout.manifest_key(0), 3, Totals(rows=9, ok=8, failed={"fault": 1}))
    write_success(store, layout.manifest_key(1), 4, Totals(rows=9, ok=9))
    found = read_success(store)
    assert (found["manifest"], found["shards"], found["ok"], found["failed"]) == (layout.manifest_key(1), 4, 9, {})


# Any interleaving


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[str, int, bool]]]:
    """Row lengths (0 is skipped), rows a unit, and what two drivers do: (driver, unit, is the answer lost?)."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    size = draw(st.integers(1, 4))
    num_units = len(make_units(make_rows(lengths), size))
    acts = [(driver, unit) for driver in "ab" for unit in range(num_units)]
    repeats = draw(st.lists(st.sampled_from(acts), max_size=6)) if acts else []
    order = draw(st.permutations([*acts, *repeats]))
    return lengths, size, [(driver, unit, draw(st.booleans())) for driver, unit in order]


@settings(max_examples=150, deadline=None)
@given(history=histories())
def test_two_drivers_in_any_order_commit_each_unit_once_and_list_each_row_once(
    history: tuple[list[int], int, list[tuple[str, int, bool]]],
) -> None:
    lengths, size, acts = history
    rows = make_rows(lengths)
    units = make_units(rows, size)
    store = claimed().store
    winners: dict[str, str] = {}
    for driver, number, lost in acts:
        unit = units[number]
        receipt = make_receipt(unit, driver)
        won = Ledger(store).commit(receipt)
        if lost:
            won = Ledger(store).commit(dataclasses.replace(receipt, seconds={"again": 1.0}))
        assert won == (winners.setdefault(unit.unit, driver) == driver)
        assert Ledger(store).committed_units() == set(winners)
    assert {receipt.unit: receipt.attempt for receipt in Ledger(store).receipts()} == winners
    _, totals = put_manifest(Ledger(store), rows, units)
    table = read_manifest(store).to_pylist()
    assert [row["row"] for row in table] == list(range(len(rows)))
    assert totals.rows == len(rows) == totals.ok + sum(totals.skipped.values())
    assert totals.tokens == sum(lengths)
    for row in table:
        if row["status"] == "ok":
            assert row["shard"] == layout.shard_key(row["unit"], winners[row["unit"]], "raw")
    places = [(row["shard"], row["row_in_shard"]) for row in table if row["status"] == "ok"]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("part_rows", [1, 2, 4, 100])
def test_a_manifest_is_the_same_however_rows_are_cut_into_parts_and_groups(
    monkeypatch: pytest.MonkeyPatch, part_rows: int
) -> None:
    ledger = claimed()
    commit_all(ledger, failures=[RowFailure(3, RowStatus.NONFINITE, "x"), RowFailure(7, RowStatus.FAULT, "y")])
    put_manifest(ledger, ROWS, UNITS)
    whole = read_manifest(ledger.store)
    monkeypatch.setattr("ray_extract.ledger._GROUP_ROWS", 3)
    key, totals = put_manifest(ledger, ROWS, UNITS, part_rows=part_rows)
    assert pq.ParquetFile(io.BytesIO(ledger.store.get(key))).num_row_groups == {1: 3, 2: 3, 4: 3, 100: 1}[part_rows]
    table = read_manifest(ledger.store)
    assert table.equals(whole) and count(table) == totals and totals.rows == 9
