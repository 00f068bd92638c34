"""Stored states against Transformers: right ones pass, wrong ones do not, in fp32 and in bf16."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ray_extract.errors import ConfigError
from ray_extract.recompute import StoredRow, state_errors

LAYERS = 4
NAMES = {"state.1": 1, "state.3": 3, "state.final": LAYERS}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models as small as these only wait for their threads where other processes compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a tiny random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def stored_rows(checkpoint, dtype, shift=0):
    """What a right capture stores; `shift` takes the states of another boundary."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    rng = np.random.default_rng(0)
    rows = []
    for length in (1, 9, 30):
        ids = rng.integers(0, 300, length, dtype=np.int32)
        with torch.inference_mode():
            states = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
        positions = np.arange(0, length, 2)
        picked = {name: states[b - shift][0][torch.from_numpy(positions)].clone() for name, b in NAMES.items()}
        rows.append(StoredRow(ids, positions, picked))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_states_pass(checkpoint, dtype):
    errors = state_errors(stored_rows(checkpoint, dtype), checkpoint)
    assert [e.name for e in errors] == list(NAMES)
    assert all(e.ok and e.tokens == 1 + 5 + 15 for e in errors)
    if dtype == torch.float32:
        assert all(e.max < 1e-6 and e.reference_p50 == 0 for e in errors)
    else:
        assert all(0 < e.reference_p50 < 0.1 and e.p50 == e.reference_p50 for e in errors)
        assert "Transformers' own" in str(errors[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_the_layer_before_fail(checkpoint, dtype):
    assert not any(e.ok for e in state_errors(stored_rows(checkpoint, dtype, shift=1), checkpoint))


def test_states_a_token_off_fail(checkpoint):
    rows = [
        dataclasses.replace(r, states={n: s.roll(1, 0) for n, s in r.states.items()})
        for r in stored_rows(checkpoint, torch.bfloat16)
    ]
    assert not any(e.ok for e in state_errors(rows, checkpoint))


def test_half_precision_twice_as_far_as_it_must_be_fails(checkpoint):
    rows = stored_rows(checkpoint, torch.bfloat16)
    coarse = [
        dataclasses.replace(r, states={n: s.to(torch.float8_e4m3fn).to(s.dtype) for n, s in r.states.items()})
        for r in rows
    ]
    assert not any(e.ok for e in state_errors(coarse, checkpoint))


def test_one_token_beyond_the_tolerance_fails_in_fp32(checkpoint):
    rows = stored_rows(checkpoint, torch.float32)
    rows[2].states["state.3"][4] *= 1 + 3e-5
    assert [e.name for e in state_errors(rows, checkpoint) if not e.ok] == ["state.3"]


def test_nan_fails(checkpoint):
    rows = stored_rows(checkpoint, torch.float32)
    rows[0].states["state.1"][0, 0] = float("nan")
    assert [e.name for e in state_errors(rows, checkpoint) if not e.ok] == ["state.1"]


def test_another_model_and_no_model_are_clear_errors(checkpoint, tmp_path):
    rows = stored_rows(checkpoint, torch.float32)
    other = [dataclasses.replace(r, states={"state.7": r.states["state.1"]}) for r in rows]
    with pytest.raises(ConfigError, match=r"state\.7: this checkpoint has 4 layers"):
        state_errors(other, checkpoint)
    with pytest.raises(ConfigError, match="Transformers cannot load it"):
        state_errors(rows, str(tmp_path))
