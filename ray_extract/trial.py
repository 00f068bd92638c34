"""A trial: some rows of a plan through the engine of the job, as a run would, to know its speed. Nothing is stored."""

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import ray

from ray_extract.config import Job
from ray_extract.dataset.prepared import PreparedRows
from ray_extract.errors import ConfigError, EngineError
from ray_extract.extractor import Extractor, ExtractorSetup
from ray_extract.fleet import Death, shortage
from ray_extract.ray_fleet import connect, list_nodes, translate
from ray_extract.records import Unit
from ray_extract.shards.image import RowTable, row_table


class Trial(NamedTuple):
    """What a trial came to.

    Args:
        rows, tokens: that were extracted.
        seconds: that they took, the second time.
        start_s: until the engine was ready.
        failures: rows that were not, by reason.
    """

    rows: int
    tokens: int
    seconds: float
    start_s: float
    failures: dict[str, int]

    @property
    def tokens_per_second(self) -> float:
        """Of one engine."""
        return self.tokens / self.seconds

    def line(self) -> str:
        """For people, as PlanSummary.lines."""
        failed = "".join(f", {count:,} failed: {reason}" for reason, count in self.failures.items())
        return (
            f"trial     {self.tokens_per_second:,.0f} tokens/s by one engine: {self.rows:,} rows of {self.tokens:,} "
            f"tokens in {self.seconds:.1f} s, after {self.start_s:.0f} s to start{failed}"
        )


def try_out(job: Job, setup: ExtractorSetup, rows: PreparedRows, units: Sequence[Unit]) -> Trial:
    """Extract units on one engine of the job, on the job's Ray cluster or a local one, and throw the states away.

    Args:
        job: the job.
        setup: of its extractors.
        rows: prepared ones.
        units: of some of them; at least one.

    Raises:
        ConfigError: no node has what an engine needs.
        EngineError: the engine did not start or died, or no row came through.
        RayExtractError: see Extractor.start.
    """
    connect(job)
    need = {"GPU": float(job.num_gpus), "CPU": job.engine.cpus}
    # As if they were idle: an engine that others leave no room for only waits.
    if missing := shortage(need, [dataclasses.replace(node, free=node.total) for node in list_nodes()]):
        raise ConfigError(f"--trial: {missing}")
    tables = [[(r.index, r.input_ids, r.loss_mask) for r in rows.of(unit)] for unit in units]
    actor = ray.remote(_Trying).options(num_gpus=job.num_gpus, num_cpus=job.engine.cpus, max_restarts=0).remote(setup)
    try:
        told: dict[str, Any] = ray.get(actor.run.remote(tables))
    except ray.exceptions.RayError as error:
        cause = translate(error)
        raise EngineError(f"--trial: {cause.reason}") if isinstance(cause, Death) else cause from None
    finally:
        ray.kill(actor)
    found = Trial(**told)
    if not found.tokens:
        raise EngineError(f"--trial: no row came through{found.line().partition('start')[2]}")
    return found


class _Trying:
    """The actor."""

    def __init__(self, setup: ExtractorSetup) -> None:
        self._setup = setup
        self._job = Job.model_validate(setup.job)
        self._extractor = Extractor(setup)

    def run(self, units: list[list[tuple[int, Any, Any]]]) -> dict[str, Any]:
        """Extract all units twice, since the first time an engine still compiles kernels; see Trial."""
        keep = self._job.capture.keep
        tables = [
            row_table([r for r, _, _ in unit], [i for _, i, _ in unit], [m for *_, m in unit], keep) for unit in units
        ]
        began = time.monotonic()
        try:
            self._extractor.start()
            start_s = time.monotonic() - began
            with ThreadPoolExecutor(self._job.run.units_in_flight) as pool:
                for _ in range(2):
                    began = time.monotonic()
                    done = list(pool.map(self._capture, tables))
                    seconds = time.monotonic() - began
        finally:
            self._extractor.stop()
        failures = sum((failed for *_, failed in done), Counter[str]())
        rows, tokens = sum(rows for rows, _, _ in done), sum(tokens for _, tokens, _ in done)
        return Trial(rows, tokens, seconds, start_s, dict(failures))._asdict()

    def _capture(self, table: RowTable) -> tuple[int, int, "Counter[str]"]:
        with self._extractor.capture(table, {}) as captured:
            ok = np.ones(len(table), bool)
            ok[list(captured.failures)] = False
            reasons = Counter(failure.reason for failure in captured.failures.values())
            return int(ok.sum()), int(np.diff(table.cu_seqlens)[ok].sum()), reasons
