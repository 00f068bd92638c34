"""A checkpoint at a URL: described from afar, copied once to a node whoever dies, and refused in words."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from safetensors.torch import save_file
from simulated import make_work, until
from test_extractor import setup

from ray_extract import head, staging
from ray_extract.config import EngineConfig, Job, ModelConfig
from ray_extract.errors import AccessDenied, ConfigError, StoreError, Throttled
from ray_extract.extractor import Extractor
from ray_extract.layout import HEAD_KEY
from ray_extract.model import describe_model, stage_model
from ray_extract.store import LocalStore, open_store

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 16,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}
BLOCK = 1 << 10


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of two weight files and an index, with what must not be copied."""
    folder = tmp_path / "source"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    made = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (1000, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (1000, 16),
        "model.layers.0.mlp.weight": (640, 64),
    }
    tensors = {name: torch.randn(shape, generator=made).to(torch.bfloat16) for name, shape in shapes.items()}
    names = list(tensors)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    index = {name: file for file, inside in parts.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "pytorch_model.bin").write_bytes(b"the same again")
    (folder / "original" / "weights.safetensors").write_bytes(b"and again")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that are read of each file of a store from now on."""
    counted: Counter[str] = Counter()
    whole = LocalStore._get_range

    def counting(self: LocalStore, key: str, start: int, length: int) -> bytes:
        counted[key] += length
        return whole(self, key, start, length)

    monkeypatch.setattr(LocalStore, "_get_range", counting)
    return counted


def config(source: Path, cache: Path, **more: Any) -> ModelConfig:
    return ModelConfig(path=f"file://{source}", cache_dir=str(cache), **more)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


SMALL = {"config.json", "tokenizer.json", "model.safetensors.index.json"}


def test_a_url_is_described_as_its_folder_and_a_driver_gets_all_but_the_weights(source: Path, tmp_path: Path) -> None:
    near, far = describe_model(ModelConfig(path=str(source))), describe_model(config(source, tmp_path / "cache"))
    assert far.fingerprint == near.fingerprint
    assert far.weight_bytes == near.weight_bytes == sum(f.stat().st_size for f in source.glob("*.safetensors"))
    assert Path(far.path).parent == tmp_path / "cache" and names(Path(far.path)) == SMALL


def test_engines_of_a_node_that_start_together_copy_each_file_once(
    source: Path, tmp_path: Path, reads: Counter[str]
) -> None:
    cfg = config(source, tmp_path / "cache")
    fingerprint = describe_model(ModelConfig(path=str(source))).fingerprint
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(stage_model(cfg, fingerprint, threading.Event())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1
    assert names(found[0]) == SMALL | {"a.safetensors", "b.safetensors"}
    for name in names(found[0]):
        assert (found[0] / name).read_bytes() == (source / name).read_bytes()
        assert reads[name] == (source / name).stat().st_size
    reads.clear()
    shutil.rmtree(source)  # nothing is asked of it any more
    assert stage_model(cfg, fingerprint, threading.Event()) == found[0] and not reads


def test_a_copy_whose_process_was_killed_goes_on_where_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Counter[str]
) -> None:
    cfg = config(source, tmp_path / "cache")
    fingerprint = describe_model(ModelConfig(path=str(source))).fingerprint
    program = (
        "import sys, threading, time; from ray_extract import model, staging, store; from ray_extract.config import *\n"
        f"staging._BLOCK = {BLOCK}; real = store.LocalStore._get_range\n"
        "store.LocalStore._get_range = lambda *a: (time.sleep(0.02), real(*a))[1]\n"
        "model.stage_model(ModelConfig(path=sys.argv[1], cache_dir=sys.argv[2]), sys.argv[3], threading.Event())"
    )
    killed = subprocess.Popen([sys.executable, "-c", program, cfg.path, cfg.cache_dir, fingerprint])
    part = staging.cache_folder(cfg, fingerprint) / "b.safetensors.part"
    try:
        until(lambda: part.exists() and part.stat().st_size >= 10 * BLOCK, "ten blocks")
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    there = part.stat().st_size
    with part.open("r+b") as file:  # as a power cut may leave the last block
        file.seek(there // BLOCK * BLOCK - BLOCK)
        file.write(bytes(BLOCK))
    monkeypatch.setattr(staging, "_BLOCK", BLOCK)
    reads.clear()
    folder = stage_model(cfg, fingerprint, threading.Event())
    assert (folder / "b.safetensors").read_bytes() == (source / "b.safetensors").read_bytes()
    assert reads["b.safetensors"] <= (source / "b.safetensors").stat().st_size - (there // BLOCK - 1) * BLOCK
    assert not list(folder.glob("*.part"))


def test_a_checkpoint_that_was_replaced_by_one_of_the_same_sizes_is_refused(source: Path, tmp_path: Path) -> None:
    cfg = config(source, tmp_path / "cache")
    fingerprint = describe_model(cfg).fingerprint
    other = bytearray((source / "b.safetensors").read_bytes())
    other[-1] ^= 1
    (source / "b.safetensors").write_bytes(other)
    with pytest.raises(ConfigError, match=r"no more the one that this run began with"):
        stage_model(cfg, fingerprint, threading.Event())
    assert not staging.cache_folder(cfg, fingerprint).exists(), "or it would be taken for whole the next time"


def test_what_stands_in_the_way_is_said_in_a_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = config(tmp_path / "nowhere", tmp_path / "cache")
    with pytest.raises(ConfigError, match=rf"^model\.path = '{nowhere.path}': no config\.json in it"):
        describe_model(nowhere)
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(ConfigError, match=rf"^model\.cache_dir = '{taken}': cannot be written"):
        describe_model(config(source, taken))
    fingerprint = describe_model(ModelConfig(path=str(source))).fingerprint
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(ConfigError, match=r"^model\.cache_dir = .*0\.00 GiB are free; free some space, or name"):
            stage_model(config(source, tmp_path / "cache"), fingerprint, threading.Event())
    for raised, seen in ((AccessDenied("denied"), ConfigError), (Throttled("slow down"), StoreError)):

        def fail(*_: Any, raised: Exception = raised) -> bytes:
            raise raised

        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "_get_range", fail)
            patch.setattr(staging, "_PATIENCE_S", 0.0)
            with pytest.raises(seen, match=str(raised)) as caught:
                stage_model(config(source, tmp_path / "cache"), fingerprint, threading.Event())
        assert type(caught.value) in (ConfigError, Throttled)


def test_a_copy_that_is_not_wanted_any_more_ends(source: Path, tmp_path: Path) -> None:
    cfg, stopping = config(source, tmp_path / "cache"), threading.Event()
    stopping.set()
    with pytest.raises(StoreError, match="stopped while it was copied"):
        stage_model(cfg, describe_model(ModelConfig(path=str(source))).fingerprint, stopping)


@pytest.mark.s3
def test_a_bucket_is_copied_and_one_that_is_closed_is_named_without_its_secrets(
    source: Path, tmp_path: Path, s3: servers.S3Server
) -> None:
    url = f"{s3.url}/staging"
    bucket = open_store(url, s3.storage_options)
    for path in (path for path in source.rglob("*") if path.is_file()):
        bucket.put(path.relative_to(source).as_posix(), path.read_bytes())
    cfg = ModelConfig(path=url, cache_dir=str(tmp_path / "cache"), storage_options=s3.storage_options)
    shape = describe_model(cfg)
    assert shape.fingerprint == describe_model(ModelConfig(path=str(source))).fingerprint
    folder = stage_model(cfg, shape.fingerprint, threading.Event())
    assert names(folder) == SMALL | {"a.safetensors", "b.safetensors"}
    assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in names(folder))
    wrong = {**s3.storage_options, "secret_access_key": "not-the-right-one"}
    for options, path in ((wrong, url), (s3.storage_options, "s3://no-such-bucket/model")):
        with pytest.raises(ConfigError, match=rf"^model\.path = '{path}': ") as caught:
            describe_model(cfg.model_copy(update={"path": path, "storage_options": options}))
        assert servers.SECRET_KEY not in str(caught.value) and "not-the-right-one" not in str(caught.value)


def test_an_extractor_gives_its_engine_the_nodes_copy(source: Path, tmp_path: Path) -> None:
    work = make_work(tmp_path / "work", [[1, 2, 3]])
    job = work.job(f"model.path=file://{source}", f"model.cache_dir={tmp_path / 'cache'}")
    shape = describe_model(job.model)
    assert job.model.load_format == "dummy" and shape.weight_bytes == 0
    extractor = Extractor(setup(job.model_dump(mode="json"), tmp_path, fingerprint=shape.fingerprint))
    try:
        extractor.start()
        assert extractor._job.model.path == shape.path and names(Path(shape.path)) == SMALL
    finally:
        extractor.stop()


def test_the_head_of_a_url_is_that_of_its_folder_and_only_its_file_is_copied(source: Path, tmp_path: Path) -> None:
    stored = []
    for number, path in enumerate((str(source), f"file://{source}")):
        out = str(tmp_path / f"out{number}")
        model = {"path": path, "cache_dir": str(tmp_path / "cache")}
        job = Job.model_validate({"model": model, "dataset": {"paths": "x"}, "output": {"url": out}})
        shape = describe_model(job.model)
        assert head.write_head(open_store(out), job, shape)
        stored.append(open_store(out).get(HEAD_KEY))
    assert stored[0] == stored[1]
    assert names(Path(shape.path)) == SMALL | {"a.safetensors"}


@pytest.mark.parametrize(("weights", "seconds"), [(0, 900), (16_000_000_000, 980), (600_000_000_000, 3900)])
def test_an_engine_gets_time_by_the_size_of_its_weights(weights: int, seconds: float) -> None:
    assert EngineConfig().start_timeout(weights) == seconds
    assert EngineConfig(start_timeout_s=5).start_timeout(weights) == 5
