"""The input in parts: the same bytes on the store whoever prepares them, in which order, and however often killed."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiny_tokenizer as tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prepare import CHAT, SHAPE, MemoryStore, ids, job

from ray_extract import layout
from ray_extract.dataset import parts
from ray_extract.dataset.parts import PartWriter, cut, prepare_rows
from ray_extract.dataset.prepared import PreparedRows
from ray_extract.dataset.source import SourceRecord
from ray_extract.errors import ConfigError, DatasetError, PlanError
from ray_extract.plan import load_or_make_plan
from ray_extract.store import open_store


class Killed(BaseException):
    """The process ends here."""


class DyingStore(MemoryStore):
    """A store whose user is killed at one of its writes, which was made or not."""

    def __init__(self, objects, writes, made):
        super().__init__()
        self.objects, self._left, self._made = objects, writes, made

    def put(self, key, data, *, create=True):
        self._left -= 1
        if self._left or self._made:
            super().put(key, data, create=create)
        if not self._left:
            raise Killed


class Disorder:
    """A pool that prepares parts in any order, some of them twice, and when it must."""

    slots = 3

    def __init__(self, seed, setup, store):
        self._random, self._writer, self._left = random.Random(seed), PartWriter(setup, store), []

    def submit(self, part):
        told = concurrent.futures.Future()
        self._left.append((part, told))
        told.result = functools.partial(self._wait, told)
        return told

    def _wait(self, told):
        while not told.done():
            part, done = self._left.pop(self._random.randrange(len(self._left)))
            for _ in range(self._random.choice((1, 2))):
                self._writer.write(part)
            done.set_result(None)


@contextlib.contextmanager
def disorder(seed, setup, store):
    yield Disorder(seed, setup, store)


RECORDS = st.lists(
    st.one_of(
        st.integers(0, 6).map(ids),
        st.integers(60, 90).map(ids),
        st.just("{oops"),
        st.just({"messages": []}),
        st.just({"other": 1}),
    ),
    min_size=1,
    max_size=40,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "dedup": st.just(True),
        "shuffle": st.just(True),
        "limit": st.integers(1, 40),
        "sample": st.just(0.5),
        "overlong": st.sampled_from(["right", "left"]),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    records=RECORDS,
    options=OPTIONS,
    deaths=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=4),
    seed=st.integers(0, 9),
)
def test_plan_is_the_same_bytes_whoever_prepares_it_and_however_often_killed(
    tmp_path_factory, records, options, deaths, seed
):
    path = tmp_path_factory.mktemp("parts") / "in.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    asked = job(path, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_RECORDS", 3)
        patch.setattr(parts, "PART_CHARS", 200)
        whole, disturbed = MemoryStore(), {}
        try:
            expected = load_or_make_plan(whole, asked, SHAPE, 512)
        except PlanError as error:
            assert "can be used" in str(error)
            return
        for writes, made in deaths:
            with contextlib.suppress(Killed):
                load_or_make_plan(DyingStore(disturbed, writes, made), asked, SHAPE, 512)
        last = MemoryStore()
        last.objects = disturbed
        pool = functools.partial(disorder, seed)
        assert load_or_make_plan(last, asked, SHAPE, 512, pool=pool) == expected
    # An input that was left by one who was killed behind its end is all that may differ.
    assert {key: data for key, data in disturbed.items() if not layout.is_input(key)} == whole.objects
    index, _ = expected
    assert index.rows == min(len(records), options.get("limit", 40))
    assert index.rows == index.usable + sum(index.skipped.values())
    rows = PreparedRows(last, index).read(0, index.rows)
    firsts = {}
    for row in sorted(rows, key=lambda row: int(row.source.partition(":")[2])):
        if row.reason is not None:
            firsts.setdefault(row.reason.partition(":")[0], row.source)
    assert {kind: example.split(" ")[0].rstrip(":,") for kind, example in index.examples.items()} == firsts


def test_what_is_stored_is_not_prepared_again(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_RECORDS", 2)
    path, store = tmp_path / "in.jsonl", MemoryStore()
    path.write_text("".join(json.dumps(ids(n)) + "\n" for n in range(1, 10)))
    whole = prepare_rows(store, job(path), SHAPE)
    assert whole.starts == (0, 2, 4, 6, 8)
    written = []
    real = PartWriter.write
    monkeypatch.setattr(PartWriter, "write", lambda self, part: (written.append(part.number), real(self, part)))
    for lost in (1, 3):
        del store.objects[layout.rows_key(lost)]
    assert prepare_rows(store, job(path), SHAPE) == whole
    assert written == [1, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text(json.dumps(ids(2)) + "\n" + json.dumps(ids(4)) + "\n"),
        lambda path: {"max_tokens": 2},
        lambda path: {"overlong": "left"},
        lambda path: {"seed": 1},
        lambda path: {"chat_template": str(path)},
    ],
)
def test_parts_of_another_input_or_configuration_are_refused_whatever_their_names(tmp_path, change):
    path, store = tmp_path / "in.jsonl", MemoryStore()
    path.write_text(json.dumps(ids(2)) + "\n" + json.dumps(ids(3)) + "\n")
    prepare_rows(store, job(path), SHAPE)
    options = change(path)
    with pytest.raises(PlanError, match=r"plan/rows-000000\.parquet there was prepared from another data set, config"):
        prepare_rows(store, job(path, **(options if isinstance(options, dict) else {})), SHAPE)


@pytest.mark.parametrize("package", ["transformers", "tokenizers", "jinja2"])
def test_parts_of_another_release_of_the_tokenizer_are_refused(tmp_path, monkeypatch, package):
    path, store = tmp_path / "in.jsonl", MemoryStore()
    path.write_text(json.dumps(ids(2)) + "\n")
    prepare_rows(store, job(path), SHAPE)
    real = parts.importlib.metadata.version
    monkeypatch.setattr(parts.importlib.metadata, "version", lambda name: "0" if name == package else real(name))
    with pytest.raises(PlanError, match="another release of transformers"):
        prepare_rows(store, job(path), SHAPE)


def test_driver_whose_inputs_another_one_discarded_uses_its_plan(tmp_path):
    path, store = tmp_path / "in.jsonl", MemoryStore()
    path.write_text("".join(json.dumps(ids(n)) + "\n" for n in (3, 4, 3)))
    asked = job(path, dedup=True)

    @contextlib.contextmanager
    def overtaken(setup, store):
        with parts.here(setup, store) as pool:
            yield pool
        winner.extend(load_or_make_plan(store, asked, SHAPE, 512))

    winner = []
    assert list(load_or_make_plan(store, asked, SHAPE, 512, pool=overtaken)) == winner
    assert not any(map(layout.is_input, store.objects))


def record(value):
    return SourceRecord("f:1", value)


def test_parts_end_at_their_most_records_or_characters_and_a_longer_record_is_alone():
    records = [record({"text": "x" * n}) for n in (10, 10, 10, 10, 500, 10, 80, 30)]
    records += [record({"input_ids": [1] * n}) for n in (10, 10)]
    records += [record({"input_ids": np.ones(10, np.int64)}), record(None)]
    found = list(cut(iter(records), 3, 120))
    assert [r for part in found for r in part.records] == records
    assert [len(part.records) for part in found] == [3, 1, 1, 2, 2, 3]
    assert [part.number for part in found] == list(range(6))
    assert [part.first for part in found] == [0, 3, 4, 5, 7, 9]
    deep = {"x": functools.reduce(lambda inner, _: [inner], range(10_000), "y" * 7)}
    assert next(cut([record(deep)], 3, 100)).chars == 8


def test_no_more_is_read_ahead_than_is_prepared_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_RECORDS", 1)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 100}) + "\n" for _ in range(50)))
    most = []

    class Slow(Disorder):
        slots = 4

        def submit(self, part):
            told = super().submit(part)
            most.append(len(self._left))
            return told

        def _wait(self, told):
            _, oldest = self._left.pop(0)  # and nothing is prepared: only what is held counts
            assert oldest is told

    def held(chars):
        most.clear()
        monkeypatch.setattr(parts, "_AHEAD_CHARS", chars)
        with pytest.raises(PlanError, match="missing"):
            prepare_rows(MemoryStore(), job(path), SHAPE, pool=lambda *a: contextlib.nullcontext(Slow(0, *a)))
        return max(most)

    assert held(1 << 30) == 2 * 4 + 1
    assert held(300) == 3


def test_preparing_holds_a_part_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_CHARS", 1 << 17)
    path = tmp_path / "in.jsonl"
    line = json.dumps({"input_ids": [7] * 1000}) + "\n"
    with path.open("w") as file:
        file.writelines(line for _ in range(3000))
    shape = dataclasses.replace(SHAPE, context_length=2000)
    peaks = []
    for limit in (600, 3000):
        store = open_store(str(tmp_path / f"out-{limit}"))
        tracemalloc.start()
        index = prepare_rows(store, job(path, limit=limit), shape)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert index.tokens == 1000 * limit
    assert peaks[1] < 1.5 * peaks[0] < 3000 * 1000 * 5


def stored(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "plan").iterdir())}


def planned(folder, path, shape, **options):
    """The objects of a plan, or what it was refused with."""
    load_or_make_plan(open_store(str(folder)), job(path, **options), shape, 512)
    return stored(folder)


def test_any_number_of_processes_stores_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_RECORDS", 20)
    shape = dataclasses.replace(SHAPE, path=str(tiny.save(tmp_path / "tok")), context_length=200)
    records = [{"messages": CHAT}, ids(3), "{oops", {"messages": CHAT[:1]}, ids(300)] * 30
    # What pickle cannot follow is prepared where it was read.
    records.append({"x": functools.reduce(lambda inner, _: [inner], range(500), 1)})
    path = tmp_path / "in.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    alone = planned(tmp_path / "a", path, shape, sample=0.9)
    assert len(alone) > 2
    assert planned(tmp_path / "b", path, shape, sample=0.9, processes=2) == alone


def test_what_a_process_refuses_is_refused(tmp_path):
    path, shape = tmp_path / "in.jsonl", dataclasses.replace(SHAPE, path=str(tmp_path))
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(ConfigError, match=r"model\.path = 'm': no tokenizer"):
        planned(tmp_path / "a", path, shape, processes=2)
    path.write_text(json.dumps(ids(57)) + "\n")
    with pytest.raises(DatasetError, match=r"in\.jsonl:1: 57 tokens are more than 56"):
        planned(tmp_path / "b", path, shape, overlong="refuse", processes=2)


def test_process_that_dies_is_explained_and_what_it_stored_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_RECORDS", 2)
    path = tmp_path / "in.jsonl"
    path.write_text((json.dumps(ids(3)) + "\n") * 200)

    @contextlib.contextmanager
    def killing(setup, store):
        with parts.here(setup, store) as pool:
            pool.submit(next(cut([record(ids(3))] * 2, 2, 100))).result()
            for child in multiprocessing.active_children():
                child.kill()
            yield pool

    store = open_store(str(tmp_path / "out"))
    asked = job(path, processes=2)
    with pytest.raises(DatasetError, match=r"^dataset\.processes = 2: one of them died.*same command again"):
        load_or_make_plan(store, asked, SHAPE, 512, pool=killing)
    assert not multiprocessing.active_children()
    (tmp_path / "out/plan/rows-000000.parquet").unlink()  # of a record from nowhere
    assert load_or_make_plan(store, asked, SHAPE, 512)[0].rows == 200


KILLED = """
import multiprocessing, os, sys
from test_prepare import SHAPE, job
from ray_extract.dataset import parts
from ray_extract.store import open_store
if __name__ == "__main__":
    parts.PART_RECORDS = 1
    def read(dataset):
        for n, record in enumerate(real(dataset)):
            if n == 9:
                print(*(child.pid for child in multiprocessing.active_children()), flush=True)
                os.kill(os.getpid(), 9)
            yield record
    real, parts.read_records = parts.read_records, read
    parts.prepare_rows(open_store("out"), job(sys.argv[1], processes=2), SHAPE)
"""


def test_processes_end_with_a_driver_that_is_killed(tmp_path):
    (tmp_path / "in.jsonl").write_text((json.dumps(ids(3)) + "\n") * 20)
    (tmp_path / "killed.py").write_text(KILLED)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with (tmp_path / "pids").open("w") as pids:  # of a pipe the end would be theirs, too
        run = subprocess.run(
            [sys.executable, "killed.py", "in.jsonl"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, stdout=pids
        )
    assert run.returncode == -9
    children = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(children) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in children if psutil.pid_exists(pid)], timeout=30)
    for child in alive:
        child.kill()
    assert not alive
    assert stored(tmp_path / "out").keys() >= {"rows-000000.parquet"}
