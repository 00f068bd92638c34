"""Result files: benchmarks/results/NAME.json, from which the tables in docs/ are made; and what goes into them."""

import dataclasses
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

RESULTS = Path(os.environ.get("RAY_EXTRACT_RESULTS", Path(__file__).parent / "results"))


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        goal: what the project asks of it, or None for a figure that is only shown.
        better: in which direction.
    """

    case: str
    metric: str
    value: float
    unit: str
    goal: float | None = None
    better: Literal["higher", "lower"] = "higher"


def met(row: Row) -> bool:
    """Whether a figure reaches its goal."""
    assert row.goal is not None
    return row.value >= row.goal if row.better == "higher" else row.value <= row.goal


def verdict(rows: list[Row]) -> int:
    """Print the figures that miss their goals; returns the exit code, 1 if any does."""
    missed = [row for row in rows if row.goal is not None and not met(row)]
    for row in missed:
        print(f"missed: {row.case} {row.metric} = {row.value}, goal {row.goal}")
    return 1 if missed else 0


def in_turns(ways: dict[str, Callable[[], T]], runs: int) -> dict[str, list[T]]:
    """Figures of each way, one of each in turn; the first turn warms up."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(runs + 1):
        for name, way in ways.items() if turn % 2 else reversed(ways.items()):
            figure = way()
            if turn:
                found[name].append(figure)
    return found


def write(name: str, rows: list[Row], command: str | None = None, note: str | None = None, join: bool = False) -> Path:
    """Write the result file of a benchmark.

    Args:
        command: this process's own when absent.
        note: for the page.
        join: keep the rows of other cases that are in the file; `joined` then says of each case where it was run.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record: dict[str, Any] = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "command": command or " ".join(["python", *sys.argv]),
        "rows": [dataclasses.asdict(row) for row in rows],
        **({"note": note} if note else {}),
    }
    if join and path.exists():
        known, cases = json.loads(path.read_text()), {row.case for row in rows}
        kept = [row for row in known["rows"] if row["case"] not in cases]
        earlier = known.get("joined", {})
        record["joined"] = {row["case"]: earlier.get(row["case"], origin(known)) for row in kept}
        record["rows"] = kept + record["rows"]
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def origin(record: dict[str, Any]) -> str:
    """By what command, when, on what and with what the figures of a result were made."""
    gpus = ", ".join(record["machine"].get("gpus", [])) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"`{record['command']}`, {record['date']}, {gpus}, {record['machine']['cpus']} cores; {versions}."


def machine() -> dict[str, Any]:
    """The machine, without its name."""
    found: dict[str, Any] = {"cpus": os.cpu_count(), "arch": platform.machine()}
    try:
        import torch

        if torch.cuda.is_available():
            found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except ImportError:
        pass
    return found


def versions() -> dict[str, str]:
    """Of what decides the figures."""
    import importlib.metadata

    found = {"python": platform.python_version()}
    for package in ("ray-extract", "sglang", "torch", "triton", "transformers", "pyarrow", "obstore"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
