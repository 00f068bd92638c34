"""Run by the trainers' Python: read an export with speculators' own data set, and store every row.

    read_speculators.py STRATEGY BACKEND EXPORT OUT.safetensors LENGTH HIDDEN LAYERS

Stores each item as `<row>.<name>`, and one batch of all of them, packed as the strategy's, as `batch.<name>`. With the
backend `ray_extract`, the items come through spawned data-loader workers.
"""

import argparse
import sys

import torch
from hs_connectors import HiddenStatesBackend
from safetensors.torch import save_file
from speculators.data_generation.offline import check_hidden_states
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from torch.utils.data import DataLoader

from ray_extract.exporters.speculators_backend import register

PREPROCESS = {"eagle3": shift_batch, "dflash": None}
"""As in speculators' train/cli.py."""


def first(batch):
    return batch[0]


def main(strategy, backend, folder, out, length, hidden, layers):
    register()
    register()  # once is enough, twice is harmless
    args = argparse.Namespace(hidden_states_path=None, ray_extract_url=None)
    transfer = HiddenStatesBackend.registry[backend].from_train_args(args, folder)
    data = ArrowDataset(
        max_len=length, datapath=folder, on_missing="raise", transfer=transfer, hidden_states_dtype=torch.float32
    )
    workers = {"num_workers": 2, "multiprocessing_context": "spawn"} if backend == "ray_extract" else {}
    items = list(DataLoader(data, batch_size=1, collate_fn=first, **workers))
    found = {}
    for row, item in enumerate(items):
        check_hidden_states(transfer.get_cached(row), data.data[row]["input_ids"].tolist())
        found |= {f"{row}.{name}": value.contiguous().clone() for name, value in item.items()}
    collate = CollateFn(length, hidden, layers, dtype=torch.float32, preprocess=PREPROCESS[strategy])
    batch = collate([dict(item) for item in items])
    found |= {f"batch.{name}": value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert batch["error_records"] == 0, batch["error_records"]
    assert data.approx_lengths == [len(item["input_ids"]) for item in items]
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:]))
    assert not {"vllm", "sglang"} & set(sys.modules)
