"""What an engine is, to the host process that owns it."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ray_extract.config import Job
from ray_extract.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine says of itself.

    Args:
        version: the engine's name and version.
        max_input_tokens: longest prompt that it runs as given.
        dp_size: schedulers that requests can be routed to.
        environment: versions and hardware, for the record.
    """

    version: str
    max_input_tokens: int
    dp_size: int
    environment: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer to one request.

    Args:
        ok: whether it finished normally.
        reason: why not, in the engine's words.
        output_ids: tokens it generated, if any were asked for.
    """

    ok: bool
    reason: str = ""
    output_ids: tuple[int, ...] = ()


class Engine(Protocol):
    """One engine in the host process; its methods run on the host's event loop, in the main thread."""

    async def start(self, folder: Path) -> EngineInfo:
        """Be ready to serve, with capture into the arena in `folder`.

        Raises:
            CaptureRefused: it would not capture correctly.
            EngineError: it did not start.
        """

    async def generate(self, rid: str, input_ids: Sequence[int], dp_rank: int | None, new_tokens: int) -> Answer:
        """Prefill one prompt and generate `new_tokens` tokens greedily; never raises for a bad prompt."""

    def abort(self, rids: Sequence[str]) -> None:
        """Ask for these requests to end early; they still get answers."""


SIMULATED_ARGS = (
    "tokens_per_s",
    "max_input_tokens",
    "poison_token",
    "fatal_token",
    "reject_token",
    "nan_token",
    "hang_token",
)


def check_simulated_args(args: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that the simulated engine does not have."""
    unknown = sorted(set(args) - set(SIMULATED_ARGS))
    if unknown:
        raise ConfigError(f"engine.args.{unknown[0]}: the simulated engine knows {', '.join(SIMULATED_ARGS)}")


def check_engine(job: Job, context_length: int) -> None:
    """Refuse what can be known to be wrong before an engine is started.

    Args:
        context_length: the model's own.

    Raises:
        ConfigError: names the field, its value and the way out.
    """
    from ray_extract.engine.sglang import server_args

    engine = job.engine
    if engine.kind == "simulated":
        check_simulated_args(engine.args)
        return
    server_args(job)
    if (engine.context_length or 0) > context_length:
        raise ConfigError(f"engine.context_length = {engine.context_length}: the model's own is {context_length}")
    ranks = engine.tp_size if engine.enable_dp_attention else engine.tp_size * engine.dp_size
    binding = "SGLANG_CPU_OMP_THREADS_BIND"
    if engine.device == "cpu" and ranks > 1 and binding not in engine.env and binding not in os.environ:
        raise ConfigError(
            f"engine.tp_size = {engine.tp_size}, engine.dp_size = {engine.dp_size} on the CPU: set "
            f"engine.env.{binding} to the cores of each rank, such as 0|1"
        )


def open_engine(job: dict[str, Any]) -> Engine:
    """The engine that a job asks for; imports only that one."""
    parsed = Job.model_validate(job)
    if parsed.engine.kind == "simulated":
        from ray_extract.engine.simulated import SimulatedEngine, SimulatedRanks

        return SimulatedEngine(parsed) if parsed.engine.dp_size == 1 else SimulatedRanks(parsed)
    from ray_extract.engine.sglang import SGLangEngine

    return SGLangEngine(parsed)
