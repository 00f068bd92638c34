"""The truth tests in one more SGLang than the installed one; `make versions` runs them, and more, in all."""

import dataclasses
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import version_suite
from version_suite import Outcome

GOOD = Outcome("0.5.16", frozenset({"sglang 0.5.16"}), passed=10, worst=2e-6)


@pytest.mark.engine
def test_the_truth_tests_pass_in_the_version_of_the_gpu_hosts(tmp_path: Path) -> None:
    found = version_suite.run("0.5.16", version_suite.QUICK, tmp_path)
    assert found.right and found.passed == 10, f"{found}\n{found.said}"


@pytest.mark.parametrize(
    "changed",
    [
        {"passed": 0},
        {"failed": 1},
        {"skipped": 1},
        {"worst": 2e-5},
        {"worst": float("nan")},
        {"ran": frozenset({"sglang 0.5.20"})},
        {"ran": frozenset()},
    ],
    ids=str,
)
def test_a_version_is_right_only_if_it_ran_and_all_passed(changed: dict[str, Any]) -> None:
    found = dataclasses.replace(GOOD, **changed)
    assert GOOD.right and not found.right
    assert "NOT RIGHT" not in version_suite.table([GOOD]) and "NOT RIGHT" in version_suite.table([found])


def test_a_version_whose_environment_cannot_be_made_is_not_right(tmp_path: Path) -> None:
    found = version_suite.run("0", version_suite.QUICK, tmp_path)
    assert not found.right and "sglang==0" in found.said
    assert not (version_suite.REPO / ".cache/sglang-0").exists()


def test_tests_that_cannot_be_collected_are_failed_tests(tmp_path: Path) -> None:
    found = version_suite.run(version("sglang"), ["tests/no_such_test.py"], tmp_path)
    assert not found.right and found.failed == 1 and "no_such_test" in found.said
