"""Segments of commits: they spare requests, and whatever they are or hold, the commits are the same."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ledger import UNITS, make_receipt
from watched import WatchedStore

from ray_extract import layout, segments
from ray_extract.errors import AccessDenied, NotFound
from ray_extract.ledger import Ledger, orphans
from ray_extract.records import Receipt, Split, Unit
from ray_extract.segments import LEAST, Entry, pack, unpack
from ray_extract.store import LocalStore, ObjectInfo

COUNT = 3 * LEAST


def unit(number: int) -> Unit:
    return dataclasses.replace(UNITS[0], unit=layout.unit_id(number))


def commit(store: LocalStore, number: int, attempt: str = "a") -> Receipt:
    receipt = make_receipt(unit(number), attempt)
    assert Ledger(store).commit(receipt)
    return receipt


def fold(store: LocalStore) -> list[Receipt | Split]:
    """Read all commits, as whoever writes a manifest does."""
    return list(Ledger(store).commits(fold=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An output whose commits, one of them of a split, are in a segment."""
    store = LocalStore(tmp_path / "out")
    for number in range(COUNT):
        commit(store, number)
    store.delete(layout.commit_key(layout.unit_id(7)))
    Ledger(store).commit_split(Split(layout.unit_id(7), ("u00000007.0", "u00000007.1"), "it kills workers"))
    fold(store)
    assert len(list((tmp_path / "out/segments").iterdir())) == 1
    return tmp_path / "out"


def without_segments(folder: Path) -> list[Receipt | Split]:
    """All commits, each from its own object."""
    ledger = Ledger(LocalStore(folder))
    return [ledger._read_commit(name) for name in sorted(ledger.committed_units())]


def test_commits_in_segments_take_a_request_a_segment_and_are_the_same(folder: Path) -> None:
    store = WatchedStore(folder)
    assert list(Ledger(store).commits()) == without_segments(folder)
    assert store.asked == {"list commits": 1, "list segments": 1, "get segments": 1}


def test_only_who_is_asked_to_writes_segments_and_only_once(folder: Path) -> None:
    (segment,) = (folder / "segments").iterdir()
    fold(LocalStore(folder))
    assert list((folder / "segments").iterdir()) == [segment]
    segment.unlink()
    list(Ledger(LocalStore(folder)).receipts())
    orphans(LocalStore(folder))
    assert list((folder / "segments").iterdir()) == []


def test_what_came_since_makes_a_segment_of_its_own_if_it_is_much(folder: Path) -> None:
    store = WatchedStore(folder)
    for number in range(COUNT, COUNT + LEAST - 1):
        commit(store, number)
    fold(store)
    assert len(list((folder / "segments").iterdir())) == 1
    commit(store, COUNT + LEAST)
    fold(store)
    assert len(list((folder / "segments").iterdir())) == 2
    store.asked.clear()
    assert list(Ledger(store).commits()) == without_segments(folder)
    assert store.asked == {"list commits": 1, "list segments": 1, "get segments": 2}


def test_many_commits_make_several_segments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder / "segments")
    monkeypatch.setattr(segments, "_MOST_BYTES", 100 * (folder / "commits/u00000000.json").stat().st_size)
    assert fold(LocalStore(folder)) == without_segments(folder)
    firsts = sorted(path.name.partition("-")[0] for path in (folder / "segments").iterdir())
    assert firsts[0] == "u00000000" and 2 <= len(firsts) < 5
    store = WatchedStore(folder)
    assert list(Ledger(store).commits()) == without_segments(folder)
    assert store.asked["get segments"] == len(firsts) and store.asked["get commits"] <= LEAST


# What must not change a result


def lose(folder: Path) -> None:
    shutil.rmtree(folder / "segments")


def cut(folder: Path) -> None:
    (segment,) = (folder / "segments").iterdir()
    segment.write_bytes(segment.read_bytes()[:-9])


def rename(folder: Path) -> None:
    (segment,) = (folder / "segments").iterdir()
    segment.rename(segment.with_name(segment.name.replace("u00000000", "u00000050")))


def other_schema(folder: Path) -> None:
    for data in (b"not parquet", b""):
        key = pack([Entry("u00000000", "v", data)])[0]
        (folder / key).write_bytes(data)


def delete_commit(folder: Path) -> None:
    (folder / "commits/u00000004.json").unlink()


def extract_again(folder: Path) -> None:
    delete_commit(folder)
    commit(LocalStore(folder), 4, "b")  # of the same size


def edit_in_place(folder: Path) -> None:
    path = folder / "commits/u00000004.json"
    path.write_bytes(path.read_bytes().replace(b'"attempt": "a"', b'"attempt": "c"'))


def damage_commit(folder: Path) -> None:
    path = folder / "commits/u00000004.json"
    path.write_bytes(b"{" + path.read_bytes()[1:])


def another_run(folder: Path) -> None:
    """Its segment lies here, and the units have the same names and sizes."""
    other = LocalStore(folder.parent / "other")
    for number in range(COUNT):
        commit(other, number, "z")
    fold(other)
    shutil.rmtree(folder / "segments")
    shutil.copytree(other.root / "segments", folder / "segments")


def copied(folder: Path) -> None:
    """As a backup that was put back: other objects, with the old times."""
    shutil.copytree(folder, folder.parent / "copy")
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "copy", folder)
    path = folder / "commits/u00000004.json"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b'"attempt": "a"', b'"attempt": "d"'))
    os.utime(path, ns=times)


@pytest.mark.parametrize(
    "harm",
    [lose, cut, rename, other_schema, delete_commit, extract_again, edit_in_place, damage_commit, another_run, copied],
    ids=lambda harm: harm.__name__,
)
def test_a_segment_that_is_not_right_changes_nothing(folder: Path, harm: Callable[[Path], None]) -> None:
    before = {item.unit for item in without_segments(folder)}
    harm(folder)
    found = list(Ledger(LocalStore(folder)).commits())
    assert found == without_segments(folder)
    assert fold(LocalStore(folder)) == found  # as it is with what was folded meanwhile
    assert list(Ledger(LocalStore(folder)).commits()) == found
    assert before - {item.unit for item in found} == ({"u00000004"} if harm is delete_commit else set())
    assert ("u00000004" in Ledger(LocalStore(folder)).committed_units()) == (harm is not delete_commit)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bit_of_a_segment_can_change_a_commit(folder: Path, data: st.DataObject) -> None:
    (segment,) = (folder / "segments").iterdir()
    right = segment.read_bytes()
    wrong = bytearray(right)
    wrong[data.draw(st.integers(0, len(right) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    key = f"segments/{segment.name}"
    assert len(unpack(key, right)) == COUNT and unpack(key, bytes(wrong)) == []


def test_a_store_that_tells_no_versions_has_no_segments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalStore._list

    def silent(self: LocalStore, prefix: str, recursive: bool) -> list[ObjectInfo]:
        return [ObjectInfo(item.key, item.size) for item in plain(self, prefix, recursive)]

    monkeypatch.setattr(LocalStore, "_list", silent)
    entries = [
        Entry(name, "", (folder / layout.commit_key(name)).read_bytes()) for name in map(layout.unit_id, range(9))
    ]
    LocalStore(folder).put(*pack(entries))
    edit_in_place(folder)
    assert fold(LocalStore(folder)) == without_segments(folder)
    lose(folder)
    fold(LocalStore(folder))
    assert not (folder / "segments").exists()


@pytest.mark.parametrize("error", [AccessDenied("no"), NotFound("swept")])
def test_segments_that_cannot_be_read_or_written_are_no_error(folder: Path, error: Exception) -> None:
    def refuse(name: str, key: str) -> None:
        if name != "list" and key.startswith("segments/"):
            raise error

    assert fold(WatchedStore(folder, refuse)) == without_segments(folder)


def test_the_order_is_that_of_units_with_parts_and_rounds_in_segments_and_out(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = [layout.unit_id(number) for number in range(LEAST)]
    names += [f"{layout.unit_id(number)}.{part}" for number in range(0, LEAST, 3) for part in (0, 1)]
    names += [layout.retry_unit_id(1, number) for number in range(5)]
    for turn in range(3):  # each turn's commits lie between those of the turn before
        for name in names[turn::3]:
            Ledger(store).commit(make_receipt(dataclasses.replace(UNITS[0], unit=name), "a"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "LEAST", 2)
            assert fold(store) == without_segments(tmp_path)
            found = [item.unit for item in Ledger(store).commits()]
        assert found == sorted(name for each in range(turn + 1) for name in names[each::3])
