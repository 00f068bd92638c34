"""The pages say what the code says: keys, commands, errors and reasons; and the site builds without a warning."""

import ast
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

from ray_extract import cli, errors
from ray_extract.capture.writer import FAULT_TEXT
from ray_extract.config import Job
from ray_extract.records import RowStatus

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("C*.md")])
FAILURES = (ROOT / "docs/failures.md").read_text()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("mkdocs")), "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert {page.with_suffix(".html").name for page in PAGES if page.parent.name == "docs"} <= {
        page.name for page in tmp_path.iterdir()
    }
    assert not list(tmp_path.glob("**/*.py"))


def test_pages_of_keys_and_commands_are_those_of_the_code() -> None:
    command = [sys.executable, "docs/reference.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def _keys(prefix: str, model: type[pydantic.BaseModel]) -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        found.add(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            found |= _keys(f"{prefix}{name}.", field.annotation)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_that_a_page_names_is_one(page: Path) -> None:
    known = _keys("", Job)
    sections = "|".join(Job.model_fields)
    named = set(re.findall(rf"`({sections})\.([a-z_]+(?:\.[a-z_]+)?)", page.read_text()))
    known.add("model.torch_dtype")  # SpecForge's
    open_ended = ("engine.args.", "engine.env.", "storage_options.")
    endings = ("py", "yaml", "json", "parquet", "safetensors", "run", "ckpt")
    wrong = {
        key
        for section, name in named
        if (key := f"{section}.{name}") not in known
        and not any(part in f"{key}." for part in open_ended)
        and name.split(".")[-1] not in endings
    }
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_is_taken(page: Path) -> None:
    """Up to where it would begin."""
    parser = cli.make_parser()
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", page.read_text(), re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True) if "ray-extract " in line else []
        if words[:1] == ["ray-extract"]:
            parser.parse_args(words[1:])


def _errors() -> list[type[errors.RayExtractError]]:
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.RayExtractError) and kind is not errors.RayExtractError
    ]


@pytest.mark.parametrize("error", _errors(), ids=lambda error: error.__name__)
def test_every_error_is_explained_with_its_exit_code(error: type[errors.RayExtractError]) -> None:
    assert f"| `{error.__name__}` | {int(error.exit_code)} |" in FAILURES


def test_every_reason_of_a_row_is_explained() -> None:
    for status in RowStatus:
        assert status is RowStatus.OK or f"| `{status.name.lower()}` |" in FAILURES
    for text in FAULT_TEXT.values():
        assert f"| {text} |" in FAILURES
    kinds = {kind for name in ("chat", "prepare") for kind in _reasons(f"ray_extract.dataset.{name}")}
    assert len(kinds) > 20
    assert not {kind for kind in kinds if f"`{kind}`" not in FAILURES}


def _reasons(module: str) -> set[str]:
    """The kinds of the reasons that a module gives, where the text before the colon is fixed."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _named(node.func) == "Unusable"]
    texts = {text for call in calls for node in call.args[:1] for text in _starts(node)}
    return {text.partition(":")[0] for text in texts}


def _named(node: Any) -> str:
    return getattr(node, "id", "")


def _starts(node: ast.expr) -> set[str]:
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if ":" in text:
            return {text}
        case ast.IfExp(body=body, orelse=other):
            return _starts(body) | _starts(other)
        case ast.BoolOp(values=values):
            return {text for value in values for text in _starts(value)}
    return set()
