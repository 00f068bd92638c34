"""Alert rules for Prometheus, on metrics.METRICS: when somebody should look at a run.

deploy/prometheus/alerts.yaml has them for a Prometheus of your own, and `ray-extract manifests` as a PrometheusRule.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Alert:
    """A rule.

    Args:
        name: of the alert.
        expr: PromQL; the alert fires while it has values, once it has had them for `lasts`.
        lasts: as Prometheus writes it.
        critical: the run makes nothing, or what it makes is wrong; else it is slower than it could be.
        summary: what is wrong, where {{ $labels }} are those of `expr`.
        action: what to look at.
    """

    name: str
    expr: str
    lasts: str
    critical: bool
    summary: str
    action: str


ALERTS = (
    Alert(
        "RayExtractStalled",
        "time() - max by (run) (ray_extract_last_commit_timestamp_seconds) > 1800"
        " and on (run) max by (run) (ray_extract_engines_ready) > 0",
        "1m",
        True,
        "no unit of {{ $labels.run }} was committed for half an hour, with engines that serve",
        "The driver's log says what fails. If it says nothing, look at the engines' own logs, and at the store.",
    ),
    Alert(
        "RayExtractEnginesMissing",
        "sum by (run) (ray_extract_engines_ready) < sum by (run) (ray_extract_engines_wanted)"
        " and on (run) max by (run) (ray_extract_units_committed) < max by (run) (ray_extract_units_planned)",
        "15m",
        False,
        "{{ $labels.run }} has {{ $value }} engines, fewer than it asks for",
        "The driver's log says which resource is missing, or why an engine does not start.",
    ),
    Alert(
        "RayExtractRowsFail",
        'sum by (run) (increase(ray_extract_rows_total{status!="ok"}[30m]))'
        " / sum by (run) (increase(ray_extract_rows_total[30m])) > 0.01",
        "5m",
        False,
        "{{ $value | humanizePercentage }} of the rows of {{ $labels.run }} fail",
        "The metric's status says how, and the commits under commits/ why. ray-extract retry-failed tries them again.",
    ),
    Alert(
        "RayExtractStatesNotFinite",
        'sum by (run) (increase(ray_extract_rows_total{status="nonfinite"}[30m])) > 0',
        "0m",
        True,
        "the model computes NaN or infinity for rows of {{ $labels.run }}",
        "They are not stored. If they are many, weights, quantization or dtype are wrong.",
    ),
    Alert(
        "RayExtractMeanSquareJumps",
        "abs(log2(ray_extract_mean_square / on (run, state) group_left ()"
        " avg by (run, state) (avg_over_time(ray_extract_mean_square[6h])))) > 2",
        "5m",
        True,
        "{{ $labels.state }} of {{ $labels.run }} on {{ $labels.NodeAddress }} is of another size than it was",
        "Compare engines: one alone is broken hardware or another checkpoint; all together are other data, or an upset"
        " of the model. ray-extract verify and recompute tell.",
    ),
    Alert(
        "RayExtractRestarts",
        "sum by (run) (increase(ray_extract_restarts_total[1h]))"
        " > 2 + 0.05 * sum by (run) (ray_extract_engines_wanted)",
        "0m",
        False,
        "{{ $value | humanize }} workers or engines of {{ $labels.run }} were replaced in an hour",
        "The metric's cause says what they died of: node_left is the cluster, the others are in the driver's log.",
    ),
    Alert(
        "RayExtractStoreErrors",
        "sum by (run) (increase(ray_extract_store_errors_total[15m])) > 10",
        "0m",
        False,
        "the store fails for {{ $labels.run }}, {{ $value | humanize }} times in a quarter of an hour",
        "Units wait up to output.outage_s for it. The workers' logs have its answers.",
    ),
    Alert(
        "RayExtractStoreFailed",
        'sum by (run) (increase(ray_extract_retries_total{cause="store_failed"}[30m])) > 0',
        "0m",
        True,
        "attempts at units of {{ $labels.run }} are lost, since the store was away for longer than output.outage_s",
        "After run.max_attempts they are given up for this time. The same command goes on when the store is well.",
    ),
    Alert(
        "RayExtractStoreIsBottleneck",
        'sum by (run) (rate(ray_extract_stage_seconds_total{stage=~"wait|flush"}[15m]))'
        ' > sum by (run) (rate(ray_extract_stage_seconds_total{stage="extract"}[15m]))',
        "15m",
        False,
        "units of {{ $labels.run }} spend more time on their way to the store than in engines",
        "Engines wait. Take a store with more bandwidth, more nodes with fewer engines each, or capture.dtype.",
    ),
    Alert(
        "RayExtractArenaFull",
        "avg by (run) (ray_extract_arena_used_bytes / ray_extract_arena_bytes) > 0.95",
        "15m",
        False,
        "the shared memory of the engines of {{ $labels.run }} is full",
        "Units wait for it. If the store is not what is slow, raise run.arena_bytes or lower output.shard_bytes.",
    ),
)


def groups() -> list[dict[str, Any]]:
    """The rules as groups of a Prometheus rule file, and of a PrometheusRule's spec."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasts,
            "labels": {"severity": "critical" if alert.critical else "warning"},
            "annotations": {"summary": alert.summary, "description": alert.action},
        }
        for alert in ALERTS
    ]
    return [{"name": "ray-extract", "rules": rules}]
