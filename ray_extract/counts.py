"""How often each token occurs in the rows that are ok: what the vocabulary of a draft model is chosen by.

token-counts.safetensors, written when a run is complete and again when its manifest changes:

    all         i64 [V]
    supervised  i64 [V]  those with loss mask 1

and in its metadata `format` and `version`, `manifest` (the key of the one whose rows are counted) and `rows`.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_extract.dataset.prepared import tokens_of
from ray_extract.errors import AlreadyExists, NotFound, ShardError
from ray_extract.layout import COUNTS_KEY
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

    all: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    supervised: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    rows: int = 0

    def counted(self, parts: Iterable[tuple[pa.Table, pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Count the rows that are ok while a manifest is made of them, so that their ids are read once.

        Args:
            parts: prepared rows, and what the manifest says of them, see ledger.manifest_parts.
        """
        for part, batch in parts:
            self.add(part, pc.equal(batch.column("status"), "ok").to_numpy(zero_copy_only=False))
            yield batch

    def add(self, part: pa.Table, counts: npt.NDArray[np.bool_]) -> None:
        """Count those prepared rows of a part that do; V grows to hold their ids."""
        cu_seqlens, ids, mask = tokens_of(part)
        of_row = np.repeat(counts, np.diff(cu_seqlens))
        ids, mask = ids[of_row], mask[of_row]
        if len(ids):
            self.grow(int(ids.max()) + 1)
        self.all += np.bincount(ids, minlength=len(self.all))
        self.supervised += np.bincount(ids[mask != 0], minlength=len(self.supervised))
        self.rows += int(counts.sum())

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
