"""A Meter that remembers, for tests."""

from ray_extract.metrics import Kind, Metric

Key = tuple[str, str | None]
"""Name of a metric, and its tag's value."""


class Recorder:
    """What was told: sums of counters, last values of gauges, all of histograms; and how often."""

    def __init__(self) -> None:
        self.values: dict[Key, float] = {}
        self.observed: dict[Key, list[float]] = {}
        self.calls = 0

    def add(self, metric: Metric, amount: float, tag: str | None = None) -> None:
        """See metrics.Meter."""
        assert metric.kind is Kind.COUNTER and amount >= 0
        key = self._key(metric, tag)
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, metric: Metric, value: float, tag: str | None = None) -> None:
        """See metrics.Meter."""
        assert metric.kind is Kind.GAUGE
        self.values[self._key(metric, tag)] = value

    def observe(self, metric: Metric, value: float, tag: str | None = None) -> None:
        """See metrics.Meter."""
        assert metric.kind is Kind.HISTOGRAM
        self.observed.setdefault(self._key(metric, tag), []).append(value)

    def of(self, metric: Metric) -> dict[str | None, float]:
        """Values of a metric by its tag's; zeros left out."""
        return {tag: value for (name, tag), value in self.values.items() if name == metric.name and value}

    def _key(self, metric: Metric, tag: str | None) -> Key:
        assert (tag is None) == (metric.tag is None), metric.name
        assert not metric.values or tag in metric.values, f"{metric.name}: {tag} is no value of {metric.tag}"
        self.calls += 1
        return metric.name, tag
