"""Input files as a stream of records, local or behind any fsspec URL; see formats.py for what is in them.

A record that cannot be parsed is a record with a reason. A file that is damaged is an error, or ends with a record that
says so (`dataset.damaged`); one that cannot be read is an error.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import posixpath
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import fsspec
import pyarrow as pa

from ray_extract.config import DatasetConfig
from ray_extract.dataset.formats import (
    CHUNK_BYTES,
    Damaged,
    Parsed,
    chunks_of,
    read_arrow,
    read_json,
    read_lines,
    read_parquet,
)
from ray_extract.errors import DatasetError
from ray_extract.store import scrub, secrets_of

_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


@dataclasses.dataclass(frozen=True, slots=True)
class SourceRecord:
    """One record of the input.

    Args:
        source: `<file name>:<number of the record in the file, from 1>`; blank lines do not count. Where several files
            have this name, their folders are in front of it.
        value: the record, or None if it cannot be parsed. Lists of numbers from Parquet and Arrow are NumPy arrays.
        reason: why value is None.
    """

    source: str
    value: dict[str, Any] | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    fs: Any
    path: str
    format: str
    codec: str | None
    name: str = ""

    def open(self) -> Any:
        return self.fs.open(self.path, "rb")


def read_records(cfg: DatasetConfig) -> Iterator[SourceRecord]:
    """Stream the records of all files, in order, `limit` of them at most.

    Raises:
        DatasetError: a path matches no file, has an unknown ending, or cannot be read.
    """
    return itertools.islice(_all_records(cfg), cfg.limit)


def source_fingerprint(cfg: DatasetConfig) -> list[dict[str, Any]]:
    """`{"size": bytes, "sha256": hex}` of each input file as stored, in order.

    Names and places do not count, so a moved copy is the same input. Reads every byte, in bounded memory.

    Raises:
        DatasetError: as read_records.
    """
    return [_hash_file(file, cfg) for file in _find_files(cfg)]


def _all_records(cfg: DatasetConfig) -> Iterator[SourceRecord]:
    for file in _find_files(cfg):
        number = 0
        try:
            for value, reason in _read(file, cfg):
                number += 1
                yield SourceRecord(f"{file.name}:{number}", value, reason)
        except Damaged as damage:
            where = f"at {damage.place}, after record {number}: {scrub(damage.why, secrets_of(cfg.storage_options))}"
            if cfg.damaged == "refuse":
                raise DatasetError(
                    f"dataset.paths = {_bare(file.path)!r}: damaged {where}; get the whole file, or set "
                    "dataset.damaged = keep to use the records before that"
                ) from None
            yield SourceRecord(f"{file.name}:{number + 1}", None, f"damaged file: {where}")


def _read(file: _File, cfg: DatasetConfig) -> Iterator[Parsed]:
    names = cfg.fields
    needed = {*names.messages, names.text, names.input_ids}
    wanted = needed | {names.loss_mask, names.system, names.tools}
    try:
        with file.open() as raw:
            stream = _Watched(raw)
            try:
                if file.format == "parquet":
                    yield from read_parquet(stream, wanted, needed)
                elif file.format == "arrow":
                    yield from read_arrow(stream, wanted, needed)
                else:
                    chunks = chunks_of(stream, file.codec)
                    yield from (read_json if file.format == "json" else read_lines)(chunks)
            except Damaged:
                if stream.error is None:
                    raise
                raise stream.error from None
    except (Damaged, GeneratorExit):
        raise
    except DatasetError as error:
        raise DatasetError(f"dataset.paths = {_bare(file.path)!r}: {error}") from None
    except (OSError, EOFError, pa.ArrowException) as error:
        raise _unreadable(file.path, error, cfg) from None
    except Exception as error:  # remote file systems raise their client library's own errors
        if not _is_foreign(error):
            raise
        raise _unreadable(file.path, error, cfg) from None


class _Watched(io.RawIOBase):
    """A stream that remembers why it could not be read, since that is no damage of the file."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.error: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        try:
            found: bytes = self._raw.read(size)
        except (MemoryError, OverflowError, ValueError):  # of a size that a damaged file names
            raise
        except Exception as error:
            self.error = error
            raise
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        place: int = self._raw.seek(offset, whence)
        return place

    def tell(self) -> int:
        place: int = self._raw.tell()
        return place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _hash_file(file: _File, cfg: DatasetConfig) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    try:
        with file.open() as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except Exception as error:  # remote file systems raise their client library's own errors
        raise _unreadable(file.path, error, cfg) from None
    return {"size": size, "sha256": digest.hexdigest()}


def _find_files(cfg: DatasetConfig) -> list[_File]:
    found = [file for path in cfg.paths for file in _match(path, cfg)]
    names = _names({file.path for file in found})
    return [dataclasses.replace(file, name=names[file.path]) for file in found]


def _names(paths: Collection[str]) -> dict[str, str]:
    """What each file is called: its name, with as many of its folders as tell it from the others."""
    # Names of files may hold bytes that are not UTF-8, and line breaks; those of records are stored and printed.
    parts = {p: " ".join(_bare(p).encode("utf-8", "replace").decode().splitlines()).split("/") for p in paths}
    names: dict[str, str] = {}
    for count in range(1, 1 + max(map(len, parts.values()), default=0)):
        endings = {path: "/".join(parts[path][-count:]) for path in parts.keys() - names.keys()}
        taken = Counter(endings.values())
        names |= {p: name for p, name in endings.items() if taken[name] == 1 or count == len(parts[p])}
    return names


def _match(path: str, cfg: DatasetConfig) -> list[_File]:
    shown = _bare(path)
    try:
        fs, inner = fsspec.core.url_to_fs(path, **cfg.storage_options)
        if fs.isfile(inner):
            found = [inner]
        elif fs.isdir(inner):
            return [_File(fs, p, "arrow", None) for p in _saved_by_datasets(fs, inner, shown)]
        else:
            found = sorted(p for p in fs.glob(inner) if fs.isfile(p))
    except DatasetError:
        raise
    except Exception as error:  # an unknown protocol, a missing client package, refused credentials, a timeout ...
        raise _unreadable(path, error, cfg) from None
    if not found:
        raise DatasetError(f"dataset.paths = {shown!r}: no such file, or nothing matches; check the path and the glob")
    return [_File(fs, p, *_kind(p, cfg.format)) for p in found]


def _saved_by_datasets(fs: Any, folder: str, shown: str) -> list[str]:
    """The files of a folder that `save_to_disk` of Hugging Face `datasets` wrote, in order."""
    if fs.isfile(f"{folder}/dataset_dict.json"):
        splits = json.loads(fs.cat_file(f"{folder}/dataset_dict.json"))["splits"]
        raise DatasetError(
            f"dataset.paths = {shown!r}: holds the splits {', '.join(splits)}; name one, such as {shown}/{splits[0]}"
        )
    if not fs.isfile(f"{folder}/state.json"):
        raise DatasetError(f"dataset.paths = {shown!r}: a folder; name its files, such as {shown}/*.jsonl")
    state = json.loads(fs.cat_file(f"{folder}/state.json"))
    if state.get("_indices_data_files"):
        raise DatasetError(
            f"dataset.paths = {shown!r}: its rows were selected by indices that are stored apart; call "
            "flatten_indices() and save it again"
        )
    return [f"{folder}/{file['filename']}" for file in state["_data_files"]]


def _kind(path: str, format: str) -> tuple[str, str | None]:
    stem, ending = posixpath.splitext(_bare(path).lower())
    codec = _CODECS.get(ending)
    if codec:
        ending = posixpath.splitext(stem)[1]
    kind = format if format != "auto" else _FORMATS.get(ending)
    whole = kind in ("parquet", "arrow")
    if kind is None or (whole and codec and format == "auto"):
        raise DatasetError(
            f"dataset.paths = {_bare(path)!r}: unknown ending; known are .jsonl, .ndjson and .json "
            "(.gz, .zst, .bz2), .parquet, .arrow and .feather; set dataset.format to jsonl, json, parquet or arrow if "
            "it is one of them under another name"
        )
    return kind, None if whole else codec


def _bare(path: str) -> str:
    """A path for messages and names: URLs lose the user, the password and a signed query."""
    if "://" not in path:
        return path
    try:
        parts = urlsplit(path)
    except ValueError:  # of brackets that do not match; whatever opens it says so
        return path.partition("://")[0] + "://..."
    query = "" if parts.scheme in ("http", "https") else parts.query
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


def _unreadable(path: str, error: Exception, cfg: DatasetConfig) -> DatasetError:
    first = (str(error).strip().splitlines() or [""])[0].replace(path, _bare(path))
    first = scrub(first, secrets_of(cfg.storage_options))
    return DatasetError(f"dataset.paths = {_bare(path)!r}: cannot be read ({type(error).__name__}: {first})")


def _is_foreign(error: Exception) -> bool:
    """Whether an error comes from a client library rather than from a mistake of ours."""
    return type(error).__module__.partition(".")[0] not in ("builtins", __name__.partition(".")[0])
