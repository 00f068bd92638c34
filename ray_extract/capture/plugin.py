"""The entry point `sglang.srt.plugins`: installs the hooks in SGLang's scheduler processes.

SGLang logs a plugin that fails and serves on without it. So the owner of the engine serves nothing until every writer
has left its record in the arena's folder (Hooks.around_load_model), and a canary prompt came back captured.
"""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

CAPTURE_ENV = "RAY_EXTRACT_CAPTURE"


def register() -> None:
    """Install the hooks, if this is a child process of an engine that we own.

    Does nothing without RAY_EXTRACT_CAPTURE (the arena's folder), and nothing in the process that builds the engine.
    """
    folder = os.environ.get(CAPTURE_ENV)
    if not folder or multiprocessing.parent_process() is None:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from ray_extract.capture import compat
        from ray_extract.capture.hooks import Hooks

        compat.check_hooked()
        hooks = Hooks(Path(folder))
    except BaseException as error:
        report_failure(Path(folder), error)
        raise
    HookRegistry.register(compat.LOAD_MODEL, hooks.around_load_model, HookType.AROUND)
    HookRegistry.register(compat.INIT_NEW, hooks.after_init_new, HookType.AFTER)
    HookRegistry.register(compat.FORWARD, hooks.around_forward, HookType.AROUND)
    HookRegistry.register(compat.LOGITS, hooks.around_logits, HookType.AROUND)
    HookRegistry.register(compat.PROCESS_RESULT, hooks.before_process_batch_result, HookType.BEFORE)


def plugin_record(writer: int, rank: int) -> str:
    """Name of the file in the arena's folder by which a scheduler says what it will capture."""
    return f"plugin.{writer}.{rank}.json"


def report_failure(folder: Path, error: BaseException) -> None:
    """Leave word of why this process will not capture; see engine.sglang.failure_reason."""
    write_json(folder / f"failed.{os.getpid()}.json", {"reason": f"{type(error).__name__}: {error}"})


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a small record whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)
