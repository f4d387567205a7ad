"""Tables of the metric families of nodes and routers, as their registries declare them, and of the
alerts.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from scripts.reference.markdown import code, table
from scripts.reference.metric_families import metrics_reference

__all__ = ["metric_pieces"]

_RULES = Path(__file__).parents[2] / "deploy" / "monitoring" / "prometheus" / "kvrelay.rules.yml"


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
