"""Dashboards as Grafana's JSON, and the files by which Grafana finds them and Prometheus. Invents no panel."""

from __future__ import annotations

from typing import Any

from kvrelay.monitoring.panels import Dashboard, Panel

__all__ = ["DASHBOARDS_PATH", "dashboard", "dashboard_provider", "datasource"]

DASHBOARDS_PATH = "/var/lib/grafana/dashboards"
"""Where Grafana's container finds them."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT, _ACROSS = 24, 8, 3


def dashboard(of: Dashboard) -> dict[str, Any]:
    """What Grafana imports."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in of.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
                "panels": [],
            }
        )
        top += 1
        width = _COLUMNS // _ACROSS
        for at, panel in enumerate(row.panels):
            place = {"x": at % _ACROSS * width, "y": top + at // _ACROSS * _HEIGHT, "w": width, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        top += -(-len(row.panels) // _ACROSS) * _HEIGHT
    return {
        "uid": of.name,
        "title": of.title,
        "description": of.about,
        "tags": ["kvrelay"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    low, high = ("green", "red") if panel.good == "below" else ("red", "green")
    limits: list[dict[str, Any]] = [{"color": low if panel.limit is not None else "green", "value": None}]
    if panel.limit is not None:
        limits.append({"color": high, "value": panel.limit})
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "drawStyle": "line",
                    "lineWidth": 1,
                    "fillOpacity": 25 if panel.stacked else 5,
                    "showPoints": "never",
                    "stacking": stacking,
                    "thresholdsStyle": {"mode": "off" if panel.limit is None else "dashed"},
                },
                "thresholds": {"mode": "absolute", "steps": limits},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def datasource(url: str) -> dict[str, Any]:
    """Where Grafana finds Prometheus."""
    source = {"name": "Prometheus", "uid": "prometheus", "type": "prometheus", "access": "proxy", "url": url}
    return {"apiVersion": 1, "datasources": [source | {"isDefault": True}]}


def dashboard_provider() -> dict[str, Any]:
    """Where Grafana finds the dashboards."""
    provider = {"name": "kvrelay", "type": "file", "folder": "kvrelay", "options": {"path": DASHBOARDS_PATH}}
    return {"apiVersion": 1, "providers": [provider]}
