"""All queries of the dashboards and alerts, and what they ask for: read out of the files that
operators get.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"


_METRIC = re.compile(r"(?<![\w:])((?:vllm:|kvrelay_|process_)\w+|up)\b(?:\{([^}]*)\})?")
_KEPT = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_MATCH = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


@dataclass(frozen=True)
class Asked:
    """`metrics` as their samples are called; `kept` labels of aggregations, `selected` (metric,
    label, how, value).
    """

    where: str
    expr: str
    metrics: frozenset[str]
    kept: frozenset[str]
    selected: frozenset[tuple[str, str, str, str]]


def asked() -> list[Asked]:
    """Of each file, in order."""
    found = []
    for path in sorted((MONITORING / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        found += [
            _asked(
                f"{board['uid']}: {panel['title']} {target['refId']}",
                target["expr"],
                target["legendFormat"],
            )
            for panel in board["panels"]
            for target in panel.get("targets", [])
        ]
    rules = yaml.safe_load((MONITORING / "prometheus" / "kvrelay.rules.yml").read_text())["groups"][
        0
    ]["rules"]
    return found + [_asked(rule["alert"], rule["expr"], "") for rule in rules]


def _asked(where: str, expr: str, legend: str) -> Asked:
    hits = _METRIC.findall(expr)
    selected = {(metric, *match) for metric, inside in hits for match in _MATCH.findall(inside)}
    kept = {label.strip() for labels in _KEPT.findall(expr) for label in labels.split(",")}
    kept |= set(re.findall(r"\{\{(\w+)\}\}", legend))
    return Asked(
        where, expr, frozenset(name for name, _ in hits), frozenset(kept), frozenset(selected)
    )
