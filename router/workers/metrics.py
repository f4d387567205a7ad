"""The metrics of several worker processes as those of one. Pure.

Counters and histograms are summed, also those of workers that have ended. Gauges are summed where
they count what a worker has; else the largest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrelay.router.workers.messages import MetricFamily

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
_LASTING = ("counter", "histogram", "summary")
_CREATED = "_created"


def collected(registry: CollectorRegistry) -> list[MetricFamily]:
    return [
        MetricFamily(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def lasting(families: Iterable[MetricFamily]) -> list[MetricFamily]:
    return [family for family in families if family.kind in _LASTING]


def summed(processes: Iterable[Iterable[MetricFamily]]) -> list[MetricFamily]:
    known: dict[str, MetricFamily] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in processes:
        for family in families:
            known.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                key = (name, tuple(sorted(labels.items())))
                if key not in sums:
                    sums[key] = value
                elif name.endswith(_CREATED) and family.kind in _LASTING:
                    sums[key] = min(sums[key], value)
                else:
                    largest = family.name in LARGEST
                    sums[key] = max(sums[key], value) if largest else sums[key] + value
    return [
        msgspec.structs.replace(
            family,
            samples=[(of, dict(labels), value) for (of, labels), value in values[name].items()],
        )
        for name, family in known.items()
    ]


class _Collected(Collector):
    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.about, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def text_of(families: Iterable[MetricFamily]) -> bytes:
    return generate_latest(_Collected(families))
