"""Run by the trainers' Python: read an export with SpecForge's own loader, and store its batches.

read_specforge.py STRATEGY EXPORT OUT.safetensors     batches of three rows, as `<batch>.<name>`
read_specforge.py refused STRATEGY MASKS.json         which loss masks its normalizer raises on, as JSON
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from specforge.algorithms.common import dflash_family_data as family
from specforge.algorithms.eagle3 import data as eagle3
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore

LENGTH = 4096


def parts(strategy, folder):
    """Reader, normalizer and collator of a strategy."""
    options = {"run_id": "acceptance", "ttt_length": 7, "max_len": LENGTH}
    match strategy:
        case "eagle3":
            reader = eagle3.build_offline_reader(folder, **options)
            return reader, eagle3.build_offline_normalizer(LENGTH), eagle3.build_offline_collator()
        case "dflash":
            reader = family.build_offline_reader(strategy, folder, **options)
            return reader, family.build_offline_normalizer(LENGTH), family.build_collator()
        case "dspark":
            reader = family.build_dspark_offline_reader(strategy, folder, **options)
            return reader, family.build_dspark_offline_normalizer(LENGTH), family.build_dspark_collator()
    raise ValueError(strategy)


def read(strategy, folder, out):
    reader, normalize, collate = parts(strategy, folder)
    reader.validate_files = True  # its own check of the keys of every file
    loader = FeatureDataLoader(
        LocalFeatureStore("acceptance"),
        refs=reader.read(),
        batch_size=3,
        drop_last=False,
        strategy=strategy,
        collate_fn=collate,
        per_sample_transform=normalize,
    )
    found = {}
    for i, batch in enumerate(loader):
        found |= {f"{i}.{name}": tensor.contiguous().clone() for name, tensor in batch.tensors.items()}
    save_file(found, out)


def refused(strategy, masks):
    normalize = parts(strategy, ".")[1]
    raising = []
    for row, mask in enumerate(masks):
        states = torch.ones(1, len(mask), 4)
        raw = {
            "input_ids": torch.arange(len(mask)),
            "loss_mask": torch.tensor(mask),
            "hidden_states": states,
            "target_last_hidden_states": states,
            "aux_hidden_state": states,
            "hidden_state": states,
        }
        try:
            normalize(raw)
        except ValueError:
            raising.append(row)
    print(json.dumps(raising))


if __name__ == "__main__":
    if sys.argv[1] == "refused":
        refused(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
    else:
        read(*sys.argv[1:])
    assert "sglang" not in sys.modules
