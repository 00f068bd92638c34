"""Presets: a trainer's name in place of boundaries, and an error that names both where the job says otherwise."""

import json
from pathlib import Path

import pytest
from simulated import make_rows, make_work

from ray_extract import cli, run
from ray_extract.config import CaptureConfig
from ray_extract.errors import ConfigError
from ray_extract.presets import TARGETS, DraftConfig, apply_preset

LAYERS = 36


def resolve(preset: str, **fields: object) -> tuple[object, bool, str]:
    capture = apply_preset(CaptureConfig.model_validate({"preset": preset, **fields}), LAYERS)
    return capture.boundaries, capture.final, capture.keep


def draft(folder: Path, tree: object) -> str:
    (folder / "config.json").write_text(json.dumps(tree))
    return str(folder)


@pytest.mark.parametrize(
    ("preset", "boundaries", "final"),
    [
        ("specforge-eagle3", (2, 18, 33), True),
        ("specforge-dflash", (19,), False),
        ("speculators-eagle3", (2, 18, 33, 36), False),
        ("speculators-dflash", (2, 18, 33, 36), False),
    ],
)
def test_without_a_draft_config_a_preset_is_the_trainers_default(preset, boundaries, final):
    assert resolve(preset) == (boundaries, final, "all")


@pytest.mark.parametrize(
    ("preset", "tree", "boundaries", "final"),
    [
        ("specforge-eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 16, 31]}}, (2, 17, 32), True),
        ("specforge-dflash", {"dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}}, (2, 10, 18, 26, 34), False),
        ("specforge-dspark", {"dflash_config": {"target_layer_ids": [33, 1]}}, (2, 34), True),
        ("speculators-eagle3", {"eagle_aux_hidden_state_layer_ids": [3, 17, 32]}, (3, 17, 32, 36), False),
        ("speculators-dflash", {"aux_hidden_state_layer_ids": [2, 36]}, (2, 36), False),
    ],
)
def test_the_drafts_layer_ids_become_boundaries_by_the_trainers_numbering(tmp_path, preset, tree, boundaries, final):
    assert resolve(preset, draft_config=draft(tmp_path, tree)) == (boundaries, final, "all")


@pytest.mark.parametrize(
    ("preset", "tree", "told"),
    [
        (
            "specforge-eagle3",
            {"aux_hidden_state_layer_ids": [1, 2, 3]},
            "no eagle_config.eagle_aux_hidden_state_layer_ids",
        ),
        ("specforge-eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "reads 3 boundaries, not"),
        (
            "specforge-eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}},
            "must be a list of layer ids",
        ),
        ("specforge-dflash", {"dflash_config": {"target_layer_ids": [36]}}, "a model of 36 layers has no such state"),
        ("specforge-dflash", {"dflash_config": {"target_layer_ids": [3, 3]}}, "reads different boundaries"),
        ("speculators-eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, r"boundary 0 is outside 1\.\.36"),
        ("specforge-eagle3", [1, 2], "not a JSON object"),
    ],
)
def test_a_draft_config_that_does_not_fit_is_refused(tmp_path, preset, tree, told):
    with pytest.raises(ConfigError, match=told):
        resolve(preset, draft_config=draft(tmp_path, tree))


def test_a_trainer_without_default_layers_wants_its_drafts_config():
    with pytest.raises(
        ConfigError, match="specforge-dspark: this trainer has no default layers; give the draft's config"
    ):
        resolve("specforge-dspark")


@pytest.mark.parametrize(
    ("preset", "fields", "told"),
    [
        (
            "specforge-eagle3",
            {"boundaries": [2, 18]},
            r"capture\.boundaries = \[2, 18\] contradicts capture\.preset = spec",
        ),
        ("speculators-eagle3", {"boundaries": "eagle3"}, r"boundaries = eagle3 contradicts .* needs \[2, 18, 33, 36\]"),
        (
            "specforge-eagle3",
            {"final": False},
            r"capture\.final = false contradicts capture\.preset = specforge-eagle3",
        ),
        ("speculators-eagle3", {"keep": "supervised"}, r"capture\.keep = supervised contradicts .* every token"),
        ("eagle3", {}, r"capture\.preset = 'eagle3': no such preset; known: specforge-eagle3, "),
    ],
)
def test_a_setting_that_contradicts_a_preset_is_an_error_that_names_both(preset, fields, told):
    with pytest.raises(ConfigError, match=told):
        resolve(preset, **fields)


def test_a_setting_that_captures_more_than_the_preset_is_kept():
    assert resolve("specforge-eagle3", boundaries=[2, 10, 18, 33, 36]) == ((2, 10, 18, 33, 36), True, "all")
    assert resolve("speculators-eagle3", final=True) == ((2, 18, 33, 36), True, "all")


def test_a_resolved_preset_stays_as_it_is():
    once = apply_preset(CaptureConfig(preset="speculators-eagle3"), LAYERS)
    assert apply_preset(once, LAYERS) == once
    assert apply_preset(CaptureConfig.model_validate(once.model_dump(mode="json")), LAYERS) == once


def test_no_preset_changes_nothing_and_a_draft_config_alone_is_refused():
    plain = CaptureConfig()
    assert apply_preset(plain, LAYERS) is plain
    with pytest.raises(ConfigError, match=r"is read for a preset; set capture\.preset to one of specforge-eagle3"):
        apply_preset(CaptureConfig(draft_config="x"), LAYERS)


def test_every_preset_names_a_trainer_and_a_strategy():
    assert list(TARGETS) == [f"{t.trainer}-{t.strategy}" for t in TARGETS.values()]


def test_a_draft_config_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"draft config .*nowhere: cannot be read"):
        DraftConfig.read(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        DraftConfig.read(str(tmp_path))


def test_the_identity_of_a_run_is_the_boundaries_not_the_preset(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_extract", lambda *_: (0, 0.0))
    work = make_work(tmp_path, make_rows(3))
    by_name = run.prepare_run(work.job("capture.preset=specforge-eagle3")).ledger.identity()
    by_list = run.prepare_run(work.job("capture.boundaries=[2,4,5]")).ledger.identity()
    assert by_name == by_list and by_name.capture["boundaries"] == [2, 4, 5]


def test_plan_and_run_take_the_preset_as_a_flag(tmp_path, capsys):
    work = make_work(tmp_path, make_rows(3))
    assert cli.main(["plan", "--preset", "speculators-eagle3", *work.args()]) == 0
    assert "captures  2, 4, 5, 8\n" in capsys.readouterr().out
    wrong = [*work.args(), "--preset", "specforge-eagle3", "--draft-config", "no where.json"]
    for main, args in ((cli.main, ["run", *wrong]), (run.main, wrong)):
        assert main(args) == 2
        assert "error: draft config no where.json: cannot be read" in capsys.readouterr().err
