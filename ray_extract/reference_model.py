"""A checkpoint in Hugging Face Transformers, the reference for states: whole, or only as far as some layer.

A model that is too large to load can still be checked as far as a boundary. What lies below it is loaded from the
checkpoint's safetensors files, tensor by tensor, and nothing else is read or allocated.
"""

import contextlib
import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from ray_extract.errors import ConfigError
from ray_extract.model import TEXT_CONFIGS
from ray_extract.plan import show_bytes

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_PACKED, _SCALE, _SHAPE = "weight_packed", "weight_scale", "weight_shape"


def load_whole(model_path: str, dtype: torch.dtype) -> Any:
    """The whole model."""
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(model_path)
        if getattr(config, "quantization_config", None) is None:  # else its size is the quantizer's business
            with torch.device("meta"):
                empty = transformers.AutoModelForCausalLM.from_config(config)
            _check_room(empty, dtype, f"{model_path}: the model", way_out(None))
        return transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).to(_device()).eval()
    except ConfigError:
        raise
    except Exception as error:  # Transformers, its quantizers and its configurations raise whatever they like
        if out_of_memory(error):
            raise
        raise ConfigError(f"--recompute: {model_path}: Transformers cannot load it: {error}") from None


def load_below(model_path: str, layers: int, dtype: torch.dtype) -> Any:
    """The text model's embeddings and first layers, whose last hidden state is what enters layer `layers`.

    Transformers loads it as it loads a whole one, so it also converts the checkpoint's names and fuses its experts. But
    the class is cut, and the state dict holds a reader for each tensor that the cut class needs.
    """
    transformers = _transformers()
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ConfigError(
            f"--boundary needs Transformers 5, and this is {transformers.__version__}; install a newer one"
        )
    folder = Path(model_path).expanduser()
    tree = _config_tree(folder)
    text: dict[str, Any] = next((tree[name] for name in TEXT_CONFIGS if isinstance(tree.get(name), dict)), tree)
    packed = _is_packed(text.get("quantization_config") or tree.get("quantization_config"), folder)
    try:
        config, base = _text_class(transformers, text)
        cut = _cut(base, layers)
        with torch.device("meta"):
            empty = cut(config)
    except ConfigError as error:
        raise ConfigError(f"--recompute: {folder}: {error}") from None
    except Exception as error:  # as in _load
        raise ConfigError(f"--recompute: {folder}: Transformers cannot build its text model: {error}") from None
    _check_room(empty, dtype, f"{folder}: what is below boundary {layers}", way_out(layers))
    weights = _Weights(folder)
    prefix = _text_prefix(weights.names, folder)
    parts = {name for name, _ in empty.named_children()} - {"norm"}
    wanted = [name for name in weights.names if name.startswith(prefix) and _wanted(name[len(prefix) :], parts, layers)]
    weights.open(wanted)
    if absent := _absent_experts(wanted):
        raise ConfigError(f"--recompute: {folder}: {absent[0]} is not in the checkpoint; finish the download")
    state = {
        f"{base.base_model_prefix}.{name[len(prefix) :]}": tensor for name, tensor in _tensors(weights, wanted, packed)
    }
    try:
        with _quiet():  # what does not match is in `info`
            model, info = cut.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # as in _load
        if out_of_memory(error):
            raise
        raise ConfigError(f"--recompute: {folder}: Transformers cannot load it: {first_line(error)}") from None
    _check_loaded(model, info, folder, layers)
    return model.to(_device()).eval()


def _cut(base: Any, layers: int) -> Any:
    """A model class of Transformers with its first layers only, and nothing after them.

    The configuration stays as it is: a smaller `num_hidden_layers` would not agree with the fields that have an entry
    for each layer, and changes models that compute with it.
    """

    def start(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        found = getattr(self, "layers", None)
        if not isinstance(found, torch.nn.ModuleList) or not hasattr(self, "norm") or not hasattr(self, "embed_tokens"):
            raise ConfigError(
                f"--boundary knows models made of embed_tokens, layers and norm, and {base.__name__} is not; "
                "recompute without it"
            )
        if layers > len(found):
            raise ConfigError(f"boundary {layers}: this checkpoint has {len(found)} layers, so it is another model")
        self.layers = found[:layers]
        self.norm = torch.nn.Identity()

    # Transformers looks some conversions of weights up by the class's name.
    return type(base.__name__, (base,), {"__init__": start})


def _text_class(transformers: Any, text: dict[str, Any]) -> tuple[Any, Any]:
    """Configuration, and class of the inner model, of a text model's part of config.json."""
    kind, architectures = text.get("model_type"), text.get("architectures") or [None]
    if kind in transformers.CONFIG_MAPPING:
        config_class = transformers.CONFIG_MAPPING[kind]
    else:  # such as Kimi's kimi_k2, which is DeepSeek's class under another name
        model_class = getattr(transformers, str(architectures[0]), None)
        if model_class is None:
            raise ConfigError(
                f"Transformers {transformers.__version__} knows neither model_type = {kind!r} nor the architecture "
                f"{architectures[0]!r} in its config.json; install a newer one"
            )
        config_class = model_class.config_class
    dropped = ("model_type", "architectures", "auto_map", "quantization_config")  # the class says, or it is done here
    config = config_class.from_dict({name: value for name, value in text.items() if name not in dropped})
    base = transformers.MODEL_MAPPING[config_class]
    return config, base[0] if isinstance(base, tuple) else base


def _config_tree(folder: Path) -> dict[str, Any]:
    try:
        tree = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--recompute: {folder}: config.json cannot be read ({error.strerror}); give a checkpoint's local folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--recompute: {folder}: config.json is not valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--recompute: {folder}: config.json is not a JSON object")
    return tree


def _is_packed(quantization: Any, folder: Path) -> bool:
    """Whether weights are packed integers, which times their scales are exact in fp32; False if they are plain.

    Other methods round activations too, or cannot be read as the numbers that the engine computed with. Against a
    reference of fp32 they would always be too far off.

    Raises:
        ConfigError: quantized in another way.
    """
    if quantization is None:
        return False
    method, shape = quantization.get("quant_method"), quantization.get("format")
    groups = list((quantization.get("config_groups") or {}).values())
    known = method == "compressed-tensors" and shape == "pack-quantized" and bool(groups)
    for group in groups:
        weights = group.get("weights") or {}
        plain = weights.get("type", "int") == "int" and weights.get("symmetric", True) and not weights.get("actorder")
        known = known and plain and weights.get("num_bits") in (4, 8) and not group.get("input_activations")
    if not known:
        raise ConfigError(
            f"--recompute: {folder}: quantized by {method} (format {shape}), which --boundary cannot turn into fp32; "
            "it can plain weights, and compressed-tensors' symmetric pack-quantized ones of 4 or 8 bits "
            "without quantized activations"
        )
    return True


class _Weights:
    """The tensors of a checkpoint's safetensors files.

    Args:
        folder: the checkpoint.

    Raises:
        ConfigError: no safetensors files, or a damaged index.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        single, index = "model.safetensors", folder / "model.safetensors.index.json"
        if (folder / single).exists():
            self._file = dict.fromkeys(self._keys(single), single)
        else:
            try:
                self._file = dict(json.loads(index.read_bytes())["weight_map"])
            except FileNotFoundError:
                raise ConfigError(
                    f"--recompute: {folder}: neither {single} nor {index.name} in it; --boundary reads safetensors only"
                ) from None
            except (OSError, ValueError, KeyError, TypeError):
                raise ConfigError(f"--recompute: {folder}: {index.name} is not readable; finish the download") from None

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._file.keys()

    def open(self, names: Iterable[str]) -> None:
        """Open the files of these tensors, and no others.

        Raises:
            ConfigError: a file is missing or damaged, or lacks a tensor.
        """
        for name in names:
            if name not in self._keys(self._file[name], name):
                raise ConfigError(
                    f"--recompute: {self._folder}: {self._file[name]} lacks {name}, which the index says it has; "
                    "finish the download"
                )

    def read(self, name: str) -> torch.Tensor:
        """A tensor of an open file, as stored."""
        file, _ = self._open[self._file[name]]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _keys(self, key: str, needed: str = "") -> set[str]:
        if key not in self._open:
            try:
                file: Any = safe_open(self._folder / key, framework="pt")
            except FileNotFoundError:
                raise ConfigError(
                    f"--recompute: {self._folder}: {key} is missing, and {needed} in it is needed; finish the download"
                ) from None
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"--recompute: {self._folder}: {key} is damaged ({error}); fetch it again") from None
            self._open[key] = file, set(file.keys())
        keys: set[str] = self._open[key][1]
        return keys


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that Transformers reads when its turn comes, as it does in files that it opens itself."""

    weights: _Weights
    name: str

    def __getitem__(self, where: Any) -> torch.Tensor:
        return self.weights.read(self.name)[where]


@dataclasses.dataclass(frozen=True, slots=True)
class _PackedTensor:
    """The same of a packed weight, f32 [out, in]; `name` is without its last part."""

    weights: _Weights
    name: str

    def __getitem__(self, where: Any) -> torch.Tensor:
        packed, scale, shape = (self.weights.read(f"{self.name}.{part}") for part in (_PACKED, _SCALE, _SHAPE))
        return unpacked(packed, scale, int(shape[1]))[where]


def unpacked(packed: torch.Tensor, scale: torch.Tensor, width: int) -> torch.Tensor:
    """Weights of compressed-tensors' symmetric `pack-quantized` format, f32 [out, width].

    Args:
        packed: i32 [out, words], `words` times 32 bits for `width` integers, from the low bits up, with an offset.
        scale: [out, groups] of equal width, or [out, 1].
        width: of the weight, 32 // bits integers a word.
    """
    bits = 4 if width > packed.shape[1] * 4 else 8
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    values = values.flatten(1)[:, :width] - (1 << (bits - 1))
    return values.float() * scale.float().repeat_interleave(width // scale.shape[1], dim=1)


def _tensors(weights: _Weights, names: Sequence[str], packed: bool) -> Iterator[tuple[str, _Tensor | _PackedTensor]]:
    """Names as they would be without packing, and what reads each."""
    stems = {name.removesuffix(f".{_PACKED}") for name in names if packed and name.endswith(f".{_PACKED}")}
    for name in names:
        stem, _, part = name.rpartition(".")
        if stem not in stems:
            yield name, _Tensor(weights, name)
        elif part == _PACKED:
            if lacking := {f"{stem}.{_SCALE}", f"{stem}.{_SHAPE}"} - {*names}:
                raise ConfigError(f"--recompute: {name} is in the checkpoint, but not {min(lacking)}; fetch it again")
            yield f"{stem}.weight", _PackedTensor(weights, stem)


def _text_prefix(names: Iterable[str], folder: Path) -> str:
    """What the names of the text model's tensors begin with, such as `model.` or `language_model.model.`."""
    known = set(names)
    inside = {name[: match.start()] for name in known if (match := re.search(r"\blayers\.0\.", name))}
    found = sorted(prefix for prefix in inside if f"{prefix}embed_tokens.weight" in known)
    if len(found) != 1:
        raise ConfigError(
            f"--recompute: {folder}: its tensors are not those of one text model: embed_tokens beside layers.0 is "
            f"under {', '.join(map(repr, found)) or 'no name'}; recompute without --boundary"
        )
    return found[0]


def _wanted(name: str, parts: set[str], layers: int) -> bool:
    """Whether a cut model with these children has this tensor of its text model."""
    layer = _LAYER.match(name)
    return int(layer[1]) < layers if layer else name.partition(".")[0] in parts


def _absent_experts(names: Iterable[str]) -> list[str]:
    """Tensors that one expert of a layer has and another lacks, so that they cannot be fused."""
    found: dict[str, set[tuple[int, str]]] = {}
    for name in names:
        if match := _EXPERT.match(name):
            found.setdefault(match[1], set()).add((int(match[2]), match[3]))
    return sorted(
        f"{stem}{i}{part}"
        for stem, have in found.items()
        for i in range(max(i for i, _ in have) + 1)
        for part in {part for _, part in have}
        if (i, part) not in have
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' table of tensors that do not match, and its tracebacks."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_loaded(model: Any, info: Mapping[str, Any], folder: Path, layers: int) -> None:
    """Transformers fills what it did not find, or found in another shape, with random numbers."""
    empty = {name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta}
    lacking = sorted({*info["missing_keys"], *empty})
    other = sorted(name if isinstance(name, str) else name[0] for name in info["mismatched_keys"])
    for names, what in ((lacking, "not in the checkpoint"), (other, "of another shape in the checkpoint")):
        if names:
            raise ConfigError(
                f"--recompute: {folder}: {len(names)} tensors that boundary {layers} needs are {what}, such as "
                f"{names[0]}; finish the download, or give the checkpoint that the run used"
            )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"--recompute needs Hugging Face Transformers, which does not load: {error}") from None
    return transformers


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_room(empty: Any, dtype: torch.dtype, what: str, way_out: str) -> None:
    """Refuse what cannot fit: the kernel would kill the process after minutes of loading, without a word."""
    nbytes = sum(parameter.numel() for parameter in empty.parameters()) * dtype.itemsize
    for place, free in _free_memory():
        if nbytes > free:
            raise ConfigError(
                f"--recompute: {what} takes {show_bytes(nbytes)} in {dtype_name(dtype)}, "
                f"and {show_bytes(free)} of {place} memory are free; {way_out}"
            )


def _free_memory() -> Iterator[tuple[str, int]]:
    """Bytes that a model may take of each memory that it passes."""
    host = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no cgroup of version 2, or the word "max"
        host = min(host, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    yield "host", host
    if torch.cuda.is_available():
        yield "GPU", torch.cuda.mem_get_info()[0]


def out_of_memory(error: BaseException) -> bool:
    # PyTorch's CPU allocator raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def way_out(layers: int | None) -> str:
    if layers is None:
        return "name a --boundary B of the run: then only the embeddings and layers 0 .. B-1 are loaded"
    return "take a lower --boundary, or a machine with more memory"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
