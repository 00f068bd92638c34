"""What stores and networks do to requests, done to SeaweedFS behind a proxy: the right bytes, or an error that says."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import servers
from faulty_proxy import Do, FaultyProxy, Request

from ray_extract import s3 as s3_module
from ray_extract import store as store_module
from ray_extract.errors import AlreadyExists, StoreError, Verdict
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


def test_a_store_that_only_says_slow_down_is_an_error_worth_a_retry_in_bounded_time(
    store: Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    proxy.decide = lambda request: Do.SLOW_DOWN
    with pytest.raises(StoreError, match=r"SlowDown|503") as caught:
        store.put("a", DATA)
    assert caught.value.verdict is Verdict.RETRY and str(caught.value).startswith(store.url)
    assert 3 <= len(proxy.seen) <= 12  # several tries, and no flood
