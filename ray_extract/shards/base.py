"""What every reader of a shard offers, whatever its format, and the check of a row against its sealed digests."""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_extract.capture.digest import add_digests, digest_ids, digest_tokens
from ray_extract.errors import ConfigError, ShardError
from ray_extract.records import RowStatus
from ray_extract.shards.image import STATE_DTYPES, Column, RowTable
from ray_extract.shards.stats import StateStats

BLOCK_BYTES = 16 << 20  # of a state, read at once to check it; a range request of this size runs at full speed


@dataclasses.dataclass(frozen=True, slots=True)
class RowStats:
    """Statistics of R rows and K states, computed where the digests are.

    Args:
        sumsq: f64 [R, K], sum of squares.
        amax: f32 [R, K], largest magnitude.
        nonfinite: i32 [R, K], NaN and infinite values.
        zero: i32 [R, K], stored tokens whose state is all zero.
    """

    sumsq: npt.NDArray[np.float64]
    amax: npt.NDArray[np.float32]
    nonfinite: npt.NDArray[np.int32]
    zero: npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardContents:
    """Everything of a shard but its states.

    Args:
        columns: the K state columns, in order.
        metadata: the image's metadata, strings.
        table: the R rows.
        status: u8 [R], records.RowStatus.
        digest: u64 [R, 1+K], column 0 for the token ids; all 0 for a row that is not OK.
        stats: statistics; all 0 for a row that is not OK.
    """

    columns: tuple[Column, ...]
    metadata: dict[str, str]
    table: RowTable
    status: npt.NDArray[np.uint8]
    digest: npt.NDArray[np.uint64]
    stats: RowStats


class Shard(abc.ABC):
    """An open shard. Its memory map or its cache goes when the last array made from it does; nothing to close.

    Args:
        where: the object's URL and key, for messages.
        size: bytes of the object.
        contents: see ShardContents; checked here, so that a reader's indexing cannot fail on an altered shard.
    """

    def __init__(self, where: str, size: int, contents: ShardContents) -> None:
        self.where = where
        self.size = size
        self.columns = contents.columns
        self.metadata = contents.metadata
        self.table = contents.table
        self.status = contents.status
        self.digest = contents.digest
        self.stats = contents.stats
        _check_contents(where, contents)

    @property
    def rows(self) -> int:
        """R, failed rows included."""
        return len(self.table)

    def column(self, name: str) -> Column:
        """The state column of this name. Raises ConfigError if the shard has none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise ConfigError(f"{self.where}: no state {name!r}; it has {', '.join(c.name for c in self.columns)}")

    def input_ids(self, row: int) -> npt.NDArray[np.int32]:
        """Token ids of a row by its place in the shard; i32 [n]."""
        return self.table.input_ids[self.table.cu_seqlens[row] : self.table.cu_seqlens[row + 1]]

    def loss_mask(self, row: int) -> npt.NDArray[np.uint8]:
        """Loss mask of a row; u8 [n]."""
        return self.table.loss_mask[self.table.cu_seqlens[row] : self.table.cu_seqlens[row + 1]]

    def positions(self, row: int) -> npt.NDArray[np.int64]:
        """Prompt positions of a row's stored tokens; i64 [kept], ascending."""
        spans = self.table.spans[self.table.cu_spans[row] : self.table.cu_spans[row + 1]]
        return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in spans] or [np.empty(0, np.int64)])

    @abc.abstractmethod
    def tokens(self, name: str, start: int, end: int) -> npt.NDArray[np.uint8]:
        """Stored bytes of one state of the shard's stored tokens start .. end; u8 [end - start, bytes per token].

        Raises:
            ConfigError: no state of this name.
            ShardError: the object is truncated or altered.
            StoreError: it cannot be read.
        """

    def state(self, name: str, row: int) -> npt.NDArray[np.uint8]:
        """Stored bytes of one state of one row, by its place in the shard; u8 [kept, bytes per token]. See tokens."""
        return self.tokens(name, int(self.table.cu_kept[row]), int(self.table.cu_kept[row + 1]))

    @abc.abstractmethod
    def sha256_other(self) -> str:
        """SHA-256 of every byte of the image that is not a state, as the receipt has it."""

    def differences(
        self, rows: Iterable[int], names: Sequence[str] | None = None, stats: bool = False
    ) -> dict[int, list[str]]:
        """Recompute digests from what is stored; about 0.2 CPU-seconds a GiB. Adjacent rows are read together.

        Args:
            rows: places in the shard, ascending.
            names: states to check; all when absent. The token ids are always checked.
            stats: recompute the statistics of states whose digest is right too; another 0.4 CPU-seconds a GiB of bf16.

        Returns:
            For each row with a difference: `input_ids`, the states whose digest differs, and `sumsq of state.3` and the
            like; or, if the row is not OK, the states, and statistics, that are not zero.
        """
        rows = list(rows)
        wrong: dict[int, list[str]] = {}
        for row in rows:
            if int(self.digest[row, 0]) != (digest_ids(self.input_ids(row)) if self._ok(row) else 0):
                wrong.setdefault(row, []).append("input_ids")
        for k, column in enumerate(self.columns, start=1):
            if names is not None and column.name not in names:
                continue
            totals = dict.fromkeys(rows, 0)
            sums = {row: StateStats() for row in rows} if stats else {}
            for row, start, part in self._parts(column, rows):
                found = digest_tokens(part, start) if self._ok(row) else int(part.any())
                totals[row] = add_digests(totals[row], found)
                if stats and self._ok(row):
                    sums[row].add(part, column.dtype)
            for row, total in totals.items():
                if total != int(self.digest[row, k]):
                    wrong.setdefault(row, []).append(column.name)
                elif stats:
                    sealed = StateStats(
                        *(getattr(self.stats, f.name)[row, k - 1].item() for f in dataclasses.fields(StateStats))
                    )
                    for name in sums[row].differences(sealed, column.dtype):
                        wrong.setdefault(row, []).append(f"{name} of {column.name}")
        return dict(sorted(wrong.items()))

    def _ok(self, row: int) -> bool:
        return bool(self.status[row] == RowStatus.OK)

    def _parts(self, column: Column, rows: Sequence[int]) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
        """The rows' states as (row, place of the first token in the row, tokens), read in blocks across rows."""
        kept = self.table.cu_kept
        step = max(1, BLOCK_BYTES // column.token_bytes)
        for first, end in _runs(rows):
            stop = int(kept[end])
            for at in range(int(kept[first]), stop, step):
                upto = min(at + step, stop)
                block = self.tokens(column.name, at, upto)
                row = int(np.searchsorted(kept, at, side="right")) - 1
                while row < end and kept[row] < upto:
                    start, after = max(at, int(kept[row])), min(upto, int(kept[row + 1]))
                    if start < after:
                        yield row, start - int(kept[row]), block[start - at : after - at]
                    row += 1


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges [first, end) of adjacent ones."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[first], rows[i - 1] + 1
            first = i


def _check_contents(where: str, contents: ShardContents) -> None:
    """The columns, and every length that follows from another. Raises ShardError naming the first that is wrong."""
    table, states = contents.table, len(contents.columns)
    for column in contents.columns:
        known = column.dtype in STATE_DTYPES and isinstance(column.width, int) and column.width > 0
        if not known or column.token_bytes % 8:
            raise ShardError(
                f"{where}: {column.name} is {column.dtype} x {column.width}, which this release does not read"
            )
    rows = len(table.row)
    shapes: list[tuple[str, npt.NDArray[Any], tuple[int, ...]]] = [
        ("status", contents.status, (rows,)),
        ("digest", contents.digest, (rows, 1 + states)),
        ("sumsq", contents.stats.sumsq, (rows, states)),
        ("amax", contents.stats.amax, (rows, states)),
        ("nonfinite", contents.stats.nonfinite, (rows, states)),
        ("zero", contents.stats.zero, (rows, states)),
        ("loss_mask", table.loss_mask, table.input_ids.shape),
    ]
    for name, array, shape in shapes:
        if array.shape != shape:
            raise ShardError(f"{where}: {name} has shape {list(array.shape)}, expected {list(shape)}")
    sums: list[tuple[str, npt.NDArray[np.int64], int | None]] = [
        ("cu_seqlens", table.cu_seqlens, len(table.input_ids)),
        ("cu_kept", table.cu_kept, None),
        ("cu_spans", table.cu_spans, len(table.spans)),
    ]
    for name, cumulative, total in sums:
        if len(cumulative) != rows + 1 or cumulative[0] != 0 or (np.diff(cumulative) < 0).any():
            raise ShardError(f"{where}: {name} is not {rows + 1} ascending numbers from 0")
        if total is not None and cumulative[-1] != total:
            raise ShardError(f"{where}: {name} ends at {cumulative[-1]}, expected {total}")
    lengths = np.diff(table.spans, axis=1).reshape(-1)
    kept = np.concatenate(([0], np.cumsum(lengths)))[table.cu_spans]
    if (lengths < 0).any() or not np.array_equal(kept, table.cu_kept):
        raise ShardError(f"{where}: the spans of its rows do not add up to cu_kept")
    owner = np.repeat(np.arange(rows), np.diff(table.cu_spans))
    limit = np.diff(table.cu_seqlens)[owner]
    if (table.spans[:, 0] < 0).any() or (table.spans[:, 1] > limit).any():
        raise ShardError(f"{where}: a span lies outside its row")
    if (contents.status > max(RowStatus)).any():
        raise ShardError(f"{where}: status {contents.status.max()} is unknown to this release")


def sha256_of(parts: Iterable[bytes | memoryview]) -> str:
    """Hex SHA-256 of the parts, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
