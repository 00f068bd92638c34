"""The plan: every usable row in exactly one unit, the same units from the same rows, and one plan an output."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import tempfile

import pytest
import tiny_tokenizer as tiny
from hypothesis import given
from hypothesis import strategies as st
from simulated import make_rows, make_work
from test_prepare import CHAT, SHAPE, MemoryStore, ids, job

from ray_extract import cli, layout, plan
from ray_extract.cost import Rates, check_space, cost_lines
from ray_extract.dataset import parts
from ray_extract.dataset.prepared import Lengths, PreparedRows, RowLength
from ray_extract.errors import ConfigError, PlanError
from ray_extract.plan import PlanSummary, estimate, load_or_make_plan, plan_units, read_units, show_bytes, write_units
from ray_extract.store import open_store

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.booleans()), max_size=80).map(
    lambda rows: [RowLength(i, max(a, b), min(a, b), usable) for i, (a, b, usable) in enumerate(rows)]
)


@given(
    lengths=LENGTHS,
    token_bytes=st.sampled_from([8, 512, 57_344]),
    target_tokens=st.integers(1, 200),
    max_rows=st.integers(1, 20),
    arena_tokens=st.none() | st.integers(60, 200),
    block=st.integers(1, 50),
)
def test_units_cover_usable_rows_once_in_order_within_the_target(
    lengths, token_bytes, target_tokens, max_rows, arena_tokens, block
):
    options = {
        "token_bytes": token_bytes,
        "shard_bytes": target_tokens * token_bytes + token_bytes // 2,
        "max_rows": max_rows,
        "max_unit_bytes": arena_tokens and arena_tokens * token_bytes,
    }
    units = list(plan_units([Lengths.of(lengths)], **options))
    blocks = (Lengths.of(lengths[at : at + block]) for at in range(0, len(lengths), block))
    assert list(plan_units(blocks, **options)) == units
    assert [u.unit for u in units] == [layout.unit_id(i) for i in range(len(units))]
    members = [[r for r in lengths[u.first : u.end] if r.usable] for u in units]
    assert [r for rows in members for r in rows] == [r for r in lengths if r.usable]
    limit = min(target_tokens, arena_tokens or target_tokens)
    for unit, rows in zip(units, members, strict=True):
        assert (unit.rows, unit.tokens) == (len(rows), sum(r.tokens for r in rows))
        assert unit.kept == sum(r.kept for r in rows)
        assert unit.nbytes == unit.kept * token_bytes
        assert unit.rows <= max_rows
        assert unit.rows == 1 or unit.kept <= limit
        assert rows[0].row == unit.first
        assert rows[-1].row == unit.end - 1
        assert arena_tokens is None or unit.kept <= arena_tokens
    for left, right in itertools.pairwise(members):
        assert len(left) == max_rows or sum(r.kept for r in left) + right[0].kept > limit, "unit closed too early"


def test_planning_streams():
    def endless():
        row = 0
        while True:
            yield Lengths.of([RowLength(row, 10, 10, True), RowLength(row + 1, 10, 10, False)])
            row += 2

    units = plan_units(endless(), token_bytes=8, shard_bytes=800, max_rows=100)
    assert [next(units).first for _ in range(3)] == [0, 20, 40]


def test_row_larger_than_the_arena_is_refused_with_its_way_out():
    lengths = [RowLength(0, 5, 5, True), RowLength(1, 131_072, 131_072, True)]
    options = {"token_bytes": 57_344, "shard_bytes": 1 << 30, "max_rows": 9, "max_unit_bytes": 1 << 30}
    with pytest.raises(PlanError) as caught:
        list(plan_units([Lengths.of(lengths)], **options))
    assert str(caught.value) == (
        "row 1: its states are 7.52 GB (7.00 GiB) (131072 tokens of 57344 bytes), and the arena holds units of "
        "1.07 GB (1.00 GiB), half of it, at most; raise run.arena_bytes above 15.03 GB (14.00 GiB), "
        "or lower dataset.max_tokens"
    )
    skipped = [lengths[0], lengths[1]._replace(usable=False)]
    assert len(list(plan_units([Lengths.of(skipped)], **options))) == 1


def test_units_read_back_and_other_units_are_refused():
    lengths = Lengths.of(RowLength(i, 3, 2, True) for i in range(9))
    units = list(plan_units([lengths], token_bytes=8, shard_bytes=64, max_rows=4))
    store = MemoryStore()
    write_units(store, iter(units))
    write_units(store, units)
    assert read_units(store) == units
    with pytest.raises(PlanError, match=r"plan/units\.parquet"):
        write_units(store, units[:-1])


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (992_050_000_000, "992.05 GB (923.92 GiB)"),
        (57_344_000_000_000, "57.34 TB (52.15 TiB)"),
        (64 << 20, "67.11 MB (64.00 MiB)"),
        (2048, "2.05 kB (2.00 KiB)"),
        (0, "0 bytes"),
    ],
)
def test_bytes_are_shown_in_both_units(nbytes, text):
    assert show_bytes(nbytes) == text


@pytest.fixture
def dataset(tmp_path):
    records = [ids(8), ids(12), "{oops", ids(90), ids(4)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def small(path, **run):
    base = job(path)
    return base.model_copy(
        update={
            "output": base.output.model_copy(update={"shard_bytes": 16 * 512}),
            "run": base.run.model_copy(update=run),
        }
    )


def test_plan_is_made_once_and_then_read_even_without_the_input(dataset):
    store = MemoryStore()
    index, units = load_or_make_plan(store, small(dataset), SHAPE, 512)
    assert (index.rows, index.usable, index.tokens) == (5, 3, 24)
    assert index.skipped == {"malformed JSON": 1, "overlong": 1}
    assert [(u.first, u.end, u.rows) for u in units] == [(0, 1, 1), (1, 5, 2)]
    assert [r.index for r in PreparedRows(store, index).read(1, 5) if r.reason is None] == [1, 4]
    before = dict(store.objects)
    dataset.unlink()
    assert load_or_make_plan(store, small(dataset), SHAPE, 512) == (index, units)
    assert store.objects == before


def test_plan_on_a_local_folder_is_that_in_memory(dataset, tmp_path):
    store, memory = open_store(str(tmp_path / "out")), MemoryStore()
    index, units = load_or_make_plan(store, small(dataset), SHAPE, 512)
    assert load_or_make_plan(memory, small(dataset), SHAPE, 512) == (index, units)
    assert {info.key: store.get(info.key) for info in store.list("plan/")} == memory.objects
    for ours, theirs in zip(PreparedRows(store, index).lengths(), PreparedRows(memory, index).lengths(), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert load_or_make_plan(store, small(dataset), SHAPE, 512) == (index, units)


def test_interrupted_planning_is_finished_by_the_next_driver(dataset):
    complete = MemoryStore()
    expected = load_or_make_plan(complete, small(dataset), SHAPE, 512)
    for done in range(len(complete.objects)):
        store = MemoryStore()
        store.objects = dict(list(complete.objects.items())[:done])
        assert load_or_make_plan(store, small(dataset), SHAPE, 512) == expected
        assert store.objects == complete.objects
    assert list(complete.objects)[-1] == layout.PLAN_KEY


def test_driver_that_loses_the_race_uses_the_winners_plan(dataset, monkeypatch):
    store = MemoryStore()
    real = plan.write_units

    def lose(*args):
        monkeypatch.setattr(plan, "write_units", real)
        winner.extend(load_or_make_plan(store, small(dataset), SHAPE, 512))
        real(*args)

    winner = []
    monkeypatch.setattr(plan, "write_units", lose)
    assert list(load_or_make_plan(store, small(dataset), SHAPE, 512)) == winner


def test_plan_that_cannot_be_goes_on_as_corrected_with_what_was_prepared(dataset, monkeypatch):
    store = MemoryStore()
    with pytest.raises(PlanError, match=r"^row 1: .*raise run\.arena_bytes"):
        load_or_make_plan(store, small(dataset, arena_bytes=2 * 11 * 512), SHAPE, 512)
    monkeypatch.setattr(parts.PartWriter, "write", None)
    load_or_make_plan(store, small(dataset), SHAPE, 512)


def test_data_set_without_a_usable_row_is_refused_with_the_reasons(tmp_path):
    store = MemoryStore()
    useless = tmp_path / "useless.jsonl"
    useless.write_text('{"prompt": 1}\n' * 3)
    with pytest.raises(
        PlanError,
        match=r"none of 3 rows can be used \(3 x no known field\), such as:\n  no known field: useless\.jsonl:1: ",
    ):
        load_or_make_plan(store, small(useless), SHAPE, 512)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(PlanError, match=r"none of 0 rows can be used; it is empty"):
        load_or_make_plan(MemoryStore(), small(tmp_path / "empty.jsonl"), SHAPE, 512)
    assert layout.PLAN_KEY not in store.objects


def test_tokenizer_that_is_missing_stops_planning_before_anything_is_stored(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    store = MemoryStore()
    with pytest.raises(ConfigError, match=r"model\.path = 'm': no tokenizer"):
        load_or_make_plan(store, small(path), dataclasses.replace(SHAPE, path=str(tmp_path)), 512)
    assert store.objects == {}


@pytest.mark.parametrize("key", [layout.UNITS_KEY, layout.rows_key(0)])
@pytest.mark.parametrize("left", [None, b"PAR1 nothing"])
def test_a_damaged_plan_is_made_again_as_the_message_says(dataset, key, left):
    store = MemoryStore()
    index, units = load_or_make_plan(store, small(dataset), SHAPE, 512)
    rows = PreparedRows(store, index).read(0, index.rows)
    del store.objects[key]
    if left is not None:
        store.objects[key] = left
    with pytest.raises(PlanError, match=rf"{key} is (missing|damaged).*; delete it and plan/plan\.json, and run"):
        PreparedRows(store, load_or_make_plan(store, small(dataset), SHAPE, 512)[0]).read(0, index.rows)
    store.objects.pop(key, None)
    del store.objects[layout.PLAN_KEY]
    assert load_or_make_plan(store, small(dataset), SHAPE, 512) == (index, units)
    again = PreparedRows(store, index).read(0, index.rows)
    assert [(row.row_id, row.source, row.reason) for row in again] == [(r.row_id, r.source, r.reason) for r in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", r"plan/plan\.json is damaged"),
        (b"[]", r"plan/plan\.json is damaged"),
        (b'{"version": 9, "rows": {}, "units": 1}', "has version 9 and this release reads 1"),
    ],
)
def test_unusable_stored_plan_is_explained(dataset, text, message):
    store = MemoryStore()
    load_or_make_plan(store, small(dataset), SHAPE, 512)
    store.objects[layout.PLAN_KEY] = text
    with pytest.raises(PlanError, match=message):
        load_or_make_plan(store, small(dataset), SHAPE, 512)


def test_units_of_another_plan_are_noticed(dataset):
    store, other = MemoryStore(), MemoryStore()
    _, units = load_or_make_plan(store, small(dataset), SHAPE, 512)
    write_units(other, units[:1])
    store.objects[layout.UNITS_KEY] = other.objects[layout.UNITS_KEY]
    with pytest.raises(PlanError, match=r"plan/units\.parquet is not what plan/plan\.json says"):
        load_or_make_plan(store, small(dataset), SHAPE, 512)


def test_summary_adds_up_and_names_every_reason(dataset):
    index, units = load_or_make_plan(MemoryStore(), small(dataset), SHAPE, 512)
    summary = estimate(index, units, 512)
    assert (summary.state_bytes, summary.units, summary.largest_unit_bytes) == (24 * 512, 2, 16 * 512)
    assert summary.lines() == [
        "rows      5 = 3 usable + 2 skipped",
        "          1 skipped: malformed JSON, first in.jsonl:3: "
        "Expecting property name enclosed in double quotes at byte 1",
        "          1 skipped: overlong, first in.jsonl:4: 90 > 56 tokens",
        "tokens    24, 3 of them supervised (12.5%)",
        "                  4 to         7              1 rows ############",
        "                  8 to        15              2 rows ########################",
        "states    12.29 kB (12.00 KiB), of 24 tokens at 512 bytes each",
        "shards    2, the largest of 8.19 kB (8.00 KiB)",
    ]


def test_row_without_supervised_tokens_is_shown_as_it_is_rendered(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": CHAT[:1]}) + "\n" + json.dumps({"messages": CHAT}) + "\n")
    shape = dataclasses.replace(SHAPE, path=str(tiny.save(tmp_path / "tok")), context_length=200)
    index, units = load_or_make_plan(MemoryStore(), small(path), shape, 512)
    assert (
        "          1 skipped: no supervised token, first in.jsonl:1, rendered as "
        '"<|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\n2+2?<|im_end|>\\n"'
    ) in estimate(index, units, 512).lines()


def test_plan_of_an_earlier_release_has_no_histogram_and_is_read(dataset):
    store = MemoryStore()
    index, units = load_or_make_plan(store, small(dataset), SHAPE, 512)
    tree = json.loads(store.objects[layout.PLAN_KEY])
    for name in ("supervised", "unsupervised", "histogram", "examples"):
        del tree["rows"][name]
    store.objects[layout.PLAN_KEY] = json.dumps(tree).encode()
    found, _ = load_or_make_plan(store, small(dataset), SHAPE, 512)
    assert found == dataclasses.replace(index, supervised=0, unsupervised=0, histogram=(), examples={})
    assert "          1 skipped: overlong" in estimate(found, units, 512).lines()


# The yardstick: Kimi-K2.5's states of 17.3 M tokens
KIMI = PlanSummary(
    rows=10_000,
    usable=10_000,
    skipped={},
    examples={},
    truncated=0,
    tokens=17_300_000,
    supervised=17_300_000,
    unsupervised=0,
    histogram=(),
    kept=17_300_000,
    token_bytes=57_344,
    state_bytes=17_300_000 * 57_344,
    units=924,
    largest_unit_bytes=1 << 30,
)


@pytest.mark.parametrize(
    ("engine", "rates", "lines"),
    [
        (
            {"count": 4, "tp_size": 8},
            Rates(tokens_per_second=20_000, gpu_hour=2.0, gb_month=0.02),
            [
                "/dev/shm  3.22 GB (3.00 GiB) for each of 4 engines",
                "writes    1.15 GB (1.07 GiB) a second for each engine",
                "hours     0.06 at 20,000 tokens/s an engine",
                "storage   19.84 a month at 0.02 a GB",
                "compute   3.84 for 1.92 GPU hours at 2",
                "          so keeping the states is cheaper than computing them again within 0.2 months, "
                "and dearer after that",
            ],
        ),
        (
            {"count": 64, "tp_size": 2},
            Rates(tokens_per_second=1000),
            [
                "/dev/shm  3.22 GB (3.00 GiB) for each of 64 engines, 12.88 GB (12.00 GiB) for the 4 of a node",
                "writes    57.34 MB (54.69 MiB) a second for each engine, 229.38 MB (218.75 MiB) for the 4 of a node",
                "hours     0.08 at 1,000 tokens/s an engine",
            ],
        ),
        ({"device": "cpu"}, Rates(gpu_hour=2.0), ["/dev/shm  3.22 GB (3.00 GiB) for the engine"]),
    ],
)
def test_what_a_plan_takes_follows_from_rates_and_prices(engine, rates, lines):
    assert cost_lines(job("in.jsonl", engine=engine), KIMI, 3 << 30, rates) == lines


def test_states_that_a_folder_has_no_room_for_are_refused(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage if folder == tmp_path else pytest.fail(str(folder)))
    output = open_store(str(tmp_path / "not" / "there"))
    check_space(output, 5000)
    with pytest.raises(PlanError, match=r"^output\.url: .* has 5\.00 kB .* left, and the states take 5\.00 kB"):
        check_space(output, 5001)
    assert not (tmp_path / "not").exists()
    check_space(open_store(f"memory://plan-{tmp_path.name}"), 1 << 80)


def test_what_is_there_already_needs_no_room(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    output = open_store(str(tmp_path / "out"))
    output.put("shards/u00000000.a.safetensors", bytes(300))
    check_space(output, 5300)
    with pytest.raises(PlanError, match=r"capture\.dtype = float8_e4m3"):
        check_space(output, 5301)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_plan_command_that_is_told_to_end_says_so_and_leaves_nothing(tmp_path, capsys, monkeypatch, number):
    work = make_work(tmp_path, make_rows(5))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "estimate", lambda *_: os.kill(os.getpid(), number))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or what is broken would end this process
    try:
        assert cli.main(["plan", *work.args()]) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "error: ended before its end, on request\n"
    assert not list((tmp_path / "scratch").iterdir())


def test_nodes_have_at_least_one_gpu(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--node-gpus", "0"])
    assert ended.value.code == 2 and "'0': must be more than 0" in capsys.readouterr().err


def test_plan_command_lists_skipped_rows_and_prices(tmp_path, capsys):
    work = make_work(tmp_path, [*make_rows(5), []])
    options = ["--skipped", "--tokens-per-second", "1000", "--gpu-hour", "2", "--gb-month", "0.02"]
    assert cli.main(["plan", *options, *work.args()]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "rows.jsonl:6  empty row"
    assert [line.split()[0] for line in out if line[0] != " "][:-1] == [
        *("model", "captures", "rows", "tokens", "states", "shards"),
        *("/dev/shm", "writes", "hours", "storage"),  # and no GPU to pay for
    ]
    with pytest.raises(SystemExit):
        cli.main(["plan", "--gpu-hour", "-1", *work.args()])
    assert "must be more than 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "--tokens-per-second", "1e308", *work.args()])
    assert "1e+15 at most" in capsys.readouterr().err
    assert cli.main(["plan", "--gpu-hour", "2", *work.args(), "engine.gpus=1"]) == 0
    assert "compute   not known without --tokens-per-second or --trial" in capsys.readouterr().out
    (tmp_path / "file").touch()
    assert cli.main(["plan", *work.args(), f"output.url={tmp_path / 'file' / 'out'}"]) == 2
    assert f"{tmp_path / 'file'} is a file; name a folder" in capsys.readouterr().err
    assert cli.main(["plan", "--node-gpus", "4", *work.args(), "engine.gpus=8"]) == 2
    assert "--node-gpus 4: an engine takes 8 GPUs" in capsys.readouterr().err
