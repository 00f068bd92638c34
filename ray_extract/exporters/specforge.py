"""SpecForge 0.2.0's offline features: one `.ckpt` a row.

Format: `specforge_hidden_states_v1` of its `algorithms/*/providers.py`, read by `runtime/data_plane/offline_reader.py`
and `feature_store.py`. Its loader walks a folder for `*.ckpt`, sorts the paths as strings, and opens each with
`torch.load(mmap=True)`: the zip form of `torch.save`, which is a pickle around plain tensors. We write it because the
trainer reads nothing else; nothing of ours reads it back.

    hidden_states/rows-<group>/data-<row>.ckpt   row: index in the prepared data set; 2000 rows a group
        input_ids                    i64 [T]
        loss_mask                    i64 [T]
        eagle3   aux_hidden_state    [1, T, 3 H]  the boundaries side by side, in the order of the draft's layer ids
                 hidden_state        [1, T, H]    final, after the norm
        dflash   hidden_states       [1, T, k H]
        dspark   hidden_states       [1, T, k H]
                 target_last_hidden_states  [1, T, H]  final, after the norm
    vocab_mapping/vocab_mapping.pt               d2t i64 [D], t2d bool [V]; see readers.vocab

Row t of every tensor belongs to token t; the trainer shifts. No padding.
"""

from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from ray_extract.exporters.source import Choice

STATES_FOLDER = "hidden_states"
VOCAB_FILE = "vocab_mapping/vocab_mapping.pt"
ENDING = ".ckpt"
ROWS_A_GROUP = 2000

_KEYS = {
    "eagle3": ("aux_hidden_state", "hidden_state"),
    "dflash": ("hidden_states", None),
    "dspark": ("hidden_states", "target_last_hidden_states"),
}
"""By strategy: where the boundaries go, and where the last state."""


def row_name(row: int) -> str:
    """A row's file. Zero-padded, so that paths sort as the data set does."""
    return f"{STATES_FOLDER}/rows-{row // ROWS_A_GROUP:07d}/data-{row:010d}{ENDING}"


def features(item: Mapping[str, Any], choice: Choice, strategy: str) -> dict[str, torch.Tensor]:
    """A row's features, as in the module's docstring.

    Args:
        item: of readers.dataset.HiddenStates: all tokens, with choice.names.
        choice: what goes where.
        strategy: of SpecForge.
    """
    states, last = _KEYS[strategy]
    found = {
        "input_ids": item["input_ids"],
        "loss_mask": item["loss_mask"].to(torch.int64),
        states: torch.cat([item[name] for name in choice.states], dim=1).unsqueeze(0),
    }
    if last is not None and choice.last is not None:
        found[last] = item[choice.last].unsqueeze(0)
    # torch.save writes the whole memory behind a view.
    return {
        key: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for key, tensor in found.items()
    }


def write_features(out: BinaryIO, item: Mapping[str, Any], choice: Choice, strategy: str) -> None:
    """Write a row's file. Needs memory for one row; equal rows give equal bytes."""
    torch.save(features(item, choice, strategy), out)


def write_vocab(out: BinaryIO, d2t: npt.NDArray[np.int64], t2d: npt.NDArray[np.bool_]) -> None:
    """Write the vocabulary's maps; see readers.vocab.vocab_maps."""
    torch.save({"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)}, out)
