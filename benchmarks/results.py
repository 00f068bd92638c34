"""Result files: benchmarks/results/NAME.json, from which the tables in docs/ are made."""

import dataclasses
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, Literal

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


def write(name: str, rows: list[Row], command: str | None = None, join: bool = False) -> Path:
    """Write the result file of a benchmark.

    Args:
        command: this process's own when absent.
        join: keep the rows of other cases that are in the file, if the machine, the versions and the day are the same.
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
    }
    known = json.loads(path.read_text()) if join and path.exists() else {}
    if all(known.get(part) == record[part] for part in ("date", "machine", "versions")):
        cases = {row.case for row in rows}
        record["rows"] = [row for row in known["rows"] if row["case"] not in cases] + record["rows"]
        record["command"] = "; ".join(dict.fromkeys([*known["command"].split("; "), record["command"]]))
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


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
