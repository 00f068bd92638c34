"""What SGLang's model classes make of the boundaries that are asked of them: the table in docs/capture.md.

    python tests/boundary_table.py      writes it

tests/test_boundary_table.py compares it. The classes are those of the installed SGLang, made from tiny configurations
on the CPU in a process of their own; none is run.
"""

import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from capture_page import PAGE, split

LAYERS = 8
ASKED = ((2, 4, 5), (1,), (7,), (1, 2), tuple(range(1, LAYERS)))  # eagle3's first

Fields = dict[str, Any]

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_YARN = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# What a language model's configuration is made of; each class reads its own part of it.
_TEXT: Fields = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# of configurations without a class, which have no defaults
_BARE: Fields = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
}
_MOE: Fields = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "swiglu_limit": 7.0,
}
_MLA: Fields = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "rope_scaling": _YARN,
    "rope_parameters": _YARN,
}
_DSA: Fields = {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 32}
_LINEAR: Fields = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads_cpu": 4,  # these two are set by SGLang's own start on a CPU
    "linear_num_value_heads_cpu": 4,
    "full_attention_interval": 4,
}
_BAILING: Fields = {
    **_BARE,
    **_MOE,
    "rope_parameters": _ROPE,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": False,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "norm_head": False,
}
_MIMO: Fields = {
    **_BARE,
    **_MOE,
    "v_head_dim": 16,
    "hybrid_layer_pattern": [0] * LAYERS,
    "moe_layer_freq": [0] * LAYERS,
    "layernorm_epsilon": 1e-6,
    "sliding_window_size": 128,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
}
_MINIMAX_M3: Fields = {
    **_BARE,
    **_MOE,
    "moe_layer_freq": [0] * LAYERS,
    "num_mtp_modules": 0,
    "dense_intermediate_size": 128,
    "sparse_attention_config": None,
    "swiglu_alpha": 1.7,
}
_MUSE: Fields = {
    "no_rope_layers": [1] * LAYERS,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "out_hidden_size": 64,
    "projector_hidden_size": 64,
}
_CONV: Fields = {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}
_GEMMA4: Fields = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}
_NEMOTRON: Fields = {**_MOE, "hybrid_override_pattern": "*-" * (LAYERS // 2), "dtype": "float32"}
_LONGCAT: Fields = {
    **_BARE,
    **_MOE,
    **_MLA,
    "rope_scaling": None,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
}
_QWEN_VL: Fields = {**_BARE, "rope_scaling": _MROPE, "rope_parameters": _MROPE}

# model class -> model_type of its configuration, and its fields; SGLang's configuration class, else Transformers', else
# a bare one.
LANGUAGE: dict[str, tuple[str, Fields]] = {
    "ApertusForCausalLM": ("apertus", {}),
    "BailingMoEForCausalLM": ("bailing_moe", _BAILING),
    "BailingMoeForCausalLM": ("bailing_moe", _BAILING),
    "BailingMoeV2ForCausalLM": ("bailing_moe", _BAILING),
    "DeepseekV2ForCausalLM": ("deepseek_v2", _MOE | _MLA),
    "DeepseekV3ForCausalLM": ("deepseek_v3", _MOE | _MLA),
    "DeepseekV32ForCausalLM": ("deepseek_v32", _MOE | _MLA | _DSA),
    "ExaoneMoEForCausalLM": ("exaone_moe", _MOE | {"is_moe_layer": [False, True] * (LAYERS // 2)}),
    "Gemma3ForCausalLM": ("gemma3_text", {}),
    "Gemma4ForCausalLM": ("gemma4_text", _GEMMA4),
    "Glm4MoeForCausalLM": ("glm4_moe", _MOE),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", _MOE | _MLA),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", _MOE | _MLA | _DSA),
    "GptOssForCausalLM": ("gpt_oss", _MOE),
    "IQuestCoderForCausalLM": ("iquestcoder", _BARE),
    "InternLM3ForCausalLM": ("internlm3", _BARE | {"bias": False, "qkv_bias": False}),
    "LagunaForCausalLM": ("laguna", _MOE),
    "Lfm2ForCausalLM": ("lfm2", _CONV),
    "Lfm2MoeForCausalLM": ("lfm2_moe", _MOE | _CONV),
    "Llama4ForCausalLM": ("llama4_text", _MOE),
    "LlamaForCausalLM": ("llama", {}),
    "LongcatFlashForCausalLM": ("longcat_flash", _LONGCAT),
    "MellumForCausalLM": ("mellum", _MOE),
    "MiMoV2FlashForCausalLM": ("mimo_v2_flash", _MIMO),
    "MiMoV2ForCausalLM": ("mimo_v2", _MIMO),
    "MiniMaxM2ForCausalLM": ("minimax_m2", _MOE | {"num_mtp_modules": 0}),
    "MiniMaxM3SparseForCausalLM": ("minimax_m3", _MINIMAX_M3),
    "Ministral3ForCausalLM": ("ministral3", {}),
    "MistralForCausalLM": ("mistral", {}),
    "MistralLarge3ForCausalLM": ("deepseek_v3", _MOE | _MLA),
    "MuseGlimmerForCausalLM": ("muse_glimmer", _MUSE),
    "NanbeigeForCausalLM": ("nanbeige", {}),
    "NemotronHForCausalLM": ("nemotron_h", _NEMOTRON),
    "NemotronHPuzzleForCausalLM": (
        "nemotron_h_puzzle",
        _NEMOTRON | {"block_configs": [{"block_type": "attention"}, {"block_type": "mlp"}] * (LAYERS // 2)},
    ),
    "Phi3ForCausalLM": ("phi3", {}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", _MOE),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _MOE),
    "Qwen3NextForCausalLM": ("qwen3_next", _MOE | _LINEAR),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", _LINEAR | {"rope_parameters": _ROPE}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", _MOE | _LINEAR | {"rope_parameters": _ROPE}),
    "SarvamMoEForCausalLM": ("sarvam_moe", _BAILING),
    "TeleFLMForCausalLM": ("teleflm", _BARE),
}

_TOWER: Fields = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_attention_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "image_size": 28,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "hidden_act": "gelu_pytorch_tanh",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-6,
}
_CLIP: Fields = {
    **_TOWER,
    "num_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "img_token_compression_config": {},
    "position_embedding_type": "rope",
    "rope_mode": "3d",
    "rope_theta": 10000.0,
    "vision_segment_max_frames": 4,
}
_MOON: Fields = {
    **_TOWER,
    "text_hidden_size": 64,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "vt_num_hidden_layers": 1,
    "vt_num_attention_heads": 4,
}
_RADIO: Fields = {"args": {"model": "vit_base_patch16_224", "register_multiple": 8}}
_MOBIUS: Fields = {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4), "num_blocks": 4}
_QWEN4: Fields = {"hc_per_branch_norm": False, "hc_lowrank": 8}

# The same, and the fields of the vision tower.
MULTIMODAL: dict[str, tuple[str, Fields, Fields]] = {
    "Cosmos3ForConditionalGeneration": ("cosmos3_omni", _QWEN_VL, _TOWER),
    "Gemma3ForConditionalGeneration": ("gemma3", {}, _TOWER),
    "Gemma4ForConditionalGeneration": ("gemma4", _GEMMA4, _TOWER),
    "Gemma4UnifiedForConditionalGeneration": (
        "gemma4_unified",
        _GEMMA4,
        {"mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64},
    ),
    "Glm5NextForConditionalGeneration": ("glm5_next", _MOE | _MLA | {"rope_scaling": None}, _TOWER),
    "InternS2MobiusForConditionalGeneration": ("interns2_mobius", _QWEN_VL | _MOE | _LINEAR | _MOBIUS, _TOWER),
    "InternS2PreviewForConditionalGeneration": ("intern_s2_preview", _QWEN_VL | _MOE | _LINEAR, _TOWER),
    "KimiK25ForConditionalGeneration": ("kimi_k25", _MOE | _MLA | {"architectures": [""]}, _MOON),
    "Llama4ForConditionalGeneration": ("llama4", _MOE, _TOWER),
    "MiniMaxM3SparseForConditionalGeneration": ("minimax_m3_vl", _MINIMAX_M3 | {"model_type": ""}, _CLIP),
    "MuseGlimmerForConditionalGeneration": ("muse_glimmer", _MUSE, _TOWER | {"attention_types": ["full_attention"]}),
    "NemotronH_Nano_Omni_Reasoning_V3": ("NemotronH_Nano_Omni_Reasoning_V3", _NEMOTRON, _RADIO),
    "NemotronH_Nano_VL_V2": ("NemotronH_Nano_VL_V2", _NEMOTRON, _RADIO),
    "NemotronH_Omni_Reasoning_V3": ("NemotronH_Nano_Omni_Reasoning_V3", _NEMOTRON, _RADIO),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", _QWEN_VL, _TOWER),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", _QWEN_VL, _TOWER),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", _QWEN_VL | _MOE, _TOWER),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", _QWEN_VL | _LINEAR, _TOWER),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", _QWEN_VL | _MOE | _LINEAR, _TOWER),
    "Qwen4ExpForConditionalGeneration": ("qwen4_exp", _QWEN_VL | _MOE | _LINEAR | _QWEN4, _TOWER),
}

# Classes with one of our setters that are not made, and why.
NOT_MADE = {
    "InklingForConditionalGeneration": "its module needs `cutlass`, and is not imported",
    "InternS1ProForConditionalGeneration": "its layers do not take the `start_layer` that they are given",
    "MindSporeForCausalLM": "needs `mindspore`",
}

# Drafters and embedding models; a job has no use for them.
_NO_TARGET = re.compile(r"NextN$|MTP$|Eagle3?$|Assistant|^EmbeddingGemmaModel$|^Lfm2BidirectionalModel$")

_NAMES = {
    "set_eagle3_layers_to_capture": "EAGLE-3's",
    "set_dflash_layers_to_capture": "DFlash's",
    "set_dspark_layers_to_capture": "DSpark's",
}
SETTERS = tuple(_NAMES)

# Kernels that modules look up as they are imported, and that the CPU's stand-in for sgl_kernel lacks.
_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


class Outcome(NamedTuple):
    """What came of one class.

    Args:
        ids: setter -> what its id k stands for, of those that set_boundaries may call.
        used: the setters that set_boundaries ended with.
        refused: refusals of sets of ASKED.
        wrong: what would be handed over in place of a set, without a refusal.
        last: the refusal where the final norm is not found.
    """

    ids: dict[str, str]
    used: list[str]
    refused: list[str]
    wrong: list[list[int]]
    last: str | None


def measure() -> dict[str, Any]:
    """What the classes do, in this process.

    Returns:
        `outcomes`: class -> its Outcome. `targets`: class -> its setters, of all with any. `unread`: modules with
        setters that cannot be imported here.
    """
    import torch

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for kernel in _KERNELS:
        library.define(f"{kernel}(Tensor x) -> Tensor")
    # what else stands in for a GPU: for Bailing-MoE's modules, and for Qwen 4's weights
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm._custom_ops"] = types.SimpleNamespace(awq_dequantize=None)
    torch.cuda.current_device = lambda: torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        _start(Path(folder))
        from sglang.srt.models.registry import ModelRegistry

        classes = {name: cls for name, cls in sorted(ModelRegistry.models.items()) if not _NO_TARGET.search(name)}
        setters = {name: [setter for setter in SETTERS if hasattr(cls, setter)] for name, cls in classes.items()}
        made = [name for name in classes if name in LANGUAGE or name in MULTIMODAL]
        outcomes = {name: _outcome(_make(classes[name], _config(name)))._asdict() for name in made}
        torch.distributed.destroy_process_group()
        models = importlib.import_module("sglang.srt.models")
    unread = [
        file.stem
        for file in sorted(Path(models.__path__[0]).glob("*.py"))
        if f"{models.__name__}.{file.stem}" not in sys.modules
        and any(s in file.read_text("utf-8-sig") for s in SETTERS)
    ]
    return {"outcomes": outcomes, "targets": {n: found for n, found in setters.items() if found}, "unread": unread}


def _start(folder: Path) -> None:
    """SGLang's state of a process with one rank, as its model runner makes it."""
    from transformers import LlamaConfig

    LlamaConfig(**_TEXT, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
    )
    set_global_server_args_for_scheduler(args)
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{folder}/store"
    )
    initialize_model_parallel()
    initialize_dp_attention(args, ModelConfig.from_server_args(args))


def _config_class(model_type: str) -> Any:
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if model_type in _CONFIG_REGISTRY and model_type != "gemma4_unified":  # its alias is older than Transformers' class
        return _CONFIG_REGISTRY[model_type]
    if model_type == "cosmos3_omni":
        return importlib.import_module("sglang.srt.configs.cosmos3").Cosmos3Config
    try:
        return CONFIG_MAPPING[model_type]  # which loads; its get() does not
    except KeyError:
        return PretrainedConfig


def _config(name: str) -> Any:
    from transformers import PretrainedConfig

    if name in LANGUAGE:
        model_type, fields = LANGUAGE[name]
        config = _config_class(model_type)(**_TEXT | fields, architectures=[name])
        if name == "LongcatFlashForCausalLM":
            config.rope_parameters = _ROPE
    else:
        model_type, fields, tower = MULTIMODAL[name]
        text = _TEXT | fields
        if model_type == "muse_glimmer":
            config = _config_class(model_type)(**text, vision_config=tower)
        elif model_type.startswith("NemotronH"):
            config = _config_class(model_type)(
                llm_config=text, vision_config=tower, vit_hidden_size=768, projector_hidden_size=64
            )
        else:
            config = _config_class(model_type)(text_config=text, vision_config=tower)
            for part in ("text_config", "vision_config"):
                if isinstance(getattr(config, part), dict):
                    setattr(config, part, PretrainedConfig(**getattr(config, part)))
            for key, value in config.text_config.to_dict().items():
                if not hasattr(config, key):
                    setattr(config, key, value)
        config.architectures = [name]
    config.encoder_only = config.language_only = config.language_model_only = False
    return config


def _make(cls: Any, config: Any) -> Any:
    from sglang.srt.layers.moe.utils import install_shared_experts_fusion_decision

    install_shared_experts_fusion_decision(cls, config, None)
    return cls(config=config, quant_config=None)


def _outcome(model: Any) -> Outcome:
    from ray_extract.capture import compat
    from ray_extract.capture.boundaries import _SETTERS, final_norm, set_boundaries
    from ray_extract.errors import CaptureRefused

    ids = {name: _meaning(model, name) for name in _SETTERS if hasattr(model, name)}
    called: list[str] = []
    for name in ids:
        setattr(model, name, functools.partial(_spy, called, name, getattr(model, name)))
    used, refused, wrong = set(), set(), []
    for asked in ASKED:
        try:
            if (part := compat.miscaptured(model)) is not None:
                raise CaptureRefused(f"its {part} hands over something else")
            set_boundaries(model, asked)
        except CaptureRefused as error:
            refused.add(str(error))
        else:
            used.add(called[-1])
            wrong += [got] if (got := _handed_over(model)) != [*asked] else []
    try:
        final_norm(model)
        last = None
    except CaptureRefused as error:
        last = str(error)
    return Outcome(ids, sorted(used, reverse=True), sorted(refused), wrong, last)


def _spy(called: list[str], name: str, setter: Callable[[list[int]], None], layer_ids: list[int]) -> None:
    called.append(name)
    setter(layer_ids)


def _handed_over(model: Any) -> list[int]:
    """Layers of which the inner model would hand over the input, by what its own source goes by: its list or flags."""
    (inner,) = (m for m in model.modules() if getattr(m, "layers_to_capture", None))
    forwards = (inspect.getsource(cls.forward) for cls in type(inner).__mro__ if "forward" in vars(cls))
    source = next(text for text in forwards if "to_capture" in text)
    if re.search(r"\b(i|i \+ 1|layer_idx|logical_id) in self\.layers_to_capture", source):
        return sorted(inner.layers_to_capture)
    return [i for i, layer in enumerate(inner.layers) if getattr(layer, "_is_layer_to_capture", False)]


def _meaning(model: Any, setter: str) -> str:
    """Which boundary an id k stands for, by the lists that come of some ids."""
    from ray_extract.capture.boundaries import _clear_flags

    shifts = {}
    for case, ids in {"": [2, 4], " if the first is 1": [1, 4], " if the last is N": [4, LAYERS]}.items():
        _clear_flags(model)
        try:
            getattr(model, setter)(ids)
            got = _handed_over(model)
        except (IndexError, ValueError):  # the last case, where layers are flagged or ids checked
            continue
        except AttributeError:
            return "raises"
        shifts[case] = got[0] - ids[0] if got else None
    usual = shifts.pop("")
    named = {0: "k", 1: "k+1", None: "nothing"}
    return ", ".join([named[usual], *(named[s] + case for case, s in shifts.items() if s != usual)])


def measured() -> dict[str, Any]:
    """What measure() finds in a process of its own: SGLang's state is one per process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, __file__, str(out)], env=environment, check=True, timeout=500)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def table(found: Mapping[str, Any]) -> str:
    """A row for each thing that classes do, with their names."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, fields in found["outcomes"].items():
        outcome = Outcome(**fields)
        below = [f"refused: {reason}" for reason in outcome.refused]
        if outcome.used:
            below.append(f"as asked, by {' or '.join(_NAMES[setter] for setter in outcome.used)}")
        last = "refused" if outcome.last else "found"
        cells = (*(outcome.ids.get(s, "") for s in SETTERS[:2]), "; ".join(below), last)
        rows.setdefault(cells, []).append(name)
    for name, setters in found["targets"].items():
        if setters == [SETTERS[2]]:
            rows.setdefault(("", "", "refused: DSpark's setter alone", "not tried"), []).append(name)
    for name, reason in NOT_MADE.items():
        rows.setdefault(("", "", f"not tried: {reason}", "not tried"), []).append(name)
    lines = [
        "| EAGLE-3's id k | DFlash's id k | boundaries below N | boundary N | classes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for cells, names in sorted(rows.items(), key=lambda row: (row[0][2], row[0])):
        lines.append(f"| {' | '.join((*cells, ', '.join(f'`{name}`' for name in names)))} |")
    return "\n".join(lines)


def main() -> None:
    """Write the block; with a file, measure in this process and write what was found there."""
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(json.dumps(measure()))
        return
    before, _, after = split(PAGE.read_text(), "boundaries")
    PAGE.write_text(before + table(measured()) + after)


if __name__ == "__main__":
    main()
