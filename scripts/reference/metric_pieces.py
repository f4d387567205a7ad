"""Tables of the metric families of nodes and routers."""

from __future__ import annotations

from collections.abc import Iterable

from scripts.reference.markdown import code, table
from scripts.reference.metric_families import MetricFamily, node_families, router_families

__all__ = ["metric_pieces"]


def metric_pieces() -> dict[str, str]:
    """One for each kind of process."""
    return {"router-metrics": _table(router_families()), "node-metrics": _table(node_families())}


def _table(families: Iterable[MetricFamily]) -> str:
    rows = [[code(each.name), each.type, ", ".join(map(code, each.labels)), each.about] for each in families]
    return table(["Metric", "Type", "Labels", "Meaning"], sorted(rows))
