"""Write the tables of docs/ from the result files: they come from nowhere else.

    python benchmarks/tables.py [--check]

docs/performance.md is made whole, of all results that are not named in BLOCKS; those fill a block of another page.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from results import origin

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/performance.md"
BLOCKS = {
    "truth-gpu": ROOT / "docs/capture.md",
    "versions": ROOT / "docs/capture.md",
    "fp8": ROOT / "docs/capture.md",
    "drafter": ROOT / "examples/drafter/README.md",
}
"""Result -> the page with the comments `<!-- NAME -->` and `<!-- /NAME -->` around its table."""

_HEAD = """# Performance

Every table is made by `benchmarks/tables.py` from a file in `benchmarks/results/`, which the named command wrote.
Ratios are of two things measured in turns in one run; rates alone are for orientation.
"""


def pages() -> dict[Path, str]:
    """Every page as it must be."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))}
    made = {PAGE: "\n".join([_HEAD, *(section(r) for name, r in results.items() if name not in BLOCKS)])}
    for name, page in BLOCKS.items():
        before, first, rest = made.get(page, page.read_text()).partition(f"<!-- {name} -->\n")
        _, last, after = rest.partition(f"<!-- /{name} -->")
        table = section(results[name]).partition("\n\n")[2] if name in results else ""
        made[page] = before + first + table + last + after
    return made


def section(result: dict[str, Any]) -> str:
    """One result file."""
    joined: dict[str, list[str]] = {}
    for case, source in result.get("joined", {}).items():
        joined.setdefault(source, []).append(case)
    lines = [
        f"## {result['name']}",
        "",
        origin(result),
        "",
        *(line for source, cases in joined.items() for line in (f"The cases {', '.join(cases)}: {source}", "")),
        *([result["note"], ""] if "note" in result else []),
        "| case | metric | value | unit | goal |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        goal = "" if row["goal"] is None else f"{'≥' if row['better'] == 'higher' else '≤'} {row['goal']:g}"
        lines.append(f"| {row['case']} | {row['metric']} | {row['value']:,} | {row['unit']} | {goal} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    args = parser.parse_args()
    stale = [page for page, text in pages().items() if page.read_text() != text]
    if args.check:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is not as the result files say; run python benchmarks/tables.py")
        return 1 if stale else 0
    for page in stale:
        page.write_text(pages()[page])
    return 0


if __name__ == "__main__":
    sys.exit(main())
