"""What an engine is, to the host process that owns it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


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


def open_engine(job: dict[str, Any]) -> Engine:
    """The engine that a job asks for; imports only that one."""
    from ray_extract.config import Job

    parsed = Job.model_validate(job)
    if parsed.engine.kind == "simulated":
        from ray_extract.engine.simulated import SimulatedEngine

        return SimulatedEngine(parsed)
    from ray_extract.engine.sglang import SGLangEngine

    return SGLangEngine(parsed)
