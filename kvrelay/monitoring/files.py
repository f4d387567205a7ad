"""All files of deploy/monitoring by their paths there, made of the one source. Writes only when told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from kvrelay.monitoring.dashboards import DASHBOARDS
from kvrelay.monitoring.grafana import dashboard, dashboard_provider, datasource
from kvrelay.monitoring.prometheus import RULES_FILE, by_name, prometheus_rule, rules, scraping

__all__ = ["files", "write"]

_PORT = 8000
_PROMETHEUS = "http://prometheus:9090"
_MADE_BY = "# Made by `python -m kvrelay.monitoring FOLDER`: change the source in kvrelay/monitoring, not this file.\n"


def files() -> dict[str, str]:
    """Path below the folder -> content."""
    dashboards = {f"grafana/dashboards/{each.name}.json": _json(dashboard(each)) for each in DASHBOARDS}
    return {
        "prometheus/prometheus.yml": _yaml(scraping(by_name(_PORT))),
        f"prometheus/{RULES_FILE}": _yaml(rules()),
        "grafana/provisioning/datasources/prometheus.yaml": _yaml(datasource(_PROMETHEUS)),
        "grafana/provisioning/dashboards/kvrelay.yaml": _yaml(dashboard_provider()),
        **dashboards,
        "kubernetes/prometheus-rule.yaml": _yaml(prometheus_rule()),
        "kustomization.yaml": _yaml(_kustomization(list(dashboards))),
    }


def write(folder: Path) -> list[Path]:
    """Write them all below the folder; which ones."""
    written = []
    for path, content in files().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
        written.append(target)
    return written


def _kustomization(dashboards: list[str]) -> dict[str, Any]:
    """The rules, and the dashboards as Grafana's sidecar looks for them."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["kubernetes/prometheus-rule.yaml"],
        "configMapGenerator": [
            {
                "name": "kvrelay-dashboards",
                "files": dashboards,
                "options": {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}},
            }
        ],
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


def _yaml(value: object) -> str:
    return _MADE_BY + yaml.safe_dump(value, sort_keys=False, width=120)
