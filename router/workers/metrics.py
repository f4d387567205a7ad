"""The metrics of several worker processes as those of one. Pure.

Counters and histograms are summed, also those of workers that have ended. Gauges are summed where
they count what a worker has; else the largest is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import Metric

__all__ = ["LARGEST", "lasting", "summed", "text_of"]

LARGEST = frozenset(
    {
        "kvrelay_router_node_up",
        "kvrelay_router_queue_depth",
        "kvrelay_router_breaker_state",
        "kvrelay_router_prefix_texts",
        "kvrelay_router_prefix_blocks",
        "kvrelay_router_role_use",
        "process_start_time_seconds",
        "process_open_fds",
        "process_max_fds",
    }
)


def lasting(families: Iterable[Metric]) -> list[Metric]:
    return [family for family in families if family.type in ("counter", "histogram", "summary")]


def summed(families: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Return one family of each name; samples must have their labels in one order."""
    joined: dict[str, Metric] = {}
    values = defaultdict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]](dict)
    for family in chain.from_iterable(families):
        joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        known = values[family.name]
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            both = known.get(key, 0.0), sample.value
            known[key] = max(both) if family.name in LARGEST else sum(both)
    for name, family in joined.items():
        for (of, labels), value in values[name].items():
            family.add_sample(of, dict(labels), value)
    return list(joined.values())


def text_of(families: Iterable[Metric]) -> bytes:
    return generate_latest(SimpleNamespace(collect=lambda: families))
