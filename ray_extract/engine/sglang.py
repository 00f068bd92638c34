"""SGLang as an engine: its arguments, what is refused by name, and the handshake with the capture plugin."""

import asyncio
import inspect
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ray_extract.capture import compat
from ray_extract.capture.arena import ArenaSpec
from ray_extract.capture.plugin import CAPTURE_ENV, plugin_record
from ray_extract.config import Job
from ray_extract.engine.base import Answer, EngineInfo
from ray_extract.errors import CaptureRefused, ConfigError, EngineError

# Arguments that SGLang may set itself and that the states' last bits depend on; recorded with every commit.
_CHOSEN = ("attention_backend", "prefill_attention_backend", "kv_cache_dtype", "quantization", "moe_runner_backend")

# Tokens of KV cache on a CPU, where SGLang would size it from the machine's whole memory.
_CPU_KV_TOKENS = 32768

# SGLang takes ports that are free when it looks, and binds them after it has loaded: of engines that start at once, one
# may find its port taken. With DP attention it takes the same for every engine of a node, derived from `port`. So each
# engine gets a block of its own, below what the kernel hands out. DP attention needs `dist_init_addr`, five ports above
# and the one 13 above (0.5.12 to 0.5.23 PortArgs.init_new, DP_ATTENTION_HANDSHAKE_PORT_DELTA).
_PORTS = 16
_PORT_BLOCKS = range(20000, 30000, _PORTS)

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
    "attn_dp_size": "engine.dp_size and engine.enable_dp_attention",
    "enable_dp_attention": "engine.enable_dp_attention",
    "chunked_prefill_size": "engine.chunked_prefill_size",
    "context_length": "engine.context_length",
}


class Allowed(NamedTuple):
    """What an option may be.

    Args:
        shown: for people, as a value in engine.args.
        holds: whether a value is allowed.
    """

    shown: str
    holds: Callable[[Any], bool]


_ON = Allowed("true", bool)
_OFF = Allowed("unset", lambda value: not value)
_ONE = Allowed("1", lambda value: value is None or value == 1)


def _prefill_graph(value: Any) -> Any:
    """The prefill backend of a cuda_graph_config, which is a dictionary or, resolved in 0.5.16, an object."""
    phase = value.get("prefill") if isinstance(value, dict) else getattr(value, "prefill", value)
    return phase.get("backend") if isinstance(phase, dict) else getattr(phase, "backend", phase)


_CACHED = "positions found in a cache are never computed"
_GRAPH = "a replayed graph's states lie in buffers that the next replay overwrites"
_PART = "each rank would hold a part of the tokens' states"
_CP = "context parallelism does not gather the captured states"
_PARTIAL = "a layer's output may be one rank's partial sum, which the next layer's fused all-reduce completes"
_BASE = "requests name no adapter, so the states would be the base model's; merge the adapter into the checkpoint"

# Options under which capture would be wrong or incomplete: what is allowed, and why the rest is not. The page
# docs/capture.md holds the same table. Some are of one version only; evidence by version is in the tests.
REFUSED: dict[str, tuple[Allowed, str]] = {
    "disable_radix_cache": (_ON, _CACHED),
    "radix_cache_backend": (_OFF, "a registered cache is used whatever disable_radix_cache says"),
    "enable_hierarchical_cache": (_OFF, _CACHED),
    "enable_lmcache": (_OFF, _CACHED),
    "enable_flexkv": (_OFF, _CACHED),
    "enable_unified_cache_external_linker": (_OFF, _CACHED),
    "enable_session_radix_cache": (_OFF, _CACHED),
    "speculative_algorithm": (_OFF, "draft verification runs tokens that are not of the prompt"),
    "disable_cuda_graph": (_ON, _GRAPH),
    # these two win over disable_cuda_graph
    "cuda_graph_backend_prefill": (Allowed("disabled", lambda value: value in (None, "disabled")), _GRAPH),
    "cuda_graph_config": (
        Allowed("unset, or disabled for prefill", lambda value: not value or _prefill_graph(value) == "disabled"),
        _GRAPH,
    ),
    "disable_piecewise_cuda_graph": (_ON, _GRAPH),
    "enforce_piecewise_cuda_graph": (_OFF, _GRAPH),
    "flashinfer_allreduce_fusion_backend": (_OFF, _PARTIAL),
    "enable_flashinfer_allreduce_fusion": (_OFF, _PARTIAL),
    "enforce_disable_flashinfer_allreduce_fusion": (_ON, _PARTIAL),
    "enable_aiter_allreduce_fusion": (_OFF, _PARTIAL),
    "pp_size": (_ONE, "only the last pipeline stage sees the states"),
    "nnodes": (_ONE, "an engine must lie on one node, where its arena is"),
    "use_ray": (_OFF, "the schedulers must be children of the engine host, which ends them and holds their memory"),
    "attn_cp_size": (_ONE, _CP),
    "dcp_size": (_ONE, _CP),
    "dwdp_size": (_ONE, "it makes data-parallel ranks of its own; set engine.dp_size"),
    "enable_prefill_cp": (_OFF, _CP),
    "enable_prefill_context_parallel": (_OFF, _CP),
    "enable_dsa_prefill_context_parallel": (_OFF, _CP),
    "enable_nsa_prefill_context_parallel": (_OFF, _CP),
    "enable_attn_tp_input_scattered": (_OFF, _PART),
    "enable_layernorm_sp": (_OFF, _PART),
    "enable_decoder_swa_bounded_replay": (_OFF, "late layers run for the last tokens of a prompt only"),
    "enable_encoder_swa_bounded_replay": (_OFF, _CACHED),
    "enable_two_batch_overlap": (_OFF, "layers run in two halves hand over no states"),
    "enable_pdmux": (_OFF, "split prefill is not captured"),
    "elastic_ep_backend": (_OFF, "a pass is run again when a rank fails, and the states of the first run would stay"),
    "ep_dispatch_algorithm": (
        Allowed("static, dynamic or lp", lambda value: value in (None, "static", "dynamic", "lp")),
        "fake sends tokens to random experts",
    ),
    "kt_max_deferred_experts_per_token": (_OFF, "what a deferred expert adds is missing at the next boundary"),
    "dllm_algorithm": (_OFF, "block diffusion has no prompt positions"),
    "disaggregation_mode": (
        Allowed("null", lambda value: value in (None, "null")),
        "prefill and decode must be one engine",
    ),
    "is_embedding": (_OFF, "an embedding model hands nothing to an LM head, where the states are taken"),
    "enable_mis": (_OFF, "it turns chunked prefill off, and passes would be larger than what is set aside for them"),
    "rl_on_policy_target": (_OFF, "it keeps the residual stream in fp32, whatever the planned type"),
    "enable_lora": (_OFF, _BASE),
    "lora_paths": (_OFF, _BASE),
    "allow_auto_truncate": (_OFF, "a shortened prompt would not be the planned one"),
    "max_queued_requests": (_OFF, "rows beyond it would be rejected; the arena is what limits the rows in flight"),
    "forward_hooks": (_OFF, "they may change the states"),
    "enable_return_aux_hidden_states": (
        _OFF,
        "it would set the captured layers again, after the plan's were read back",
    ),
    "skip_tokenizer_init": (_ON, "prompts are token ids"),
    "tokenizer_worker_num": (_ONE, "requests are aborted through the one tokenizer manager"),
}


def check_resolved(version: str, resolved: Mapping[str, Any]) -> None:
    """Compare what SGLang made of its arguments with what capture needs: it sets some itself, by model and hardware.

    Args:
        version: of SGLang.
        resolved: all its arguments.

    Raises:
        CaptureRefused: one is as it must not be.
    """
    for name, (allowed, reason) in REFUSED.items():
        if name in resolved and not allowed.holds(resolved[name]):
            raise CaptureRefused(f"sglang {version} itself sets {name} = {resolved[name]!r} for this model: {reason}")
    chunk = resolved["chunked_prefill_size"]
    if chunk is None or chunk < 1:
        raise CaptureRefused(
            f"sglang {version} turns chunked prefill off for this model: passes would be larger than what is set aside "
            "for them"
        )


def server_args(job: Job) -> dict[str, Any]:
    """The arguments of sglang.Engine for a job.

    Raises:
        ConfigError: an entry of engine.args that would break capture, or that the job has a field for.
    """
    engine, model = job.engine, job.model
    for name, value in engine.args.items():
        if name in _OWN_FIELD:
            raise ConfigError(f"engine.args.{name}: set {_OWN_FIELD[name]} instead")
        if name in REFUSED and not REFUSED[name][0].holds(value):
            allowed, reason = REFUSED[name]
            raise ConfigError(f"engine.args.{name} = {value!r} is refused: {reason} (allowed: {allowed.shown})")
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
        # prompts are token ids; otherwise SGLang loads the image processor of a multimodal model even so
        "enable_multimodal": False,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        # SGLang gives some models a prefill graph of their own accord, which wins over the line above
        "cuda_graph_backend_prefill": "disabled",
        # 0.5.12 has one for most models, under another name
        "disable_piecewise_cuda_graph": True,
        # DeepSeek-V4.1 leaves out what decoding does not need
        "enable_decoder_swa_bounded_replay": False,
        # and some on several GPUs a fused all-reduce
        "enforce_disable_flashinfer_allreduce_fusion": True,
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
    return args | engine.args


def reserve_ports() -> tuple[int, socket.socket]:
    """A block of ports for one engine.

    Returns:
        The first port, and a socket that holds the block: its abstract name is known wherever the ports are, and
        ends with the process.

    Raises:
        EngineError: every block is taken.
    """
    start = secrets.randbelow(len(_PORT_BLOCKS))
    for first in (*_PORT_BLOCKS[start:], *_PORT_BLOCKS[:start]):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0ray_extract-ports-{first}")
            for port in range(first, first + _PORTS):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
        else:
            return first, holder
    raise EngineError(f"no {_PORTS} free ports in a row from {_PORT_BLOCKS.start} to {_PORT_BLOCKS.stop}")


class SGLangEngine:
    """One sglang.Engine with the capture plugin in its schedulers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._engine: Any = None
        self._ports: socket.socket | None = None
        self._routes = False

    async def start(self, folder: Path) -> EngineInfo:
        """See base.Engine. Blocks the event loop, which SGLang needs for itself while it starts."""
        _check_entry_point()
        os.environ[CAPTURE_ENV] = str(folder)
        info = self.build()
        await _handshake(folder, self._job.engine.start_timeout())
        return info

    def build(self) -> EngineInfo:
        """Build the engine, whatever its plugins.

        Raises:
            ConfigError: an argument that this SGLang does not have, or that would break capture.
            CaptureRefused: an untested SGLang, or one that would not capture this model.
            EngineError: SGLang cannot be imported.
        """
        args = server_args(self._job)
        if self._job.engine.enable_dp_attention or self._job.engine.dp_size == 1:  # other schedulers share no port
            first, self._ports = reserve_ports()
            args = {"nccl_port": first + _PORTS - 1} | args
            if self._job.engine.enable_dp_attention:
                args = {"dist_init_addr": f"127.0.0.1:{first}"} | args
        if self._job.engine.device == "cpu":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # SGLang asks for it beside device="cpu"
        try:
            import sglang
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise EngineError(f"sglang cannot be imported: {error}") from error
        compat.check_version(sglang.__version__, self._job.engine.allow_untested_sglang)
        compat.check_called()
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
        resolved = _resolved(self._engine.server_args)
        check_resolved(sglang.__version__, resolved)
        self._routes = self._job.engine.dp_size > 1
        return EngineInfo(
            version=f"sglang {sglang.__version__}",
            # One less than SGLang's bound, which it compares with >=.
            max_input_tokens=int(self._engine.tokenizer_manager.max_req_input_len) - 1,
            dp_size=self._job.engine.dp_size,
            environment=_environment(sglang.__version__, resolved),
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


def _resolved(args: Any) -> Mapping[str, Any]:
    # 0.5.20 keeps what was asked for and what became of it apart; 0.5.16 changes it in place.
    resolve = getattr(args, "resolved_dict", None)
    return dict(resolve()) if resolve is not None else vars(args)


def _check_entry_point() -> None:
    from importlib.metadata import entry_points

    ours = [e.name for e in entry_points(group="sglang.srt.plugins") if e.value.startswith("ray_extract.")]
    wanted = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if ours and wanted and not set(ours) & set(wanted):
        raise CaptureRefused(
            f"SGLANG_PLUGINS = {','.join(wanted)} leaves the capture plugin out; add {ours[0]} to it, or unset it"
        )
    if not ours:
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
    for writer, rank in itertools.product(range(spec.writers), range(spec.ranks)):
        path = folder / plugin_record(writer, rank)
        scheduler = f"scheduler {writer}" if spec.ranks == 1 else f"scheduler {writer}, rank {rank},"
        if not path.exists():
            # SGLang logs a plugin that raises, and serves on without it.
            why = failure_reason(folder) or "SGLang's log may say why"
            raise CaptureRefused(f"the engine started but {scheduler} runs without the capture plugin: {why}")
        while (record := json.loads(path.read_text()))["state"] != "ready":
            failed = failure_reason(folder)
            if failed is not None:
                raise CaptureRefused(failed)
            if time.monotonic() > deadline:
                raise EngineError(f"{scheduler} had not registered its arena after {timeout_s:.0f} s")
            await asyncio.sleep(0.2)
        if tuple(record["boundaries"]) != spec.boundaries:
            raise CaptureRefused(
                f"{scheduler} would capture boundaries {record['boundaries']}, planned are {list(spec.boundaries)}"
            )


def failure_reason(folder: Path) -> str | None:
    """What a scheduler's plugin left when it gave up, or None."""
    for path in sorted(folder.glob("failed.*.json")):
        return str(json.loads(path.read_text())["reason"])
    return None


def _environment(version: str, resolved: Mapping[str, Any]) -> dict[str, str]:
    import torch

    found = {"sglang": version, "torch": torch.__version__}
    # What SGLang chooses itself and the last bits of the states depend on.
    found |= {name: str(resolved[name]) for name in _CHOSEN if resolved.get(name) is not None}
    if torch.version.cuda is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
    return found
