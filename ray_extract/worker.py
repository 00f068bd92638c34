"""The worker: units from lease to receipt, around one extractor. Runs as a Ray actor, but knows nothing of Ray.

Several units are in it at once, each in a thread of its own (Ray's max_concurrency).
"""

import dataclasses
import itertools
import math
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import ray_extract
from ray_extract import logs
from ray_extract.config import Job
from ray_extract.dataset.prepared import PreparedRows, RowIndex
from ray_extract.engine.base import EngineInfo
from ray_extract.errors import AlreadyExists, StoreError
from ray_extract.extractor import Captured, Clock, Extractor, ExtractorSetup
from ray_extract.layout import shard_key
from ray_extract.metrics import (
    ARENA,
    ARENA_USED,
    FLUSH,
    MEAN_SQUARE,
    STAGES,
    STORE_ERRORS,
    Meter,
    NoMeter,
    begin,
)
from ray_extract.records import Receipt, Unit
from ray_extract.shards.image import Column, RowTable, row_table
from ray_extract.shards.parquet import write_parquet
from ray_extract.shards.raw import write_raw
from ray_extract.shards.seal import sha256_other
from ray_extract.store import open_store, outlast

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSetup:
    """All that a worker needs to know; plain data.

    Args:
        extractor: its engine and arena.
        rows: RowIndex as JSON-ready data.
        metadata: goes into every shard's header.
        run: names the run in metrics and logs.
    """

    extractor: ExtractorSetup
    rows: dict[str, Any]
    metadata: dict[str, str]
    run: str


class Worker:
    """Extracts units into shards.

    Args:
        setup: what to do.
        meter: takes its metrics.
    """

    def __init__(self, setup: WorkerSetup, meter: Meter | None = None) -> None:
        self._setup, self._meter = setup, meter or NoMeter()
        begin(self._meter, STAGES, STORE_ERRORS)
        self._job = Job.model_validate(setup.extractor.job)
        self._store = open_store(self._job.output.url, self._job.output.storage_options)
        self._rows = PreparedRows(self._store, RowIndex.from_json(setup.rows))
        self._rows_lock = threading.Lock()
        self._extractor = Extractor(setup.extractor)
        self._info: EngineInfo | None = None
        self._stopping = threading.Event()
        self._outage_s = 0.0
        self._outage_lock = threading.Lock()

    def start(self) -> dict[str, Any]:
        """Start the engine; returns EngineInfo as data, the node's name as `node`, and the seconds as `start_s`.

        Raises what Extractor.start raises.
        """
        began = time.monotonic()
        self._info = self._extractor.start()
        return {**dataclasses.asdict(self._info), "node": platform.node(), "start_s": time.monotonic() - began}

    def stop(self) -> dict[str, float]:
        """End the engine and give the shared memory back; returns the last progress. Units under way fail."""
        self._stopping.set()
        self._extractor.stop()
        return self.progress()

    def progress(self) -> dict[str, float]:
        """See Extractor.progress; and `outage_s`, the seconds that units waited for the store, added up."""
        found = {**self._extractor.progress(), "outage_s": self._outage_s}
        self._meter.set(ARENA, self._setup.extractor.arena_bytes)
        self._meter.set(ARENA_USED, found["arena_used"])
        return found

    def extract(self, unit: Unit, attempt: str, doomed: str | None = None) -> Receipt:
        """Extract one unit into one shard.

        Args:
            unit: the unit.
            attempt: name of this attempt.
            doomed: why its rows are not to be extracted, but stored as failed; else None.

        Raises:
            EngineError: see Extractor.capture.
            StoreError: the shard could not be stored.
        """
        with logs.about(unit=unit.unit, attempt=attempt):
            return self._extract(unit, attempt, doomed)

    def _extract(self, unit: Unit, attempt: str, doomed: str | None) -> Receipt:
        clock = Clock()
        table = self._table(unit)
        clock.lap("read")
        metadata = {**self._setup.metadata, "unit": unit.unit, "attempt": attempt}
        with self._extractor.capture(table, metadata, doomed) as captured:
            clock.lap("capture")
            # Each try under another name: of one that failed nobody knows what is stored, and its name stays taken.
            names = itertools.chain([attempt], (f"{attempt}-{number}" for number in itertools.count(1)))
            name, key, size = self._patiently(
                lambda: self._flush(unit, next(names), captured), "upload", f"storing {unit.unit}"
            )
            clock.lap("flush")
            receipt = self._receipt(unit, name, key, size, captured, clock)
            self._measure(receipt, captured)
            return receipt

    def _flush(self, unit: Unit, attempt: str, captured: Captured) -> tuple[str, str, int]:
        """Store a shard; returns the attempt's name, the key and the size."""
        key = shard_key(unit.unit, attempt, self._job.output.format)
        try:
            if self._job.output.format == "raw":
                return attempt, key, write_raw(self._store, key, captured.buffer)
            return attempt, key, write_parquet(self._store, key, captured.layout, captured.buffer)
        except AlreadyExists as error:
            # Nobody else makes this name: the answer to an upload that was applied got lost.
            raise StoreError(str(error)) from None

    def _patiently(self, action: Callable[[], T], operation: str, what: str) -> T:
        def counted() -> T:
            try:
                return action()
            except StoreError:
                self._meter.add(STORE_ERRORS, 1, operation)
                raise

        return outlast(counted, self._job.output.outage_s, self._stopping, what, self._lost)

    def _lost(self, seconds: float) -> None:
        with self._outage_lock:
            self._outage_s += seconds

    def _table(self, unit: Unit) -> RowTable:
        with self._rows_lock:
            rows = self._patiently(lambda: self._rows.of(unit), "read", f"reading the rows of {unit.unit}")
        return row_table(
            [r.index for r in rows], [r.input_ids for r in rows], [r.loss_mask for r in rows], self._job.capture.keep
        )

    def _receipt(self, unit: Unit, attempt: str, key: str, size: int, captured: Captured, clock: Clock) -> Receipt:
        assert self._info is not None
        table, failures = captured.table, captured.failures
        ok = np.ones(len(table), bool)
        ok[list(failures)] = False
        return Receipt(
            unit=unit.unit,
            attempt=attempt,
            key=key,
            format=self._job.output.format,
            size=size,
            sha256=sha256_other(captured.layout, captured.buffer),
            rows=len(table),
            tokens=int(np.diff(table.cu_seqlens)[ok].sum()),
            kept=int(np.diff(table.cu_kept)[ok].sum()),
            failures=tuple(failures[row] for row in sorted(failures)),
            digests=captured.layout.small(captured.buffer, "digest").tobytes(),
            environment={
                "ray_extract": ray_extract.__version__,
                "node": platform.node(),
                **self._info.environment,
            },
            seconds={"read": clock.laps["read"], **captured.seconds, "flush": clock.laps["flush"]},
        )

    def _measure(self, receipt: Receipt, captured: Captured) -> None:
        for stage, seconds in receipt.seconds.items():
            self._meter.add(STAGES, seconds, stage)
        self._meter.observe(FLUSH, receipt.seconds["flush"])
        sumsq = captured.layout.small(captured.buffer, "sumsq")
        for state, mean in mean_squares(sumsq, receipt.kept, captured.layout.columns).items():
            self._meter.set(MEAN_SQUARE, mean, state)


def mean_squares(sumsq: npt.NDArray[Any], kept: int, columns: Sequence[Column]) -> dict[str, float]:
    """Mean square of the values of each state of an image; a state is left out where it has none, or it is not finite.

    Args:
        sumsq: f64 [R, K], sums of squares of the rows' stored tokens; 0 for rows that are not ok.
        kept: stored tokens of the rows that are ok.
        columns: the K states.
    """
    if not kept:
        return {}
    means = sumsq.sum(axis=0) / (kept * np.array([column.width for column in columns]))
    return {column.name: mean for column, mean in zip(columns, means.tolist(), strict=True) if math.isfinite(mean)}
