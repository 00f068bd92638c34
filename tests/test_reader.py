"""The torch data set: the rows that are ok, bit for bit, lazily, in any process, and loud about altered shards."""

import errno
import json
import multiprocessing
import pickle
import re
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from outputs import NAMES, kept_positions, make_output
from torch.utils.data import DataLoader

from ray_extract.capture.fp8 import decode
from ray_extract.dataset.prepared import PreparedRows
from ray_extract.errors import AccessDenied, ConfigError, NotFound, RayExtractError, ShardError
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.stream import HiddenStatesStream
from ray_extract.readers.tokens import TokenSampler

FORMATS = ["raw", "parquet"]


def bits(tensor):
    """A state's bytes; u8 [kept, bytes per token]."""
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("keep", ["all", "supervised", "last", "random:3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3"])
def test_items_are_the_rows_that_are_ok_bit_for_bit(tmp_path, format, keep, dtype):
    output = make_output(tmp_path, format=format, keep=keep, dtype=dtype, failed=[4])
    data = HiddenStates(output.url, check=True)
    assert [item["row"] for item in data] == [0, 1, 3, 5]
    rows = {row.index: row for row in PreparedRows(output.store, output.index).read(0, output.index.rows)}
    for at, item in enumerate(data):
        row = rows[item["row"]]
        assert item["row_id"] == row.row_id
        assert item["input_ids"].dtype == torch.int64 and item["input_ids"].tolist() == row.input_ids.tolist()
        assert item["loss_mask"].tolist() == row.loss_mask.tolist()
        positions = kept_positions(row, keep)
        assert item["positions"].tolist() == positions.tolist()
        for name in NAMES:
            assert item[name].dtype == getattr(torch, "bfloat16" if dtype == "float8_e4m3" else dtype)
            assert item[name].shape == (len(positions), 16)
            assert data.state(at, name).equal(item[name])
            if dtype == "float8_e4m3":
                assert item[name].equal(decode(torch.from_numpy(output.stored[row.index][name])))
            else:
                assert np.array_equal(bits(item[name]), output.stored[row.index][name])
    assert data.lengths().tolist() == [5, 12, 1, 7]
    assert data[-1]["row"] == 5
    with pytest.raises(IndexError):
        data[4]


@pytest.mark.parametrize("url", [None, "memory://batches/out"])
def test_a_batch_of_a_dataloader_is_read_together_and_is_its_items(tmp_path, url):
    output = make_output(tmp_path, url=url)
    loader = DataLoader(HiddenStates(output.url, check=True), batch_size=3, sampler=[4, 0, 2, 1], collate_fn=list)
    batches = list(loader)
    assert [[item["row"] for item in batch] for batch in batches] == [[5, 0, 3], [1]]
    for item in (item for batch in batches for item in batch):
        assert all(np.array_equal(bits(item[name]), output.stored[item["row"]][name]) for name in NAMES)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("states", [None, ["state.3"]])
def test_a_state_under_another_name_is_found(tmp_path, format, states):
    """Digests go by place, so names that are exchanged, or off by a bit, are for the manifest to notice."""
    output = make_output(tmp_path, format=format, rows_per_unit=6)
    (shard,) = (tmp_path / "out/shards").iterdir()
    data = shard.read_bytes()
    told = r"its states are state\.|state\.3 (is missing|are not what was captured)|not a whole"
    for one, other in ((b"state.3", b"state.2"), (b"state.3", b"state.1")):
        swapped = data.replace(one, b"state.?").replace(other, one).replace(b"state.?", other)
        assert swapped != data
        shard.write_bytes(swapped)
        with pytest.raises(ShardError, match=told):
            HiddenStates(output.url, states, check=True)[0]


def test_only_the_states_asked_for_are_read(tmp_path):
    output = make_output(tmp_path)
    item = HiddenStates(output.url, states=["state.3"])[0]
    assert [name for name in item if name.startswith("state.")] == ["state.3"]
    with pytest.raises(ConfigError, match=r"no state 'state\.2'; it has state\.1, state\.3, state\.final"):
        HiddenStates(output.url, states=["state.2"])


def test_local_raw_states_are_views_of_the_file_mapping(tmp_path):
    output = make_output(tmp_path)
    data = HiddenStates(output.url)
    pointer = data[0]["state.3"].data_ptr()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".safetensors" in line]
    ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in maps]
    assert any(start <= pointer < end for start, end in ranges)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out" / "shards").iterdir()}
    data[0]["state.3"].zero_()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out" / "shards").iterdir()} == before


def test_writing_to_an_item_of_a_parquet_shard_does_not_change_the_next_read(tmp_path):
    data = HiddenStates(make_output(tmp_path, format="parquet").url, check=True)
    data[0]["state.3"].zero_()
    data[0]["input_ids"].zero_()
    data[0]["loss_mask"].zero_()
    assert data[0]["state.3"].any() and data[0]["input_ids"].any()


def test_a_tensor_outlives_the_data_set_and_its_cache(tmp_path):
    output = make_output(tmp_path, lengths=[5, 6, 7, 8], rows_per_unit=1)
    data = HiddenStates(output.url, open_shards=1)
    kept = [data[i]["state.1"] for i in range(4)]
    assert len(data._open) == 1
    del data
    assert all(np.array_equal(bits(t), output.stored[i]["state.1"]) for i, t in enumerate(kept))


@pytest.mark.parametrize("format", FORMATS)
def test_it_can_be_pickled_and_reopens_lazily(tmp_path, format):
    output = make_output(tmp_path, format=format)
    data = HiddenStates(output.url)
    data[0]
    copy = pickle.loads(pickle.dumps(data))
    assert len(copy._open) == 0
    assert np.array_equal(bits(copy[1]["state.final"]), output.stored[1]["state.final"])


@pytest.mark.parametrize(("format", "start"), [("raw", "fork"), ("parquet", "fork"), ("parquet", "spawn")])
def test_dataloader_workers_read_the_same_rows(tmp_path, format, start):
    output = make_output(tmp_path, format=format)
    data = HiddenStates(output.url)
    data[0]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start)
    items = list(loader)
    assert [item["row"] for item in items] == [0, 1, 3, 4, 5]
    assert all(np.array_equal(bits(i["state.3"]), output.stored[i["row"]]["state.3"]) for i in items)


def _read_first(data, results):
    try:
        results.put(data[0]["row"])
    except RayExtractError as error:
        results.put(str(error))


def test_a_forked_worker_on_an_object_store_is_told_what_to_do(tmp_path):
    output = make_output(tmp_path, url="memory://forked/out")
    data = HiddenStates(output.url)
    assert data[0]["row"] == 0
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_read_first, args=(data, results))
    child.start()
    said = results.get(timeout=60)
    child.join()
    assert 'multiprocessing_context="spawn"' in said


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_byte_is_found_when_checked_and_names_row_and_state(tmp_path, format):
    output = make_output(tmp_path, format=format)
    shard = next((tmp_path / "out" / "shards").glob("u00000000.*"))
    data = bytearray(shard.read_bytes())
    data[data.index(output.stored[1]["state.3"][:5].tobytes()) + 33] ^= 2
    shard.write_bytes(data)
    checked = HiddenStates(output.url, check=True)
    assert checked[0]["row"] == 0
    with pytest.raises(ShardError, match=r"u00000000.*row 1: state\.3 are not what was captured"):
        checked[1]
    assert HiddenStates(output.url)[1]["row"] == 1
    assert HiddenStates(output.url, states=["state.1"], check=True)[1]["row"] == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_byte_is_found_when_a_state_is_asked_for_alone(tmp_path, format):
    output = make_output(tmp_path, url=f"memory://{uuid.uuid4().hex}/out", format=format)
    (shard,) = (item.key for item in output.store.list("shards/") if "u00000000." in item.key)
    whole = output.store.get(shard)
    data = bytearray(whole)
    data[data.index(output.stored[1]["state.3"][:5].tobytes()) + 33] ^= 2
    output.store.put(shard, data, create=False)
    checked = HiddenStates(output.url, check=True)
    with pytest.raises(ShardError, match=r"row 1: state\.3 are not what was captured.*delete the unit's file"):
        checked.state(1, "state.3")
    assert checked.state(0, "state.3").shape == (5, 16) and checked.state(1, "state.1").shape == (12, 16)
    with pytest.raises(ConfigError, match=r"name = 'state\.7': the states that are read are state\.1, "):
        checked.state(1, "state.7")
    with pytest.raises(IndexError, match="row 5 of 5"):
        checked.state(5, "state.1")
    output.store.put(shard, whole[: len(whole) // 2], create=False)
    with pytest.raises(ShardError, match=r"u00000000.*(truncated|not a whole)"):
        HiddenStates(output.url).state(1, "state.3")


def test_a_shard_of_another_run_under_the_same_key_is_found(tmp_path):
    output = make_output(tmp_path / "a")
    other = make_output(tmp_path / "b", lengths=(6, 12, 0, 1, 30, 7))
    shards = sorted((tmp_path / "a" / "out" / "shards").iterdir())
    shards[0].write_bytes((tmp_path / "b" / "out" / "shards" / shards[0].name).read_bytes())
    for check in (False, True):
        with pytest.raises(ShardError, match="row 0: the manifest's digests are not what was captured"):
            HiddenStates(output.url, check=check)[0]
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(ShardError, match="line 0 is not row 0"):
        HiddenStates(output.url)[0]
    assert len(HiddenStates(other.url)) == 5


@pytest.mark.parametrize("index", [slice(0, 2), 1.0, "1", None, [0, 1], (0,), True, float("nan"), torch.tensor([0, 1])])
def test_an_index_that_is_no_number_is_refused_by_name(tmp_path, index):
    data = HiddenStates(make_output(tmp_path).url, states=[])
    with pytest.raises(ConfigError, match=r"index = .*: (must be a whole number|.*torch\.utils\.data\.Subset)"):
        data[index]
    for number in (np.int64(-1), np.uint8(4), torch.tensor(4)):
        assert data[number]["row"] == 5


def cut(shard):
    shard.write_bytes(shard.read_bytes()[:-10])


def flip(shard):
    data = bytearray(shard.read_bytes())
    data[data.index(b"state.final") if shard.suffix == ".safetensors" else -12] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("url", [None, "memory://mend-{}/out"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_shard_is_named_by_its_url_and_with_the_way_out(tmp_path, format, url, damage):
    output = make_output(tmp_path, format=format, url=url and url.format(tmp_path.name))
    key = next(item.key for item in output.store.list("shards/"))
    file = tmp_path / Path(key).name
    file.write_bytes(output.store.get(key))
    damage(file)
    output.store.delete(key)
    if file.exists():
        output.store.put(key, file.read_bytes())
    told = f"{re.escape(f'{output.url}/{key}')}: .*; to extract its rows again, delete the unit's file in commits/ and "
    told += f"run the same command; `ray-extract verify {output.url}` finds all such shards$"
    for read in (
        lambda: HiddenStates(output.url, check=True)[0],
        lambda: next(iter(HiddenStatesStream(output.url, check=True, shuffle=False))),
        lambda: next(
            iter(HiddenStatesStream(output.url, shuffle=False, cache_dir=tmp_path / "c", cache_bytes=1 << 20))
        ),
        lambda: TokenSampler(output.url, batch_tokens=4),
        lambda: next(iter(TokenSampler(output.url, batch_tokens=4, normalise=False, shuffle=False))),
    ):
        with pytest.raises((ShardError, NotFound), match=told):
            read()


def test_a_shard_that_may_not_be_read_is_no_traceback_of_the_system(tmp_path, monkeypatch):
    output = make_output(tmp_path)

    original = Path.open

    def refuse(path, *args, **kwargs):
        if path.parent.name == "shards":
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(AccessDenied, match=f"{output.url}/shards/u00000000.*access denied"):
        HiddenStates(output.url)[0]


def test_an_unfinished_run_and_one_without_rows_are_clear_errors(tmp_path):
    output = make_output(tmp_path / "a", finish=False)
    with pytest.raises(ShardError, match="no manifest; the run has not finished"):
        HiddenStates(output.url)
    output = make_output(tmp_path / "b", lengths=[3, 4], failed=[0, 1])
    with pytest.raises(ConfigError, match="none of the manifest's 2 rows is ok"):
        HiddenStates(output.url)
    with pytest.raises(ConfigError, match="open_shards = 0"):
        HiddenStates(output.url, open_shards=0)


def test_reading_loads_neither_ray_nor_an_engine(tmp_path):
    urls = [make_output(tmp_path / format, format=format).url for format in FORMATS]
    code = (
        "import json, sys\n"
        "import ray_extract.readers.stream, ray_extract.readers.tokens\n"
        "from ray_extract.readers.dataset import HiddenStates\n"
        f"rows = [HiddenStates(url, check=True)[1]['row'] for url in {urls!r}]\n"
        "print(json.dumps([rows, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows, modules = json.loads(done.stdout)
    assert rows == [1, 1]
    assert not {"ray", "sglang", "transformers", "obstore", "s3fs"} & set(modules)
