"""What a query of PromQL asks for: metrics, and labels of them."""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import pytest

from ray_extract.metrics import METRICS, Kind

RAY_LABELS = frozenset({"Component", "NodeAddress", "SessionName", "Version", "WorkerId"})
"""Of every metric that Ray 2.60 exports, beside its own `otel_scope_...`."""


@dataclasses.dataclass
class Asked:
    """What a query asks for.

    Args:
        metrics: by name, with the labels that are matched.
        values: of labels that are compared with one value, by metric and label.
        labels: that it groups by, or joins on.
    """

    metrics: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    values: set[tuple[str, str, str]] = dataclasses.field(default_factory=set)
    labels: set[str] = dataclasses.field(default_factory=set)

    def faults(self, known: Mapping[str, Set[str]]) -> list[str]:
        """What is not there.

        Args:
            known: labels of each metric that there is.
        """
        found = [f"no metric {name}" for name in self.metrics if name not in known]
        for name, labels in self.metrics.items():
            missing = (labels | self.labels) - known.get(name, set())
            found += [f"{name} has no label {label}" for label in sorted(missing)]
        return found


def asked(query: str) -> Asked:
    """Parse a query, of a rule or of a panel; Grafana's own interval is filled in. Raises ValueError if it is none."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed; it is in the extra `dev`")
    found = Asked()

    def visit(part: Any) -> None:
        if isinstance(part, parser.VectorSelector):
            matchers = part.matchers.matchers
            found.metrics.setdefault(part.name, set()).update(matcher.name for matcher in matchers)
            for matcher in matchers:
                if not matcher.value.startswith(("$", ".")):
                    found.values.update((part.name, matcher.name, value) for value in matcher.value.split("|"))
        elif isinstance(part, parser.AggregateExpr) and part.modifier is not None:
            found.labels.update(part.modifier.labels)
        elif isinstance(part, parser.BinaryExpr) and part.modifier is not None and part.modifier.matching is not None:
            found.labels.update(part.modifier.matching.labels)

    parser.walk(parser.parse(query.replace("$__rate_interval", "5m")), visit)
    return found


def table() -> dict[str, set[str]]:
    """Names of the series of ray_extract.metrics as they are exported, with their labels."""
    found = {}
    for metric in METRICS:
        labels = {*metric.tags, *RAY_LABELS}
        if metric.kind is Kind.HISTOGRAM:
            found[f"{metric.name}_bucket"] = {*labels, "le"}
            found |= {f"{metric.name}_{part}": labels for part in ("sum", "count")}
        else:
            found[metric.name] = labels
    return found
