"""The arguments of sglang.Engine: what breaks capture is refused by name, and the defaults are safe."""

import asyncio
import importlib.metadata
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import arenas
import pytest

from ray_extract.capture.arena import Arena
from ray_extract.config import Job
from ray_extract.engine import sglang
from ray_extract.engine.base import check_engine
from ray_extract.engine.sglang import reserve_ports, server_args
from ray_extract.errors import CaptureRefused, ConfigError, EngineError


def make_job(**engine: Any) -> Job:
    return Job.model_validate(
        {"model": {"path": "m"}, "dataset": {"paths": "a"}, "output": {"url": "o"}, "engine": engine}
    )


CACHED = "positions found in a cache are never computed"
GRAPH = "a replayed graph's states lie in buffers that the next replay overwrites"
PARTS = "each rank would hold a part of the tokens' states"
CP = "context parallelism does not gather the captured states"
PARTIAL = "one rank's partial sum"
BASE = "the states would be the base model's"
# option: a value that must be refused, one that must not, and the reason
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "disable_radix_cache": (False, True, CACHED),
    "enable_hierarchical_cache": (True, False, CACHED),
    "enable_lmcache": (True, False, CACHED),
    "enable_flexkv": (True, False, CACHED),
    "enable_unified_cache_external_linker": (True, False, CACHED),
    "radix_cache_backend": ("flexkv", None, "whatever disable_radix_cache says"),
    "enable_session_radix_cache": (True, False, CACHED),
    "speculative_algorithm": ("EAGLE3", None, "draft verification"),
    "disable_cuda_graph": (False, True, GRAPH),
    "cuda_graph_backend_prefill": ("breakable", "disabled", GRAPH),
    "cuda_graph_config": ({"prefill": {"backend": "full"}}, {"prefill": {"backend": "disabled"}}, GRAPH),
    "disable_piecewise_cuda_graph": (False, True, GRAPH),
    "enforce_piecewise_cuda_graph": (True, False, GRAPH),
    "flashinfer_allreduce_fusion_backend": ("auto", None, PARTIAL),
    "enable_flashinfer_allreduce_fusion": (True, False, PARTIAL),
    "enforce_disable_flashinfer_allreduce_fusion": (False, True, PARTIAL),
    "enable_aiter_allreduce_fusion": (True, False, PARTIAL),
    "pp_size": (2, 1, "only the last pipeline stage sees the states"),
    "nnodes": (2, 1, "an engine must lie on one node"),
    "use_ray": (True, False, "children of the engine host"),
    "attn_cp_size": (2, 1, CP),
    "dcp_size": (2, 1, CP),
    "dwdp_size": (2, 1, "data-parallel ranks of its own"),
    "enable_prefill_cp": (True, False, CP),
    "enable_prefill_context_parallel": (True, False, CP),
    "enable_dsa_prefill_context_parallel": (True, False, CP),
    "enable_nsa_prefill_context_parallel": (True, False, CP),
    "enable_attn_tp_input_scattered": (True, False, PARTS),
    "enable_layernorm_sp": (True, False, PARTS),
    "enable_decoder_swa_bounded_replay": (True, False, "the last tokens of a prompt only"),
    "enable_encoder_swa_bounded_replay": (True, False, CACHED),
    "enable_two_batch_overlap": (True, False, "two halves"),
    "enable_pdmux": (True, False, "split prefill"),
    "elastic_ep_backend": ("mooncake", None, "a pass is run again when a rank fails"),
    "ep_dispatch_algorithm": ("fake", "dynamic", "random experts"),
    "kt_max_deferred_experts_per_token": (2, 0, "missing at the next boundary"),
    "dllm_algorithm": ("LowConfidence", None, "block diffusion"),
    "disaggregation_mode": ("prefill", "null", "prefill and decode must be one engine"),
    "is_embedding": (True, False, "nothing to an LM head"),
    "enable_mis": (True, False, "turns chunked prefill off"),
    "rl_on_policy_target": ("fsdp", None, "in fp32, whatever the planned type"),
    "enable_lora": (True, False, BASE),
    "lora_paths": (["a=/b"], None, BASE),
    "allow_auto_truncate": (True, False, "a shortened prompt"),
    "max_queued_requests": (64, None, "rows beyond it would be rejected"),
    "forward_hooks": ([{"name": "x"}], None, "they may change the states"),
    "enable_return_aux_hidden_states": (True, False, "set the captured layers again"),
    "skip_tokenizer_init": (False, True, "prompts are token ids"),
    "tokenizer_worker_num": (2, 1, "one tokenizer manager"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_breaks_capture_is_refused_by_name_with_its_reason(name: str) -> None:
    bad, good, reason = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        server_args(make_job(args={name: bad}))
    assert str(caught.value).startswith(f"engine.args.{name} = {bad!r} is refused: ") and reason in str(caught.value)
    assert server_args(make_job(args={name: good}))[name] == good


def test_every_refused_option_has_its_case_here() -> None:
    assert set(REFUSED) == set(sglang.REFUSED)


FIELDS = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    **{name: f"model.{name}" for name in ("dtype", "load_format", "quantization", "trust_remote_code")},
    **{name: f"engine.{name}" for name in ("device", "tp_size", "dp_size", "enable_dp_attention")},
    **{name: f"engine.{name}" for name in ("chunked_prefill_size", "context_length")},
    "attn_dp_size": "engine.dp_size and engine.enable_dp_attention",
}


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_with_a_field_of_its_own_points_there(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.args\.{name}: set {FIELDS[name]} instead"):
        server_args(make_job(args={name: 1}))


def test_the_defaults_keep_every_prompt_token_computed_and_in_order() -> None:
    args = server_args(make_job())
    for name in ("disable_radix_cache", "disable_cuda_graph", "disable_piecewise_cuda_graph", "skip_tokenizer_init"):
        assert args[name] is True
    # DeepSeek-V4.1 gets it unless it is turned off; its late layers then leave tokens out.
    assert args["enable_decoder_swa_bounded_replay"] is False
    assert args["schedule_policy"] == "fcfs"
    # Inkling gets a full prefill graph unless this is set, whatever disable_cuda_graph says.
    assert args["cuda_graph_backend_prefill"] == "disabled"
    # Several GPUs get a fused all-reduce, with which a layer's output may be one rank's partial sum.
    assert args["enforce_disable_flashinfer_allreduce_fusion"] is True
    assert (args["device"], args["tp_size"], args["dp_size"], args["chunked_prefill_size"]) == ("cuda", 1, 1, 8192)
    assert not {"quantization", "context_length", "enable_dp_attention", "attention_backend"} & set(args)


def test_a_cpu_engine_has_a_bounded_cache_and_a_backend_that_exists() -> None:
    args = server_args(make_job(device="cpu"))
    assert args["attention_backend"] == "torch_native" and args["max_total_tokens"] == 32768
    assert server_args(make_job(device="cpu", args={"max_total_tokens": 8192}))["max_total_tokens"] == 8192


def test_fields_of_the_job_reach_the_engine() -> None:
    sizes = {"tp_size": 8, "dp_size": 2, "context_length": 4096}
    job = make_job(**sizes, enable_dp_attention=True, args={"mem_fraction_static": 0.8})
    job = job.model_copy(update={"model": job.model.model_copy(update={"quantization": "fp8", "dtype": "bfloat16"})})
    args = server_args(job)
    for name, value in {
        **sizes,
        "enable_dp_attention": True,
        "mem_fraction_static": 0.8,
        "quantization": "fp8",
        "dtype": "bfloat16",
        "model_path": "m",
    }.items():
        assert args[name] == value


def resolved(**changed: Any) -> dict[str, Any]:
    """What an engine without surprises makes of the default arguments."""
    good = {name: case[1] for name, case in REFUSED.items()}
    return {**good, "chunked_prefill_size": 8192, "attention_backend": "fa3", **changed}


def test_engines_of_one_node_have_ports_of_their_own_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of them has bound one."""
    monkeypatch.setattr(sglang, "_PORT_BLOCKS", range(21000, 21000 + 4 * 16, 16))
    held = [reserve_ports() for _ in range(4)]
    assert {first for first, _ in held} == {21000, 21016, 21032, 21048}
    with pytest.raises(EngineError, match="no 16 free ports in a row from 21000 to 21064"):
        reserve_ports()
    first, holder = held.pop()
    holder.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + 7))
        with pytest.raises(EngineError):
            reserve_ports()
    assert reserve_ports()[0] == first
    for _, holder in held:
        holder.close()


def test_what_sglang_resolves_by_itself_is_compared_with_the_same_table() -> None:
    sglang.check_resolved("9.9", resolved())
    for name, (bad, _, reason) in REFUSED.items():
        with pytest.raises(CaptureRefused, match=f"^sglang 9.9 itself sets {name} = ") as caught:
            sglang.check_resolved("9.9", resolved(**{name: bad}))
        assert reason in str(caught.value)
    few = {"chunked_prefill_size": 8192}  # a version may lack any of the others
    sglang.check_resolved("9.9", few)


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_a_prefill_graph_is_found_in_a_configuration_of_either_version(backend: str) -> None:
    """0.5.20 gives a dictionary, 0.5.16 an object."""
    for value in ({"prefill": {"backend": backend}}, SimpleNamespace(prefill=SimpleNamespace(backend=backend))):
        with pytest.raises(CaptureRefused, match="itself sets cuda_graph_config"):
            sglang.check_resolved("9.9", resolved(cuda_graph_config=value))
    off = SimpleNamespace(prefill=SimpleNamespace(backend="disabled"), decode=SimpleNamespace(backend="full"))
    sglang.check_resolved("9.9", resolved(cuda_graph_config=off))
    for value in ({"decode": {"backend": "full"}}, "full", '{"prefill": {"backend": "full"}}'):
        with pytest.raises(CaptureRefused):
            sglang.check_resolved("9.9", resolved(cuda_graph_config=value))


@pytest.mark.parametrize("size", [-1, 0, None])
def test_a_model_for_which_sglang_turns_chunked_prefill_off_is_refused(size: int | None) -> None:
    """Some multimodal ones: a pass could be larger than the staging of its digests."""
    with pytest.raises(CaptureRefused, match="turns chunked prefill off for this model"):
        sglang.check_resolved("9.9", resolved(chunked_prefill_size=size))


# The plugin, before an engine is built


def starting(folder: Path) -> None:
    asyncio.run(sglang.SGLangEngine(make_job()).start(folder))


def test_a_source_tree_without_the_entry_point_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    with pytest.raises(CaptureRefused, match="entry point is not installed in the engine's environment"):
        starting(tmp_path)


@pytest.mark.parametrize("value", ["another", "another, more", "ray_extract_2"])
def test_plugins_that_leave_ours_out_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    with pytest.raises(CaptureRefused, match=r"SGLANG_PLUGINS = .* leaves the capture plugin out; add ray_extract"):
        starting(tmp_path)


@pytest.mark.parametrize("value", ["", " , ", "another, ray_extract"])
def test_plugins_that_leave_ours_in_are_fine(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    sglang._check_entry_point()


# The handshake


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = arenas.make_arena(tmp_path)
    yield made
    made.close()


def write(arena: Arena, name: str, **record: Any) -> None:
    (arena.folder / name).write_text(json.dumps(record))


def shaken(arena: Arena, timeout_s: float = 5) -> None:
    asyncio.run(sglang._handshake(arena.folder, timeout_s))


def test_a_scheduler_whose_plugin_raised_is_refused_with_its_words(arena: Arena) -> None:
    """SGLang logs it and serves on."""
    with pytest.raises(CaptureRefused, match="scheduler 0 runs without the capture plugin: SGLang's log may say why"):
        shaken(arena)
    write(arena, "failed.7.json", reason="ModuleNotFoundError: no torch")
    with pytest.raises(CaptureRefused, match="runs without the capture plugin: ModuleNotFoundError: no torch"):
        shaken(arena)


def test_a_scheduler_that_would_capture_other_boundaries_is_refused(arena: Arena) -> None:
    write(arena, "plugin.0.0.json", state="ready", boundaries=[3, 6])
    with pytest.raises(CaptureRefused, match=r"would capture boundaries \[3, 6\], planned are \[2, 5\]"):
        shaken(arena)
    write(arena, "plugin.0.0.json", state="ready", boundaries=list(arenas.BOUNDARIES))
    shaken(arena)


def test_memory_that_cannot_be_registered_is_an_error_and_not_a_wait(arena: Arena) -> None:
    write(arena, "plugin.0.0.json", state="loaded", boundaries=list(arenas.BOUNDARIES))
    with pytest.raises(EngineError, match="scheduler 0 had not registered its arena after 0 s"):
        shaken(arena, 0)
    write(arena, "failed.7.json", reason="RuntimeError: cudaHostRegister failed")
    with pytest.raises(CaptureRefused, match="cudaHostRegister failed"):
        shaken(arena)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"context_length": 9000}, r"engine\.context_length = 9000: the model's own is 8192"),
        ({"device": "cpu", "tp_size": 2}, r"engine\.env\.SGLANG_CPU_OMP_THREADS_BIND"),
        ({"args": {"pp_size": 2}}, r"engine\.args\.pp_size = 2 is refused"),
        ({"kind": "simulated", "args": {"x": 1}}, r"engine\.args\.x: the simulated engine knows"),
    ],
)
def test_what_can_be_known_before_a_start_is_refused_then(engine: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine(make_job(**engine), 8192)
