"""A state stored in fp8: for each token a record of H e4m3 values, one scale, and four zero bytes.

    u8 [H]   e4m3 (the variant `e4m3fn`: no infinity): value * (448 / amax), to nearest, ties to even
    f32      scale, little-endian: amax / 448, amax being the token's largest magnitude; 0 for a token of zeros
    u8 [4]   0, since the digest goes by eight bytes

The scale lies beside the values so that a state of a row stays one range of bytes: one copy from the GPU, one request
to a store. The largest value is kept exactly: in many models a few channels hold most of a token's norm. Against the
largest, values under 4e-5 lose precision, and those under 3e-6 vanish. A GPU and a CPU write the same bytes.
"""

import torch

from ray_extract.capture.arena import TAIL_BYTES

LARGEST = 448.0
"""Largest finite value of e4m3."""
SMALLEST_AMAX = 1e-35
"""A smaller largest magnitude counts as this one, so that neither the scale nor its inverse leaves fp32."""

_NAN = 0x7F


def encode(states: torch.Tensor) -> torch.Tensor:
    """Records of states.

    Args:
        states: [T, H] of fp32, bf16 or fp16. Infinity becomes NaN.

    Returns:
        u8 [T, H + TAIL_BYTES].
    """
    values = states.float()
    finite = torch.isfinite(values)
    amax = torch.where(finite, values, 0.0).abs().amax(dim=1, keepdim=True)
    bounded = amax.clamp_min(SMALLEST_AMAX)
    # Tensor over tensor: of a number over a tensor PyTorch makes a reciprocal and a product, rounded twice.
    codes = (
        (values * (torch.full_like(bounded, LARGEST) / bounded))
        .clamp(-LARGEST, LARGEST)
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
    )
    records = states.new_zeros((len(states), states.shape[1] + TAIL_BYTES), dtype=torch.uint8)
    # Versions of PyTorch differ in what they make of infinity.
    records[:, :-TAIL_BYTES] = torch.where(finite, codes, _NAN)
    records[:, -TAIL_BYTES:-4] = torch.where(amax > 0, bounded / LARGEST, 0.0).view(torch.uint8)
    return records


def decode(records: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """States from their records, on whatever device they are.

    Args:
        records: u8 [..., H + TAIL_BYTES].

    Returns:
        [..., H], rounded to `dtype`.
    """
    scale = records[..., -TAIL_BYTES:-4].contiguous().view(torch.float32)
    values = records[..., :-TAIL_BYTES].contiguous().view(torch.float8_e4m3fn)
    return (values.float() * scale).to(dtype)
