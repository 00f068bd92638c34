"""An engine host whose engine has no capture plugin: the baseline of capture benchmarks. Same pipe, same requests."""

from pathlib import Path
from typing import Any

from ray_extract.config import Job
from ray_extract.engine import host
from ray_extract.engine.base import EngineInfo
from ray_extract.engine.sglang import SGLangEngine


class BareEngine(SGLangEngine):
    """SGLang as it is."""

    async def start(self, folder: Path) -> EngineInfo:
        """Without the plugin's environment and handshake."""
        return self.build()


def open_bare(job: dict[str, Any]) -> BareEngine:
    """In place of engine.base.open_engine."""
    return BareEngine(Job.model_validate(job))


if __name__ == "__main__":
    host.open_engine = open_bare
    host.main()
