"""Tables of the metric families of nodes and routers, as their registries declare them, and of the alerts."""

from __future__ import annotations

import re

from kvrelay.metrics_reference import metrics_reference
from kvrelay.monitoring.alerts import ALERTS
from scripts.reference.markdown import code, table

__all__ = ["metric_pieces"]


def metric_pieces() -> dict[str, str]:
    """One for each kind of process, and the alerts."""
    return {**{f"{where}-metrics": _table(where) for where in ("router", "node")}, "alerts": _alerts()}


def _table(where: str) -> str:
    rows = (
        [code(each.name), each.kind, ", ".join(map(code, each.labels)), each.about]
        for each in metrics_reference()
        if where in each.where
    )
    return table(["Metric", "Type", "Labels", "Meaning"], rows)


def _alerts() -> str:
    """What Prometheus puts in when one fires is shown as the name of it: {{ $labels.node }} as node."""
    rows = (
        [code(each.name), each.severity, each.after, re.sub(r"\{\{ \$(?:labels\.)?(\w+).*?\}\}", r"`\1`", each.says)]
        for each in ALERTS
    )
    return table(["Alert", "Severity", "After", "Says"], rows)
