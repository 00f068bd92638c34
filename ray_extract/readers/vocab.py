"""The vocabulary of a draft model: the most frequent supervised tokens of the target's."""

import numpy as np
import numpy.typing as npt

from ray_extract.errors import ConfigError


def add_counts(
    counts: npt.NDArray[np.int64], input_ids: npt.NDArray[np.integer], loss_mask: npt.NDArray[np.integer]
) -> None:
    """Count the supervised tokens of a row.

    Args:
        counts: i64 [V], added to in place; V is the size of the target's vocabulary.
        input_ids: [n].
        loss_mask: [n], not 0 where the token is supervised.

    Raises:
        ConfigError: a supervised token is none of this vocabulary; counts are unchanged then.
    """
    supervised = np.asarray(input_ids)[np.asarray(loss_mask) != 0]
    if len(supervised) and not 0 <= supervised.min() <= supervised.max() < len(counts):
        wrong = supervised.min() if supervised.min() < 0 else supervised.max()
        raise ConfigError(f"token id {wrong} is outside the vocabulary of {len(counts)} tokens")
    np.add.at(counts, supervised, 1)


def vocab_maps(counts: npt.NDArray[np.int64], draft_vocab: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Maps between a target's vocabulary and the draft's, which is its `draft_vocab` most frequent tokens.

    Of equally frequent tokens the lower id is taken, so unseen tokens fill up from id 0. The draft's tokens are in the
    order of the target's ids, as SpecForge 0.2.0 (`data/preprocessing.py`) and speculators 0.9.0
    (`train/vocab_mapping.py`) have them.

    Args:
        counts: i64 [V], of the target's tokens.
        draft_vocab: D, at most V.

    Returns:
        d2t: i64 [D]; draft token d is the target's token d + d2t[d].
        t2d: bool [V]; whether the target's token is in the draft's vocabulary.

    Raises:
        ConfigError: D is not within 1..V.
    """
    if not 1 <= draft_vocab <= len(counts):
        raise ConfigError(f"draft vocabulary of {draft_vocab} tokens: must be within 1..{len(counts)}, the target's")
    chosen = np.sort(np.argsort(-counts, kind="stable")[:draft_vocab])
    t2d = np.zeros(len(counts), dtype=np.bool_)
    t2d[chosen] = True
    return chosen - np.arange(draft_vocab), t2d
