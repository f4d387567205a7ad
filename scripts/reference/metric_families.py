"""The metrics of routers and nodes, as their own registries declare them, and the alerts: tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrelay.node.metrics import NodeMetrics
from kvrelay.router.membership.kubernetes_pods import listed_gauge
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.workers.parent import worker_metrics
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import EngineReady, EngineStats
from kvrelay.wire.outputs import Load
from scripts.reference.markdown import code, table

__all__ = ["MetricFact", "metric_pieces", "metrics_reference"]

_RULES = Path(__file__).parents[2] / "deploy" / "monitoring" / "prometheus" / "kvrelay.rules.yml"


@dataclass(frozen=True, slots=True)
class MetricFact:
    """A metric family; its samples' name has no _bucket, _sum or _count."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str
    where: tuple[str, ...]


def metrics_reference() -> list[MetricFact]:
    found: dict[str, MetricFact] = {}
    for where, registry in (
        *(("router", each) for each in _router_registries()),
        ("node", _node_registry()),
    ):
        for fact in _facts(registry, where):
            known = found.get(fact.name)
            at = (
                (*known.where, where)
                if known is not None and where not in known.where
                else (where,)
            )
            found[fact.name] = MetricFact(fact.name, fact.kind, fact.labels, fact.about, at)
    return [found[name] for name in sorted(found)]


def _router_registries() -> list[CollectorRegistry]:
    pool = Pool(["http://prefill"], ["http://decode"])
    of_pods = CollectorRegistry()
    listed_gauge(of_pods)
    of_workers = CollectorRegistry()
    worker_metrics(of_workers, lambda: 0)
    return [Metrics(pool, ["key"]).registry, of_workers, of_pods]


def _node_registry() -> CollectorRegistry:
    info = EngineReady("", "", "model", 1, 1, 16, 1, 1, [], 0.0)
    return NodeMetrics(lambda: EngineStats(Load()), Role.DECODE, info, "model", os.getpid).registry


def _facts(registry: CollectorRegistry, where: str) -> Iterator[MetricFact]:
    # The registry's own list of collectors: a family without samples does not tell its labels.
    for collector in dict.fromkeys(registry._collector_to_names):
        for family in collector.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = tuple(label for label in _labels(collector, family) if label != "le")
            yield MetricFact(name, family.type, labels, family.documentation, (where,))


def _labels(collector: Collector, family: Metric) -> Iterable[str]:
    declared: Any = (
        getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", None) or ()
    )
    return dict.fromkeys(
        [*declared, *(label for sample in family.samples for label in sample.labels)]
    )


def metric_pieces() -> dict[str, str]:
    return {
        **{f"{where}-metrics": _table(where) for where in ("router", "node")},
        "alerts": _alerts(),
    }


def _table(where: str) -> str:
    rows = (
        [code(each.name), each.kind, ", ".join(map(code, each.labels)), each.about]
        for each in metrics_reference()
        if where in each.where
    )
    return table(["Metric", "Type", "Labels", "Meaning"], rows)


def _alerts() -> str:
    rules = yaml.safe_load(_RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]
    rows = (
        [
            code(each["alert"]),
            each["labels"]["severity"],
            each["for"],
            re.sub(r"\{\{ \$(?:labels\.)?(\w+).*?\}\}", r"`\1`", each["annotations"]["summary"]),
        ]
        for each in rules
    )
    return table(["Alert", "Severity", "After", "Says"], rows)
