"""What is read from a checkpoint's folder, what its fingerprint notices, and what a wrong folder is answered with."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from ray_extract.config import ModelConfig
from ray_extract.errors import ConfigError
from ray_extract.model import SAMPLE_BYTES, describe_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 2048,
    "vocab_size": 300,
}


def checkpoint(folder, config=CONFIG, elements=300_000):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        save_file({"w": np.arange(elements, dtype=np.float32)}, folder / f"{name}.safetensors")
    return folder


def describe(folder, **options):
    return describe_model(ModelConfig(path=str(folder), **options))


def test_shape_of_a_plain_model(tmp_path):
    shape = describe(checkpoint(tmp_path / "m"))
    files = (tmp_path / "m").glob("*.safetensors")
    assert dataclasses.asdict(shape) | {"fingerprint": ""} == {
        "weight_bytes": sum(path.stat().st_size for path in files),
        "path": str(tmp_path / "m"),
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "num_layers": 4,
        "hidden": 64,
        "dtype": "bfloat16",
        "context_length": 2048,
        "vocab_size": 300,
        "fingerprint": "",
    }
    assert len(shape.fingerprint) == 64


def test_shape_of_a_multimodal_model_is_its_language_models(tmp_path):
    text = {k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")} | {"dtype": "float16"}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "hidden_size": 1152,
        "text_config": text | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
    }
    shape = describe(checkpoint(tmp_path, config))
    assert (shape.architecture, shape.model_type) == ("KimiK25ForConditionalGeneration", "kimi_k25")
    assert (shape.hidden, shape.num_layers, shape.dtype) == (64, 4, "float16")


def test_configured_dtype_wins_over_the_checkpoints(tmp_path):
    config = {k: v for k, v in CONFIG.items() if k != "torch_dtype"}
    assert describe(checkpoint(tmp_path, config), dtype="float32").dtype == "float32"


def test_fingerprint_ignores_the_place_and_other_files(tmp_path):
    first = describe(checkpoint(tmp_path / "a")).fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "c")
    (tmp_path / "b" / "c" / "README.md").write_text("moved")
    assert describe(tmp_path / "b" / "c").fingerprint == first


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [-1, -SAMPLE_BYTES, 600_000, 100])
def test_fingerprint_notices_changed_weights(tmp_path, at):
    first = describe(checkpoint(tmp_path)).fingerprint
    _flip(tmp_path / "model-00002-of-00002.safetensors", at)
    assert describe(tmp_path).fingerprint != first


def test_fingerprint_notices_changed_config_and_renamed_or_removed_files(tmp_path):
    prints = {describe(checkpoint(tmp_path)).fingerprint}
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00003-of-00002.safetensors")
    prints.add(describe(tmp_path).fingerprint)
    (tmp_path / "model-00003-of-00002.safetensors").unlink()
    prints.add(describe(tmp_path).fingerprint)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 1.0}))
    prints.add(describe(tmp_path).fingerprint)
    assert len(prints) == 4


def test_dummy_weights_need_no_files(tmp_path):
    checkpoint(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert describe(tmp_path, load_format="dummy").fingerprint
    with pytest.raises(ConfigError, match=r"model\.path = .*no \*\.safetensors.*model\.load_format = dummy"):
        describe(tmp_path)


def test_missing_weight_file_of_the_index_is_named(tmp_path):
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00009-of-00009.safetensors"}
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match=r"model-00009-of-00009\.safetensors; finish the download"):
        describe(tmp_path)


def test_lfs_pointer_is_no_weight_file(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"no config\.json in it"),
        ("{", r"config\.json is not valid JSON"),
        ("[]", "not a JSON object"),
        (json.dumps({**CONFIG, "hidden_size": "64"}), "hidden_size .* is '64'; it must be a positive whole number"),
        (json.dumps({**CONFIG, "num_hidden_layers": True}), "num_hidden_layers .* is True"),
        (json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}), r"vocab_size in config\.json is missing"),
        (json.dumps({**CONFIG, "architectures": []}), "architectures"),
        (json.dumps({k: v for k, v in CONFIG.items() if k != "torch_dtype"}), r"set model\.dtype to one of"),
        (json.dumps({**CONFIG, "torch_dtype": "int8"}), "'int8'; set model.dtype"),
    ],
)
def test_unusable_config_is_explained(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        describe(tmp_path, load_format="dummy")
    assert "model.path = " in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "a/b/c"])
def test_missing_folder_is_not_looked_up_on_a_hub(path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match=r"model\.path = .*no such folder"):
        describe(path)


def test_hub_name_without_a_hub_is_a_config_error(monkeypatch):
    def offline(*_, **__):
        raise OSError("cannot reach the hub\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"model\.path = 'org/name'.*OSError: cannot reach the hub\); give a local"):
        describe("org/name")


def test_hub_name_is_resolved_to_its_snapshot(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(folder))
    assert describe("org/name") == describe(folder)
