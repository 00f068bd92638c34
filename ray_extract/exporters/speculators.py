"""speculators 0.9.0's offline data: a data set of Hugging Face's, and one safetensors file a row.

Sources: speculators `train/data.py` (ArrowDataset) and `data_generation/preprocessing.py`; hs-connectors 0.9.0
`transfer.py` (FileTransfer); the layout that datasets 5.1 gives `save_to_disk`, written here with pyarrow alone.

    data-00000-of-00001.arrow   Arrow stream: input_ids list<i64>, loss_mask list<i64>, seq_len i64
    dataset_info.json, state.json   state.json comes last, so an unfinished export does not load
    hidden_states/hs_<i>.safetensors   i: line in the data set above, from 0
        hidden_states   [T, K+1, H]  the boundaries in the order of the draft's layer ids; then the state *before* the
                                     final norm, since the trainer applies the verifier's norm itself
        token_ids       i64 [T]
        in fp8 (hs-connectors' fp8_utils.py, which the trainer's backend `fp8` reads): hidden_states are e4m3, and
        hidden_states_scales f32 [T, 1, 1] is one scale a token for all its states
    d2t-<D>.npy i64 [D], t2d-<D>.npy bool [V]   the vocabulary's maps, where the trainer looks for those of size D
    rows.npy                    i64 [lines, 2]: item of readers.dataset.HiddenStates, and index in the run's prepared
                                data set; not the trainer's, see speculators_backend

Row t of every tensor belongs to token t; the trainer shifts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from ray_extract.capture.arena import TAIL_BYTES
from ray_extract.capture.fp8 import encode
from ray_extract.exporters.source import Choice
from ray_extract.tensors import make_header

DATA_FILE = "data-00000-of-00001.arrow"
INFO_FILE = "dataset_info.json"
STATE_FILE = "state.json"
ROWS_FILE = "rows.npy"

_BLOCK_BYTES = 32 << 20
_BATCH_ROWS = 1000
_BATCH_TOKENS = 4 << 20
_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_INTEGER = {"dtype": "int64", "_type": "Value"}
_FEATURES = {
    "input_ids": {"feature": _INTEGER, "_type": "List"},
    "loss_mask": {"feature": _INTEGER, "_type": "List"},
    "seq_len": _INTEGER,
}
_SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int64())),
        pa.field("loss_mask", pa.list_(pa.int64())),
        pa.field("seq_len", pa.int64()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)

Line = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]
"""Token ids and loss mask of a row, [n] each."""


def row_name(line: int) -> str:
    """The file with the states of a line of the data set."""
    return f"hidden_states/hs_{line}.safetensors"


def vocab_names(draft_vocab: int) -> tuple[str, str]:
    """Files of d2t and t2d."""
    return f"d2t-{draft_vocab}.npy", f"t2d-{draft_vocab}.npy"


def stacked(item: Mapping[str, Any], choice: Choice, first: int = 0, end: int | None = None) -> torch.Tensor:
    """The states of some tokens of a row; [T, K+1, H], contiguous.

    Args:
        item: of readers.dataset.HiddenStates: all tokens, with choice.names.
        choice: what goes where.
        first, end: the tokens; all by default.
    """
    return torch.stack([item[name][first:end] for name in choice.names], dim=1)


def write_states(out: BinaryIO, item: Mapping[str, Any], choice: Choice, fp8: bool = False) -> None:
    """Write a row's file, in blocks of 32 MiB: a safetensors header, the states, the ids, and in fp8 the scales."""
    tokens = len(item["input_ids"])
    state = item[choice.names[0]]
    hidden, width = state.shape[1], len(choice.names)
    tensors = [
        ("hidden_states", "F8_E4M3" if fp8 else _CODES[state.dtype], (tokens, width, hidden)),
        ("token_ids", "I64", (tokens,)),
        *([("hidden_states_scales", "F32", (tokens, 1, 1))] if fp8 else []),
    ]
    out.write(make_header(tensors, {}).text)
    step = max(1, _BLOCK_BYTES // (width * hidden * state.element_size()))
    scales = []
    for at in range(0, tokens, step):
        block = stacked(item, choice, at, at + step)
        if fp8:
            records = encode(block.flatten(1))
            block = records[:, :-TAIL_BYTES]
            scales.append(records[:, -TAIL_BYTES:-4])
        out.write(_bytes(block))
    for part in (item["input_ids"], *scales):
        out.write(_bytes(part))


def write_data(out: BinaryIO, lines: Iterable[Line]) -> None:
    """Write the data set's only data file; at most a thousand rows, of four million tokens, in memory."""
    with pa.ipc.new_stream(out, _SCHEMA) as writer:
        for batch in _batches(lines):
            lengths = np.array([len(ids) for ids, _ in batch], dtype=np.int64)
            writer.write_batch(
                pa.record_batch(
                    [
                        _lists([ids for ids, _ in batch], lengths),
                        _lists([mask for _, mask in batch], lengths),
                        pa.array(lengths),
                    ],
                    schema=_SCHEMA,
                )
            )


def info_json() -> bytes:
    """Content of dataset_info.json."""
    return json.dumps(
        {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}, indent=2
    ).encode()


def state_json(fingerprint: str) -> bytes:
    """Content of state.json; torch is the format in which rows are handed out.

    Args:
        fingerprint: hex, different for different data.
    """
    return json.dumps(
        {
            "_data_files": [{"filename": DATA_FILE}],
            "_fingerprint": fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        },
        indent=2,
    ).encode()


def _batches(lines: Iterable[Line]) -> Iterator[list[Line]]:
    batch: list[Line] = []
    tokens = 0
    for line in lines:
        batch.append(line)
        tokens += len(line[0])
        if len(batch) == _BATCH_ROWS or tokens >= _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _lists(parts: list[npt.NDArray[Any]], lengths: npt.NDArray[np.int64]) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(parts).astype(np.int64)))


def _bytes(tensor: torch.Tensor) -> bytes | memoryview:
    raw: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).numpy()
    return raw.reshape(-1).data
