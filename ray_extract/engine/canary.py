"""The canary: prompts whose states must come back right before an engine may serve.

The handshake shows that the hooks are in place; the canary shows that the states they take are those of the model. The
final state goes through the LM head of the checkpoint, and its argmax must be the engine's own next token: a state
before the norm, of another layer or of another row does not pass.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ray_extract.checkpoint import NotPlain, find_lm_head
from ray_extract.errors import CaptureRefused

logger = logging.getLogger(__name__)

_LENGTHS = (33, 1, 64, 20)
_BLOCK = 16384
# The engine rounds its logits to the model's type; near ties within that rounding may fall either way. Of a state that
# was stored in fp8 the logits are off by more: by reckoning about a hundredth of the largest.
_LOGIT_TOLERANCE, _FP8_LOGIT_TOLERANCE = 2.0**-6, 2.0**-4
# Rounding to bf16 leaves 0.003, and to fp8 0.04; an unrelated state about 0.99.
_NORM_TOLERANCE, _FP8_NORM_TOLERANCE = 0.02, 0.08


def canary_prompts(vocab_size: int, longest: int) -> list[npt.NDArray[np.int32]]:
    """Fixed prompts of random ids; i32, one array each."""
    rng = np.random.default_rng(20240229)
    return [rng.integers(0, vocab_size, min(n, longest)).astype(np.int32) for n in _LENGTHS]


def judge_states(names: Sequence[str], rows: Sequence[Sequence[torch.Tensor]]) -> None:
    """Look for states that no model computes.

    Args:
        names: K names.
        rows: for each prompt K tensors [tokens, hidden].

    Raises:
        CaptureRefused: a state is not finite, zero or constant, or two states of a prompt are equal.
    """
    for states in rows:
        for name, state in zip(names, states, strict=True):
            values = state.float()
            if not bool(torch.isfinite(values).all()):
                raise CaptureRefused(f"canary: {name} holds NaN or infinity")
            if bool((values == values[:, :1]).all(dim=1).any()):
                raise CaptureRefused(f"canary: a token's {name} is zero or constant")
        for i, first in enumerate(states):
            for j in range(i):
                if torch.equal(first, states[j]):
                    raise CaptureRefused(f"canary: {names[j]} and {names[i]} are the same")


def judge_final_norm(prenorm: torch.Tensor, final: torch.Tensor, fp8: bool = False) -> None:
    """Check that one state is the other through a norm: the same weights for every token, whatever they are.

    Args:
        prenorm: [tokens, hidden], what the final norm reads; at least two tokens.
        final: [tokens, hidden], what it gives.
        fp8: whether they were stored in fp8.

    Raises:
        CaptureRefused: no RMS norm, and no layer norm, leads from one to the other.
    """
    read, given = prenorm.float(), final.float()
    error = 1.0
    for centred in (read, read - read.mean(dim=1, keepdim=True)):
        scaled = centred / centred.square().mean(dim=1, keepdim=True).sqrt()
        # One weight and one offset for each channel, as least squares over the tokens finds them.
        x, y = scaled - scaled.mean(dim=0), given - given.mean(dim=0)
        weight = (x * y).sum(dim=0) / x.square().sum(dim=0).clamp_min(1e-12)
        error = min(error, float((y - weight * x).norm() / y.norm().clamp_min(1e-12)))
    if error > (_FP8_NORM_TOLERANCE if fp8 else _NORM_TOLERANCE):
        raise CaptureRefused(
            f"canary: the state before the final norm does not lead to the one after it (they differ by {error:.2f}): "
            "one of the two is another state"
        )


def load_head(model_path: Path) -> torch.Tensor | None:
    """The LM head's weight [vocab, hidden] from a safetensors checkpoint, or None where it is not stored plainly.

    Raises:
        ConfigError: a file of the checkpoint is missing or damaged.
    """
    from safetensors import safe_open

    try:
        found = find_lm_head(model_path)
    except NotPlain:
        return None
    with safe_open(found.path, framework="pt") as file:
        weight: torch.Tensor = file.get_tensor(found.place.name)
    return weight


def judge_next_token(head: torch.Tensor, final: torch.Tensor, token: int, fp8: bool = False) -> None:
    """Compare the engine's next token with the LM head on the last final state.

    Args:
        head: [vocab, hidden].
        final: [hidden], the final state of the prompt's last token.
        token: what the engine generated greedily.
        fp8: whether the state was stored in fp8.

    Raises:
        CaptureRefused: another token is the largest, by more than rounding.
    """
    state = final.float()
    logits = torch.cat([block.float() @ state for block in torch.split(head, _BLOCK)])
    gap = float(logits.max() - logits[token])
    if gap > (_FP8_LOGIT_TOLERANCE if fp8 else _LOGIT_TOLERANCE) * float(logits.abs().max()):
        raise CaptureRefused(
            f"canary: the engine's next token is {token}, the LM head on the captured final state says "
            f"{int(logits.argmax())}: the state is not what enters the LM head"
        )
