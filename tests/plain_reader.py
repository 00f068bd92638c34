"""A reader of outputs, written from docs/formats.md alone: NumPy, pyarrow, and nothing of this package."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

Array = npt.NDArray[Any]

ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4}
KINDS = {"I64": "<i8", "U64": "<u8", "F64": "<f8", "F32": "<f4", "I32": "<i4", "U8": "u1"}


@dataclasses.dataclass
class PlainRow:
    """A row that is ok: ids i32 [n], mask u8 [n], positions i64 [kept], states f32 [kept, H] by name."""

    input_ids: Array
    loss_mask: Array
    positions: Array
    states: dict[str, Array]
    digests: list[int]


def read_output(folder: Path) -> dict[int, PlainRow]:
    """Every row that is ok, by index, its digests compared with the manifest's."""
    manifest = pq.ParquetFile(max(folder.glob("manifest-*.parquet"))).read()
    names = [name for name, _, _ in json.loads(manifest.schema.metadata[b"ray_extract.columns"])]
    rows = {}
    for line in manifest.to_pylist():
        if line["status"] == "ok":
            read = read_raw if line["format"] == "raw" else read_parquet
            rows[line["row"]] = found = read(folder / line["shard"], line)
            assert found.digests == line["digests"] and list(found.states) == names
            assert len(found.input_ids) == line["n_tokens"] and len(found.positions) == line["kept"]
    return rows


def read_raw(path: Path, line: dict[str, Any]) -> PlainRow:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["__metadata__"]["format"] == "ray_extract" and header["__metadata__"]["version"] == "1"

    def tensor(name: str) -> Array:
        begin, end = (8 + length + at for at in header[name]["data_offsets"])
        return np.frombuffer(data[begin:end], KINDS[header[name]["dtype"]]).reshape(header[name]["shape"])

    row = line["row_in_shard"]
    seqlens, spans = tensor("cu_seqlens"), tensor("cu_spans")
    assert tensor("cu_kept")[row] == line["token_offset"]
    states, words = {}, {}
    for name, entry in header.items():
        if name.startswith("state."):
            tokens = entry["shape"][0]
            begin, end = (8 + length + at for at in entry["data_offsets"])
            assert begin % 4096 == 0
            size = (end - begin) // tokens
            first = begin + line["token_offset"] * size
            assert first == line["states_offset"] + len(states) * line["states_stride"] + line["token_offset"] * size
            stored = np.frombuffer(data[first : first + line["kept"] * size], np.uint8).reshape(-1, size)
            dtype = "F8_E4M3" if entry["dtype"] == "U8" else entry["dtype"]
            states[name], words[name] = values(stored, dtype), stored
    ids = tensor("input_ids")[seqlens[row] : seqlens[row + 1]]
    return PlainRow(
        ids,
        tensor("loss_mask")[seqlens[row] : seqlens[row + 1]],
        positions(tensor("spans")[spans[row] : spans[row + 1]]),
        states,
        digests(ids, words),
    )


def read_parquet(path: Path, line: dict[str, Any]) -> PlainRow:
    table = pq.ParquetFile(path).read()
    columns = json.loads(table.schema.metadata[b"ray_extract.columns"])
    pieces = [piece for piece in table.to_pylist() if piece["row_in_shard"] == line["row_in_shard"]]
    assert [piece["piece"] for piece in pieces] == list(range(len(pieces)))
    head = pieces[0]
    states, words = {}, {}
    for name, dtype, hidden in columns:
        size = hidden + 8 if dtype == "F8_E4M3" else hidden * ITEMSIZE[dtype]
        stored = np.frombuffer(b"".join(piece[name] for piece in pieces), np.uint8).reshape(-1, size)
        states[name], words[name] = values(stored, dtype), stored
    ids = np.array(head["input_ids"], np.int32)
    spans = np.array(head["spans"], np.int64).reshape(-1, 2)
    mask = np.frombuffer(head["loss_mask"], np.uint8)
    return PlainRow(ids, mask, positions(spans), states, digests(ids, words))


def positions(spans: Array) -> Array:
    return np.concatenate([np.arange(start, end) for start, end in spans])


def values(stored: Array, dtype: str) -> Array:
    """The numbers of u8 [tokens, bytes]; f32 [tokens, H]."""
    if dtype == "F32":
        return np.ascontiguousarray(stored).view(np.float32)
    if dtype == "F16":
        return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (np.ascontiguousarray(stored).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    codes, scale = stored[:, :-8].astype(np.int64), np.ascontiguousarray(stored[:, -8:-4]).view(np.float32)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return (np.where(codes & 128, -size, size) * scale).astype(np.float32)


def splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def digests(ids: Array, stored: dict[str, Array]) -> list[int]:
    """Of the token ids, and of each state's bytes."""
    found = []
    for tokens in (
        ids.astype(np.uint32).reshape(-1, 1),
        *(np.ascontiguousarray(s).view("<u4") for s in stored.values()),
    ):
        total = 0
        for p, words in enumerate(tokens.tolist()):
            total += (splitmix64(2**32 + p) | 1) * (1 + sum((splitmix64(c) | 1) * w for c, w in enumerate(words)))
        found.append(total % 2**64)
    return found


def sha256_of_all_but_states(path: Path) -> str:
    """Of a raw shard."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    states = sorted(entry["data_offsets"] for name, entry in header.items() if name.startswith("state."))
    parts, at = [], 0
    for begin, end in states:
        parts.append(data[at : 8 + length + begin])
        at = 8 + length + end
    return hashlib.sha256(b"".join([*parts, data[at:]])).hexdigest()
