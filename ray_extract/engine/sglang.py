"""SGLang as an engine: its arguments, what is refused by name, and the handshake with the capture plugin."""

import asyncio
import inspect
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray_extract.capture import compat
from ray_extract.capture.arena import ArenaSpec
from ray_extract.capture.plugin import CAPTURE_ENV
from ray_extract.config import Job
from ray_extract.engine.base import Answer, EngineInfo
from ray_extract.errors import CaptureRefused, ConfigError, EngineError

# Tokens of KV cache on a CPU, where SGLang would size it from the machine's whole memory.
_CPU_KV_TOKENS = 32768

# engine.args that have a field of their own in the job.
_OWN_FIELD = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "dtype": "model.dtype",
    "load_format": "model.load_format",
    "quantization": "model.quantization",
    "trust_remote_code": "model.trust_remote_code",
    "device": "engine.device",
    "tp_size": "engine.tp_size",
    "dp_size": "engine.dp_size",
    "enable_dp_attention": "engine.enable_dp_attention",
    "chunked_prefill_size": "engine.chunked_prefill_size",
    "context_length": "engine.context_length",
}


def _off(value: Any) -> bool:
    return not value


def _at_most_one(value: Any) -> bool:
    return value is None or value == 1


# Options under which capture would be wrong or incomplete: what is allowed, and why the rest is not.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "disable_radix_cache": (bool, "positions found in the prefix cache are never computed, so they have no states"),
    "enable_hierarchical_cache": (_off, "positions found in the cache are never computed"),
    "enable_lmcache": (_off, "positions found in the cache are never computed"),
    "enable_session_radix_cache": (_off, "positions found in the cache are never computed"),
    "speculative_algorithm": (_off, "draft verification runs tokens that are not of the prompt"),
    "disable_cuda_graph": (bool, "a replayed graph's states lie in buffers that the next replay overwrites"),
    # these two win over disable_cuda_graph
    "cuda_graph_backend_prefill": (
        lambda v: v in (None, "disabled"),
        "a replayed graph's states lie in buffers that the next replay overwrites",
    ),
    "cuda_graph_config": (_off, "a replayed graph's states lie in buffers that the next replay overwrites"),
    "pp_size": (_at_most_one, "only the last pipeline stage sees the states"),
    "nnodes": (_at_most_one, "an engine must lie on one node, where its arena is"),
    "attn_cp_size": (_at_most_one, "context parallelism does not gather the captured states"),
    "dcp_size": (_at_most_one, "context parallelism does not gather the captured states"),
    "enable_prefill_cp": (_off, "context parallelism does not gather the captured states"),
    "enable_attn_tp_input_scattered": (_off, "each rank would hold a part of the tokens' states"),
    "enable_layernorm_sp": (_off, "each rank would hold a part of the tokens' states"),
    "enable_two_batch_overlap": (_off, "layers run in two halves hand over no states"),
    "enable_pdmux": (_off, "split prefill is not captured"),
    "dllm_algorithm": (_off, "block diffusion has no prompt positions"),
    "disaggregation_mode": (lambda v: v in (None, "null"), "prefill and decode must be one engine"),
    "allow_auto_truncate": (_off, "a shortened prompt would not be the planned one"),
    "forward_hooks": (_off, "they may change the states"),
    "skip_tokenizer_init": (bool, "prompts are token ids"),
    "tokenizer_worker_num": (_at_most_one, "requests are aborted through the one tokenizer manager"),
}


def server_args(job: Job) -> dict[str, Any]:
    """The arguments of sglang.Engine for a job.

    Raises:
        ConfigError: an entry of engine.args that would break capture, or that the job has a field for.
    """
    engine, model = job.engine, job.model
    for name, value in engine.args.items():
        if name in _OWN_FIELD:
            raise ConfigError(f"engine.args.{name}: set {_OWN_FIELD[name]} instead")
        if name in _REFUSED and not _REFUSED[name][0](value):
            raise ConfigError(f"engine.args.{name} = {value!r} is refused: {_REFUSED[name][1]}")
    args: dict[str, Any] = {
        "model_path": model.path,
        "device": engine.device,
        "dtype": model.dtype,
        "load_format": model.load_format,
        "trust_remote_code": model.trust_remote_code,
        "tp_size": engine.tp_size,
        "dp_size": engine.dp_size,
        "chunked_prefill_size": engine.chunked_prefill_size,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        # first come, first served keeps consecutive rows adjacent in a batch, so that they leave in one copy
        "schedule_policy": "fcfs",
        "log_level": "info",
    }
    if model.quantization is not None:
        args["quantization"] = model.quantization
    if engine.context_length is not None:
        args["context_length"] = engine.context_length
    if engine.enable_dp_attention:
        args["enable_dp_attention"] = True
    if engine.device == "cpu":
        args |= {"attention_backend": "torch_native", "max_total_tokens": _CPU_KV_TOKENS}
    elif engine.tp_size > 1:
        # Below 0.5.23 a layer's output may be a rank's partial sum when the all-reduce is fused into the next layer.
        args["enforce_disable_flashinfer_allreduce_fusion"] = True
    return args | engine.args


class SGLangEngine:
    """One sglang.Engine with the capture plugin in its schedulers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._engine: Any = None
        self._routes = False

    async def start(self, folder: Path) -> EngineInfo:
        """See base.Engine. Blocks the event loop, which SGLang needs for itself while it starts."""
        os.environ[CAPTURE_ENV] = str(folder)
        _check_entry_point()
        info = self.build()
        await _handshake(folder, self._job.engine.start_timeout_s)
        return info

    def build(self) -> EngineInfo:
        """Build the engine, whatever its plugins.

        Raises:
            ConfigError: an argument that this SGLang does not have, or that would break capture.
            CaptureRefused: an untested SGLang.
            EngineError: SGLang cannot be imported.
        """
        args = server_args(self._job)
        if self._job.engine.device == "cpu":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # SGLang asks for it beside device="cpu"
        try:
            import sglang
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise EngineError(f"sglang cannot be imported: {error}") from error
        compat.check_version(sglang.__version__, self._job.engine.allow_untested_sglang)
        known = set(inspect.signature(ServerArgs).parameters)
        unknown = sorted(set(self._job.engine.args) - known)
        if unknown:
            raise ConfigError(f"engine.args.{unknown[0]}: sglang {sglang.__version__} has no such argument")
        try:
            self._engine = sglang.Engine(**{name: value for name, value in args.items() if name in known})
        except (TypeError, ValueError, AssertionError) as error:
            # What SGLang raises in this process is about its arguments; a scheduler that dies is a RuntimeError.
            reason = " ".join(str(error).split())
            raise ConfigError(f"engine.args: sglang {sglang.__version__} refuses this engine: {reason}") from error
        self._routes = self._job.engine.dp_size > 1
        return EngineInfo(
            version=f"sglang {sglang.__version__}",
            # One less than SGLang's bound, which it compares with >=.
            max_input_tokens=int(self._engine.tokenizer_manager.max_req_input_len) - 1,
            dp_size=self._job.engine.dp_size,
            environment=_environment(sglang.__version__),
        )

    async def generate(self, rid: str, input_ids: Sequence[int], dp_rank: int | None, new_tokens: int) -> Answer:
        """See base.Engine."""
        options = {"routed_dp_rank": dp_rank} if self._routes else {}
        try:
            result = await self._engine.async_generate(
                input_ids=list(input_ids),
                sampling_params={"max_new_tokens": new_tokens, "temperature": 0.0},
                rid=rid,
                **options,
            )
        except ValueError as error:  # SGLang's word for a prompt that it will not take
            return Answer(False, str(error))
        finish = result["meta_info"]["finish_reason"] or {}
        if finish.get("type") not in ("length", "stop"):
            return Answer(False, str(finish.get("message") or finish.get("type") or "no finish reason"))
        return Answer(True, "", tuple(result.get("output_ids") or ()))

    def abort(self, rids: Sequence[str]) -> None:
        """See base.Engine."""
        for rid in rids:
            self._engine.tokenizer_manager.abort_request(rid=rid)


def _check_entry_point() -> None:
    from importlib.metadata import entry_points

    if not any(e.value.startswith("ray_extract.") for e in entry_points(group="sglang.srt.plugins")):
        raise CaptureRefused(
            "the capture plugin's entry point is not installed in the engine's environment: a source tree on the path "
            "has none; install the wheel there (pip install ray-extract, or `pip install .` in the repository)"
        )


async def _handshake(folder: Path, timeout_s: float) -> None:
    """Wait until every writer has reported, and compare what it will capture with the plan.

    Raises:
        CaptureRefused: the plugin is not active in a scheduler, failed, or would capture something else.
    """
    spec = ArenaSpec.load(folder)
    deadline = time.monotonic() + timeout_s
    for writer in range(spec.writers):
        path = folder / f"plugin.{writer}.json"
        if not path.exists():
            raise CaptureRefused(
                f"the engine started but scheduler {writer} did not load the capture plugin; "
                "SGLANG_PLUGINS, if set, must contain ray_extract"
            )
        while (record := json.loads(path.read_text()))["state"] != "ready":
            failed = failure_reason(folder)
            if failed is not None:
                raise CaptureRefused(failed)
            if time.monotonic() > deadline:
                raise EngineError(f"scheduler {writer} had not registered its arena after {timeout_s:.0f} s")
            await asyncio.sleep(0.2)
        if tuple(record["boundaries"]) != spec.boundaries:
            raise CaptureRefused(
                f"scheduler {writer} would capture boundaries {record['boundaries']}, planned are "
                f"{list(spec.boundaries)}"
            )


def failure_reason(folder: Path) -> str | None:
    """What a scheduler's plugin left when it gave up, or None."""
    for path in sorted(folder.glob("failed.*.json")):
        return str(json.loads(path.read_text())["reason"])
    return None


def _environment(version: str) -> dict[str, str]:
    import torch

    found = {"sglang": version, "torch": torch.__version__}
    if torch.version.cuda is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
    return found
