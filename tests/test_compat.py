"""What is refused of an SGLang that is not as capture needs it; its sources are in test_versions_sources.py."""

import re
import sys
from importlib.metadata import entry_points, version
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_extract.capture import compat
from ray_extract.errors import CaptureRefused


def test_the_installed_version_is_one_that_was_tested() -> None:
    compat.check_version(version("sglang"), force=False)


def test_an_untested_version_is_refused_with_the_list_and_the_ways_out() -> None:
    listed = r", ".join(v.replace(".", r"\.") for v in compat.TESTED_VERSIONS)
    with pytest.raises(
        CaptureRefused, match=rf"sglang 9\.9: .*{listed}; .*allow_untested_sglang = true.*verify --recompute"
    ):
        compat.check_version("9.9", force=False)
    compat.check_version("9.9", force=True)


def test_sglang_loads_our_plugin_by_its_entry_point() -> None:
    assert [e.value for e in entry_points(group="sglang.srt.plugins") if e.name == "ray_extract"] == [
        "ray_extract.capture.plugin:register"
    ]


# Methods and classes of the standard library stand for SGLang's, whose import takes 20 s.


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Empty tables in place of SGLang's."""
    made: dict[str, dict[str, Any]] = {"HOOKED": {}, "READ": {}, "CALLED": {}}
    for name, table in made.items():
        monkeypatch.setattr(compat, name, table)
    return made


def test_a_hooked_method_that_is_gone_or_changed_is_refused_by_name(tables: dict[str, dict[str, Any]]) -> None:
    hooked = tables["HOOKED"]
    hooked["json.dumps"] = ("obj",)
    compat.check_hooked()
    hooked["json.dumps"] = ("other",)
    with pytest.raises(CaptureRefused, match=r"json\.dumps: parameters \('obj',\), expected \('other',\)"):
        compat.check_hooked()
    for gone in ("json.nothing", "nothing.at.all"):
        hooked.clear()
        hooked[gone] = ()
        with pytest.raises(CaptureRefused, match=f"{gone}: not in this SGLang"):
            compat.check_hooked()


def test_a_field_that_is_gone_is_refused_by_name(tables: dict[str, dict[str, Any]]) -> None:
    read = tables["READ"]
    read["inspect.Parameter"] = ("name", "POSITIONAL_ONLY")  # a property, a member
    read[f"{__name__}.Annotated"] = ("own", "inherited")
    compat.check_hooked()
    for path in ("inspect.Parameter", f"{__name__}.Annotated"):
        read[path] = ("nothing",)
        with pytest.raises(CaptureRefused, match=re.escape(f"{path}.nothing: not in this SGLang")):
            compat.check_hooked()
        del read[path]


class Base:
    """Fields without values, as a dataclass has them."""

    inherited: int


class Annotated(Base):
    own: int


def test_a_called_method_that_does_not_know_an_argument_is_refused_by_name(tables: dict[str, dict[str, Any]]) -> None:
    called = tables["CALLED"]
    called["json.dumps"] = ("indent", "obj")
    compat.check_called()
    called["json.dumps"] = ("obj", "rid")
    with pytest.raises(CaptureRefused, match=r"json\.dumps: no parameter rid in this SGLang"):
        compat.check_called()


# Ranks


def rank(**changed: Any) -> SimpleNamespace:
    places = {"pp_size": 1, "attn_tp_size": 2, "attn_tp_rank": 0, "attn_cp_rank": 0, "dp_rank": None}
    return SimpleNamespace(**{**places, **changed})


@pytest.fixture(params=["0.5.12", "0.5.16", "0.5.23"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a runner whose rank is where this version has it."""

    def runner(found: SimpleNamespace) -> Any:
        if request.param == "0.5.16":
            return SimpleNamespace(ps=found)
        if request.param == "0.5.12":
            getters = SimpleNamespace(
                get_attention_tp_size=lambda: found.attn_tp_size,
                get_attention_tp_rank=lambda: found.attn_tp_rank,
                get_attention_cp_rank=lambda: found.attn_cp_rank,
            )
            modules = {"layers": {"dp_attention": getters}}
            made = SimpleNamespace(pp_size=found.pp_size, dp_rank=found.dp_rank)
        else:
            modules = {"runtime_context": {"get_parallel": lambda: found}}
            made = SimpleNamespace()
        for name in ("sglang", "sglang.srt"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
        for name, content in modules.items():
            monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", SimpleNamespace(**content))
        return made

    return runner


@pytest.mark.parametrize(
    ("found", "expected"),
    [(rank(), (0, 0)), (rank(dp_rank=3), (3, 0)), (rank(dp_rank=3, attn_tp_rank=1), (3, 1))],
)
def test_a_writer_is_a_data_parallel_rank_and_a_rank_one_of_its_attention_ranks(
    place: Any, found: Any, expected: tuple[int, int]
) -> None:
    assert compat.place(place(found), 2) == expected


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (rank(pp_size=2), r"pp_size = 2: only the last pipeline stage sees the states"),
        (rank(attn_cp_rank=1), r"attn_cp_size > 1: context parallelism does not gather"),
        (rank(attn_tp_size=4), r"runs with 4 attention-tensor-parallel ranks, the job says 2"),
    ],
)
def test_places_that_capture_was_not_made_for_are_refused(place: Any, found: Any, message: str) -> None:
    with pytest.raises(CaptureRefused, match=message):
        compat.place(place(found), 2)


# Models whose own capture means something else


class Gemma3TextModel(torch.nn.Module):
    pass


class Gemma4TextModel(torch.nn.Module):
    pass


class BeamModel(torch.nn.Module):
    pass


class Derived(BeamModel):
    pass


@pytest.mark.parametrize(
    ("inner", "version", "refused"),
    [
        (torch.nn.Identity, "0.5.20", None),
        (Gemma3TextModel, "0.5.16", None),
        (Gemma3TextModel, "0.5.18", "Gemma3TextModel"),
        (Gemma3TextModel, "9.9", "Gemma3TextModel"),
        (Gemma4TextModel, "0.5.20", "Gemma4TextModel"),
        (Gemma4TextModel, "0.5.23", None),
        (BeamModel, "0.5.23", "BeamModel"),
        (Derived, "0.5.23", "BeamModel"),
    ],
)
def test_a_model_that_captures_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, inner: type[torch.nn.Module], version: str, refused: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__=version))
    assert compat.miscaptured(torch.nn.Sequential(torch.nn.Identity(), inner())) == refused
