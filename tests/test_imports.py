"""Who may import whom, read from the sources: imports point down, and each part runs where it must."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ray_extract

ROOT = Path(ray_extract.__file__).parent

# From the bottom up. A module imports only from levels below its own, or from its own.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "records", "layout", "console", "logs"),
    ("capture",),  # runs inside SGLang
    ("shards.image",),
    ("store", "s3"),
    ("config", "progress"),
    ("staging",),
    ("model", "tensors", "checkpoint", "presets"),
    ("dataset",),
    ("shards",),
    ("ledger", "segments", "plan", "recompute", "reference_model"),
    ("head", "counts", "views", "cost"),
    ("engine",),
    ("extractor",),
    ("leases", "readers", "tally", "starts"),
    ("metrics",),
    ("worker",),
    ("fleet",),
    ("verify", "exporters", "status", "summary"),
    ("driver", "ray_fleet", "ray_prepare", "submit"),
    ("run", "prestop", "alerts", "trial"),
    ("manifests",),
    ("cli",),
    ("__main__",),
)
CAPTURE_NEEDS = {"numpy", "torch", "triton", "sglang"}


def modules() -> dict[str, Path]:
    """Dotted name below ray_extract -> file; packages' own files are named for the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
NAMES = sorted(name for name in MODULES if name)


def imports(name: str) -> Iterator[str]:
    """Absolute dotted names that a module imports, wherever in it; `from a import b` gives a.b if that is a module."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("ray_extract.") in MODULES else node.module


def ours(name: str) -> set[str]:
    """Modules of this package that a module imports; the package itself, which holds the version, is none."""
    return {i.removeprefix("ray_extract.") for i in imports(name) if i.startswith("ray_extract.")}


def others(name: str) -> set[str]:
    """Top-level packages that are neither ours nor of the standard library."""
    tops = {i.partition(".")[0] for i in imports(name)}
    return tops - {"ray_extract"} - sys.stdlib_module_names


def level(name: str) -> int:
    """The most specific entry of LEVELS that a module is in."""
    matches = [
        (len(entry), i)
        for i, entries in enumerate(LEVELS)
        for entry in entries
        if name == entry or name.startswith(f"{entry}.")
    ]
    assert matches, f"{name} has no level; give it one in LEVELS"
    return max(matches)[1]


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name: str) -> None:
    assert {other for other in ours(name) if level(other) > level(name)} == set()


def test_the_package_itself_imports_nothing() -> None:
    assert not list(imports(""))


@pytest.mark.parametrize("name", ["errors", "records", "layout", "capture.guard", "capture.rows"])
def test_the_ground_stands_on_the_standard_library(name: str) -> None:
    assert others(name) <= ({"numpy"} if name == "capture.rows" else set())


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("capture.")])
def test_what_runs_inside_sglang_needs_little(name: str) -> None:
    assert others(name) <= CAPTURE_NEEDS


def test_the_guard_can_run_alone() -> None:
    assert ours("capture.guard") == set()


def reachable(start: str) -> set[str]:
    found, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [n for n in ours(name) if n in MODULES]
    return found


def test_readers_and_exporters_never_reach_what_runs_engines() -> None:
    reached = {name for start in NAMES if start.startswith(("readers", "exporters")) for name in reachable(start)}
    assert not {n for n in reached if n.partition(".")[0] in ("engine", "extractor", "worker", "driver", "run", "cli")}


def run_without(blocked: tuple[str, ...], code: str) -> None:
    """Run code in a process where some packages cannot be imported."""
    block = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
    env = {k: v for k, v in os.environ.items() if k != "RAY_EXTRACT_CAPTURE"}
    done = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


def test_readers_import_without_ray_sglang_and_transformers() -> None:
    run_without(
        ("ray", "sglang", "transformers", "triton"), "import ray_extract.readers.dataset, ray_extract.readers.head"
    )


def test_exporters_import_without_what_runs_engines_and_without_trainers() -> None:
    names = [f"ray_extract.{name}" for name in NAMES if name.startswith("exporters")]
    assert len(names) > 5
    blocked = ("ray", "sglang", "transformers", "triton", "datasets", "specforge", "speculators", "hs_connectors")
    run_without(blocked, f"import {', '.join(names)}")


def test_the_plugin_imports_without_sglang_and_does_nothing_outside_an_engine() -> None:
    code = "from ray_extract.capture.plugin import register\nregister()\nassert 'torch' not in sys.modules"
    run_without(("sglang",), code)


def test_the_job_and_the_store_need_no_engine() -> None:
    """A driver's node may have neither a GPU nor SGLang."""
    code = "import ray_extract.config, ray_extract.store, ray_extract.ledger, ray_extract.plan, ray_extract.cli"
    run_without(("sglang", "triton"), code)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_pickled_or_printed(name: str) -> None:
    assert not {
        i for i in imports(name) if i.partition(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal")
    }
    called = {n.func.id for n in ast.walk(TREES[name]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert "print" not in called


@pytest.mark.parametrize("name", NAMES)
def test_only_the_engines_own_process_and_sglangs_import_sglang(name: str) -> None:
    """Its import takes 20 s and sets signal handlers; in the worker it would share the flusher's GIL."""
    if "sglang" in others(name):
        assert name in ("capture.compat", "capture.plugin", "engine.sglang")
        top = [n for n in TREES[name].body if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not any("sglang" in ast.unparse(n).split()[1].split(".")[:1] for n in top)
