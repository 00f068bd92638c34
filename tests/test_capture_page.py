"""docs/capture.md says what the code does: its table of refused options is the code's, and the tests it names exist."""

import ast
import re
from pathlib import Path

import pytest
from capture_page import PAGE, refused_table, split

from ray_extract.capture.compat import HOOKED, TESTED_VERSIONS
from ray_extract.engine.sglang import REFUSED

TEXT = PAGE.read_text()


def test_the_page_lists_the_refused_options_with_their_reasons_and_no_others() -> None:
    assert split(TEXT, "refused")[1] == refused_table(), "run: python tests/capture_page.py"
    for name, (allowed, reason) in REFUSED.items():
        assert TEXT.count(f"| `{name}` | {allowed.shown} | {reason} |") == 1


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(test_\w+\.py::test_\w+)`", TEXT))))
def test_a_test_that_the_page_names_exists(named: str) -> None:
    file, _, test = named.partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_names_the_five_hooks() -> None:
    assert len(HOOKED) == 5
    for path in HOOKED:
        assert f"| `{'.'.join(path.split('.')[-2:])}` |" in TEXT


def test_the_page_lists_the_tested_versions_and_no_others() -> None:
    table = TEXT.partition("## Versions of SGLang\n")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| (\d+\.\d+\.\d+) \|", table, re.MULTILINE)) == TESTED_VERSIONS
    measured = re.findall(r"^\| sglang (\d+\.\d+\.\d+) \|", split(TEXT, "versions")[1], re.MULTILINE)
    assert set(measured) <= set(TESTED_VERSIONS)
    assert set(re.findall(r"SGLang (\d+\.\d+\.\d+)", TEXT)) <= set(TESTED_VERSIONS)


def test_the_block_for_gpu_results_is_there_once() -> None:
    assert TEXT.count("## Proved on a GPU\n") == 1
    assert TEXT.count("<!-- truth-gpu -->") == TEXT.count("<!-- /truth-gpu -->") == 1
