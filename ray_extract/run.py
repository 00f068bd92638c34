"""python -m ray_extract.run --config job.yaml [section.key=value ...]: the whole run, on one screen.

Exit codes, see errors.Exit: 0 every row is accounted for and committed, and no more rows failed than
run.max_failed_rows; 1 it came to its end, but rows failed or units were given up; 2 the job, the data set, the output
or a machine must be mended first; 3 it stopped before its end, and the same command goes on: SIGTERM, SIGINT, an outage
of the store, engines that do not start, a defect.
"""

from ray_extract.console import ENDED, complain, end_on_signal, leave, parse, tell
from ray_extract.errors import (
    AccessDenied,
    ConfigError,
    CredentialsExpired,
    Exit,
    NotFound,
    OutOfSpace,
    RayExtractError,
    StoreError,
    UnitsGivenUp,
)

if __name__ == "__main__":
    # The other imports take a second, from a network disk much longer.
    end_on_signal(Exit.STOPPED, ENDED)

import argparse
import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import logging
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import ray_extract
from ray_extract import logs
from ray_extract.capture.boundaries import resolve_boundaries
from ray_extract.config import Job, load_job
from ray_extract.dataset.chat import template_fingerprint
from ray_extract.dataset.parts import Pool, Setup, here, identity_of, tokenizer_of
from ray_extract.dataset.prepared import RowIndex
from ray_extract.dataset.source import source_fingerprint
from ray_extract.engine.base import check_engine
from ray_extract.head import write_head
from ray_extract.layout import PLAN_KEY, round_of_unit
from ray_extract.ledger import Ledger, Totals, last_manifest, mended, run_identity, take_retries
from ray_extract.metrics import DriveMetrics
from ray_extract.model import ModelShape, describe_model
from ray_extract.plan import (
    PlanSummary,
    claim_round,
    estimate,
    load_or_make_plan,
    load_plan,
    read_rounds,
)
from ray_extract.presets import TARGETS, apply_preset
from ray_extract.progress import show_count
from ray_extract.records import Unit
from ray_extract.shards.image import TORCH_TO_CODE, state_columns
from ray_extract.staging import is_url
from ray_extract.store import ObjectInfo, Store, open_store, probe_create
from ray_extract.summary import Summary, read_drives, write_summary
from ray_extract.tally import Account, Cause
from ray_extract.views import write_views

if TYPE_CHECKING:
    from ray_extract.extractor import ExtractorSetup
    from ray_extract.worker import WorkerSetup

logger = logging.getLogger(__name__)

_ROW_TABLE_BYTES = 256  # of an image, for each row, beside 37 for each state; see shards.image
_IMAGE_HEADER_BYTES = 64 << 10
SMALL_ARENA = 256 << 20
"""Up to this many bytes an arena holds more units than it must, if they are small; see arena_size."""
_MOST_AT_ONCE = 16  # images in an arena; each takes up to 3 MiB of control pages


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A job that is checked, claimed and planned, with nothing started yet.

    Args:
        units: of the plan.
        retries: of all retry rounds.
    """

    job: Job
    shape: ModelShape
    boundaries: tuple[int, ...]
    store: Store
    ledger: Ledger
    index: RowIndex
    units: list[Unit]
    retries: list[Unit]

    def renewed(self) -> Self:
        """The same with the units as they are now."""
        return dataclasses.replace(self, units=load_plan(self.store)[1], retries=read_rounds(self.store))

    @property
    def plan(self) -> PlanSummary:
        """Counts and sizes."""
        return estimate(self.index, self.units, self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of all states of one stored token."""
        return token_bytes(self.job, self.shape, self.boundaries)


def token_bytes(job: Job, shape: ModelShape, boundaries: tuple[int, ...]) -> int:
    """Bytes of all states of one stored token."""
    code = TORCH_TO_CODE[job.capture.stored_dtype(shape.dtype)]
    columns = state_columns(boundaries, job.capture.final, code, shape.hidden)
    return sum(column.token_bytes for column in columns)


def check_job(job: Job) -> tuple[Job, ModelShape, tuple[int, ...], Store]:
    """Check what needs neither the data set nor an engine.

    Returns:
        The job with absolute paths, the model, the resolved boundaries, and the output, untouched.

    Raises:
        ConfigError: names the field, its value and the way out.
    """
    shape = describe_model(job.model)
    job = _absolute(job, shape)
    check_engine(job, shape.context_length)
    job = job.model_copy(update={"capture": apply_preset(job.capture, shape.num_layers)})
    boundaries = resolve_boundaries(job.capture.boundaries, shape.num_layers)
    if "://" not in job.output.url:
        for place in (Path(job.output.url), *Path(job.output.url).parents):
            if place.is_file():
                raise ConfigError(f"output.url = {job.output.url!r}: {place} is a file; name a folder")
    return job, shape, boundaries, open_store(job.output.url, job.output.storage_options)


def prepare_run(job: Job, *, begin: bool = True) -> Prepared:
    """Check everything that can be checked without an engine, claim the output, and load or make the plan.

    Args:
        job: the job.
        begin: make the plan if there is none; else that is an error.

    Raises:
        RayExtractError: with exit code 2 for whatever is the user's to mend.
    """
    job, shape, boundaries, store = check_job(job)
    logs.identify(run=store.url, node=platform.node())
    if not begin and store.head(PLAN_KEY) is None:
        with contextlib.suppress(NotFound):
            load_plan(store)  # commits may tell that there was one
        raise ConfigError(f"output.url = {job.output.url!r}: no run there; begin it with ray-extract run")
    try:
        honest = probe_create(store)
    except CredentialsExpired:
        raise  # not the job's fault
    except (NotFound, AccessDenied, OutOfSpace) as error:
        raise ConfigError(f"output.url = {job.output.url!r}: cannot be written: {error}") from None
    if not honest and not job.output.accept_weak_create:
        raise ConfigError(
            f"output.url = {job.output.url!r}: this store overwrites objects that must be written once, so two drivers "
            "could commit the same unit; use another store, or set output.accept_weak_create = true and run one driver"
        )
    ledger = Ledger(store)
    sources = source_fingerprint(job.dataset)
    template = template_fingerprint(job.model, job.dataset, shape.path)
    ledger.claim(run_identity(job, shape, boundaries, sources, template), _environment())
    index, units = load_or_make_plan(
        store,
        job,
        shape,
        token_bytes(job, shape, boundaries),
        identity=identity_of(job, shape, sources, tokenizer_of(job, shape)),
        pool=_pool,
    )
    return Prepared(job, shape, boundaries, store, ledger, index, units, read_rounds(store))


def _pool(setup: Setup, store: Store) -> AbstractContextManager[Pool]:
    """Who prepares the data set, see dataset.processes."""
    asked = setup.job.dataset.processes
    if isinstance(asked, int):
        return here(setup, store)
    # At the point of use, as in _extract.
    from ray_extract.ray_fleet import connect, list_nodes
    from ray_extract.ray_prepare import cluster

    connected = connect(setup.job, start=asked == "cluster")
    return (cluster if asked == "cluster" or (connected and len(list_nodes()) > 1) else here)(setup, store)


def run(job: Job) -> Summary:
    """Extract a data set, or what is left of it.

    Raises:
        Drained: stopped on request.
        RayExtractError: the run cannot be completed.
    """
    began = time.monotonic()
    prepared = prepare_run(job)
    for line in prepared.plan.lines():
        logger.info(line)
    write_head(prepared.store, prepared.job, prepared.shape)
    return _complete(prepared, began, rounds=False)


def retry_failed(job: Job) -> Summary:
    """Extract the rows of a complete run that failed once more, as one round.

    A round that was begun and not finished is finished. Else the rows that are still not ok make the next one.

    Raises:
        ConfigError: the run is not complete.
        Drained: stopped on request.
        RayExtractError: the round cannot be completed.
    """
    began = time.monotonic()
    prepared = prepare_run(job, begin=False)
    listing = prepared.ledger.listing()
    prepared = prepared.renewed()  # after the listing, see _complete
    left = sum(unit.unit not in listing for unit in prepared.units)
    if left:
        raise ConfigError(
            f"output.url = {prepared.job.output.url!r}: {left} of {len(prepared.units)} units are not committed; "
            "finish the run before its failed rows are retried"
        )
    if all(unit.unit in listing for unit in prepared.retries):
        _claim_round(prepared, listing)
    return _complete(prepared, began, rounds=True)


def _claim_round(prepared: Prepared, listing: Mapping[str, ObjectInfo]) -> None:
    """Claim a round of the rows that are not ok by these commits, if there are any."""
    retries, receipts = take_retries(prepared.ledger.receipts(listing), prepared.retries)
    failed = {failure.row for receipt in receipts for failure in receipt.failures} - mended(retries)
    if not failed:
        logger.info("no row failed: nothing to retry")
        return
    last = max((round_of_unit(unit.unit) or 0 for unit in prepared.retries), default=0)
    claim_round(prepared.store, prepared.job, prepared.index, prepared.token_bytes, failed, last + 1)


@dataclasses.dataclass(slots=True)
class _Sofar:
    """What this invocation did, for its summary.

    Args:
        units, units_done: in all, and those of them that are known to be committed.
        drives: what its drivers counted.
    """

    units: int = 0
    units_done: int = 0
    drives: Account = dataclasses.field(default_factory=Account)


def _complete(prepared: Prepared, began: float, *, rounds: bool) -> Summary:
    """Extract what has no commit, and say in a manifest and a summary what is there."""
    sofar = _Sofar()
    try:
        manifest, totals = _to_the_end(prepared, sofar, rounds=rounds)
    except RayExtractError as error:
        summary = _sum_up(prepared, sofar, began, error.exit_code, reason=str(error))
        for line in summary.lines(prepared.job.output.url):
            logger.info(line)
        raise
    return _sum_up(prepared, sofar, began, exit_code(prepared.job, totals), totals=totals, manifest=manifest)


def _to_the_end(prepared: Prepared, sofar: _Sofar, *, rounds: bool) -> tuple[str, Totals]:
    """Extract the units of the plan, or of retry rounds, that have no commit; returns the manifest and its totals."""
    while True:
        # In this order: units may be split and rounds claimed meanwhile, by another driver too, and those whose commits
        # are seen are known then; and a manifest knows the commits that earlier ones know.
        after = last_manifest(prepared.store)
        listing = prepared.ledger.listing()
        prepared = prepared.renewed()
        every = [*prepared.units, *prepared.retries]
        sofar.units, sofar.units_done = len(every), sum(unit.unit in listing for unit in every)
        units = prepared.retries if rounds else prepared.units
        todo = [unit for unit in units if unit.unit not in listing]
        if len(todo) < len(units) and not sofar.drives.drives:
            logger.info("%d of %d units are committed already", len(units) - len(todo), len(units))
        if todo and sofar.units_done and not sofar.drives.drives:
            # Now, and not only after the extraction, when sizes are looked at too.
            prepared.ledger.require_shards(unit.unit for unit in every if unit.unit in listing)
        if todo:
            _extract(prepared, set(listing), todo, sofar)
            continue
        views = write_views(
            prepared.ledger,
            prepared.index,
            prepared.units,
            prepared.retries,
            after,
            listing,
            prepared.shape.vocab_size,
        )
        if views is not None:
            return views.manifest, views.totals
        logger.info("another driver wrote a manifest meanwhile; all commits are read again for the next one")


def _sum_up(
    prepared: Prepared,
    sofar: _Sofar,
    began: float,
    code: Exit,
    *,
    reason: str | None = None,
    totals: Totals | None = None,
    manifest: str | None = None,
) -> Summary:
    try:
        whole, unfinished = read_drives(prepared.store)
    except StoreError as error:
        logger.warning("what earlier runs did is not in the summary: %s", error)
        whole, unfinished = sofar.drives, 0
    summary = Summary(
        code=code,
        reason=reason,
        totals=totals,
        units=sofar.units,
        units_done=sofar.units_done,
        manifest=manifest,
        wall_s=time.monotonic() - began,
        this=sofar.drives,
        whole=whole,
        unfinished=unfinished,
    )
    write_summary(prepared.store, summary)
    return summary


def _extract(prepared: Prepared, done: set[str], todo: list[Unit], sofar: _Sofar) -> None:
    # Ray and torch take seconds to import, and a mistake in the job file should not wait for it.
    from ray_extract.driver import Driver
    from ray_extract.ray_fleet import RayFleet, RayMeter, connect

    connect(prepared.job)
    setup = _worker_setup(prepared, todo)
    before = [unit for unit in (*prepared.units, *prepared.retries) if unit.unit in done]
    done_tokens = sum(unit.tokens for unit in before)
    driver = Driver(
        prepared.job,
        setup,
        prepared.ledger,
        todo,
        functools.partial(RayFleet, setup),
        total_units=len(before) + len(todo),
        total_tokens=done_tokens + sum(unit.tokens for unit in todo),
        done_tokens=done_tokens,
        report=DriveMetrics(RayMeter(setup.run)),
    )
    try:
        given_up = driver.run()
    finally:
        account = driver.account()
        sofar.drives += account
        sofar.units_done += account.units
    if given_up:
        unit, reason = next(iter(given_up.items()))
        tries = show_count(prepared.job.run.max_attempts, "attempt")
        told = (
            f"{show_count(len(given_up), 'unit')} given up after {tries} (run.max_attempts), the others are committed; "
            f"{unit}: {reason}"
        )
        if {driver.tally.failures[name] for name in given_up} == {Cause.STORE_FAILED}:
            raise StoreError(f"{told}; run the same command again once the store is well")
        raise UnitsGivenUp(told)


def _worker_setup(prepared: Prepared, todo: Sequence[Unit]) -> "WorkerSetup":
    from ray_extract.worker import WorkerSetup

    job, shape = prepared.job, prepared.shape
    return WorkerSetup(
        extractor=extractor_setup(job, shape, prepared.boundaries, todo),
        rows=prepared.index.to_json(),
        metadata={
            "model": shape.architecture,
            "model_fingerprint": shape.fingerprint,
            "num_layers": str(shape.num_layers),
            "boundaries": ",".join(map(str, prepared.boundaries)),
            "final": "after the final norm" if job.capture.final else "not stored",
            "keep": job.capture.keep,
            "ray_extract": ray_extract.__version__,
        },
        run=prepared.store.url,
    )


def extractor_setup(
    job: Job, shape: ModelShape, boundaries: tuple[int, ...], units: Sequence[Unit]
) -> "ExtractorSetup":
    """What the extractors of a job need to know that have these units to extract."""
    from ray_extract.extractor import ExtractorSetup

    arena_bytes = job.run.arena_bytes or arena_size(units, job.run.units_in_flight)
    # For a worker these are the most; how many of them it gets the driver decides.
    in_flight = {"units_in_flight": images_at_once(units, job.run.units_in_flight, arena_bytes)}
    workers_job = job.model_copy(update={"run": job.run.model_copy(update=in_flight)})
    return ExtractorSetup(
        job=workers_job.model_dump(mode="json"),
        boundaries=boundaries,
        dtype=TORCH_TO_CODE[shape.dtype],
        hidden=shape.hidden,
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        arena_bytes=arena_bytes,
        log_dir=str(Path(tempfile.gettempdir()) / "ray_extract-logs"),
        fingerprint=shape.fingerprint,
    )


def arena_size(units: Sequence[Unit], units_in_flight: int) -> int:
    """Shared memory for the largest units in flight and one more, so that the engine never waits for a flush.

    Of small units, which take less time than it takes to store and lease one, for more of them.
    """
    sizes = list(itertools.accumulate(_largest(units, units_in_flight)))
    small = [size for size in sizes if size <= SMALL_ARENA]
    return max(sizes[: units_in_flight + 1][-1:] + small[-1:], default=0)


def images_at_once(units: Sequence[Unit], units_in_flight: int, arena_bytes: int) -> int:
    """The largest units that an arena holds beside another one; units_in_flight at least."""
    fit = sum(size <= arena_bytes for size in itertools.accumulate(_largest(units, units_in_flight)))
    return max(units_in_flight, fit - 1)


def _largest(units: Sequence[Unit], units_in_flight: int) -> list[int]:
    return heapq.nlargest(max(units_in_flight, _MOST_AT_ONCE) + 1, map(image_bound, units))


def image_bound(unit: Unit) -> int:
    """Bytes that a unit's image takes at most: states, ids and masks, row tables, spans of alternating tokens, pads."""
    return unit.nbytes + (5 + 8) * unit.tokens + unit.rows * 4 * _ROW_TABLE_BYTES + _IMAGE_HEADER_BYTES + (1 << 20)


def _absolute(job: Job, shape: ModelShape) -> Job:
    """Workers run in other folders: local paths become absolute, and what depends on the model is given by value."""
    path = job.model.path if is_url(job.model.path) else shape.path
    model = job.model.model_copy(update={"path": path, "dtype": shape.dtype})
    engine = job.engine.model_copy(update={"start_timeout_s": job.engine.start_timeout(shape.weight_bytes)})
    url = job.output.url
    if "://" not in url:
        url = str(Path(url).expanduser().absolute())
    output = job.output.model_copy(update={"url": url})
    return job.model_copy(update={"model": model, "engine": engine, "output": output})


def _environment() -> dict[str, str]:
    return {"ray_extract": ray_extract.__version__, "python": platform.python_version()}


def exit_code(job: Job, totals: Totals) -> Exit:
    """Of a complete run: whether more rows failed than were allowed to."""
    return Exit.FAILED if sum(totals.failed.values()) > job.run.max_failed_rows else Exit.OK


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Both signals end it by KeyboardInterrupt, until the driver has something to drain and takes them itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a job, for every command that takes one."""
    parser.add_argument("--config", metavar="JOB.YAML", help="the job file")
    parser.add_argument("--preset", metavar="NAME", help=f"capture.preset: {', '.join(TARGETS)}")
    parser.add_argument("--draft-config", metavar="FILE", help="capture.draft_config: the draft's config.json")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the job file")


def overrides(args: argparse.Namespace) -> list[str]:
    """What the command line says over the job file."""
    flags = {"capture.preset": args.preset, "capture.draft_config": args.draft_config}
    return [*(f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None), *args.overrides]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ray_extract.run", description=__doc__.splitlines()[0])
    add_job_arguments(parser)
    return execute(parse(parser, argv), run)


def execute(args: argparse.Namespace, action: Callable[[Job], Summary]) -> int:
    """Do something with the job that the arguments name, and say how it went. Returns the exit code."""
    logs.configure("text")
    say: Callable[[object], None] = complain
    try:
        with interruptible():
            job = load_job(args.config, overrides(args))
            if job.run.log_format == "json":
                logs.configure("json")
                say = logger.error
            summary = action(job)
    except RayExtractError as error:
        say(error)
        return error.exit_code
    except KeyboardInterrupt:
        say(ENDED)
        return Exit.STOPPED
    except Exception as error:
        # A defect, ours or of what we stand on. Python's own exit code for it would say that the run came to its end.
        logger.exception("this should not happen")
        say(f"{type(error).__name__}: {error}; what is committed stays: run the same command again to go on")
        return Exit.STOPPED
    tell(*summary.lines(job.output.url))
    return summary.code


if __name__ == "__main__":
    leave(main())
