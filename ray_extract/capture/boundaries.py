"""Boundaries, and how each system numbers them.

Boundary b of a model with N layers is the residual stream that enters layer b: 0 is the embedding, N is what the final
norm reads. `final` is what the LM head reads. Only boundaries are configured and stored; this table converts.

Sources: Hugging Face `output_hidden_states` (tuple of N + 1, the last one after the norm); SGLang 0.5.20
`models/llama.py` and `models/deepseek_v2.py` (set_eagle3_layers_to_capture); vLLM `aux_hidden_state_layers`;
SpecForge 0.2.0 `algorithms/model_providers.py`; z-lab DFlash `target_layer_ids`.
"""

import enum
from collections.abc import Iterable
from typing import Any, Literal

from ray_extract.errors import CaptureRefused, ConfigError


class Numbering(enum.Enum):
    """Whose layer ids."""

    HUGGING_FACE = "index into hidden_states"
    VLLM = "aux_hidden_state_layers; speculators' target_layer_ids"
    SGLANG_INTERNAL = "layers_to_capture of the inner model"
    SGLANG_SETTER = "set_eagle3_layers_to_capture of llama, qwen2, qwen3 and most others"
    SPECFORGE = "ids of layers whose output is wanted; TorchSpec too"
    DFLASH = "target_layer_ids"


# What to add to an id to get the boundary.
_OFFSET = {
    Numbering.HUGGING_FACE: 0,
    Numbering.VLLM: 0,
    Numbering.SGLANG_INTERNAL: 0,
    Numbering.SGLANG_SETTER: 1,
    Numbering.SPECFORGE: 1,
    Numbering.DFLASH: 1,
}


def _highest(numbering: Numbering, num_layers: int) -> int:
    # hidden_states[N] is after the final norm, so it is not boundary N.
    return num_layers - 1 if numbering is Numbering.HUGGING_FACE else num_layers


def to_boundary(layer_id: int, numbering: Numbering, num_layers: int) -> int:
    """The boundary that a foreign layer id means.

    Raises:
        ConfigError: the id names no boundary of a model with `num_layers` layers.
    """
    boundary = layer_id + _OFFSET[numbering]
    if layer_id < 0 or boundary > _highest(numbering, num_layers):
        raise ConfigError(
            f"layer id {layer_id} in {numbering.name} numbering: a model of {num_layers} layers has no such state"
        )
    return boundary


def from_boundary(boundary: int, numbering: Numbering, num_layers: int) -> int:
    """Inverse of to_boundary.

    Raises:
        ConfigError: the numbering has no id for this boundary.
    """
    layer_id = boundary - _OFFSET[numbering]
    if layer_id < 0 or boundary > _highest(numbering, num_layers):
        raise ConfigError(f"boundary {boundary} has no id in {numbering.name} numbering for {num_layers} layers")
    return layer_id


def resolve_boundaries(wanted: Literal["eagle3"] | tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The boundaries of a configuration, checked against the model.

    `eagle3` is {2, N//2, N-3}, the default of SGLang, vLLM and (in their own numbering) SpecForge.

    Raises:
        ConfigError: a boundary that SGLang cannot capture, or eagle3 on a model too small for three distinct ones.
    """
    if wanted == "eagle3":
        bounds = (2, num_layers // 2, num_layers - 3)
        if not 0 < bounds[0] < bounds[1] < bounds[2]:
            raise ConfigError(
                f"capture.boundaries = eagle3: {{2, N//2, N-3}} of a model with N = {num_layers} layers is "
                f"{list(bounds)}, not three ascending boundaries; list them yourself"
            )
        return bounds
    for b in wanted:
        if not 1 <= b <= num_layers:
            raise ConfigError(
                f"capture.boundaries = {list(wanted)}: {b} is outside 1..{num_layers}, what can be captured of a model "
                f"with {num_layers} layers ({num_layers} is what the final norm reads; what it gives is capture.final)"
            )
    return tuple(wanted)


def set_boundaries(model: Any, boundaries: tuple[int, ...]) -> tuple[int, ...]:
    """Make an SGLang model hand these boundaries to its logits processor, and read back what it will do.

    The setters of SGLang's models disagree on what an id means (most add one; DeepSeek adds one only if the first id
    is 1). So the first call finds the shift, and the result is what `layers_to_capture` says after the second. The
    first call assumes that the setter adds one: the other way round, boundary N-1 is past the end of the layers of
    the models whose setters flag layers.

    Args:
        model: the `model` of an SGLang ModelRunner.
        boundaries: ascending, within 1 .. N-1; may be empty.

    Returns:
        The boundaries as read back.

    Raises:
        CaptureRefused: the model class has no setter, or the read-back never equals the request.
    """
    if not boundaries:
        return ()
    setters = [s for s in (getattr(model, name, None) for name in _SETTERS) if s is not None]
    if not setters:
        raise CaptureRefused(
            f"model class {type(model).__name__}: none of {', '.join(_SETTERS)} in this SGLang; only "
            "capture.boundaries = [] with capture.final = true can be captured"
        )
    got: tuple[int, ...] = ()
    for setter in setters:
        ids = [b - 1 for b in boundaries]
        for _ in range(2):
            _clear_flags(model)
            setter(ids)
            got = _read_back(model)
            if got == boundaries:
                return got
            if len(got) != len(boundaries):
                break
            ids = [i + want - have for i, want, have in zip(ids, boundaries, got, strict=True)]
    raise CaptureRefused(
        f"model class {type(model).__name__}: asked for boundaries {list(boundaries)}, the engine would capture "
        f"{list(got)}"
    )


def final_norm(model: Any) -> Any:
    """The module that reads boundary N, for a hook on it.

    No setter of SGLang names this boundary: its models look for captured layers as they enter a layer.

    Args:
        model: the `model` of an SGLang ModelRunner.

    Raises:
        CaptureRefused: none, or several, of the model's parts have decoder layers and a norm behind them.
    """
    parts = ("embed_tokens", "layers", "norm")
    found = [m for m in _submodules(model) if all(hasattr(m, part) for part in parts)]
    if len(found) != 1:
        raise CaptureRefused(
            f"model class {type(model).__name__}: {len(found)} parts made of embed_tokens, layers and norm, expected "
            "one, so the state before the final norm cannot be found; leave the last boundary out"
        )
    return found[0].norm


# DeepSeek's EAGLE3 setter cannot name boundary 1 (an id list that starts with 1 is shifted, one that does not is not);
# its DFlash setter always adds one.
_SETTERS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture")


def _submodules(model: Any) -> Iterable[Any]:
    modules = getattr(model, "modules", None)
    return modules() if callable(modules) else (model,)


def _read_back(model: Any) -> tuple[int, ...]:
    # NemotronH has a set; all models hand over in the order of their layers
    listing = [m for m in _submodules(model) if getattr(m, "layers_to_capture", None)]
    found = {tuple(sorted(m.layers_to_capture if m is model else _captured(m))) for m in listing}
    if len(found) != 1:
        raise CaptureRefused(f"model class {type(model).__name__}: {len(found)} lists of captured layers, expected one")
    return found.pop()


def _captured(inner: Any) -> Iterable[int]:
    # An inner model with a setter of its own goes by flags on its layers. The EAGLE3 setter around Qwen3.5's fills the
    # list alone up to 0.5.20, and nothing would be captured; its DFlash setter goes through the inner one.
    if not any(hasattr(inner, name) for name in _SETTERS):
        return tuple(inner.layers_to_capture)
    return (i for i, layer in enumerate(inner.layers) if getattr(layer, "_is_layer_to_capture", False))


def _clear_flags(model: Any) -> None:
    for module in _submodules(model):
        if getattr(module, "_is_layer_to_capture", False):
            module._is_layer_to_capture = False
