"""Small seeded checkpoints of shapes that GPU kernels accept, and their states by Transformers in fp32 and bf16."""

from pathlib import Path
from typing import Any

import torch
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

FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")


def _config(family: str) -> PretrainedConfig:
    match family:
        case "llama":
            return LlamaConfig(**_COMMON, **_GROUPED)
        case "qwen3":
            return Qwen3Config(**_COMMON, **_GROUPED)
        case "qwen3_moe":
            return Qwen3MoeConfig(**_COMMON, **_GROUPED, **_EXPERTS, num_experts=8)
        case "deepseek_v3":
            return DeepseekV3Config(
                **_COMMON,
                **_EXPERTS,
                num_attention_heads=16,
                num_key_value_heads=16,
                q_lora_rank=512,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                n_routed_experts=8,
                n_shared_experts=1,
                n_group=2,
                topk_group=2,
                first_k_dense_replace=1,
                routed_scaling_factor=1.0,
                moe_layer_freq=1,  # SGLang reads it; Transformers has no such field of its own
                rope_scaling=None,
            )
    raise ValueError(f"{family}: not one of {', '.join(FAMILIES)}")


def checkpoint(family: str, root: Path) -> Path:
    """Folder of a seeded bf16 checkpoint."""
    target = root / family
    if not target.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.add_(torch.randn_like(weight), alpha=0.2)
        model.to(torch.bfloat16).save_pretrained(target)
    return target


class Reference:
    """A checkpoint in Transformers on the GPU; the fp32 one runs on the weights as bf16 stores them."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()

    def states(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Hidden states [tokens, hidden] in fp32 on the GPU; the last one is after the final norm."""
        with torch.inference_mode():
            out = self._model.model(ids[None].cuda(), output_hidden_states=True)
        return [state[0].float() for state in out.hidden_states]
