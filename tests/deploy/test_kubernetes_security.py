"""Who may talk to whom, and what processes may do: the rules of pod security and our own, checked
on every overlay.
"""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_manifests import (
    NAME,
    NODE,
    OUTSIDE,
    OVERLAYS,
    RANK,
    ROUTER,
    STRANGER,
    Network,
    named,
    objects,
    pods,
)

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
clusters = pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "one-node-gpu"])

# The fields that Kubernetes' level "restricted" looks at, and the values that it takes.
VOLUMES = {
    "configMap",
    "emptyDir",
    "persistentVolumeClaim",
    "projected",
    "secret",
    "downwardAPI",
    "csi",
    "ephemeral",
}
SYSCTLS = {"net.ipv4.ip_local_port_range"}


@every_overlay
def test_pods_are_restricted(overlay: str) -> None:
    level = named(overlay, "Namespace", "kvrelay")["metadata"]["labels"][
        "pod-security.kubernetes.io/enforce"
    ]
    pinned = overlay == "multi-node"  # RDMA
    assert level == ("privileged" if pinned else "restricted")
    for pod in pods(overlay):
        spec, security = pod.spec, pod.spec["securityContext"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec)
        assert spec["enableServiceLinks"] is False
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 10001)
        assert {each["name"] for each in security.get("sysctls", [])} <= SYSCTLS
        assert all(set(volume) - {"name"} <= VOLUMES for volume in spec["volumes"])
        for container in pod.containers:
            inner = container["securityContext"]
            assert inner["allowPrivilegeEscalation"] is False
            assert inner["readOnlyRootFilesystem"] is True
            assert inner["capabilities"]["drop"] == ["ALL"]
            assert "memory" in container["resources"]["limits"]
            assert not any("hostPort" in port for port in container.get("ports", []))
            assert "privileged" not in inner
            if pinned and container["name"] in ("node", "rank"):
                # Capabilities that are added are root's alone.
                assert (inner["runAsUser"], inner["capabilities"]["add"]) == (0, ["IPC_LOCK"])
            else:
                assert "add" not in inner["capabilities"]
                assert not {"runAsUser", "runAsNonRoot"} & set(inner)


@every_overlay
def test_what_is_written_has_a_volume(overlay: str) -> None:
    for pod in pods(overlay):
        places = {
            mount["mountPath"] for mount in pod.main["volumeMounts"] if not mount.get("readOnly")
        }
        assert "/tmp" in places
        if pod.component != "router":
            assert {"/var/cache/kvrelay", "/dev/shm"} <= places


HTTP, EVENTS, REPLAY, KV, MEET, PLANE = 8000, 5557, 5558, 7000, 29500, 40000


@clusters
def test_each_talks_to_whom_it_must_and_to_nobody_else(overlay: str) -> None:
    network = Network(overlay)
    ports = (22, 443, HTTP, EVENTS, REPLAY, KV, MEET, PLANE)

    def opened(source: Any, target: Any) -> set[int]:
        return {port for port in ports if network.lets(source, target, port)}

    hub = {443} if overlay in ("autoscaling", "multi-node") else set()
    assert opened(ROUTER, NODE) == {HTTP, EVENTS, REPLAY}
    for source in (NODE, RANK):
        for target in (NODE, RANK):
            assert opened(source, target) == {KV, MEET, PLANE}
        assert opened(source, ROUTER) == set()
        assert opened(source, STRANGER) == opened(source, OUTSIDE) == hub
        assert opened(STRANGER, source) == opened(OUTSIDE, source) == set()
        assert opened(("other", STRANGER), source) == set()
    assert opened(ROUTER, RANK) == set()
    for anyone in (STRANGER, OUTSIDE, ("gateway", STRANGER)):
        assert opened(anyone, ROUTER) == {HTTP}
    assert opened(ROUTER, OUTSIDE) == {443}, "the API server"
    for ours in (ROUTER, NODE, RANK):
        assert network.lets(ours, OUTSIDE, 53, "UDP")
        assert not network.lets(ours, OUTSIDE, 123, "UDP")


@pytest.mark.parametrize("overlay", ["cpu-demo", "monitoring", "autoscaling"])
def test_metrics_and_traces_are_for_the_namespace_of_monitoring(overlay: str) -> None:
    network, prometheus = Network(overlay), ("monitoring", {NAME: "prometheus"})
    assert network.lets(prometheus, NODE, HTTP) is (overlay != "cpu-demo")
    assert network.lets(prometheus, ROUTER, HTTP)
    for ours in (ROUTER, NODE):
        assert network.lets(ours, ("monitoring", {NAME: "collector"}), 4318) is (
            overlay != "cpu-demo"
        )
        assert not network.lets(ours, ("other", {NAME: "collector"}), 4318)
    assert not network.lets(prometheus, NODE, EVENTS)
    assert not network.lets(("other", {NAME: "prometheus"}), NODE, HTTP)


def test_one_machine_alone_shows_its_router() -> None:
    network = Network("one-node-gpu")
    assert network.lets(OUTSIDE, ROUTER, HTTP)
    assert not network.lets(STRANGER, ROUTER, PLANE)
    assert network.lets(ROUTER, OUTSIDE, 443)
    assert not network.lets(ROUTER, OUTSIDE, HTTP)


@clusters
def test_policies_open_the_ports_that_pods_have(overlay: str) -> None:
    for pod in pods(overlay, "node"):
        assert (pod.ports["http"], pod.ports["kv-events"], pod.ports["kv-replay"]) == (
            HTTP,
            EVENTS,
            REPLAY,
        )
        assert pod.ports["kv"] == KV
        assert pod.ports.get("ranks", MEET) == MEET
    (kv,) = [
        each
        for each in objects(overlay, "NetworkPolicy")
        if each["metadata"]["name"] == "kvrelay-kv"
    ]
    (span,) = [each for each in kv["spec"]["ingress"][0]["ports"] if "endPort" in each]
    for pod in pods(overlay, "node", "rank"):
        assert pod.spec["securityContext"]["sysctls"] == [
            {"name": "net.ipv4.ip_local_port_range", "value": f"{span['port']} {span['endPort']}"}
        ]
