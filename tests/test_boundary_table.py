"""Every model class of SGLang that can be made here hands over the boundaries asked for, or is refused."""

from typing import Any

import pytest
from boundary_table import LANGUAGE, MULTIMODAL, NOT_MADE, SETTERS, measured, table
from capture_page import PAGE, split


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return measured()


def test_no_class_would_hand_over_something_else_than_asked_without_being_refused(found: dict[str, Any]) -> None:
    assert {name: outcome["wrong"] for name, outcome in found["outcomes"].items() if outcome["wrong"]} == {}
    assert all(outcome["used"] or outcome["refused"] for outcome in found["outcomes"].values())


def test_every_class_with_a_setter_is_in_the_table(found: dict[str, Any]) -> None:
    ours = {name for name, setters in found["targets"].items() if setters != [SETTERS[2]]}
    assert found["unread"] == ["inkling"]
    assert ours | {"InklingForConditionalGeneration"} == {*LANGUAGE, *MULTIMODAL, *NOT_MADE}


def test_the_page_says_what_the_classes_do(found: dict[str, Any]) -> None:
    assert split(PAGE.read_text(), "boundaries")[1] == table(found), "run: python tests/boundary_table.py"
