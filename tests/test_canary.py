"""The canary's judges: right states pass, and each kind of wrong state does not."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ray_extract.engine.canary import canary_prompts, judge_final_norm, judge_next_token, judge_states, load_head
from ray_extract.errors import CaptureRefused

NAMES = ("state.2", "state.5", "state.final")
VOCAB, HIDDEN = 40, 16


def right() -> list[list[torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    return [[torch.randn(n, HIDDEN, generator=made).bfloat16() for _ in NAMES] for n in (5, 1, 9)]


def test_right_states_pass() -> None:
    judge_states(NAMES, right())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_that_is_not_finite_is_refused_by_name(value: float) -> None:
    rows = right()
    rows[2][1][8, 3] = value
    with pytest.raises(CaptureRefused, match=r"canary: state\.5 holds NaN or infinity"):
        judge_states(NAMES, rows)


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_token_that_was_never_written_is_refused(value: float) -> None:
    rows = right()
    rows[1][2][0] = value
    with pytest.raises(CaptureRefused, match=r"canary: a token's state\.final is zero or constant"):
        judge_states(NAMES, rows)


def test_two_states_that_are_the_same_are_refused() -> None:
    rows = right()
    rows[0][2] = rows[0][0].clone()
    with pytest.raises(CaptureRefused, match=r"canary: state\.2 and state\.final are the same"):
        judge_states(NAMES, rows)


def test_prompts_are_fixed_differ_and_fit_the_model() -> None:
    prompts = canary_prompts(VOCAB, longest=20)
    assert [len(p) for p in prompts] == [20, 1, 20, 20]
    assert all(p.dtype == np.int32 and p.min() >= 0 and p.max() < VOCAB for p in prompts)
    assert all(np.array_equal(a, b) for a, b in zip(prompts, canary_prompts(VOCAB, 20), strict=True))
    assert not np.array_equal(prompts[0], prompts[2])


def head_and_state() -> tuple[torch.Tensor, torch.Tensor, int]:
    made = torch.Generator().manual_seed(1)
    head, state = torch.randn(VOCAB, HIDDEN, generator=made), torch.randn(HIDDEN, generator=made)
    return head, state, int((head @ state).argmax())


def test_the_engines_own_token_passes() -> None:
    head, state, token = head_and_state()
    judge_next_token(head, state, token)
    judge_next_token(head.bfloat16(), state.bfloat16(), token)


def test_the_head_is_read_whole_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_extract.engine.canary._BLOCK", 7)
    judge_next_token(*head_and_state())


def test_another_state_or_another_head_is_refused() -> None:
    head, state, token = head_and_state()
    scale = torch.linspace(-3, 3, HIDDEN)  # a state before the norm
    for wrong_head, wrong_state in ((head, state * scale), (head, -state), (head.roll(1, 0), state)):
        with pytest.raises(CaptureRefused, match=f"the engine's next token is {token}.*not what enters the LM head"):
            judge_next_token(wrong_head, wrong_state, token)


def test_a_tie_within_the_models_rounding_passes() -> None:
    head, state, token = head_and_state()
    other = (token + 1) % VOCAB
    head[other] = head[token] * (1 + 2.0**-8)
    judge_next_token(head, state, token)
    head[other] = head[token] * 1.1
    with pytest.raises(CaptureRefused):
        judge_next_token(head, state, token)


WEIGHT = torch.arange(VOCAB * HIDDEN, dtype=torch.float32).reshape(VOCAB, HIDDEN)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"lm_head.weight": WEIGHT, "model.embed_tokens.weight": WEIGHT + 1}, WEIGHT),
        ({"model.embed_tokens.weight": WEIGHT, "model.norm.weight": WEIGHT[0].clone()}, WEIGHT),
        ({"language_model.lm_head.weight": WEIGHT.bfloat16()}, WEIGHT.bfloat16()),
        ({"model.norm.weight": WEIGHT[0]}, None),
        ({"lm_head.weight": WEIGHT.to(torch.int8)}, None),
    ],
    ids=["head", "tied", "nested, bf16", "none", "quantized"],
)
def test_the_head_is_found_in_a_checkpoint(
    tmp_path: Path, tensors: dict[str, torch.Tensor], expected: torch.Tensor | None
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    head = load_head(tmp_path)
    assert head is None if expected is None else head is not None and torch.equal(head, expected)


def test_the_head_is_found_through_an_index(tmp_path: Path) -> None:
    save_file({"model.norm.weight": WEIGHT[0]}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": WEIGHT}, tmp_path / "b.safetensors")
    names = {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    head = load_head(tmp_path)
    assert head is not None and torch.equal(head, WEIGHT)


def test_a_folder_without_weights_has_no_head(tmp_path: Path) -> None:
    assert load_head(tmp_path) is None


def through_norm(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(2)
    read = 30 * torch.randn(64, HIDDEN, generator=made) + 5
    centred = read - read.mean(dim=1, keepdim=True) if kind == "layer norm" else read
    weight = torch.randn(HIDDEN, generator=made)
    given = weight * centred / centred.square().mean(dim=1, keepdim=True).sqrt()
    return read.bfloat16(), (given + (1 if kind == "layer norm" else 0)).bfloat16()


@pytest.mark.parametrize("kind", ["RMS norm", "layer norm"])
def test_a_state_and_what_the_final_norm_makes_of_it_pass(kind: str) -> None:
    judge_final_norm(*through_norm(kind))


def test_another_state_before_the_norm_is_refused() -> None:
    read, given = through_norm("RMS norm")
    for wrong in (read.roll(1, 0), torch.randn(read.shape), given.roll(1, 1), read + 3 * torch.randn(read.shape)):
        with pytest.raises(CaptureRefused, match="the state before the final norm does not lead to the one after it"):
            judge_final_norm(wrong, given)
