"""Tiny random checkpoints, and their hidden states by Transformers: the oracle of the engine tests."""

import functools
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

FAMILIES = ("llama", "qwen3", "qwen3_moe")
VOCAB = 1024
LAYERS = 8  # eagle3's boundaries 2, N//2 and N-3 differ
HIDDEN = 64
CONTEXT = 4096

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    # 1/sqrt(hidden): a layer then changes the residual stream by about its own size, so no two boundaries look alike.
    "initializer_range": HIDDEN**-0.5,
}


def _config(family: str) -> PretrainedConfig:
    match family:
        case "llama":
            return LlamaConfig(**_COMMON)
        case "qwen3":
            return Qwen3Config(**_COMMON)
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **_COMMON, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
            )
        case "glm4_moe":  # without experts, whose kernels need a GPU
            return Glm4MoeConfig(**_COMMON, first_k_dense_replace=LAYERS, n_routed_experts=8, moe_intermediate_size=32)
    raise ValueError(f"{family}: not one of {', '.join(FAMILIES)} and glm4_moe")


def tiny_model(family: str, root: Path) -> Path:
    """Folder under `root` of a seeded fp32 checkpoint without a tokenizer; made once for each configuration.

    Of two makers at once, the first wins; both write the same weights.
    """
    config = _config(family)
    target = root / f"tiny-{family}-{zlib.crc32(config.to_json_string().encode()):08x}"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".tiny-{family}-", dir=root))
    try:
        _random_model(config).save_pretrained(scratch)
        scratch.rename(target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _random_model(config: PretrainedConfig) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Norms start as all ones, which would hide a norm whose weight is left out.
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


@functools.lru_cache(maxsize=4)
def _load(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def hf_states(model_dir: Path, input_ids: list[int]) -> list[NDArray[np.float32]]:
    """Hidden states of one row by Transformers in fp32, each [tokens, hidden].

    Element b is boundary b, for b in 0..N; the last one is the final state, after the final norm.
    """
    model, read = _load(model_dir), []
    hook = model.base_model.norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.inference_mode():
        out = model(torch.tensor([input_ids]), output_hidden_states=True)
    hook.remove()
    return [state[0].numpy() for state in (*out.hidden_states[:-1], read[0], out.hidden_states[-1])]
