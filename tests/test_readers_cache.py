"""The cache: whole files or none, each fetched once, never more bytes than said, and damage found and mended."""

import concurrent.futures
import fcntl
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outputs import make_output

from ray_extract.errors import ConfigError, OutOfSpace, ShardError, StoreError
from ray_extract.readers import cache as cache_module
from ray_extract.readers.cache import ShardCache, _Entry, evicted
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.fetch import fetch, raw_ranges, wanted
from ray_extract.shards.raw import open_raw
from ray_extract.store import FsspecStore

LENGTHS = [60, 50, 70, 40, 55, 65]
FORMATS = ["raw", "parquet"]


@pytest.fixture
def output(tmp_path, request):
    """Six rows in three shards of an object store, each of three states of 110 to 120 KiB."""
    url = f"memory://{request.node.name.replace('[', '-').replace(']', '')}"
    return make_output(tmp_path / "made", url=url, lengths=LENGTHS, hidden=512, rows_per_unit=2)


@pytest.fixture
def size(output):
    """What the largest shard takes of the cache."""
    names = ["state.1", "state.3", "state.final"]
    return max(wanted(output.store, item.key, "raw", names).nbytes for item in output.store.list("shards/"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def gets(monkeypatch):
    """Keys and ranges that are read from the object store."""
    seen = []
    original = FsspecStore._get_range

    def get(store, key, start, length):
        seen.append((key, start, length))
        return original(store, key, start, length)

    monkeypatch.setattr(FsspecStore, "_get_range", get)
    return seen


def files(folder, ending=".safetensors"):
    return sorted(path for path in folder.iterdir() if path.suffix == ending)


def used(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.is_file())


def right(output, item, names=("state.1", "state.3", "state.final")):
    return all(
        item[name].view(torch.uint8).numpy().tobytes() == output.stored[item["row"]][name].tobytes() for name in names
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_shard_is_fetched_once_and_then_mapped(tmp_path, folder, gets, format):
    output = make_output(tmp_path, url=f"memory://cache-once-{format}", lengths=LENGTHS, format=format)
    data = HiddenStates(output.url, check=True, cache_dir=folder, cache_bytes=2 << 20)
    assert all(right(output, item) for item in data)
    assert len(files(folder, ".safetensors" if format == "raw" else ".parquet")) == 3
    again = HiddenStates(output.url, check=True, cache_dir=folder, cache_bytes=2 << 20, open_shards=1)
    gets.clear()
    for _ in range(2):
        assert all(right(output, again[i]) for i in (5, 0, 3, 1, 4, 2))
    assert not [key for key, _, _ in gets if key.startswith("shards/")]
    if format == "raw":
        assert again[0]["state.3"].data_ptr() in range(*_mapped(folder))


def _mapped(folder):
    """Addresses from the first to the last mapping of a file of the folder."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[0].split("-") for line in maps if str(folder) in line]
    ends = [int(end, 16) for pair in found for end in pair]
    return min(ends), max(ends)


def test_states_that_nobody_asked_for_are_neither_fetched_nor_stored(output, folder, gets):
    data = HiddenStates(output.url, ["state.3"], check=True, cache_dir=folder, cache_bytes=2 << 20)
    gets.clear()
    assert all(right(output, item, ["state.3"]) for item in data)
    stored = sum(stored["state.3"].nbytes for stored in output.stored.values())
    fetched = sum(length for key, _, length in gets if key.startswith("shards/"))
    assert stored < fetched < 2 * stored
    sizes = sum(path.stat().st_size for path in files(folder))
    assert used(folder) < sizes / 1.5
    both = HiddenStates(output.url, ["state.1", "state.3"], check=True, cache_dir=folder, cache_bytes=2 << 20)
    assert all(right(output, item, ["state.1", "state.3"]) for item in both), "the copy without state.1 is not taken"


def test_ranges_of_neighbouring_states_are_one(output):
    names = ("state.1", "state.3", "state.final")
    key = next(item.key for item in output.store.list("shards/"))
    layout = open_raw(output.store, key).layout
    assert raw_ranges(layout, names) == ((0, layout.nbytes),)
    state = layout.tensors["state.final"]
    assert raw_ranges(layout, ["state.final"]) == (
        (0, layout.states_offset),
        (state.offset, state.offset + state.nbytes),
    )
    assert wanted(output.store, key, "raw", names).size == layout.nbytes


def test_the_folder_never_holds_more_than_its_bound_and_the_oldest_goes_first(output, folder):
    one = max(wanted(output.store, item.key, "raw", ["state.1"]).nbytes for item in output.store.list("shards/"))
    bound = 2 * one
    data = HiddenStates(output.url, ["state.1"], check=True, cache_dir=folder, cache_bytes=bound, open_shards=1)
    seen = []
    for index in (0, 2, 1, 4, 0, 2, 4):
        assert right(output, data[index], ["state.1"])
        assert used(folder) <= bound
        seen.append({path.name for path in files(folder)})
    first, second, third, fourth = seen[0], seen[1], seen[2], seen[3]
    assert len(second) == 2 and first < second == third
    assert len(fourth) == 2 and first < fourth, "the first was opened again after the second, which therefore went"


def test_a_tensor_outlives_the_eviction_of_its_file(output, folder, size):
    data = HiddenStates(output.url, cache_dir=folder, cache_bytes=size, open_shards=1)
    item = data[0]
    before = files(folder)
    for index in (2, 4):
        data[index]
    assert not set(before) & set(files(folder))
    assert right(output, item)


def test_a_shard_larger_than_the_bound_is_refused_by_name(output, folder):
    data = HiddenStates(output.url, cache_dir=folder, cache_bytes=8192)
    with pytest.raises(
        ConfigError, match=r"cache_bytes = 8192: shards/u00000000.* takes \d+; raise it, or ask for few"
    ):
        data[0]
    with pytest.raises(ConfigError, match="cache_bytes = 0: must be at least 1"):
        HiddenStates(output.url, cache_dir=folder, cache_bytes=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damage", ["cut", "emptied", "beginning", "other shard"])
def test_a_damaged_copy_is_found_when_opened_and_fetched_again(tmp_path, folder, format, damage, caplog):
    output = make_output(tmp_path, url=f"memory://cache-damage-{format}-{damage[:3]}", lengths=LENGTHS, format=format)
    options = {"cache_dir": folder, "cache_bytes": 1 << 20}
    list(HiddenStates(output.url, **options))
    ending = ".safetensors" if format == "raw" else ".parquet"
    whole = [path.read_bytes() for path in files(folder, ending)]
    for path, data in zip(files(folder, ending), whole, strict=True):
        if damage == "other shard":
            path.write_bytes(whole[0] if data != whole[0] else whole[1])
        elif damage == "beginning":
            path.write_bytes((bytes(64) + data[64:]) if format == "raw" else (data[:-64] + bytes(64)))
        else:
            path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    assert all(right(output, item) for item in HiddenStates(output.url, **options))
    assert "fetched again" in caplog.text
    assert [path.read_bytes() for path in files(folder, ending)] == whole


def test_a_flipped_bit_in_a_copy_is_mended_when_checked(output, folder, gets):
    options = {"check": True, "cache_dir": folder, "cache_bytes": 1 << 20}
    list(HiddenStates(output.url, **options))
    for path in files(folder):
        data = bytearray(path.read_bytes())
        for stored in output.stored.values():
            place = data.find(stored["state.3"].tobytes())
            if place >= 0:
                data[place + 7] ^= 1
        path.write_bytes(data)
    data = HiddenStates(output.url, **options)
    gets.clear()
    assert all(right(output, item) for item in data)
    fetched = sum(length for key, _, length in gets if key.startswith("shards/"))
    assert fetched < 1.5 * sum(item.size for item in output.store.list("shards/")), "once a shard, not once a row"


def test_damage_in_the_store_itself_is_an_error_and_not_a_loop(output, folder):
    key = next(item.key for item in output.store.list("shards/"))
    data = bytearray(output.store.get(key))
    data[data.index(output.stored[1]["state.3"].tobytes())] ^= 1
    output.store.put(key, data, create=False)
    with pytest.raises(ShardError, match=r"row 1: state\.3 are not what was captured"):
        list(HiddenStates(output.url, check=True, cache_dir=folder, cache_bytes=2 << 20))
    output.store.put(key, data[:-1], create=False)
    for path in files(folder):
        path.unlink()
    with pytest.raises(ShardError, match="truncated"):
        list(HiddenStates(output.url, cache_dir=folder, cache_bytes=2 << 20))


def test_a_fetch_that_fails_leaves_nothing_behind(output, folder, monkeypatch):
    data = HiddenStates(output.url, cache_dir=folder, cache_bytes=2 << 20)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "pwrite", fail)
    with pytest.raises(OutOfSpace):
        data[0]
    monkeypatch.setattr(cache_module.os, "pwrite", _pwrite)
    monkeypatch.setattr(cache_module, "fetch", _broken)
    with pytest.raises(StoreError, match="the line is cut"):
        data[0]
    monkeypatch.setattr(cache_module, "fetch", fetch)
    assert used(folder) == 0 and not files(folder, ".part")
    assert right(output, data[0])


_pwrite = os.pwrite


def _broken(store, key, ranges, write, stop=None):
    write(0, memoryview(b"something"))
    raise StoreError("the line is cut")


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_fetches_is_counted(output, folder, size):
    cache = ShardCache(folder, 3 * size)
    dead = folder / f".{'0' * 32}.{2 * size}.abcd.part"
    dead.write_bytes(b"half")
    living = folder / f".{'1' * 32}.{2 * size}.abcd.part"
    living.write_bytes(b"half")
    with (folder / ".locks" / "11").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = [item.key for item in output.store.list("shards/")]
        for key in keys:
            cache.open(output.store, key, "raw", ["state.1", "state.3", "state.final"])
            assert not dead.exists() and living.exists()
            assert sum(path.stat().st_blocks * 512 for path in files(folder)) <= size


def _read_all(url, folder, bound, results):
    data = HiddenStates(url, check=True, cache_dir=folder, cache_bytes=bound, open_shards=1)
    for _ in range(3):
        rows = [data[i]["row"] for i in range(len(data))]
    results.put(rows)


@pytest.mark.parametrize("bound", [2 << 20, 400 << 10])
def test_two_processes_share_a_cache(tmp_path, folder, bound):
    """A local output, since a memory:// one belongs to one process. In the smaller one not all shards have room."""
    output = make_output(tmp_path, lengths=LENGTHS, hidden=512, rows_per_unit=2)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_read_all, args=(output.url, folder, bound, results)) for _ in range(2)]
    for child in children:
        child.start()
    assert [results.get(timeout=120) for _ in children] == [list(range(6))] * 2
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert used(folder) <= bound and not files(folder, ".part")


def test_two_threads_that_want_a_shard_fetch_it_once(output, folder, gets):
    cache = ShardCache(folder, 1 << 20)
    key = next(item.key for item in output.store.list("shards/"))
    gets.clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        shards = list(pool.map(lambda _: cache.open(output.store, key, "raw", ["state.1"]), range(8)))
    assert len(gets) == 2, "the header, and the row table with the state after it, once"
    assert len({shard.state("state.1", 0).tobytes() for shard in shards}) == 1


def test_an_emptied_folder_is_filled_again(output, folder):
    data = HiddenStates(output.url, cache_dir=folder, cache_bytes=2 << 20, open_shards=1)
    data[0]
    shutil.rmtree(folder)
    folder.mkdir()
    assert all(right(output, data[i]) for i in range(6))


def test_a_folder_that_cannot_be_made_is_refused(output, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache_dir = .*file/cache: cannot be made: Not a directory"):
        HiddenStates(output.url, cache_dir=tmp_path / "file" / "cache", cache_bytes=1)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 40))
def test_the_first_files_go_and_no_more_than_must(sizes, room):
    entries = [_Entry(path=None, nbytes=size, used_ns=i) for i, size in enumerate(sizes)]
    gone = evicted(entries, room)
    assert gone == entries[: len(gone)]
    assert sum(sizes[len(gone) :]) <= room
    assert not gone or sum(sizes[len(gone) - 1 :]) > room


def test_a_local_output_needs_no_cache_but_may_have_one(tmp_path, folder):
    output = make_output(tmp_path, lengths=LENGTHS)
    assert all(right(output, item) for item in HiddenStates(output.url, cache_dir=folder, cache_bytes=2 << 20))
    assert len(files(folder)) == 3
