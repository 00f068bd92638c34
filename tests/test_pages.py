"""The pages that people follow to run on GPUs: their job files, commands, files and figures are right."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

import ray_extract
from ray_extract import cli, manifests
from ray_extract.config import KubernetesConfig, load_job

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs/kubernetes.md", ROOT / "docs/single-node.md", ROOT / "k8s/README.md"]
MODEL = Path(__file__).parent / "model_configs/qwen3-8b"


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def _commands(page: Path) -> list[list[str]]:
    lines = "\n".join(_blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def _ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_every_file_of_a_command_is_in_the_repository(page: Path) -> None:
    words = [word for command in _commands(page) for word in command]
    files = [word for word in words if re.fullmatch(r"(deploy|k8s|tests|docs)(/[\w.-]+)+", word)]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", PAGES[:2], ids=_ids)
def test_the_job_of_a_page_is_a_job(page: Path, tmp_path: Path) -> None:
    [block] = _blocks(page, "yaml")
    (tmp_path / "job.yaml").write_text(block)
    load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_every_command_of_ours_is_one(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to where it would begin: the parser takes the arguments."""
    taken = 0
    for command in _commands(page):
        if Path(command[0]).name == "ray-extract":
            for name in ("_manifests", "_plan", "_status", "_verify"):
                monkeypatch.setattr(cli, name, lambda args: 0)
            assert cli.main(command[1:]) == 0, command
            taken += 1
    assert taken


def test_the_page_for_kubernetes_makes_manifests_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGES[0]
    (tmp_path / "job.yaml").write_text(_blocks(page, "yaml")[0])
    shutil.copytree(MODEL, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    [command] = [command for command in _commands(page) if command[:2] == ["ray-extract", "manifests"]]
    assert cli.main(command[1:]) == 0
    applied = {command[3] for command in _commands(page) if command[:3] == ["kubectl", "apply", "-k"]}
    assert applied == {"manifests/job"}
    assert all((tmp_path / folder / "kustomization.yaml").exists() for folder in applied)
    job = yaml.safe_load((tmp_path / "manifests/job/rayjob.yaml").read_text())
    assert f"kubectl get rayjob {job['metadata']['name']}" in page.read_text()
    [secret] = [command[4] for command in _commands(page) if command[:3] == ["kubectl", "create", "secret"]]
    assert secret == load_job("job.yaml").kubernetes.credentials_secret
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [group["replicas"] for group in workers] == [2]
    overlays = {path.name for path in (tmp_path / "manifests/overlays").iterdir()}
    assert overlays == set(re.findall(r"^\| `([a-z-]+)` \|", page.read_text(), re.MULTILINE))


def test_the_figures_of_the_page_for_kubernetes_are_those_of_the_code() -> None:
    text = PAGES[0].read_text()
    assert f"`run.drain_s` + {manifests.STOP_S + manifests.LEAVE_S} s" in text
    assert f"`kubernetes.retries` times ({KubernetesConfig().retries})" in text
    assert f"Ray {manifests.RAY_VERSION} " in text
    pins = (ROOT / "deploy/gpu/requirements.txt").read_text()
    assert re.findall(r"SGLang ([\d.]+) ", text) == re.findall(r"^sglang==([\d.]+)$", pins, re.MULTILINE)
    for section, key in re.findall(r"`(kubernetes|run|engine|model)\.(\w+)", text):
        assert key in type(getattr(load_job(ROOT / "deploy/jobs/qwen3-8b_8xh100.yaml"), section)).model_fields


@pytest.mark.parametrize("page", PAGES[:2], ids=_ids)
def test_the_image_of_a_page_is_of_this_version(page: Path) -> None:
    assert set(re.findall(r"ray-extract:([\w.]+)", page.read_text())) == {ray_extract.__version__}
