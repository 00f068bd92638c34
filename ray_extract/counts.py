"""How often each token occurs in the rows that are ok: what the vocabulary of a draft model is chosen by.

token-counts.safetensors, written when a run is complete and again when its manifest changes:

    all         i64 [V]
    supervised  i64 [V]  those with loss mask 1

and in its metadata `format` and `version`, `manifest` (the key of the one whose rows are counted) and `rows`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Set
from typing import Self

import numpy as np
import numpy.typing as npt

from ray_extract.dataset.prepare import PreparedRow
from ray_extract.errors import AlreadyExists, NotFound, ShardError
from ray_extract.layout import COUNTS_KEY
from ray_extract.ledger import RowHead
from ray_extract.records import Receipt
from ray_extract.store import Store
from ray_extract.tensors import WRITTEN_AGAIN, make_header, stored_header

FORMAT, VERSION = "ray_extract token counts", "1"


@dataclasses.dataclass(slots=True, eq=False)
class TokenCounts:
    """Counts of token ids.

    Args:
        all: i64 [V].
        supervised: i64 [V].
        rows: rows counted.
    """

    all: npt.NDArray[np.int64]
    supervised: npt.NDArray[np.int64]
    rows: int = 0

    def add(self, row: PreparedRow) -> None:
        """Count a row; V grows to hold its ids."""
        ids = row.input_ids
        if len(ids):
            self.grow(int(ids.max()) + 1)
        np.add.at(self.all, ids, 1)
        np.add.at(self.supervised, ids[row.loss_mask != 0], 1)
        self.rows += 1

    def grow(self, vocab_size: int) -> None:
        """Make V at least this."""
        more = vocab_size - len(self.all)
        if more > 0:
            self.all, self.supervised = np.pad(self.all, (0, more)), np.pad(self.supervised, (0, more))

    def equal(self, other: Self) -> bool:
        """Whether both say the same."""
        return (
            self.rows == other.rows
            and np.array_equal(self.all, other.all)
            and np.array_equal(self.supervised, other.supervised)
        )


class Counting:
    """Counts rows while a manifest is made of them, so that their ids are read once.

    ledger.manifest_rows takes the receipt of a unit before the unit's rows. So both streams go through here, and of a
    row that comes by it is known whether it failed.

    Args:
        vocab_size: V, at least.
        mended: rows that are ok whatever the receipt says, see ledger.mended.
    """

    def __init__(self, vocab_size: int = 1, mended: Set[int] = frozenset()) -> None:
        self._mended = mended
        self.counts = TokenCounts(np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64))
        self._failed: frozenset[int] = frozenset()

    def receipts(self, receipts: Iterable[Receipt]) -> Iterator[Receipt]:
        """Pass receipts on, noting which rows failed."""
        for receipt in receipts:
            self._failed = frozenset(failure.row for failure in receipt.failures) - self._mended
            yield receipt

    def heads(self, rows: Iterable[PreparedRow], keep: str) -> Iterator[RowHead]:
        """Turn rows into what a manifest says of them, counting those that are ok."""
        for row in rows:
            if row.reason is None and row.index not in self._failed:
                self.counts.add(row)
            yield RowHead.of(row, keep)


def write_counts(store: Store, counts: TokenCounts, manifest: str) -> None:
    """Store the counts in place of those that are there, which may be of an earlier manifest.

    Raises:
        StoreError: the store failed.
    """
    metadata = {"format": FORMAT, "version": VERSION, "manifest": manifest, "rows": str(counts.rows)}
    shape = (len(counts.all),)
    header = make_header([("all", "I64", shape), ("supervised", "I64", shape)], metadata)
    data = b"".join([header.text, *(part.astype("<i8").tobytes() for part in (counts.all, counts.supervised))])
    try:
        store.put(COUNTS_KEY, data)
    except AlreadyExists:
        if store.get(COUNTS_KEY) != data:
            store.put(COUNTS_KEY, data, create=False)


def read_counts(store: Store) -> tuple[TokenCounts, str]:
    """The counts, and the key of their manifest.

    Raises:
        NotFound: there are none, so the run has not finished, or is of an older release.
        ShardError: they are damaged, or of another release.
        StoreError: the store failed.
    """
    header = stored_header(store, COUNTS_KEY, FORMAT, VERSION)
    try:
        places = [header.tensors[name] for name in ("all", "supervised")]
        rows, manifest = int(header.metadata["rows"]), header.metadata["manifest"]
        kinds = {(place.dtype, len(place.shape), place.nbytes) for place in places}
        ((dtype, dimensions, _),) = kinds
        if (dtype, dimensions) != ("I64", 1):
            raise ValueError(f"{dtype} of {dimensions} dimensions")
    except (KeyError, ValueError) as error:
        raise ShardError(f"{store.url}/{COUNTS_KEY}: damaged: {error}; {WRITTEN_AGAIN}") from None
    arrays = [
        np.frombuffer(store.get_range(COUNTS_KEY, place.offset, place.nbytes), "<i8").astype(np.int64)
        for place in places
    ]
    return TokenCounts(arrays[0], arrays[1], rows), manifest


def count_problems(store: Store, counts: TokenCounts, manifest: str | None) -> Iterator[str]:
    """What is wrong with an output's counts; nothing if there are none.

    Args:
        store: the output.
        counts: as they must be; V is taken from what is stored.
        manifest: key of the latest one.
    """
    try:
        stored, of = read_counts(store)
    except NotFound:
        return
    except ShardError as error:
        yield str(error)
        return
    if of != manifest:
        yield f"{COUNTS_KEY}: of {of}, and {manifest} is the latest; run the same command again"
    counts.grow(len(stored.all))
    if not stored.equal(counts):
        yield f"{COUNTS_KEY}: not the counts of the rows that are ok; {WRITTEN_AGAIN}"
