"""Bytes of one input file -> records: JSON lines, JSON arrays, Parquet and Arrow, all streamed.

Memory holds one line, one element of an array, one batch of a Parquet row group, or one Arrow record batch. A record
that cannot be parsed has a reason in place of a value; where the file itself cannot be followed any further, `Damaged`
says at which byte.
"""

import codecs
import itertools
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_extract.errors import DatasetError

CHUNK_BYTES = 1 << 20
PIECE_BYTES = 1 << 12
BATCH_RECORDS = 256

Parsed = tuple[dict[str, Any] | None, str | None]
"""A record, or None and the reason. Lists of numbers from Parquet and Arrow are NumPy arrays."""

_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(r"[ \t\r\n]*")
_TOKEN = 16  # characters of the longest literal, `-Infinity`, and of an escape, with room
_ARROW_FILE = b"ARROW1"
_ARROW_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
# What Arrow raises at damaged bytes; some of it is not Arrow's own, as where a name is not UTF-8.
_ARROW_ERRORS = (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException)


class Damaged(Exception):  # noqa: N818 - it is a verdict on a file, not a failure of ours
    """A file cannot be followed any further.

    Args:
        place: where, such as `byte 17`.
        why: what is wrong there.
    """

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place}: {why}")
        self.place = place
        self.why = why


def chunks_of(stream: Any, codec: str | None) -> Iterator[bytes]:
    """The bytes of a stream that can only read(n) and tell(), unpacked by Arrow's `codec`, without a byte-order mark.

    Raises:
        Damaged: they cannot be decompressed.
    """
    # By Arrow rather than by fsspec: fsspec's zstd stops after the first frame of a file that has several, silently.
    source = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), codec) if codec else stream
    # Arrow drops what a read unpacked before it failed, so those reads are small.
    size = PIECE_BYTES if codec else CHUNK_BYTES
    done = 0
    try:
        while chunk := source.read(size):
            yield chunk if done else chunk.removeprefix(_BOM)
            done += len(chunk)
        if codec and not stream.tell():
            raise EOFError("the file is empty, which no compressed file is")  # Arrow takes it for one of no bytes
    except (OSError, EOFError, pa.ArrowException) as error:
        raise Damaged(f"byte {done} of what it unpacks to, or behind it", _first_line(error)) from None


def read_lines(chunks: Iterator[bytes]) -> Iterator[Parsed]:
    """JSON lines; blank ones do not count."""
    return (parse_line(line) for line in _lines(chunks) if line.strip())


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*parts, line])
            parts.clear()
        parts.append(rest)
    yield b"".join(parts)


def parse_line(line: bytes) -> Parsed:
    """One JSON object."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return None, f"malformed JSON: not UTF-8 at byte {error.start}"
    try:
        return _object(json.loads(text))
    except json.JSONDecodeError as error:
        return None, f"malformed JSON: {error.msg} at byte {len(text[: error.pos].encode())}"
    except (ValueError, RecursionError) as error:
        return None, f"malformed JSON: {_not_taken(error)}"


def _not_taken(error: Exception) -> str:
    """What Python does not take of JSON that is otherwise well formed."""
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _object(value: Any) -> Parsed:
    return (value, None) if isinstance(value, dict) else (None, f"not a JSON object: {type(value).__name__}")


def read_json(chunks: Iterator[bytes]) -> Iterator[Parsed]:
    """A JSON array of objects, or, where there is no bracket at the beginning, JSON lines: many a .json holds those.

    Raises:
        Damaged: the array is malformed, or ends too early.
    """
    for chunk in chunks:
        if start := chunk.lstrip():
            again = itertools.chain([chunk], chunks)
            yield from _elements(_Text(again)) if start.startswith(b"[") else read_lines(again)
            return


def _elements(text: "_Text") -> Iterator[Parsed]:
    mark = text.peek()
    while mark in ("[", ","):
        text.at += 1
        if text.peek() == "]" and mark == "[":
            break
        yield _object(text.value())
        mark = text.peek()
    if text.peek() != "]":
        raise text.damaged("Expecting ',' or ']'")
    text.at += 1
    if text.peek():
        raise text.damaged("more text behind the array")


class _Text:
    """Text that is read as it is needed, and a place in it."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.at = 0
        self._buffer = ""
        self._passed = 0  # bytes before the buffer
        self._chunks = chunks
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._end: Exception | None = None  # for whoever needs what lies behind the buffer

    def damaged(self, why: str, at: int | None = None) -> Damaged:
        """Damage here, or at a place in the buffer."""
        return Damaged(f"byte {self._passed + len(self._buffer[: self.at if at is None else at].encode())}", why)

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            match = _BLANK.match(self._buffer, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self._buffer):
                return self._buffer[self.at]
            if not self._more():
                return ""

    def value(self) -> Any:
        """The JSON value here; goes behind it."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._buffer, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - _TOKEN
                if cut and self._more():
                    continue
                raise self.damaged(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise self.damaged(_not_taken(error)) from None
            # A number that ends with the buffer may go on.
            if end < len(self._buffer) or not self._more():
                self.at = end
                return value

    def _more(self) -> bool:
        """Read on: at least as much as is left, so that a long value is not parsed too often. False at the end."""
        if isinstance(self._end, StopIteration):
            return False
        if self._end is not None:
            raise self._end
        self._passed += len(self._buffer[: self.at].encode())
        parts = [self._buffer[self.at :]]
        self.at, wanted = 0, max(CHUNK_BYTES, len(parts[0]))
        while wanted > 0 and self._end is None:
            try:
                chunk = next(self._chunks)
                parts.append(self._decoder.decode(chunk))
            except StopIteration as end:
                self._end = end
            except UnicodeDecodeError as error:
                parts.append(error.object[: error.start].decode())
                place = self._passed + sum(len(part.encode()) for part in parts)
                self._end = Damaged(f"byte {place}", "not UTF-8")
            except Damaged as damage:
                self._end = damage
            wanted -= len(parts[-1])
        self._buffer = "".join(parts)
        return True


def read_parquet(stream: Any, wanted: Collection[str], needed: Collection[str]) -> Iterator[Parsed]:
    """The rows of a Parquet file.

    Args:
        stream: can seek.
        wanted: columns to read, if they are there.
        needed: of which there must be one.

    Raises:
        Damaged: it cannot be read on; a page's checksum, where it has one, is looked at.
        DatasetError: no column is one of `needed`.
    """
    try:
        parquet = pq.ParquetFile(stream, page_checksum_verification=True)
        metadata = parquet.metadata
        columns = _choose(parquet.schema_arrow.names, wanted, needed)
    except _ARROW_ERRORS as error:
        raise Damaged("its end", _first_line(error)) from None
    for group in range(metadata.num_row_groups):
        try:
            rows = 0
            for batch in parquet.iter_batches(BATCH_RECORDS, row_groups=[group], columns=columns):
                rows += batch.num_rows
                yield from _rows(batch)
            if rows != metadata.row_group(group).num_rows:
                raise pa.ArrowInvalid(f"it has {rows} rows, and its footer says {metadata.row_group(group).num_rows}")
        except _ARROW_ERRORS as error:
            place = metadata.row_group(group).column(0).data_page_offset
            raise Damaged(f"byte {place} or behind it, in row group {group}", _first_line(error)) from None


def read_arrow(stream: Any, wanted: Collection[str], needed: Collection[str]) -> Iterator[Parsed]:
    """The rows of an Arrow IPC file or stream (as Hugging Face `datasets` saves it). As read_parquet.

    A stream without its end mark is damaged: Arrow itself takes one that was cut between two batches for a shorter one.
    """
    at = 0
    try:
        head = stream.read(len(_ARROW_FILE))
        stream.seek(0, 2)
        size = stream.tell()
        stream.seek(max(0, size - len(_ARROW_STREAM_END)))
        ended = stream.read() == _ARROW_STREAM_END
        stream.seek(0)
        source = pa.PythonFile(stream, mode="r")
        if head == _ARROW_FILE:
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
            ended = True
        else:
            reader = pa.ipc.open_stream(source)
            batches = iter(reader)
        columns = _choose(reader.schema.names, wanted, needed)
        for batch in batches:
            chosen = batch.select(columns)
            chosen.validate(full=True)  # or offsets that are damaged would be followed out of the file
            yield from _rows(chosen)
            at = stream.tell()
    except _ARROW_ERRORS as error:
        raise Damaged(f"byte {at} or behind it", _first_line(error)) from None
    if not ended:
        raise Damaged(f"byte {size}", "it has no end mark, so it was cut off, or its writer was not closed")


def _choose(names: list[str], wanted: Collection[str], needed: Collection[str]) -> list[str]:
    if not set(needed) & set(names):
        raise DatasetError(
            f"none of the columns {', '.join(sorted(needed))}; it has {', '.join(names)}; name the right ones in "
            "dataset.fields"
        )
    chosen = [name for name in names if name in wanted]
    if twice := {name for name in chosen if chosen.count(name) > 1}:
        raise DatasetError(f"more than one column is named {', '.join(sorted(twice))}; rename or drop all but one")
    return chosen


def _rows(batch: Any) -> Iterator[Parsed]:
    for row in range(batch.num_rows):
        try:
            yield {name: _plain(batch.column(name)[row]) for name in batch.schema.names}, None
        except UnicodeDecodeError:
            yield None, "malformed text: not UTF-8"


def _plain(scalar: Any) -> Any:
    # A list of a million Python ints takes a second and 36 MB; an array, neither.
    if scalar.is_valid and (pa.types.is_list(scalar.type) or pa.types.is_large_list(scalar.type)):
        values = scalar.values
        if pa.types.is_integer(values.type) and values.null_count == 0:
            return values.to_numpy(zero_copy_only=False)
    return _without_nulls(scalar.as_py())


def _without_nulls(value: Any) -> Any:
    """A value without the fields that other rows have: a struct column has those of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
