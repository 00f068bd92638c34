"""The stream: every row once whoever reads it, batches within their budget, and a position that is exact."""

import itertools
import json

import numpy as np
import pytest
import torch
from outputs import NAMES, make_output
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

from ray_extract.errors import ConfigError, ShardError
from ray_extract.readers import stream as stream_module
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.stream import HiddenStatesStream

LENGTHS = (5, 12, 0, 1, 30, 7, 9, 3, 18, 2, 2, 40, 11, 6, 25, 4, 8, 16, 1, 10)
FAILED = (4, 6, 7)  # 6 and 7 are all rows of a shard
USABLE = [i for i, n in enumerate(LENGTHS) if n and i not in FAILED]
BUDGET = 45


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Ten shards, one of them without a row that is ok."""
    return make_output(tmp_path_factory.mktemp("stream"), lengths=LENGTHS, failed=FAILED)


@pytest.fixture
def workers(monkeypatch):
    """Makes this process worker `id` of `count`, as a DataLoader's is."""

    def be(id, count, seed=77):
        info = WorkerInfo(id=id, num_workers=count, seed=seed + id, dataset=None) if count else None
        monkeypatch.setattr(stream_module, "get_worker_info", lambda: info)

    return be


def rows_of(items):
    """Row numbers of rows or batches, in order."""
    return [row for item in items for row in np.atleast_1d(np.asarray(item["row"])).tolist()]


def as_bits(item):
    """An item as something that can be compared."""
    return {
        name: value.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value
        for name, value in item.items()
    }


def test_a_row_is_an_item_of_the_map_style_data_set(output):
    data = {item["row"]: item for item in HiddenStates(output.url)}
    items = list(HiddenStatesStream(output.url, check=True))
    assert [item.pop("item") for item in items] == list(range(len(USABLE)))
    assert sorted(rows_of(items)) == USABLE
    assert all(as_bits(item) == as_bits(data[item["row"]]) for item in items)


def test_rows_that_failed_or_were_skipped_and_shards_without_others_never_appear(output):
    for options in ({}, {"max_tokens": BUDGET}, {"shuffle": False}, {"mix": None}):
        stream = HiddenStatesStream(output.url, **options)
        assert sorted(rows_of(stream)) == USABLE
    assert rows_of(HiddenStatesStream(output.url, shuffle=False)) == USABLE


@pytest.mark.parametrize("keep", ["all", "supervised", "random:3"])
def test_a_batch_is_rows_one_after_the_other(tmp_path, keep):
    output = make_output(tmp_path, lengths=LENGTHS, failed=FAILED, keep=keep)
    data = {item["row"]: item for item in HiddenStates(output.url)}
    batches = list(HiddenStatesStream(output.url, max_tokens=BUDGET))
    assert max(len(batch["row"]) for batch in batches) > 1
    for batch in batches:
        assert batch["cu_seqlens"].dtype == batch["cu_kept"].dtype == torch.int32
        assert int(batch["cu_seqlens"][-1]) == len(batch["input_ids"]) == len(batch["loss_mask"]) <= BUDGET
        assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max())
        for b, row in enumerate(batch["row"].tolist()):
            start, end = batch["cu_seqlens"][b : b + 2].tolist()
            first, last = batch["cu_kept"][b : b + 2].tolist()
            item = data[row]
            assert batch["row_id"][b] == item["row_id"]
            assert torch.equal(batch["input_ids"][start:end], item["input_ids"])
            assert torch.equal(batch["loss_mask"][start:end], item["loss_mask"])
            assert torch.equal(batch["positions"][first:last], item["positions"])
            assert all(torch.equal(batch[name][first:last], item[name]) for name in NAMES)


def test_a_row_longer_than_the_budget_is_an_error_or_left_out_or_alone(output):
    with pytest.raises(ConfigError, match=r"max_tokens = 20: 2 of 16 rows are longer, up to 40 tokens; .*long_rows"):
        HiddenStatesStream(output.url, max_tokens=20)
    dropped = list(HiddenStatesStream(output.url, max_tokens=20, long_rows="drop"))
    assert sorted(rows_of(dropped)) == [row for row in USABLE if LENGTHS[row] <= 20]
    alone = list(HiddenStatesStream(output.url, max_tokens=20, long_rows="alone"))
    assert sorted(rows_of(alone)) == USABLE
    assert all(len(batch["row"]) == 1 for batch in alone if len(batch["input_ids"]) > 20)


@pytest.mark.parametrize("budget", [None, BUDGET])
@pytest.mark.parametrize(("ranks", "count"), [(1, 0), (1, 3), (2, 0), (3, 2), (40, 1)])
def test_every_row_comes_once_over_all_ranks_and_workers(output, workers, budget, ranks, count):
    seen = []
    for rank in range(ranks):
        for worker in range(max(1, count)):
            workers(worker, count)
            seen += rows_of(HiddenStatesStream(output.url, max_tokens=budget, rank=rank, ranks=ranks, seed=3))
    assert sorted(seen) == USABLE


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_ranks_can_have_equally_many_items(output, budget):
    def items(even):
        return [
            list(HiddenStatesStream(output.url, max_tokens=budget, rank=rank, ranks=3, seed=1, even=even))
            for rank in range(3)
        ]

    whole, dropped, padded = items("off"), items("drop"), items("pad")
    counts = [len(part) for part in whole]
    assert min(counts) < max(counts)
    assert [len(part) for part in dropped] == [min(counts)] * 3
    assert [len(part) for part in padded] == [max(counts)] * 3
    for mine, fewer, more in zip(whole, dropped, padded, strict=True):
        assert rows_of(fewer) == rows_of(mine)[: len(rows_of(fewer))]
        assert rows_of(more) == rows_of([*mine, *mine[: max(counts) - len(mine)]])
        assert [item["item"] for item in more] == list(range(max(counts)))
    assert len(HiddenStatesStream(output.url, max_tokens=budget, rank=2, ranks=3, seed=1, even="pad")) == max(counts)


def test_the_seed_and_the_epoch_decide_the_order(output):
    def order(seed, epoch=0):
        stream = HiddenStatesStream(output.url, seed=seed)
        stream.set_epoch(epoch)
        return rows_of(stream)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1, epoch=3) == order(1, epoch=3) != order(1)
    stream = HiddenStatesStream(output.url, seed=1)
    assert rows_of(stream) == rows_of(stream) == order(1)
    stream.set_epoch(3)
    assert rows_of(stream) == order(1, epoch=3) and stream.epoch == 3


@pytest.mark.parametrize("even", ["off", "pad"])
@pytest.mark.parametrize("budget", [None, BUDGET])
def test_resuming_after_any_item_yields_what_an_uninterrupted_pass_would(output, budget, even):
    def make():
        return HiddenStatesStream(output.url, states=["state.3"], max_tokens=budget, seed=4, rank=1, ranks=2, even=even)

    whole_stream = make()
    whole_stream.set_epoch(2)
    whole = [as_bits(item) for item in whole_stream]
    states = []
    first = make()
    first.set_epoch(2)
    states.append(first.state_dict())
    states += [first.state_dict() for _ in first]
    assert len(states) == len(whole) + 1
    for taken, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.epoch == 2 and resumed.state_dict() == state
        assert [as_bits(item) for item in resumed] == whole[taken:]
        assert [as_bits(item) for item in resumed] == whole, "the pass after a resumed one is a whole one"
        if taken:
            assert make().state_after(taken - 1, epoch=2) == state


def test_a_resumed_epoch_goes_on_when_set_again_and_another_one_starts_at_its_beginning(output):
    first = HiddenStatesStream(output.url)
    taken = rows_of(itertools.islice(first, 5))
    state = first.state_dict()
    resumed = HiddenStatesStream(output.url)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert taken + rows_of(resumed) == rows_of(HiddenStatesStream(output.url))
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert sorted(rows_of(resumed)) == USABLE


def test_a_position_of_another_stream_is_refused_with_what_differs(output, tmp_path):
    state = HiddenStatesStream(output.url, seed=1, max_tokens=BUDGET).state_dict()
    with pytest.raises(ConfigError, match="seed was 1 and is 2; max_tokens was 45 and is 50"):
        HiddenStatesStream(output.url, seed=2, max_tokens=50).load_state_dict(state)
    with pytest.raises(ConfigError, match="rows was"):
        other = make_output(tmp_path, lengths=LENGTHS)
        HiddenStatesStream(other.url, seed=1, max_tokens=BUDGET).load_state_dict(state)
    with pytest.raises(ConfigError, match="state version 9"):
        HiddenStatesStream(output.url).load_state_dict({"version": 9})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "the state is none that state_dict or state_after gave"),
        ([], "the state is none that"),
        ({}, "the state is none that"),
        ({"of": None}, "does not say of which stream it is"),
        ({"next": -1}, r"state\['next'\] = -1: must not be negative"),
        ({"next": 1.5}, r"state\['next'\] = 1.5: must be a whole number"),
        ({"epoch": "0"}, r"state\['epoch'\] = '0': must be a whole number"),
        ({"workers": None}, r"state\['workers'\] = None: must be a whole number"),
    ],
)
def test_what_is_no_position_is_refused(output, change, message):
    stream = HiddenStatesStream(output.url)
    state = {**stream.state_dict(), **change} if change else change
    with pytest.raises(ConfigError, match=message):
        stream.load_state_dict(state)


@pytest.mark.parametrize("even", ["off", "pad"])
def test_there_is_no_position_after_an_item_that_the_epoch_does_not_have(output, even):
    stream = HiddenStatesStream(output.url, rank=1, ranks=2, even=even)
    total = len(stream)
    assert stream.state_after(total - 1)["next"] == total
    for item, epoch in ((total, None), (total + 7, 3)):
        with pytest.raises(ConfigError, match=f"item = {item}: epoch {epoch or 0} has {total} items on this rank"):
            stream.state_after(item, epoch)
    for item in (-1, 0.0, "0", None, float("nan")):
        with pytest.raises(ConfigError, match=r"item = .*: must (not be negative|be a whole number)"):
            stream.state_after(item)
    with pytest.raises(ConfigError, match=r"epoch = 0\.5: must be a whole number"):
        stream.state_after(0, 0.5)


def test_numpys_numbers_will_do_and_a_position_is_plain(output):
    options = {"seed": np.int64(3), "max_tokens": np.int32(BUDGET), "rank": np.int8(0), "ranks": np.uint8(2)}
    stream = HiddenStatesStream(output.url, **options)
    assert json.loads(json.dumps(stream.state_after(torch.tensor(0)))) == stream.state_after(0)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_worker_goes_on_where_its_own_position_says(output, workers, taken):
    """What torchdata's StatefulDataLoader does in each worker."""
    whole = rows_of(HiddenStatesStream(output.url))
    workers(1, 3)
    stream = HiddenStatesStream(output.url)
    mine = rows_of(itertools.islice(stream, taken))
    state = stream.state_dict()
    resumed = HiddenStatesStream(output.url)
    resumed.load_state_dict(state)
    assert mine + rows_of(resumed) == whole[1::3]
    resumed.load_state_dict(state)
    workers(0, 3)
    with pytest.raises(ConfigError, match="worker 1 of 3, this is 0 of 3; resume with the same num_workers"):
        iter(resumed)
    workers(0, 0)
    with pytest.raises(ConfigError, match="worker 1 of 3; load it through the DataLoader"):
        resumed.load_state_dict(state)


def loaded(stream, **options):
    return DataLoader(stream, batch_size=None, **options)


@pytest.mark.parametrize(("start", "persistent"), [("fork", False), ("fork", True), ("spawn", False)])
def test_dataloader_workers_yield_the_same_sequence_and_see_epochs_and_positions(output, start, persistent):
    def order(epoch):
        alone = HiddenStatesStream(output.url, seed=9)
        alone.set_epoch(epoch)
        return rows_of(alone)

    stream = HiddenStatesStream(output.url, seed=9)
    loader = loaded(stream, num_workers=2, multiprocessing_context=start, persistent_workers=persistent)
    assert rows_of(stream) == rows_of(loader) == order(0)
    if start == "spawn":
        return  # workers take seconds to start
    stream.set_epoch(1)
    items = list(loader)
    assert rows_of(items) == order(1)
    with pytest.raises(ConfigError, match=r"state_after\(item\)"):
        stream.state_dict()
    stream.load_state_dict(stream.state_after(items[6]["item"]))
    assert rows_of(loader) == order(1)[7:]
    assert rows_of(loader) == order(1), "the pass after a resumed one is a whole one"
    stream.load_state_dict(stream.state_after(items[6]["item"]))
    stream.set_epoch(2)
    assert rows_of(loader) == order(2)


@pytest.mark.parametrize("count", [0, 2])
def test_torchdatas_stateful_loader_resumes(output, count):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        stream = HiddenStatesStream(output.url, max_tokens=BUDGET, seed=2)
        return loaders.StatefulDataLoader(stream, batch_size=None, num_workers=count)

    whole = rows_of(make())
    first = make()
    taken = rows_of(itertools.islice(first, 3))
    state = first.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert taken + rows_of(resumed) == whole
    assert rows_of(resumed) == whole


def test_a_flipped_bit_is_found_when_checked(tmp_path):
    output = make_output(tmp_path)
    shard = next((tmp_path / "out" / "shards").glob("u00000000.*"))
    data = bytearray(shard.read_bytes())
    data[data.index(output.stored[1]["state.3"][:5].tobytes()) + 33] ^= 2
    shard.write_bytes(data)
    for options in ({}, {"max_tokens": 100}):
        assert len(rows_of(HiddenStatesStream(output.url, **options))) == 5
        assert len(rows_of(HiddenStatesStream(output.url, ["state.1"], check=True, **options))) == 5
        with pytest.raises(ShardError, match=r"row 1: state\.3 are not what was captured"):
            list(HiddenStatesStream(output.url, check=True, **options))


@pytest.mark.parametrize("format", ["raw", "parquet"])
@pytest.mark.parametrize("cached", [False, True])
def test_shards_of_an_object_store_are_fetched_ahead(tmp_path, format, cached):
    output = make_output(
        tmp_path, url=f"memory://stream-{format}-{cached}", lengths=LENGTHS, failed=FAILED, format=format
    )
    cache = {"cache_dir": tmp_path / "cache", "cache_bytes": 1 << 20} if cached else {}
    for ahead in (0, 1, 3):
        stream = HiddenStatesStream(output.url, ["state.3", "state.final"], check=True, ahead=ahead, **cache)
        items = list(stream)
        assert sorted(rows_of(items)) == USABLE
        for item in items:
            assert all(
                item[name].view(torch.uint8).numpy().tobytes() == output.stored[item["row"]][name].tobytes()
                for name in stream.states
            )


def test_no_more_shards_are_open_at_once_than_mix_and_ahead(tmp_path, monkeypatch):
    output = make_output(tmp_path, url="memory://stream-open", lengths=[3] * 40, rows_per_unit=4)
    stream = HiddenStatesStream(output.url, mix=3, ahead=2)
    most = 0
    original = stream_module._Window.at

    def at(window, place):
        nonlocal most
        shards = original(window, place)
        most = max(most, len(shards) + len(window._coming))
        return shards

    monkeypatch.setattr(stream_module._Window, "at", at)
    assert len(rows_of(stream)) == 40
    assert 3 < most <= 3 + 2


def test_a_pass_that_is_broken_off_leaves_nothing_that_the_next_one_would_meet(tmp_path):
    output = make_output(tmp_path, url="memory://stream-broken-off", lengths=LENGTHS, failed=FAILED)
    stream = HiddenStatesStream(output.url)
    whole = rows_of(stream)
    for taken in (0, 1, 7):
        assert rows_of(itertools.islice(stream, taken)) == whole[:taken]
    assert rows_of(stream) == whole


def test_workers_on_an_object_store_are_asked_for_a_cache(tmp_path, workers):
    output = make_output(tmp_path, url="memory://stream-workers")
    workers(0, 2)
    with pytest.raises(ConfigError, match=r"each of 2 workers would hold shards .* give cache_dir and cache_bytes"):
        iter(HiddenStatesStream(output.url))
    workers(0, 1)
    assert len(rows_of(HiddenStatesStream(output.url))) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank and ranks go together"),
        ({"rank": 2, "ranks": 2}, r"rank = 2: must be in 0 \.\. 1"),
        ({"even": "maybe"}, "even = 'maybe'"),
        ({"seed": -1}, "seed = -1"),
        ({"mix": 0}, "mix = 0: must be at least 1, or None"),
        ({"ahead": -1}, "ahead = -1"),
        ({"ahead": 0.5}, "ahead = 0.5: must be a whole number"),
        ({"seed": "0"}, "seed = '0': must be a whole number"),
        ({"mix": float("nan")}, "mix = nan: must be a whole number"),
        ({"rank": 0.0, "ranks": 2}, "rank = 0.0: must be a whole number"),
        ({"max_tokens": float("nan")}, "max_tokens = nan: must be a whole number"),
        ({"cache_dir": "/nowhere", "cache_bytes": "1GiB"}, "cache_bytes = '1GiB': must be a whole number"),
        ({"states": "state.1"}, r"states = 'state\.1': must be a list of names, such as \['state\.1'\]"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_tokens": 9, "long_rows": "cut"}, "long_rows = 'cut'"),
        ({"cache_dir": "/nowhere"}, "cache_dir and cache_bytes go together"),
        ({"states": ["state.2"]}, r"no state 'state\.2'"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(output, options, message):
    with pytest.raises(ConfigError, match=message):
        HiddenStatesStream(output.url, **options)


def test_more_ranks_than_items_cannot_be_padded(output):
    with pytest.raises(ConfigError, match="a rank without any has nothing to repeat"):
        list(HiddenStatesStream(output.url, rank=0, ranks=40, even="pad"))
    assert list(HiddenStatesStream(output.url, rank=0, ranks=40, even="drop")) == []


def test_the_ranks_of_torch_distributed_are_taken(output, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    stream = HiddenStatesStream(output.url)
    assert (stream.rank, stream.ranks) == (1, 2)
    assert rows_of(stream) == rows_of(HiddenStatesStream(output.url, rank=1, ranks=2))
