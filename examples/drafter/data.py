"""What a drafter is trained on: states of a run, the same ones by Transformers, and what the target says of them."""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ray_extract.readers.dataset import HiddenStates

FINAL = "state.final"

States = list[dict[str, torch.Tensor]]
"""For each row its states by name, bf16 [n, H]."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a run.

    Args:
        input_ids: i64 [n] of each.
        supervised: bool [n] of each.
        states: of each.
    """

    input_ids: list[torch.Tensor]
    supervised: list[torch.Tensor]
    states: States


@dataclasses.dataclass(frozen=True)
class Example:
    """A row as the drafter sees it: from place t, the states of token t and the token t + 1, it foretells token t + 2.

    Args:
        states: bf16 [n - 1, 3, H], each state of norm sqrt(H).
        tokens: i64 [n - 1], the tokens at t + 1.
        target: bf16 [n - 1, D], how likely the target finds each draft token as t + 2.
        counts: bool [n - 1], which of them are supervised.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    target: torch.Tensor
    counts: torch.Tensor


def stored_rows(url: str) -> Rows:
    """Read a run's output, checking every row's digests."""
    data = HiddenStates(url, check=True)
    items = [data[i] for i in range(len(data))]
    return Rows(
        input_ids=[item["input_ids"] for item in items],
        supervised=[item["loss_mask"] != 0 for item in items],
        states=[{name: item[name] for name in data.states} for item in items],
    )


def transformers_states(model: Path, rows: Rows, cache: Path) -> States:
    """The same states from Transformers in fp32, rounded to bf16. Kept in `cache`, and made again for other rows."""
    names = list(rows.states[0])
    ends = [0, *itertools.accumulate(len(ids) for ids in rows.input_ids)]
    key = hashlib.sha256(repr((names, ends, str(model))).encode() + torch.cat(rows.input_ids).numpy().tobytes())
    if not _is_of(cache, key.hexdigest()):
        computed = _compute(model, rows.input_ids, names)
        flat = {name: torch.cat([row[name] for row in computed]) for name in names}
        cache.parent.mkdir(parents=True, exist_ok=True)
        save_file(flat, cache, {"rows": key.hexdigest()})
    with safe_open(cache, framework="pt") as file:
        flat = {name: file.get_tensor(name) for name in names}
    return [{name: flat[name][a:b] for name in names} for a, b in itertools.pairwise(ends)]


def _is_of(cache: Path, key: str) -> bool:
    if not cache.exists():
        return False
    with safe_open(cache, framework="pt") as file:
        return bool((file.metadata() or {}).get("rows") == key)


def _compute(folder: Path, rows: Sequence[torch.Tensor], names: Sequence[str]) -> States:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().base_model
    last = f"state.{model.config.num_hidden_layers}"
    found: dict[str, torch.Tensor] = {}
    model.norm.register_forward_hook(lambda _, args, output: found.update({last: args[0][0], FINAL: output[0]}))
    states: States = []
    with torch.inference_mode():
        for ids in rows:
            boundaries = model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states[:-1]
            found.update({f"state.{b}": state[0] for b, state in enumerate(boundaries)})
            states.append({name: found[name].bfloat16() for name in names})
    return states


def examples(
    rows: Rows, states: States, which: Sequence[int], boundaries: Sequence[int], final: str, head: torch.Tensor
) -> list[Example]:
    """Rows as the drafter sees them.

    Args:
        rows: for tokens and masks.
        states: of the same rows, from either source.
        which: the rows to take.
        boundaries: the three to use.
        final: the state that is taken for what enters the LM head.
        head: f32 [D, H], the LM head's rows of the draft's vocabulary.
    """
    return [
        Example(
            states=unit(torch.stack([states[i][f"state.{b}"][:-1] for b in boundaries], dim=1)),
            tokens=rows.input_ids[i][1:],
            target=(states[i][final][1:].float() @ head.T).softmax(dim=-1).bfloat16(),
            counts=rows.supervised[i][1:],
        )
        for i in which
    ]


def unit(states: torch.Tensor) -> torch.Tensor:
    """States of norm sqrt(H), bf16: those of later layers, and of a row's first token, are hundreds of times larger."""
    wide = states.float()
    return (wide * wide.square().mean(dim=-1, keepdim=True).add(1e-6).rsqrt()).bfloat16()


def own_tokens(states: Mapping[str, torch.Tensor], head: torch.Tensor) -> torch.Tensor:
    """The target's own next token at each place of a row, i64 [n]: the argmax of the whole LM head, f32 [V, H]."""
    return (states[FINAL].float() @ head.T).argmax(dim=-1)
