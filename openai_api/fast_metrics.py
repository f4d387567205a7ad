"""Prometheus metrics for what happens many times per request. Not for threads.

prometheus_client's own take a lock and walk through their buckets, 1 to 3 us each; these become its
families when scraped. For rare events its own are the better choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["FastCounter", "FastGauge", "FastHistogram", "Zeros"]

Zeros = Callable[[], Iterable[tuple[str, ...]]]
"""Label values to show as zero before anything was counted, so that the first rate is right.

Asked for at every scrape; once shown they stay.
"""


def _zeros_of(labels: Sequence[str]) -> Zeros:
    return lambda: () if labels else ((),)


class FastCounter(Collector):
    """A counter with labels."""

    def __init__(
        self,
        name: str,
        about: str,
        registry: CollectorRegistry,
        labels: Sequence[str] = (),
        zeros: Zeros | None = None,
    ) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._zeros = zeros or _zeros_of(labels)
        self._counts: dict[tuple[str, ...], float] = defaultdict(float)
        registry.register(self)

    def add(self, count: float, *values: str) -> None:
        """Add `count` to the counter of these label values."""
        self._counts[values] += count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for values in self._zeros():
            self._counts.setdefault(values, 0.0)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class FastHistogram(Collector):
    """A histogram with labels; `fixed` labels have one value."""

    def __init__(
        self,
        name: str,
        about: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        labels: Sequence[str] = (),
        zeros: Zeros | None = None,
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        """`bounds` of the buckets are ascending."""
        self._name, self._about, self._bounds = name, about, bounds
        self._fixed = dict(fixed or {})
        self._labels = labels
        self._zeros = zeros or _zeros_of(labels)
        self._counts: dict[tuple[str, ...], list[int]] = defaultdict(
            lambda: [0] * (len(bounds) + 1)
        )
        self._sums: dict[tuple[str, ...], float] = defaultdict(float)
        registry.register(self)

    def observe(self, size: float, *values: str) -> None:
        """Count one value."""
        self._counts[values][bisect_left(self._bounds, size)] += 1
        self._sums[values] += size

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            self._name, self._about, labels=[*self._fixed, *self._labels]
        )
        bounds = (*self._bounds, float("inf"))
        names = [str(floatToGoString(bound)) for bound in bounds]  # type: ignore[no-untyped-call]
        for values in self._zeros():
            self._counts[values]
        for values, counts in self._counts.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric([*self._fixed.values(), *values], buckets, self._sums[values])
        yield family


class FastGauge(Collector):
    """A gauge with one label, read from `read`; values of `known` that are missing there are 0."""

    def __init__(
        self,
        name: str,
        about: str,
        registry: CollectorRegistry,
        label: str,
        known: Callable[[], Iterable[str]],
    ) -> None:
        self._name, self._about, self._label, self._known = name, about, label, known
        self.read: Callable[[], Mapping[str, float]] = dict
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._about, labels=[self._label])
        for value, level in (dict.fromkeys(self._known(), 0.0) | dict(self.read())).items():
            family.add_metric([value], level)
        yield family
