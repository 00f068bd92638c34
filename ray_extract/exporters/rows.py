"""Which rows a trainer can use. Pure."""

import numpy as np
import numpy.typing as npt

from ray_extract.presets import Target

NO_PAIR = "no two neighbouring supervised tokens"
UNSUPERVISED = "no supervised token that the trainer uses"


def why_left_out(mask: npt.NDArray[np.uint8], target: Target, min_supervised: int = 1) -> str | None:
    """Why a trainer would refuse a row, or learn nothing from it; None if it can use it.

    SpecForge 0.2.0 raises in the middle of training on a row of the DFlash family without two neighbouring supervised
    tokens (`algorithms/common/dflash_family_data.py`), and zeroes the last mask entry of EAGLE3's rows
    (`algorithms/eagle3/data.py`). speculators 0.9.0 drops the first token of EAGLE3's rows (`models/eagle3/data.py`),
    and rows with too few supervised tokens when it prepares them (`data_generation/preprocessing.py`).

    Args:
        mask: loss mask as it would be exported, [n].
        target: the trainer and its strategy.
        min_supervised: fewest supervised tokens, of the whole row.
    """
    supervised = mask != 0
    match target.unused:
        case "first":
            used = supervised[1:]
        case "last":
            used = supervised[:-1]
        case _:
            used = supervised
    if not used.any():
        return UNSUPERVISED
    if supervised.sum() < min_supervised:
        return f"fewer than {min_supervised} supervised tokens"
    if target.pairs and not (supervised[:-1] & supervised[1:]).any():
        return NO_PAIR
    return None
