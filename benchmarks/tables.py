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

HOST = (
    ("a row's places in shared memory", "arena", "short rows", "placing"),
    ("planning, from lengths", "plan", "units", "rate"),
    ("planning, from prepared rows", "plan", "stored", "rate"),
    ("a shard's check and upload, HTTP", "flush", "raw-http", "cpu_s_per_gib"),
    ("a shard's check and upload, TLS", "flush", "raw-https", "cpu_s_per_gib"),
    ("the same as Parquet, HTTP", "flush", "parquet-http", "cpu_s_per_gib"),
    ("resume", "ledger", "resume", "time"),
    ("manifest", "ledger", "manifest", "time"),
    ("driving 1,000 engines", "driver", "1000-engines", "cpu_cores"),
    ("commits", "driver", "1000-engines", "commits_per_s"),
    ("reading all states of a shard", "read", "sequential", "ratio"),
    ("reading a state of a random row", "read", "random-row", "ratio"),
    ("streaming from an object store", "read", "stream-s3", "ratio"),
    ("requests for a state of a row", "read", "stream-s3", "requests, alone"),
)
"""What the host-side table shows: words, and the result, case (or its beginning up to a comma) and metric."""

_HEAD = """# Performance

Every table is made by `benchmarks/tables.py` from a file in `benchmarks/results/`, which the named command wrote.
Ratios are of two things measured in turns in one run; rates alone are for orientation.
"""


def pages() -> dict[Path, str]:
    """Every page as it must be."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))}
    sections = [section(result) for name, result in results.items() if name not in BLOCKS]
    made = {PAGE: "\n".join([_HEAD, host(results), *sections])}
    for name, page in BLOCKS.items():
        before, first, rest = made.get(page, page.read_text()).partition(f"<!-- {name} -->\n")
        _, last, after = rest.partition(f"<!-- /{name} -->")
        table = section(results[name]).partition("\n\n")[2] if name in results else ""
        made[page] = before + first + table + last + after
    return made


def host(results: dict[str, Any]) -> str:
    """What everything beside the GPU costs, out of several results."""
    lines = [
        "## Host side",
        "",
        "Of the sections below, without a GPU; what each is measured against stands there.",
        "",
    ]
    lines += ["| what | | value | unit | goal |", "| --- | --- | --- | --- | --- |"]
    for words, name, case, metric in HOST:
        found = next(
            row
            for row in results[name]["rows"]
            if row["metric"] == metric and f"{row['case']}, ".startswith(f"{case}, ")
        )
        shown = found["case"] if found["case"] == case else found["case"].removeprefix(f"{case}, ")
        lines.append(f"| {words} | {shown} | {found['value']:,} | {found['unit']} | {goal(found)} |")
    return "\n".join([*lines, ""])


def goal(row: dict[str, Any]) -> str:
    """What the project asks of a figure."""
    return "" if row["goal"] is None else f"{'≥' if row['better'] == 'higher' else '≤'} {row['goal']:g}"


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
        lines.append(f"| {row['case']} | {row['metric']} | {row['value']:,} | {row['unit']} | {goal(row)} |")
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
