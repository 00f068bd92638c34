"""Segments: many commits in one object, so that a store with slow requests is asked for few. A cache, and no more.

    segments/<unit>-<sha256>.parquet    unit, version, commit; <unit> is the first one, <sha256> of the whole object

A commit is taken from a segment only if the listing of commits has it now, with the version and size of then. A segment
that is lost, old, damaged or another run's costs requests, and never changes a result. `commits/` stays the truth.
"""

import hashlib
import io
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ray_extract import layout
from ray_extract.errors import StoreError
from ray_extract.store import ObjectInfo, Store, put_once

log = logging.getLogger(__name__)

LEAST = 64
"""Commits that are worth a segment: fewer are read at once, in about the time of one request."""

_MOST, _MOST_BYTES = 10_000, 32 << 20

_SCHEMA = pa.schema(
    [
        pa.field("unit", pa.string(), nullable=False),
        pa.field("version", pa.string(), nullable=False),
        pa.field("commit", pa.binary(), nullable=False),
    ]
)


class Entry(NamedTuple):
    """A commit as a segment has it: the unit, the version of its object, and the object's bytes."""

    unit: str
    version: str
    commit: bytes


def pack(entries: Sequence[Entry]) -> tuple[str, bytes]:
    """A segment's key and bytes.

    Args:
        entries: ordered by unit; at least one.
    """
    columns = [pa.array(column, field.type) for column, field in zip(zip(*entries, strict=True), _SCHEMA, strict=True)]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), sink, compression="zstd", use_dictionary=False)
    data = sink.getvalue()
    return layout.segment_key(entries[0].unit, hashlib.sha256(data).hexdigest()), data


def unpack(key: str, data: bytes) -> list[Entry]:
    """Inverse of pack. Empty if these are not the bytes that made the name, or not a segment of this release."""
    named = layout.parse_segment(key)
    if named is None or hashlib.sha256(data).hexdigest() != named[1]:
        return []
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    except (pa.ArrowException, OSError):
        return []
    if not table.schema.equals(_SCHEMA):
        return []
    return [Entry(*values) for values in zip(*(column.to_pylist() for column in table.columns), strict=True)]


class Folded:
    """What segments have of the commits of a listing. Units must be asked for in order.

    In memory are the segments whose units are due, and of these the commits that are still to come: one segment, and
    one for each earlier reading that found scattered commits that no segment had.

    Args:
        store: the output.
        listing: the units that have a commit, and the objects that are these.
    """

    def __init__(self, store: Store, listing: Mapping[str, ObjectInfo]) -> None:
        self._store, self._listing = store, listing
        self._held: dict[str, bytes] = {}
        self._ahead: deque[str] = deque()
        if len(listing) >= LEAST:
            keys = (item.key for item in store.list(layout.SEGMENTS_PREFIX))
            self._ahead.extend(key for key in keys if layout.parse_segment(key) is not None)

    def take(self, unit: str) -> bytes | None:
        """The commit of a unit; None if no segment has it as it is now."""
        while self._ahead and self._ahead[0] < layout.segment_key(unit, "~"):
            self._load(self._ahead.popleft())
        return self._held.pop(unit, None)

    def _load(self, key: str) -> None:
        try:
            entries = unpack(key, self._store.get(key))
        except StoreError as error:
            log.info("without this segment more requests are made: %s", error)
            return
        for entry in entries:
            now = self._listing.get(entry.unit)
            if now is not None and entry.version and (now.version, now.size) == (entry.version, len(entry.commit)):
                self._held[entry.unit] = entry.commit


class Folding:
    """Makes segments of commits that no segment had.

    Args:
        store: the output.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: list[Entry] = []
        self._bytes = 0

    def add(self, unit: str, version: str, commit: bytes) -> None:
        """Add a commit. Units come in order; versions are those of a listing from before the commit was read."""
        if version:
            self._entries.append(Entry(unit, version, commit))
            self._bytes += len(commit)
            if len(self._entries) >= _MOST or self._bytes >= _MOST_BYTES:
                self.finish()

    def finish(self) -> None:
        """Store what was added, if it is worth it. A store that fails is no error here."""
        entries, self._entries, self._bytes = self._entries, [], 0
        if len(entries) >= LEAST:
            key, data = pack(entries)
            try:
                put_once(self._store, key, data)
            except StoreError as error:
                log.info("a segment was not stored, so that its commits are read one by one again: %s", error)
