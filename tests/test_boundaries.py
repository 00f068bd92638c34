"""Boundaries: one table for every numbering, and setters of SGLang models that disagree on what an id means."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_extract.capture.boundaries import (
    Numbering,
    final_norm,
    from_boundary,
    resolve_boundaries,
    set_boundaries,
    to_boundary,
)
from ray_extract.errors import CaptureRefused, ConfigError

LAYERS = 8


@pytest.mark.parametrize("numbering", Numbering)
def test_every_id_of_every_numbering_goes_there_and_back(numbering: Numbering) -> None:
    named = []
    for layer_id in range(LAYERS + 2):
        try:
            boundary = to_boundary(layer_id, numbering, LAYERS)
        except ConfigError:
            continue
        assert from_boundary(boundary, numbering, LAYERS) == layer_id
        named.append(boundary)
    first = 1 if numbering.name in ("SGLANG_SETTER", "SPECFORGE", "DFLASH") else 0
    # hidden_states[N] of Hugging Face lies behind the final norm, so it is no boundary.
    last = LAYERS - 1 if numbering is Numbering.HUGGING_FACE else LAYERS
    assert named == list(range(first, last + 1))


@pytest.mark.parametrize("numbering", Numbering)
def test_what_a_numbering_cannot_name_is_an_error(numbering: Numbering) -> None:
    with pytest.raises(ConfigError, match=rf"layer id -1 in {numbering.name} numbering"):
        to_boundary(-1, numbering, LAYERS)
    with pytest.raises(ConfigError, match=rf"boundary {LAYERS + 1} has no id in {numbering.name} numbering"):
        from_boundary(LAYERS + 1, numbering, LAYERS)


def test_the_defaults_of_all_systems_are_the_same_boundaries() -> None:
    layers = 61  # Kimi-K2.5
    ours = resolve_boundaries("eagle3", layers)
    vllm = tuple(to_boundary(i, Numbering.VLLM, layers) for i in (2, layers // 2, layers - 3))
    specforge = tuple(to_boundary(i, Numbering.SPECFORGE, layers) for i in (1, layers // 2 - 1, layers - 4))
    assert ours == vllm == specforge == (2, 30, 58)


def test_boundaries_that_are_listed_are_kept() -> None:
    assert resolve_boundaries((1, 7, 8), LAYERS) == (1, 7, 8)
    assert resolve_boundaries((), LAYERS) == ()


@pytest.mark.parametrize("boundary", [0, LAYERS + 1, -1])
def test_a_boundary_that_sglang_cannot_capture_is_refused_with_the_range(boundary: int) -> None:
    with pytest.raises(ConfigError, match=rf"capture.boundaries = .*{boundary} is outside 1\.\.8.*capture\.final"):
        resolve_boundaries((1, boundary), LAYERS)


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_eagle3_needs_three_distinct_layers(layers: int) -> None:
    with pytest.raises(ConfigError, match=r"capture\.boundaries = eagle3.*list them yourself"):
        resolve_boundaries("eagle3", layers)


# Setters as in sglang 0.5.16 to 0.5.23; `ids` -> what the inner model will capture.


def plain(ids: list[int]) -> list[int]:
    """llama, qwen2, qwen3 and most others."""
    return [i + 1 for i in ids]


def same(ids: list[int]) -> list[int]:
    """muse_glimmer."""
    return list(ids)


def deepseek(ids: list[int]) -> list[int]:
    return [i + 1 for i in ids] if ids[0] == 1 else list(ids)


def gpt_oss(ids: list[int]) -> list[int]:
    return list(ids) if max(ids) == LAYERS else [i + 1 for i in ids]


def drops_last(ids: list[int]) -> list[int]:
    return [i + 1 for i in ids if i + 1 < LAYERS - 1]


def drops_last_after_one(ids: list[int]) -> list[int]:
    return [i + 2 for i in ids][:-1] or [1]


class Layer(torch.nn.Module):
    _is_layer_to_capture = False


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.layers_to_capture: list[int] = []


class Model(torch.nn.Module):
    """A model whose EAGLE3 setter follows a rule."""

    def __init__(self, rule: Callable[[list[int]], list[int]]) -> None:
        super().__init__()
        self.model, self.rule, self.calls = Inner(), rule, 0

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.calls += 1
        self.model.layers_to_capture = self.rule(ids)


class Flagged(Model):
    """qwen2_moe, qwen3_moe, qwen3_next: flags on layers decide, setters never clear them, and N is past the end."""

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        super().set_eagle3_layers_to_capture(ids)
        for layer_id in self.model.layers_to_capture:
            self.model.layers[layer_id]._is_layer_to_capture = True

    def flags(self) -> list[int]:
        return [i for i, layer in enumerate(self.model.layers) if layer._is_layer_to_capture]


class DeepSeek(Model):
    """Its DFlash setter always adds one."""

    def set_dflash_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = plain(ids)


ANY = st.sets(st.integers(1, LAYERS - 1), min_size=1).map(lambda s: tuple(sorted(s)))


@given(boundaries=ANY, rule=st.sampled_from([plain, same, deepseek, gpt_oss, drops_last, drops_last_after_one]))
def test_what_is_read_back_is_what_was_asked_for_or_the_model_is_refused(
    boundaries: tuple[int, ...], rule: Callable[[list[int]], list[int]]
) -> None:
    model = Model(rule)
    try:
        got = set_boundaries(model, boundaries)
    except CaptureRefused as refusal:
        # DeepSeek's EAGLE3 setter has no id list for boundary 1; the others are models that drop states.
        assert rule not in (plain, same, gpt_oss) and (rule is not deepseek or boundaries[0] == 1)
        assert "Model" in str(refusal)
    else:
        assert got == boundaries == tuple(model.model.layers_to_capture)


@given(boundaries=ANY)
def test_deepseek_captures_every_boundary_through_one_setter_or_the_other(boundaries: tuple[int, ...]) -> None:
    model = DeepSeek(deepseek)
    assert set_boundaries(model, boundaries) == boundaries == tuple(model.model.layers_to_capture)


@given(boundaries=ANY, rule=st.sampled_from([plain, same]), before=st.sets(st.integers(0, LAYERS - 1)))
def test_layers_are_flagged_that_are_listed_and_no_others(
    boundaries: tuple[int, ...], rule: Callable[[list[int]], list[int]], before: set[int]
) -> None:
    model = Flagged(rule)
    for layer_id in before:
        model.model.layers[layer_id]._is_layer_to_capture = True
    assert set_boundaries(model, boundaries) == boundaries
    assert tuple(model.flags()) == boundaries


class ByFlags(Inner):
    """qwen3_5: it has a setter of its own, and goes by the flags that this one sets."""

    def set_dflash_layers_to_capture(self, ids: list[int]) -> None:
        self.layers_to_capture = ids
        for layer_id in ids:
            self.layers[layer_id]._is_layer_to_capture = True


@given(boundaries=ANY)
def test_a_setter_that_lists_layers_without_flagging_them_is_passed_over(boundaries: tuple[int, ...]) -> None:
    """The EAGLE3 setter around qwen3_5 up to 0.5.20; its DFlash setter goes through the inner model."""

    class Around(DeepSeek):
        def set_dflash_layers_to_capture(self, ids: list[int]) -> None:
            self.model.set_dflash_layers_to_capture(plain(ids))

    model = Around(plain)
    model.model = ByFlags()
    assert set_boundaries(model, boundaries) == boundaries
    assert tuple(i for i, layer in enumerate(model.model.layers) if layer._is_layer_to_capture) == boundaries


def test_a_model_whose_setters_never_flag_its_layers_is_refused() -> None:
    model = Model(plain)
    model.model = ByFlags()
    with pytest.raises(CaptureRefused, match=r"asked for boundaries \[2, 4\], the engine would capture \[\]"):
        set_boundaries(model, (2, 4))


def test_a_setter_that_adds_one_is_called_once() -> None:
    model = Model(plain)
    set_boundaries(model, (2, 4, 5))
    assert model.calls == 1


def test_a_model_without_a_setter_is_refused_with_the_way_out() -> None:
    with pytest.raises(CaptureRefused, match=r"Inner: none of .*capture\.boundaries = \[\] with capture\.final = true"):
        set_boundaries(Inner(), (2,))
    assert set_boundaries(Inner(), ()) == ()


def test_layers_kept_as_a_set_are_read_back_in_order() -> None:
    """nemotron_h; what a set of integers gives first depends on their sizes."""

    class Unordered(Model):
        def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
            self.model.layers_to_capture = set(plain(ids))  # type: ignore[assignment]

    wanted = (2, 30, 58)
    assert tuple(set(wanted)) != wanted
    assert set_boundaries(Unordered(plain), wanted) == wanted


def test_two_inner_models_that_disagree_are_refused() -> None:
    model = Model(plain)
    model.draft = Inner()
    model.draft.layers_to_capture = [3]
    with pytest.raises(CaptureRefused, match="2 lists of captured layers, expected one"):
        set_boundaries(model, (2,))


def test_a_setter_that_does_nothing_is_refused() -> None:
    """Setters return at once on a pipeline stage that is not the last."""

    class Silent(Model):
        def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
            pass

    with pytest.raises(CaptureRefused, match="0 lists of captured layers"):
        set_boundaries(Silent(plain), (2,))


def test_the_inner_model_may_be_no_torch_module() -> None:
    class Bare:
        layers_to_capture: Any = None

        def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
            self.layers_to_capture = plain(ids)

    assert set_boundaries(Bare(), (3,)) == (3,)


class WithNorm(torch.nn.Module):
    """A multimodal class: the language model lies deeper, and the vision tower has layers too."""

    def __init__(self, texts: int) -> None:
        super().__init__()
        self.vision = torch.nn.Module()
        self.vision.layers = torch.nn.ModuleList([Layer()])
        self.vision.norm = torch.nn.Identity()
        self.texts = torch.nn.ModuleList(torch.nn.Module() for _ in range(texts))
        for text in self.texts:
            text.embed_tokens, text.layers, text.norm = Layer(), torch.nn.ModuleList([Layer()]), torch.nn.Identity()


def test_the_final_norm_is_that_of_the_language_model() -> None:
    model = WithNorm(1)
    assert final_norm(model) is model.texts[0].norm


@pytest.mark.parametrize("texts", [0, 2])
def test_a_model_without_one_clear_final_norm_is_refused(texts: int) -> None:
    with pytest.raises(CaptureRefused, match=rf"WithNorm: {texts} parts made of embed_tokens, layers and norm"):
        final_norm(WithNorm(texts))
