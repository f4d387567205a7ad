"""What the manifests have processes do is what these processes can: flags, files, ports, probes, drains, metrics."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes_manifests import OVERLAYS, PodOf, objects, pods
from starlette.routing import Route

import kvrelay.cli
from node.app import Node
from node.app import create_app as node_app
from node.drain import DRAIN_DEADLINE_S
from node.metrics import NodeMetrics
from router.app import create_app as router_app
from router.server import DRAIN_S
from wire.config import EngineConfig, NodeConfig, RanksConfig
from wire.engine_messages import EngineStats
from wire.outputs import Load
from wire.router_config import RouterConfig

POD_IP = "10.0.0.7"
SECRETS = {
    "KVRELAY_API_KEY": "k",
    "KVRELAY_ADMIN_KEY": "a",
    "KVRELAY_NODE_API_KEY": "n",
    "KVRELAY_CLUSTER_SECRET": "a-secret-of-the-cluster",
    "HF_TOKEN": "h",
}
KINDS = {"router": RouterConfig, "prefill": NodeConfig, "decode": NodeConfig, "rank": RanksConfig}

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command line would run, as its config; nothing is run, looked up or listened on."""
    configs: list[Any] = []

    def run(config: Any) -> int:
        configs.append(config)
        return 0

    for module, name in (
        ("node.server", "run"),
        ("router.server", "run"),
        ("node.ranks", "run_ranks"),
        ("kvrelay.cluster", "up"),
    ):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: run}))  # type: ignore[arg-type]
    monkeypatch.setattr(kvrelay.cli, "check_port", lambda host, port: None)
    monkeypatch.setattr(kvrelay.cli, "_with_model_here", lambda config: config)
    monkeypatch.setattr("paged_engine.rank_address.check_rank_0", lambda address: None)
    monkeypatch.setattr("paged_engine.rank_address.interface_towards", lambda address: "eth0")
    monkeypatch.setattr("router.membership.kubernetes_watch.server_of", lambda namespace: (None, "kvrelay"))
    return configs


def arguments(overlay: str, pod: PodOf, folder: Path) -> list[str]:
    """A container's arguments as Kubernetes makes them, its files in `folder`."""
    names = {"POD_IP": POD_IP, "LWS_LEADER_ADDRESS": "kvrelay-decode-0.kvrelay-decode.kvrelay"}
    known = {variable["name"] for variable in pod.main["env"]} | {"LWS_LEADER_ADDRESS"}
    args = [
        re.sub(r"\$\((\w+)\)", lambda found: names[found[1]] if found[1] in known else "", arg)
        for arg in pod.main["args"]
    ]
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    for mount in pod.main["volumeMounts"]:
        if "configMap" in volumes[mount["name"]]:
            name = volumes[mount["name"]]["configMap"]["name"]
            (files,) = [each["data"] for each in objects(overlay, "ConfigMap") if each["metadata"]["name"] == name]
            for file, text in files.items():
                (folder / file).write_text(text)
            args = [arg.replace(f"={mount['mountPath']}/", f"={folder}/") for arg in args]
    return args


def set_environment(pod: PodOf, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    for variable in pod.main["env"]:
        if "secretKeyRef" in variable.get("valueFrom", {}):
            monkeypatch.setenv(variable["name"], SECRETS[variable["name"]])


def configs_of(
    overlay: str, started: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[PodOf, Any]]:
    """Each pod of an overlay with the config that the real command line makes of its arguments, files and secrets."""
    found = []
    for pod in pods(overlay):
        set_environment(pod, monkeypatch)
        assert "command" not in pod.main, "the image's entry point is kvrelay"
        args = arguments(overlay, pod, folder)
        assert kvrelay.cli.run(args) == 0, args
        found.append((pod, started.pop()))
    return found


@every_overlay
def test_the_command_line_takes_every_containers_arguments(
    overlay: str, started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pod, config in configs_of(overlay, started, tmp_path, monkeypatch):
        command = pod.main["args"][0]
        if command == "up":
            assert (config.host, config.port) == ("0.0.0.0", pod.ports["http"])
            assert config.api_key == "k"
            gpus = pod.main["resources"]["limits"]["nvidia.com/gpu"]
            assert gpus == (config.prefill + config.decode) * config.engine.tensor_parallel
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
            assert config.kv_events_port == pod.ports["kv-events"] == pod.ports["kv-replay"] - 1
            assert pod.labels["kvrelay/role"] == config.role


@every_overlay
def test_gpus_shared_memory_and_memory_are_enough_for_the_config(
    overlay: str, started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pod, config in configs_of(overlay, started, tmp_path, monkeypatch):
        if isinstance(config, RouterConfig):
            continue
        (shm,) = [volume["emptyDir"] for volume in pod.spec["volumes"] if volume["name"] == "shm"]
        limits = pod.main["resources"]["limits"]
        assert (shm["medium"], {"name": "shm", "mountPath": "/dev/shm"} in pod.main["volumeMounts"]) == ("Memory", True)
        engine = config.engine
        assert size(shm["sizeLimit"]) + (engine.kv_cache_memory or 1 << 30) < size(limits["memory"])
        if pod.main["args"][0] == "up":
            continue
        gpus = limits.get("nvidia.com/gpu", 0)
        assert gpus == (0 if engine.device == "cpu" else engine.tensor_parallel_local or engine.tensor_parallel)


def size(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def test_the_ranks_of_a_group_are_all_ranks_once(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = configs_of("multi-node", started, tmp_path, monkeypatch)
    for group in objects("multi-node", "LeaderWorkerSet"):
        assert group["spec"]["leaderWorkerTemplate"]["size"] == 2, "then first_rank is a number"
        mine = [(pod, config) for pod, config in configs if pod.owner["metadata"]["name"] == group["metadata"]["name"]]
        (leader, node), (worker, rank) = mine
        assert (leader.component, worker.component) == ("node", "rank")
        local = node.engine.tensor_parallel_local
        assert list(range(rank.first_rank, rank.first_rank + rank.engine.tensor_parallel_local)) == list(
            range(local, node.engine.tensor_parallel)
        )
        port = leader.ports["ranks"]
        assert node.engine.tensor_parallel_address == f"{POD_IP}:{port}"
        assert rank.engine.tensor_parallel_address.endswith(f":{port}")
        (wait,) = worker.spec["initContainers"]
        compile(wait["command"][-1], "leader-is-known", "exec")
        assert f'os.environ["LWS_LEADER_ADDRESS"], {port})' in wait["command"][-1]


def routes(app: Any) -> set[str]:
    return {route.path for route in app.routes if isinstance(route, Route) and "GET" in (route.methods or ())}


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """The GET routes of each kind of process."""
    node = Node(NodeConfig(EngineConfig("m")), SimpleNamespace(), 0)  # type: ignore[arg-type]
    router = routes(router_app(RouterConfig(prefill=("http://p:1",), decode=("http://d:1",))))
    return {"node": routes(node_app(node, lambda app: None)), "router": router}  # type: ignore[arg-type,return-value]


@every_overlay
def test_probes_and_scrapes_ask_routes_that_there_are(overlay: str, served: dict[str, set[str]]) -> None:
    for pod in pods(overlay):
        probes = {name: pod.main.get(f"{name}Probe") for name in ("startup", "readiness", "liveness")}
        if pod.component == "rank":
            assert not any(probes.values())
            continue
        for name, probe in probes.items():
            assert probe is not None
            assert probe["httpGet"]["port"] == "http"
            assert probe["httpGet"]["path"] in served[pod.component]
            assert probe["httpGet"]["path"] == {"readiness": "/health", "liveness": "/live"}.get(
                name, probe["httpGet"]["path"]
            )
        for monitor in objects(overlay, "PodMonitor"):
            assert {each["path"] for each in monitor["spec"]["podMetricsEndpoints"]} <= served[pod.component]


@every_overlay
def test_who_is_to_end_has_the_time_to_drain(
    overlay: str, monkeypatch: pytest.MonkeyPatch, started: list[Any], tmp_path: Path
) -> None:
    asked: list[tuple[Any, ...]] = []

    def drain(*given: Any) -> int:
        asked.append(given)
        return 0

    monkeypatch.setitem(sys.modules, "kvrelay.drain", SimpleNamespace(run=drain))  # type: ignore[arg-type]
    for pod, config in configs_of(overlay, started, tmp_path, monkeypatch):
        if pod.component == "rank":
            (leader,) = [each for each in pods(overlay, "node") if each.owner == pod.owner]
            assert pod.spec["terminationGracePeriodSeconds"] == leader.spec["terminationGracePeriodSeconds"]
            continue
        hook = pod.main["lifecycle"]["preStop"]
        if pod.component == "router":
            before_s, after_s = hook["sleep"]["seconds"], getattr(config, "stop_deadline_s", DRAIN_S)
            assert after_s >= DRAIN_DEADLINE_S
        else:
            program, *args = hook["exec"]["command"]
            assert program == "kvrelay"
            set_environment(pod, monkeypatch)
            assert kvrelay.cli.run(args) == 0
            url, router, _, node_api_key, before_s, _ = asked.pop()
            assert (url, router, node_api_key) == (f"http://127.0.0.1:{pod.ports['http']}", "", "n")
            after_s = DRAIN_DEADLINE_S
        assert pod.spec["terminationGracePeriodSeconds"] >= before_s + after_s + 10


def test_scalers_ask_for_metrics_that_there_are(started: list[Any]) -> None:
    nodes = NodeMetrics(lambda: EngineStats(Load()), model_name="m", role="prefill").text().decode()
    router = router_app(RouterConfig(prefill=("http://p:1",), decode=("http://d:1",)), random.Random(1))
    told = {"router": router.state.router.metrics.text().decode(), "node": nodes}
    queries = [
        trigger["metadata"]["query"]
        for scaler in objects("autoscaling", "ScaledObject")
        for trigger in scaler["spec"]["triggers"]
    ]
    assert len(queries) == 5
    for query in queries:
        name, labels = re.fullmatch(r"sum\(([a-z_:]+)\{([^}]*)\}\)", query).groups()  # type: ignore[union-attr]
        wanted = dict(re.findall(r'(\w+)="(\w+)"', labels))
        assert wanted.pop("namespace") == "kvrelay"
        text = told["router" if name.startswith("kvrelay_router_") else "node"]
        assert re.search(rf"^# TYPE {name} gauge$", text, re.MULTILINE), name
        assert set(wanted) <= {"role"}
        if wanted:
            assert re.search(rf'^{name}\{{.*role="prefill"', text, re.MULTILINE)
