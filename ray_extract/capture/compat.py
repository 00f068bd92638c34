"""Every symbol of SGLang that capture and the engine touch, what it must look like, and where versions differ.

Nothing else in this package imports from SGLang's scheduler processes. tests/test_versions_sources.py holds these
tables against the sources of every version in TESTED_VERSIONS.
"""

import inspect
import pkgutil
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from ray_extract.errors import CaptureRefused

# Versions whose capture was run against the truth tests; docs/capture.md says which, and on what.
TESTED_VERSIONS = ("0.5.12", "0.5.14", "0.5.16", "0.5.18", "0.5.20", "0.5.23")

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
INIT_NEW = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
PROCESS_RESULT = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"

# The hooked methods, with the leading parameters that the hooks rely on.
HOOKED: dict[str, tuple[str, ...]] = {
    LOAD_MODEL: ("self",),
    FORWARD: ("self", "forward_batch"),
    INIT_NEW: ("batch", "model_runner"),
    LOGITS: ("self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"),
    PROCESS_RESULT: ("self", "batch", "result"),
}

# What the hooks read of SGLang's classes.
READ: dict[str, tuple[str, ...]] = {
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": (
        "forward_mode",
        "rids",
        "extend_prefix_lens_cpu",
        "extend_seq_lens_cpu",
        "input_ids",
    ),
    "sglang.srt.model_executor.forward_batch_info.ForwardMode": ("EXTEND", "MIXED"),
    "sglang.srt.model_executor.model_runner.ModelRunnerOutput": ("logits_output",),
    "sglang.srt.managers.utils.GenerationBatchResult": ("logits_output",),
}

# What the process that owns the engine calls, with the arguments that it gives by name.
CALLED: dict[str, tuple[str, ...]] = {
    "sglang.srt.entrypoints.engine.Engine.async_generate": (
        "input_ids",
        "sampling_params",
        "rid",
        "routed_dp_rank",
    ),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request": ("rid",),
}

# Inner models that hand over something else than what enters the layers that they list, with the versions in which they
# do not. Nothing at run time shows it. The first three list the layers whose output they hand over; Gemma 3 leaves out
# the residual; Gemma 4 hands over a tensor to which the next norm adds on CUDA (sglang#39286); Qwen 4 returns before it
# hands over anything.
_MISCAPTURED: dict[str, tuple[str, ...]] = {
    "BailingMoELinearModel": (),
    "BeamModel": (),
    "MuseSpark1xModel": (),
    "Gemma3TextModel": ("0.5.12", "0.5.14", "0.5.16"),
    "Gemma4TextModel": ("0.5.23",),
    "Qwen4ExpModel": (),
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


def check_hooked() -> None:
    """Compare the hooked methods, and what the hooks read, with what the hooks expect.

    Raises:
        CaptureRefused: something is gone, or a method takes other parameters.
    """
    for path, expected in HOOKED.items():
        names = tuple(_parameters(path))[: len(expected)]
        if names != expected:
            raise CaptureRefused(f"{path}: parameters {names}, expected {expected}")
    for path, fields in READ.items():
        cls = _resolve(path)
        known = set(dir(cls)).union(*(getattr(c, "__annotations__", ()) for c in cls.__mro__))
        for field in fields:
            if field not in known:
                raise CaptureRefused(f"{path}.{field}: not in this SGLang")


def check_called() -> None:
    """Compare what the engine's owner calls with how it is called.

    Raises:
        CaptureRefused: a method is gone, or does not know an argument.
    """
    for path, names in CALLED.items():
        for name in names:
            if name not in _parameters(path):
                raise CaptureRefused(f"{path}: no parameter {name} in this SGLang")


def _parameters(path: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_resolve(path)).parameters


def _resolve(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise CaptureRefused(f"{path}: not in this SGLang ({error})") from None


class Place(NamedTuple):
    """Where a scheduler stands.

    Args:
        writer: its data-parallel rank.
        rank: its attention-tensor-parallel rank; 0 answers requests, so it is the one that writes states, and its marks
            are published before the response in program order.
    """

    writer: int
    rank: int


def place(runner: Any, ranks: int) -> Place:
    """Where a scheduler stands.

    Args:
        ranks: attention-tensor-parallel ranks that the arena was made for.

    Raises:
        CaptureRefused: pipeline or context parallelism, or another number of ranks.
    """
    found = _rank(runner)
    if found.pp_size > 1:
        raise CaptureRefused(f"pp_size = {found.pp_size}: only the last pipeline stage sees the states; use tp_size")
    if found.attn_cp_rank != 0:
        raise CaptureRefused("attn_cp_size > 1: context parallelism does not gather the captured states")
    if found.attn_tp_size != ranks:
        raise CaptureRefused(
            f"the engine runs with {found.attn_tp_size} attention-tensor-parallel ranks, the job says {ranks}"
        )
    # With data-parallel attention too: the scheduler is given its attention-DP rank under this name.
    return Place(int(found.dp_rank or 0), int(found.attn_tp_rank))


def _rank(runner: Any) -> Any:
    """The ranks of a scheduler: pp_size, attn_tp_size, attn_tp_rank, attn_cp_rank and dp_rank."""
    if hasattr(runner, "ps"):  # 0.5.16 to 0.5.20
        return runner.ps
    if hasattr(runner, "dp_rank"):  # 0.5.12 and 0.5.14
        from sglang.srt.layers import dp_attention

        return SimpleNamespace(
            pp_size=runner.pp_size,
            attn_tp_size=dp_attention.get_attention_tp_size(),
            attn_tp_rank=dp_attention.get_attention_tp_rank(),
            attn_cp_rank=dp_attention.get_attention_cp_rank(),
            dp_rank=runner.dp_rank,
        )
    from sglang.srt.runtime_context import get_parallel  # 0.5.23

    return get_parallel()


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


def miscaptured(model: Any) -> str | None:
    """The class in the model that would hand over something else than the boundaries asked for, in this SGLang."""
    import sglang

    for module in model.modules():
        for cls in type(module).__mro__:
            if sglang.__version__ not in _MISCAPTURED.get(cls.__name__, (sglang.__version__,)):
                return cls.__name__
    return None
