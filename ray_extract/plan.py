"""Rows -> units: which rows make which shard. Pure, streaming, and independent of the workers."""

import dataclasses
import itertools
import json
import logging
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ray_extract import layout
from ray_extract.config import Job
from ray_extract.dataset.parts import OpenPool, discard_inputs, prepare_rows
from ray_extract.dataset.prepared import (
    REPLAN,
    Lengths,
    PreparedRows,
    RowIndex,
    RowLength,
    put_table,
    read_table,
)
from ray_extract.errors import AlreadyExists, NotFound, PlanError
from ray_extract.ledger import Ledger
from ray_extract.model import ModelShape
from ray_extract.progress import show_count
from ray_extract.records import Unit
from ray_extract.store import Store, put_once

log = logging.getLogger(__name__)

PLAN_VERSION = 1

_UNITS_SCHEMA = pa.schema(
    [
        pa.field(field.name, pa.string() if field.name == "unit" else pa.int64(), nullable=False)
        for field in dataclasses.fields(Unit)
        if field.name != "members"  # of retry rounds, which are stored by themselves
    ]
)


def plan_units(
    lengths: Iterable[Lengths],
    *,
    token_bytes: int,
    shard_bytes: int,
    max_rows: int,
    max_unit_bytes: int | None = None,
) -> Iterator[Unit]:
    """Pack consecutive usable rows into units; the same rows and numbers always give the same units.

    A unit takes rows until the next one would take it over its target; a row larger than the target is a unit alone.

    Args:
        lengths: all rows in order, in blocks of any size; those that are not usable are passed over.
        token_bytes: bytes of all states of one stored token.
        shard_bytes: target for the states of one unit.
        max_rows: most rows in one unit.
        max_unit_bytes: what the arena can hold; the target if it is smaller than shard_bytes.

    Raises:
        PlanError: a row is larger than max_unit_bytes.
    """
    most = (shard_bytes if max_unit_bytes is None else min(shard_bytes, max_unit_bytes)) // token_bytes
    number = 0
    rest = Lengths.of(())  # rows of a unit that is not full yet
    for block in itertools.chain(lengths, [None]):
        rows = rest
        if block is not None:
            usable = block.where(block.usable)
            if max_unit_bytes is not None and (large := usable.kept * token_bytes > max_unit_bytes).any():
                at = int(large.argmax())
                raise _too_large(int(usable.row[at]), int(usable.kept[at]), token_bytes, max_unit_bytes)
            rows = rest.then(usable)
        tokens, kept = (np.concatenate(([0], np.cumsum(column))) for column in (rows.tokens, rows.kept))
        count, start = len(rows.row), 0
        while start < count:
            end = int(np.searchsorted(kept, kept[start] + most, side="right")) - 1
            end = min(max(end, start + 1), start + max_rows)
            if end == count and block is not None:
                break  # the next block may have room in it
            yield _unit(
                layout.unit_id(number),
                (int(rows.row[start]), int(rows.row[end - 1]) + 1),
                end - start,
                int(tokens[end] - tokens[start]),
                int(kept[end] - kept[start]),
                token_bytes,
            )
            number, start = number + 1, end
        rest = rows.where(slice(start, None))


def _unit(name: str, bounds: tuple[int, int], rows: int, tokens: int, kept: int, token_bytes: int) -> Unit:
    return Unit(name, *bounds, rows=rows, tokens=tokens, kept=kept, nbytes=kept * token_bytes)


def plan_retry(lengths: Iterable[Lengths], failed: Collection[int], number: int, **limits: Any) -> list[Unit]:
    """Pack rows that failed into the units of a retry round, as plan_units packs all rows.

    Args:
        lengths: all rows in order.
        failed: which of them to extract again; all usable.
        number: of the round.
        limits: see plan_units.

    Raises:
        PlanError: see plan_units.
    """
    rows = sorted(failed)
    wanted = np.array(rows, np.int64)
    return [
        dataclasses.replace(
            unit,
            unit=layout.retry_unit_id(number, place),
            members=tuple(rows[bisect_left(rows, unit.first) : bisect_left(rows, unit.end)]),
        )
        for place, unit in enumerate(
            plan_units((block.where(np.isin(block.row, wanted)) for block in lengths), **limits)
        )
    ]


def sample_units(store: Store, index: RowIndex, job: Job, token_bytes: int, count: int) -> list[Unit]:
    """Pack some usable rows, at even distances, into units, as plan_units packs all rows.

    Args:
        store, index: where the rows are, and what.
        job: the job.
        token_bytes: bytes of all states of one stored token.
        count: of the rows; all if there are fewer.

    Raises:
        PlanError: see plan_units.
    """
    rows = PreparedRows(store, index)
    wanted = np.unique((np.arange(count) + 0.5) / count * index.usable).astype(np.int64)
    chosen: list[int] = []
    passed = 0
    for block in rows.lengths():
        usable = block.row[block.usable]
        chosen += usable[wanted[(wanted >= passed) & (wanted < passed + len(usable))] - passed].tolist()
        passed += len(usable)
    return plan_retry(rows.lengths(), set(chosen), 1, **_limits(job, token_bytes))


def halve(unit: Unit, rows: Sequence[RowLength]) -> tuple[Unit, Unit]:
    """Split a unit into two of half the rows; always into the same two.

    Args:
        unit: of two rows at least.
        rows: its rows.
    """
    token_bytes = unit.nbytes // unit.kept if unit.kept else 0
    middle = (len(rows) + 1) // 2
    first, second = (
        dataclasses.replace(
            _unit(
                layout.child_id(unit.unit, number),
                (part[0].row, part[-1].row + 1),
                len(part),
                sum(row.tokens for row in part),
                sum(row.kept for row in part),
                token_bytes,
            ),
            members=None if unit.members is None else tuple(row.row for row in part),
        )
        for number, part in enumerate((rows[:middle], rows[middle:]))
    )
    return first, second


def _too_large(row: int, kept: int, token_bytes: int, max_unit_bytes: int) -> PlanError:
    nbytes = kept * token_bytes
    return PlanError(
        f"row {row}: its states are {show_bytes(nbytes)} ({kept} tokens of {token_bytes} bytes), and the "
        f"arena holds units of {show_bytes(max_unit_bytes)}, half of it, at most; raise run.arena_bytes above "
        f"{show_bytes(2 * nbytes)}, or lower dataset.max_tokens"
    )


def write_units(store: Store, units: Iterable[Unit]) -> None:
    """Store the units, create-if-absent.

    Raises:
        PlanError: other units are there.
        StoreError: writing failed.
    """
    records = [dataclasses.asdict(unit) for unit in units]
    put_table(store, layout.UNITS_KEY, pa.Table.from_pylist(records, schema=_UNITS_SCHEMA))


def read_units(store: Store) -> list[Unit]:
    """Inverse of write_units.

    Raises:
        PlanError: they are damaged.
        StoreError: they cannot be read.
    """
    table = read_table(store, layout.UNITS_KEY)
    if not table.schema.equals(_UNITS_SCHEMA):
        raise PlanError(f"output.url: {layout.UNITS_KEY} is of another release; choose another output.url")
    return list(map(Unit, *(column.to_pylist() for column in table.columns)))


@dataclasses.dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan comes to.

    Args:
        rows: all rows of the input.
        usable: those that will be extracted; the others are in `skipped`, by kind of reason.
        examples: a row of each kind, see RowIndex.
        truncated: usable rows of which a part was cut off.
        tokens: prompt tokens of the usable rows.
        supervised: those that are; `unsupervised` are the usable rows without any.
        histogram: usable rows by length, see RowIndex.
        kept: tokens whose states are stored.
        token_bytes: bytes of all states of a stored token.
        state_bytes: bytes of all states.
        units: number of units, so of shards.
        largest_unit_bytes: bytes of states in the largest of them.
    """

    rows: int
    usable: int
    skipped: dict[str, int]
    examples: dict[str, str]
    truncated: int
    tokens: int
    supervised: int
    unsupervised: int
    histogram: tuple[int, ...]
    kept: int
    token_bytes: int
    state_bytes: int
    units: int
    largest_unit_bytes: int

    def lines(self) -> list[str]:
        """For people, one line a fact."""
        skipped = self.rows - self.usable
        cut = f", {self.truncated:,} of them cut to their limit" if self.truncated else ""
        share = f"{self.supervised:,} of them supervised ({self.supervised / max(1, self.tokens):.1%})"
        without = f"; {show_count(self.unsupervised, 'row')} without any" if self.unsupervised else ""

        def first(kind: str) -> str:
            return f", first {self.examples[kind]}" if kind in self.examples else ""

        return [
            f"rows      {self.rows:,} = {self.usable:,} usable{cut} + {skipped:,} skipped",
            *(f"          {count:,} skipped: {kind}{first(kind)}" for kind, count in self.skipped.items()),
            f"tokens    {self.tokens:,}, {share}{without}",
            *self._bars(),
            f"states    {show_bytes(self.state_bytes)}, of {self.kept:,} tokens at {self.token_bytes:,} bytes each",
            f"shards    {self.units:,}, the largest of {show_bytes(self.largest_unit_bytes)}",
        ]

    def _bars(self) -> Iterator[str]:
        """Rows by length, between the shortest and the longest."""
        most = max(self.histogram, default=0)
        bits = next((bits for bits, count in enumerate(self.histogram) if count), 0)
        for at, count in enumerate(self.histogram[bits:], start=bits):
            bar = "#" * -(-24 * count // most)
            yield f"          {1 << (at - 1):>9,} to {(1 << at) - 1:>9,}  {count:>13,} rows {bar}".rstrip()


def estimate(index: RowIndex, units: Iterable[Unit], token_bytes: int) -> PlanSummary:
    """Sum up a plan."""
    sizes = [unit.nbytes for unit in units]
    return PlanSummary(
        rows=index.rows,
        usable=index.usable,
        skipped=index.skipped,
        examples=index.examples,
        truncated=index.truncated,
        tokens=index.tokens,
        supervised=index.supervised,
        unsupervised=index.unsupervised,
        histogram=index.histogram,
        kept=index.kept,
        token_bytes=token_bytes,
        state_bytes=sum(sizes),
        units=len(sizes),
        largest_unit_bytes=max(sizes, default=0),
    )


def show_bytes(nbytes: int) -> str:
    """Bytes in decimal and binary units, since people mean both by the same letters: `992.05 GB (923.92 GiB)`."""
    for power, decimal, binary in ((4, "TB", "TiB"), (3, "GB", "GiB"), (2, "MB", "MiB"), (1, "kB", "KiB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.2f} {decimal} ({nbytes / 1024**power:.2f} {binary})"
    return f"{nbytes} bytes"


def load_or_make_plan(
    store: Store,
    job: Job,
    shape: ModelShape,
    token_bytes: int,
    *,
    identity: str | None = None,
    pool: OpenPool | None = None,
) -> tuple[RowIndex, list[Unit]]:
    """The stored plan of this output, or a new one made from the data set and stored.

    The plan counts once its last object, layout.PLAN_KEY, is there. Of two drivers that plan at once the first to
    write it wins, and both go on with what it wrote. What was prepared before a planning that ended is used.

    Args:
        store: the output.
        job, shape: what to plan.
        token_bytes: bytes of all states of one stored token.
        identity, pool: see parts.prepare_rows.

    Raises:
        ConfigError, DatasetError: the data set cannot be prepared.
        PlanError: no usable row, a row too large for the arena, or a stored plan of another release.
        StoreError: reading or writing failed.
    """
    if store.head(layout.PLAN_KEY) is None:
        try:
            index = prepare_rows(store, job, shape, identity, pool)
            _make_plan(store, index, job, token_bytes)
        except PlanError:
            if store.head(layout.PLAN_KEY) is None:  # else another driver finished, and discarded its inputs
                raise
        discard_inputs(store, _plan_keys(store))
    return load_plan(store)


def _make_plan(store: Store, index: RowIndex, job: Job, token_bytes: int) -> None:
    log.info("prepared %s, %d of them usable, %d tokens", show_count(index.rows, "row"), index.usable, index.tokens)
    units = _plan(store, index, job, token_bytes)
    write_units(store, units)
    text = json.dumps({"version": PLAN_VERSION, "rows": index.to_json(), "units": len(units)})
    try:
        store.put(layout.PLAN_KEY, text.encode(), create=True)
    except AlreadyExists:
        log.info("another driver finished the plan first; using it")


def _plan(store: Store, index: RowIndex, job: Job, token_bytes: int) -> list[Unit]:
    if not index.usable:
        skipped = ", ".join(f"{count} x {kind}" for kind, count in index.skipped.items())
        examples = "".join(f"\n  {kind}: {example}" for kind, example in index.examples.items())
        raise PlanError(
            f"dataset.paths: none of {index.rows} rows can be used"
            + (f" ({skipped}), such as:{examples}" if skipped else "; it is empty")
        )
    return list(plan_units(PreparedRows(store, index).lengths(), **_limits(job, token_bytes)))


def _limits(job: Job, token_bytes: int) -> dict[str, Any]:
    return {
        "token_bytes": token_bytes,
        "shard_bytes": job.output.shard_bytes,
        "max_rows": job.output.max_rows,
        # The arena holds at least two extents: one filled while the other is flushed.
        "max_unit_bytes": None if job.run.arena_bytes is None else job.run.arena_bytes // 2,
    }


def load_plan(store: Store) -> tuple[RowIndex, list[Unit]]:
    """The stored plan, with the parts of units that were split in their places.

    Raises:
        PlanError: it is damaged, of another release, or gone where units are committed.
        NotFound: nothing is planned yet.
        StoreError: reading failed.
    """
    try:
        tree = json.loads(store.get(layout.PLAN_KEY))
        version, rows, count = tree["version"], tree["rows"], tree["units"]
        index = RowIndex.from_json(rows) if version == PLAN_VERSION else None
    except NotFound:
        if committed := len(Ledger(store).committed_units()):
            raise PlanError(
                f"output.url: {layout.PLAN_KEY} is missing, and units are committed ({committed:,}); put it back, or "
                "run the job again, which plans the same rows anew"
            ) from None
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"output.url: {layout.PLAN_KEY} is damaged ({error}); {REPLAN}") from None
    if index is None:
        raise PlanError(
            f"output.url: {layout.PLAN_KEY} has version {version!r} and this release reads {PLAN_VERSION}; "
            "finish with the release that began, or choose another output.url"
        )
    units = read_units(store)
    if len(units) != count or sum(unit.rows for unit in units) != index.usable:
        raise PlanError(f"output.url: {layout.UNITS_KEY} is not what {layout.PLAN_KEY} says; {REPLAN}")
    return index, _in_parts(store, units, _plan_keys(store))


def claim_round(
    store: Store, job: Job, index: RowIndex, token_bytes: int, failed: Collection[int], number: int
) -> None:
    """Plan the rows that failed as a retry round, and store it, create-if-absent.

    Of two drivers that claim at once the first one's rows make the round, for both.

    Args:
        store: the output.
        job, index: of the run.
        token_bytes: bytes of all states of one stored token.
        failed: rows; at least one.
        number: of the round: one more than that of the last one whose commits were looked at for `failed`.

    Raises:
        PlanError: a row too large for the arena, or a stored round that is damaged or of another release.
        StoreError: reading or writing failed.
    """
    units = plan_retry(PreparedRows(store, index).lengths(), failed, number, **_limits(job, token_bytes))
    text = json.dumps({"version": PLAN_VERSION, "units": [dataclasses.asdict(unit) for unit in units]})
    try:
        store.put(layout.round_key(number), text.encode())
        log.info("retry round %d: %s in %s", number, show_count(len(failed), "row"), show_count(len(units), "unit"))
    except AlreadyExists:
        log.info("another driver claimed retry round %d first; joining it", number)


def read_rounds(store: Store) -> list[Unit]:
    """The units of all retry rounds, in order; parts as in load_plan.

    Raises:
        PlanError: a round is damaged, or of another release.
        StoreError: reading failed.
    """
    units: list[Unit] = []
    keys = _plan_keys(store)
    for number in sorted(filter(None, map(layout.round_of_key, keys))):
        key = layout.round_key(number)
        try:
            tree = json.loads(store.get(key))
            if tree["version"] != PLAN_VERSION:
                raise ValueError(f"version {tree['version']!r}; this release reads {PLAN_VERSION}")
            units += [Unit.from_json(record) for record in tree["units"]]
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"output.url: {key} cannot be used ({error}); to do without this round, delete it and the "
                f"{layout.COMMITS_PREFIX}{layout.retry_unit_id(number, 0).partition('-')[0]}-*.json"
            ) from None
    return _in_parts(store, units, keys)


def store_parts(store: Store, unit: Unit, parts: Sequence[Unit]) -> None:
    """Store the parts of a unit; they count once the unit's commit says that it was split.

    Raises:
        PlanError: other parts are there.
        StoreError: reading or writing failed.
    """
    text = json.dumps({"version": PLAN_VERSION, "units": [dataclasses.asdict(part) for part in parts]})
    key = layout.split_key(unit.unit)
    if not put_once(store, key, text.encode()):
        raise PlanError(f"output.url: {key} there is of another release; finish with the one that began")


def _plan_keys(store: Store) -> list[str]:
    return [item.key for item in store.list("plan/")]


def _in_parts(store: Store, units: Iterable[Unit], keys: Iterable[str]) -> list[Unit]:
    """Units, those that were split replaced by their parts.

    Which may have been is seen from the keys under plan/, so that not every commit is read for it.
    """
    parts: dict[str, list[Unit]] = {}
    for key in keys:
        unit = layout.unit_of_split(key)
        if unit is not None and Ledger(store).is_split(unit):
            try:
                parts[unit] = [Unit.from_json(record) for record in json.loads(store.get(key))["units"]]
            except (ValueError, KeyError, TypeError) as error:
                raise PlanError(
                    f"output.url: {key} is damaged ({error}); delete it and {layout.COMMITS_PREFIX}{unit}.*, and "
                    "run the same command again"
                ) from None
    return list(_leaves(units, parts))


def _leaves(units: Iterable[Unit], parts: Mapping[str, Sequence[Unit]]) -> Iterator[Unit]:
    for unit in units:
        if unit.unit in parts:
            yield from _leaves(parts[unit.unit], parts)
        else:
            yield unit
