"""Single tensors of a Hugging Face checkpoint: found by their names, and read without loading the others.

Wrappers put a prefix before the names of their text model (`language_model.`), and DeepSeek's checkpoints hold a second
embedding inside a layer, so names are matched by how they end and by what is around them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ray_extract.errors import ConfigError
from ray_extract.tensors import Place, parse_header

PLAIN = ("BF16", "F16", "F32")
"""Types of weights that are stored as what they are."""

INDEX = "model.safetensors.index.json"
_BLOCK = 8 << 20


class NotPlain(Exception):  # noqa: N818 - it reads as what is the case
    """The checkpoint does not hold what is looked for as plain tensors; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in one of a checkpoint's files."""

    path: Path
    place: Place

    def blocks(self) -> Iterator[bytes]:
        """Its bytes, in blocks of at most 8 MiB.

        Raises:
            ConfigError: the file ends before the tensor does, or cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.place.offset)
                left = self.place.nbytes
                while left:
                    block = file.read(min(left, _BLOCK))
                    if not block:
                        raise ConfigError(
                            f"model.path: {self.path}: ends within {self.place.name}; finish the download"
                        )
                    left -= len(block)
                    yield block
        except OSError as error:
            raise ConfigError(f"model.path: {self.path}: cannot be read ({error.strerror})") from None


@dataclasses.dataclass(frozen=True, slots=True)
class HeadTensors:
    """What is before and behind the layers.

    Args:
        lm_head: [V, H].
        embed_tokens: [V, H]; the same tensor as lm_head where the checkpoint stores only one.
        norm: [H], the final norm's weight.
    """

    lm_head: StoredTensor
    embed_tokens: StoredTensor
    norm: StoredTensor

    @property
    def tied(self) -> bool:
        """Whether LM head and embedding are one tensor."""
        return self.lm_head == self.embed_tokens


def find_lm_head(folder: Path) -> StoredTensor:
    """The LM head's weight [V, H]; the embedding, where the two are tied and only that one is stored.

    Raises:
        NotPlain: it is not there, quantized, or not all of the head.
        ConfigError: a file is missing or damaged.
    """
    files = tensor_files(folder)
    return _open(files, _lm_head_name(files))


def find_head(folder: Path) -> HeadTensors:
    """LM head, embedding and final norm.

    Raises:
        NotPlain: one of them is not there, quantized, or has a bias; or the three do not fit each other.
        ConfigError: a file is missing or damaged.
    """
    files = tensor_files(folder)
    found = HeadTensors(*(_open(files, name) for name in _head_names(files)))
    shapes = [t.place.shape for t in (found.lm_head, found.embed_tokens, found.norm)]
    if len(shapes[0]) != 2 or shapes[1] != shapes[0] or shapes[2] != shapes[0][1:]:
        raise NotPlain(f"the shapes of its LM head, embedding and final norm are {', '.join(map(str, shapes))}")
    return found


def head_files(folder: Path) -> set[str] | None:
    """Names of the files that hold the head, by the index alone, so before they are there; None without an index.

    Raises:
        NotPlain: as find_head.
        ConfigError: the index is damaged.
    """
    if not (folder / INDEX).exists():
        return None
    files = tensor_files(folder)
    return {files[name].name for name in _head_names(files)}


def _head_names(files: Mapping[str, Path]) -> tuple[str, str, str]:
    """Names of LM head, embedding and final norm."""
    embed = _embedding_name(files)
    if embed is None:
        raise NotPlain("it has no embed_tokens.weight")
    norm = f"{embed.removesuffix('embed_tokens.weight')}norm.weight"
    if norm not in files:
        raise NotPlain(f"it has no {norm}")
    if norm.replace(".weight", ".bias") in files:
        raise NotPlain(f"its {norm} has a bias beside it")
    return _lm_head_name(files), embed, norm


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by name; empty without safetensors files.

    Raises:
        ConfigError: a file is damaged.
    """
    try:
        tree = json.loads((folder / INDEX).read_bytes())
        return {name: folder / file for name, file in tree["weight_map"].items()}
    except FileNotFoundError:
        return {name: path for path in sorted(folder.glob("*.safetensors")) for name in _header(path)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"model.path: {folder / INDEX}: not readable; finish the download") from None


def _lm_head_name(files: Mapping[str, Path]) -> str:
    parts = [name for name in files if "lm_head" in name.split(".")[:-1]]
    heads = [name for name in parts if name.endswith("lm_head.weight")]
    if not parts:
        embed = _embedding_name(files)
        if embed is None:
            raise NotPlain("it has neither lm_head.weight nor embed_tokens.weight")
        return embed
    if len(parts) != 1 or len(heads) != 1:
        raise NotPlain(f"its LM head is stored as {', '.join(sorted(parts))}")
    return heads[0]


def _embedding_name(files: Mapping[str, Path]) -> str | None:
    """The text model's; those inside layers are of what predicts several tokens (DeepSeek's MTP)."""
    found = [
        name
        for name in files
        if (name == "embed_tokens.weight" or name.endswith(".embed_tokens.weight")) and "layers" not in name.split(".")
    ]
    if len(found) > 1:
        raise NotPlain(f"it has {len(found)} embeddings: {', '.join(sorted(found))}")
    return found[0] if found else None


def _open(files: Mapping[str, Path], name: str) -> StoredTensor:
    path = files[name]
    place = _header(path).get(name)
    if place is None:
        raise ConfigError(f"model.path: {path}: lacks {name}, which the index says it has; finish the download")
    if place.dtype not in PLAIN:
        raise NotPlain(f"its {name} is stored as {place.dtype}")
    return StoredTensor(path, place)


def _header(path: Path) -> dict[str, Place]:
    try:
        with path.open("rb") as file:

            def read(start: int, length: int) -> bytes:
                file.seek(start)
                return file.read(length)

            return parse_header(read, path.stat().st_size).tensors
    except OSError as error:
        raise ConfigError(f"model.path: {path}: cannot be read ({error.strerror}); finish the download") from None
    except ValueError as error:
        raise ConfigError(f"model.path: {path}: {error}; fetch it again") from None
