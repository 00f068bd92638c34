"""What a run must know about the target model, read from its folder without loading it."""

import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_extract.checkpoint import INDEX
from ray_extract.config import ModelConfig
from ray_extract.errors import ConfigError
from ray_extract.staging import WEIGHTS, RemoteCheckpoint, is_url, stage, stage_files

SAMPLE_BYTES = 64 << 10

HUB_NAME = re.compile(r"^\w[\w.-]*(/\w[\w.-]*)?$")
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Sections of a multimodal config.json that hold the language model."""
_DTYPES = ("bfloat16", "float16", "float32")
_MAX_HEADER = 100_000_000  # the safetensors library's own limit


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The target model, as far as planning and storage are concerned.

    Args:
        path: the local folder; of a URL, one with all files but the weights.
        architecture: first entry of `architectures`, such as `LlamaForCausalLM`.
        model_type: such as `llama`.
        num_layers: decoder layers, so boundaries are 0 .. num_layers.
        hidden: width of the residual stream, in elements.
        dtype: torch name of weights, activations and stored states: `bfloat16`, `float16` or `float32`. The engine must
            be given this one by name: SGLang's own `auto` turns a float32 checkpoint into float16.
        context_length: positions, as config.json says; engines may stretch it by RoPE scaling.
        vocab_size: token ids are 0 .. vocab_size - 1.
        fingerprint: sha256 hex of the content, see describe_model.
        weight_bytes: size of the files that an engine reads; 0 for random weights.
    """

    path: str
    architecture: str
    model_type: str
    num_layers: int
    hidden: int
    dtype: str
    context_length: int
    vocab_size: int
    fingerprint: str
    weight_bytes: int = 0


class _Folder:
    """A checkpoint's files as of staging.RemoteCheckpoint; what is wrong is an OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*"))

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def read(self, name: str, start: int, length: int) -> bytes:
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read(length)


_Files = RemoteCheckpoint | _Folder


def describe_model(cfg: ModelConfig) -> ModelShape:
    """Read a checkpoint's config.json and fingerprint its weights.

    The fingerprint covers config.json and, unless `load_format` is `dummy`, for each `*.safetensors` file its name,
    size, header, and 64 KiB at the start, middle and end of its body. Hashing all of 600 GB would take the better part
    of an hour. So a change of weights that keeps every name, shape and size and touches none of the samples is missed;
    a fine-tuned, requantized or differently sharded model is not. Tokenizer files do not count (the token ids are part
    of the run's identity), nor does the path.

    Raises:
        ConfigError: no such folder, an unreadable config.json, a field or a weight file missing.
        StoreError: the store of a URL failed for too long.
    """
    files: _Files = RemoteCheckpoint(cfg) if is_url(cfg.path) else _Folder(_resolve(cfg))
    raw = _read_config(files, cfg)
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.path = {cfg.path!r}: config.json is not valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"model.path = {cfg.path!r}: config.json is not a JSON object")
    fields = _Fields(tree, cfg.path)
    digest = hashlib.sha256(len(raw).to_bytes(8, "little") + raw)
    weight_bytes = 0
    if cfg.load_format != "dummy":
        for part in _weight_samples(files, cfg):
            digest.update(part)
        weight_bytes = sum(files.size(name) for name in files.names() if name.endswith(WEIGHTS))
    fingerprint = digest.hexdigest()
    if isinstance(files, RemoteCheckpoint):
        # The tokenizer among them; of the weights a driver needs no more than the head, see head.write_head.
        folder = stage_files(files, [name for name in files.names() if not name.endswith(WEIGHTS)], cfg, fingerprint)
    else:
        folder = files.folder
    return ModelShape(
        path=str(folder),
        architecture=fields.architecture(),
        model_type=fields.text("model_type"),
        num_layers=fields.number("num_hidden_layers", "n_layer", "num_layers"),
        hidden=fields.number("hidden_size", "n_embd", "d_model"),
        dtype=fields.dtype() if cfg.dtype == "auto" else cfg.dtype,
        context_length=fields.number("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
        vocab_size=fields.number("vocab_size"),
        fingerprint=fingerprint,
        weight_bytes=weight_bytes,
    )


def stage_model(cfg: ModelConfig, fingerprint: str, stopping: threading.Event) -> Path:
    """Copy the checkpoint at a URL to this node, or find it there; see staging.stage.

    Args:
        cfg: names it.
        fingerprint: of describe_model.
        stopping: gives up.
    """

    def compare(folder: Path) -> bool:
        return describe_model(cfg.model_copy(update={"path": str(folder)})).fingerprint == fingerprint

    return stage(cfg, fingerprint, compare, stopping)


class _Fields:
    """Fields of a config.json; a multimodal model keeps those of its language model in a nested section."""

    def __init__(self, tree: dict[str, Any], path: str) -> None:
        nested: dict[str, Any] = next((tree[name] for name in TEXT_CONFIGS if isinstance(tree.get(name), dict)), {})
        self._merged = {**tree, **{k: v for k, v in nested.items() if v is not None}}
        self._top = tree
        self._path = path

    def _wrong(self, name: str, found: object, wanted: str) -> ConfigError:
        what = "is missing" if found is None else f"is {found!r}"
        return ConfigError(f"model.path = {self._path!r}: {name} in config.json {what}; {wanted}")

    def architecture(self) -> str:
        # The top level names the class that an engine loads; a nested section may name its inner part.
        found = self._top.get("architectures") or self._merged.get("architectures")
        if isinstance(found, list) and found and isinstance(found[0], str):
            return found[0]
        raise self._wrong("architectures", found, "it must list the model's class")

    def text(self, name: str) -> str:
        found = self._top.get(name)
        if isinstance(found, str) and found:
            return found
        raise self._wrong(name, found, "it must be a name")

    def number(self, *names: str) -> int:
        found = next((self._merged[name] for name in names if self._merged.get(name) is not None), None)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
        raise self._wrong(" or ".join(names), found, "it must be a positive whole number")

    def dtype(self) -> str:
        found = self._merged.get("torch_dtype") or self._merged.get("dtype")
        name = found.removeprefix("torch.") if isinstance(found, str) else None
        if name in _DTYPES:
            return name
        raise self._wrong("torch_dtype (or dtype)", found, f"set model.dtype to one of {', '.join(_DTYPES)}")


def _resolve(cfg: ModelConfig) -> Path:
    folder = Path(cfg.path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise ConfigError(f"model.path = {cfg.path!r}: a file; give the folder that holds config.json")
    if not HUB_NAME.match(cfg.path):
        raise ConfigError(f"model.path = {cfg.path!r}: no such folder; give the folder that holds config.json")
    return _download(cfg)


def _download(cfg: ModelConfig) -> Path:
    patterns = ["config.json"]
    if cfg.load_format != "dummy":
        patterns += ["*.safetensors", "*.safetensors.index.json"]
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"model.path = {cfg.path!r}: no such folder, and hub names need the package huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(cfg.path, allow_patterns=patterns))
    except Exception as error:  # the hub's family mixes its own errors with those of two HTTP libraries
        first = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"model.path = {cfg.path!r}: no such folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {first}); give a local folder, or check the name, the network and HF_TOKEN"
        ) from None


def _read_config(files: _Files, cfg: ModelConfig) -> bytes:
    try:
        return files.read("config.json", 0, files.size("config.json"))
    except (FileNotFoundError, KeyError):
        raise ConfigError(
            f"model.path = {cfg.path!r}: no config.json in it; give the folder of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise ConfigError(f"model.path = {cfg.path!r}: config.json cannot be read ({error.strerror})") from None


def _weight_samples(files: _Files, cfg: ModelConfig) -> Iterator[bytes]:
    names = [name for name in files.names() if name.endswith(WEIGHTS)]
    if not names:
        raise ConfigError(
            f"model.path = {cfg.path!r}: no *.safetensors file in it; convert the weights, "
            "or set model.load_format = dummy to measure speed with random ones"
        )
    missing = sorted(_indexed_files(files, cfg) - set(names))
    if missing:
        raise ConfigError(
            f"model.path = {cfg.path!r}: {len(missing)} weight file(s) of its index are missing, such as {missing[0]}; "
            "finish the download"
        )
    for name in names:
        try:
            yield from _file_samples(files, name, cfg)
        except OSError as error:
            raise ConfigError(f"model.path = {cfg.path!r}: {name} cannot be read ({error.strerror})") from None


def _indexed_files(files: _Files, cfg: ModelConfig) -> set[str]:
    if INDEX not in files.names():
        return set()
    try:
        return set(json.loads(files.read(INDEX, 0, files.size(INDEX)))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"model.path = {cfg.path!r}: {INDEX} is not readable; finish the download") from None


def _file_samples(files: _Files, name: str, cfg: ModelConfig) -> Iterator[bytes]:
    """Name, size, header and three samples of a safetensors file, each of self-evident or given length."""
    size = files.size(name)
    prefix = files.read(name, 0, min(8, size))
    length = int.from_bytes(prefix, "little")
    body = 8 + length
    if len(prefix) < 8 or length > _MAX_HEADER or body > size:
        raise ConfigError(
            f"model.path = {cfg.path!r}: {name} is not a whole safetensors file "
            "(an unfinished download, or a Git LFS pointer?)"
        )
    encoded = name.encode()
    yield len(encoded).to_bytes(8, "little") + encoded + size.to_bytes(8, "little") + prefix
    yield files.read(name, 8, length)
    last = max(body, size - SAMPLE_BYTES)
    for at in (body, max(body, (body + size - SAMPLE_BYTES) // 2), last):
        yield files.read(name, at, min(SAMPLE_BYTES, size - at))
