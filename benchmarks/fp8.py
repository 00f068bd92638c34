"""What storing states in fp8 costs: their error, and what the target's LM head makes of them.

    python benchmarks/fp8.py [--rows 24]

SmolLM2-135M and conversations of HumanEval (both made by `make demo`), states from Transformers in fp32, no engine.
A token's error is the norm of the difference over the norm of the state. For each state:

    p50, p99, max       of the tokens' errors
    bf16 p50            the same of rounding to bf16, which is what fp8 is in place of
    power of two p50    the same of fp8 whose scale is a power of two, which loses nothing itself

`same next token` is how often the LM head's largest logit stays the same when the final state went through fp8 (and
bf16); `first token` is the error of rows' first tokens, whose few huge values are the hard case for one scale a token.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from results import Row, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from ray_extract.capture.fp8 import LARGEST, decode, encode

ROOT = Path(__file__).parents[1]
MODEL, PROMPTS = ROOT / ".cache/smollm2-135m-instruct", ROOT / ".cache/humaneval.jsonl"
BOUNDARIES = (2, 15, 27)  # eagle3's of 30 layers


def errors(stored: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Relative error of each token; f32 [T]."""
    return (stored.float() - states).norm(dim=1) / states.norm(dim=1)


def by_power_of_two(states: torch.Tensor) -> torch.Tensor:
    """Through fp8 with the smallest power of two as scale under which no value exceeds 448."""
    scale = (states.abs().amax(dim=1, keepdim=True) / LARGEST).log2().ceil().exp2()
    return (states / scale).to(torch.float8_e4m3fn).float() * scale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=24, help="conversations")
    args = parser.parse_args()
    if not (MODEL.exists() and PROMPTS.exists()):
        sys.stderr.write("no .cache/smollm2-135m-instruct and .cache/humaneval.jsonl; `make demo` makes them\n")
        return 2
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    parts: dict[str, list[torch.Tensor]] = {}
    firsts: list[int] = []
    with torch.inference_mode():
        for line in PROMPTS.read_text().splitlines()[: args.rows]:
            text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            states = model.model(ids, output_hidden_states=True).hidden_states
            firsts.append(sum(len(part) for part in parts.get("state.final", [])))
            for name, state in [*((f"state.{b}", states[b]) for b in BOUNDARIES), ("state.final", states[-1])]:
                parts.setdefault(name, []).append(state[0])
        flat = {name: torch.cat(found) for name, found in parts.items()}
        rows = []
        for name, states in flat.items():
            found = errors(decode(encode(states)), states)
            for metric, value in (
                ("p50", found.median()),
                ("p99", found.quantile(0.99)),
                ("max", found.max()),
                ("first token p50", found[firsts].median()),
                ("bf16 p50", errors(states.bfloat16(), states).median()),
                ("power of two p50", errors(by_power_of_two(states), states).median()),
            ):
                rows.append(Row(name, metric, round(float(value), 5), "relative error", better="lower"))
        final = flat["state.final"]
        want = model.lm_head(final).argmax(dim=1)
        for kind, stored in (("fp8", decode(encode(final)).float()), ("bf16", final.bfloat16().float())):
            same = (model.lm_head(stored).argmax(dim=1) == want).float().mean()
            rows.append(Row("state.final", f"same next token, {kind}", round(100 * float(same), 2), "%"))
    rows.append(Row("all", "tokens", len(final), ""))
    print(write("fp8", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
