"""The metrics of several worker processes as those of one. Pure.

Counters and histograms are summed, also those of workers that have ended: a sum never goes back.
Gauges are summed where they count what a worker has, and the largest is taken where they say what
each of them sees of the same thing, or how near each is to a limit of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrelay.router.workers.messages import Family

__all__ = ["LARGEST", "collected", "lasting", "summed", "text_of"]

LARGEST = frozenset(
    {
        "kvrelay_router_node_up",
        "kvrelay_router_queue_depth",
        "kvrelay_router_breaker_state",
        "kvrelay_router_kv_event_doubted_nodes",
        "kvrelay_router_prefix_texts",
        "kvrelay_router_prefix_blocks",
        "kvrelay_router_role_use",
        "process_start_time_seconds",
        "process_open_fds",
        "process_max_fds",
    }
)
"""Gauges of what all workers see, and of what each must have enough of by itself. All others are
summed.
"""
_LASTING = ("counter", "histogram", "summary")
_CREATED = "_created"

_Sample = tuple[str, tuple[tuple[str, str], ...]]


def collected(registry: CollectorRegistry) -> list[Family]:
    """Return what a registry says now."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def lasting(families: Iterable[Family]) -> list[Family]:
    """Return what is left of a worker that has ended."""
    return [family for family in families if family.kind in _LASTING]


def summed(of_each: Iterable[Iterable[Family]]) -> list[Family]:
    """Return one of all. Each sample stands where it stood first."""
    known: dict[str, Family] = {}
    values: dict[str, dict[_Sample, float]] = {}
    for families in of_each:
        for family in families:
            known.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            largest = family.name in LARGEST
            for name, labels, value in family.samples:
                key = (name, tuple(sorted(labels.items())))
                if key not in sums:
                    sums[key] = value
                elif name.endswith(_CREATED) and family.kind in _LASTING:
                    sums[key] = min(sums[key], value)
                else:
                    sums[key] = max(sums[key], value) if largest else sums[key] + value
    return [
        Family(
            name,
            family.about,
            family.kind,
            [(of, dict(labels), v) for (of, labels), v in values[name].items()],
        )
        for name, family in known.items()
    ]


class _Told(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """As they are."""
        for family in self._families:
            metric = Metric(family.name, family.about, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def text_of(families: Iterable[Family]) -> bytes:
    """Write them in Prometheus's format."""
    return generate_latest(_Told(families))
