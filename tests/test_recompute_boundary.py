"""Recomputing as far as a boundary: the states are those of the whole model, and nothing above it is touched."""

import collections
import functools
import json
import re

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from models import HIDDEN, LAYERS, VOCAB, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, Qwen3Config

from ray_extract import reference_model
from ray_extract.errors import ConfigError
from ray_extract.recompute import StoredRow, state_errors
from ray_extract.reference_model import unpacked

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "sliding", "wrapper", "packed")
DENSE, EXPERTS = 128, 32
INDEX = "model.safetensors.index.json"
GROUP = 16


def seeded(config, folder):
    """Save a random model whose layers change the stream by about its own size."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def deepseek(folder):
    return seeded(
        DeepseekV3Config(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=DENSE,
            moe_intermediate_size=EXPERTS,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=2,
            first_k_dense_replace=1,
            rope_scaling=None,
            initializer_range=HIDDEN**-0.5,
        ),
        folder,
    )


def sliding(folder):
    """A model with an entry for each layer in its configuration."""
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"] * (LAYERS // 4)
    return seeded(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=DENSE,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=kinds,
            initializer_range=HIDDEN**-0.5,
        ),
        folder,
    )


def in_shards(plain, folder, rename=lambda name: name, tensors=None, config=None):
    """Write a checkpoint again with a file for each layer and one for all else, named as a larger model's are."""
    files = collections.defaultdict(dict)
    for name, tensor in (tensors or load_file(plain / "model.safetensors")).items():
        layer = re.search(r"\blayers\.(\d+)\.", name)
        key = f"layer-{layer[1]}" if layer else name.split(".")[-2].replace("embed_tokens", "embeddings")
        files[f"{key}.safetensors"][rename(name)] = tensor
    folder.mkdir(parents=True)
    for file, content in files.items():
        save_file(content, folder / file, {"format": "pt"})
    index = {name: file for file, content in files.items() for name in content}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config or json.loads((plain / "config.json").read_text())))
    return folder


def wrapped(plain, folder, quantization=None, tensors=None):
    """A checkpoint like Kimi-K2.5's: its own class around DeepSeek's, under other names, and a vision tower."""
    tensors = dict(tensors or load_file(plain / "model.safetensors"))
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.encoder.layers.0.weight"] = torch.ones(4)
    text = json.loads((plain / "config.json").read_text())
    text |= {"model_type": "kimi_k2", "quantization_config": quantization}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "text_config": text,
    }
    return in_shards(plain, folder, tensors=tensors, config=config)


def packed(tensors):
    """Routed experts in four bits as compressed-tensors packs them, and the same in fp32."""
    stored, exact = {}, {}
    for name, weight in tensors.items():
        if ".experts." not in name:
            stored[name] = exact[name] = weight
            continue
        groups = weight.unflatten(1, (-1, GROUP))
        scale = (groups.abs().amax(-1) / 7).bfloat16()
        values = (groups / scale.float()[..., None]).round().clamp(-8, 7)
        exact[name] = (values * scale.float()[..., None]).flatten(1)
        stem = name.removesuffix(".weight")
        stored[f"{stem}.weight_packed"] = pack_to_int32(values.flatten(1).to(torch.int8), 4)
        stored[f"{stem}.weight_scale"] = scale
        stored[f"{stem}.weight_shape"] = torch.tensor(weight.shape)
    return stored, exact


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            "input_activations": None,
        }
    },
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """For each family: a checkpoint in shards, and one that Transformers loads whole."""
    root = tmp_path_factory.mktemp("boundary")
    made = {}
    for family in ("llama", "qwen3_moe"):
        plain = tiny_model(family, root)
        made[family] = in_shards(plain, root / family), plain
    plain = sliding(root / "plain-sliding")
    made["sliding"] = in_shards(plain, root / "sliding"), plain
    plain = deepseek(root / "plain-deepseek")
    made["deepseek_v3"] = in_shards(plain, root / "deepseek_v3"), plain
    made["wrapper"] = wrapped(plain, root / "wrapper"), plain
    stored, exact = packed(load_file(plain / "model.safetensors"))
    whole = root / "plain-packed"
    whole.mkdir()
    save_file(exact, whole / "model.safetensors", {"format": "pt"})
    (whole / "config.json").write_bytes((plain / "config.json").read_bytes())
    made["packed"] = wrapped(plain, root / "packed", INT4, stored), whole
    return made


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models as small as these only wait for their threads where other processes compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.lru_cache(maxsize=4)
def whole_model(plain, dtype):
    return AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)


def stored_rows(plain, boundaries, dtype=torch.float32, shift=0):
    """What a right capture stores; `shift` takes the states of another boundary."""
    model = whole_model(plain, dtype)
    rng = np.random.default_rng(0)
    rows = []
    for length in (1, 9, 40):
        ids = rng.integers(0, VOCAB, length, dtype=np.int32)
        with torch.inference_mode():
            states = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
        positions = np.arange(0, length, 2)
        rows.append(
            StoredRow(
                ids,
                positions,
                {f"state.{b}": states[b + shift][0][torch.from_numpy(positions)].clone() for b in boundaries},
            )
        )
    return rows


def remove_above(folder, boundary):
    """Delete the files of what a check at this boundary must not need."""
    for file in folder.glob("*.safetensors"):
        layer = re.fullmatch(r"layer-(\d+)", file.stem)
        if (layer and int(layer[1]) >= boundary) or not (layer or file.stem == "embeddings"):
            file.unlink()


@pytest.fixture
def copy(pairs, tmp_path):
    """A function that copies a family's checkpoint, to be damaged."""

    def make(family):
        folder = tmp_path / family
        folder.mkdir()
        for file in pairs[family][0].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("boundary", [0, 1, 2, LAYERS - 1])
def test_right_states_pass_with_what_is_below_alone(pairs, copy, family, boundary):
    _, plain = pairs[family]
    folder = copy(family)
    remove_above(folder, boundary)
    (error,) = state_errors(stored_rows(plain, [boundary]), str(folder), layers=boundary)
    assert error.ok and error.max < 2e-6 and error.tokens == 1 + 5 + 20


@pytest.mark.parametrize("family", FAMILIES)
def test_several_boundaries_in_one_pass_and_in_bf16(pairs, family):
    folder, plain = pairs[family]
    errors = state_errors(stored_rows(plain, [1, 3, 4], torch.bfloat16), str(folder), layers=4)
    assert [error.name for error in errors] == ["state.1", "state.3", "state.4"]
    assert all(error.ok and 0 < error.reference_p50 < 0.1 for error in errors)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_other_layers_fail(pairs, family, dtype):
    folder, plain = pairs[family]
    assert not any(e.ok for e in state_errors(stored_rows(plain, [2, 3], dtype, shift=-1), str(folder), layers=3))


def test_the_state_after_the_last_layer_is_before_the_norm(pairs):
    folder, plain = pairs["llama"]
    with_norm = stored_rows(plain, [LAYERS])
    assert not state_errors(with_norm, str(folder), layers=LAYERS)[0].ok
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.model.norm = torch.nn.Identity()
    model.save_pretrained(folder.parent / "without-norm")
    for row in with_norm:
        with torch.inference_mode():
            states = model(torch.from_numpy(row.input_ids.astype(np.int64))[None], output_hidden_states=True)
        row.states[f"state.{LAYERS}"][:] = states.hidden_states[-1][0][torch.from_numpy(row.positions)]
    assert state_errors(with_norm, str(folder), layers=LAYERS)[0].ok
    assert state_errors(with_norm, str(plain))[0].ok  # the whole model, whose norm's input it is


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_else_is_opened_read_or_allocated(pairs, family, monkeypatch):
    folder, plain = pairs[family]
    opened, read = set(), collections.Counter()
    real_open, real_read = reference_model.safe_open, reference_model._Weights.read
    monkeypatch.setattr(reference_model, "safe_open", lambda p, **kw: (opened.add(p.stem), real_open(p, **kw))[1])
    monkeypatch.setattr(reference_model._Weights, "read", lambda self, n: (read.update([n]), real_read(self, n))[1])
    model = reference_model.load_below(str(folder), 2, torch.float32)
    assert opened == {"embeddings", "layer-0", "layer-1"}
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    below = {n for n in names if "embed_tokens" in n or re.search(r"(?<!encoder\.)layers\.[01]\.", n)}
    assert read == collections.Counter(below)
    whole = AutoModelForCausalLM.from_pretrained(plain).model
    parts = [whole.embed_tokens, whole.layers[0], whole.layers[1]]
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for m in parts for p in m.parameters())
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def index_without(folder, name):
    record = json.loads((folder / INDEX).read_text())
    assert record["weight_map"].pop(name)
    (folder / INDEX).write_text(json.dumps(record))


def rewrite(folder, file, change):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
Q_NORM = "model.layers.1.self_attn.q_norm.weight"
DAMAGES = {
    "a file": (
        lambda f: (f / "layer-1.safetensors").unlink(),
        r"layer-1\.safetensors is missing, and model\.layers\.1",
    ),
    "cut": (lambda f: (f / "layer-1.safetensors").write_bytes(b"\x08\0\0\0"), r"layer-1\.safetensors is damaged"),
    "a tensor": (
        lambda f: rewrite(f, "layer-1.safetensors", lambda t: t.pop(EXPERT)),
        rf"layer-1\.safetensors lacks {re.escape(EXPERT)}",
    ),
    "unlisted": (lambda f: index_without(f, Q_NORM), r"not in the checkpoint, such as layers\.1\.self_attn\.q_norm"),
    "an expert unlisted": (lambda f: index_without(f, EXPERT), re.escape(EXPERT) + " is not in the checkpoint"),
    "experts of another shape": (
        lambda f: rewrite(f, "layer-1.safetensors", lambda t: t.update({EXPERT: torch.ones(7, HIDDEN)})),
        "Transformers cannot load it",
    ),
    "another shape": (
        lambda f: rewrite(f, "layer-1.safetensors", lambda t: t.update({Q_NORM: torch.ones(7)})),
        r"of another shape in the checkpoint, such as layers\.1\.self_attn\.q_norm",
    ),
    "no index": (lambda f: (f / INDEX).unlink(), "neither model.safetensors nor"),
    "a broken index": (lambda f: (f / INDEX).write_text("[]"), "is not readable"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json cannot be read"),
    "a broken config": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json is not a JSON object"),
    "a wrong field": (
        lambda f: (f / "config.json").write_text('{"model_type": "qwen3_moe", "hidden_size": "x"}'),
        "cannot build its text model",
    ),
    "an unknown class": (
        lambda f: (f / "config.json").write_text('{"model_type": "novel", "architectures": ["NovelForCausalLM"]}'),
        "knows neither model_type = 'novel' nor the architecture 'NovelForCausalLM'",
    ),
    "no architecture": (lambda f: (f / "config.json").write_text("{}"), "knows neither model_type = None"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_or_wrong_is_named(pairs, copy, damage):
    folder = copy("qwen3_moe")
    change, told = DAMAGES[damage]
    change(folder)
    with pytest.raises(ConfigError, match=told) as caught:
        reference_model.load_below(str(folder), 2, torch.float32)
    assert str(folder) in str(caught.value)


def test_a_layout_that_it_does_not_know_is_refused(tmp_path):
    seeded(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2), tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="GPT2Model is not; recompute without it"):
        reference_model.load_below(str(tmp_path / "gpt2"), 1, torch.float32)


def test_a_boundary_above_the_model_is_refused(pairs):
    with pytest.raises(ConfigError, match="boundary 9: this checkpoint has 8 layers, so it is another model"):
        reference_model.load_below(str(pairs["llama"][0]), LAYERS + 1, torch.float32)


def test_two_text_models_are_refused(pairs, copy):
    folder = copy("llama")
    record = json.loads((folder / INDEX).read_text())
    record["weight_map"] |= {f"talker.{name}": file for name, file in record["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"under 'model\.', 'talker\.model\.'"):
        reference_model.load_below(str(folder), 1, torch.float32)


def other(**weights):
    group = INT4["config_groups"]["group_0"]
    return INT4 | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        INT4 | {"format": "float-quantized"},
        INT4 | {"config_groups": {}},
        other(symmetric=False),
        other(num_bits=3),
        other(actorder="group"),
        INT4
        | {"config_groups": {"group_0": INT4["config_groups"]["group_0"] | {"input_activations": {"num_bits": 8}}}},
    ],
)
@pytest.mark.parametrize("family", ["llama", "wrapper"])
def test_other_quantization_is_refused(copy, family, quantization):
    folder = copy(family)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantized by .*which --boundary cannot turn into fp32"):
        reference_model.load_below(str(folder), 1, torch.float32)


@pytest.mark.parametrize("experts", [[3], range(8)])
def test_a_packed_weight_without_its_scale_is_named(copy, experts):
    folder = copy("packed")
    names = [f"language_model.model.layers.1.mlp.experts.{i}.up_proj.weight_scale" for i in experts]
    for name in names:
        index_without(folder, name)
    with pytest.raises(ConfigError, match=re.escape(names[0])):
        reference_model.load_below(str(folder), 2, torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("width", "groups"), [(64, 4), (64, 1), (24, 3), (12, 1)])
def test_unpacking_undoes_packing(bits, width, groups):
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(-(1 << bits - 1), 1 << bits - 1, (5, width), dtype=np.int8))
    scale = torch.from_numpy(rng.standard_normal((5, groups), dtype=np.float32)).bfloat16()
    wanted = values.unflatten(1, (groups, -1)).float() * scale.float()[..., None]
    assert torch.equal(unpacked(pack_to_int32(values, bits), scale, width), wanted.flatten(1))


def test_too_little_memory_is_said_before_loading(pairs, monkeypatch):
    folder, plain = pairs["llama"]
    rows = stored_rows(plain, [1, 2])
    monkeypatch.setattr(reference_model, "_free_memory", lambda: [("host", 600_000)])
    with pytest.raises(ConfigError, match=r"the model takes .* in float32, and .* of host memory.*name a --boundary B"):
        state_errors(rows, str(plain))
    # Half a megabyte of embeddings and two layers fit where eight layers do not.
    assert all(e.ok for e in state_errors(rows, str(folder), layers=2))
    monkeypatch.setattr(reference_model, "_free_memory", lambda: [("host", 1 << 30), ("GPU", 100_000)])
    with pytest.raises(ConfigError, match=r"below boundary 2 takes .*of GPU memory are free; take a lower --boundary"):
        state_errors(rows, str(folder), layers=2)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError(), RuntimeError("[...] DefaultCPUAllocator: no")],
)
def test_running_out_of_memory_names_the_way_out(pairs, monkeypatch, error):
    folder, plain = pairs["llama"]
    rows = stored_rows(plain, [1])

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", fail)
    with pytest.raises(ConfigError, match=r"out of memory in float32.*name a --boundary B of the run"):
        state_errors(rows, str(plain))
    with pytest.raises(ConfigError, match=r"out of memory in float32.*take a lower --boundary"):
        state_errors(rows, str(folder), layers=1)
