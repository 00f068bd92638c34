"""Exports without the trainers: what is written, left out and refused, and what a second run finds."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import exports
import numpy as np
import pyarrow as pa
import pytest
import torch
from exports import BOUNDARIES, MASKS, flip_a_bit, ids_of, make_run, stored
from safetensors.torch import load_file

from ray_extract import cli
from ray_extract.counts import TokenCounts, write_counts
from ray_extract.errors import ConfigError, NotFound, OutOfSpace, ShardError
from ray_extract.exporters import export as export_module
from ray_extract.exporters.export import Report, Request, export
from ray_extract.exporters.folder import IDENTITY_NAME, ExportFolder
from ray_extract.exporters.rows import NO_PAIR, UNSUPERVISED, why_left_out
from ray_extract.exporters.speculators_backend import Backend, ShardTransfer
from ray_extract.layout import COUNTS_KEY
from ray_extract.presets import TARGETS

AUX = ("state.2", "state.4", "state.5")


def go(run, out: Path, target: str = "specforge-eagle3", **options) -> Report:
    return export(Request(run.url, target, str(out), **options))


def features(out: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Every feature file of an export, by row."""
    return {int(path.stem.split("-")[1]): torch.load(path, weights_only=True) for path in sorted(out.rglob("*.ckpt"))}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Row selection


@pytest.mark.parametrize(
    ("target", "left_out"),
    [
        ("specforge-eagle3", {2: UNSUPERVISED, 5: UNSUPERVISED}),
        ("specforge-dflash", {1: NO_PAIR, 2: NO_PAIR, 3: NO_PAIR, 5: NO_PAIR}),
        ("specforge-dspark", {1: NO_PAIR, 2: NO_PAIR, 3: NO_PAIR, 5: NO_PAIR}),
        ("speculators-eagle3", {3: UNSUPERVISED, 5: UNSUPERVISED}),
        ("speculators-dflash", {}),
    ],
)
def test_rows_that_a_trainer_refuses_are_left_out_with_the_reason(target, left_out):
    reasons = {row: why_left_out(np.array(mask, np.uint8), TARGETS[target]) for row, mask in enumerate(MASKS)}
    assert {row: reason for row, reason in reasons.items() if reason} == left_out


def test_rows_with_too_few_supervised_tokens_are_left_out():
    mask = np.array([0, 1, 1, 0], np.uint8)
    assert why_left_out(mask, TARGETS["speculators-eagle3"], 2) is None
    assert why_left_out(mask, TARGETS["speculators-eagle3"], 3) == "fewer than 3 supervised tokens"
    assert why_left_out(np.zeros(4, np.uint8), TARGETS["speculators-eagle3"]) == UNSUPERVISED


def test_rows_in_are_rows_out_and_left_out_and_not_ok(tmp_path):
    rows = [(ids_of(row), MASKS[row]) for row in range(len(MASKS))]
    run = make_run(tmp_path, rows=[*rows, ([], []), ([5, 6, 7], [1, 1, 1])], failed=[6])
    report = go(run, tmp_path / "e", "specforge-dflash", boundaries=(2, 5))
    assert (report.rows, report.exported) == (10, 4)
    skipped = next(reason for reason in report.left_out if reason.startswith("skipped by the run: "))
    assert report.left_out == {NO_PAIR: 4, "failed in the run: incomplete": 1, skipped: 1}
    report.check()
    lines = [json.loads(line) for line in (tmp_path / "e/left_out.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [(row, NO_PAIR) for row in (1, 2, 3, 5)]
    assert sorted(features(tmp_path / "e")) == [0, 4, 7, 9]


def test_a_row_is_judged_by_the_tokens_that_the_trainer_would_keep(tmp_path):
    run = make_run(tmp_path)
    report = go(run, tmp_path / "e", "specforge-dflash", max_length=6)
    assert report.left_out == {NO_PAIR: 4, UNSUPERVISED: 1}  # row 7 has its supervised tokens further on
    found = features(tmp_path / "e")
    assert sorted(found) == [0, 4, 6]
    for row, feature in found.items():
        assert feature["input_ids"].tolist() == ids_of(row)[:6]
        assert feature["hidden_states"][0].equal(torch.cat([s[:6] for s in stored(run, row, AUX)], dim=1))


def test_a_run_without_a_usable_row_is_refused_with_the_reasons(tmp_path):
    run = make_run(tmp_path, rows=[(ids_of(2), MASKS[2]), (ids_of(5), MASKS[5])])
    with pytest.raises(ConfigError, match=f"none of its 2 rows can be exported: 2 x {UNSUPERVISED}"):
        go(run, tmp_path / "e")


# Content


@pytest.mark.parametrize("format", ["raw", "parquet"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3"])
def test_specforge_features_hold_the_rows_bit_for_bit(tmp_path, format, dtype):
    run = make_run(tmp_path, format=format, dtype=dtype)
    kind = getattr(torch, dtype, torch.bfloat16)
    for strategy, (aux, last) in {
        "eagle3": ("aux_hidden_state", "hidden_state"),
        "dflash": ("hidden_states", None),
        "dspark": ("hidden_states", "target_last_hidden_states"),
    }.items():
        report = go(run, tmp_path / strategy, f"specforge-{strategy}")
        found = features(tmp_path / strategy)
        assert len(found) == report.exported > 3
        for row, feature in found.items():
            assert set(feature) == {"input_ids", "loss_mask", aux, last} - {None}
            assert feature["input_ids"].dtype == feature["loss_mask"].dtype == torch.int64
            assert feature["input_ids"].tolist() == ids_of(row)
            assert feature["loss_mask"].tolist() == list(MASKS[row])
            assert feature[aux].dtype == kind
            assert feature[aux].equal(torch.cat(stored(run, row, AUX, kind), dim=1)[None])
            if last:
                assert feature[last].equal(stored(run, row, ["state.final"], kind)[0][None])


def test_a_feature_file_holds_nothing_but_its_row(tmp_path):
    """torch.save writes the memory behind a view: a shard for each row, if one is not careful."""
    run = make_run(tmp_path, rows=[([i % 7] * 50, [1] * 50) for i in range(20)], rows_per_unit=20)
    go(run, tmp_path / "e")
    sizes = {path.stat().st_size for path in (tmp_path / "e").rglob("*.ckpt")}
    assert max(sizes) < 50 * (4 * 16 * 2 + 16) + 4000


def test_feature_paths_sort_as_strings_in_the_order_of_the_data_set(tmp_path):
    from ray_extract.exporters.specforge import row_name

    names = [row_name(row) for row in (0, 9, 10, 1999, 2000, 19_999, 20_000, 123_456_789, 2_000_000_000)]
    assert names == sorted(names)
    assert len({name.rpartition("/")[0] for name in map(row_name, range(2000))}) == 1


def test_speculators_states_hold_the_rows_bit_for_bit_with_the_state_before_the_norm_last(tmp_path):
    run = make_run(tmp_path)
    report = go(run, tmp_path / "e", "speculators-eagle3")
    rows = [0, 1, 2, 4, 6, 7]
    assert report.exported == len(rows) and report.choice.last == "state.8"
    for line, row in enumerate(rows):
        found = load_file(tmp_path / f"e/hidden_states/hs_{line}.safetensors")
        assert set(found) == {"hidden_states", "token_ids"}
        assert found["token_ids"].dtype == torch.int64 and found["token_ids"].tolist() == ids_of(row)
        assert found["hidden_states"].equal(torch.stack(stored(run, row, (*AUX, "state.8")), dim=1))
    table = pa.ipc.open_stream(tmp_path / "e/data-00000-of-00001.arrow").read_all()
    assert table.column("input_ids").to_pylist() == [ids_of(row) for row in rows]
    assert table.column("loss_mask").to_pylist() == [list(MASKS[row]) for row in rows]
    assert table.column("seq_len").to_pylist() == [len(MASKS[row]) for row in rows]
    assert np.load(tmp_path / "e/rows.npy")[:, 1].tolist() == rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_speculators_fp8_states_are_read_as_its_backend_does(tmp_path, dtype, monkeypatch):
    run = make_run(tmp_path, dtype=dtype)
    monkeypatch.setattr("ray_extract.exporters.speculators._BLOCK_BYTES", 5 * 4 * 16 * 2)
    go(run, tmp_path / "e", "speculators-eagle3", fp8=True)
    for line, row in enumerate([0, 1, 2, 4, 6, 7]):
        found = load_file(tmp_path / f"e/hidden_states/hs_{line}.safetensors")
        states, scales = found["hidden_states"], found["hidden_states_scales"]
        assert states.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        assert scales.shape == (len(states), 1, 1) and found["token_ids"].tolist() == ids_of(row)
        restored = states.to(torch.bfloat16) * scales.to(torch.bfloat16)  # hs_connectors.fp8_utils
        wanted = torch.stack(stored(run, row, (*AUX, "state.8")), dim=1)
        assert 0.01 < (restored - wanted).float().norm() / wanted.float().norm() < 0.04


def test_fp8_files_are_refused_where_nothing_reads_them(tmp_path):
    run = make_run(tmp_path)
    with pytest.raises(ConfigError, match="specforge has nothing that reads it"):
        go(run, tmp_path / "e", fp8=True)
    with pytest.raises(ConfigError, match="--link writes none"):
        go(run, tmp_path / "e", "speculators-eagle3", link=True, fp8=True)


def test_states_are_written_in_blocks(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    go(run, tmp_path / "whole", "speculators-eagle3")
    monkeypatch.setattr("ray_extract.exporters.speculators._BLOCK_BYTES", 300)
    monkeypatch.setattr("ray_extract.exporters.speculators._BATCH_ROWS", 2)
    go(run, tmp_path / "blocks", "speculators-eagle3")
    for path in (tmp_path / "whole/hidden_states").iterdir():
        assert path.read_bytes() == (tmp_path / "blocks/hidden_states" / path.name).read_bytes()
    tables = [pa.ipc.open_stream(tmp_path / f"{e}/data-00000-of-00001.arrow").read_all() for e in ("whole", "blocks")]
    assert tables[0].equals(tables[1])


def test_boundaries_come_in_the_order_of_the_drafts_layer_ids(tmp_path):
    run = make_run(tmp_path)
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps({"dflash_config": {"target_layer_ids": [4, 1]}}))
    report = go(run, tmp_path / "e", "specforge-dflash", draft_config=str(draft))
    assert (report.choice.boundaries, report.choice.layer_ids) == ((5, 2), (4, 1))
    assert features(tmp_path / "e")[0]["hidden_states"][0].equal(
        torch.cat(stored(run, 0, ["state.5", "state.2"]), dim=1)
    )


@pytest.mark.parametrize("trainer", ["specforge", "speculators"])
def test_a_reduced_vocabulary_comes_from_the_supervised_tokens_that_are_exported(tmp_path, trainer):
    run = make_run(tmp_path)
    go(run, tmp_path / "e", f"{trainer}-eagle3", draft_vocab=10, vocab_size=exports.VOCAB, max_length=6)
    rows = [row for row, mask in enumerate(MASKS) if not why_left_out(np.array(mask[:6]), TARGETS[f"{trainer}-eagle3"])]
    counts = np.zeros(exports.VOCAB, int)
    for row in rows:
        for token, supervised in zip(ids_of(row)[:6], MASKS[row][:6], strict=True):
            counts[token] += supervised
    expected = sorted(sorted(range(exports.VOCAB), key=lambda token: (-counts[token], token))[:10])
    if trainer == "specforge":
        maps = torch.load(tmp_path / "e/vocab_mapping/vocab_mapping.pt", weights_only=True)
        d2t, t2d = maps["d2t"], maps["t2d"]
    else:
        d2t, t2d = (torch.from_numpy(np.load(tmp_path / f"e/{name}-10.npy")) for name in ("d2t", "t2d"))
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool and len(t2d) == exports.VOCAB
    assert (d2t + torch.arange(10)).tolist() == expected == t2d.nonzero().flatten().tolist()


def test_a_draft_config_gives_the_vocabulary_sizes(tmp_path):
    run = make_run(tmp_path)
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(ids | {"vocab_size": exports.VOCAB, "draft_vocab_size": 12}))
    go(run, tmp_path / "a", draft_config=str(draft))
    assert len(torch.load(tmp_path / "a/vocab_mapping/vocab_mapping.pt")["d2t"]) == 12
    draft.write_text(json.dumps(ids | {"vocab_size": exports.VOCAB, "draft_vocab_size": exports.VOCAB}))
    go(run, tmp_path / "b", draft_config=str(draft))
    assert not (tmp_path / "b/vocab_mapping").exists()
    with pytest.raises(ConfigError, match="outside the vocabulary of 20 tokens"):
        go(run, tmp_path / "c", draft_vocab=12, vocab_size=20)


def test_the_runs_token_counts_give_the_size_of_the_targets_vocabulary(tmp_path):
    run = make_run(tmp_path)
    counts = TokenCounts(np.zeros(70, np.int64), np.zeros(70, np.int64))
    write_counts(run.store, counts, "manifest-000000.parquet")
    go(run, tmp_path / "a", draft_vocab=12)
    assert len(torch.load(tmp_path / "a/vocab_mapping/vocab_mapping.pt")["t2d"]) == 70
    (tmp_path / "out" / COUNTS_KEY).unlink()
    with pytest.raises(ConfigError, match="--draft-vocab 12: the target's vocabulary must be known"):
        go(run, tmp_path / "b", draft_vocab=12)


# Refusals


@pytest.mark.parametrize(
    ("options", "target", "told"),
    [
        (
            {"boundaries": (2, 4, 5)},
            "speculators-eagle3",
            r"the last state before the final norm, boundary 8; the run lacks boundary 8 \(it has \[2, 4, 5\] and "
            r"final\).* capture: \{boundaries: \[2, 4, 5, 8\], final: false, keep: all\}",
        ),
        (
            {"final": False},
            "specforge-eagle3",
            r"after the final norm; the run lacks the final state .* capture: \{boundaries: \[2, 4, 5\], final: true",
        ),
        ({"boundaries": (2, 4)}, "specforge-eagle3", r"lacks boundary 5 .*boundaries: \[2, 4, 5\], final: true"),
        ({"boundaries": (1, 2, 4, 5)}, "specforge-eagle3", r"reads 3; say which with --boundaries .*default is 2,4,5"),
        (
            {"keep": "supervised"},
            "specforge-eagle3",
            r"some tokens only \(capture.keep = supervised\).* keep: all\}",
        ),
    ],
)
def test_a_run_that_lacks_what_the_trainer_reads_is_refused_with_what_to_capture(tmp_path, options, target, told):
    run = make_run(tmp_path, **options)
    with pytest.raises(ConfigError, match=told):
        go(run, tmp_path / "e", target)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"boundaries": (2, 4)}, "reads 3 boundaries, not the 2 of"),
        ({"boundaries": (2, 4, 4)}, "reads different boundaries"),
        ({"boundaries": (2, 4, 9)}, "boundary 9 is outside 1..8"),
        ({"link": True}, "--link: only speculators"),
        ({"max_length": 0}, "--max-length 0: must be at least 1"),
        ({"draft_vocab": 65, "vocab_size": 64}, r"draft vocabulary of 65 tokens: must be within 1..64"),
        ({"draft_config": "nowhere.json"}, "draft config nowhere.json: cannot be read"),
    ],
)
def test_a_wrong_option_is_one_clear_line(tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        go(make_run(tmp_path), tmp_path / "e", **options)


def test_boundaries_that_contradict_the_draft_config_are_refused(tmp_path):
    run = make_run(tmp_path)
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps({"dflash_config": {"target_layer_ids": [1, 4]}}))
    with pytest.raises(ConfigError, match=r"--boundaries 2,4 contradicts --draft-config .* which means 2,5"):
        go(run, tmp_path / "e", "specforge-dflash", draft_config=str(draft), boundaries=(2, 4))


def test_an_unfinished_run_and_none_at_all_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no run\.json there"):
        export(Request(str(tmp_path / "nothing"), "specforge-eagle3", str(tmp_path / "e")))
    with pytest.raises(ShardError, match="the run has not finished"):
        go(make_run(tmp_path, finish=False), tmp_path / "e")


def test_a_run_that_does_not_say_its_layers_is_refused(tmp_path):
    run = make_run(tmp_path)
    file = tmp_path / "out/run.json"
    record = json.loads(file.read_text())
    del record["identity"]["model"]["num_layers"]
    file.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="how many layers"):
        go(run, tmp_path / "e")


@pytest.mark.parametrize("target", ["specforge-eagle3", "speculators-eagle3"])
def test_a_flipped_bit_in_a_shard_stops_the_export(tmp_path, target):
    run = make_run(tmp_path)
    shard = sorted((tmp_path / "out/shards").iterdir())[0]
    flip_a_bit(shard, _offset(shard, "state.4") + 5)
    with pytest.raises(ShardError, match=r"row 0: state\.4 are not what was captured"):
        go(run, tmp_path / "e", target)


@pytest.mark.parametrize("target", ["specforge-eagle3", "speculators-eagle3"])
def test_a_state_that_is_zero_throughout_stops_the_export(tmp_path, target):
    def states(name, ids):
        return exports.states_of(name, ids) * (name != "state.4" or len(ids) != len(MASKS[4]))

    run = make_run(tmp_path, states=states)
    with pytest.raises(ShardError, match=r"state\.4 of row 4 is zero throughout"):
        go(run, tmp_path / "e", target)


def _offset(path: Path, name: str) -> int:
    head = path.read_bytes()
    length = int.from_bytes(head[:8], "little")
    return 8 + length + json.loads(head[8 : 8 + length])[name]["data_offsets"][0]


# The folder


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_second_run_writes_nothing_and_says_so(tmp_path, target):
    run = make_run(tmp_path)
    options = {"draft_vocab": 8, "vocab_size": exports.VOCAB} if "eagle3" in target else {}
    first = go(run, tmp_path / "e", target, boundaries=(2, 4, 5), **options)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "e").rglob("*")}
    second = go(run, tmp_path / "e", target, boundaries=(2, 4, 5), **options)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "e").rglob("*")}
    assert first.outcomes["written"] == second.outcomes["kept"] > first.exported
    assert set(second.outcomes) == {"kept"}


@pytest.mark.parametrize("target", ["specforge-eagle3", "speculators-eagle3"])
def test_an_export_that_was_killed_goes_on_with_what_is_missing(tmp_path, target, monkeypatch):
    run = make_run(tmp_path)
    whole = go(run, tmp_path / "whole", target)
    real, calls = ExportFolder.put, []

    def put(self, name, write):
        if len(calls) == 4:
            (self.path / "hidden_states").mkdir(exist_ok=True)
            (self.path / "hidden_states/.ray_extract-part-0123").write_bytes(b"half a file")
            raise KeyboardInterrupt
        calls.append(name)
        return real(self, name, write)

    with monkeypatch.context() as patch:
        patch.setattr(ExportFolder, "put", put)
        with pytest.raises(KeyboardInterrupt):
            go(run, tmp_path / "e", target)
    assert not (tmp_path / "e/state.json").exists()  # speculators does not load it before it is whole
    report = go(run, tmp_path / "e", target)
    assert report.outcomes == {"kept": 3, "written": whole.outcomes["written"] - 3}
    assert contents(tmp_path / "e") == contents(tmp_path / "whole")


@pytest.mark.parametrize("target", ["specforge-eagle3", "speculators-eagle3"])
@pytest.mark.parametrize("harm", ["bit", "zeros", "truncated", "longer"])
def test_a_damaged_file_is_found_and_replaced(tmp_path, target, harm):
    run = make_run(tmp_path)
    go(run, tmp_path / "e", target)
    before = contents(tmp_path / "e")
    victim = sorted(path for path in (tmp_path / "e/hidden_states").rglob("*") if path.is_file())[1]
    data = victim.read_bytes()
    if harm == "bit":
        flip_a_bit(victim, len(data) // 2)
    else:
        victim.write_bytes({"zeros": bytes(len(data)), "truncated": data[:-9], "longer": data + b"\0"}[harm])
    report = go(run, tmp_path / "e", target)
    assert report.outcomes["replaced"] == 1 and "written" not in report.outcomes
    assert contents(tmp_path / "e") == before


def test_a_folder_of_another_run_or_with_other_settings_is_refused_with_the_difference(tmp_path):
    run = make_run(tmp_path / "a")
    go(run, tmp_path / "e")
    before = contents(tmp_path / "e")
    with pytest.raises(ConfigError, match=r"holds another export.*\n  max_length: it has null, this export asks 4"):
        go(run, tmp_path / "e", max_length=4)
    with pytest.raises(ConfigError, match='target: it has "specforge-eagle3", this export asks "specforge-dspark"'):
        go(run, tmp_path / "e", "specforge-dspark", boundaries=(2, 4, 5))
    other = make_run(tmp_path / "b", states=lambda name, ids: exports.states_of(name, ids) + 1)
    with pytest.raises(ConfigError, match=f"run: it was made from {run.url}, and {other.url} is another run, with"):
        go(other, tmp_path / "e")
    (tmp_path / "a/out").rename(tmp_path / "first")
    make_run(tmp_path / "a", states=lambda name, ids: exports.states_of(name, ids) + 1)
    with pytest.raises(ConfigError, match=f"run: {run.url} has other rows or states than when this folder was made"):
        go(run, tmp_path / "e")
    assert contents(tmp_path / "e") == before


@pytest.mark.parametrize("link", [False, True])
def test_a_run_that_moved_is_still_the_same_run(tmp_path, link):
    run = make_run(tmp_path)
    go(run, tmp_path / "e", "speculators-eagle3", link=link)
    before = contents(tmp_path / "e")
    (tmp_path / "out").rename(tmp_path / "moved")
    moved = run_at(tmp_path / "moved")
    report = go(moved, tmp_path / "e", "speculators-eagle3", link=link)
    assert set(report.outcomes) == {"kept"}
    after = contents(tmp_path / "e")
    assert {name for name in after if after[name] != before[name]} == {IDENTITY_NAME}
    assert json.loads(after[IDENTITY_NAME])["source"]["url"] == moved.url
    assert ShardTransfer(str(tmp_path / "e")).get_cached(0)


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    run = make_run(tmp_path)
    (tmp_path / "e").mkdir()
    (tmp_path / "e/thesis.tex").write_text("...")
    with pytest.raises(ConfigError, match=r"holds thesis\.tex and no ray_extract_export\.json"):
        go(run, tmp_path / "e")
    with pytest.raises(ConfigError, match="name one"):
        go(run, "s3://bucket/prefix")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / IDENTITY_NAME).write_text("{}")
    with pytest.raises(ConfigError, match=r"ray_extract_export\.json: not an export's"):
        go(run, tmp_path / "f")


def test_a_folder_inside_the_run_or_that_cannot_be_made_is_refused(tmp_path):
    run = make_run(tmp_path)
    for inside in ("out/export", "out/commits/export"):
        with pytest.raises(ConfigError, match="lies inside the run"):
            go(run, tmp_path / inside)
        assert not (tmp_path / inside).exists()
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(ConfigError, match=r"--out .*: cannot be made \(.*\); choose a folder"):
            go(run, tmp_path / path)


@pytest.mark.parametrize(
    ("target", "name"),
    [("specforge-eagle3", "hidden_states/data_0.ckpt"), ("speculators-eagle3", "hidden_states/hs_99.safetensors")],
)
def test_a_file_that_the_trainer_would_take_for_a_row_is_named(tmp_path, target, name):
    run = make_run(tmp_path)
    go(run, tmp_path / "e", target)
    (tmp_path / "e" / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{name}: is no file of this export"):
        go(run, tmp_path / "e", target)


def test_two_exports_at_once_into_one_folder_are_refused(tmp_path):
    run = make_run(tmp_path)
    go(run, tmp_path / "e")
    record = json.loads((tmp_path / "e" / IDENTITY_NAME).read_text())
    with (
        ExportFolder(str(tmp_path / "e"), record["identity"], {}),
        pytest.raises(ConfigError, match="another process is exporting to it"),
    ):
        go(run, tmp_path / "e")
    go(run, tmp_path / "e")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    monkeypatch.setattr(ExportFolder, "free_bytes", lambda self: 1000)
    with pytest.raises(OutOfSpace, match=r"the states take .* and 1.00 kB .* are free; choose a larger disk"):
        go(run, tmp_path / "e")
    assert [path.name for path in (tmp_path / "e").iterdir()] == [IDENTITY_NAME]
    assert go(run, tmp_path / "f", "speculators-eagle3", link=True).exported == 6


def test_rows_that_get_lost_are_an_error():
    report = Report("", "", None, 10, 8, {"x": 1}, 0, 0, {}, False)  # type: ignore[arg-type]
    with pytest.raises(ShardError, match="10 rows, but 8 exported \\+ 1 left out"):
        report.check()


# Without conversion


def test_the_backend_hands_out_what_the_export_would_have_written(tmp_path):
    run = make_run(tmp_path)
    go(run, tmp_path / "whole", "speculators-eagle3", max_length=7)
    report = go(run, tmp_path / "link", "speculators-eagle3", max_length=7, link=True)
    assert not (tmp_path / "link/hidden_states").exists()
    transfer = ShardTransfer(str(tmp_path / "link"))
    for line in range(report.exported):
        got, wanted = transfer.get_cached(line), load_file(tmp_path / f"whole/hidden_states/hs_{line}.safetensors")
        assert got.keys() == wanted.keys()
        assert all(got[key].dtype == wanted[key].dtype and got[key].equal(wanted[key]) for key in got)
    with pytest.raises(IndexError):
        transfer.get_cached(report.exported)
    for name in ("data-00000-of-00001.arrow", "state.json", "dataset_info.json", "rows.npy"):
        assert (tmp_path / "link" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.s3
def test_from_an_object_store_both_ways_give_the_same_with_the_credentials_of_the_environment(
    tmp_path, s3, monkeypatch
):
    run = make_run(tmp_path, url=f"{s3.url}/export", storage_options=s3.storage_options)
    for name, value in s3.storage_options.items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "endpoint" else f"AWS_{name.upper()}", str(value))
    go(run, tmp_path / "whole", "speculators-eagle3")
    report = go(run, tmp_path / "link", "speculators-eagle3", link=True)
    transfer = Backend.from_train_args(argparse.Namespace(ray_extract_url=None), str(tmp_path / "link"))
    for line in range(report.exported):
        got, wanted = transfer.get_cached(line), load_file(tmp_path / f"whole/hidden_states/hs_{line}.safetensors")
        assert got.keys() == wanted.keys() and all(got[key].equal(wanted[key]) for key in got)


def test_the_backend_refuses_flipped_bits_and_states_of_zeros(tmp_path):
    run = make_run(tmp_path)
    go(run, tmp_path / "link", "speculators-eagle3", link=True)
    shard = sorted((tmp_path / "out/shards").iterdir())[0]
    flip_a_bit(shard, _offset(shard, "state.8") + 5)
    with pytest.raises(ShardError, match=r"row 0: state\.8 are not what was captured"):
        ShardTransfer(str(tmp_path / "link")).get_cached(0)
    zero = make_run(tmp_path / "z", states=lambda name, ids: exports.states_of(name, ids) * 0)
    go(zero, tmp_path / "zero", "speculators-eagle3", link=True)
    with pytest.raises(ShardError, match="zero throughout"):
        ShardTransfer(str(tmp_path / "zero")).get_cached(0)


def test_the_backend_says_how_to_name_a_run_that_moved(tmp_path):
    run = make_run(tmp_path)
    go(run, tmp_path / "link", "speculators-eagle3", link=True)
    told = (
        r"; if the run has moved, tell the trainer by --ray-extract-url URL, or run `ray-extract export URL --to spec"
    )
    (tmp_path / "out/shards").rename(tmp_path / "shards")
    with pytest.raises(NotFound, match=r"out/shards/u00000000.*no such shard.*" + told):
        ShardTransfer(str(tmp_path / "link")).get_cached(0)
    (tmp_path / "shards").rename(tmp_path / "out/shards")
    (tmp_path / "out").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"no run\.json there.*" + told):
        ShardTransfer(str(tmp_path / "link")).setup()
    arguments = argparse.Namespace(ray_extract_url=str(tmp_path / "moved"))
    assert Backend.from_train_args(arguments, str(tmp_path / "link")).get_cached(0)


def test_the_backend_refuses_an_export_that_did_not_end(tmp_path):
    go(make_run(tmp_path), tmp_path / "link", "speculators-eagle3", link=True)
    (tmp_path / "link/rows.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no readable rows\.npy in it, so the export did not end; run the same comm"):
        ShardTransfer(str(tmp_path / "link"))


def test_the_backend_refuses_another_run_under_the_same_address(tmp_path):
    run = make_run(tmp_path)
    go(run, tmp_path / "link", "speculators-eagle3", link=True)
    (tmp_path / "out").rename(tmp_path / "first")
    make_run(tmp_path, states=lambda name, ids: exports.states_of(name, ids) + 1)
    with pytest.raises(ConfigError, match="not the run"):
        ShardTransfer(str(tmp_path / "link")).get_cached(0)
    assert ShardTransfer(str(tmp_path / "link"), url=str(tmp_path / "first")).get_cached(0)
    go(run_at(tmp_path / "first"), tmp_path / "sf")
    with pytest.raises(ConfigError, match="an export for specforge-eagle3"):
        ShardTransfer(str(tmp_path / "sf"))
    with pytest.raises(ConfigError, match="none are generated"):
        ShardTransfer(str(tmp_path / "link")).get_generated({})
    with pytest.raises(ConfigError, match="no vLLM server"):
        Backend.build_kv_transfer_config(None)


class run_at:  # noqa: N801
    def __init__(self, path: Path) -> None:
        self.url = str(path)


# The command


def test_the_command_prints_what_became_of_every_row(tmp_path, capsys):
    run = make_run(tmp_path)
    argv = ["export", run.url, "--to", "specforge", "--out", str(tmp_path / "e"), "--boundaries", "2,4,5"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "rows        8\n  exported  6\n  left out  2   (2 x no supervised token that the trainer uses)\n" in out
    assert "layer ids   [1, 3, 4] in the numbering of specforge-eagle3" in out
    assert cli.main([*argv, "--max-length", "3"]) == 2
    assert "error: --out" in capsys.readouterr().err


def test_states_that_specforges_head_cannot_take_are_warned_of(tmp_path):
    assert "warning     SpecForge's LM head is bfloat16 and these states are float32" in "\n".join(
        go(make_run(tmp_path / "a", dtype="float32"), tmp_path / "e").lines()
    )
    other = go(make_run(tmp_path / "c", dtype="float32"), tmp_path / "g", "specforge-dflash").warning
    assert other and "set its model.torch_dtype" in other
    assert go(make_run(tmp_path / "b"), tmp_path / "f").warning is None


def test_the_command_refuses_a_strategy_that_a_trainer_does_not_have(tmp_path, capsys):
    run = make_run(tmp_path)
    assert cli.main(["export", run.url, "--to", "speculators", "--strategy", "dspark", "--out", "x"]) == 2
    assert "no export to speculators-dspark; known: specforge-eagle3" in capsys.readouterr().err


def test_exporting_needs_neither_ray_nor_an_engine_nor_a_trainer(tmp_path):
    run = make_run(tmp_path)
    code = (
        "import sys\n"
        "for name in ('ray', 'sglang', 'transformers', 'triton', 'datasets', 'hs_connectors'):\n"
        "    sys.modules[name] = None\n"
        "from ray_extract.exporters.export import Request, export\n"
        "from ray_extract.exporters.speculators_backend import ShardTransfer\n"
        f"export(Request({run.url!r}, 'specforge-eagle3', {str(tmp_path / 'a')!r}))\n"
        f"export(Request({run.url!r}, 'speculators-eagle3', {str(tmp_path / 'b')!r}, link=True))\n"
        f"assert ShardTransfer({str(tmp_path / 'b')!r}).get_cached(0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_holds_one_row_not_the_run(tmp_path, monkeypatch):
    """Every item is gone before the next one is read."""
    import weakref

    run = make_run(tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []
    real = export_module.HiddenStates.__getitem__

    def getitem(self, index):
        item = real(self, index)
        if self.states:
            alive.append(weakref.ref(item["state.2"]))
            assert sum(ref() is not None for ref in alive) <= 2
        return item

    monkeypatch.setattr(export_module.HiddenStates, "__getitem__", getitem)
    assert go(run, tmp_path / "e").exported == len(alive) == 6


def test_the_boundaries_of_the_run_are_the_ones_of_this_test():
    assert BOUNDARIES[-1] == exports.LAYERS
