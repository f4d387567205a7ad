"""Who may talk to whom, and what processes may do: the rules of pod security and our own, checked
on every overlay.
"""

from __future__ import annotations

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
    pods,
)

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

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


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "one-node-gpu"])
def test_who_leaves_the_namespace_and_where_to(overlay: str) -> None:
    """Whom each process lets in is in test_kubernetes_processes.py."""
    network, collector = Network(overlay), {NAME: "collector"}
    downloads = overlay in ("autoscaling", "multi-node")
    for ours in (ROUTER, NODE, RANK):
        found = {port for port in (22, 443, 8000) if network.lets(ours, OUTSIDE, port)}
        assert found == ({443} if ours is ROUTER or downloads else set())
        assert network.lets(ours, OUTSIDE, 53, "UDP")
        assert not network.lets(ours, OUTSIDE, 123, "UDP")
    traced = overlay in ("autoscaling", "monitoring")
    assert network.lets(NODE, ("monitoring", collector), 4318) is traced
    assert not network.lets(NODE, ("other", collector), 4318)


def test_one_machine_alone_shows_its_router() -> None:
    network = Network("one-node-gpu")
    assert network.lets(OUTSIDE, ROUTER, 8000)
    assert not network.lets(STRANGER, ROUTER, 40000)
    assert network.lets(ROUTER, OUTSIDE, 443)
    assert not network.lets(ROUTER, OUTSIDE, 8000)
