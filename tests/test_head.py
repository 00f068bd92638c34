"""The target's head beside the shards: right for each layout of a checkpoint, written once, left out with a reason."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from outputs import make_output
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ray_extract import checkpoint, head, layout
from ray_extract.checkpoint import NotPlain, find_head
from ray_extract.config import Job
from ray_extract.errors import ConfigError, NotFound, ShardError
from ray_extract.head import write_head
from ray_extract.model import ModelShape, describe_model
from ray_extract.readers.head import load_head, load_token_counts
from ray_extract.store import Store, open_store
from ray_extract.tensors import WRITTEN_AGAIN
from ray_extract.verify import verify

VOCAB, HIDDEN = 50, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": HIDDEN,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
}


def weights(*, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Tensors of a small checkpoint that is not tied."""
    made = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_norm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}


def save(folder: Path, *files: dict[str, torch.Tensor]) -> Path:
    """A checkpoint, with an index if there are several files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors")
        return folder
    index = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"part-{number}.safetensors")
        index |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def job_of(folder: Path, **sections: Any) -> tuple[Job, ModelShape]:
    """A job with this model, and the model."""
    tree: dict[str, Any] = {"dataset": {"paths": "rows.jsonl"}, "output": {"url": str(folder / "out")}}
    job = Job.model_validate({**tree, **sections, "model": {"path": str(folder), **sections.get("model", {})}})
    return job, describe_model(job.model)


def written(folder: Path, store: Store | None = None, **sections: Any) -> bool:
    """Write the head of a checkpoint to `folder`/out."""
    job, shape = job_of(folder, **sections)
    return write_head(store or open_store(job.output.url), job, shape)


def test_what_is_stored_is_the_checkpoints_bit_for_bit(tmp_path: Path) -> None:
    tensors = weights()
    assert written(save(tmp_path, tensors))
    found = load_head(str(tmp_path / "out"), check=True)
    assert not found.tied and found.config == CONFIG
    for name, key in (
        ("lm_head", "lm_head.weight"),
        ("embed_tokens", "model.embed_tokens.weight"),
        ("norm", "model.norm.weight"),
    ):
        assert getattr(found, name).dtype == torch.bfloat16
        assert torch.equal(getattr(found, name), tensors[key])


def test_anything_that_reads_safetensors_reads_it(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()  # wider, so first in the file
    written(save(tmp_path, tensors))
    file = tmp_path / "out" / layout.HEAD_KEY
    assert {k: v.dtype for k, v in load_file(file).items()} == {
        "norm": torch.float32,
        "lm_head": torch.bfloat16,
        "embed_tokens": torch.bfloat16,
    }
    with safe_open(file, framework="pt") as opened:
        assert torch.equal(opened.get_tensor("norm"), tensors["model.norm.weight"])
        assert json.loads(opened.metadata()["config"]) == CONFIG


def test_a_tied_head_is_stored_once_and_says_so(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["lm_head.weight"]
    written(save(tmp_path, tensors))
    found = load_head(str(tmp_path / "out"))
    assert found.tied and found.lm_head is found.embed_tokens
    assert torch.equal(found.lm_head, tensors["model.embed_tokens.weight"])
    assert set(load_file(tmp_path / "out" / layout.HEAD_KEY)) == {"lm_head", "norm"}


def test_a_wrapped_model_in_several_files_is_found_whatever_surrounds_its_text_model(tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": tensor for name, tensor in weights().items()}
    other = {
        "vision_tower.norm.weight": torch.ones(8),
        "language_model.model.layers.61.embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
        "language_model.model.layers.61.shared_head.head.weight": torch.ones(VOCAB, HIDDEN),
        "language_model.model.layers.61.shared_head.norm.weight": torch.ones(HIDDEN),
    }
    items = list(tensors.items())
    written(save(tmp_path, dict(items[:2]), dict(items[2:]), other))
    found = load_head(str(tmp_path / "out"), check=True)
    assert torch.equal(found.norm, tensors["language_model.model.norm.weight"])
    assert torch.equal(found.embed_tokens, tensors["language_model.model.embed_tokens.weight"])
    assert torch.equal(found.lm_head, tensors["language_model.lm_head.weight"])


def test_it_gives_the_logits_of_transformers(tmp_path: Path, checkpoints: Path) -> None:
    folder = tiny_model("llama", checkpoints)
    job, shape = job_of(folder, output={"url": str(tmp_path / "out")})
    write_head(open_store(job.output.url), job, shape)
    found = load_head(job.output.url)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        out = model(ids, output_hidden_states=True)
    torch.testing.assert_close(out.hidden_states[-1][0] @ found.lm_head.T, out.logits[0])
    torch.testing.assert_close(found.embed_tokens[ids], out.hidden_states[0], rtol=0, atol=0)


def test_an_object_store_gets_it_in_pieces_and_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_BLOCK", 100)
    tensors = weights(dtype=torch.float32)
    url = f"memory://{tmp_path.name}/head"
    written(save(tmp_path, tensors), open_store(url))
    found = load_head(url, check=True)
    assert torch.equal(found.lm_head, tensors["lm_head.weight"])
    assert torch.equal(found.norm, tensors["model.norm.weight"])


def test_a_second_run_finds_it_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(save(tmp_path, weights()))
    file = tmp_path / "out" / layout.HEAD_KEY
    before = file.stat().st_mtime_ns
    monkeypatch.setattr(head, "_blocks", None)  # nothing of the checkpoint is read for it
    assert written(tmp_path)
    assert file.stat().st_mtime_ns == before


def test_of_two_drivers_at_once_the_first_ones_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(save(tmp_path, weights()))
    file = tmp_path / "out" / layout.HEAD_KEY
    before = file.stat().st_ino
    store = open_store(str(tmp_path / "out"))
    answers = [None]  # the second one looks before the first one is done
    real = store.head
    monkeypatch.setattr(store, "head", lambda key: answers.pop() if answers else real(key))
    assert written(tmp_path, store)
    assert file.stat().st_ino == before


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "out"))
    written(save(tmp_path / "a", weights()), store)
    save(tmp_path / "b", {name: tensor + 1 for name, tensor in weights().items()})
    with pytest.raises(ShardError, match=r"head\.safetensors: of another model than the run's; delete it"):
        written(tmp_path / "b", store)


def quantized(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight_packed"] = tensors.pop("lm_head.weight").to(torch.int8)


def eight_bits(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)


def with_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.bias"] = torch.zeros(VOCAB)


def another_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.final_layernorm.weight"] = tensors.pop("model.norm.weight")


def two_embeddings(tensors: dict[str, torch.Tensor]) -> None:
    tensors["decoder.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)


def norm_with_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.bias"] = torch.zeros(HIDDEN)


def odd_shapes(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = torch.zeros(VOCAB + 1, HIDDEN)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (quantized, "its LM head is stored as lm_head.weight_packed"),
        (eight_bits, "its model.embed_tokens.weight is stored as F8_E4M3"),
        (with_bias, "its LM head is stored as lm_head.bias, lm_head.weight"),
        (another_norm, "it has no model.norm.weight"),
        (norm_with_bias, "its model.norm.weight has a bias beside it"),
        (two_embeddings, "it has 2 embeddings: decoder.embed_tokens.weight, model.embed_tokens.weight"),
        (odd_shapes, "the shapes of its LM head, embedding and final norm are (51, 16), (50, 16), (16,)"),
    ],
)
def test_a_head_that_is_not_plain_is_left_out_and_the_log_says_why(
    change: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = weights()
    change(tensors)
    save(tmp_path, tensors)
    with pytest.raises(NotPlain):
        find_head(tmp_path)
    with caplog.at_level(logging.INFO, "ray_extract.head"):
        assert not written(tmp_path)
    assert reason in caplog.text


def test_without_a_head_the_error_says_why_and_where_to_take_it_from(tmp_path: Path) -> None:
    output = make_output(tmp_path)
    with pytest.raises(
        NotFound, match=r"out: no head\.safetensors: .*the run stores none.*take it from the checkpoint"
    ):
        load_head(output.url)
    for load in (load_head, load_token_counts):
        with pytest.raises(NotFound, match=r"nowhere: no run\.json; name the output\.url of a run"):
            load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("old", "new"), [(b'"architecture"', b'"architecture'), (b'"norm"', b'"nor0"'), (b'"BF16"', b'"BF17"')]
)
def test_a_damaged_header_is_an_error_with_the_way_out(old: bytes, new: bytes, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "out"))
    written(save(tmp_path / "model", weights()), store)
    file = tmp_path / "out" / layout.HEAD_KEY
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))
    with pytest.raises(ShardError, match=r"out/head\.safetensors: damaged: .*; delete it and run the same command"):
        load_head(store.url)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"model": {"load_format": "dummy"}}, "random"),
        ({"engine": {"kind": "simulated"}}, "made up"),
        ({"output": {"url": "out", "head": False}}, ""),
    ],
)
def test_states_that_are_not_the_checkpoints_have_no_head(
    sections: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, weights())
    store = open_store(str(tmp_path / "out"))
    with caplog.at_level(logging.INFO, "ray_extract.head"):
        assert not written(tmp_path, store, **sections)
    assert reason in caplog.text and store.head(layout.HEAD_KEY) is None


def test_a_damaged_checkpoint_names_the_file(tmp_path: Path) -> None:
    tensors = weights()
    first = {name: tensors.pop(name) for name in list(tensors)[:2]}
    save(tmp_path, first, tensors)
    file = tmp_path / "part-1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.path: .*part-1\.safetensors: .*bytes, and its header says .*again"):
        find_head(tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .*part-1\.safetensors: cannot be read .*finish the download"):
        find_head(tmp_path)


def test_verify_reads_it_too(tmp_path: Path) -> None:
    output = make_output(tmp_path, hidden=HIDDEN)
    folder = save(tmp_path / "model", weights())
    job, shape = job_of(folder)
    object.__setattr__(shape, "fingerprint", "0" * 64)  # that of the output
    write_head(output.store, job, shape)
    assert verify(output.url).ok
    file = tmp_path / "out" / layout.HEAD_KEY
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert verify(output.url).problems == [
        f"{layout.HEAD_KEY}: its bytes are not those that were written; {WRITTEN_AGAIN}"
    ]
    with pytest.raises(ShardError, match="its bytes are not those that were written"):
        load_head(output.url, check=True)
    file.write_bytes(data[:-1])
    (problem,) = verify(output.url).problems
    assert "head.safetensors: damaged" in problem
    file.unlink()
    object.__setattr__(shape, "fingerprint", "1" * 64)
    write_head(output.store, job, shape)
    assert verify(output.url).problems == [f"{layout.HEAD_KEY}: of another model than the run's; {WRITTEN_AGAIN}"]
