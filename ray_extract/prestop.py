"""What a pod does before it ends: python -m ray_extract.prestop head|worker SECONDS, in its preStop hook.

The head tells the jobs of its cluster to stop and waits until they have; a worker goes on while there is an arena in
its /dev/shm, which a drained driver removes. Neither waits for longer than SECONDS.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray_extract.layout import SHM_PREFIX

_DASHBOARD = "http://127.0.0.1:8265"


def stop_jobs(client: Any) -> Callable[[], bool]:
    """Tell all jobs to stop.

    Args:
        client: a JobSubmissionClient.

    Returns:
        Says whether all have stopped.
    """
    ids = [job.submission_id for job in client.list_jobs() if job.submission_id and not job.status.is_terminal()]
    for job in ids:
        client.stop_job(job)
    return lambda: all(client.get_job_status(job).is_terminal() for job in ids)


def no_arena(shm: Path) -> bool:
    """Whether no engine's arena is there."""
    return next(shm.glob(f"{SHM_PREFIX}*"), None) is None


def wait(over: Callable[[], bool], seconds: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Wait, about that long at most, until something is over; returns whether it is."""
    for _ in range(int(seconds)):
        if over():
            return True
        sleep(1)
    return over()


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 1 if the time was not enough."""
    parser = argparse.ArgumentParser(prog="python -m ray_extract.prestop", description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("head", "worker"))
    parser.add_argument("seconds", type=int)
    args = parser.parse_args(argv)
    if args.role == "worker":
        return 0 if wait(lambda: no_arena(Path("/dev/shm")), args.seconds) else 1
    from ray.job_submission import JobSubmissionClient

    return 0 if wait(stop_jobs(JobSubmissionClient(_DASHBOARD)), args.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
