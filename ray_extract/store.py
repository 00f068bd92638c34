"""Where the output lives: a local folder, S3, or anything that fsspec reaches, behind one small interface.

A key is a `/`-separated path under the store's URL. Every object appears whole or not at all, and is by default created
only if absent: that is what makes two drivers, and a zombie's late upload, harmless.

    local folders   written here: temporary file, fsync, hard link (fails if the name is taken)
    s3://           ray_extract.s3: obstore, multipart uploads completed with `If-None-Match: *`
    anything else   fsspec; how exclusive its creation is depends on the backend, so probe_create asks
"""

import abc
import contextlib
import dataclasses
import errno
import io
import itertools
import logging
import os
import random
import re
import secrets
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urlsplit

import fsspec

from ray_extract.errors import (
    AccessDenied,
    AlreadyExists,
    ClockSkew,
    ConfigError,
    CredentialsExpired,
    NotFound,
    OutOfSpace,
    RayExtractError,
    StoreError,
    Throttled,
    Verdict,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview

PART_BYTES = 32 << 20
"""Size of one part of a streamed upload. A stream holds at most two: one filling, one on its way. S3 takes 10,000."""

_NO_OPTIONS: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object.

    Args:
        key: under the store's URL.
        size: in bytes.
        version: another one whenever the object was written anew, as a listing tells it; empty if the store tells none.
    """

    key: str
    size: int
    version: str = dataclasses.field(default="", compare=False)


class Upload(abc.ABC):
    """An upload in progress: nothing is visible before finish."""

    @abc.abstractmethod
    def write(self, chunk: Buffer) -> None:
        """Append; the chunk may be reused by its owner afterwards."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Make the object visible."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Forget everything written; also after a finish that failed."""


class Store(abc.ABC):
    """Objects under one URL.

    Args:
        url: absolute, so that `open_store(store.url, options)` means the same in another process.
        secret_values: strings that must never appear in an error.

    Every method raises a StoreError subclass that names the URL and the key.
    """

    def __init__(self, url: str, secret_values: Iterable[str] = ()) -> None:
        self.url = url
        self._secrets = tuple(value for value in secret_values if value)

    def put(self, key: str, data: Buffer, *, create: bool = True) -> None:
        """Store one object.

        Args:
            key: its key.
            data: its bytes, contiguous; not copied by local folders and S3.
            create: fail if the key exists; else replace it atomically.

        Raises:
            AlreadyExists: the key is taken. After an error the taker may be us, of an earlier call: see put_once.
        """
        with _bytes(data) as view, self._errors(key):
            self._put(key, view, create)

    def put_stream(self, key: str, chunks: Iterable[Buffer], *, create: bool = True) -> int:
        """Store one object from its pieces, in at most two parts' memory; returns its size.

        An exception, of the store or of `chunks`, aborts the upload and passes on; nothing becomes visible.
        """
        with self._errors(key):
            upload = self._begin(key, create)
        size = 0
        try:
            for chunk in chunks:
                with _bytes(chunk) as view, self._errors(key):
                    upload.write(view)
                    size += view.nbytes
            with self._errors(key):
                upload.finish()
        except BaseException:
            self._abandon(key, upload.abort)
            raise
        return size

    def get(self, key: str) -> bytes:
        """The whole object. Raises NotFound."""
        with self._errors(key):
            return self._get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`. Raises StoreError if the object ends before."""
        data = self._range(key, start, length)
        return data if isinstance(data, bytes) else bytes(data)

    def get_view(self, key: str, start: int, length: int) -> memoryview:
        """As get_range, but as the client holds it: S3's is not copied. Read-only."""
        return memoryview(self._range(key, start, length)).toreadonly()

    def _range(self, key: str, start: int, length: int) -> Buffer:
        if length == 0:
            return b""
        with self._errors(key):
            data = self._get_range(key, start, length)
        if len(data) != length:
            raise StoreError(
                f"{self._where(key)}: bytes {start}..{start + length} asked, {len(data)} found; cut short?"
            )
        return data

    def head(self, key: str) -> ObjectInfo | None:
        """The object's size, or None if there is no such object."""
        try:
            with self._errors(key):
                return ObjectInfo(key, self._size(key))
        except NotFound:
            return None

    def list(self, prefix: str, *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """The objects of a folder, sorted by key.

        Args:
            prefix: a folder, such as `commits/`; `` is the root. Not a part of a name.
            recursive: with those of its subfolders.
        """
        with self._errors(prefix):
            yield from self._list(prefix.rstrip("/"), recursive)

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        with contextlib.suppress(NotFound), self._errors(key):
            self._delete(key)

    def local_path(self, key: str) -> Path | None:
        """The object as a file that can be mapped, if this is a local folder."""
        return None

    @abc.abstractmethod
    def _put(self, key: str, data: memoryview, create: bool) -> None: ...

    @abc.abstractmethod
    def _begin(self, key: str, create: bool) -> Upload: ...

    @abc.abstractmethod
    def _get(self, key: str) -> bytes: ...

    @abc.abstractmethod
    def _get_range(self, key: str, start: int, length: int) -> Buffer: ...

    @abc.abstractmethod
    def _size(self, key: str) -> int: ...

    @abc.abstractmethod
    def _list(self, folder: str, recursive: bool) -> Iterator[ObjectInfo]: ...

    @abc.abstractmethod
    def _delete(self, key: str) -> None: ...

    def _abandon(self, key: str, abort: Callable[[], None]) -> None:
        """Abort after a failure, whose own error matters more than one of the abort."""
        try:
            with self._errors(key):
                abort()
        except StoreError as error:
            log.warning("upload not aborted; its parts may stay until the bucket's lifecycle rule: %s", error)

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except RayExtractError:
            raise
        except Exception as error:
            # Without the cause: request errors print URLs that carry signatures.
            raise translate(error, self._where(key), self._secrets) from None


@contextlib.contextmanager
def _bytes(data: Buffer) -> Iterator[memoryview]:
    """A flat view, released at the end: s3fs's errors keep frames alive, and with them views of their callers."""
    whole = memoryview(data)
    view = whole.cast("B")
    try:
        yield view
    finally:
        with contextlib.suppress(BufferError):  # an interrupted request may still be reading; then its owner must know
            view.release()
            whole.release()


class StoredFile(io.RawIOBase):
    """An object as a seekable file that reads only the ranges asked for.

    Args:
        store, key: the object.
        size: its size in bytes.
    """

    def __init__(self, store: Store, key: str, size: int) -> None:
        super().__init__()
        self._store, self._key, self._size, self._at = store, key, size, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes before the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As for any file."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes; raises StoreError where the object is shorter than it was."""
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            buffer[:count] = self._store.get_range(self._key, self._at, count)
            self._at += count
        return count


def outlast(
    action: Callable[[], T],
    patience_s: float,
    stopped: threading.Event,
    what: str,
    lost: Callable[[float], None] | None = None,
) -> T:
    """Repeat an action on a store that fails in ways that may pass, with pauses of 1 to 30 seconds.

    Args:
        action: may be run again after any StoreError.
        patience_s: since the first failure; then the error is raised.
        stopped: ends the patience.
        what: for the log.
        lost: is told the seconds since the first failure, if there was one.

    Raises:
        StoreError: the last one; at once if its verdict is not to retry.
    """
    since: float | None = None
    try:
        for tries in itertools.count(1):
            try:
                return action()
            except StoreError as error:
                since = since or time.monotonic()
                pause = random.uniform(0.5, 1) * min(30.0, 2.0**tries)
                if error.verdict is not Verdict.RETRY or time.monotonic() + pause - since > patience_s:
                    raise
                log.warning("%s failed %d times and is tried again in %.0f s: %s", what, tries, pause, error)
                if stopped.wait(pause):
                    raise
    finally:
        if since is not None and lost is not None:
            lost(time.monotonic() - since)
    raise AssertionError("unreachable")


def put_once(store: Store, key: str, data: bytes) -> bool:
    """Create a small object, taking an identical one for ours (a retry after a lost answer finds its own object).

    Returns:
        True if the key now holds `data`, False if it holds something else.
    """
    try:
        store.put(key, data)
    except AlreadyExists:
        return store.get(key) == data
    return True


def probe_create(store: Store) -> bool:
    """Whether the store refuses to create a key that exists. Four S3 servers of seven tried overwrite silently."""
    key = f"probe-{secrets.token_hex(8)}"
    try:
        store.put(key, b"first")
        try:
            store.put(key, b"second")
        except AlreadyExists:
            return True
        return False
    finally:
        store.delete(key)


def open_store(url: str, storage_options: Mapping[str, Any] = _NO_OPTIONS) -> Store:
    """Open the store at a URL; cheap, and no request is sent.

    Args:
        url: a path, `file://`, `s3://bucket/prefix`, or a URL of fsspec.
        storage_options: for S3 the names in ray_extract.s3.OPTIONS, and `client: fsspec` for s3fs instead of obstore;
            for fsspec's URLs whatever the backend takes. Credentials of S3 default to the environment's.

    Raises:
        ConfigError: an unusable URL or option.
    """
    if not url:
        raise ConfigError("the output's URL is empty; name a folder, or s3://bucket/prefix")
    scheme, colon, rest = url.partition("://")
    if not colon or scheme == "file":
        if storage_options:
            raise ConfigError(f"storage_options: {', '.join(storage_options)}: a local folder ({url}) has no options")
        return LocalStore(rest if colon else url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{scheme}://...: not a valid URL ({error})") from None
    if parts.username is not None or parts.query:
        raise ConfigError(
            f"{scheme}://...: credentials and options go into storage_options or the environment, not here"
        )
    if scheme in ("s3", "s3a"):
        from ray_extract import s3  # loads obstore at the point of use

        return s3.open_s3(f"s3://{rest}", storage_options)
    return FsspecStore(url, storage_options)


class LocalStore(Store):
    """A folder.

    Objects are written under a temporary name in their folder, flushed to the disk (a commit must not survive a power
    cut that its shard did not), and linked to their name, which fails if the name is taken. A killed writer leaves its
    `.<name>.<random>.part` behind; list does not show it.
    """

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path).expanduser().absolute()
        super().__init__(str(self.root))

    def local_path(self, key: str) -> Path | None:
        return self.root / key

    def _put(self, key: str, data: memoryview, create: bool) -> None:
        upload = self._begin(key, create)
        try:
            upload.write(data)
            upload.finish()
        except BaseException:
            self._abandon(key, upload.abort)
            raise

    def _begin(self, key: str, create: bool) -> Upload:
        return _LocalUpload(self.root / key, create)

    def _get(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        with (self.root / key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def _size(self, key: str) -> int:
        path = self.root / key
        if path.is_dir():
            raise FileNotFoundError(path)
        return path.stat().st_size

    def _list(self, folder: str, recursive: bool) -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []
        for parent, folders, names in os.walk(self.root / folder, onerror=_raise_unless_missing):
            if not recursive:
                folders.clear()
            above = Path(parent).relative_to(self.root).as_posix()
            for name in names:
                if not _is_part(name):
                    stat = os.stat(f"{parent}/{name}")  # noqa: PTH116 - a Path for each of 100,000 takes a second
                    key = name if above == "." else f"{above}/{name}"
                    found.append(ObjectInfo(key, stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}"))
        yield from sorted(found, key=lambda item: item.key)

    def _delete(self, key: str) -> None:
        (self.root / key).unlink()


def _raise_unless_missing(error: OSError) -> None:
    """A folder that cannot be read must not look empty: a run would start over."""
    if error.errno != errno.ENOENT:
        raise error


def _is_part(name: str) -> bool:
    return name.startswith(".") and name.endswith(".part")


_WRITE_BYTES = 256 << 10
"""To a file at once: larger writes cost up to ten times the CPU where memory is fragmented (Linux 6.18, ext4)."""


class _LocalUpload(Upload):
    def __init__(self, path: Path, create: bool) -> None:
        self._path = path
        self._create = create
        path.parent.mkdir(parents=True, exist_ok=True)
        if create and path.exists():  # spares a gigabyte of writing; the link below decides
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        self._part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        self._file: BinaryIO = self._part.open("xb", buffering=0)

    def write(self, chunk: Buffer) -> None:
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view[:_WRITE_BYTES]) :]

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        if self._create:
            os.link(self._part, self._path)
            self._part.unlink()
        else:
            self._part.replace(self._path)

    def abort(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


_MEMORY_LOCK = threading.Lock()
"""fsspec's memory:// looks, then creates. It belongs to one process, so a lock makes that one step."""


class FsspecStore(Store):
    """Any other URL, through fsspec. A buffer is copied once, since backends take only bytes."""

    def __init__(self, url: str, options: Mapping[str, Any], *, secret_values: Iterable[str] | None = None) -> None:
        super().__init__(url.rstrip("/"), secrets_of(options) if secret_values is None else secret_values)
        scheme = url.partition("://")[0]
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            raise ConfigError(f"{url}: {error}") from None
        except (ValueError, TypeError, KeyError, OSError) as error:
            shown = scrub(str(error), self._secrets)
            raise ConfigError(f"{url}: fsspec cannot open it with storage_options {sorted(options)}: {shown}") from None
        self._root = str(root).rstrip("/")
        self._memory = scheme == "memory"

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _put(self, key: str, data: memoryview, create: bool) -> None:
        if data.nbytes > 2 * PART_BYTES and not self._memory:
            parts = (data[at : at + PART_BYTES] for at in range(0, data.nbytes, PART_BYTES))
            self.put_stream(key, parts, create=create)
            return
        with _MEMORY_LOCK if self._memory else contextlib.nullcontext():
            self._fs.pipe_file(self._path(key), bytes(data), mode="create" if create else "overwrite")

    def _begin(self, key: str, create: bool) -> Upload:
        self._fs.invalidate_cache()
        if create and self._fs.exists(self._path(key)):  # spares the upload; the backend's own check, if any, decides
            raise FileExistsError(errno.EEXIST, "exists", key)
        return _FsspecUpload(self, key, create)

    def _get(self, key: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(key)))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._fs.cat_file(self._path(key), start=start, end=start + length))

    def _size(self, key: str) -> int:
        self._fs.invalidate_cache()  # another process may have written since a listing was cached
        info = self._fs.info(self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return int(info["size"])

    def _list(self, folder: str, recursive: bool) -> Iterator[ObjectInfo]:
        self._fs.invalidate_cache()
        top = self._path(folder).rstrip("/")
        found = self._fs.find(top, maxdepth=None if recursive else 1, detail=True)
        for name in sorted(found):
            if name.rstrip("/") != top:  # S3 consoles and servers keep empty folders as objects
                tags = (found[name].get(tag) for tag in ("ETag", "etag", "created"))
                version = next((str(tag) for tag in tags if tag), "")
                yield ObjectInfo(name[len(self._root) + 1 :], int(found[name]["size"]), version)

    def _delete(self, key: str) -> None:
        self._fs.rm_file(self._path(key))


class _FsspecUpload(Upload):
    """Opened at the second part: a smaller object is one request, and fsspec's own buffer holds the part on its way."""

    def __init__(self, store: FsspecStore, key: str, create: bool) -> None:
        self._store = store
        self._key = key
        self._create = create
        self._pending = bytearray()
        self._file: Any = None

    def write(self, chunk: Buffer) -> None:
        if self._file is None:
            self._pending += chunk
            if len(self._pending) < PART_BYTES or self._store._memory:
                return
            self._file = self._store._fs.open(
                self._store._path(self._key), "xb" if self._create else "wb", block_size=PART_BYTES, autocommit=False
            )
            chunk, self._pending = self._pending, bytearray()
        view = memoryview(chunk)
        for at in range(0, len(view), PART_BYTES):
            self._file.write(view[at : at + PART_BYTES])

    def finish(self) -> None:
        if self._file is None:
            self._store.put(self._key, self._pending, create=self._create)
        else:
            self._file.close()
            self._file.commit()

    def abort(self) -> None:
        if self._file is not None:
            self._file.closed = True  # or its destructor would write the rest
            self._file.discard()


def secrets_of(options: Mapping[str, Any]) -> list[str]:
    """Every string in the options of fsspec, as a secret: its backends name theirs in too many ways to list."""
    values: list[str] = []
    for value in options.values():
        if isinstance(value, Mapping):
            values += secrets_of(value)
        elif isinstance(value, str) and len(value) >= 6 and "://" not in value:
            values.append(value)
    return values


_KNOWN: dict[type[StoreError], tuple[str | int, ...]] = {
    CredentialsExpired: (
        *("ExpiredToken", "InvalidToken", "InvalidTokenId", "TokenRefreshRequired"),
        *("SSOTokenLoadError", "TokenRetrievalError", "UnauthorizedSSOTokenError"),
    ),
    ClockSkew: ("RequestTimeTooSkewed",),
    OutOfSpace: (
        *("InsufficientStorage", "QuotaExceeded", "BucketQuotaExceeded"),
        *("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", 507, errno.ENOSPC, errno.EDQUOT),
    ),
    Throttled: (
        *("SlowDown", "SlowDownRead", "SlowDownWrite", "TooManyRequests", 429),
        *("RequestLimitExceeded", "Throttling", "ThrottlingException"),
    ),
    AccessDenied: (
        *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", 401, 403),
        *("CredentialRetrievalError", "NoAuthTokenError", "NoCredentialsError", "PartialCredentialsError"),
        *("PermissionDeniedError", "ProfileNotFound", "UnauthenticatedError"),
        *("PermissionError", errno.EACCES, errno.EPERM, errno.EROFS),
    ),
}
"""What an error is known by: codes of S3, MinIO and Ceph, statuses of HTTP, names of exceptions, numbers of errno."""
_KIND_OF = {mark: kind for kind, marks in _KNOWN.items() for mark in marks}

_MEANS: dict[type[StoreError], str] = {
    CredentialsExpired: (
        "the credentials have expired, or the session token is of others; get new ones and run the same command, which "
        "goes on from there"
    ),
    OutOfSpace: "no space left; free some, or raise the quota, and run the same command, which goes on from there",
    Throttled: "the store asks for fewer requests; later tries may succeed, and fewer engines ask for less",
    AccessDenied: "access denied; check the credentials and what they may do",
}


def translate(error: Exception, where: str, secret_values: Iterable[str] = ()) -> StoreError:
    """Turn an error of the operating system, obstore, botocore or fsspec into ours.

    Classes are known by name, so that no client library is loaded to tell what another one raised.

    Args:
        error: what was raised.
        where: the URL and key, for the text.
        secret_values: strings to blank in the text.
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    number = error.errno if isinstance(error, OSError) else None
    status, code, message = _answer(error)
    text = scrub(message, secret_values)
    # s3fs gives errno 22 to a lost create, and to a dozen other refusals; the server's answer tells them apart.
    if names & {"FileExistsError", "AlreadyExistsError", "PreconditionError"} or status == 412:
        return AlreadyExists(f"{where}: exists already")
    # The code first: a quota is a 403 at some, and an expired token a 400.
    kind = next((_KIND_OF[mark] for mark in (code, number, *names, status) if mark in _KIND_OF), None)
    if kind is ClockSkew:
        return ClockSkew(f"{where}: {_clocks(error)}")
    if kind is not None:
        return kind(f"{where}: {_MEANS[kind]}: {text}")
    if code == "NoSuchBucket":
        return NotFound(f"{where}: no such bucket; create it or correct the URL")
    if names & {"FileNotFoundError", "NotADirectoryError"} or status == 404:
        return NotFound(f"{where}: not found: {text}")
    return StoreError(f"{where}: {type(error).__name__}: {text}")


def _clocks(error: Exception) -> str:
    """What a refusal for its time says of the two clocks."""
    told = str(getattr(error, "response", None) or getattr(error.__cause__, "response", None) or error)
    ours, theirs = (re.search(rf"{name}\W+([\w:.-]+)", told) for name in (r"RequestTime\b", r"ServerTime\b"))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return (
        f"this machine's clock is wrong: it says {ours[1] if ours else now}, and the store's "
        f"{theirs[1] if theirs else 'another time'}; set it (ntp, chrony) and run the same command"
    )


def _answer(error: Exception) -> tuple[int | None, str | None, str]:
    """HTTP status, S3 code and message that an error carries; botocore has them in a dict, others in their text."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if isinstance(response, dict):
        described = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status, described.get("Code"), f"{described.get('Code')}: {described.get('Message')}"
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    said = re.search(r"status code: (\d{3})", text)
    status = getattr(error, "status", None) or (int(said[1]) if said else None)
    if code:
        return status, code[1], f"{code[1]}: {message[1] if message else ''}"
    return status, None, text.partition("\n\nDebug source")[0]


def scrub(text: str, secret_values: Iterable[str]) -> str:
    """One line of at most 300 characters without secrets, passwords in URLs, and queries of signed ones."""
    for value in secret_values:
        text = text.replace(value, "***").replace(quote(value, safe=""), "***")
    text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)
    text = re.sub(r"://[^\s/@]+@", "://", text)
    return " ".join(text.split())[:300]
