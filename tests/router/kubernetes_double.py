"""An API server that knows the pods of one namespace, over HTTP."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kmock

Object = dict[str, Any]


class ApiServer:
    """Pods of one namespace, and ways to misbehave."""

    def __init__(self, namespace: str = "serving") -> None:
        self.namespace = namespace
        self.pods: dict[str, Object] = {}
        self.list_takes_s = 0.0
        self.list_fails: kmock.KubernetesError | None = None
        self.lists = 0
        self.url = ""
        self._handler = kmock.KubernetesScaffold()
        self._handler[kmock.action.LIST, kmock.resource("", "v1", "pods")] << self._list

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ApiServer]:
        """Serve."""
        async with self._handler, kmock.Server(self._handler) as server:
            self.url = str(server.url).rstrip("/")
            yield self

    def kubeconfig(self, path: Path) -> Path:
        """Write one that leads here."""
        path.write_text(
            f"""apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: here, user: me, namespace: {self.namespace}}}}}]
clusters: [{{name: here, cluster: {{server: "{self.url}"}}}}]
users: [{{name: me, user: {{token: secret}}}}]
"""
        )
        return path

    def put(self, pod: Object) -> None:
        """Create or change a pod."""
        self.pods[pod["metadata"]["name"]] = copy.deepcopy(pod)

    def delete(self, name: str) -> None:
        """Remove a pod."""
        del self.pods[name]

    async def _list(self, request: kmock.Request) -> Object:
        self.lists += 1
        if request.namespace != self.namespace:
            raise kmock.KubernetesError(403, "Forbidden", "cannot list pods there")
        await asyncio.sleep(self.list_takes_s)
        if self.list_fails is not None:
            raise self.list_fails
        selector = request.params["labelSelector"]
        found = [pod for pod in self.pods.values() if _matches(pod, selector)]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}


def _matches(pod: Object, selector: str) -> bool:
    labels = pod["metadata"].get("labels", {})
    for term in selector.split(","):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def pod_of(
    name: str, url: str, role: str, uid: str = "", *, ready: bool = True, **labels: str
) -> Object:
    """A pod at the address of a node double, with what an API server tells beside."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    ports = [
        {"name": "metrics", "containerPort": 9},
        {"name": "http", "containerPort": int(port), "protocol": "TCP"},
    ]
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": uid or f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "kvrelay", "kvrelay/role": role, **labels},
        },
        "spec": {"containers": [{"name": "sidecar"}, {"name": "node", "ports": ports}]},
        "status": {
            "phase": "Running",
            "podIP": host.strip("[]"),
            "conditions": [
                {"type": "Initialized", "status": "True", "lastProbeTime": None},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }
