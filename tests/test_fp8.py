"""States as fp8 records: what comes back, bit for bit and how near, against a plain definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ray_extract.capture.arena import TAIL_BYTES
from ray_extract.capture.fp8 import LARGEST, SMALLEST_AMAX, decode, encode
from ray_extract.shards.image import Column
from ray_extract.shards.values import as_tensor

# The magnitudes of e4m3 in the order of their bits: 4 bits of exponent with bias 7, 3 bits of mantissa.
E4M3 = np.array([(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)])
E4M3 = E4M3[:-1]  # the last pattern is NaN


def plain(token: np.ndarray) -> tuple[list[int], np.float32]:
    """Codes and scale of one fp32 token, by the definition."""
    amax = np.abs(token).max()
    if amax == 0:
        return [0] * len(token), np.float32(0)
    amax = max(amax, np.float32(SMALLEST_AMAX))
    codes = []
    for value in np.abs(token) * (np.float32(LARGEST) / amax):
        distance = np.abs(E4M3 - min(value, np.float32(LARGEST)))
        nearest = np.flatnonzero(distance == distance.min())
        codes.append(int(next((code for code in nearest if code % 2 == 0), nearest[0])))
    signs = np.signbit(token) * 0x80
    return [int(code | sign) for code, sign in zip(codes, signs, strict=True)], amax / np.float32(LARGEST)


@settings(max_examples=300, deadline=None)
@given(
    arrays(np.float32, (3, 16), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_value_is_the_nearest_of_e4m3(values, dtype):
    states = torch.from_numpy(values).to(dtype)
    states = torch.where(torch.isfinite(states), states, 1)
    for record, token in zip(encode(states).numpy(), states.float().numpy(), strict=True):
        codes, scale = plain(token)
        if scale:
            assert record[:16].tolist() == codes
        assert not (record[:16] & 0x7F).any() or scale
        assert record[16:].tobytes() == scale.tobytes() + bytes(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_comes_back_is_within_a_sixteenth_and_the_largest_is_exact(dtype):
    states = (torch.randn(500, 64) * torch.logspace(-3, 3, 500)[:, None]).to(dtype)
    records = encode(states)
    assert records.dtype == torch.uint8 and records.shape == (500, 64 + TAIL_BYTES)
    assert decode(records).dtype == torch.bfloat16
    back, wanted = decode(records, torch.float32), states.float()
    amax = wanted.abs().amax(dim=1, keepdim=True)
    normal = wanted.abs() > 1e-4 * amax
    assert float(((back - wanted).abs() / wanted.abs())[normal].max()) <= 1 / 16 + 1e-6
    torch.testing.assert_close(back.abs().amax(dim=1, keepdim=True), amax, rtol=1e-6, atol=0)
    torch.testing.assert_close(decode(records).float(), back, rtol=2**-8, atol=0)


def test_ties_go_to_the_even_neighbour_whatever_the_largest():
    """1.125 * (448 / 12) is 42 if the quotient is rounded once, halfway between 40 and 44."""
    assert encode(torch.tensor([[12.0, 1.125, -1.125, 2.25]])).tolist()[0][:4] == [0x7E, 98, 98 | 0x80, 106]


def test_zeros_are_zeros_and_what_is_not_finite_is_seen():
    states = torch.zeros(4, 16)
    states[1, 3], states[2, 4], states[3, 5] = float("nan"), float("inf"), float("-inf")
    records = encode(states)
    assert not records[0].any() and not decode(records)[0].any()
    for token, place in ((1, 3), (2, 4), (3, 5)):
        assert records[token, place] == 0x7F
    states[1:] += 1
    assert torch.isnan(decode(encode(states))[1:]).sum() == 3


def test_records_are_plain_bytes_that_anyone_can_read():
    records = encode(torch.tensor([[1.0, -448.0, 0.0, 1.75, 0.0, 0.0, 0.0, 3.5]] * 2)).numpy()
    assert records[1].tolist() == [0x38, 0xFE, 0, 0x3E, 0, 0, 0, 0x46, *np.float32(1).tobytes(), 0, 0, 0, 0]
    assert encode(torch.tensor([[896.0] + [0.0] * 7])).numpy()[0, 8:12].view(np.float32) == 2


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F8_E4M3"])
def test_no_tokens_are_a_tensor_of_no_tokens(dtype):
    width = Column("state.1", dtype, 64).token_bytes
    for stored in (
        np.zeros((0, width), np.uint8),
        np.zeros((5, width), np.uint8)[2:2].copy(),
        np.empty((0, width), "u1"),
    ):
        assert as_tensor(stored, dtype).shape == (0, 64)
        readonly = stored.copy()
        readonly.flags.writeable = False
        assert as_tensor(readonly, dtype).shape == (0, 64)
