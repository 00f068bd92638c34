"""One contract for every store, and what each backend needs on top."""

import concurrent.futures
import contextlib
import errno
import mmap
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers

from ray_extract import s3 as s3_module
from ray_extract import store as store_module
from ray_extract.errors import (
    AccessDenied,
    AlreadyExists,
    ClockSkew,
    ConfigError,
    CredentialsExpired,
    NotFound,
    OutOfSpace,
    StoreError,
    Throttled,
    Verdict,
)
from ray_extract.store import LocalStore, ObjectInfo, Store, open_store, outlast, probe_create, put_once, translate

PART = 5 << 20  # the smallest that S3 takes

S3_CLIENTS = [
    pytest.param("obstore", marks=pytest.mark.s3),
    pytest.param("fsspec", marks=pytest.mark.s3),
]


@pytest.fixture(params=["local", "memory", *S3_CLIENTS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    name = uuid.uuid4().hex
    if request.param == "local":
        return open_store(f"file://{tmp_path}/out")
    if request.param == "memory":
        return open_store(f"memory://{name}/out")
    server: servers.S3Server = request.getfixturevalue("s3")
    return open_store(f"{server.url}/{name}/out", {**server.storage_options, "client": request.param})


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multipart uploads at a size that tests can afford."""
    monkeypatch.setattr(store_module, "PART_BYTES", PART)
    monkeypatch.setattr(s3_module, "PART_BYTES", PART)
    monkeypatch.setattr(s3_module, "_SLICE_BYTES", PART)
    monkeypatch.setattr(s3_module, "SINGLE_PUT_BYTES", 2 * PART)


def pattern(nbytes: int) -> bytes:
    """Bytes in which every shift shows."""
    return b"".join(i.to_bytes(4, "little") for i in range(nbytes // 4 + 1))[:nbytes]


def test_objects_come_back_as_they_went(store: Store) -> None:
    for key, data in (("a", b""), ("folder/b", b"hello"), ("folder/deep/c", pattern(100_003))):
        store.put(key, data)
        assert store.get(key) == data
        assert store.head(key) == ObjectInfo(key, len(data))


def test_a_listing_tells_which_objects_were_written_anew(store: Store) -> None:
    def versions() -> list[str]:
        return [item.version for item in store.list("folder/")]

    for key in "ab":
        store.put(f"folder/{key}", b"first")
    before = versions()
    assert all(before) and versions() == before
    store.delete("folder/a")
    store.put("folder/a", b"other")
    (new, same) = versions()
    assert same == before[1] and new != before[0]


def test_create_refuses_a_taken_key_and_leaves_it_alone(store: Store) -> None:
    store.put("key", b"first")
    with pytest.raises(AlreadyExists, match=f"{store.url}/key"):
        store.put("key", b"other")
    with pytest.raises(AlreadyExists):
        store.put_stream("key", [b"other"])
    assert store.get("key") == b"first"


def test_without_create_the_object_is_replaced(store: Store) -> None:
    store.put("key", b"first, and longer")
    store.put("key", b"second", create=False)
    assert store.get("key") == b"second"
    store.put_stream("key", [b"th", b"ird"], create=False)
    assert store.get("key") == b"third"


def test_eight_threads_create_one_key_and_one_wins(store: Store) -> None:
    barrier = threading.Barrier(8)

    def attempt(i: int) -> int | None:
        barrier.wait()
        try:
            store.put("key", str(i).encode() * 1000)
        except AlreadyExists:
            return None
        return i

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        winners = [i for i in pool.map(attempt, range(8)) if i is not None]
    assert len(winners) == 1
    assert store.get("key") == str(winners[0]).encode() * 1000


def test_the_probe_sees_create_refused_and_leaves_nothing(store: Store) -> None:
    assert probe_create(store)
    assert list(store.list("")) == []


def test_the_probe_sees_a_store_that_overwrites(tmp_path: Path) -> None:
    class Careless(LocalStore):
        def _put(self, key: str, data: memoryview, create: bool) -> None:
            super()._put(key, data, False)

    assert not probe_create(Careless(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_ranges_are_exact_or_an_error(store: Store) -> None:
    data = pattern(1000)
    store.put("key", data)
    assert store.get_range("key", 0, 1000) == data
    assert store.get_range("key", 17, 301) == data[17:318]
    assert store.get_range("key", 999, 1) == data[999:]
    assert store.get_range("key", 500, 0) == b""
    for start, length in ((990, 11), (1000, 1), (5000, 10)):
        with pytest.raises(StoreError) as caught:
            store.get_range("key", start, length)
        assert f"{store.url}/key" in str(caught.value)


def test_list_is_by_folder_and_sorted(store: Store) -> None:
    keys = ["commits/u2.json", "commits/u1.json", "commits/deep/u3.json", "commits-other/x", "run.json"]
    for key in keys:
        store.put(key, key.encode())
    assert [item.key for item in store.list("commits/")] == [
        "commits/deep/u3.json",
        "commits/u1.json",
        "commits/u2.json",
    ]
    assert all(item.size == len(item.key) for item in store.list(""))
    assert [item.key for item in store.list("commits/", recursive=False)] == ["commits/u1.json", "commits/u2.json"]
    assert [item.key for item in store.list("", recursive=False)] == ["run.json"]
    assert {item.key for item in store.list("")} == set(keys)
    assert list(store.list("nothing/")) == []


def test_a_listing_shows_what_another_client_wrote_since(store: Store) -> None:
    store.put("shards/1", b"1")
    assert len(list(store.list("shards/"))) == 1
    if store.local_path("x"):
        other: Store = LocalStore(store.url)
    elif isinstance(store, s3_module.S3Store):
        other = store
    else:
        other = store_module.FsspecStore(store.url, {**store._fs.storage_options, "skip_instance_cache": True})  # type: ignore[attr-defined]
    other.put("shards/2", b"22")
    assert store.head("shards/2") == ObjectInfo("shards/2", 2)
    assert len(list(store.list("shards/"))) == 2


def test_missing_keys(store: Store) -> None:
    store.put("folder/key", b"x")
    assert store.head("nothing") is None
    assert store.head("folder") is None
    for read in (lambda: store.get("nothing"), lambda: store.get_range("nothing", 0, 1)):
        with pytest.raises(NotFound, match=f"{store.url}/nothing"):
            read()
    store.delete("nothing")
    store.delete("folder/key")
    assert store.head("folder/key") is None


def test_a_stream_of_many_parts_arrives_whole_and_only_at_its_end(store: Store, small_parts: None) -> None:
    data = pattern(3 * PART + 12_345)
    scratch = bytearray(1 << 20)

    def chunks() -> Iterator[memoryview]:
        for at in range(0, len(data), len(scratch)):
            piece = data[at : at + len(scratch)]
            scratch[: len(piece)] = piece  # one buffer for all, as a writer of Parquet has
            assert store.head("shards/s") is None
            yield memoryview(scratch)[: len(piece)]

    assert store.put_stream("shards/s", chunks()) == len(data)
    assert store.get("shards/s") == data
    assert [item.key for item in store.list("")] == ["shards/s"]
    with pytest.raises(AlreadyExists):
        store.put_stream("shards/s", iter([data]))


def test_small_and_empty_streams(store: Store) -> None:
    assert store.put_stream("empty", []) == 0
    assert store.put_stream("small", iter([b"ab", b"", b"c"])) == 3
    assert (store.get("empty"), store.get("small")) == (b"", b"abc")


@pytest.mark.parametrize("nbytes", [1000, 2 * PART + 17])
def test_a_stream_that_fails_leaves_nothing_and_its_own_error(store: Store, small_parts: None, nbytes: int) -> None:
    def chunks() -> Iterator[bytes]:
        yield pattern(nbytes)
        raise LookupError("of the producer")

    with pytest.raises(LookupError, match="of the producer"):
        store.put_stream("shards/s", chunks())
    assert store.head("shards/s") is None
    assert list(store.list("")) == []
    assert unfinished_uploads(store) == []
    assert leftover_files(store) == []


@pytest.mark.parametrize("nbytes", [1000, 2 * PART + 17])
def test_a_stream_that_loses_the_race_at_its_end_is_refused(store: Store, small_parts: None, nbytes: int) -> None:
    def chunks() -> Iterator[bytes]:
        yield pattern(nbytes)
        store.put("shards/s", b"somebody else's")

    with pytest.raises(AlreadyExists):
        store.put_stream("shards/s", chunks())
    assert store.get("shards/s") == b"somebody else's"
    assert unfinished_uploads(store) == []
    assert leftover_files(store) == []


def unfinished_uploads(store: Store) -> list[Any]:
    """Multipart uploads that the server still holds for this store: they cost money and no listing shows them."""
    if isinstance(store, s3_module.S3Store):
        answer = store._client.list_multipart_uploads(Bucket=store.bucket, Prefix=store.prefix)
    elif store.url.startswith("s3://"):
        bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
        answer = store._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)  # type: ignore[attr-defined]
    else:
        return []
    return list(answer.get("Uploads", []))


def leftover_files(store: Store) -> list[Path]:
    """Temporary files in a local folder."""
    root = store.local_path("")
    return [path for path in root.rglob("*.part") if path.is_file()] if root else []


@pytest.mark.parametrize("nbytes", [3 * mmap.PAGESIZE, 3 * PART + 8])
def test_a_mapped_file_is_uploaded_and_let_go(store: Store, small_parts: None, tmp_path: Path, nbytes: int) -> None:
    source = tmp_path / "extent"
    source.write_bytes(pattern(nbytes))
    with source.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), nbytes)
    view = memoryview(mapped)
    store.put("shards/m", view)
    view.release()
    mapped.close()  # raises BufferError if anything still holds it
    assert store.get("shards/m") == source.read_bytes()
    with pytest.raises(AlreadyExists), source.open("rb") as file:
        store.put("shards/m", memoryview(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)))
    assert unfinished_uploads(store) == []


def test_put_once_knows_its_own_object_from_another(store: Store) -> None:
    assert put_once(store, "key", b"ours")
    assert put_once(store, "key", b"ours")
    assert not put_once(store, "key", b"theirs")
    assert store.get("key") == b"ours"


def test_only_a_local_folder_has_paths(store: Store) -> None:
    store.put("folder/key", b"x")
    path = store.local_path("folder/key")
    assert (path is not None) == isinstance(store, LocalStore)
    if path:
        assert path.read_bytes() == b"x"


# S3


@pytest.fixture(params=["obstore", "fsspec"])
def s3_options(request: pytest.FixtureRequest, s3: servers.S3Server) -> dict[str, Any]:
    """Options of the S3 server, for each client."""
    return {**s3.storage_options, "client": request.param}


@pytest.mark.s3
@pytest.mark.parametrize("wrong", ["secret_access_key", "access_key_id"])
def test_wrong_credentials_are_denied_without_being_shown(
    s3: servers.S3Server, s3_options: dict[str, Any], small_parts: None, wrong: str
) -> None:
    store = open_store(f"{s3.url}/denied", {**s3_options, wrong: "WRONG-and-secret"})
    for act in (
        lambda: store.put("key", b"x"),
        lambda: store.put("key", pattern(3 * PART)),
        lambda: store.put_stream("key", [pattern(2 * PART)], create=False),
        lambda: store.get("key"),
        lambda: store.head("key"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(AccessDenied) as caught:
            act()
        assert caught.value.verdict is Verdict.STOP
        assert "s3://bucket/denied" in str(caught.value)
        assert "WRONG-and-secret" not in str(caught.value)
        assert servers.SECRET_KEY not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


@pytest.mark.s3
def test_a_missing_bucket_is_not_found(s3_options: dict[str, Any], small_parts: None) -> None:
    store = open_store("s3://no-such-bucket/out", s3_options)
    for act in (
        lambda: store.put("key", b"x"),
        lambda: store.put("key", pattern(3 * PART)),
        lambda: store.put_stream("key", [pattern(2 * PART)]),
        lambda: store.get("key"),
    ):
        with pytest.raises(NotFound, match="s3://no-such-bucket/out/key"):
            act()


@pytest.mark.s3
def test_no_credentials_anywhere_are_an_error_at_once(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    options = {name: value for name, value in s3_options.items() if "key" not in name}
    with pytest.raises(AccessDenied, match="credentials"):
        open_store("s3://bucket/anyone", options).put("key", b"x")


@pytest.mark.s3
def test_credentials_and_endpoint_come_from_the_environment(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_options["endpoint"])
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}", {"client": s3_options["client"]})
    store.put("small", b"x")
    store.put_stream("large", [pattern(2 * PART)])
    assert {item.key for item in store.list("")} == {"small", "large"}


@pytest.mark.s3
def test_given_credentials_are_not_mixed_with_the_environments(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a token of another key")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}", s3_options)
    store.put("small", b"x")
    store.put("large", pattern(3 * PART))
    assert {item.key for item in store.list("")} == {"small", "large"}


@pytest.mark.s3
def test_credentials_come_from_a_profile(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_parts: None
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    profile = tmp_path / "credentials"
    profile.write_text(
        f"[lab]\naws_access_key_id = {servers.ACCESS_KEY}\naws_secret_access_key = {servers.SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    options = {name: value for name, value in s3_options.items() if "key" not in name}
    if options["client"] == "fsspec":
        options["region"] = "us-east-2"  # fsspec keeps one client for equal options, made without the profile
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}", options)
    store.put("small", b"x")
    store.put_stream("large", [pattern(2 * PART)])
    assert {item.key for item in store.list("")} == {"small", "large"}


@pytest.mark.s3
def test_a_server_that_is_down_is_worth_a_retry(s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("s3://bucket/out", {**s3_options, "endpoint": f"http://127.0.0.1:{servers.free_ports(1)[0]}"})
    with pytest.raises(StoreError) as caught:
        store.put("key", b"x")
    assert caught.value.verdict is Verdict.RETRY


@pytest.mark.s3
def test_errors_do_not_show_signed_urls(s3: servers.S3Server, small_parts: None) -> None:
    store = open_store(f"{s3.url}/signed", s3.storage_options)
    assert isinstance(store, s3_module.S3Store)
    parts = s3_module.Multipart(store, "key", True)
    parts.abort()
    with pytest.raises(StoreError) as refused, store._errors("key"):
        parts.send(1, pattern(PART))
    assert "Signature" not in str(refused.value)
    assert "NoSuchUpload" in str(refused.value)


# Opening


def test_a_relative_path_means_the_same_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("out")
    store.put("key", b"x")
    monkeypatch.chdir("/")
    assert open_store(store.url).get("key") == b"x"


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("", {}, "URL is empty"),
        ("s3://", {}, "bucket is missing"),
        ("s3://bucket/x", {"acces_key_id": "A"}, "did you mean access_key_id"),
        ("s3://bucket/x", {"access_key_id": "A"}, "go together"),
        ("s3://bucket/x", {"endpoint": "localhost:8333"}, "http:// or https://"),
        ("s3://bucket/x", {"client": "boto"}, "obstore or fsspec"),
        ("s3://bucket/x", {"skip_signature": "yes"}, "true or false"),
        ("nosuch://bucket/x", {}, "nosuch"),
        ("ftp://user:hunter22@host/x", {}, "storage_options"),
        ("memory://x?sig=hunter22", {}, "storage_options"),
        ("/tmp/x", {"region": "r"}, "no options"),
    ],
)
def test_a_wrong_url_or_option_is_explained(url: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, options)
    assert says in str(caught.value)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize(("value", "meant"), [(True, True), ("true", True), (False, False), ("false", False)])
def test_a_command_line_can_say_true_and_false(value: Any, meant: bool) -> None:
    assert s3_module.settings({"skip_signature": value}, {}).skip_signature is meant


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_wrong_certificate_bundle_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(ConfigError, match=f"AWS_CA_BUNDLE = '{bundle}'"):
        open_store("s3://bucket")


# Errors


class ServerSaid(Exception):  # noqa: N818 - it plays another library's
    """What botocore raises."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}


class UnauthorizedSSOTokenError(Exception):
    """What botocore raises."""


def s3fs_error(number: int, status: int, code: str) -> OSError:
    """What s3fs makes of it."""
    error = OSError(number, "message")
    error.__cause__ = ServerSaid(status, code)
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OutOfSpace),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), OutOfSpace),
        (OSError(errno.EACCES, "Permission denied"), AccessDenied),
        (OSError(errno.EROFS, "Read-only file system"), AccessDenied),
        (OSError(errno.ENOENT, "No such file"), NotFound),
        (OSError(errno.EEXIST, "File exists"), AlreadyExists),
        (OSError(errno.EIO, "Input/output error"), StoreError),
        (s3fs_error(errno.EINVAL, 412, "PreconditionFailed"), AlreadyExists),
        (s3fs_error(errno.EINVAL, 400, "BadDigest"), StoreError),
        (s3fs_error(errno.EINVAL, 400, "TokenRefreshRequired"), CredentialsExpired),
        (s3fs_error(errno.EIO, 409, "ConditionalRequestConflict"), StoreError),
        (s3fs_error(errno.EIO, 503, "SlowDown"), Throttled),
        (ServerSaid(400, "ExpiredToken"), CredentialsExpired),
        (ServerSaid(403, "RequestTimeTooSkewed"), ClockSkew),
        (ServerSaid(403, "SignatureDoesNotMatch"), AccessDenied),
        (ServerSaid(403, "QuotaExceeded"), OutOfSpace),
        (ServerSaid(400, "XMinioAdminBucketQuotaExceeded"), OutOfSpace),
        (ServerSaid(429, "TooManyRequests"), Throttled),
        (ServerSaid(503, "ServiceUnavailable"), StoreError),
        (UnauthorizedSSOTokenError("The SSO session has expired"), CredentialsExpired),
        (ServerSaid(404, "NoSuchBucket"), NotFound),
        (ServerSaid(507, "InsufficientStorage"), OutOfSpace),
        (TimeoutError("slow"), StoreError),
    ],
)
def test_errors_of_every_library_become_ours(error: Exception, expected: type[StoreError]) -> None:
    assert type(translate(error, "s3://bucket/key")) is expected


FULL_DISK = """
import sys
from ray_extract.errors import AccessDenied, OutOfSpace
from ray_extract.store import open_store
store = open_store("file://" + sys.argv[1])
for act in (lambda: store.put("a/shard", bytes(2 << 20)), lambda: store.put_stream("a/shard", [bytes(1 << 19)] * 4)):
    try:
        act()
    except OutOfSpace as error:
        print(error)
store.put("a/small", b"x" * 1000)
print([item.key for item in store.list("")], sorted(p.name for p in store.root.rglob("*")))
"""


def test_a_full_disk_is_told_leaves_nothing_and_takes_what_fits(tmp_path: Path) -> None:
    disk, script = tmp_path / "disk", tmp_path / "script.py"
    disk.mkdir()
    script.write_text(FULL_DISK)
    # A disk of a megabyte, in a mount namespace of its own, which ends with the process.
    mount = f"mount -t tmpfs -o size=1M none {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} && exec {sys.executable} {script} {disk}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, second, left = done.stdout.splitlines()
    for line in (first, second):
        assert line.startswith(
            f"{disk}/a/shard: no space left; free some, or raise the quota, and run the same command"
        )
    assert left == "['a/small'] ['a', 'small']"


def test_translate_blanks_secrets_and_queries() -> None:
    error = ValueError("hunter22 was refused at https://host/key?X-Amz-Signature=abc&x=1 today")
    text = str(translate(error, "s3://bucket/key", ["hunter22"]))
    assert "hunter22" not in text
    assert "abc" not in text
    assert text.endswith("*** was refused at https://host/key today")
    error = ValueError("PUT /key?X-Amz-Security-Token=hunter%2F22 from http://me:hunter@proxy:1/ refused")
    text = str(translate(error, "s3://bucket/key", ["hunter/22"]))
    assert text.endswith("PUT /key?X-Amz-Security-Token=*** from http://proxy:1/ refused")


def test_the_time_that_a_failing_store_took_is_told_whether_it_recovered_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock[0] += timeout or 0.0
            return False

    monkeypatch.setattr(store_module.time, "monotonic", lambda: clock[0])
    for failures, patience, error in ((0, 60, None), (3, 60, None), (9, 60, Throttled)):
        lost: list[float] = []
        left = iter([Throttled("slow down")] * failures)

        def act(left: Iterator[Throttled] = left) -> str:
            for failure in left:
                raise failure
            return "done"

        clock[0] = 100.0
        with pytest.raises(error) if error else contextlib.nullcontext():
            assert outlast(act, patience, Stopped(), "a test", lost.append) == "done"
        assert lost == ([] if not failures else [clock[0] - 100.0]) and (not failures or lost[0] > 5)
