"""Every example of docs/datasets.md does what the page says."""

import contextlib
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import tiny_tokenizer as tiny
import yaml

from ray_extract import cli

PAGE = Path(__file__).parents[1] / "docs/datasets.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}
EXAMPLES = {
    title: BLOCK.findall(text)
    for title, text in re.findall(r"^##+ (.*?)\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
}


def outputs(text):
    """Each command of a console block with the lines that it must print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        yield shlex.split(command)[1:], [line for line in lines if line != "..."]


def printed(command):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(command)
    assert (code == 0) == (not err.getvalue())
    return (out.getvalue() + err.getvalue()).replace(str(Path.cwd()), "/data").splitlines()


def without_figures(line):
    """A line of a trial, whose figures are of the moment."""
    return re.sub(r"[\d.,]+", "N", line) if re.match(r"trial|hours .* tokens/s an engine", line) else line


TITLES = [
    pytest.param(title, marks=pytest.mark.ray if any("--trial" in text for *_, text in blocks) else ())
    for title, blocks in EXAMPLES.items()
    if blocks
]


@pytest.fixture
def no_ray_left():
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.parametrize("title", TITLES)
def test_example_prints_what_the_page_says(title, tmp_path, monkeypatch, no_ray_left):
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model")
    Path("model/config.json").write_text(json.dumps(CONFIG))
    ran = 0
    for kind, name, text in EXAMPLES[title]:
        if kind == "yaml":
            job = {"model": {"path": "model", "load_format": "dummy"}, "output": {"url": "out"}, **yaml.safe_load(text)}
            Path("job.yaml").write_text(yaml.safe_dump(job))
        elif kind == "python":
            exec(text, {})
        elif kind == "console":
            for command, expected in outputs(text):
                shown = printed(command)
                found = iter(map(without_figures, shown))
                missing = [line for line in expected if without_figures(line) not in found]  # in this order
                assert not missing, "\n".join(shown)
                ran += 1
        else:
            Path(name).write_text(text)
    assert ran


def test_page_has_an_example_in_each_section():
    assert all(blocks for blocks in EXAMPLES.values())
