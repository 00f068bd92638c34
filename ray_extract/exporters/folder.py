"""A folder that one export fills, as often as it takes: whose it is, and files that are whole or not there.

    ray_extract_export.json   whose export this is; another one is refused
    left_out.jsonl            rows that are not in it, each with its reason

Trainers read folders of a file system, so this is one. Each file is written under another name, synced and renamed.
What is there already is compared byte by byte with what should be: nothing is taken for good because of its name.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, cast

from ray_extract.errors import ConfigError, OutOfSpace, StoreError

IDENTITY_NAME = "ray_extract_export.json"
LEFT_OUT_NAME = "left_out.jsonl"
VERSION = 1

_PART_PREFIX = ".ray_extract-part-"
_BLOCK = 16 << 20

Outcome = Literal["written", "kept", "replaced"]
Write = Callable[[BinaryIO], None]
"""Writes a file's content to a binary stream; the same bytes each time, since a second run compares them."""


class ExportFolder:
    """A folder of an export; use it as a context manager, which holds a lock on it.

    Entering it makes it ours or finds that it is.

    Args:
        path: the folder; made if absent.
        identity: what must be the same to go on with it; JSON values. `run` is the fingerprint of the run exported.
        notes: more to record, not compared; replaced when it changes. `source.url` is where the run is.

    Raises:
        ConfigError: the folder holds another export, or anything else; or another process writes to it.
        StoreError: it cannot be written.
    """

    def __init__(self, path: str, identity: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        if "://" in path:
            raise ConfigError(f"--out {path}: trainers read a folder of a file system; name one")
        self.path = Path(path).expanduser().absolute()
        self.outcomes: Counter[Outcome] = Counter()
        # As it will be read back, so that tuples and lists do not differ.
        self._record = json.loads(json.dumps({"version": VERSION, "identity": identity, **notes}))
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out {self.path}: cannot be made ({error.strerror}); choose a folder that you may write to"
            ) from None
        with _errors(self.path):
            # The folder, not its record, which is replaced when the notes change.
            self._lock = os.open(self.path, os.O_RDONLY)
        try:
            self._claim(self._lock)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _claim(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {self.path}: another process is exporting to it; wait for it") from None
        except OSError:
            pass  # a file system without locks; two writers still write whole files with equal content
        with _errors(self.path):
            there = {path.name for path in self.path.iterdir() if not path.name.startswith(_PART_PREFIX)}
        if IDENTITY_NAME in there:
            _refuse_another(self.path, read_record(self.path), self._record)
        elif there:
            raise ConfigError(
                f"--out {self.path}: holds {min(there)} and no {IDENTITY_NAME}, so it is no export to go on "
                "with; choose an empty folder"
            )
        for part in self.path.rglob(f"{_PART_PREFIX}*"):
            part.unlink(missing_ok=True)
        text = json.dumps(self._record, indent=2).encode()
        self.put(IDENTITY_NAME, lambda out: _write(out, text))
        self.outcomes.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def put(self, name: str, write: Write) -> Outcome:
        """Have a file with this content: keep one that is equal, replace one that is not.

        Args:
            name: relative to the folder.
            write: see Write.

        Raises:
            OutOfSpace, StoreError: it cannot be written.
        """
        target = self.path / name
        outcome: Outcome = "written"
        with _errors(target):
            if target.is_file():
                if _holds(target, write):
                    self.outcomes["kept"] += 1
                    return "kept"
                outcome = "replaced"
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{_PART_PREFIX}{secrets.token_hex(8)}")
            try:
                with part.open("xb") as out:
                    write(out)
                    out.flush()
                    os.fsync(out.fileno())
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        self.outcomes[outcome] += 1
        return outcome

    def free_bytes(self) -> int:
        """Bytes that may still be written."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def files(self, ending: str) -> list[Path]:
        """Files with this ending, at any depth, sorted as strings."""
        return sorted((p for p in self.path.rglob(f"*{ending}") if p.is_file()), key=str)


def read_record(path: Path) -> dict[str, Any]:
    """What ray_extract_export.json of a folder says: `version`, `identity`, and notes.

    Raises:
        ConfigError: no such file, or not one that this release reads.
    """
    file = path / IDENTITY_NAME
    try:
        record = json.loads(file.read_bytes())
        if record["version"] == VERSION and isinstance(record["identity"], dict):
            return cast("dict[str, Any]", record)
        why = f"version {record['version']}; this release reads {VERSION}"
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, KeyError, TypeError):
        why = "not an export's"
    raise ConfigError(f"{file}: {why}; make the export again in an empty folder")


def _refuse_another(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ConfigError with what differs in words, unless two records are of one export."""
    its, ours = found["identity"], wanted["identity"]
    differ = [name for name in dict.fromkeys([*its, *ours]) if its.get(name) != ours.get(name)]
    lines = [
        f"{name}: it has {json.dumps(its.get(name))}, this export asks {json.dumps(ours.get(name))}"
        for name in differ
        if name != "run"
    ]
    if "run" in differ:
        url, now = (record.get("source", {}).get("url") for record in (found, wanted))
        lines += [
            f"run: {now} has other rows or states than when this folder was made from it (was it extracted again?)"
            if url == now
            else f"run: it was made from {url}, and {now} is another run, with other rows or states"
        ]
    if lines:
        raise ConfigError(
            f"--out {path}: holds another export; choose an empty folder, or the old settings:\n  " + "\n  ".join(lines)
        )


class _Compared(io.RawIOBase):
    """A stream that compares what is written to it with a file. Never raises: torch.save calls it from C++."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.same = True

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any) -> int:
        view = memoryview(chunk).cast("B")
        for at in range(0, len(view), _BLOCK):
            part = view[at : at + _BLOCK]
            self.same = self.same and self._file.read(len(part)) == part
        return len(view)


def _holds(target: Path, write: Write) -> bool:
    with target.open("rb") as file:
        compared = _Compared(file)
        write(cast(BinaryIO, compared))
        return compared.same and not file.read(1)


def _write(out: BinaryIO, data: bytes) -> None:
    out.write(data)


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Errors of the file system as ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"{path}: no space left; free some and run the same command, which goes on where it stopped"
            ) from None
        raise StoreError(f"{path}: {error.strerror or error}") from None
