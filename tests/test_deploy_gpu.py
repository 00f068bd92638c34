"""What goes to GPU hosts: the image, the bundle for hosts without a network, and a job file for each model."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import manifest_checks as checks
import pytest

import ray_extract
from ray_extract import cli, manifests, run
from ray_extract.capture.boundaries import resolve_boundaries
from ray_extract.capture.compat import TESTED_VERSIONS
from ray_extract.config import load_job
from ray_extract.model import TEXT_CONFIGS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker/Dockerfile"
MODELS = Path(__file__).parent / "model_configs"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"deploy_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The pins


def _pins() -> dict[str, str]:
    lines = (DEPLOY / "gpu/requirements.txt").read_text().splitlines()
    found = {}
    for line in lines:
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9.-]+)==([0-9][A-Za-z0-9.!]*)", line)
            assert match, f"{line!r} is no pin"
            assert match[1] not in found, f"{line} is pinned twice"
            found[match[1]] = match[2]
    return found


def test_the_pins_have_an_sglang_that_was_tested_and_the_ray_of_the_manifests() -> None:
    assert _pins()["sglang"] in TESTED_VERSIONS
    assert _pins()["ray"] == manifests.RAY_VERSION


def test_the_pins_have_all_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["run"]]
    assert {re.split(r"[\[>=]", line)[0] for line in wanted} <= _pins().keys()


# The image


def _instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile, in order, with lines joined and comments left out."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#"))
    joined = text.replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def _of(word: str) -> list[str]:
    return [rest for found, rest in _instructions() if found == word]


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(
        [checks.tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_begins_with_a_cuda_of_one_version() -> None:
    first, *rest = _of("FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu24\.04 AS base", first)
    assert {line.split()[0] for line in rest} == {"base"}
    cuda = ".".join(_pins()["nvidia-cuda-runtime"].split(".")[:2])
    assert f":{cuda}." in first, "torch is built for another CUDA"


def test_the_image_runs_as_the_user_of_the_manifests() -> None:
    words = [word for word, _ in _instructions()]
    assert _of("USER") == [f"{manifests.USER}:{manifests.USER}"]
    assert "RUN" not in words[words.index("USER") :]
    assert any(f"--uid {manifests.USER}" in line for line in _of("RUN"))


def test_the_image_has_a_health_check_and_the_cache_of_the_manifests() -> None:
    [check] = _of("HEALTHCHECK")
    script = check.split('"')[-2]
    assert any(line.endswith(f" {script}") for line in _of("COPY"))
    assert f"XDG_CACHE_HOME={manifests.CACHE}" in " ".join(_of("ENV"))


def test_what_the_image_copies_is_in_the_repository_and_in_the_build_context() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {path for line in _of("COPY") if "--from" not in line for path in line.split()[:-1]}
    assert copied == let_in
    assert all((ROOT / path).exists() for path in copied)


def test_the_image_is_named_as_the_manifests_name_it() -> None:
    assert f"-t ray-extract:{ray_extract.__version__} ." in DOCKERFILE.read_text()


@pytest.mark.parametrize(
    ("plugins", "shm", "driver", "said"),
    [
        ({"ray_extract"}, 2 << 30, True, []),
        ({"other"}, 2 << 30, True, ["capture plugin"]),
        ({"ray_extract"}, 64 << 20, True, ["--shm-size"]),
        ({"ray_extract"}, 2 << 30, False, ["--gpus all"]),
    ],
)
def test_the_health_check_says_what_is_missing(
    tmp_path: Path, plugins: set[str], shm: int, driver: bool, said: list[str]
) -> None:
    if driver:
        (tmp_path / "nvidiactl").write_text("")
    found = _load(DEPLOY / "docker/healthcheck.py").missing(plugins, shm, tmp_path)
    assert len(found) == len(said)
    assert all(text in line for text, line in zip(said, found, strict=True))


# The bundle


def _fake_wheel(folder: Path, name: str) -> None:
    """A wheel of nothing, of a version that is new enough for everybody."""
    stem = name.replace("-", "_")
    info = f"{stem}-9999.0.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-9999.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9999.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose stack are empty wheels; our own is the real one."""
    folder = tmp_path_factory.mktemp("bundle")
    index = folder / "index"
    index.mkdir()
    names = [
        re.split(r"[>=]", line)[0]
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    for name in names:
        _fake_wheel(index, name)
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{name}==9999.0\n" for name in names))
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "airgap/bundle.py"), str(folder / "out"), "--requirements", str(requirements)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def _install(bundle: Path, venv: Path) -> "subprocess.CompletedProcess[str]":
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    env |= {"PYTHON": sys.executable, "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    return subprocess.run(
        [bundle / "install.sh", venv], env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_bundle_installs_without_a_network_and_sglang_finds_the_plugin(bundle: Path, tmp_path: Path) -> None:
    done = _install(bundle, tmp_path / "venv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "venv/bin/ray-extract").exists()
    again = _install(bundle, tmp_path / "venv")
    assert again.returncode == 1
    assert "is there already" in again.stderr


def test_a_damaged_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", bundle, tmp_path / "copy"], check=True)
    wheel = next((tmp_path / "copy/wheels").glob("ray_extract*"))
    wheel.write_bytes(wheel.read_bytes()[:-1])
    done = _install(tmp_path / "copy", tmp_path / "venv")
    assert done.returncode == 1
    assert "damaged" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_bundle_without_a_wheel_is_refused(bundle: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", bundle, tmp_path / "copy"], check=True)
    next((tmp_path / "copy/wheels").glob("numpy*")).unlink()
    done = _install(tmp_path / "copy", tmp_path / "venv")
    assert done.returncode == 1
    assert "damaged" in done.stderr


def test_a_stack_that_lacks_a_package_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", bundle, copy], check=True)
    requirements = copy / "requirements.txt"
    requirements.write_text(requirements.read_text().replace("obstore==9999.0\n", ""))
    _load(DEPLOY / "airgap/bundle.py").write_sums(copy)
    done = _install(copy, tmp_path / "venv")
    assert done.returncode == 1
    assert "obstore" in done.stdout
    assert "does not fit together" in done.stderr


def test_the_wheels_of_the_bundle_are_for_the_python_of_the_pins() -> None:
    module = _load(DEPLOY / "airgap/bundle.py")
    command = module.download_command(Path("list"), Path("wheels"))
    assert f"--python-version={module.PYTHON}" in command
    assert f"Python {module.PYTHON} " in (DEPLOY / "gpu/requirements.txt").read_text().splitlines()[0]
    assert f"python{module.PYTHON}" in DOCKERFILE.read_text()
    assert f"python{module.PYTHON}" in (DEPLOY / "airgap/install.sh").read_text()


# The job files


@dataclasses.dataclass(frozen=True)
class Published:
    """What is known of a model and a GPU.

    Args:
        weights: GB of its checkpoint.
        gpu: GB of a GPU's memory.
        boundaries: what eagle3 stands for.
        token_bytes: of all states of a token.
    """

    weights: float
    gpu: float
    boundaries: tuple[int, ...]
    token_bytes: int


PUBLISHED = {
    "kimi-k2.5_8xh200": Published(595, 141, (2, 30, 58), 57344),
    "deepseek-v3_8xh200": Published(689, 141, (2, 30, 58), 57344),
    "llama-3.3-70b_8xh100": Published(141, 80, (2, 40, 77), 65536),
    "gpt-oss-120b_8xh100": Published(65.2, 80, (2, 18, 33), 23040),
    "qwen3-8b_8xh100": Published(16, 80, (2, 18, 33), 32768),
}
# Bits of an expert's weight with its scales; all else is bf16, but DeepSeek's linear layers are fp8 too.
EXPERT_BITS = {"compressed-tensors": 4 + 16 / 32, "fp8": 8.0, "mxfp4": 4 + 8 / 32}


def weight_bytes(name: str) -> float:
    """Bytes of a model's weights, from its config.json; norms, biases, routers and MTP layers are left out."""
    tree: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    c = next((tree[key] for key in TEXT_CONFIGS if key in tree), tree)
    hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    if "kv_lora_rank" in c:
        up = c["q_lora_rank"] * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        up += c["kv_lora_rank"] * (c["qk_nope_head_dim"] + c["v_head_dim"])
        down = c["q_lora_rank"] + c["kv_lora_rank"] + c["qk_rope_head_dim"]
        attention = hidden * down + heads * (up + c["v_head_dim"] * hidden)
    else:
        attention = 2 * hidden * c["head_dim"] * (heads + c["num_key_value_heads"])
    experts = c.get("n_routed_experts") or c.get("num_local_experts") or 0
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    dense = c.get("first_k_dense_replace", 0) if experts else layers
    method = c.get("quantization_config", {}).get("quant_method")
    other = 1 if method == "fp8" else 2
    shared = c.get("n_shared_experts", 0) * 3 * hidden * width * (layers - dense)
    plain = layers * attention + dense * 3 * hidden * c["intermediate_size"] + shared
    routed = (layers - dense) * experts * 3 * hidden * width
    return 2 * c["vocab_size"] * hidden * 2 + plain * other + routed * EXPERT_BITS.get(method, 0) / 8


def test_every_job_file_has_its_model_here() -> None:
    assert {path.stem for path in (DEPLOY / "jobs").glob("*.yaml")} == PUBLISHED.keys()
    assert {path.name for path in MODELS.iterdir()} == {name.rpartition("_")[0] for name in PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_weights_are_those_of_the_published_shape(name: str) -> None:
    # DeepSeek's checkpoint also has a layer for multi-token prediction, 2 % of it.
    assert weight_bytes(name.rpartition("_")[0]) == pytest.approx(PUBLISHED[name].weights * 1e9, rel=0.035)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_job_file_fits_its_gpus_and_uses_all_of_them(name: str) -> None:
    path, known, model = DEPLOY / "jobs" / f"{name}.yaml", PUBLISHED[name], str(MODELS / name.rpartition("_")[0])
    job, shape = manifests.checked(load_job(path), model)
    size = manifests.sizes(job, shape)
    assert (size.nodes, size.gpus) == (1, 8)
    each = known.weights / job.num_gpus
    # A fifth of the memory, at least, is for the cache, the activations and CUDA itself.
    assert each <= 0.8 * known.gpu
    comment = path.read_text().splitlines()[0]
    assert f"({known.weights:.0f} GB)" in comment
    assert f"{each:.0f} GB of weights on each GPU" in comment or each == known.weights
    assert resolve_boundaries(job.capture.boundaries, shape.num_layers) == known.boundaries
    assert run.token_bytes(job, shape, known.boundaries) == known.token_bytes
    assert size.shm + size.gpus * manifests.GPU_MEMORY_BYTES <= job.kubernetes.node_memory
    assert checks.our_faults(manifests.job_objects(job, shape)) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_job_file_is_planned_and_its_arena_fits_the_node(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = DEPLOY / "jobs" / f"{name}.yaml", MODELS / name.rpartition("_")[0]
    job, shape = manifests.checked(load_job(path), str(model))
    assert job.dataset.max_tokens is not None
    rows = tmp_path / "rows.jsonl"
    lengths = [1, job.dataset.max_tokens, 100, job.dataset.max_tokens + 1]
    rows.write_text("".join(json.dumps({"input_ids": [5] * length}) + "\n" for length in lengths))
    here = [f"dataset.paths={rows}", f"model.path={model}", "model.load_format=dummy", f"output.url={tmp_path / 'out'}"]
    assert cli.main(["plan", "--config", str(path), *here]) == 0
    said = capsys.readouterr().out
    tokens = sum(lengths[:3])
    assert "4 = 3 usable + 1 skipped" in said
    assert f"of {tokens:,} tokens at {PUBLISHED[name].token_bytes:,} bytes each" in said
    amount, unit = re.findall(r"^/dev/shm .*?\(([\d.]+) ([MG])iB\) for ", said, re.MULTILINE)[0]
    planned = float(amount) * 2 ** {"M": 20, "G": 30}[unit]
    assert planned <= manifests.sizes(job, shape).arena
