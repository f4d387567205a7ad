"""Every metric family that a process can tell of: its name, type, labels, meaning. Read from the registries themselves.

prometheus_client says which labels a family has only once it has a sample, so labels are read from private attributes
of its collectors.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from router.app import Router
from router.workers.parent import Parent
from wire.engine_messages import EngineStats
from wire.outputs import Load
from wire.router_config import RouterConfig

__all__ = ["MetricFamily", "node_families", "router_families"]

# Of collectors that say their labels only with a sample.
_SILENT = {
    "kvrelay_router_choices": ("leg", "policy", "prefix"),
    "kvrelay_router_breaker_state": ("node", "leg"),
    "kvrelay_router_ejections": ("node", "leg"),
}


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """As it is scraped."""

    name: str
    """With the `_total` of a counter."""
    type: str
    labels: tuple[str, ...]
    about: str


def node_families() -> list[MetricFamily]:
    """Those of a node, with adapters allowed."""
    if _told_elsewhere():
        return _told("node")
    from node.metrics import NodeMetrics

    metrics = NodeMetrics(lambda: EngineStats(Load()), model_name="model", role="decode", max_loras=1)
    return _of(metrics._registry)


def router_families() -> list[MetricFamily]:
    """Those of a router; with several workers, of all together."""
    if _told_elsewhere():
        return _told("router")
    config = RouterConfig(("http://127.0.0.1:1",), ("http://127.0.0.1:2",))
    # Made while pods are followed only (router/membership/kubernetes_watch.py).
    listed = MetricFamily(
        "kvrelay_router_kubernetes_listed_timestamp_seconds",
        "gauge",
        (),
        "When the pods were last listed whole, as Unix time; 0: not yet. With `--kubernetes-selector`.",
    )
    of_one = _of(Router(config, random.Random(0)).metrics.registry)
    of_many = [
        MetricFamily(each.name, each.type, each.labels, f"{each.about} With `--workers`.")
        for each in _of(Parent(config, 1)._registry)
    ]
    return [*of_one, listed, *of_many]


def _told_elsewhere() -> bool:
    """Whether the command line has a list of its own: then it is that."""
    return importlib.util.find_spec("kvrelay.metrics_reference") is not None


def _told(where: str) -> list[MetricFamily]:
    told = importlib.import_module("kvrelay.metrics_reference").metrics_reference()
    return [MetricFamily(each.name, each.kind, each.labels, each.about) for each in told if where in each.where]


def _of(registry: CollectorRegistry) -> list[MetricFamily]:
    found = []
    for collector in registry._collector_to_names:
        named = _labels_of(collector)
        for family in collector.collect():
            seen = (label for sample in family.samples for label in sample.labels if label != "le")
            labels = tuple(dict.fromkeys(_SILENT.get(family.name) or named or seen))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.append(MetricFamily(name, family.type, labels, family.documentation))
    return found


def _labels_of(collector: Any) -> Iterable[str]:
    labels = getattr(collector, "_labelnames", ()) or getattr(collector, "_labels", ())
    return () if isinstance(labels, dict) else tuple(map(str, labels))
