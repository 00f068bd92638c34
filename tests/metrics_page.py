"""What comes from the tables of metrics and alerts: two tables of docs/metrics.md, and deploy/prometheus/alerts.yaml.

    python tests/metrics_page.py      writes them

tests/test_metrics_page.py compares them.
"""

import re
from pathlib import Path

import yaml
from capture_page import split

from ray_extract import alerts
from ray_extract.metrics import METRICS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/metrics.md"
RULES = ROOT / "deploy/prometheus/alerts.yaml"


def metrics_table() -> str:
    """Every metric."""
    lines = ["| metric | kind | unit | label | what it is |", "| --- | --- | --- | --- | --- |"]
    for metric in METRICS:
        values = f": {', '.join(f'`{value}`' for value in metric.values)}" if metric.values else ""
        label = "" if metric.tag is None else f"`{metric.tag}`{values}"
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {label} | {metric.text} |")
    return "\n".join(lines)


def alerts_table() -> str:
    """Every alert."""
    lines = ["| alert | severity | what is wrong | what to look at |", "| --- | --- | --- | --- |"]
    for rule in alerts.groups()[0]["rules"]:
        notes = rule["annotations"]
        summary = re.sub(r"\{\{ \$labels\.run \}\}", "the run", notes["summary"])
        summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"a \1", summary)
        summary = re.sub(r"\{\{ \$value[^}]*\}\}", "N", summary)
        lines.append(f"| `{rule['alert']}` | {rule['labels']['severity']} | {summary} | {notes['description']} |")
    return "\n".join(lines)


def rules() -> str:
    """The rule file."""
    head = "# Written by `python tests/metrics_page.py` from ray_extract/alerts.py.\n"
    return head + yaml.safe_dump({"groups": alerts.groups()}, sort_keys=False, width=120)


def page(text: str) -> str:
    """docs/metrics.md with its tables made anew."""
    for block, table in (("metrics", metrics_table()), ("alerts", alerts_table())):
        before, _, after = split(text, block)
        text = before + table + after
    return text


def main() -> None:
    """Write them."""
    PAGE.write_text(page(PAGE.read_text()))
    RULES.write_text(rules())


if __name__ == "__main__":
    main()
