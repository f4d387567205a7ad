"""What Prometheus scrapes and which alerts it raises, as the values of its YAML files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.monitoring.alerts import ALERTS

__all__ = ["RULES_FILE", "by_name", "listed", "prometheus_rule", "rules", "scraping"]

RULES_FILE = "kvrelay.rules.yml"
_INTERVAL = "5s"


def listed(targets: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Jobs whose targets are known, each host:port; by job, kvrelay-router and kvrelay-node."""
    return [{"job_name": job, "static_configs": [{"targets": list(at)}]} for job, at in targets.items()]


def by_name(port: int) -> list[dict[str, Any]]:
    """Jobs whose targets are all addresses that a name has: router, prefill and decode, as in a compose network."""
    jobs = {"kvrelay-router": ["router"], "kvrelay-node": ["prefill", "decode"]}
    return [
        {
            "job_name": job,
            "dns_sd_configs": [{"names": names, "type": "A", "port": port, "refresh_interval": _INTERVAL}],
        }
        for job, names in jobs.items()
    ]


def scraping(jobs: Sequence[Mapping[str, Any]], interval: str = _INTERVAL) -> dict[str, Any]:
    """prometheus.yml."""
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [RULES_FILE],
        "scrape_configs": [dict(job) for job in jobs],
    }


def rules() -> dict[str, Any]:
    """The rules file."""
    return {
        "groups": [
            {
                "name": "kvrelay",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.after,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.says},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def prometheus_rule() -> dict[str, Any]:
    """The same as the Prometheus operator wants it."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvrelay", "labels": {"app.kubernetes.io/name": "kvrelay"}},
        "spec": rules(),
    }
