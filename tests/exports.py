"""Runs to export, and what an export of them must hold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from outputs import Output, make_output

from ray_extract.capture.fp8 import decode

LAYERS = 8
BOUNDARIES = (2, 4, 5, 8)  # eagle3's three of 8 layers, and what the final norm reads
VOCAB = 64

# Ids are 100 * row + position, modulo the vocabulary; masks make each kind of row that a trainer refuses.
MASKS: tuple[tuple[int, ...], ...] = (
    (0, 0, 1, 1, 1, 0, 1),  # 0: usable by all
    (0, 1, 0, 1, 0, 1),  # 1: no two neighbours
    (0, 0, 0, 1),  # 2: only the last token
    (1, 0, 0),  # 3: only the first token
    (1, 1),  # 4: two tokens
    (1,),  # 5: one token
    (0, 1, 1) * 11,  # 6: usable by all
    (0, 0, 0, 0, 0, 0, 1, 1),  # 7: usable by all, but not its first six tokens
)


def ids_of(row: int) -> list[int]:
    """Token ids of a row of MASKS."""
    return [(100 * row + i) % VOCAB for i in range(len(MASKS[row]))]


def states_of(name: str, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """States that name, ids and position determine; f32 [n, 16]."""
    rng = np.random.default_rng([sum(name.encode()), *ids.tolist()])
    return rng.standard_normal((len(ids), 16), dtype=np.float32)


def make_run(folder: Path, **options: Any) -> Output:
    """A finished run over MASKS with BOUNDARIES and the final state, if no options say otherwise."""
    rows = [(ids_of(row), MASKS[row]) for row in range(len(MASKS))]
    return make_output(
        folder,
        **{"rows": rows, "boundaries": BOUNDARIES, "vocab": VOCAB, "states": states_of, "dtype": "bfloat16"} | options,
    )


def stored(run: Output, row: int, names: Sequence[str], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """What the run holds of a row; [n, hidden] for each name."""
    raw = [torch.from_numpy(run.stored[row][name].copy()) for name in names]
    return [decode(part) if run.job.capture.dtype != "model" else part.view(dtype) for part in raw]


def flip_a_bit(path: Path, at: int) -> None:
    """Change one bit of a file, keeping its size."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))
