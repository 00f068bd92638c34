"""Write docs/performance.md from the result files: its tables come from nowhere else.

python benchmarks/tables.py [--check]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/performance.md"

_HEAD = """# Performance

Every table is made by `benchmarks/tables.py` from a file in `benchmarks/results/`, which the named command wrote.
Ratios are of two things measured in turns in one run; rates alone are for orientation.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        parts.append(section(json.loads(path.read_text())))
    return "\n".join(parts)


def section(result: dict[str, Any]) -> str:
    """One result file."""
    gpus = ", ".join(result["machine"].get("gpus", [])) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"## {result['name']}",
        "",
        f"`{result['command']}`, {result['date']}, {gpus}, {result['machine']['cpus']} cores; {versions}.",
        "",
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
    if args.check:
        return 0 if PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
