"""The statistics of a state of a row, computed again from what is stored of it; in NumPy, at 1 to 5 GB/s a core.

What was captured is what is stored, so all must agree exactly but `sumsq`: its addends come in another order, and those
of a token are added in fp32, here as on a GPU. Of a state in fp8 they are statistics of what the model computed, and
what is stored of it is rounded to four bits, but for a token's largest magnitude.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ray_extract.capture.arena import TAIL_BYTES
from ray_extract.shards.image import FP8

SUMSQ_RTOL = 1e-4
"""Eight partial sums of 16,384 squares in fp32 are off by less, even if every addition rounds the same way."""
FP8_SUMSQ_RTOL = 0.14
"""A value in fp8 is off by a sixteenth at most, so its square by an eighth and a bit."""
FP8_AMAX_RTOL = 1e-6
"""That of a token is stored as 448 and a scale in fp32."""

_TINY = 1e-35  # fp32 may lose the square of what is smaller, and capture.fp8 takes it for this
_FP32_MAX = float(np.finfo(np.float32).max)
_BLOCK_BYTES = 256 << 10  # stays in the cache from one pass to the next


class _Magnitude(NamedTuple):
    """A type's bits without the sign: they ascend with the magnitude, and shifted they are a fp32 number.

    Args:
        words: of one value.
        mask: of all bits but the sign.
        infinity: bits of the smallest that is not finite.
        shift: to where fp32 has its exponent.
        power: of two, by which that is then too small.
    """

    words: type[np.unsignedinteger]
    mask: int
    infinity: int
    shift: int
    power: int


_MAGNITUDES = {
    "F32": _Magnitude(np.uint32, 0x7FFFFFFF, 0x7F800000, 0, 0),
    "BF16": _Magnitude(np.uint16, 0x7FFF, 0x7F80, 16, 0),
    "F16": _Magnitude(np.uint16, 0x7FFF, 0x7C00, 13, 112),
    FP8: _Magnitude(np.uint8, 0x7F, 0x7F, 20, 120),  # no infinity, and one NaN
}


@dataclasses.dataclass(slots=True)
class StateStats:
    """Statistics of a state of a row, see base.RowStats; of the tokens that were added."""

    sumsq: float = 0.0
    amax: float = 0.0
    nonfinite: int = 0
    zero: int = 0

    def add(self, tokens: npt.NDArray[np.uint8], dtype: str) -> None:
        """Add tokens in any order.

        Args:
            tokens: their bytes, u8 [count, bytes per token].
            dtype: of the column.
        """
        kind = _MAGNITUDES[dtype]
        step = max(1, _BLOCK_BYTES // tokens.shape[1])
        for at in range(0, len(tokens), step):
            block = tokens[at : at + step]
            scale = np.ones(len(block), np.float32)
            if dtype == FP8:
                scale = np.ascontiguousarray(block[:, -TAIL_BYTES:-4]).view(np.float32)[:, 0]
                block = block[:, :-TAIL_BYTES]
            bits = block.view(kind.words) & kind.words(kind.mask)
            largest = bits.max(axis=1)
            if (largest >= kind.infinity).any():
                self.nonfinite += int((bits >= kind.infinity).sum())
                continue  # no row that is ok has any, so the rest of it does not count
            self.zero += int((largest == 0).sum())
            self.amax = max(self.amax, float((_values(largest, kind) * scale).max()))
            values = _values(bits, kind)
            squares = np.einsum("ij,ij->i", values, values).astype(np.float64)
            if not np.isfinite(squares).all():
                squares = np.einsum("ij,ij->i", values, values, dtype=np.float64)
            self.sumsq += float((squares * np.square(scale, dtype=np.float64)).sum())

    def differences(self, stored: "StateStats", dtype: str) -> list[str]:
        """Names of the statistics that are not those of the tokens added.

        Args:
            stored: what the shard says.
            dtype: of the column.
        """
        amax_rtol, sumsq_rtol = (FP8_AMAX_RTOL, FP8_SUMSQ_RTOL) if dtype == FP8 else (0.0, SUMSQ_RTOL)
        # Squares that leave fp32 are infinite on a GPU.
        lost = stored.sumsq == math.inf and self.sumsq > _FP32_MAX
        right = {
            "sumsq": lost or math.isclose(stored.sumsq, self.sumsq, rel_tol=sumsq_rtol, abs_tol=_TINY),
            "amax": math.isclose(stored.amax, self.amax, rel_tol=amax_rtol, abs_tol=_TINY if dtype == FP8 else 0.0),
            "nonfinite": stored.nonfinite == self.nonfinite,
            "zero": stored.zero == self.zero,
        }
        return [name for name, is_right in right.items() if not is_right]


def _values(bits: npt.NDArray[np.unsignedinteger], kind: _Magnitude) -> npt.NDArray[np.float32]:
    """Magnitudes from their bits; f32 of the same shape."""
    found = (bits.astype(np.uint32) << np.uint32(kind.shift) if kind.shift else bits).view(np.float32)
    return found * np.float32(2.0**kind.power) if kind.power else found
