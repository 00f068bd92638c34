"""Random tokens: the right ones of the right rows, each as often as said, scaled by what the shards stored."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from outputs import make_output

from ray_extract.errors import ConfigError, ShardError
from ray_extract.readers import tokens as tokens_module
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.tokens import TokenSampler
from ray_extract.shards.image import parse_layout
from ray_extract.store import FsspecStore

LENGTHS = (5, 12, 0, 1, 30, 7, 9, 3, 18, 2, 40, 11)
FAILED = (4,)
USABLE = {i: n for i, n in enumerate(LENGTHS) if n and i not in FAILED}


@pytest.fixture(scope="module", params=["raw", "parquet", "raw supervised", "store", "store cached"])
def made(request, tmp_path_factory):
    """An output, and how to open it."""
    folder = tmp_path_factory.mktemp("tokens")
    kind, _, keep = request.param.partition(" ")
    url = f"memory://tokens-{folder.name}" if kind == "store" else None
    output = make_output(
        folder,
        url=url,
        lengths=LENGTHS,
        failed=FAILED,
        format="parquet" if kind == "parquet" else "raw",
        keep="supervised" if keep == "supervised" else "all",
    )
    cache = {"cache_dir": folder / "cache", "cache_bytes": 1 << 20} if keep == "cached" else {}
    return output, {"url": output.url, **cache}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return make_output(tmp_path_factory.mktemp("tokens"), lengths=LENGTHS, failed=FAILED)


def pairs(batches):
    """(row, position) of every token, in order."""
    return [pair for batch in batches for pair in zip(batch["row"].tolist(), batch["positions"].tolist(), strict=True)]


@pytest.mark.parametrize("per_row", [None, 3])
def test_every_token_is_the_one_that_it_says(made, per_row):
    output, options = made
    data = {item["row"]: item for item in HiddenStates(output.url)}
    sampler = TokenSampler(**options, batch_tokens=16, tokens_per_row=per_row, normalise=False, mix_rows=3)
    batches = list(sampler)
    assert [len(batch["row"]) for batch in batches[:-1]] == [16] * (len(batches) - 1)
    assert [batch["item"] for batch in batches] == list(range(len(sampler))) == list(range(len(batches)))
    for batch in batches:
        for i, (row, position) in enumerate(pairs([batch])):
            item = data[row]
            place = item["positions"].tolist().index(position)
            assert batch["row_id"][i] == item["row_id"]
            assert batch["input_ids"][i] == item["input_ids"][position]
            assert all(torch.equal(batch[name][i], item[name][place]) for name in sampler.states)
    found = pairs(batches)
    assert len(set(found)) == len(found)
    kept = {row: len(item["positions"]) for row, item in data.items() if len(item["positions"])}
    assert Counter(row for row, _ in found) == {row: min(n, per_row or n) for row, n in kept.items()}


def test_the_seed_and_the_epoch_decide_which_tokens_and_in_which_order(output):
    def taken(epoch, seed=0, **options):
        sampler = TokenSampler(output.url, [], batch_tokens=8, tokens_per_row=2, seed=seed, **options)
        sampler.set_epoch(epoch)
        return pairs(sampler)

    assert taken(0) == taken(0)
    assert taken(0) != taken(1) and set(taken(0)) != set(taken(1))
    assert set(taken(0)) != set(taken(0, seed=1))


def test_tokens_of_neighbouring_rows_are_mixed(output):
    order = [row for row, _ in pairs(TokenSampler(output.url, [], batch_tokens=32, mix_rows=4))]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > len(order) / 3
    unmixed = [row for row, _ in pairs(TokenSampler(output.url, [], batch_tokens=32, mix_rows=1, shuffle=False))]
    assert unmixed == [row for row, n in USABLE.items() for _ in range(n)]


@pytest.mark.parametrize("per_row", [None, 3])
def test_ranks_share_the_tokens_and_every_position_resumes(output, per_row):
    def make(rank):
        return TokenSampler(
            output.url,
            ["state.3"],
            batch_tokens=7,
            tokens_per_row=per_row,
            mix_rows=2,
            rank=rank,
            ranks=3,
        )

    whole = [pairs(make(rank)) for rank in range(3)]
    assert Counter(row for part in whole for row, _ in part) == {row: min(n, per_row or n) for row, n in USABLE.items()}
    for taken in range(len(make(1)) + 1):
        first, resumed = make(1), make(1)
        begun = pairs(itertools.islice(first, taken))
        resumed.load_state_dict(first.state_dict())
        assert begun + pairs(resumed) == whole[1]


def test_normalised_states_have_a_mean_squared_norm_of_their_width(tmp_path):
    def states(name, ids):
        rng = np.random.default_rng(ids.tolist())
        return rng.standard_normal((len(ids), 16), dtype=np.float32) * {"state.1": 0.01, "state.3": 3}.get(name, 100)

    output = make_output(tmp_path, lengths=LENGTHS, failed=FAILED, states=states)
    sampler = TokenSampler(output.url, batch_tokens=16)
    batches = list(sampler)
    for name in sampler.states:
        tokens = torch.cat([batch[name] for batch in batches])
        assert tokens.dtype == torch.float32 and len(tokens) == sum(USABLE.values())
        assert tokens.square().sum(1).mean().item() == pytest.approx(16, rel=1e-5)
    assert sampler.scales["state.1"] > 10 * sampler.scales["state.3"]
    again = TokenSampler(output.url, ["state.3"], batch_tokens=16, normalise=sampler.scales)
    assert all(torch.equal(a["state.3"], b["state.3"]) for a, b in zip(again, batches, strict=True))
    assert again.scales == {"state.3": sampler.scales["state.3"]}


def test_a_state_comes_in_the_type_asked_for(output):
    first = next(iter(TokenSampler(output.url, ["state.3"], batch_tokens=4, normalise=False)))
    assert first["state.3"].dtype == torch.bfloat16
    half = next(iter(TokenSampler(output.url, ["state.3"], batch_tokens=4, dtype=torch.float16)))
    assert half["state.3"].dtype == torch.float16


def test_a_state_of_zeros_or_without_a_scale_is_refused(tmp_path, output):
    zeros = make_output(tmp_path, lengths=[3, 4])
    for path in (tmp_path / "out" / "shards").iterdir():
        data = bytearray(path.read_bytes())
        parse_layout(bytes(data)).small(data, "sumsq")[...] = 0
        path.write_bytes(data)
    with pytest.raises(ShardError, match=r"state\.1 is zero in all of its 2 rows"):
        TokenSampler(zeros.url, batch_tokens=4)
    with pytest.raises(ConfigError, match=r"no scale of state\.3; it has state\.1"):
        TokenSampler(output.url, ["state.1", "state.3"], batch_tokens=4, normalise={"state.1": 1.0})


@pytest.mark.parametrize("name", ["batch_tokens", "tokens_per_row", "mix_rows"])
def test_a_number_below_one_is_refused_by_name(output, name):
    with pytest.raises(ConfigError, match=f"{name} = 0: must be at least 1"):
        TokenSampler(output.url, **{"batch_tokens": 4, name: 0})
    for value in (float("nan"), 4.0, "4", True):
        with pytest.raises(ConfigError, match=f"{name} = .*: must be a whole number"):
            TokenSampler(output.url, **{"batch_tokens": 4, name: value})


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0, -1.0, "1.0", True, None, [1, 2]])
def test_a_scale_that_is_no_scale_is_refused(output, scale):
    with pytest.raises(ConfigError, match=r"normalise\['state\.3'\] = .*: must be a finite number above 0"):
        TokenSampler(output.url, ["state.3"], batch_tokens=4, normalise={"state.3": scale})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalise": "yes"}, "normalise = 'yes': must be True, False, or the scales of an earlier sampler"),
        ({"normalise": None}, "normalise = None: must be"),
        ({"normalise": float("nan")}, "normalise = nan: must be"),
        ({"normalise": 1}, "normalise = 1: must be"),
        ({"dtype": torch.int32}, "dtype = torch.int32: must be one of PyTorch's types of real numbers"),
        ({"dtype": torch.complex64}, "dtype = torch.complex64: must be"),
        ({"dtype": "float32"}, "dtype = 'float32': must be"),
        ({"mix": 0}, "mix = 0: must be at least 1"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(output, options, message):
    with pytest.raises(ConfigError, match=message):
        TokenSampler(output.url, batch_tokens=4, **options)


def test_a_position_goes_on_only_with_the_same_scales(output):
    scaled = TokenSampler(output.url, ["state.3"], batch_tokens=4)
    state = json.loads(json.dumps(scaled.state_after(1)))
    again = TokenSampler(output.url, ["state.3"], batch_tokens=4, normalise=scaled.scales)
    again.load_state_dict(state)
    assert next(iter(again))["item"] == 2
    for normalise in (False, {"state.3": 2 * scaled.scales["state.3"]}):
        with pytest.raises(ConfigError, match=r"another stream: normalise was \{'state\.3': .*\} and is \{"):
            TokenSampler(output.url, ["state.3"], batch_tokens=4, normalise=normalise).load_state_dict(state)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e9])
def test_sums_of_squares_that_are_none_do_not_scale(tmp_path, value):
    output = make_output(tmp_path)
    path = min((tmp_path / "out" / "shards").iterdir())
    data = bytearray(path.read_bytes())
    parse_layout(bytes(data)).small(data, "sumsq")[0, 1] = value
    path.write_bytes(data)
    with pytest.raises(ShardError, match=r"the sums of squares of state\.3 add up to .*, so a shard is damaged"):
        TokenSampler(output.url, ["state.3"], batch_tokens=4)


def test_few_tokens_of_long_rows_are_read_without_the_rest(tmp_path, monkeypatch):
    output = make_output(tmp_path, url="memory://tokens-few", lengths=[800] * 6, hidden=256)
    read = []
    original = FsspecStore._get_range

    def get(store, key, start, length):
        read.append(length)
        return original(store, key, start, length)

    monkeypatch.setattr(tokens_module, "GAP_BYTES", 512)
    sampler = TokenSampler(output.url, ["state.3"], batch_tokens=12, tokens_per_row=2, normalise=False)
    monkeypatch.setattr(FsspecStore, "_get_range", get)
    batches = list(sampler)
    states = [length for length in read if length % 512 == 0 and length <= 2048]
    assert len(pairs(batches)) == 12 and sum(states) <= 2 * 12 * 512
    assert sum(read) < 0.2 * 6 * 800 * 512
