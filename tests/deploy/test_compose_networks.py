"""Who reaches which port of the containers that compose files make: what processes listen on,
beside the networks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_manifests import commands_asked

import kvrelay.cli
from kvrelay.cluster_plan import ClusterConfig
from kvrelay.compose import ComposeConfig, compose_of
from kvrelay.settings import build
from kvrelay.wire.config import NodeConfig

SECRET = "a-secret-of-the-cluster"
HERE = Path(__file__).parents[2] / "deploy" / "compose" / "compose.yaml"


def _written(**cluster: Any) -> dict[str, Any]:
    return compose_of(
        ComposeConfig(
            build(
                ClusterConfig, {"model": "m", "device": "cpu", "prefill": 2, "decode": 2} | cluster
            )
        )
    )


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "deploy": lambda: yaml.safe_load(HERE.read_text(encoding="utf-8")),
    "auto": _written,
    "nixl": lambda: _written(kv_connector="nixl"),
}
every_file = pytest.mark.parametrize("name", FILES)


def is_node(service: dict[str, Any]) -> bool:
    return bool(service.get("command")) and service["command"][0] in ("prefill", "decode")


def networks(service: dict[str, Any]) -> dict[str, list[str]]:
    """Of a service: each network with the names that it has there beside its own."""
    if service.get("network_mode") == "none":
        return {}
    told = service.get("networks", {"default": {}})
    return {name: (of_it or {}).get("aliases", []) for name, of_it in told.items()}


@pytest.fixture
def config_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], NodeConfig]:
    """What the real command line makes of a node's command."""
    asked = commands_asked(monkeypatch)
    for name in ("KVRELAY_NODE_API_KEY", "KVRELAY_CLUSTER_SECRET"):
        monkeypatch.setenv(name, SECRET)

    def made(service: dict[str, Any]) -> NodeConfig:
        command = [re.sub(r"\$\{[^}]*\}", "m", word) for word in service["command"]]
        assert kvrelay.cli.run(command) == 0
        config: NodeConfig = asked.pop()[0]
        return config

    return made


@every_file
def test_the_hand_over_listens_on_a_network_of_the_nodes_alone(
    name: str, config_of: Callable[[dict[str, Any]], NodeConfig]
) -> None:
    file = FILES[name]()
    services = file["services"]
    nodes = {each for each, service in services.items() if is_node(service)}
    assert nodes
    for each in nodes:
        config = config_of(services[each])
        # One name, of one network: the control channel listens at its address, and UCX on the
        # interface that has it.
        (kv,) = [
            net
            for net, names in networks(services[each]).items()
            if config.transfer.kv_host in names
        ]
        assert config.transfer.kv_host not in services, "that name would be of all networks"
        assert file["networks"][kv] == {"internal": True}
        assert {other for other, service in services.items() if kv in networks(service)} == nodes
        assert config.transfer.cluster_secret == SECRET


@every_file
def test_the_host_publishes_the_router_and_for_itself_what_watches_it(name: str) -> None:
    services = FILES[name]()["services"]
    published = {each: service["ports"] for each, service in services.items() if "ports" in service}
    assert set(published) == {"router", "prometheus", "grafana"}
    for each, ports in published.items():
        (port,) = ports
        assert port.endswith({"router": ":8000", "prometheus": ":9090", "grafana": ":3000"}[each])
        if each != "router":
            assert port.startswith("127.0.0.1:")
    for each, service in services.items():
        assert not {"expose", "links", "privileged"} & set(service), each
        assert service.get("network_mode", "none") == "none", "a container has the host's network"


@every_file
def test_what_serves_http_is_on_the_network_of_the_cluster(
    name: str, config_of: Callable[[dict[str, Any]], NodeConfig]
) -> None:
    services = FILES[name]()["services"]
    for each, service in services.items():
        if is_node(service):
            config = config_of(service)
            assert (config.host, config.port) == ("0.0.0.0", 8000)
            assert config.api_key == SECRET, "the other containers are on that network, too"
            assert "default" in networks(service)
        elif each != "namespaces":
            assert set(networks(service)) == {"default"}, each
