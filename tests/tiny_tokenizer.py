"""A byte-level tokenizer and chat templates in the manner of real ones, made on the spot."""

from pathlib import Path
from typing import Any

CHATML = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif -%}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
CHATML_GENERATION = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif -%}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
# Counts its messages first, so no rendering of a part is a prefix of the whole.
COUNTING = "{{ messages | length }} messages\n" + CHATML
# Says how many messages follow, inside each turn: beginnings fit, turns do not.
COUNTDOWN = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- if m.role == 'assistant' %}{{ ' ' ~ loop.revindex0 }}{% endif %}{{ '<|im_end|>\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
# Qwen3: the last turn gets an empty block of reasoning, earlier ones lose theirs.
QWEN3 = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ text }}"
    "{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
# Kimi K2 Thinking: earlier turns lose their reasoning, but not the marks around it.
KIMI_THINKING = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}"
    "{{ '<think>' + (m.reasoning_content if loop.last else '') + '</think>' }}{% endif %}"
    "{{- m.content + '<|im_end|>\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
# DeepSeek-R1: the generation prompt opens a block of reasoning that no stored turn has.
R1 = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif -%}"
)
REFUSING = "{{ raise_exception('Roles must alternate') }}"
BROKEN = "{% for m in messages %}{{ m.content }}"


def byte_level(chat_template: str | None = CHATML) -> Any:
    """A fast tokenizer: one token a byte, one for a double line break, the marks, and <s> before plain text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab["ĊĊ"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = ["<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def save(folder: Path, chat_template: str | None = CHATML) -> Path:
    """A tokenizer's folder, as a checkpoint has it."""
    byte_level(chat_template).save_pretrained(folder)
    return folder
