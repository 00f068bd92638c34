"""S3 and what speaks it.

obstore does everything but multipart uploads: it sends a buffer as it lies, unsigned (over TLS the payload is protected
anyway, and our digests check it end to end), at 0.1 CPU seconds a GiB (over TLS 0.35) where s3fs takes 3. It cannot
make a multipart upload conditional, nor abort one that failed. So those are ours: botocore starts, completes
(`If-None-Match: *`) and aborts them, and the parts go to presigned URLs straight from the buffer.
"""

import concurrent.futures
import dataclasses
import datetime
import difflib
import functools
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
import urllib3
from obstore.store import S3Store as ObstoreS3

from ray_extract.errors import AccessDenied, ConfigError, CredentialsExpired, StoreError
from ray_extract.store import PART_BYTES, Buffer, FsspecStore, ObjectInfo, Store, Upload, translate

log = logging.getLogger(__name__)

T = TypeVar("T")

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Credential

SINGLE_PUT_BYTES = 1 << 30
"""Larger objects go up in parts: S3 takes no single PUT above 5 GiB, and a retry should not send gigabytes again."""

_SLICE_BYTES = 64 << 20  # parts of an object that lies in memory; sent from there, so their size costs nothing
_SLICES_AT_ONCE = 4  # of one object
_PARTS_AT_ONCE = 8  # of all objects; more wait for a connection
_LOST_PUTS = 5  # connections of one PUT that may be lost before it is an error
_LOST_PAGES = 5  # answers of one listing that may break off
_REQUEST_TIMEOUT = datetime.timedelta(minutes=10)  # of one request: 1 GiB at 1.7 MiB/s

OPTIONS: dict[str, str] = {
    "endpoint": "URL of the server; AWS itself when absent (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL)",
    "region": "region of the bucket (AWS_REGION, AWS_DEFAULT_REGION; else us-east-1)",
    "access_key_id": "needs secret_access_key; else what AWS's tools use: environment, profile, role of the machine",
    "secret_access_key": "see access_key_id",
    "session_token": "of temporary credentials",
    "skip_signature": "true: send no credentials (public buckets)",
    "virtual_hosted_style_request": "true: the endpoint's host name contains the bucket",
    "server_side_encryption": "AES256 or aws:kms",
    "sse_kms_key_id": "key of aws:kms",
    "client": "fsspec: use s3fs in place of obstore",
}


@dataclasses.dataclass(frozen=True, slots=True)
class S3Settings:
    """What both clients must agree on: the options, with the environment filled in."""

    endpoint: str | None
    region: str
    access_key_id: str | None
    secret_access_key: str | None = dataclasses.field(repr=False)
    session_token: str | None = dataclasses.field(repr=False)
    skip_signature: bool
    virtual_hosted: bool
    server_side_encryption: str | None
    sse_kms_key_id: str | None
    ca_bundle: str | None

    @property
    def secret_values(self) -> list[str]:
        """What no error may show."""
        return [value for value in (self.secret_access_key, self.session_token) if value]


def settings(options: Mapping[str, Any], environ: Mapping[str, str]) -> S3Settings:
    """Merge storage options and environment.

    Raises:
        ConfigError: an unknown option, or half a key pair.
    """
    for name in options:
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(OPTIONS)}"
            raise ConfigError(f"storage_options.{name}: no such option for s3://; {hint}")
    if ("access_key_id" in options) != ("secret_access_key" in options):
        raise ConfigError("storage_options: access_key_id and secret_access_key go together")
    # A token in the environment belongs to the environment's key, not to one that was given here.
    keys = options if "access_key_id" in options else _from_environment(environ)
    endpoint = _first(
        options.get("endpoint"),
        *(environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
    )
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        shown = endpoint.rpartition("@")[2]  # before it may be a password
        raise ConfigError(f"storage_options.endpoint = {shown!r}: must start with http:// or https://")
    return S3Settings(
        endpoint=endpoint,
        region=_first(options.get("region"), environ.get("AWS_REGION"), environ.get("AWS_DEFAULT_REGION"))
        or "us-east-1",
        access_key_id=_first(keys.get("access_key_id")),
        secret_access_key=_first(keys.get("secret_access_key")),
        session_token=_first(keys.get("session_token")),
        skip_signature=_flag(options, "skip_signature"),
        virtual_hosted=_flag(options, "virtual_hosted_style_request"),
        server_side_encryption=_first(options.get("server_side_encryption")),
        sse_kms_key_id=_first(options.get("sse_kms_key_id")),
        ca_bundle=_first(environ.get("AWS_CA_BUNDLE")),
    )


def _from_environment(environ: Mapping[str, str]) -> dict[str, str | None]:
    names = ("access_key_id", "secret_access_key", "session_token")
    return {name: environ.get(f"AWS_{name.upper()}") for name in names}


def _first(*values: Any) -> str | None:
    return next((str(value) for value in values if value), None)


def _flag(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool) and value not in ("true", "false"):  # as a command line has it
        raise ConfigError(f"storage_options.{name} = {value!r}: must be true or false")
    return value in (True, "true")


def open_s3(url: str, options: Mapping[str, Any]) -> Store:
    """Open `s3://bucket/prefix`; see OPTIONS.

    Raises:
        ConfigError: no bucket in the URL, or a wrong option.
        AccessDenied: no credentials anywhere.
    """
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise ConfigError(f"{url}: the bucket is missing; write s3://bucket/prefix")
    config = settings(options, os.environ)
    client = options.get("client", "obstore")
    if client not in ("obstore", "fsspec"):
        raise ConfigError(f"storage_options.client = {client!r}: must be obstore or fsspec")
    if client == "fsspec":
        return FsspecStore(url, s3fs_options(config), secret_values=config.secret_values)
    return S3Store(bucket, prefix.strip("/"), config)


def s3fs_options(config: S3Settings) -> dict[str, Any]:
    """The same settings in s3fs's words."""
    extra = {"ServerSideEncryption": config.server_side_encryption, "SSEKMSKeyId": config.sse_kms_key_id}
    return {
        "endpoint_url": config.endpoint,
        "key": config.access_key_id,
        "secret": config.secret_access_key,
        "token": config.session_token,
        "anon": config.skip_signature,
        "client_kwargs": {"region_name": config.region},
        "config_kwargs": {"s3": {"addressing_style": _addressing(config)}, "read_timeout": 60},
        "s3_additional_kwargs": {name: value for name, value in extra.items() if value},
    }


def _certificates(bundle: str) -> bytes:
    try:
        found = Path(bundle).read_bytes()
    except OSError as error:
        raise ConfigError(f"AWS_CA_BUNDLE = {bundle!r}: {error.strerror}; must be a file of certificates") from None
    if b"-----BEGIN CERTIFICATE-----" not in found:
        raise ConfigError(f"AWS_CA_BUNDLE = {bundle!r}: no certificate in it; must be in PEM")
    return found


def _addressing(config: S3Settings) -> str:
    if config.virtual_hosted:
        return "virtual"
    return "path" if config.endpoint else "auto"


class S3Store(Store):
    """A bucket, or a prefix in it."""

    def __init__(self, bucket: str, prefix: str, config: S3Settings) -> None:
        url = f"s3://{bucket}/{prefix}".rstrip("/")
        super().__init__(url, config.secret_values)
        self.bucket = bucket
        self.prefix = prefix
        self.config = config
        self._renewals = 0
        self._renewing = threading.Lock()
        self._used: Any = None  # the credentials of the chain that obstore has
        self._store = self._open()

    def _open(self) -> ObstoreS3:
        config = self.config
        given = {
            "aws_endpoint_url_s3": config.endpoint,  # `endpoint` would lose to the environment
            "server_side_encryption": config.server_side_encryption,
            "sse_kms_key_id": config.sse_kms_key_id,
        }
        return ObstoreS3(
            self.bucket,
            prefix=self.prefix or None,
            config={  # type: ignore[arg-type]
                **{name: value for name, value in given.items() if value},
                "region": config.region,
                "unsigned_payload": True,
                "skip_signature": config.skip_signature,
                "virtual_hosted_style_request": config.virtual_hosted,
            },
            client_options={
                "allow_http": bool(config.endpoint and config.endpoint.startswith("http://")),
                "timeout": _REQUEST_TIMEOUT,
                "connect_timeout": datetime.timedelta(seconds=10),
                # botocore reads it itself.
                **({"root_certificate": _certificates(config.ca_bundle)} if config.ca_bundle else {}),
            },
            # Seconds of patience: its pauses are random (a server that only says SlowDown was tried for 1.7 to 5 s).
            # Longer outages are the caller's to wait out: store.outlast.
            retry_config={
                "max_retries": 8,
                "backoff": {
                    "init_backoff": datetime.timedelta(milliseconds=100),
                    "max_backoff": datetime.timedelta(seconds=4),
                    "base": 2,
                },
                "retry_timeout": _REQUEST_TIMEOUT,
            },
            credential_provider=None if config.skip_signature else self._credentials,
        )

    def _credentials(self) -> "S3Credential":
        """What obstore signs with. It would mix given keys with the environment's token, and knows no profiles.

        Without given keys, AWS's whole chain (environment, profile, role of the machine) is botocore's.
        """
        config = self.config
        if config.access_key_id and config.secret_access_key:
            return {
                "access_key_id": config.access_key_id,
                "secret_access_key": config.secret_access_key,
                "token": config.session_token,
                "expires_at": None,
            }
        found = self._chain()
        if found is None:
            raise AccessDenied(
                f"{self.url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, or "
                "storage_options.skip_signature = true for a public bucket"
            )
        self._used = found
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            # botocore renews temporary ones some minutes before they end, so ask again soon.
            "expires_at": datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=5),
        }

    @functools.cached_property
    def _session(self) -> Any:
        import botocore.session  # type: ignore[import-untyped]  # 0.7 s to load, and most stores never need it

        return botocore.session.get_session()

    def _chain(self) -> Any:
        """The credentials of AWS's chain, or None; from now on no error shows them."""
        found = self._session.get_credentials()
        if found is None:
            return None
        frozen = found.get_frozen_credentials()
        new = {value for value in (frozen.secret_key, frozen.token) if value} - set(self._secrets)
        self._secrets = (*self._secrets, *new)
        return frozen

    def _renewed(self, action: Callable[[], T]) -> T:
        """Do something on the store; once more, if the credentials have expired and there are new ones.

        Those of a machine's or a pod's role renew themselves in time. A profile that somebody writes anew is read anew
        here. Of given ones, and those in the environment, there are no new ones.
        """
        before = self._renewals
        try:
            return action()
        except Exception as error:
            if not isinstance(translate(error, self.url), CredentialsExpired) or not self._renew(before):
                raise
        return action()

    def _renew(self, before: int) -> bool:
        """Whether there are other credentials than after this many renewals."""
        import botocore.exceptions  # type: ignore[import-untyped]
        import botocore.session

        with self._renewing:
            if self._renewals != before:
                return True
            if self.config.access_key_id or self.config.skip_signature:
                return False
            session = botocore.session.get_session()  # the old one has read its files
            try:
                found = session.get_credentials()
                if found is None or found.get_frozen_credentials() == self._used:
                    return False
            except botocore.exceptions.BotoCoreError:
                return False
            log.info("%s: the credentials have expired, and there are new ones", self.url)
            self._session = session
            self.__dict__.pop("_client", None)
            self._store = self._open()
            self._renewals += 1
            return True

    @functools.cached_property
    def _client(self) -> Any:
        """botocore's client, for uploads in parts and for deleting; safe to share between threads."""
        import botocore
        from botocore.config import Config  # type: ignore[import-untyped]

        if not (self.config.access_key_id or self.config.skip_signature):
            self._chain()
        return self._session.create_client(
            "s3",
            region_name=self.config.region,
            endpoint_url=self.config.endpoint,
            aws_access_key_id=self.config.access_key_id,
            aws_secret_access_key=self.config.secret_access_key,
            aws_session_token=self.config.session_token,
            config=Config(
                signature_version=botocore.UNSIGNED if self.config.skip_signature else "s3v4",
                s3={"addressing_style": _addressing(self.config)},
                retries={"mode": "standard", "max_attempts": 6},
                connect_timeout=10,
                read_timeout=120,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    @functools.cached_property
    def _http(self) -> urllib3.PoolManager:
        import botocore.httpsession  # type: ignore[import-untyped]

        bundle = self._session.get_config_variable("ca_bundle") or botocore.httpsession.get_cert_path(True)
        return urllib3.PoolManager(
            maxsize=_PARTS_AT_ONCE,
            block=True,
            ca_certs=bundle,
            timeout=urllib3.Timeout(connect=10, read=120),
            # A part that was applied although its answer was lost is simply sent again: same number, same bytes.
            retries=urllib3.Retry(
                total=6,
                allowed_methods=None,
                status_forcelist=(429, 500, 502, 503, 504),
                backoff_factor=0.2,
                raise_on_status=False,
            ),
        )

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}".lstrip("/")

    def _put(self, key: str, data: memoryview, create: bool) -> None:
        if data.nbytes > SINGLE_PUT_BYTES:
            self._put_slices(key, data, create)
            return
        self._renewed(lambda: self._put_whole(key, data, create))

    def _put_whole(self, key: str, data: memoryview, create: bool) -> None:
        if not create:
            obstore.put(self._store, key, data, use_multipart=False)
            return
        # obstore repeats no conditional PUT whose connection was lost, since it may have been applied. If it was, the
        # next one finds the key taken, by us.
        lost = 0
        while True:
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except obstore.exceptions.AlreadyExistsError:
                if lost and self._holds(key, data):
                    return
                raise
            except obstore.exceptions.GenericError as error:
                lost += 1
                if lost == _LOST_PUTS or " - HTTP error: " not in str(error):
                    raise
                time.sleep(random.uniform(0.1, 0.2) * 2**lost)
            else:
                return

    def _holds(self, key: str, data: memoryview) -> bool:
        """Whether an object is these bytes."""
        if self._size(key) != data.nbytes:
            return False
        slices = range(0, data.nbytes, _SLICE_BYTES)
        return all(
            self._get_range(key, at, min(_SLICE_BYTES, data.nbytes - at)) == data[at : at + _SLICE_BYTES]
            for at in slices
        )

    def _put_slices(self, key: str, data: memoryview, create: bool) -> None:
        """Send an object that lies in memory in parallel parts, without copying it.

        Returns or raises only when no thread reads `data` any more: its owner may then reuse it.
        """
        parts = Multipart(self, key, create)
        try:
            slices = [data[at : at + _SLICE_BYTES] for at in range(0, data.nbytes, _SLICE_BYTES)]
            with concurrent.futures.ThreadPoolExecutor(_SLICES_AT_ONCE) as pool:
                sent = [pool.submit(parts.send, number, part) for number, part in enumerate(slices, 1)]
                try:
                    tags = [future.result() for future in sent]
                finally:
                    pool.shutdown(cancel_futures=True)
            parts.complete(tags)
        except BaseException:
            self._abandon(key, parts.abort)
            raise

    def _begin(self, key: str, create: bool) -> Upload:
        if create and self.head(key) is not None:  # spares the upload; the conditional completion decides
            raise FileExistsError(key)
        return _S3Upload(self, key, create)

    def _get(self, key: str) -> bytes:
        return self._renewed(lambda: bytes(obstore.get(self._store, key).bytes()))

    def _get_range(self, key: str, start: int, length: int) -> Buffer:
        return self._renewed(lambda: memoryview(obstore.get_range(self._store, key, start=start, length=length)))

    def _size(self, key: str) -> int:
        return self._renewed(lambda: self._head(key))

    def _head(self, key: str) -> int:
        try:
            return obstore.head(self._store, key)["size"]
        except obstore.exceptions.BaseError as error:
            # The answer to a HEAD has no body to say why; that to a GET has.
            if re.search("status code: 40[013]", str(error)):
                obstore.get_range(self._store, key, start=0, length=1)
            raise

    def _list(self, folder: str, recursive: bool) -> Iterator[ObjectInfo]:
        # obstore asks again for a page that is refused, but not for one that breaks off.
        last: str | None = None
        lost = 0
        while True:
            renewals = self._renewals
            try:
                for item in self._objects(folder or None, recursive, last):
                    yield ObjectInfo(item["path"], item["size"], item["e_tag"] or "")
                    last = item["path"]
            except obstore.exceptions.BaseError as error:
                if isinstance(translate(error, self.url), CredentialsExpired) and self._renew(renewals):
                    continue
                lost += 1
                if lost == _LOST_PAGES or "list response body" not in str(error):
                    raise
                time.sleep(random.uniform(0.1, 0.2) * 2**lost)
            else:
                return

    def _objects(self, prefix: str | None, recursive: bool, after: str | None) -> Iterator["ObjectMeta"]:
        if recursive:
            for page in obstore.list(self._store, prefix, offset=after):
                yield from page
        else:
            yield from obstore.list_with_delimiter(self._store, prefix)["objects"]

    def _delete(self, key: str) -> None:
        # Not obstore's: it deletes by a POST of a list, and gives up when the connection is lost once.
        self._renewed(lambda: self._client.delete_object(Bucket=self.bucket, Key=self._full(key)))


class Multipart:
    """One multipart upload: invisible until complete, and gone after abort. Parts may be sent from several threads."""

    def __init__(self, store: S3Store, key: str, create: bool) -> None:
        self._store = store
        self._create = create
        self._target = {"Bucket": store.bucket, "Key": store._full(key)}
        config = store.config
        extra = {"ServerSideEncryption": config.server_side_encryption, "SSEKMSKeyId": config.sse_kms_key_id}
        given = {name: value for name, value in extra.items() if value}
        started = store._renewed(lambda: store._client.create_multipart_upload(**self._target, **given))
        self._target["UploadId"] = started["UploadId"]

    def send(self, number: int, data: Any) -> str:
        """Send part `number` (from 1), any buffer; returns its ETag."""
        return self._store._renewed(lambda: self._send(number, data))

    def _send(self, number: int, data: Any) -> str:
        url = self._store._client.generate_presigned_url(
            "upload_part", Params={**self._target, "PartNumber": number}, ExpiresIn=3600
        )
        try:
            answer = self._store._http.request("PUT", url, body=data)
        except urllib3.exceptions.HTTPError as error:
            cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error
            raise StoreError(
                f"{self._where}: part {number}: {type(cause).__name__}; the server did not answer"
            ) from None
        if answer.status != 200:
            raise _Answer(answer.status, answer.data)
        return answer.headers["ETag"]

    def complete(self, tags: list[str]) -> None:
        """Make the object visible from its parts 1, 2, ..., unless the key was taken meanwhile."""
        parts = [{"PartNumber": i, "ETag": tag} for i, tag in enumerate(tags, 1)]
        given = {"MultipartUpload": {"Parts": parts}, **({"IfNoneMatch": "*"} if self._create else {})}
        self._store._renewed(lambda: self._store._client.complete_multipart_upload(**self._target, **given))

    def abort(self) -> None:
        """Drop the parts."""
        self._store._client.abort_multipart_upload(**self._target)

    @property
    def _where(self) -> str:
        return f"s3://{self._target['Bucket']}/{self._target['Key']}"


class _Answer(Exception):  # noqa: N818 - it is translated before anybody sees it
    """A refusal of one part, in the form that translate reads."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status} {body[:2000].decode(errors='replace')}")
        self.status = status


class _S3Upload(Upload):
    """A stream: one part on its way while the next one fills. Starts a multipart upload only when it needs one."""

    def __init__(self, store: S3Store, key: str, create: bool) -> None:
        self._store = store
        self._key = key
        self._create = create
        # Two buffers, used in turn: fresh memory for each part would cost as much CPU as sending it.
        self._filling, self._spare = memoryview(bytearray(PART_BYTES)), memoryview(bytearray(PART_BYTES))
        self._filled = 0
        self._parts: Multipart | None = None
        self._tags: list[str] = []
        self._sending: concurrent.futures.Future[str] | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1)

    def write(self, chunk: Buffer) -> None:
        view = memoryview(chunk)
        while view:
            piece = view[: len(self._filling) - self._filled]
            self._filling[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == len(self._filling):
                self._send()

    def finish(self) -> None:
        if self._parts is None:
            self._store._put(self._key, self._filling[: self._filled], self._create)
        else:
            if self._filled:
                self._send()
            self._settle()
            self._parts.complete(self._tags)
        self._pool.shutdown()

    def abort(self) -> None:
        self._pool.shutdown()  # waits for the part on its way: aborting under it could leave the part behind
        if self._parts is not None:
            self._parts.abort()

    def _send(self) -> None:
        if self._parts is None:
            self._parts = Multipart(self._store, self._key, self._create)
        self._settle()  # so the spare is free
        part = self._filling[: self._filled]
        self._sending = self._pool.submit(self._parts.send, len(self._tags) + 1, part)
        self._filling, self._spare, self._filled = self._spare, self._filling, 0

    def _settle(self) -> None:
        if self._sending is not None:
            self._tags.append(self._sending.result())
            self._sending = None
