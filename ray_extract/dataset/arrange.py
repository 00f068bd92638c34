"""Prepared rows without duplicates, and in another order.

Duplicates are found by the ids of rows, of which files of a temporary folder ($TMPDIR) hold 24 bytes each. Another
order needs all rows before the first one can go on, so rows wait there, five bytes a token. Memory holds a 256th of
either.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from ray_extract.config import DatasetConfig
from ray_extract.dataset.prepare import PreparedRow, chance
from ray_extract.dataset.prepared import PreparedRows

_ID = np.dtype([("high", ">u8"), ("low", ">u8"), ("index", ">u8")])


def arrange(
    rows: PreparedRows, data: DatasetConfig, again: npt.NDArray[np.bool_] | None = None
) -> Iterator[PreparedRow]:
    """Do what `dedup` and `shuffle` ask for.

    Args:
        rows: in the order of the input.
        data: what to do.
        again: bool [R], what `duplicates` found; None to keep them.
    """
    marked = (_duplicate(row) if again is not None and again[row.index] else row for row in rows.stream())
    return shuffled(marked, data.seed) if data.shuffle else marked


def duplicates(ids: Iterable[tuple[int, str]], count: int) -> npt.NDArray[np.bool_]:
    """Which rows have the id of an earlier one: bool [count].

    Args:
        ids: index and id of the usable rows.
        count: all rows.
    """
    again = np.zeros(count, bool)
    with _Scratch() as files:
        for index, name in ids:
            # By the first byte, so that equal ones are in one file.
            files[name[:2]].write(bytes.fromhex(name) + index.to_bytes(8, "big"))
        for file in files.files():
            again[_repeated(np.fromfile(file, _ID))] = True
    return again


def _repeated(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Indices of the rows whose id a row of a lower index has."""
    ids = ids[np.lexsort((ids["index"], ids["low"], ids["high"]))]
    same = (ids["high"][1:] == ids["high"][:-1]) & (ids["low"][1:] == ids["low"][:-1])
    repeated: npt.NDArray[np.int64] = ids["index"][1:][same].astype(np.int64)
    return repeated


def _duplicate(row: PreparedRow) -> PreparedRow:
    return dataclasses.replace(
        row, input_ids=row.input_ids[:0], loss_mask=row.loss_mask[:0], reason="duplicate", truncated=False
    )


def shuffled(rows: Iterator[PreparedRow], seed: int) -> Iterator[PreparedRow]:
    """The same rows in a random order that only the seed and their number decide, numbered anew."""
    with _Scratch() as buckets:
        for row in rows:
            _write(buckets[f"{chance(seed, 'shuffle', row.index) >> 56:02x}"], row)
        index = 0
        for file in buckets.files():
            for row in sorted(_read(file), key=lambda row: (chance(seed, "shuffle", row.index), row.index)):
                yield dataclasses.replace(row, index=index)
                index += 1


class _Scratch:
    """Files by name in a temporary folder; made when first asked for."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray_extract-rows-")
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._folder.cleanup()

    def __getitem__(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = (Path(self._folder.name) / name).open("w+b")
        return self._files[name]

    def files(self) -> Iterator[BinaryIO]:
        """All files in the order of their names, to be read."""
        for _, file in sorted(self._files.items()):
            file.seek(0)
            yield file


def _write(file: BinaryIO, row: PreparedRow) -> None:
    head = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    head |= {"input_ids": None, "loss_mask": len(row.loss_mask)}
    file.write(json.dumps(head).encode() + b"\n")
    file.write(np.ascontiguousarray(row.input_ids, np.int32).tobytes())
    file.write(row.loss_mask.tobytes())


def _read(file: BinaryIO) -> Iterator[PreparedRow]:
    while line := file.readline():
        head = json.loads(line)
        count = head["loss_mask"]
        head["input_ids"] = np.frombuffer(file.read(4 * count), np.int32)
        head["loss_mask"] = np.frombuffer(file.read(count), np.uint8)
        yield PreparedRow(**head)
