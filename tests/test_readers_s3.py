"""The readers on a real S3 server: how many requests they send, and that workers can share a cache."""

from collections import Counter

import pytest
import torch
from outputs import NAMES, make_output
from proxies import CountingProxy
from torch.utils.data import DataLoader

from ray_extract.capture.fp8 import decode
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.stream import HiddenStatesStream
from ray_extract.readers.tokens import TokenSampler

pytestmark = pytest.mark.s3

LENGTHS = (50, 120, 30, 10, 300, 70, 90, 40)


@pytest.fixture(scope="module")
def output(s3, tmp_path_factory):
    """Four shards of two rows; a row table and its states do not fit into the first read."""
    return make_output(
        tmp_path_factory.mktemp("readers-s3"),
        url=f"{s3.url}/readers",
        storage_options=s3.storage_options,
        lengths=LENGTHS,
        hidden=1024,
    )


@pytest.fixture
def proxy(s3):
    with CountingProxy(s3.storage_options["endpoint"]) as proxy:
        yield proxy


@pytest.fixture
def options(s3, proxy):
    """Storage options that lead through the proxy."""
    return {**s3.storage_options, "endpoint": proxy.endpoint}


def right(output, item, names=NAMES):
    return all(
        item[name].view(torch.uint8).numpy().tobytes() == output.stored[item["row"]][name].tobytes() for name in names
    )


@pytest.mark.parametrize("names", [["state.3"], list(NAMES)])
@pytest.mark.parametrize("check", [False, True])
def test_a_row_is_one_request_for_each_state(output, proxy, options, names, check):
    data = HiddenStates(output.url, names, check=check, storage_options=options)
    for index in (0, 2, 4, 6):  # opens each shard
        assert right(output, data[index], names)
    proxy.requests.clear()
    for index in (5, 0, 3, 7, 2, 6, 1, 4):
        assert right(output, data[index], names)
        assert len(proxy.requests) == len(names)
        assert len(proxy.shards()) == len(names)


@pytest.mark.parametrize("keep", ["all", "random:3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_one_state_of_a_row_is_one_request_given_the_manifest(s3, proxy, options, tmp_path, keep, dtype):
    url = f"{s3.url}/{tmp_path.name}"
    output = make_output(tmp_path, url=url, storage_options=s3.storage_options, keep=keep, dtype=dtype, failed=[1])
    data = HiddenStates(url, check=True, storage_options=options)
    proxy.requests.clear()
    for index, row in enumerate(data._rows.row.tolist()):
        for name in NAMES:
            got = data.state(index, name)
            stored = output.stored[row][name]
            if dtype == "float8_e4m3":
                assert got.equal(decode(torch.from_numpy(stored)))
            else:
                assert got.view(torch.uint8).numpy().tobytes() == stored.tobytes()
    assert [method for method, _ in proxy.requests] == ["GET"] * len(data) * len(NAMES)


def test_opening_a_shard_is_two_requests_once_its_table_is_short(output, proxy, options):
    data = HiddenStates(output.url, ["state.3"], storage_options=options)
    proxy.requests.clear()
    assert right(output, data[2], ["state.3"])
    assert [method for method, _ in proxy.requests] == ["HEAD", "GET", "GET"], "size, head and table, state"


def test_a_batch_sends_its_requests_at_once_and_no_more_of_them(output, proxy, options):
    data = HiddenStates(output.url, ["state.1", "state.3"], storage_options=options)
    loader = DataLoader(data, batch_size=4, sampler=[7, 0, 5, 2], collate_fn=lambda items: items)
    proxy.requests.clear()
    (items,) = loader
    assert [item["row"] for item in items] == [7, 0, 5, 2]
    assert all(right(output, item, ["state.1", "state.3"]) for item in items)
    assert len(proxy.shards()) == 4 + 2 * 4, "four shards were opened"


def test_a_stream_fetches_each_shard_once(output, proxy, options, tmp_path):
    for cache in ({}, {"cache_dir": tmp_path, "cache_bytes": 8 << 20}):
        stream = HiddenStatesStream(output.url, check=True, storage_options=options, **cache)
        proxy.requests.clear()
        items = list(stream)
        assert sorted(item["row"] for item in items) == list(range(8))
        assert all(right(output, item) for item in items)
        assert set(Counter(proxy.shards()).values()) == {2}, "its head, and all of it"
    list(stream)
    assert not proxy.shards(), "the cache has them"


def test_workers_of_a_dataloader_share_the_cache(output, proxy, options, tmp_path):
    stream = HiddenStatesStream(
        output.url, max_tokens=300, storage_options=options, cache_dir=tmp_path, cache_bytes=8 << 20
    )
    alone = [batch["row"].tolist() for batch in stream]
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    proxy.requests.clear()
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert [batch["row"].tolist() for batch in loader] == alone
    assert set(Counter(proxy.shards()).values()) == {2}, "no shard was fetched by both"


def test_tokens_are_read_by_range(output, proxy, options):
    sampler = TokenSampler(
        output.url, ["state.3"], batch_tokens=8, tokens_per_row=1, storage_options=options, normalise=False
    )
    proxy.requests.clear()
    (batch,) = list(sampler)
    assert sorted(batch["row"].tolist()) == list(range(8))
    for row, position, state in zip(batch["row"].tolist(), batch["positions"].tolist(), batch["state.3"], strict=True):
        assert state.view(torch.uint8).numpy().tobytes() == output.stored[row]["state.3"][position].tobytes()
    assert len(proxy.shards()) <= 3 + 8
