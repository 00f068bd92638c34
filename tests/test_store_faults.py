"""What stores and networks do to requests, done to SeaweedFS behind a proxy: the right bytes, or an error that says."""

import concurrent.futures
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import servers
from faulty_proxy import Do, FaultyProxy, Request

from ray_extract import s3 as s3_module
from ray_extract import store as store_module
from ray_extract.errors import (
    AccessDenied,
    AlreadyExists,
    ClockSkew,
    CredentialsExpired,
    NotFound,
    OutOfSpace,
    StoreError,
    Throttled,
    Verdict,
)
from ray_extract.store import Store, open_store, put_once

pytestmark = pytest.mark.s3

PART = 5 << 20  # the smallest that S3 takes
DATA = bytes(range(256)) * 1000

LOST = (Do.RESET_BEFORE, Do.RESET_WITHIN, Do.LOSE_ANSWER)
REFUSED = (Do.SLOW_DOWN, Do.BUSY)


@pytest.fixture
def proxy(s3: servers.S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3.storage_options["endpoint"]) as proxy:
        yield proxy


@pytest.fixture
def store(s3: servers.S3Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty prefix, reached through the proxy."""
    for module in (store_module, s3_module):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(s3_module, "_SLICE_BYTES", PART)
    monkeypatch.setattr(s3_module, "SINGLE_PUT_BYTES", 2 * PART)
    return open_store(f"{s3.url}/{uuid.uuid4().hex}", {**s3.storage_options, "endpoint": proxy.endpoint})


def first(count: int, do: Do, method: str = "", part: str = "") -> "First":
    return First(count, do, method, part)


class First:
    """A fault for the first requests of a kind."""

    def __init__(self, count: int, do: Do, method: str, part: str) -> None:
        self.left, self.do, self.method, self.part = count, do, method, part

    def __call__(self, request: Request) -> Do:
        if self.left and self.method in request.method and self.part in request.path:
            self.left -= 1
            return self.do
        return Do.PASS


@pytest.mark.parametrize("do", [*REFUSED, *LOST, Do.STALL], ids=lambda do: do.name)
def test_a_burst_of_faults_is_outlasted_by_every_request(store: Store, proxy: FaultyProxy, do: Do) -> None:
    proxy.stall_s = 0.3
    for act in (
        lambda: store.put("a", DATA, create=False),
        lambda: store.get("a") == DATA or pytest.fail("other bytes"),
        lambda: store.get_range("a", 1000, 50_000) == DATA[1000:51_000] or pytest.fail("other bytes"),
        lambda: store.head("a").size == len(DATA) or pytest.fail("another size"),  # type: ignore[union-attr]
        lambda: [item.key for item in store.list("")] == ["a"] or pytest.fail("another list"),
        lambda: store.delete("a"),
    ):
        proxy.decide = first(1 if do is Do.STALL else 3, do)
        act()
        assert proxy.decide.left == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("do", [*REFUSED, *LOST], ids=lambda do: do.name)
def test_create_once_is_right_whatever_is_lost(store: Store, proxy: FaultyProxy, do: Do) -> None:
    """An answer may be lost to a PUT that was applied; the second try then finds the key taken, by us."""
    proxy.decide = first(2, do, "PUT")
    assert put_once(store, "commit", b"ours")
    assert store.get("commit") == b"ours"
    proxy.decide = first(2, do, "PUT")
    assert not put_once(store, "commit", b"theirs")
    assert store.get("commit") == b"ours"


@pytest.mark.parametrize("do", [*REFUSED, *LOST], ids=lambda do: do.name)
def test_a_shard_in_parts_arrives_whole(store: Store, proxy: FaultyProxy, do: Do) -> None:
    data = DATA * 60  # 15 MB, in three parts
    proxy.decide = first(2, do, "PUT", "partNumber")
    store.put("shard", memoryview(data))
    assert store.get("shard") == data
    proxy.decide = first(2, do, "PUT", "partNumber")
    store.put_stream("stream", (data[at : at + 1_000_000] for at in range(0, len(data), 1_000_000)))
    assert store.get("stream") == data


def test_parts_of_all_shards_share_few_connections(
    store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "_PARTS_AT_ONCE", 3)
    proxy.stall_s = 0.5
    begun: list[float] = []

    def stall(request: Request) -> Do:
        if "partNumber" not in request.path:
            return Do.PASS
        begun.append(time.monotonic())
        return Do.STALL

    proxy.decide = stall
    data = memoryview(DATA * 60)  # in three parts
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: store.put(key, data), ("a", "b")))
    assert len(begun) == 6
    # Each takes half a second, so of four that begin within it all are under way at once.
    assert all(later - first >= proxy.stall_s for first, later in zip(begun, begun[3:], strict=False))


@pytest.mark.parametrize("do", [*REFUSED, Do.RESET_BEFORE, Do.LOSE_ANSWER], ids=lambda do: do.name)
def test_the_start_and_the_end_of_an_upload_may_fail_too(store: Store, proxy: FaultyProxy, do: Do) -> None:
    """Of an end whose answer was lost the second try hears that the key is taken, or that there is no such upload."""
    data = DATA * 60
    for part in ("uploads", "uploadId"):
        proxy.decide = first(1, do, "POST", part)
        try:
            store.put(f"shard-{part}", memoryview(data))
        except AlreadyExists:
            assert (part, do) == ("uploadId", Do.LOSE_ANSWER)
        assert store.get(f"shard-{part}") == data


def test_half_an_answer_is_never_taken_for_a_whole_one(store: Store, proxy: FaultyProxy) -> None:
    store.put("a", DATA)
    for read in (lambda: store.get("a"), lambda: store.get_range("a", 0, len(DATA))):
        proxy.decide = first(2, Do.CUT_ANSWER, "GET")
        assert read() == DATA
        proxy.decide = lambda request: Do.CUT_ANSWER
        try:
            assert read() == DATA  # by ranges, each half a bit further
        except StoreError as error:
            assert error.verdict is Verdict.RETRY


@pytest.mark.parametrize("recursive", [True, False])
def test_a_listing_that_breaks_off_is_asked_for_again(store: Store, proxy: FaultyProxy, recursive: bool) -> None:
    keys = ["a", "b", "c"]
    for key in keys:
        store.put(key, DATA)
    proxy.decide = first(2, Do.CUT_ANSWER, "GET", "list-type")
    assert [item.key for item in store.list("", recursive=recursive)] == keys
    proxy.decide = lambda request: Do.CUT_ANSWER
    with pytest.raises(StoreError) as caught:
        list(store.list("", recursive=recursive))
    assert caught.value.verdict is Verdict.RETRY


def test_a_listing_goes_on_behind_the_pages_it_gave(store: Store, s3: servers.S3Server, proxy: FaultyProxy) -> None:
    keys = [f"{number:04d}" for number in range(1001)]  # a page has 1000
    direct = open_store(store.url, s3.storage_options)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: direct.put(key, b""), keys))
    proxy.decide = first(1, Do.CUT_ANSWER, "GET", "continuation-token")
    assert [item.key for item in store.list("")] == keys
    assert proxy.counts() == {"CUT_ANSWER": 1}


def test_a_store_that_only_says_slow_down_is_an_error_worth_a_retry_in_bounded_time(
    store: Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    proxy.decide = lambda request: Do.SLOW_DOWN
    with pytest.raises(Throttled, match=r"the store asks for fewer requests; .*: SlowDown: told to") as caught:
        store.put("a", DATA)
    assert caught.value.verdict is Verdict.RETRY and str(caught.value).startswith(store.url)
    assert 3 <= len(proxy.seen) <= 12  # several tries, and no flood


REASONS = {
    Do.DENY: (AccessDenied, "access denied; check the credentials and what they may do"),
    Do.EXPIRE: (CredentialsExpired, "the credentials have expired, .*; get new ones and run the same command"),
    Do.SKEW: (
        ClockSkew,
        "this machine's clock is wrong: it says 20200102T030405Z, and the store's 2026-07-08T09:10:11Z; set it",
    ),
    Do.NO_BUCKET: (NotFound, "no such bucket; create it or correct the URL"),
    Do.FULL: (OutOfSpace, "no space left; free some, or raise the quota, and run the same command"),
    Do.QUOTA: (OutOfSpace, "no space left; free some, or raise the quota, and run the same command"),
}


def operations(store: Store) -> dict[str, Callable[[], object]]:
    """Every kind of request, with its own way of telling a refusal."""
    parts = [DATA] * 60  # 15 MB, in three parts
    return {
        "PUT once": lambda: store.put("a", DATA),
        "PUT": lambda: store.put("a", DATA, create=False),
        "parts": lambda: store.put("a", b"".join(parts), create=False),
        "stream": lambda: store.put_stream("a", parts, create=False),
        "GET": lambda: store.get("a"),
        "range": lambda: store.get_range("a", 0, 9),
        "HEAD": lambda: store.head("a"),
        "list": lambda: list(store.list("")),
        "folder": lambda: list(store.list("", recursive=False)),
        "DELETE": lambda: store.delete("a"),
    }


@pytest.mark.parametrize("do", REASONS, ids=lambda do: do.name)
def test_what_a_store_refuses_for_is_told_apart_and_not_tried_again(store: Store, proxy: FaultyProxy, do: Do) -> None:
    kind, told = REASONS[do]
    for name, act in operations(store).items():
        proxy.decide = lambda request: do
        proxy.seen.clear()
        if do is Do.NO_BUCKET and name in ("HEAD", "DELETE"):
            act()  # neither the answer nor the caller makes a difference between no bucket and no object
            continue
        with pytest.raises(StoreError, match=f"^{re.escape(store.url)}(/a)?: {told}") as caught:
            act()
        assert type(caught.value) is kind and caught.value.verdict is Verdict.STOP, name
        assert len(proxy.seen) <= (12 if do is Do.FULL else 3), name


def test_parts_that_are_refused_for_space_are_dropped(store: Store, proxy: FaultyProxy) -> None:
    proxy.decide = lambda request: Do.QUOTA if "partNumber=2" in request.path else Do.PASS
    for name in ("parts", "stream"):
        with pytest.raises(OutOfSpace):
            operations(store)[name]()
    proxy.decide = lambda request: Do.PASS
    assert "Uploads" not in store._client.list_multipart_uploads(Bucket="bucket", Prefix=store.prefix)  # type: ignore[attr-defined]


@pytest.fixture
def profile(s3: servers.S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the profile that credentials come from, with this access key."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    secret = s3.storage_options["secret_access_key"]

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    write("AKOLD")
    return write


def chained(s3: servers.S3Server, proxy: FaultyProxy) -> Store:
    """A store without credentials of its own."""
    return open_store(f"{s3.url}/{uuid.uuid4().hex}", {"endpoint": proxy.endpoint})


@pytest.mark.parametrize("name", ["PUT once", "PUT", "parts", "stream", "GET", "range", "HEAD", "list", "DELETE"])
def test_credentials_that_expire_are_read_anew_once(
    s3: servers.S3Server, store: Store, proxy: FaultyProxy, profile: Callable[[str], None], name: str
) -> None:
    del store  # for small parts
    other = chained(s3, proxy)
    open_store(other.url, s3.storage_options).put("a" if name != "PUT once" else "b", DATA)

    def decide(request: Request) -> Do:
        if request.signer != servers.ACCESS_KEY:
            profile(servers.ACCESS_KEY)  # whoever looks after it has written it anew
            return Do.EXPIRE
        return Do.PASS

    proxy.decide = decide
    operations(other)[name]()
    refused = [request for request, do in proxy.seen if do is Do.EXPIRE]
    assert 1 <= len(refused) <= 2  # of a HEAD the GET that asks why, too
    proxy.seen.clear()
    operations(other)["list"]()
    assert [request.signer for request, _ in proxy.seen] == [servers.ACCESS_KEY]


def test_credentials_that_expire_in_the_middle_of_an_upload_do_not_start_it_anew(
    s3: servers.S3Server, store: Store, proxy: FaultyProxy, profile: Callable[[str], None]
) -> None:
    del store
    profile(servers.ACCESS_KEY)
    other = chained(s3, proxy)
    expired: list[Request] = []

    def decide(request: Request) -> Do:
        if "partNumber=2" in request.path and not expired:
            expired.append(request)
            profile("AKNEW")
            return Do.EXPIRE
        return Do.PASS

    proxy.decide = decide
    # The new key is not known to the server, so the upload goes no further; but it has gone on with it.
    with pytest.raises(AccessDenied):
        operations(other)["stream"]()
    parts = [request for request, _ in proxy.seen if "partNumber" in request.path]
    assert [request.signer for request in parts if "partNumber=2" in request.path] == [servers.ACCESS_KEY, "AKNEW"]
    assert len([request for request in parts if "partNumber=1&" in f"{request.path}&"]) == 1


def test_credentials_that_stay_expired_are_an_error_at_once(
    s3: servers.S3Server, proxy: FaultyProxy, profile: Callable[[str], None]
) -> None:
    other = chained(s3, proxy)
    proxy.decide = lambda request: Do.EXPIRE
    with pytest.raises(CredentialsExpired):
        other.put("a", DATA)
    assert len(proxy.seen) == 1
    profile("AKNEW")
    with pytest.raises(CredentialsExpired):
        other.put("a", DATA)
    assert [request.signer for request, _ in proxy.seen] == ["AKOLD", "AKOLD", "AKNEW"]
