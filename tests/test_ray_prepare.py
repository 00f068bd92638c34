"""Parts of the input as Ray tasks: the same bytes as from one process, on every node of the cluster."""

import dataclasses
import json
import os
from pathlib import Path

import clusters
import pytest
import ray
import tiny_tokenizer as tiny
from test_parts import planned, stored
from test_prepare import CHAT, SHAPE, ids, job

from ray_extract import ray_prepare, run
from ray_extract.dataset import parts
from ray_extract.errors import ConfigError, DatasetError, EngineError
from ray_extract.plan import load_or_make_plan
from ray_extract.store import open_store

pytestmark = pytest.mark.ray


@pytest.fixture
def nodes(ray_cluster):
    """A second node, and a driver that is connected."""
    added = clusters.add_node(ray_cluster, num_cpus=2)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.shutdown()  # what another test left
    ray.init(address=ray_cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield added
    ray.shutdown()
    ray_cluster.remove_node(added)


def data(tmp_path, records):
    path = tmp_path / "in.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path, dataclasses.replace(SHAPE, path=str(tiny.save(tmp_path / "tok")), context_length=200)


def on_cluster(folder, path, shape, **options):
    """The objects of a plan that is prepared where a run would."""
    load_or_make_plan(open_store(str(folder)), job(path, **options), shape, 512, pool=run._pool)
    return stored(folder)


def test_cluster_stores_the_same_bytes_on_each_of_its_nodes(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_RECORDS", 5)
    records = [{"messages": CHAT}, ids(3), "{oops", {"messages": CHAT[:1]}, ids(300)] * 12
    path, shape = data(tmp_path, [*records, '{"x": ' + "[" * 900 + "]" * 900 + "}"])  # too deep to be sent
    alone = planned(tmp_path / "a", path, shape, processes=1)
    assert len(alone) == 13 + 2
    where = []
    real = ray_prepare._Tasks._answer
    monkeypatch.setattr(ray_prepare._Tasks, "_answer", lambda *args: (where.append(args[0].slots), real(*args)))
    assert on_cluster(tmp_path / "b", path, shape) == alone
    assert set(where) == {4} and len(where) >= 12
    assert on_cluster(tmp_path / "c", path, shape, dedup=True, shuffle=True) == planned(
        tmp_path / "d", path, shape, dedup=True, shuffle=True
    )


def test_what_a_task_refuses_is_refused(nodes, tmp_path, monkeypatch):
    path, shape = data(tmp_path, [ids(57)])
    shape = dataclasses.replace(shape, context_length=64)
    with pytest.raises(DatasetError, match=r"in\.jsonl:1: 57 tokens are more than 56"):
        on_cluster(tmp_path / "a", path, shape, overlong="refuse")
    monkeypatch.setattr(parts.importlib.metadata, "version", lambda name: "0")
    with pytest.raises(ConfigError, match=r"dataset\.processes: node \S+ has .*transformers \S+, the driver 0"):
        on_cluster(tmp_path / "b", path, shape)


def test_task_that_dies_each_time_stops_the_run_which_goes_on_from_there(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_RECORDS", 1)
    path, shape = data(tmp_path, [ids(3), ids(4)])

    def die(how, part):
        os._exit(1)

    with monkeypatch.context() as patch:
        patch.setattr(ray_prepare, "_write", die)
        with pytest.raises(EngineError, match=r"part of the data set was not prepared: .*same command again"):
            on_cluster(tmp_path / "a", path, shape)
    assert on_cluster(tmp_path / "a", path, shape) == planned(tmp_path / "b", path, shape)


def test_one_node_prepares_as_it_is_told(ray_cluster, tmp_path, monkeypatch):
    opened = []
    for name in ("here", "cluster"):
        module = run if name == "here" else ray_prepare
        monkeypatch.setattr(module, name, lambda *_, name=name: opened.append(name))
    ray.shutdown()  # what another test left
    ray.init(address=ray_cluster.address, log_to_driver=False)
    try:
        for processes in (None, "cluster", 1, 2):
            run._pool(parts.Setup(job("x", processes=processes), SHAPE, "", {}), None)
    finally:
        ray.shutdown()
    assert opened == ["here", "cluster", "here", "here"]
