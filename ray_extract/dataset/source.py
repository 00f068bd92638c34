"""Input files as a stream of records: JSONL and Parquet, local or behind any fsspec URL.

Memory holds one line, or one Parquet row group. A record that cannot be parsed is a record with a reason; only a file
that cannot be read at all is an error.
"""

import dataclasses
import hashlib
import itertools
import json
import posixpath
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from ray_extract.config import DatasetConfig
from ray_extract.errors import DatasetError
from ray_extract.store import scrub, secrets_of

CHUNK_BYTES = 1 << 20
BATCH_RECORDS = 256

# By Arrow rather than by fsspec: fsspec's zstd stops after the first frame of a file that has several, without a word.
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclasses.dataclass(frozen=True, slots=True)
class SourceRecord:
    """One record of the input.

    Args:
        source: `<file name>:<number of the record in the file, from 1>`; blank lines do not count.
        value: the record, or None if it cannot be parsed. Lists of numbers from Parquet are NumPy arrays.
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

    @property
    def name(self) -> str:
        return posixpath.basename(_bare(self.path))

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
    wanted = {*cfg.fields.messages, cfg.fields.text, cfg.fields.input_ids, cfg.fields.loss_mask}
    for file in _find_files(cfg):
        try:
            with file.open() as stream:
                if file.format == "parquet":
                    yield from _read_parquet(file, stream, wanted)
                else:
                    yield from _read_jsonl(file, stream)
        except (OSError, EOFError, pa.ArrowException) as error:
            raise _unreadable(file.path, error, cfg) from None
        except DatasetError:
            raise
        except Exception as error:  # remote file systems raise their client library's own errors
            if not _is_foreign(error):
                raise
            raise _unreadable(file.path, error, cfg) from None


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
    return [file for path in cfg.paths for file in _match(path, cfg)]


def _match(path: str, cfg: DatasetConfig) -> list[_File]:
    shown = _bare(path)
    try:
        fs, inner = fsspec.core.url_to_fs(path, **cfg.storage_options)
        if fs.isfile(inner):
            found = [inner]
        elif fs.isdir(inner):
            raise DatasetError(f"dataset.paths = {shown!r}: a folder; name its files, such as {shown}/*.jsonl")
        else:
            found = sorted(p for p in fs.glob(inner) if fs.isfile(p))
    except DatasetError:
        raise
    except Exception as error:  # an unknown protocol, a missing client package, refused credentials, a timeout ...
        raise _unreadable(path, error, cfg) from None
    if not found:
        raise DatasetError(f"dataset.paths = {shown!r}: no such file, or nothing matches; check the path and the glob")
    return [_File(fs, p, *_kind(p, cfg.format)) for p in found]


def _kind(path: str, format: str) -> tuple[str, str | None]:
    stem, ending = posixpath.splitext(_bare(path).lower())
    codec = _CODECS.get(ending)
    if format == "parquet":
        return "parquet", None
    if codec:
        ending = posixpath.splitext(stem)[1]
    kind = format if format != "auto" else _FORMATS.get(ending)
    if kind is None or (kind == "parquet" and codec):
        raise DatasetError(
            f"dataset.paths = {_bare(path)!r}: unknown ending; known are .jsonl (.gz, .zst, .bz2) and .parquet; "
            "set dataset.format = jsonl or parquet if it is one of them under another name"
        )
    return kind, codec


def _read_jsonl(file: _File, stream: Any) -> Iterator[SourceRecord]:
    if file.codec:
        stream = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), file.codec)
    number = 0
    for line in _lines(stream):
        if not line.strip():
            continue
        number += 1
        value, reason = _parse(line)
        yield SourceRecord(f"{file.name}:{number}", value, reason)


def _lines(stream: Any) -> Iterator[bytes]:
    """Lines of a binary stream that can only read(n)."""
    parts: list[bytes] = []
    first = True
    while chunk := stream.read(CHUNK_BYTES):
        if first:
            chunk, first = chunk.removeprefix(b"\xef\xbb\xbf"), False
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*parts, line])
            parts.clear()
        parts.append(rest)
    yield b"".join(parts)


def _parse(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return None, f"malformed JSON: not UTF-8 at byte {error.start}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return None, f"malformed JSON: {error.msg} at byte {len(text[: error.pos].encode())}"
    except (ValueError, RecursionError) as error:
        return None, f"malformed JSON: {type(error).__name__}"
    if not isinstance(value, dict):
        return None, f"not a JSON object: {type(value).__name__}"
    return value, None


def _read_parquet(file: _File, stream: Any, wanted: set[str]) -> Iterator[SourceRecord]:
    parquet = pq.ParquetFile(stream)
    columns = [name for name in parquet.schema_arrow.names if name in wanted]
    if not columns:
        raise DatasetError(
            f"dataset.paths = {_bare(file.path)!r}: none of the columns {', '.join(sorted(wanted))}; it has "
            f"{', '.join(parquet.schema_arrow.names)}; name the right ones in dataset.fields"
        )
    number = 0
    for batch in parquet.iter_batches(batch_size=BATCH_RECORDS, columns=columns):
        for row in range(batch.num_rows):
            number += 1
            value = {name: _plain(batch.column(name)[row]) for name in columns}
            yield SourceRecord(f"{file.name}:{number}", value)


def _plain(scalar: Any) -> Any:
    # A list of a million Python ints takes a second and 36 MB; an array, neither.
    if scalar.is_valid and (pa.types.is_list(scalar.type) or pa.types.is_large_list(scalar.type)):
        values = scalar.values
        if pa.types.is_integer(values.type) and values.null_count == 0:
            return values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _bare(path: str) -> str:
    """A path for messages and names: URLs lose the user, the password and a signed query."""
    if "://" not in path:
        return path
    parts = urlsplit(path)
    query = "" if parts.scheme in ("http", "https") else parts.query
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


def _unreadable(path: str, error: Exception, cfg: DatasetConfig) -> DatasetError:
    first = (str(error).strip().splitlines() or [""])[0].replace(path, _bare(path))
    first = scrub(first, secrets_of(cfg.storage_options))
    return DatasetError(f"dataset.paths = {_bare(path)!r}: cannot be read ({type(error).__name__}: {first})")


def _is_foreign(error: Exception) -> bool:
    """Whether an error comes from a client library rather than from a mistake of ours."""
    return type(error).__module__.partition(".")[0] not in ("builtins", __name__.partition(".")[0])
