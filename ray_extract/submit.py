"""ray-extract submit: a run as a job of a Ray cluster, followed to its end, with the driver's own exit code.

`ray job submit` ends with 1 for every failure, with 0 for a job that was stopped, and with 0 when its log stream breaks
off while the job runs. This asks for the job's state until it is a last one, whatever becomes of the stream.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ray_extract.config import Job
from ray_extract.console import complain, pass_on, tell
from ray_extract.errors import ConfigError, Exit

logger = logging.getLogger(__name__)

DETACHED = 130
"""Exit code after Ctrl-C, as of any command that it ends; the job goes on."""

_STOP_MARGIN_S = 60.0  # after the drain: workers stop, which takes up to half a minute, and the last words are written
_POLL_S = 2.0
_SILENT_S = 600.0  # a head node that restarts comes back within
_LAST_LOGS_S = 30.0
_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What to submit.

    Args:
        config: the job file.
        overrides: `section.key=value`.
        working_dir: folder that goes along, with the job file in it; None for the job file alone.
        python: the interpreter on the cluster, which has ray_extract.
        submission_id: the job's name; None to make one.
    """

    config: Path
    overrides: Sequence[str] = ()
    working_dir: Path | None = None
    python: str = "python"
    submission_id: str | None = None


def entrypoint(request: Request) -> str:
    """The command that the cluster runs. `exec`, so that a signal reaches the driver and its exit code is the job's.

    Raises:
        ConfigError: the job file is not in the folder that goes along.
    """
    config = Path(request.config.name)
    if request.working_dir is not None:
        try:
            config = request.config.absolute().relative_to(request.working_dir.absolute())
        except ValueError:
            raise ConfigError(f"--working-dir {request.working_dir}: must hold the job file {request.config}") from None
    return "exec " + shlex.join([request.python, "-m", "ray_extract.run", "--config", str(config), *request.overrides])


def runtime_env(working_dir: Path, drain_s: float) -> dict[str, Any]:
    """Ray's runtime_env: the folder, and time to drain, since `ray job stop` kills after three seconds by default."""
    return {
        "working_dir": str(working_dir),
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(drain_s + _STOP_MARGIN_S))},  # a whole number
    }


def exit_code(status: str, driver_exit_code: int | None) -> int:
    """What a job that ended comes to: the driver's exit code, or STOPPED for one that could not give any.

    Args:
        status: SUCCEEDED, FAILED or STOPPED.
        driver_exit_code: as Ray saw it; negative for a signal, None for a job that was stopped, or whose node is gone.
    """
    if status == "SUCCEEDED":
        return Exit.OK
    return driver_exit_code if driver_exit_code is not None and driver_exit_code > 0 else Exit.STOPPED


def connect(address: str | None) -> Any:
    """A JobSubmissionClient.

    Args:
        address: URL of the dashboard; None for RAY_ADDRESS, or the cluster of this machine.

    Raises:
        ConfigError: nobody answers there.
    """
    from ray.job_submission import JobSubmissionClient

    if address is not None and "://" not in address:
        raise ConfigError(f"--address {address}: give the dashboard's URL, such as http://{address.split(':')[0]}:8265")
    named = [address, *(os.environ.get(name) for name in _ADDRESS_VARIABLES), "of this machine"]
    try:
        with _without(_ADDRESS_VARIABLES if address else ()):  # Ray lets them win over what is asked for by name
            return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"--address {next(filter(None, named))}: {first}; is it the dashboard of a Ray cluster, and if it asks for "
            "a token, are RAY_AUTH_MODE=token and RAY_AUTH_TOKEN set?"
        ) from None


def submit(client: Any, request: Request, job: Job) -> str:
    """Hand a job to the cluster; returns its name.

    Raises:
        ConfigError: Ray refuses it.
    """
    name = request.submission_id or f"ray-extract-{secrets.token_hex(4)}"
    command = entrypoint(request)
    with tempfile.TemporaryDirectory() as folder:
        if request.working_dir is None:
            shutil.copy(request.config, folder)
        env = runtime_env(request.working_dir or Path(folder), job.run.drain_s)
        try:
            return str(client.submit_job(entrypoint=command, submission_id=name, runtime_env=env))
        except (RuntimeError, ValueError, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(f"the cluster does not take the job: {lines[-1]}") from None


def follow(client: Any, name: str, address: str | None = None) -> int:
    """Show a job's log until the job ends; returns the exit code, or DETACHED after Ctrl-C.

    Args:
        client, name: the job.
        address: as it was given, to say how to come back.

    Raises:
        ConfigError: there is no such job.
    """
    try:
        details = asyncio.run(_follow(client, name))
    except KeyboardInterrupt:
        complain(f"not followed any more; the job goes on\n{ways(name, address)}")
        return DETACHED
    if details is None:
        complain(f"the cluster has not answered for {_SILENT_S:.0f} s; the job may go on\n{ways(name, address)}")
        return Exit.STOPPED
    code = exit_code(str(details.status), details.driver_exit_code)
    tell(f"job {name}: {details.status}, exit code {code}")
    if details.driver_exit_code is None and details.message:
        tell(str(details.message))
    return code


def ways(name: str, address: str | None) -> str:
    """What can be done with a job that runs."""
    where = f" --address {address}" if address else ""
    return (
        f"  follow it   ray-extract submit --attach {name}{where}\n"
        f"  stop it     ray job stop {name}{where}     (it drains; submit the same again to go on)"
    )


async def _follow(client: Any, name: str) -> Any:
    """Details of the job once it has ended, or None."""
    ended = asyncio.Event()
    tail = asyncio.create_task(_tail(client, name, ended))
    details = await _wait(client, name)
    ended.set()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(tail, _LAST_LOGS_S if details is not None else 0)
    return details


async def _wait(client: Any, name: str) -> Any:
    heard = time.monotonic()
    while time.monotonic() - heard < _SILENT_S:
        try:
            details = await asyncio.to_thread(client.get_job_info, name)
        except (RuntimeError, OSError) as error:
            if "does not exist" in str(error):
                raise ConfigError(f"--attach {name}: the cluster has no such job") from None
            logger.warning("the cluster does not answer: %s", (str(error).splitlines() or [""])[0])
        else:
            heard = time.monotonic()
            if details.status.is_terminal():
                return details
        await asyncio.sleep(_POLL_S)
    return None


async def _tail(client: Any, name: str, ended: asyncio.Event) -> None:
    """Show the log. A stream that breaks off begins again with all of it, of which only the rest is shown."""
    import aiohttp

    shown = 0
    while True:
        at = 0
        try:
            async for text in client.tail_job_logs(name):
                pass_on(text[max(0, shown - at) :])
                at += len(text)
                shown = max(shown, at)
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            logger.debug("the log stream broke off: %s", error)
        if ended.is_set():
            return
        await asyncio.sleep(_POLL_S)


@contextlib.contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
