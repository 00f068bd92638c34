"""What capture needs of SGLang, checked in the sources of the installed one without importing it (20 s)."""

import ast
import importlib.util
import types
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest

from ray_extract.capture import compat
from ray_extract.errors import CaptureRefused

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sglang_root() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    return Path(spec.submodule_search_locations[0])


def find_class(module: str, name: str) -> ast.ClassDef:
    path = sglang_root().parent.joinpath(*module.split(".")).with_suffix(".py")
    return next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)


def find_method(path: str) -> Function:
    module, cls, method = path.rsplit(".", 2)
    return next(n for n in find_class(module, cls).body if isinstance(n, Function) and n.name == method)


@pytest.mark.parametrize("path", compat._SIGNATURES, ids=lambda p: ".".join(p.split(".")[-2:]))
def test_a_hooked_method_has_the_parameters_that_the_hook_relies_on(path: str) -> None:
    method = find_method(path)
    names = [a.arg for a in (*method.args.posonlyargs, *method.args.args)]
    if any(isinstance(d, ast.Name) and d.id == "classmethod" for d in method.decorator_list):
        names = names[1:]  # bound, as check_signatures sees it
    expected = compat._SIGNATURES[path]
    assert tuple(names[: len(expected)]) == expected


def test_the_installed_version_is_one_that_was_tested() -> None:
    sglang_root()
    compat.check_version(version("sglang"), force=False)


def test_an_untested_version_is_refused_with_the_ways_out() -> None:
    with pytest.raises(CaptureRefused, match=r"sglang 9\.9: .*0\.5\.20.*allow_untested_sglang = true.*verify"):
        compat.check_version("9.9", force=False)
    compat.check_version("9.9", force=True)


def test_sglang_loads_our_plugin_by_its_entry_point() -> None:
    assert [e.value for e in entry_points(group="sglang.srt.plugins") if e.name == "ray_extract"] == [
        "ray_extract.capture.plugin:register"
    ]


@pytest.mark.parametrize("name", ["rids", "extend_prefix_lens_cpu", "extend_seq_lens_cpu", "forward_mode"])
def test_a_forward_batch_carries_what_the_hooks_read(name: str) -> None:
    batch = find_class("sglang.srt.model_executor.forward_batch_info", "ForwardBatch")
    assert name in {n.target.id for n in batch.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def test_the_forward_modes_that_are_captured_exist_and_the_others_are_not_captured() -> None:
    modes = find_class("sglang.srt.model_executor.forward_batch_info", "ForwardMode")
    names = {t.id for n in modes.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    captured = {
        name
        for name in names
        if compat.is_capture_mode(types.SimpleNamespace(forward_mode=types.SimpleNamespace(name=name)))
    }
    assert captured == {"EXTEND", "MIXED"} and {"DECODE", "TARGET_VERIFY", "IDLE"} <= names


def test_a_method_that_is_gone_or_changed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"json.dumps": ("obj",)}
    monkeypatch.setattr(compat, "_SIGNATURES", known)
    compat.check_signatures()
    known["json.dumps"] = ("other",)
    with pytest.raises(CaptureRefused, match=r"json\.dumps: parameters \('obj',\), expected \('other',\)"):
        compat.check_signatures()
    for gone in ("json.nothing", "nothing.at.all"):
        monkeypatch.setattr(compat, "_SIGNATURES", {gone: ()})
        with pytest.raises(CaptureRefused, match=f"{gone}: not in this SGLang"):
            compat.check_signatures()
