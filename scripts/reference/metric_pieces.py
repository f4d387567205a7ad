"""Tables of the metric families of nodes and routers, as their registries declare them."""

from __future__ import annotations

from kvrelay.metrics_reference import metrics_reference
from scripts.reference.markdown import code, table

__all__ = ["metric_pieces"]


def metric_pieces() -> dict[str, str]:
    """One for each kind of process."""
    return {f"{where}-metrics": _table(where) for where in ("router", "node")}


def _table(where: str) -> str:
    rows = (
        [code(each.name), each.kind, ", ".join(map(code, each.labels)), each.about]
        for each in metrics_reference()
        if where in each.where
    )
    return table(["Metric", "Type", "Labels", "Meaning"], rows)
