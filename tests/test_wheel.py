"""Our wheel, built, installed and run where there is no repository."""

import os
import subprocess
import sys
from pathlib import Path

import clusters
import pytest
from simulated import WAIT_S, check_output, make_rows, make_work

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for command in (
        ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT],
        ["install", "--no-deps", "--no-index", "--find-links", folder, "--target", folder / "site", "ray-extract"],
    ):
        done = subprocess.run(
            [*pip, *map(str, command)], capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=folder
        )
        assert done.returncode == 0, done.stderr
    return folder / "site"


def python(site: Path, cwd: Path, *args: str) -> str:
    """What a command says, with the installed wheel ahead of the checkout that the environment may know."""
    done = subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_has_the_package_the_command_and_the_plugin_and_nothing_else(site: Path, tmp_path: Path) -> None:
    assert {path.name for path in site.iterdir()} - {"bin", "__pycache__"} == {
        "ray_extract",
        f"ray_extract-{_version()}.dist-info",
    }
    installed = {path.relative_to(site) for path in site.rglob("ray_extract/**/*.py")}
    assert installed == {path.relative_to(ROOT) for path in ROOT.rglob("ray_extract/**/*.py")}
    code = (
        "import importlib.metadata, ray_extract; print(ray_extract.__file__);"
        "print(*[e.value for e in next(importlib.metadata.distributions(name='ray-extract')).entry_points])"
    )
    file, entries = python(site, tmp_path, "-c", code).splitlines()
    assert Path(file).parent == site / "ray_extract"
    assert sorted(entries.split()) == ["ray_extract.__main__:main", "ray_extract.capture.plugin:register"]


def test_it_makes_manifests(site: Path, tmp_path: Path) -> None:
    job = ROOT / "deploy/jobs/qwen3-8b_8xh100.yaml", "--model-config", ROOT / "tests/model_configs/qwen3-8b"
    made = python(site, tmp_path, "-m", "ray_extract", "manifests", "--config", *map(str, job))
    assert "kind: RayJob" in made and "kind: PrometheusRule" in made


@pytest.mark.ray
def test_it_extracts_in_a_cluster(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))  # workers have the environment of their node
    with clusters.cluster(num_cpus=1) as cluster:
        work = make_work(tmp_path, make_rows(4), cluster.address, engine={"cpus": 0.25})
        assert "rows        4" in python(site, tmp_path, "-m", "ray_extract.run", *work.args())
    check_output(work)


def _version() -> str:
    import ray_extract

    return ray_extract.__version__
