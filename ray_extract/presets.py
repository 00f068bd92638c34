"""What each trainer reads: which states, in whose numbering of layers, before or after the final norm.

One table, used when a job is resolved (`capture.preset`) and when a run is exported. Sources: SpecForge 0.2.0
(`algorithms/*/providers.py` for the tensors, `algorithms/model_providers.py` for the layer ids and their defaults),
speculators 0.9.0 (`train/data.py` for the tensors, `models/utils.py` for the default ids, `models/*/config.py` for the
names in a draft's config).
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ray_extract.capture.boundaries import Numbering, resolve_boundaries, to_boundary
from ray_extract.config import CaptureConfig
from ray_extract.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What one way of training reads.

    Args:
        trainer, strategy: their names there; joined by a hyphen, the name of the preset.
        numbering: of the layer ids in its drafts' configs.
        count: how many boundaries it concatenates, or None for any number.
        last: the state after the last layer that it wants besides: `after` the final norm (`state.final`), `before` it
            (`state.<N>`), or none.
        ids: where in a draft's config the layer ids are; the first path that exists counts.
        default: boundaries for N layers when no draft config is given, or None if the trainer has no default.
        pairs: it refuses rows without two neighbouring supervised tokens.
        unused: the token of each row whose loss mask it ignores.
    """

    trainer: str
    strategy: str
    numbering: Numbering
    count: int | None
    last: Literal["after", "before"] | None
    ids: tuple[tuple[str, ...], ...]
    default: Callable[[int], tuple[int, ...]] | None
    pairs: bool
    unused: Literal["first", "last"] | None

    @property
    def name(self) -> str:
        """Name of the preset."""
        return f"{self.trainer}-{self.strategy}"

    def last_state(self, num_layers: int) -> str | None:
        """Name of the stored state that is the last one, or None."""
        match self.last:
            case "after":
                return "state.final"
            case "before":
                return f"state.{num_layers}"
        return None


def _three(num_layers: int) -> tuple[int, ...]:
    return resolve_boundaries("eagle3", num_layers)


_EAGLE_IDS = (("eagle_config", "eagle_aux_hidden_state_layer_ids"),)
_DFLASH_IDS = (("dflash_config", "target_layer_ids"),)
_SPECULATORS_IDS = (("eagle_aux_hidden_state_layer_ids",), ("aux_hidden_state_layer_ids",), ("target_layer_ids",))

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("specforge", "eagle3", Numbering.SPECFORGE, 3, "after", _EAGLE_IDS, _three, False, "last"),
        # A DFlash draft that SpecForge derives from the target has one layer and reads the output of layer N//2.
        Target("specforge", "dflash", Numbering.DFLASH, None, None, _DFLASH_IDS, lambda n: (n // 2 + 1,), True, None),
        Target("specforge", "dspark", Numbering.DFLASH, None, "after", _DFLASH_IDS, None, True, None),
        Target("speculators", "eagle3", Numbering.VLLM, 3, "before", _SPECULATORS_IDS, _three, False, "first"),
        Target("speculators", "dflash", Numbering.VLLM, None, "before", _SPECULATORS_IDS, _three, False, None),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft model's config.json, as far as states are concerned.

    Args:
        path: the file.
        tree: its content.
    """

    path: str
    tree: Mapping[str, Any]

    @classmethod
    def read(cls, path: str) -> "DraftConfig":
        """Read a file, or the config.json in a folder.

        Raises:
            ConfigError: it cannot be read, or is not a JSON object.
        """
        file = Path(path).expanduser()
        if file.is_dir():
            file = file / "config.json"
        try:
            tree = json.loads(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"draft config {path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ConfigError(f"draft config {path}: not valid JSON ({error})") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"draft config {path}: not a JSON object")
        return cls(str(path), tree)

    def boundaries(self, target: Target, num_layers: int) -> tuple[int, ...]:
        """The boundaries that its layer ids mean, in its order.

        Raises:
            ConfigError: it has no layer ids for this target, or they cannot be meant.
        """
        for keys in target.ids:
            found: Any = self.tree
            for key in keys:
                found = found.get(key) if isinstance(found, dict) else None
            if found is not None:
                break
        else:
            raise ConfigError(
                f"draft config {self.path}: no {' or '.join('.'.join(keys) for keys in target.ids)} in it, where a "
                f"draft of {target.name} has its layer ids"
            )
        name = ".".join(keys)
        if not isinstance(found, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
            raise ConfigError(f"draft config {self.path}: {name} = {found!r}: must be a list of layer ids")
        try:
            bounds = tuple(to_boundary(i, target.numbering, num_layers) for i in found)
            check_boundaries(bounds, target, num_layers)
        except ConfigError as error:
            raise ConfigError(f"draft config {self.path}: {name} = {found}: {error}") from None
        return bounds

    def number(self, name: str) -> int | None:
        """A positive whole number of it, or None if it has none of this name."""
        found = self.tree.get(name)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def check_boundaries(bounds: Sequence[int], target: Target, num_layers: int) -> None:
    """Raises ConfigError unless a target can read these boundaries of a model with N layers."""
    if target.count is not None and len(bounds) != target.count:
        raise ConfigError(f"{target.name} reads {target.count} boundaries, not the {len(bounds)} of {list(bounds)}")
    if not bounds or len(set(bounds)) != len(bounds):
        raise ConfigError(f"{target.name} reads different boundaries, at least one, not {list(bounds)}")
    for b in bounds:
        if not 1 <= b <= num_layers:
            raise ConfigError(f"boundary {b} is outside 1..{num_layers}, what can be captured")


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What a job must capture for a target.

    Args:
        boundaries: ascending, with N if the target wants the state before the final norm.
        final: whether `state.final` is needed.
    """

    boundaries: tuple[int, ...]
    final: bool

    def __str__(self) -> str:
        return f"capture: {{boundaries: {list(self.boundaries)}, final: {str(self.final).lower()}, keep: all}}"


def needs(target: Target, num_layers: int, bounds: Sequence[int]) -> Needs:
    """What must be captured so that a target can read `bounds`, and its last state."""
    wanted = {*bounds, *([num_layers] if target.last == "before" else [])}
    return Needs(tuple(sorted(wanted)), target.last == "after")


def default_boundaries(target: Target, num_layers: int) -> tuple[int, ...]:
    """What the trainer reads if its draft's config does not say.

    Raises:
        ConfigError: the trainer wants its draft's config to say, or the model is too small for the default.
    """
    if target.default is None:
        raise ConfigError(
            f"{target.name}: this trainer has no default layers; give the draft's config (capture.draft_config of a "
            "job, --draft-config)"
        )
    bounds = target.default(num_layers)
    check_boundaries(bounds, target, num_layers)
    return bounds


def apply_preset(capture: CaptureConfig, num_layers: int) -> CaptureConfig:
    """A capture section with its preset carried out: boundaries, final and keep are what the preset needs, or more.

    Args:
        capture: the section as read, so that it knows which of its fields were set.
        num_layers: N of the model.

    Raises:
        ConfigError: no such preset; a field that was set leaves out what the preset needs; or the draft's config does
            not fit.
    """
    if capture.preset is None:
        if capture.draft_config is not None:
            raise ConfigError(
                f"capture.draft_config = {capture.draft_config!r}: is read for a preset; set capture.preset to one of "
                f"{', '.join(TARGETS)}"
            )
        return capture
    target = TARGETS.get(capture.preset)
    if target is None:
        raise ConfigError(f"capture.preset = {capture.preset!r}: no such preset; known: {', '.join(TARGETS)}")
    if capture.draft_config is None:
        bounds = default_boundaries(target, num_layers)
    else:
        bounds = DraftConfig.read(capture.draft_config).boundaries(target, num_layers)
    need = needs(target, num_layers, bounds)
    asked = capture.model_fields_set

    def against(field: str, value: object, what: str) -> ConfigError:
        return ConfigError(
            f"capture.{field} = {value} contradicts capture.preset = {target.name}, which needs {what}; "
            "remove one of the two"
        )

    resolved: dict[str, Any] = {"boundaries": need.boundaries, "final": need.final, "keep": "all"}
    if "boundaries" in asked:
        given = capture.boundaries
        listed = resolve_boundaries(given, num_layers)
        if not set(need.boundaries) <= set(listed):
            raise against("boundaries", given if given == "eagle3" else list(listed), str(list(need.boundaries)))
        resolved["boundaries"] = listed
    if "final" in asked:
        if need.final and not capture.final:
            raise against("final", "false", "the final state")
        resolved["final"] = capture.final
    if "keep" in asked and capture.keep != "all":
        raise against("keep", capture.keep, "the states of every token")
    return capture.model_copy(update=resolved)
