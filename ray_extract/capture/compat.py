"""Every symbol of SGLang that capture touches, and what it must look like. Read from the wheels named below.

Nothing else in this package imports from SGLang's scheduler processes.
"""

import inspect
import pkgutil
from typing import Any

from ray_extract.errors import CaptureRefused

# Versions whose capture was run against the truth tests, on a CPU or a GPU.
TESTED_VERSIONS = ("0.5.16", "0.5.20")

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
INIT_NEW = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
PROCESS_RESULT = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"

# The leading parameters that the hooks rely on.
_SIGNATURES = {
    LOAD_MODEL: ("self",),
    FORWARD: ("self", "forward_batch"),
    INIT_NEW: ("batch", "model_runner"),
    LOGITS: ("self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"),
    PROCESS_RESULT: ("self", "batch", "result"),
}


def check_version(version: str, force: bool) -> None:
    """Refuse an SGLang that the truth tests have not run on.

    Raises:
        CaptureRefused: an untested version, unless `force`.
    """
    if version not in TESTED_VERSIONS and not force:
        raise CaptureRefused(
            f"sglang {version}: capture was tested on {', '.join(TESTED_VERSIONS)}; install one of these, or set "
            "engine.allow_untested_sglang = true and run `ray-extract verify --recompute`"
        )


def check_signatures() -> None:
    """Compare the hooked methods with what the hooks expect.

    Raises:
        CaptureRefused: a method is gone or takes other parameters.
    """
    for path, expected in _SIGNATURES.items():
        try:
            target = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            raise CaptureRefused(f"{path}: not in this SGLang ({error})") from None
        names = tuple(inspect.signature(target).parameters)[: len(expected)]
        if names != expected:
            raise CaptureRefused(f"{path}: parameters {names}, expected {expected}")


def writer_index(runner: Any) -> int | None:
    """The writer that this rank is, or None if it does not answer requests.

    Of each data-parallel rank, the rank that sends responses writes: attention-TP 0, attention-CP 0, PP 0. So the marks
    are published before the response in program order. Refused here: more than one pipeline stage.

    Raises:
        CaptureRefused: pipeline parallelism.
    """
    from sglang.srt.runtime_context import get_parallel

    ps, parallel = runner.ps, get_parallel()
    if ps.pp_size > 1:
        raise CaptureRefused(f"pp_size = {ps.pp_size}: only the last pipeline stage sees the states; use tp_size")
    if parallel.attn_tp_rank != 0 or parallel.attn_cp_rank != 0:
        return None
    attention_dp = bool(getattr(runner.server_args, "enable_dp_attention", False))
    return int(parallel.attn_dp_rank) if attention_dp else int(ps.dp_rank or 0)


def is_capture_mode(forward_batch: Any) -> bool:
    """Whether a batch holds prompt tokens of ordinary requests: EXTEND or MIXED.

    ForwardMode.is_extend() is true for draft verification and other modes as well, so the names decide.
    """
    return forward_batch.forward_mode.name in ("EXTEND", "MIXED")


def logits_processor_overridden(model: Any) -> str | None:
    """The class of a logits processor in the model that overrides `forward`, so that the hook would not see it."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    for module in model.modules():
        if isinstance(module, LogitsProcessor) and type(module).forward is not LogitsProcessor.forward:
            return type(module).__name__
    return None
