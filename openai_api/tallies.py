"""Prometheus counters and histograms for what happens many times per request. Not for threads.

prometheus_client's own take a lock and walk through their buckets, 1 to 3 us each; these are made into its families
when somebody asks. For what is rare, its own are the better choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["Spread", "Tally"]


class Tally(Collector):
    """A counter, by the values of its labels."""

    def __init__(self, name: str, about: str, registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._counts: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def add(self, count: float, *values: str) -> None:
        """So many more of these values, one for each label."""
        self._counts[values] = self._counts.get(values, 0.0) + count

    def collect(self) -> Iterator[Metric]:
        """For one scrape."""
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class Spread(Collector):
    """A histogram, by the value of one label if it has one; labels that are the same for all of it are `fixed`."""

    def __init__(
        self,
        name: str,
        about: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        label: str = "",
        values: Sequence[str] = ("",),
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        """`bounds` of the buckets, ascending. Values of the label that are named here are shown as zero."""
        self._name, self._about, self._bounds = name, about, bounds
        self._fixed = dict(fixed or {})
        self._label = [label] if label else []
        self._counts = {value: [0] * (len(bounds) + 1) for value in values}
        self._sums = dict.fromkeys(values, 0.0)
        registry.register(self)

    def observe(self, size: float, value: str = "") -> None:
        """One more."""
        counts = self._counts.get(value)
        if counts is None:
            counts = self._counts[value] = [0] * (len(self._bounds) + 1)
            self._sums[value] = 0.0
        counts[bisect_left(self._bounds, size)] += 1
        self._sums[value] += size

    def collect(self) -> Iterator[Metric]:
        """For one scrape."""
        family = HistogramMetricFamily(self._name, self._about, labels=[*self._fixed, *self._label])
        names = [str(floatToGoString(bound)) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        for value, counts in self._counts.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            own = [value] if self._label else []
            family.add_metric([*self._fixed.values(), *own], buckets, self._sums[value])
        yield family
