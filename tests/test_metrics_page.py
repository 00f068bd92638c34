"""docs/metrics.md, the alerts and the dashboard say what the code does, and ask for metrics that it has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metrics_page
import promql
import pytest
import yaml

from ray_extract import alerts, manifests
from ray_extract.config import load_job
from ray_extract.metrics import METRICS

ROOT = Path(__file__).parents[1]
DASHBOARD = json.loads((ROOT / "deploy/grafana/ray-extract.json").read_text())
TEXT = metrics_page.PAGE.read_text()


def queries() -> Iterator[tuple[str, str]]:
    """Every query, and where it is."""
    for rule in yaml.safe_load(metrics_page.RULES.read_text())["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_the_tables_of_the_page_and_the_rule_file_are_those_of_the_code() -> None:
    assert metrics_page.page(TEXT) == TEXT, "run: python tests/metrics_page.py"
    assert metrics_page.RULES.read_text() == metrics_page.rules(), "run: python tests/metrics_page.py"
    assert all(TEXT.count(f"| `{metric.name}` |") == 1 for metric in METRICS)


def test_every_link_of_the_page_leads_to_a_file_and_every_field_is_one() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert links and [link for link in links if not (metrics_page.PAGE.parent / link).exists()] == []
    job = load_job(ROOT / "deploy/jobs/qwen3-8b_8xh100.yaml")
    fields = re.findall(r"`?\b(run|output|capture|engine)\.(\w+)[`=]", TEXT)
    assert fields and [field for section, field in fields if field not in getattr(job, section).model_dump()] == []
    assert f"`metrics` ({manifests.METRICS_PORT})" in TEXT


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_asks_for_metrics_labels_and_values_that_are_in_the_table(where: str, query: str) -> None:
    found = promql.asked(query)
    assert found.metrics and found.faults(promql.table()) == []
    known = {(metric.name, metric.tag): metric.values for metric in METRICS if metric.values}
    assert [value for name, label, value in found.values if value not in known[name, label]] == []


def test_each_metric_is_shown_by_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    assert [metric.name for metric in METRICS if metric.name not in shown] == []


def test_what_is_not_there_is_noticed() -> None:
    def faults(query: str) -> list[str]:
        return promql.asked(query).faults(promql.table())

    assert faults("sum(rate(ray_extract_tokens[5m]))") == ["no metric ray_extract_tokens"]
    assert faults("sum by (stat) (ray_extract_rows_total)") == ["ray_extract_rows_total has no label stat"]
    assert faults('ray_extract_rows_total{state="ok"}') == ["ray_extract_rows_total has no label state"]
    assert faults("histogram_quantile(0.5, sum by (le) (ray_extract_flush_seconds))") == [
        "no metric ray_extract_flush_seconds",
        "ray_extract_flush_seconds has no label le",
    ]
    with pytest.raises(ValueError, match="rate"):
        promql.asked("rate(ray_extract_tokens_total)")


def test_the_dashboard_is_one_that_grafana_can_lay_out() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}" and panel["type"] in ("stat", "timeseries")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all('run=~"$run"' in target["expr"] for target in panel["targets"]), panel["title"]
    assert {"datasource", "run"} == {variable["name"] for variable in DASHBOARD["templating"]["list"]}


def test_the_rules_of_a_job_on_kubernetes_are_those_of_the_file() -> None:
    rule = yaml.safe_load((ROOT / "k8s/job/prometheusrule.yaml").read_text())
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load(metrics_page.RULES.read_text())


def test_a_template_of_an_alert_names_a_label_that_its_query_leaves() -> None:
    for alert in alerts.ALERTS:
        for label in re.findall(r"\$labels\.(\w+)", alert.summary + alert.action):
            grouped = promql.asked(alert.expr).labels
            assert label in (grouped or promql.RAY_LABELS) or alert.name == "RayExtractMeanSquareJumps", alert.name


def _promtool(*args: Any) -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (on Debian and Ubuntu: apt-get install prometheus)")
    done = subprocess.run([tool, *map(str, args)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_itself_takes_the_rules() -> None:
    assert f"{len(alerts.ALERTS)} rules found" in _promtool("check", "rules", metrics_page.RULES)


def test_alerts_fire_when_they_must_and_only_then() -> None:
    assert "SUCCESS" in _promtool("test", "rules", ROOT / "tests/alerts_test.yaml")
