"""A run on a real Ray, scraped as Prometheus would: each metric is there, with the value that it must have."""

import dataclasses
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import clusters
import numpy as np
import promql
import pytest
from prometheus_client.parser import text_string_to_metric_families
from simulated import STATES, WAIT_S, Work, make_rows, make_work
from test_metrics_page import queries

from ray_extract import metrics
from ray_extract.metrics import METRICS, Kind, Metric
from ray_extract.readers.dataset import HiddenStates

pytestmark = pytest.mark.ray

POISON, REJECT, NAN = 1, 2, 3
Labels = frozenset[tuple[str, str]]


@dataclasses.dataclass
class Scraped:
    """What was seen of a run.

    Args:
        last: the last value of each series, by name and labels.
        kinds: of each metric, by its name.
        ready: most engines that were ready at once.
        began, ended: seconds since 1970.
    """

    work: Work
    last: dict[tuple[str, Labels], float] = dataclasses.field(default_factory=dict)
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    ready: float = 0
    began: float = dataclasses.field(default_factory=time.time)
    ended: float = 0.0

    def take(self, port: int) -> None:
        """Scrape a node."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_extract_"):
                    self.last[sample.name, frozenset(sample.labels.items())] = sample.value
                    self.kinds[sample.name] = family.type
        self.ready = max(self.ready, self.of(metrics.ENGINES_READY).get(None, 0))

    def of(self, metric: Metric, part: str = "") -> dict[str | None, float]:
        """Values of a metric by its tag's, added up over processes; zeros left out."""
        found: dict[str | None, float] = {}
        for (name, labels), value in self.last.items():
            if name == metric.name + part and value:
                tag = None if metric.tag is None else dict(labels)[metric.tag]
                found[tag] = found.get(tag, 0) + value
        return found

    def labels(self) -> dict[str, set[str]]:
        """Names of the labels of each series."""
        found: dict[str, set[str]] = {}
        for name, labels in self.last:
            found.setdefault(name, set()).update(label for label, _ in labels)
        return found

    def summary(self) -> Any:
        """What the run says of itself."""
        return json.loads((self.work.folder / "out/summary.json").read_text())


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A run of two engines, one of which dies and one of whose rows is rejected, and one NaN."""
    import ray

    rows = make_rows(24)
    rows[2][5], rows[7][0], rows[8][9] = POISON, REJECT, NAN
    faults = {"poison_token": POISON, "reject_token": REJECT, "nan_token": NAN}
    # Reports at the shortest interval that Ray takes.
    with clusters.cluster(num_cpus=2, _system_config={"metrics_report_interval_ms": 1000}) as cluster:
        work = make_work(
            tmp_path_factory.mktemp("scraped"),
            rows,
            cluster.address,
            engine={"count": 2, "cpus": 0.25, "args": {"tokens_per_s": 100, **faults}},
            run={"max_failed_rows": 3},
        )
        seen = Scraped(work)
        ray.shutdown()  # what another test left
        ray.init(address=cluster.address)
        [node] = ray.nodes()
        process = work.start()
        until = time.monotonic() + WAIT_S
        while process.poll() is None:
            assert time.monotonic() < until, "the run does not end"
            seen.take(node["MetricsExportPort"])
            time.sleep(0.5)
        text, _ = process.communicate()
        assert process.returncode == 0, text
        seen.ended = time.time()
        time.sleep(1.5)  # whoever reported as it ended
        seen.take(node["MetricsExportPort"])
        ray.shutdown()
    yield seen


def test_what_ray_exports_is_what_the_table_says(scraped: Scraped) -> None:
    table, found = promql.table(), scraped.labels()
    assert set(found) == set(table)
    for name, labels in found.items():
        assert {label for label in labels if not label.startswith("otel_scope_")} == table[name], name
    for metric in METRICS:
        name = f"{metric.name}_bucket" if metric.kind is Kind.HISTOGRAM else metric.name
        assert scraped.kinds[name] == metric.kind, name
        tags = {dict(labels).get(metric.tag or "") for seen, labels in scraped.last if seen == name}
        assert set(metric.values) <= tags, f"{metric.name} does not begin at 0"
        assert {dict(labels)["run"] for seen, labels in scraped.last if seen == name} == {scraped.work.url}


def test_rows_tokens_and_bytes_are_those_of_the_run(scraped: Scraped) -> None:
    this = scraped.summary()["this_run"]
    wanted = {"ok": 21, "engine_died": 1, "rejected": 1, "nonfinite": 1}
    assert scraped.of(metrics.ROWS) == wanted == this["rows"]
    tokens = sum(len(ids) for i, ids in enumerate(scraped.work.rows) if i not in (2, 7, 8))
    assert scraped.of(metrics.TOKENS) == dict.fromkeys(this["nodes"], tokens)
    shards = sum(path.stat().st_size for path in (scraped.work.folder / "out/shards").iterdir())
    assert scraped.of(metrics.BYTES) == {None: shards}


def test_gauges_are_those_of_the_whole_run(scraped: Scraped) -> None:
    def one(metric: Metric) -> float:
        return scraped.of(metric).get(None, 0)

    units = scraped.summary()["units"]
    assert (one(metrics.UNITS), one(metrics.UNITS_COMMITTED), one(metrics.UNITS_GIVEN_UP)) == (units, units, 0)
    assert one(metrics.TOKENS_PLANNED) == one(metrics.TOKENS_COMMITTED) == sum(map(len, scraped.work.rows))
    assert (one(metrics.ENGINES), scraped.ready) == (2, 2)
    assert one(metrics.ENGINES_READY) == one(metrics.UNITS_IN_FLIGHT) == 0, "told once more when the driver ends"
    assert scraped.began < one(metrics.LAST_COMMIT) < scraped.ended


def test_retries_restarts_and_losses_have_their_causes(scraped: Scraped) -> None:
    this = scraped.summary()["this_run"]
    assert scraped.of(metrics.RESTARTS) == {"engine_died": this["restarts"]["engine died"]}
    assert this["restarts"]["engine died"] >= 2, "a row may see its engine die twice"
    assert sum(scraped.of(metrics.RETRIES).values()) == sum(this["retries"].values())
    lost = {loss: seconds for loss, seconds in scraped.of(metrics.LOST).items() if seconds > 0.01}
    assert lost.keys() <= {"starts", "attempts", "extents"} and lost["starts"] > 0.1


def test_workers_tell_of_their_units_and_arenas(scraped: Scraped) -> None:
    units = scraped.summary()["units"]
    again = sum(scraped.of(metrics.RETRIES).values())
    assert units <= scraped.of(metrics.FLUSH, "_count")[None] <= units + again
    stages = scraped.of(metrics.STAGES)
    assert stages["extract"] > stages["seal"] > 0 and stages["extract"] > 5
    assert 0 < scraped.of(metrics.ARENA_USED).get(None, 1) <= scraped.of(metrics.ARENA)[None]
    assert not scraped.of(metrics.STORE_ERRORS)


def test_mean_squares_are_those_of_the_states(scraped: Scraped) -> None:
    items = HiddenStates(scraped.work.url)
    for state in STATES:
        mean = float(np.mean([items[i][state].double().square().mean() for i in range(len(items))]))
        series = ((dict(labels), value) for (name, labels), value in scraped.last.items() if name.endswith("_square"))
        told = [value for labels, value in series if labels["state"] == state]
        assert told and all(value == pytest.approx(mean, rel=0.2) for value in told), state


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_asks_for_what_was_seen(scraped: Scraped, where: str, query: str) -> None:
    assert promql.asked(query).faults(scraped.labels()) == []


def test_no_series_is_of_one_unit_or_row(scraped: Scraped) -> None:
    values = {value for _, labels in scraped.last for label, value in labels if label != "run"}
    assert not [value for value in values if value.startswith(("u0", "row"))]
