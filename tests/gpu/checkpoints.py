"""Small seeded checkpoints of shapes that GPU kernels accept, and their states by Transformers in fp32 and bf16.

Those that Transformers cannot load, or would compute otherwise, hold a plain copy of their text model in `reference/`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 4096
LAYERS = 8
HIDDEN = 1024
CONTEXT = 32768

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 2048,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "initializer_range": HIDDEN**-0.5,
}
_GROUPED: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
_LATENT: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    # SGLang reads these; Transformers has no such fields of its own
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k25", "qwen3_fp8", "qwen3_int4", "kimi_k25_int4")

# Of the int4 families: the size of a group, what the names of quantized weights hold, and the `ignore` of the config
# that says the same. Kimi-K2.5 quantizes its routed experts only; group and patterns are those of its config.json.
_INT4 = {
    "qwen3_int4": (128, "_proj.weight", ["lm_head"]),
    "kimi_k25_int4": (
        32,
        ".mlp.experts.",
        ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    ),
}


def _config(family: str) -> PretrainedConfig:
    match family:
        case "llama":
            return LlamaConfig(**_COMMON, **_GROUPED)
        case "qwen3" | "qwen3_fp8" | "qwen3_int4":
            return Qwen3Config(**_COMMON, **_GROUPED)
        case "qwen3_moe":
            return Qwen3MoeConfig(**_COMMON, **_GROUPED, **_EXPERTS, num_experts=8)
        case "deepseek_v3":
            return DeepseekV3Config(
                **_COMMON, **_EXPERTS, **_LATENT, n_group=2, topk_group=2, routed_scaling_factor=1.0
            )
        case "kimi_k25" | "kimi_k25_int4":  # routes without groups, and scales
            return DeepseekV3Config(
                **_COMMON, **_EXPERTS, **_LATENT, n_group=1, topk_group=1, routed_scaling_factor=2.827
            )
    raise ValueError(f"{family}: not one of {', '.join(FAMILIES)}")


def checkpoint(family: str, root: Path) -> Path:
    """Folder of a seeded checkpoint in bf16, or of fp8 or int4 weights with the rest in bf16."""
    target = root / family
    if target.exists():
        return target
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    kimi, fp8, int4 = family.startswith("kimi"), family.endswith("_fp8"), family in _INT4
    plain = target / "reference" if kimi or fp8 or int4 else target
    model.to(torch.bfloat16).save_pretrained(plain)
    if plain == target:
        return target
    config = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    if fp8:
        config["quantization_config"] = _FP8_CONFIG
        tensors, exact = _fp8(tensors)
        save_file(exact, plain / "model.safetensors", {"format": "pt"})
    if int4:
        size, part, ignore = _INT4[family]
        config["quantization_config"] = _int4_config(size, ignore)
        tensors, exact = _int4(tensors, size, part)
        save_file(exact, plain / "model.safetensors", {"format": "pt"})
    if kimi:
        config, tensors = _kimi(config, tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def _int4_config(size: int, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config that compressed-tensors writes for W4A16."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _int4(
    tensors: dict[str, torch.Tensor], size: int, part: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Quantize the weights whose names have `part`: the packed tensors, and the plain ones that they stand for.

    Scales are cut to five significant bits, so that every product with a 4-bit number is exact in bf16 and no order in
    which a kernel multiplies is nearer to the reference than another.
    """
    packed, exact = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if part not in name:
            continue
        rows, columns = weight.shape
        groups = weight.float().view(rows, columns // size, size)
        mantissa, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True) / 7.5)
        scale = torch.ldexp((mantissa * 32).round() / 32, exponent)
        steps = (groups / scale).round().clamp(-8, 7)
        exact[name] = (steps * scale).view_as(weight).bfloat16()
        # eight to an int32, the first in the lowest bits, each with 8 added
        nibbles = (steps.to(torch.int32) + 8).view(rows, columns // 8, 8)
        words = (nibbles << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
        del packed[name]
        stem = name.removesuffix("weight")
        packed[f"{stem}weight_packed"] = words
        packed[f"{stem}weight_scale"] = scale.squeeze(-1).bfloat16()
        packed[f"{stem}weight_shape"] = torch.tensor([rows, columns])
    return packed, exact


# DeepSeek-V3's and Qwen3's own: blocks of weights, and activations quantized as they come.
_BLOCK = 128
_FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [_BLOCK, _BLOCK],
}


def _fp8(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Quantize the projections: e4m3 tensors with a scale a block, and the plain ones that they stand for.

    Scales are powers of two, so that every value is exact in bf16.
    """
    quantized, exact = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj.weight" not in name:
            continue
        rows, columns = (size // _BLOCK for size in weight.shape)
        blocks = weight.float().view(rows, _BLOCK, columns, _BLOCK)
        scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).log2().ceil().exp2()
        codes = (blocks / scale).to(torch.float8_e4m3fn)
        exact[name] = (codes.float() * scale).view_as(weight).bfloat16()
        quantized[name] = codes.view_as(weight)
        quantized[f"{name}_scale_inv"] = scale.view(rows, columns)
    return quantized, exact


def quantize_inputs(values: torch.Tensor) -> torch.Tensor:
    """What an fp8 product reads: e4m3 with one scale for each 128 values of a token, of the size that reaches 448.

    SGLang's per_token_group_quant_fp8 (0.5.16 `layers/quantization/fp8_kernel.py`).
    """
    groups = values.float().unflatten(-1, (-1, _BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(values.dtype)


def _kimi(text: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A text model as part of Kimi-K2.5: its config.json and tensors, with a vision tower of one small layer.

    Names and fields are those of moonshotai/Kimi-K2.5, which SGLang's models/kimi_k25.py and configs/kimi_k25.py read.
    SGLang takes the projector's width from `vt_hidden_size` and the tower's from `hidden_size`.
    """
    width, side = 64, 4
    tower = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "media_placeholder_token_id": VOCAB - 1,
        "text_config": {**text, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
        "vision_config": {
            **tower,
            **{f"vt_{name}": value for name, value in tower.items()},
            "mm_hidden_size": width,
            "text_hidden_size": HIDDEN,
            "patch_size": 14,
            "init_pos_emb_height": side,
            "init_pos_emb_width": side,
            "init_pos_emb_time": 4,
            "merge_kernel_size": [2, 2],
        },
    }
    block = "vision_tower.encoder.blocks.0"
    vision = {
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (side, side, width),
        f"{block}.wqkv.weight": (3 * width, width),
        f"{block}.wqkv.bias": (3 * width,),
        f"{block}.wo.weight": (width, width),
        f"{block}.wo.bias": (width,),
        f"{block}.mlp.fc0.weight": (2 * width, width),
        f"{block}.mlp.fc0.bias": (2 * width,),
        f"{block}.mlp.fc1.weight": (width, 2 * width),
        f"{block}.mlp.fc1.bias": (width,),
        "mm_projector.proj.0.weight": (4 * width, 4 * width),
        "mm_projector.proj.0.bias": (4 * width,),
        "mm_projector.proj.2.weight": (HIDDEN, 4 * width),
        "mm_projector.proj.2.bias": (HIDDEN,),
    }
    norms = (f"{block}.norm0", f"{block}.norm1", "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm")
    vision |= {f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    return config, named | {name: 0.1 * torch.randn(shape).bfloat16() for name, shape in vision.items()}


class Reference:
    """A checkpoint in Transformers on the GPU; the fp32 one runs on the weights as bf16 stores them.

    Where the engine quantizes what its products read, so does this.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        plain = folder / "reference"
        source = plain if plain.exists() else folder
        self._model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).cuda().eval()
        if folder.name.endswith("_fp8"):
            for name, module in self._model.named_modules():
                if name.endswith("_proj"):
                    module.register_forward_pre_hook(lambda _, args: (quantize_inputs(args[0]),))

    def states(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Boundaries 0 .. N and the final state, each [tokens, hidden] in fp32 on the GPU."""
        inner, read = self._model.model, []
        hook = inner.norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        with torch.inference_mode():
            out = inner(ids[None].cuda(), output_hidden_states=True).hidden_states
        hook.remove()
        return [state[0].float() for state in (*out[:-1], read[0], out[-1])]
