"""What a complete run says of itself, made of rows, plan and commits: manifest, token counts, _SUCCESS.

Several drivers may make them at once, and see different commits. A manifest's number settles whose is newer, see
ledger.write_manifest. The two others are replaced, so whoever did that looks once more whether its manifest is still
the latest one, and begins again if it is not: the last to replace them knows the latest manifest.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ray_extract.counts import TokenCounts, write_counts
from ray_extract.dataset.prepared import PreparedRows, RowIndex
from ray_extract.ledger import (
    Ledger,
    Totals,
    latest_manifest,
    manifest_parts,
    stored_columns,
    take_retries,
    write_manifest,
    write_success,
)
from ray_extract.records import Receipt, Unit
from ray_extract.store import ObjectInfo


class Views(NamedTuple):
    """What was written.

    Args:
        manifest: its key.
        totals: of all rows.
        shards: that count.
    """

    manifest: str
    totals: Totals
    shards: int


def write_views(
    ledger: Ledger,
    index: RowIndex,
    units: Sequence[Unit],
    rounds: Sequence[Unit],
    after: int,
    listing: Mapping[str, ObjectInfo],
    vocab_size: int = 1,
) -> Views | None:
    """Write what is not there yet.

    Args:
        ledger: of the run.
        index: its prepared rows.
        units, rounds: of the plan and of retry rounds, read after the listing, so that they have all of its units.
        after: number of the latest manifest before the listing.
        listing: the commits.
        vocab_size: of the counts, at least.

    Returns:
        None if another driver wrote a manifest meanwhile, so that all has to be read again, beginning with `after`.

    Raises:
        ShardError: rows, plan, commits and shards do not fit each other; nothing is written.
        StoreError: the store failed.
    """
    identity = ledger.claimed()
    counts, sizes = TokenCounts(), []
    counts.grow(vocab_size)

    def measured() -> Iterator[Receipt]:
        for receipt in ledger.whole_receipts(listing):
            sizes.append(receipt.size)
            yield receipt

    retries, receipts = take_retries(measured(), rounds)
    parts = manifest_parts(
        PreparedRows(ledger.store, index).parts(),
        units,
        receipts,
        retries,
        keep=identity.capture["keep"],
        columns=stored_columns(identity),
    )
    written = write_manifest(ledger.store, identity, after, counts.counted(parts))
    if written is None:
        return None
    manifest, totals = written
    totals = dataclasses.replace(totals, nbytes=sum(sizes))
    write_counts(ledger.store, counts, manifest)
    write_success(ledger.store, manifest, len(sizes), totals)
    return Views(manifest, totals, len(sizes)) if latest_manifest(ledger.store) == manifest else None
