"""Stored bytes of a state as a tensor."""

import numpy as np
import numpy.typing as npt
import torch

from ray_extract.capture.fp8 import decode
from ray_extract.shards.image import FP8

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Of the states that are stored as they are."""


def as_tensor(stored: npt.NDArray[np.uint8], dtype: str) -> torch.Tensor:
    """The values of a state, a writable tensor [kept, H].

    Shares the memory of a writable array (a private memory map); read-only ones (a range read, a decoded Parquet
    value, which a cache may hand out again) are copied.

    Args:
        stored: u8 [kept, bytes per token].
        dtype: of its column. Records of fp8 become bf16.
    """
    tensor = torch.from_numpy(stored if stored.flags.writeable else stored.copy())
    if not len(stored):  # whose strides NumPy leaves at 0, which no view of another type accepts
        tensor = torch.empty(stored.shape, dtype=torch.uint8)
    return decode(tensor) if dtype == FP8 else tensor.view(TORCH_DTYPES[dtype])
