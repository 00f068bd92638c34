"""The arguments of sglang.Engine: what breaks capture is refused by name, and the defaults are safe."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ray_extract.config import Job
from ray_extract.engine.base import check_engine
from ray_extract.engine.sglang import server_args
from ray_extract.errors import ConfigError


def make_job(**engine: Any) -> Job:
    return Job.model_validate(
        {"model": {"path": "m"}, "dataset": {"paths": "a"}, "output": {"url": "o"}, "engine": engine}
    )


CACHED = "positions found in the "
GRAPH = "a replayed graph's states lie in buffers that the next replay overwrites"
PARTS = "each rank would hold a part of the tokens' states"
CP = "context parallelism does not gather the captured states"
# option: a value that must be refused, one that must not, and the reason
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "disable_radix_cache": (False, True, CACHED),
    "enable_hierarchical_cache": (True, False, CACHED),
    "enable_lmcache": (True, False, CACHED),
    "enable_session_radix_cache": (True, False, CACHED),
    "speculative_algorithm": ("EAGLE3", None, "draft verification"),
    "disable_cuda_graph": (False, True, GRAPH),
    "cuda_graph_backend_prefill": ("breakable", "disabled", GRAPH),
    "cuda_graph_config": ({"prefill": {"backend": "full"}}, None, GRAPH),
    "pp_size": (2, 1, "only the last pipeline stage sees the states"),
    "nnodes": (2, 1, "an engine must lie on one node"),
    "attn_cp_size": (2, 1, CP),
    "dcp_size": (2, 1, CP),
    "enable_prefill_cp": (True, False, CP),
    "enable_attn_tp_input_scattered": (True, False, PARTS),
    "enable_layernorm_sp": (True, False, PARTS),
    "enable_two_batch_overlap": (True, False, "two halves"),
    "enable_pdmux": (True, False, "split prefill"),
    "dllm_algorithm": ("LowConfidence", None, "block diffusion"),
    "disaggregation_mode": ("prefill", "null", "prefill and decode must be one engine"),
    "allow_auto_truncate": (True, False, "a shortened prompt"),
    "forward_hooks": ([{"name": "x"}], None, "they may change the states"),
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


FIELDS = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    **{name: f"model.{name}" for name in ("dtype", "load_format", "quantization", "trust_remote_code")},
    **{name: f"engine.{name}" for name in ("device", "tp_size", "dp_size", "enable_dp_attention")},
    **{name: f"engine.{name}" for name in ("chunked_prefill_size", "context_length")},
}


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_with_a_field_of_its_own_points_there(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.args\.{name}: set {FIELDS[name]} instead"):
        server_args(make_job(args={name: 1}))


def test_the_defaults_keep_every_prompt_token_computed_and_in_order() -> None:
    args = server_args(make_job())
    for name in ("disable_radix_cache", "disable_cuda_graph", "skip_tokenizer_init"):
        assert args[name] is True
    assert args["schedule_policy"] == "fcfs"
    assert (args["device"], args["tp_size"], args["dp_size"], args["chunked_prefill_size"]) == ("cuda", 1, 1, 8192)
    assert not {"quantization", "context_length", "enable_dp_attention", "attention_backend"} & set(args)


def test_a_cpu_engine_has_a_bounded_cache_and_a_backend_that_exists() -> None:
    args = server_args(make_job(device="cpu"))
    assert args["attention_backend"] == "torch_native" and args["max_total_tokens"] == 32768
    assert server_args(make_job(device="cpu", args={"max_total_tokens": 8192}))["max_total_tokens"] == 8192


@pytest.mark.parametrize(("device", "tp_size", "expected"), [("cuda", 1, False), ("cuda", 8, True), ("cpu", 2, False)])
def test_several_gpus_turn_the_fused_all_reduce_off(device: str, tp_size: int, expected: bool) -> None:
    """With it, a layer's output may be one rank's partial sum."""
    args = server_args(make_job(device=device, tp_size=tp_size))
    assert args.get("enforce_disable_flashinfer_allreduce_fusion", False) is expected


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


def sglang_fields() -> set[str]:
    """Annotated names in the sources of the installed SGLang's server arguments, which is not imported (10 s)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    srt = Path(spec.submodule_search_locations[0]) / "srt"
    return {
        node.target.id
        for path in [srt / "server_args.py", *(srt / "arg_groups").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_every_option_that_we_set_or_refuse_exists_in_the_installed_sglang() -> None:
    """One that was renamed would be left out in silence (options that another version lacks are not passed on)."""
    job = make_job(device="cpu", enable_dp_attention=True, context_length=1)
    cuda = make_job(tp_size=2)
    wanted = {*server_args(job), *server_args(cuda), *FIELDS, *REFUSED}
    assert sorted(wanted - sglang_fields()) == []


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
