"""What the manifests have processes do is what these processes can: flags, files, ports, probes,
drains, metrics.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kubernetes_manifests import (
    NAME,
    NODE,
    OUTSIDE,
    OVERLAYS,
    POD_IP,
    RANK,
    ROUTER,
    SECRETS,
    STRANGER,
    Network,
    PodOf,
    arguments,
    commands_asked,
    objects,
    pods,
)

import kvrelay.cli
from kvrelay.node.lifecycle import DRAIN_DEADLINE_S
from kvrelay.node.process import LOG_FORMAT
from kvrelay.wire.config import NodeConfig, RanksConfig
from kvrelay.wire.router_config import RouterConfig
from scripts.reference.metric_families import metrics_reference

KINDS = {"router": RouterConfig, "prefill": NodeConfig, "decode": NodeConfig, "rank": RanksConfig}

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@dataclass(frozen=True)
class Started:
    """What the real command line makes of a container: of its arguments, its files and its secrets."""

    pod: PodOf
    config: Any
    drain: tuple[Any, ...] = ()
    """What its preStop hook asks for."""


Configs = Callable[[str], list[Started]]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configs]:
    """The containers of an overlay; nothing is run, looked up or listened on."""
    with pytest.MonkeyPatch.context() as patch:
        asked = commands_asked(patch)
        patch.setattr("kvrelay.paged_engine.rank_address.check_rank_0", lambda address: None)
        patch.setattr("kvrelay.paged_engine.rank_address.interface_towards", lambda address: "eth0")
        patch.setattr(
            "kvrelay.router.membership.kubernetes_pods.api_server", lambda namespace: None
        )

        def started(overlay: str, pod: PodOf) -> Started:
            for name in (*SECRETS, LOG_FORMAT):
                patch.delenv(name, raising=False)
            for variable in pod.main["env"]:
                if "value" in variable:
                    patch.setenv(variable["name"], variable["value"])
                if "secretKeyRef" in variable.get("valueFrom", {}):
                    patch.setenv(variable["name"], SECRETS[variable["name"]])
            assert "command" not in pod.main, "the image's entry point is kvrelay"
            args = arguments(overlay, pod, tmp_path_factory.mktemp("pod"))
            assert kvrelay.cli.run(args) == 0, args
            config, *_ = asked.pop()
            assert os.environ[LOG_FORMAT] == getattr(config, "log_format", "json") == "json"
            program, *args = (
                pod.main.get("lifecycle", {})
                .get("preStop", {})
                .get("exec", {})
                .get("command", ["none"])
            )
            if program != "kvrelay":
                return Started(pod, config)
            assert kvrelay.cli.run(args) == 0, args
            return Started(pod, config, asked.pop())

        yield functools.cache(lambda overlay: [started(overlay, pod) for pod in pods(overlay)])


@every_overlay
def test_the_command_line_takes_every_containers_arguments(overlay: str, configs: Configs) -> None:
    for pod, config in ((each.pod, each.config) for each in configs(overlay)):
        command = pod.main["args"][0]
        if command == "up":
            router, engine = config.router, config.node.engine
            assert (router.host, router.port) == ("0.0.0.0", pod.ports["http"])
            assert router.api_key == "k"
            gpus = pod.main["resources"]["limits"]["nvidia.com/gpu"]
            assert gpus == len(config.roles) * engine.tensor_parallel_size
            continue
        assert isinstance(config, KINDS[command])
        if isinstance(config, RouterConfig):
            assert (config.host, config.port) == ("0.0.0.0", pod.ports["http"])
            assert (config.api_key, config.admin_key, config.node_api_key) == ("k", "a", "n")
        if isinstance(config, NodeConfig):
            assert (config.host, config.port, config.api_key) == ("0.0.0.0", pod.ports["http"], "n")
            assert config.url == f"http://{POD_IP}:{pod.ports['http']}"
            assert (config.transfer.kv_host, config.transfer.kv_port) == (POD_IP, pod.ports["kv"])
            assert config.transfer.cluster_secret == SECRETS["KVRELAY_CLUSTER_SECRET"]
            assert pod.labels["kvrelay/role"] == config.role


@every_overlay
def test_gpus_shared_memory_and_memory_are_enough_for_the_config(
    overlay: str, configs: Configs
) -> None:
    for pod, config in ((each.pod, each.config) for each in configs(overlay)):
        if isinstance(config, RouterConfig):
            continue
        (shm,) = [volume["emptyDir"] for volume in pod.spec["volumes"] if volume["name"] == "shm"]
        limits = pod.main["resources"]["limits"]
        assert (
            shm["medium"],
            {"name": "shm", "mountPath": "/dev/shm"} in pod.main["volumeMounts"],
        ) == ("Memory", True)
        engine = getattr(config, "node", config).engine
        assert size(shm["sizeLimit"]) + (engine.kv_cache_memory_bytes or 1 << 30) < size(
            limits["memory"]
        )
        if pod.main["args"][0] == "up":
            continue
        gpus = limits.get("nvidia.com/gpu", 0)
        assert gpus == (
            0
            if engine.device == "cpu"
            else engine.tensor_parallel_size_local or engine.tensor_parallel_size
        )


def size(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def test_the_ranks_of_a_group_are_all_ranks_once(configs: Configs) -> None:
    for group in objects("multi-node", "LeaderWorkerSet"):
        size = group["spec"]["leaderWorkerTemplate"]["size"]
        ours = [
            each
            for each in configs("multi-node")
            if each.pod.owner["metadata"] == group["metadata"]
        ]
        (leader, node), (worker, rank) = ((each.pod, each.config) for each in ours)
        assert (leader.component, worker.component) == ("node", "rank")
        local = node.engine.tensor_parallel_size_local
        assert (rank.machine, rank.first, rank.engine.tensor_parallel_size_local) == (
            1,
            local,
            local,
        )
        assert size * local == node.engine.tensor_parallel_size
        (which,) = [each for each in worker.main["env"] if each["name"] == "MACHINE"]
        label = "leaderworkerset.sigs.k8s.io/worker-index"
        assert which["valueFrom"] == {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
        port = leader.ports["ranks"]
        assert node.engine.tensor_parallel_address == f"{POD_IP}:{port}"
        assert rank.engine.tensor_parallel_address.endswith(f":{port}")
        (wait,) = worker.spec["initContainers"]
        compile(wait["command"][-1], "leader-is-known", "exec")
        assert f'os.environ["LWS_LEADER_ADDRESS"], {port})' in wait["command"][-1]


@every_overlay
def test_probes_ask_whether_a_process_lives_and_whether_it_serves(overlay: str) -> None:
    """test_kubernetes_run.py asks these routes."""
    for pod in pods(overlay):
        probes = {
            name: pod.main[f"{name}Probe"]["httpGet"]
            for name in ("startup", "readiness", "liveness")
            if f"{name}Probe" in pod.main
        }
        if pod.component == "rank":
            assert not probes
            continue
        assert {probe["port"] for probe in probes.values()} == {"http"}
        assert (probes["readiness"]["path"], probes["liveness"]["path"]) == ("/health", "/live")
        assert probes["startup"]["path"] in ("/health", "/live")
        for monitor in objects(overlay, "PodMonitor"):
            assert [each["path"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["/metrics"]


@every_overlay
def test_who_is_to_end_has_the_time_to_drain(overlay: str, configs: Configs) -> None:
    for started in configs(overlay):
        pod = started.pod
        if pod.component == "rank":
            (leader,) = [each for each in pods(overlay, "node") if each.owner == pod.owner]
            assert (
                pod.spec["terminationGracePeriodSeconds"]
                == leader.spec["terminationGracePeriodSeconds"]
            )
            continue
        if pod.component == "router":
            before_s = pod.main["lifecycle"]["preStop"]["sleep"]["seconds"]
            if isinstance(started.config, RouterConfig):
                after_s = started.config.drain_deadline_s
                assert after_s >= started.config.request_deadline_s, "a rollout loses no stream"
            else:
                after_s = started.config.stop_deadline_s
                assert after_s >= DRAIN_DEADLINE_S
        else:
            url, key, before_s = started.drain
            assert (url, key) == (f"http://127.0.0.1:{pod.ports['http']}", "n")
            after_s = DRAIN_DEADLINE_S
        assert pod.spec["terminationGracePeriodSeconds"] >= before_s + after_s + 10


def test_scalers_ask_for_metrics_that_there_are() -> None:
    known = {fact.name: fact for fact in metrics_reference()}
    queries = [
        trigger["metadata"]["query"]
        for scaler in objects("autoscaling", "ScaledObject")
        for trigger in scaler["spec"]["triggers"]
    ]
    assert len(queries) == 7
    for query in queries:
        name, labels = re.fullmatch(r"(?:sum|max)\(([a-z_:]+)\{([^}]*)\}\)", query).groups()  # type: ignore[union-attr]
        wanted = dict(re.findall(r'(\w+)="(\w+)"', labels))
        assert wanted.pop("namespace") == "kvrelay", "which Prometheus adds"
        assert known[name].kind == "gauge"
        assert set(wanted) <= set(known[name].labels)
        assert wanted.get("role") in (None, "prefill", "decode")


MONITORING, GATEWAY = ("monitoring", {NAME: "prometheus"}), ("gateway", STRANGER)
EVERYBODY = {"router": ROUTER, "node": NODE, "rank": RANK, "stranger": STRANGER, "outside": OUTSIDE}
EVERYBODY |= {"monitoring": MONITORING, "gateway": GATEWAY}


@dataclass(frozen=True)
class Listening:
    """A range of ports that a pod's processes can listen on at an address that other pods reach."""

    name: str
    first: int
    last: int
    audience: frozenset[str]
    """Who must reach it; nobody else may."""


def listening(started: Started, overlay: str) -> list[Listening]:
    """All of a pod. What has no port of its own takes an ephemeral one of the pod: UCX, NCCL, gloo,
    ranks' links.
    """
    config, monitored = started.config, {"monitoring"} if objects(overlay, "PodMonitor") else set()
    ours = {"node", "rank"}
    found: list[tuple[str, int, set[str]]] = []
    if started.pod.component == "router":  # of `up`, too, whose nodes listen on the loopback
        router = getattr(config, "router", config)
        found = [("http", router.port, set(EVERYBODY) - {"router", "node", "rank"})]
        assert router.heartbeat_port == 0, "no policy opens them"
    if isinstance(config, NodeConfig):
        found = [
            ("http", config.port, {"router", *monitored}),
            ("kv", config.transfer.kv_port, ours),
        ]
        if config.engine.tensor_parallel_address:
            found += [
                ("ranks", int(config.engine.tensor_parallel_address.rpartition(":")[2]), ours)
            ]
    ranges = [Listening(name, port, port, frozenset(who)) for name, port, who in found]
    if started.pod.component != "router":
        (sysctl,) = started.pod.spec["securityContext"]["sysctls"]
        assert sysctl["name"] == "net.ipv4.ip_local_port_range"
        first, last = map(int, sysctl["value"].split())
        ranges.append(Listening("ephemeral", first, last, frozenset(ours)))
    return ranges


@every_overlay
def test_each_port_that_a_process_listens_on_is_declared_and_open_to_whom_it_is_for_alone(
    overlay: str, configs: Configs
) -> None:
    network = Network(overlay)
    for started in configs(overlay):
        pod, ranges = started.pod, listening(started, overlay)
        declared = {each.name: each.first for each in ranges if each.name != "ephemeral"}
        assert pod.ports == declared, f"{pod}: what it declares is not what it listens on"
        for each in ranges:
            for port in (each.first, each.last):
                reach = {
                    who
                    for who, labels in EVERYBODY.items()
                    if network.lets(labels, pod.labels, port)
                }
                assert reach == each.audience, f"{pod}: {each.name}, port {port}"
            for who, labels in EVERYBODY.items():
                assert not network.lets(labels, pod.labels, each.first, "UDP"), f"{pod}: {who}"
        for who in EVERYBODY.keys() - {"node", "rank"}:
            opened = [port for port in (22, 9090) if network.lets(EVERYBODY[who], pod.labels, port)]
            assert not opened, f"{pod}: {who}, where nobody listens"
