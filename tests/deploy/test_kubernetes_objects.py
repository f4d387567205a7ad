"""Every overlay of deploy/kubernetes is what an API server takes, and its objects mean each other."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kubernetes_manifests import (
    COMPONENT,
    FOLDER,
    NAME,
    OVERLAYS,
    PodOf,
    matches,
    named,
    objects,
    pods,
    validate,
)

from kvrelay.router.membership.kubernetes_pods import node_of

SECRET_KEYS = {
    ("kvrelay-keys", "api-key"): "KVRELAY_API_KEY",
    ("kvrelay-keys", "admin-key"): "KVRELAY_ADMIN_KEY",
    ("kvrelay-keys", "node-api-key"): "KVRELAY_NODE_API_KEY",
    ("kvrelay-keys", "cluster-secret"): "KVRELAY_CLUSTER_SECRET",
    ("kvrelay-hub", "token"): "HF_TOKEN",
}
MAY_HAVE = {
    "router": {"KVRELAY_API_KEY", "KVRELAY_ADMIN_KEY", "KVRELAY_NODE_API_KEY"},
    "node": {"KVRELAY_NODE_API_KEY", "KVRELAY_CLUSTER_SECRET", "HF_TOKEN"},
    "rank": {"HF_TOKEN"},
}

DISCOVERY = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
with_discovery = pytest.mark.parametrize(
    "overlay", [name for name in OVERLAYS if name != "one-node-gpu"]
)


def test_there_are_these_overlays_and_the_readme_tells_of_each() -> None:
    assert OVERLAYS == ["autoscaling", "cpu-demo", "monitoring", "multi-node", "one-node-gpu"]
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"overlays/{name}" in page for name in OVERLAYS)
    assert all(f"`{path.name}`" in page for path in FOLDER.glob("components/*"))


@every_overlay
def test_an_api_server_would_take_it(overlay: str) -> None:
    for thing in objects(overlay):
        validate(thing)
        assert thing["kind"] == "Namespace" or thing["metadata"]["namespace"] == "kvrelay"
    names = Counter((thing["kind"], thing["metadata"]["name"]) for thing in objects(overlay))
    assert set(names.values()) == {1}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [("Deployment", "replica", 1), ("ScaledObject", "maxReplicaCount", "3")],
)
def test_what_an_api_server_would_refuse_is_seen(kind: str, field: str, value: Any) -> None:
    thing = objects("autoscaling", kind)[0]
    thing["spec"][field] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(thing)


@with_discovery
def test_the_router_may_follow_pods_and_nobody_may_do_anything_else(overlay: str) -> None:
    roles = objects(overlay, "Role")
    assert [rule for role in roles for rule in role["rules"]] == [DISCOVERY]
    bindings = objects(overlay, "RoleBinding")
    assert [each["roleRef"]["name"] for each in bindings] == [
        role["metadata"]["name"] for role in roles
    ]
    (router,) = pods(overlay, "router")
    for binding in bindings:
        assert binding["roleRef"]["kind"] == "Role"
        (subject,) = binding["subjects"]
        assert (subject["kind"], subject["name"]) == (
            "ServiceAccount",
            router.spec["serviceAccountName"],
        )
    assert not objects(overlay, "ClusterRole", "ClusterRoleBinding")
    for pod in pods(overlay):
        assert pod.spec["automountServiceAccountToken"] is (pod.component == "router")


@every_overlay
def test_what_pods_name_is_there(overlay: str) -> None:
    there = {(thing["kind"], thing["metadata"]["name"]) for thing in objects(overlay)}
    for pod in pods(overlay):
        assert ("ServiceAccount", pod.spec["serviceAccountName"]) in there
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounted = {
            mount["name"]
            for container in pod.containers
            for mount in container.get("volumeMounts", [])
        }
        assert mounted == set(volumes)
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in there
                assert re.search(r"-[0-9a-z]{10}$", volume["configMap"]["name"]), (
                    "a change of it must roll the pods"
                )
            if "persistentVolumeClaim" in volume:
                assert (
                    "PersistentVolumeClaim",
                    volume["persistentVolumeClaim"]["claimName"],
                ) in there


@every_overlay
def test_secrets_are_named_and_not_contained_and_each_process_has_only_its_own(
    overlay: str,
) -> None:
    assert not objects(overlay, "Secret")
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for pod in pods(overlay):
        found = set()
        for variable in pod.main.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is None:
                assert not re.search("KEY|SECRET|TOKEN", variable["name"])
                continue
            assert SECRET_KEYS[reference["name"], reference["key"]] == variable["name"]
            assert reference["key"] in page
            found.add(variable["name"])
        may = (
            {"KVRELAY_API_KEY", "KVRELAY_ADMIN_KEY", "HF_TOKEN"}
            if overlay == "one-node-gpu"
            else MAY_HAVE[pod.component]
        )
        assert found <= may


@every_overlay
def test_selectors_select_what_they_mean(overlay: str) -> None:
    everyone = pods(overlay)
    for owner in objects(overlay, "Deployment"):
        selected = [pod for pod in everyone if matches(owner["spec"]["selector"], pod.labels)]
        assert [pod.owner["metadata"]["name"] for pod in selected] == [owner["metadata"]["name"]]
    for budget in objects(overlay, "PodDisruptionBudget"):
        selected = [pod for pod in everyone if matches(budget["spec"]["selector"], pod.labels)]
        assert {pod.owner["metadata"]["name"] for pod in selected} == {budget["metadata"]["name"]}
    if overlay != "one-node-gpu":
        owners = {pod.owner["metadata"]["name"] for pod in everyone}
        assert {
            budget["metadata"]["name"] for budget in objects(overlay, "PodDisruptionBudget")
        } == owners
    service = named(overlay, "Service", "kvrelay-router")
    selected = [
        pod for pod in everyone if matches({"matchLabels": service["spec"]["selector"]}, pod.labels)
    ]
    assert [pod.component for pod in selected] == ["router"]
    assert all(port["targetPort"] in selected[0].ports for port in service["spec"]["ports"])
    for pod in everyone:
        for spread in pod.spec.get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"], pod.labels)


@pytest.mark.parametrize("overlay", ["autoscaling", "monitoring"])
def test_prometheus_scrapes_all_that_serve_metrics(overlay: str) -> None:
    (monitor,) = objects(overlay, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in pods(overlay):
        assert matches(monitor["spec"]["selector"], pod.labels)
        assert endpoint["port"] in pod.ports


def test_the_route_leads_to_the_service_and_shows_the_api_alone() -> None:
    (route,) = objects("autoscaling", "HTTPRoute")
    service = named("autoscaling", "Service", "kvrelay-router")
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"name": "kvrelay-router", "port": service["spec"]["ports"][0]["port"]}
    ]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1"]


def test_what_scales_is_there_and_nobody_else_says_how_many() -> None:
    scalers = objects("autoscaling", "HorizontalPodAutoscaler", "ScaledObject")
    targets = [
        (scaler["spec"]["scaleTargetRef"]["kind"], scaler["spec"]["scaleTargetRef"]["name"])
        for scaler in scalers
    ]
    deployments = objects("autoscaling", "Deployment")
    assert sorted(targets) == sorted(
        ("Deployment", each["metadata"]["name"]) for each in deployments
    )
    assert all("replicas" not in each["spec"] for each in deployments)
    most = {
        each["spec"]["scaleTargetRef"]["name"]: each["spec"].get("maxReplicaCount")
        for each in scalers
    }
    (router,) = pods("autoscaling", "router")
    for role in ("prefill", "decode"):  # no pod takes a role that its Deployment does not have
        assert f"--least-{role}={most[f'kvrelay-{role}']}" in router.main["args"]


@every_overlay
def test_images_are_those_of_this_version(overlay: str, repository: Path) -> None:
    version = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    cpu = overlay in ("cpu-demo", "monitoring")
    for pod in pods(overlay):
        image = "router" if pod.main["name"] == "router" else "node-cpu" if cpu else "node-cuda"
        assert {container["image"] for container in pod.containers} == {
            f"kvrelay/{image}:{version}"
        }


def ready(pod: PodOf) -> dict[str, Any]:
    """A pod of it as an API server tells of it."""
    status = {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    metadata = {"name": "x", "uid": "u", "labels": pod.labels}
    return {"metadata": metadata, "spec": {"containers": pod.spec["containers"]}, "status": status}


@with_discovery
def test_the_router_discovers_nodes_and_nobody_else(overlay: str) -> None:
    (router,) = pods(overlay, "router")
    (flag,) = [arg for arg in router.main["args"] if arg.startswith("--kubernetes-selector=")]
    key, _, value = flag.removeprefix("--kubernetes-selector=").partition("=")
    for pod in pods(overlay):
        if pod.labels.get(key) == value and "kvrelay/role" in pod.labels:
            node = node_of(ready(pod))
            assert node is not None
            assert (node.url, pod.component) == (f"http://10.0.0.7:{pod.ports['http']}", "node")
            assert node.role == pod.main["args"][0]
        else:
            assert pod.component in ("router", "rank")
    roles = {pod.labels.get("kvrelay/role") for pod in pods(overlay, "node")}
    assert roles == {"prefill", "decode"}
    assert {pod.labels[NAME] for pod in pods(overlay)} == {"kvrelay"}
    assert {pod.labels[COMPONENT] for pod in pods(overlay)} <= {"router", "node", "rank"}
