"""All queries of the dashboards and alerts, and what they ask for: read out of the files that operators get."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import yaml

from kvrelay.monitoring import files

_METRIC = re.compile(r"(?<![\w:])((?:vllm:|kvrelay_|process_)\w+|up)\b(?:\{([^}]*)\})?")
_KEPT = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_MATCH = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


@dataclass(frozen=True)
class Asked:
    """`metrics` as their samples are called; `kept` labels of aggregations, `selected` (metric, label, how, value)."""

    where: str
    expr: str
    metrics: frozenset[str]
    kept: frozenset[str]
    selected: frozenset[tuple[str, str, str, str]]


def asked() -> list[Asked]:
    """Of each file, in order."""
    found = []
    for path, content in files().items():
        if path.endswith(".json"):
            board = json.loads(content)
            found += [
                _asked(f"{board['uid']}: {panel['title']} {target['refId']}", target["expr"], target["legendFormat"])
                for panel in board["panels"]
                for target in panel.get("targets", [])
            ]
        elif path.startswith("prometheus/") and path.endswith("rules.yml"):
            for rule in yaml.safe_load(content)["groups"][0]["rules"]:
                found.append(_asked(rule["alert"], rule["expr"], ""))
    return found


def _asked(where: str, expr: str, legend: str) -> Asked:
    hits = _METRIC.findall(expr)
    selected = {(metric, *match) for metric, inside in hits for match in _MATCH.findall(inside)}
    kept = {label.strip() for labels in _KEPT.findall(expr) for label in labels.split(",")}
    kept |= set(re.findall(r"\{\{(\w+)\}\}", legend))
    return Asked(where, expr, frozenset(name for name, _ in hits), frozenset(kept), frozenset(selected))
