"""The parts of docs/capture.md that come from the code.

    python tests/capture_page.py      writes them

tests/test_capture_page.py compares them.
"""

from pathlib import Path

from ray_extract.engine.sglang import REFUSED

PAGE = Path(__file__).parents[1] / "docs/capture.md"


def refused_table() -> str:
    """Every option of engine.args that may break capture."""
    lines = ["| engine.args | allowed | any other value is refused, because |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {allowed.shown} | {reason} |" for name, (allowed, reason) in REFUSED.items()]
    return "\n".join(lines)


def split(text: str, block: str) -> tuple[str, str, str]:
    """The page before, in and after a block between two comments."""
    first, last = f"<!-- {block} -->\n", f"\n<!-- /{block} -->"
    before, _, rest = text.partition(first)
    inside, _, after = rest.partition(last)
    return before + first, inside, last + after


def main() -> None:
    """Write the blocks."""
    before, _, after = split(PAGE.read_text(), "refused")
    PAGE.write_text(before + refused_table() + after)


if __name__ == "__main__":
    main()
