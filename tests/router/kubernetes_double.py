"""An API server that knows the pods of one namespace, over HTTPS."""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.cluster.certificates import authority, signed

Object = dict[str, Any]


class ApiServer:
    """Pods of one namespace, and ways to misbehave."""

    def __init__(self, namespace: str = "serving") -> None:
        self.namespace = namespace
        self.pods: dict[str, Object] = {}
        self.list_takes_s = 0.0
        self.list_fails = 0
        self.lists = 0
        self.env: dict[str, str] = {}
        """Variables by which a pod finds it."""

    @asynccontextmanager
    async def running(self, account: Path) -> AsyncIterator[ApiServer]:
        """Serve; the folder becomes that of a pod's service account."""
        account.mkdir()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*signed(authority(account), "api"))
        (account / "ca.pem").rename(account / "ca.crt")
        (account / "token").write_text("secret\n")
        (account / "namespace").write_text(f"{self.namespace}\n")
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._list)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
            host, port = runner.addresses[0]
            self.env = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
            yield self
        finally:
            await runner.cleanup()

    def put(self, pod: Object) -> None:
        """Create or change a pod."""
        self.pods[pod["metadata"]["name"]] = copy.deepcopy(pod)

    def delete(self, name: str) -> None:
        """Remove a pod."""
        del self.pods[name]

    async def _list(self, request: web.Request) -> web.Response:
        self.lists += 1
        if request.headers["authorization"] != "Bearer secret":
            return web.Response(status=401)
        if request.match_info["namespace"] != self.namespace:
            return web.Response(status=403)
        await asyncio.sleep(self.list_takes_s)
        if self.list_fails:
            return web.Response(status=self.list_fails, headers={"location": str(request.url)})
        selector = request.query["labelSelector"]
        found = [pod for pod in self.pods.values() if _matches(pod, selector)]
        return web.json_response({"kind": "PodList", "items": found})


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
