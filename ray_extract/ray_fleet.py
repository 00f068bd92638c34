"""Workers as Ray actors, one each, and the cluster that they run in.

Ray never restarts them: a method that Ray runs a second time would extract twice, so the driver itself makes a new
worker and leases its units again under other attempt names.

An actor's GPUs are all of one node, by Ray's own rule, and it waits until a node has them free: a placement group of
one bundle would ask for the same, and would be a second thing to wait for and to remove (docs/architecture.md).
"""

import contextlib
import functools
import logging
import math
import os
import platform
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
import ray.exceptions
import ray.util.metrics
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import actors, available_resources_per_node

from ray_extract import logs
from ray_extract.config import Job
from ray_extract.errors import ConfigError, EngineError, RayExtractError
from ray_extract.fleet import Call, Death, Event, Node
from ray_extract.leases import Lease
from ray_extract.metrics import Kind, Metric
from ray_extract.worker import Worker, WorkerSetup

logger = logging.getLogger(__name__)

_KNOCK_S = 10.0
_LOCAL_OBJECT_STORE = 200 << 20  # no state passes Ray's object store, and it takes room in /dev/shm


class RayMeter:
    """See metrics.Meter: Ray's metrics, which the node's agent exports.

    Args:
        run: see metrics.RUN.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._instruments: dict[str, Any] = {}

    def add(self, metric: Metric, amount: float, tag: str | None = None) -> None:
        """See metrics.Meter."""
        counter, tags = self._instrument(metric), self._tags(metric, tag)
        if amount:
            counter.inc(amount, tags)
        else:
            counter._record(0.0, tags)  # `inc` takes no 0

    def set(self, metric: Metric, value: float, tag: str | None = None) -> None:
        """See metrics.Meter."""
        self._instrument(metric).set(value, self._tags(metric, tag))

    def observe(self, metric: Metric, value: float, tag: str | None = None) -> None:
        """See metrics.Meter."""
        self._instrument(metric).observe(value, self._tags(metric, tag))

    def _tags(self, metric: Metric, tag: str | None) -> dict[str, str]:
        return dict(zip(metric.tags, (self._run,) if tag is None else (self._run, tag), strict=True))

    def _instrument(self, metric: Metric) -> Any:
        found = self._instruments.get(metric.name)
        if found is None:
            name, args = metric.name.removeprefix("ray_"), {"description": metric.text, "tag_keys": metric.tags}
            if metric.kind is Kind.HISTOGRAM:
                found = ray.util.metrics.Histogram(name, boundaries=list(metric.buckets), **args)
            else:
                found = (ray.util.metrics.Counter if metric.kind is Kind.COUNTER else ray.util.metrics.Gauge)(
                    name, **args
                )
            self._instruments[metric.name] = found
        return found


class WorkerActor(Worker):
    """A worker in its actor's process.

    Args:
        setup: see Worker.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        if setup.extractor.job["run"]["log_format"] == "json":
            logs.configure("json")
            logs.identify(run=setup.run, node=platform.node())
        super().__init__(setup, RayMeter(setup.run))


class RayFleet:
    """See fleet.Fleet.

    Answers come by callback: to wait for a list of references costs Ray the length of the list for each that is done.

    Args:
        setup: what workers need.
        post: takes the events.
    """

    def __init__(self, setup: WorkerSetup, post: Callable[[Event], None]) -> None:
        self._setup, self._post = setup, post
        job = Job.model_validate(setup.extractor.job)
        self.need: Mapping[str, float] = {"GPU": float(job.num_gpus), "CPU": job.engine.cpus}
        self._actor = ray.remote(WorkerActor).options(
            num_gpus=job.num_gpus,
            num_cpus=job.engine.cpus,
            max_restarts=0,
            max_task_retries=0,
            # each unit in flight, start or stop, and progress
            max_concurrency=job.run.units_in_flight + 2,
        )
        self._handles: dict[int, Any] = {}

    def start(self, worker: int) -> None:
        """See fleet.Fleet."""
        handle = self._handles[worker] = self._actor.remote(self._setup)
        self._ask(worker, Call.START, handle.start.remote())

    def extract(self, worker: int, lease: Lease, attempt: str) -> None:
        """See fleet.Fleet."""
        self._ask(worker, lease, self._handles[worker].extract.remote(lease.unit, attempt, lease.doomed))

    def poll(self, worker: int) -> None:
        """See fleet.Fleet."""
        self._ask(worker, Call.POLL, self._handles[worker].progress.remote())

    def waiting(self) -> Collection[int]:
        """See fleet.Fleet."""
        job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        pending = actors(job_id=job, actor_state_name="PENDING_CREATION")
        placeless = {actor for actor, record in pending.items() if not record["Address"]["Port"]}
        return {worker for worker, handle in self._handles.items() if handle._actor_id.hex() in placeless}

    def stop(self, worker: int) -> None:
        """See fleet.Fleet."""
        self._ask(worker, Call.STOP, self._handles[worker].stop.remote())

    def kill(self, worker: int) -> None:
        """See fleet.Fleet."""
        ray.kill(self._handles.pop(worker))

    def nodes(self) -> Sequence[Node]:
        """See fleet.Fleet."""
        return list_nodes()

    def _ask(self, worker: int, call: Call | Lease, ref: Any) -> None:
        ref.future().add_done_callback(functools.partial(self._answer, worker, call))

    def _answer(self, worker: int, call: Call | Lease, future: "Future[Any]") -> None:
        """Runs in a thread of Ray's."""
        error = future.exception()
        if error is None:
            self._post(Event(worker, call, future.result()))
        else:
            self._post(Event(worker, call, error=translate(error)))


def translate(error: BaseException) -> RayExtractError | Death:
    """What Ray raises for a call, in the driver's terms."""
    if isinstance(error, RayExtractError):
        # Ray's stand-in for an error that a task raised carries the traceback as its text, and the error itself.
        cause: RayExtractError = getattr(error, "cause", error)
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        # Died or only unavailable: either way its calls may have run, and a new worker and new attempt names are right.
        # Unavailable is what Ray says of an actor on a node that is gone, until it knows that, 14 to 65 s later.
        left = isinstance(error, ray.exceptions.ActorUnavailableError) or "its node has died" in str(error)
        return Death(f"its actor died: {_first_line(error)}", left)
    logger.error("a worker failed in a way that it should not", exc_info=error)
    return Death(_first_line(error))


def list_nodes() -> list[Node]:
    """The nodes of the connected cluster that are there now."""
    free = available_resources_per_node()
    return [
        Node(node["NodeName"], node["Resources"], free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]
    ]


def connect(job: Job, *, start: bool = True) -> bool:
    """Connect to the Ray cluster of the job, or to the running one, or start a local one.

    Args:
        job: names it.
        start: a local one where no other is.

    Returns:
        Whether it is connected.

    Raises:
        ConfigError: run.address (or RAY_ADDRESS) names no cluster that lets us in.
        EngineError: a local one did not start, as on a machine with too much to do.
    """
    if ray.is_initialized():
        return True
    # Ray puts words of its own before each line of a worker, which are no JSON; the workers' own files have the lines.
    forwards = job.run.log_format == "text"
    address = _running_cluster(job.run.address or os.environ.get("RAY_ADDRESS"))
    if address is not None:
        try:
            with _our_sigterm():
                ray.init(address=address, logging_level=logging.WARNING, log_to_driver=forwards)
        except (ConnectionError, RuntimeError, ray.exceptions.AuthenticationError) as error:
            raise ConfigError(
                f"run.address = {address!r}: {_first_line(error)}; is it a Ray head of this version, and if it asks "
                "for a token, are RAY_AUTH_MODE=token and RAY_AUTH_TOKEN set?"
            ) from None
        return True
    if not start:
        return False
    cpus = max(os.cpu_count() or 1, math.ceil(job.engine.count * job.engine.cpus))
    try:
        with _our_sigterm():
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=_LOCAL_OBJECT_STORE,
                logging_level=logging.WARNING,
                log_to_driver=forwards,
            )
    except Exception as error:  # as what Ray raises where its processes are too slow to come up
        raise EngineError(
            f"Ray did not start on this machine: {_first_line(error)}; run the same command again to go on"
        ) from error
    return True


@contextlib.contextmanager
def _our_sigterm() -> Iterator[None]:
    """ray.init sets a handler that ends the process without a word, and with an exit code that says nothing here."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:
        if end.code == signal.SIGTERM:
            raise KeyboardInterrupt from None
        raise
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _running_cluster(named: str | None) -> str | None:
    """host:port of the cluster that is named, or of the running one; None to start a local one.

    Knocks before Ray does: Ray tries an address where nobody listens for five minutes, and then ends the process.
    """
    if named == "local":
        return None
    if named is not None and "://" in named:
        raise ConfigError(f"run.address = {named!r}: give host:port of the head node (Ray's own port is 6379)")
    try:
        address = canonicalize_bootstrap_address(named or "auto")
    except (ValueError, OSError):  # a ConnectionError is an OSError: no cluster runs here
        address = None
    if address is None:
        if named is not None:
            raise ConfigError(f"run.address = {named!r}: no Ray cluster there; give host:port, or local to start one")
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, ValueError) as error:
        if named is not None:
            raise ConfigError(f"run.address = {named!r}: no Ray cluster answers there: {error}") from None
        logger.warning("the last Ray cluster of this machine, %s, does not answer", address)
        return None
    return str(address)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
