"""What capture and the engine touch of SGLang, in the sources of every version that is let in.

A version is added to compat.TESTED_VERSIONS only with these and with tests/version_suite.py.
"""

import ast
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from test_sglang_args import FIELDS, REFUSED, make_job
from wheels import Sources, assigned, declared, sources

from ray_extract.capture import compat
from ray_extract.capture.boundaries import _SETTERS
from ray_extract.engine.sglang import server_args

BATCH = "sglang.srt.model_executor.forward_batch_info"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


@pytest.fixture(params=compat.TESTED_VERSIONS)
def sglang(request: pytest.FixtureRequest) -> Sources:
    return sources(request.param)


@pytest.mark.parametrize("path", compat.HOOKED, ids=lambda p: ".".join(p.split(".")[-2:]))
def test_a_hooked_method_has_the_parameters_that_the_hook_relies_on(sglang: Sources, path: str) -> None:
    expected = compat.HOOKED[path]
    assert sglang.parameters(path)[: len(expected)] == expected


@pytest.mark.parametrize("path", compat.CALLED, ids=lambda p: ".".join(p.split(".")[-2:]))
def test_a_method_that_is_called_takes_what_it_is_given(sglang: Sources, path: str) -> None:
    assert set(compat.CALLED[path]) <= set(sglang.parameters(path))


@pytest.mark.parametrize("path", compat.READ, ids=lambda p: p.split(".")[-1])
def test_what_the_hooks_read_is_declared(sglang: Sources, path: str) -> None:
    assert set(compat.READ[path]) <= declared(sglang.find_class(path))


# What is set when an object is made, so that no class shows it: read by the hooks and by the engine's owner.
SET = {
    RUNNER: {"is_draft_worker", "device", "gpu_id", "dtype", "model", "model_config", "server_args"},
    "sglang.srt.configs.model_config.ModelConfig": {"hidden_size", "num_hidden_layers"},
    "sglang.srt.managers.schedule_batch.Req": {"rid", "origin_input_ids"},
    "sglang.srt.entrypoints.engine.Engine": {"server_args", "tokenizer_manager"},
    "sglang.srt.managers.tokenizer_manager.TokenizerManager": {"max_req_input_len"},
}


@pytest.mark.parametrize("path", SET, ids=lambda p: p.split(".")[-1])
def test_an_object_has_what_is_read_of_it(sglang: Sources, path: str) -> None:
    assert SET[path] <= assigned(sglang.find_class(path))


def test_a_batch_has_its_requests(sglang: Sources) -> None:
    """0.5.12 gives ForwardBatch.init_new a batch of another class."""
    name = "ModelWorkerBatch" if sglang.version == "0.5.12" else "ScheduleBatch"
    assert "reqs" in declared(sglang.find_class(f"sglang.srt.managers.schedule_batch.{name}"))


def test_a_rank_is_read_where_this_version_has_it(sglang: Sources) -> None:
    """As compat._rank chooses."""
    runner = assigned(sglang.find_class(RUNNER))
    read = {"pp_size", "attn_tp_size", "attn_tp_rank", "attn_cp_rank", "dp_rank"}
    if "ps" in runner:
        assert read <= declared(sglang.find_class("sglang.srt.distributed.parallel_state_wrapper.ParallelState"))
    elif "dp_rank" in runner:
        assert "pp_size" in runner
        getters = {"get_attention_tp_size", "get_attention_tp_rank", "get_attention_cp_rank"}
        assert getters <= sglang.functions("sglang.srt.layers.dp_attention")
    else:
        assert read <= declared(sglang.find_class("sglang.srt.arg_groups.fields.parallel.Parallel"))
        assert "get_parallel" in sglang.functions("sglang.srt.runtime_context")


def test_with_data_parallel_attention_a_scheduler_is_given_its_attention_rank(sglang: Sources) -> None:
    """So dp_rank names the writer in both kinds of data parallelism."""
    controller = sglang.tree("sglang.srt.managers.data_parallel_controller")
    targets = [
        [getattr(e, "id", None) for e in node.targets[0].elts]
        for node in ast.walk(controller)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", None) == "compute_dp_attention_world_info"
        and isinstance(node.targets[0], ast.Tuple)
    ]
    assert len(targets) == 1 and targets[0][2] == "dp_rank"


def test_only_the_captured_modes_are_captured(sglang: Sources) -> None:
    modes = sglang.find_class(f"{BATCH}.ForwardMode")
    names = {t.id for n in modes.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    batches = {name: SimpleNamespace(forward_mode=SimpleNamespace(name=name)) for name in names}
    assert {name for name, batch in batches.items() if compat.is_capture_mode(batch)} == {"EXTEND", "MIXED"}
    assert {"DECODE", "TARGET_VERIFY", "SPLIT_PREFILL", "IDLE"} <= names


def test_a_pass_can_carry_its_ticket_to_the_scheduler(sglang: Sources) -> None:
    """LogitsProcessorOutput takes attributes: a dataclass without slots."""
    output = sglang.find_class("sglang.srt.layers.logits_processor.LogitsProcessorOutput")
    assert [ast.unparse(d) for d in output.decorator_list] == ["dataclasses.dataclass"]
    assert not output.bases and "__slots__" not in declared(output)


def test_the_plugin_framework_is_the_one_that_the_plugin_was_written_for(sglang: Sources) -> None:
    registry = "sglang.srt.plugins.hook_registry"
    assert sglang.parameters(f"{registry}.HookRegistry.register")[:3] == ("target", "hook", "hook_type")
    assert {"AROUND", "AFTER", "BEFORE"} <= declared(sglang.find_class(f"{registry}.HookType"))
    assert '"sglang.srt.plugins"' in sglang.text("sglang/srt/plugins/__init__.py")
    schedulers = [n for n in sglang.tree("sglang.srt.managers.scheduler").body if isinstance(n, ast.FunctionDef)]
    start = next(n for n in schedulers if n.name == "run_scheduler_process")
    assert any(ast.unparse(n) == "load_plugins()" for n in start.body)


def test_what_became_of_the_arguments_is_read_where_this_version_has_it(sglang: Sources) -> None:
    has = "resolved_dict" in declared(sglang.find_class("sglang.srt.server_args.ServerArgs"))
    assert has == (sglang.version in ("0.5.20", "0.5.23"))


# The options

# Of those that we set, refuse or point to a field of the job: since which version, or until which.
SINCE = {
    "0.5.14": {
        "cuda_graph_backend_prefill",
        "cuda_graph_config",
        "enable_prefill_cp",
        "flashinfer_allreduce_fusion_backend",
        "radix_cache_backend",
    },
    "0.5.16": {"dcp_size", "enable_flexkv", "enable_session_radix_cache"},
    "0.5.18": {"dwdp_size"},
    "0.5.20": {"enable_layernorm_sp", "enable_unified_cache_external_linker"},
    "0.5.23": {
        "attn_dp_size",
        "enable_decoder_swa_bounded_replay",
        "enable_encoder_swa_bounded_replay",
        "enable_return_aux_hidden_states",
    },
}
UNTIL = {
    "0.5.12": {
        "disable_piecewise_cuda_graph",
        "enforce_piecewise_cuda_graph",
        "enable_nsa_prefill_context_parallel",
    },
    "0.5.18": {"enable_prefill_context_parallel"},
}
BETWEEN = {("0.5.14", "0.5.18"): {"enable_dsa_prefill_context_parallel"}}


def options(sglang: Sources) -> set[str]:
    """Annotated names in the sources of the server arguments."""
    files = ["sglang/srt/server_args.py", *sglang.files("sglang/srt/arg_groups")]
    return {
        node.target.id
        for file in files
        for node in ast.walk(sglang.tree(file))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_every_option_that_we_set_or_refuse_exists_where_it_should(sglang: Sources) -> None:
    """One that was renamed would be left out in silence: what a version lacks is not passed on."""
    cpu = make_job(device="cpu", enable_dp_attention=True, context_length=1)
    wanted = {*server_args(cpu), *server_args(make_job(tp_size=2)), *FIELDS, *REFUSED}
    at = compat.TESTED_VERSIONS.index
    here = at(sglang.version)
    missing = {name for version, names in SINCE.items() if here < at(version) for name in names}
    missing |= {name for version, names in UNTIL.items() if here > at(version) for name in names}
    missing |= {n for (first, last), names in BETWEEN.items() if not at(first) <= here <= at(last) for n in names}
    assert wanted - options(sglang) == missing


# What the models' own capture means


def runs_layer(node: ast.AST) -> bool:
    """Whether a decoder layer is called in it."""
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
        called = call.func
        if isinstance(called, ast.Attribute) and called.attr == "forward":
            called = called.value
        if isinstance(called, ast.Subscript) and getattr(called.value, "attr", None) == "layers":
            return True
        if isinstance(called, ast.Name) and called.id == "layer":
            return True
    return False


def asks(node: ast.AST, about: type[ast.expr] = ast.Name) -> bool:
    """Whether it asks if the layer of this turn is to be captured; with ast.BinOp, a layer beside it."""
    return any(
        isinstance(n, ast.Compare)
        and isinstance(n.left, about)
        and getattr(n.comparators[0], "attr", None) == "layers_to_capture"
        for n in ast.walk(node)
    )


def steps(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in order, those of blocks in place of the blocks, except blocks that capture."""
    for statement in body:
        if isinstance(statement, ast.With | ast.For | ast.If) and not (
            isinstance(statement, ast.If) and asks(statement.test)
        ):
            yield from steps(statement.body)
            yield from steps(getattr(statement, "orelse", []))
        else:
            yield statement


def captures_otherwise(cls: ast.ClassDef) -> bool:
    """Whether it captures after the layer ran, or leaves out a residual that its layers hand on.

    Captured where the next layer is asked for after the layer ran (gpt_oss), it is what enters the next one.
    """
    for loop in (node for node in ast.walk(cls) if isinstance(node, ast.For)):
        ran = False
        hands_on = any(
            isinstance(n, ast.Assign) and runs_layer(n.value) and "residual" in ast.unparse(n.targets[0])
            for n in ast.walk(loop)
        )
        for step in steps(loop.body):
            if asks(step, ast.BinOp) and not ran:
                return True
            if isinstance(step, ast.If) and (
                ran or (hands_on and any(ast.unparse(s).endswith(".append(hidden_states)") for s in step.body))
            ):
                return True
            ran = ran or runs_layer(step)
    return False


def models(sglang: Sources) -> dict[str, ast.ClassDef]:
    """Classes in the files of models that capture."""
    return {
        node.name: node
        for file in sglang.files("sglang/srt/models")
        if "in self.layers_to_capture" in sglang.text(file)
        for node in sglang.tree(file).body
        if isinstance(node, ast.ClassDef)
    }


def lends(cls: ast.ClassDef) -> bool:
    """Whether it hands over the very tensor that the next layer reads."""
    return any(
        isinstance(n, ast.If) and asks(n.test) and ast.unparse(n.body[0]).endswith(".append(hidden_states)")
        for loop in ast.walk(cls)
        if isinstance(loop, ast.For)
        for n in ast.walk(loop)
    )


def test_models_that_capture_something_else_are_the_ones_refused(sglang: Sources) -> None:
    classes = models(sglang)
    assert {"LlamaModel", "Qwen2Model", "DeepseekV2Model", "Gemma4TextModel"} <= set(classes)
    refused = {name for name, right in compat._MISCAPTURED.items() if sglang.version not in right} & set(classes)
    # Lent tensors are found by what the norms do with them, which was read: only Gemma 4's add in place.
    assert ("Gemma4TextModel" in refused) == lends(classes["Gemma4TextModel"])
    found = {name for name, node in classes.items() if captures_otherwise(node)}
    assert found == refused - {"Gemma4TextModel"}


def methods(sglang: Sources, *words: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Methods of model classes, with the class's name, in the files that hold all of some words."""
    for file in sglang.files("sglang/srt/models"):
        if all(word in sglang.text(file) for word in words):
            for cls in (node for node in sglang.tree(file).body if isinstance(node, ast.ClassDef)):
                yield from ((cls.name, node) for node in cls.body if isinstance(node, ast.FunctionDef))


def test_a_model_that_returns_before_it_hands_over_is_refused(sglang: Sources) -> None:
    found = {
        cls
        for cls, method in methods(sglang, "_is_layer_to_capture", "not forward_batch.forward_mode.is_idle()")
        for node in ast.walk(method)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "not forward_batch.forward_mode.is_idle()"
        if isinstance(node.body[-1], ast.Return) and "_is_layer_to_capture" in ast.unparse(method)
    }
    assert found == ({"Qwen4ExpModel"} if sglang.version in ("0.5.20", "0.5.23") else set())
    assert all(sglang.version not in compat._MISCAPTURED[name] for name in found)


def test_an_inner_model_with_a_setter_of_its_own_goes_by_flags(sglang: Sources) -> None:
    """As boundaries._captured takes it."""
    setters = [
        ast.unparse(method)
        for _, method in methods(sglang, "self.layers_to_capture = ", "_layers_to_capture(")
        if method.name in _SETTERS and "self.layers_to_capture = " in ast.unparse(method)
    ]
    assert len(setters) >= 5
    assert all("_is_layer_to_capture" in setter for setter in setters)


def test_the_models_of_the_truth_tests_have_a_setter(sglang: Sources) -> None:
    for path in ("llama.LlamaForCausalLM", "qwen3.Qwen3ForCausalLM", "qwen3_moe.Qwen3MoeForCausalLM"):
        assert _SETTERS[0] in declared(sglang.find_class(f"sglang.srt.models.{path}"))
