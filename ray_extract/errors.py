"""The errors of ray_extract, as one tree. Each class says what the caller should do: retry, skip or stop.

RayExtractError
├── ConfigError            stop   a wrong key, value or path in the job
├── DatasetError           stop   the input cannot be read at all (one bad row is data, not an error)
├── PlanError              stop   the job cannot be planned (a row larger than half the arena, no usable row)
├── IdentityMismatch       stop   the output belongs to another run
├── StoreError             retry  the object store failed in a way that may pass
│   ├── AlreadyExists      skip   create-if-absent lost: somebody else wrote this key
│   ├── NotFound           stop   the object, bucket or folder does not exist
│   ├── Throttled          retry  the store asks for fewer requests
│   ├── AccessDenied       stop   credentials are missing or wrong, or may not do this
│   │   ├── CredentialsExpired    they were right
│   │   └── ClockSkew             this machine's clock is wrong, so that signatures are
│   └── OutOfSpace         stop   the disk or quota is full
├── ArenaError             stop   /dev/shm is too small, or the control file is not ours
├── CaptureRefused         stop   this engine, model or option cannot be captured correctly
├── EngineError            retry  the engine did not start, or rejected a request
│   └── EngineDied         retry  a process of the engine is gone; rows in flight are lost, nothing else
├── ShardError             stop   a shard's bytes do not say what they should
├── UnitsGivenUp           stop   units were tried as often as allowed; all others are committed
└── Drained                stop   the run was asked to stop and did so cleanly; run again to resume

Beside the verdict, which is for the code around the failed operation, each has the exit code with which a command that
it ends tells its caller what to do, see Exit.
"""

import enum


class Verdict(enum.Enum):
    """What the caller of a failed operation should do."""

    RETRY = "retry"
    SKIP = "skip"
    STOP = "stop"


class Exit(enum.IntEnum):
    """Exit codes, made for a shell script or a Kubernetes Job that retries: it should on STOPPED, and not on WRONG.

    The question between the two is whether the same command, with nothing mended by anybody, may get further.
    """

    OK = 0  # every row is committed, and no more failed than run.max_failed_rows
    FAILED = 1  # it came to its end, but rows failed, units were given up, or what was verified is not right
    WRONG = 2  # the job, the data set, the output or a machine must be mended first
    STOPPED = 3  # it ended before its end: asked to, or by an outage, an engine, a defect; run again to go on


class RayExtractError(Exception):
    """Base of all errors raised on purpose. The message names the thing, its value and the way out."""

    verdict = Verdict.STOP
    exit_code = Exit.WRONG


class ConfigError(RayExtractError):
    """A wrong key, value or path in the job file or on the command line."""


class DatasetError(RayExtractError):
    """The data set as a whole cannot be read."""


class PlanError(RayExtractError):
    """The rows cannot be planned into units under this configuration."""


class IdentityMismatch(RayExtractError):  # noqa: N818 - it reads as what happened
    """The output prefix holds a run with another identity."""


class StoreError(RayExtractError):
    """The object store failed in a way that may pass."""

    verdict = Verdict.RETRY
    exit_code = Exit.STOPPED


class AlreadyExists(StoreError):  # noqa: N818
    """Create-if-absent found an object under this key."""

    verdict = Verdict.SKIP


class NotFound(StoreError):  # noqa: N818
    """No such object, bucket or folder."""

    verdict = Verdict.STOP
    exit_code = Exit.WRONG


class Throttled(StoreError):  # noqa: N818
    """The store is asked for more than it gives, and may give it later."""


class AccessDenied(StoreError):  # noqa: N818
    """The store refused these credentials."""

    verdict = Verdict.STOP
    exit_code = Exit.WRONG


class CredentialsExpired(AccessDenied):
    """Temporary credentials have ended, and there are no new ones where they came from."""

    exit_code = Exit.STOPPED  # whoever renews them may do so before the next try


class ClockSkew(AccessDenied):
    """The machine's clock is further off than the store lets signatures be."""


class OutOfSpace(StoreError):  # noqa: N818
    """The disk or the quota behind the store is full."""

    verdict = Verdict.STOP
    exit_code = Exit.WRONG


class ArenaError(RayExtractError):
    """The shared-memory arena cannot be made or used."""


class CaptureRefused(RayExtractError):  # noqa: N818
    """The engine, the model or an option would not give correct states, so nothing is served."""


class EngineError(RayExtractError):
    """The engine failed to start or to answer."""

    verdict = Verdict.RETRY
    exit_code = Exit.STOPPED


class EngineDied(EngineError):  # noqa: N818
    """A process of the engine is gone."""


class ShardError(RayExtractError):
    """A shard is truncated, altered, or not what the manifest says."""


class UnitsGivenUp(RayExtractError):  # noqa: N818
    """Units have no commit after as many attempts as allowed; the others are committed."""

    exit_code = Exit.FAILED


class Drained(RayExtractError):  # noqa: N818
    """The run stopped on request with everything finished committed."""

    exit_code = Exit.STOPPED
