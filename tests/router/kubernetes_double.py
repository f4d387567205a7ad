"""An API server that knows pods and the scales of Deployments, and speaks as a real one does, over
HTTP.

kmock serves it: routes, status objects, streams. Its own emulator of objects knows no resource
versions (nor label selectors, pages, 410), and they are what is tested; so the store behind it is
here.
"""

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
    """Pods of one namespace, every change of them with its version, and ways to misbehave."""

    def __init__(self, namespace: str = "serving") -> None:
        self.namespace = namespace
        self.pods: dict[str, Object] = {}
        self.version = 1000
        self.pages_expire = False
        """A list that was begun cannot be gone on with: 410 Gone."""
        self.list_takes_s = 0.0
        self.list_fails: kmock.KubernetesError | None = None
        self.page = 500
        self.asked: list[tuple[str, dict[str, str]]] = []
        """What for, and with what."""
        self.url = ""
        self._transports: set[asyncio.BaseTransport] = set()
        self._handler = kmock.KubernetesScaffold()
        pods = kmock.resource("", "v1", "pods")
        self._handler[kmock.action.LIST, pods] << self._list
        self.scales: dict[str, int] = {}
        """Deployments by name, and how many pods each is to have."""
        self.scale_fails: dict[str, kmock.KubernetesError] = {}
        """By verb, or by verb and name: "put", "put kvrelay-decode"."""
        self.scale_answers_lost: set[str] = set()
        """Deployments of which a PUT is applied, and its answer never comes."""
        self._scale_versions: dict[str, int] = {}
        scales = kmock.resource("apps", "v1", "deployments"), kmock.subresource("scale")
        self._handler[kmock.method.GET, *scales] << self._scale
        self._handler[kmock.method.PUT, *scales] << self._rescale

    @asynccontextmanager
    async def running(self, port: int | None = None) -> AsyncIterator[ApiServer]:
        """Serve; when it ends, cut every connection."""
        async with self._handler, kmock.Server(self._handler, port=port) as server:
            self.url = str(server.url).rstrip("/")
            try:
                yield self
            finally:
                for transport in self._transports:
                    transport.abort()
                self._transports.clear()

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
        self.version += 1
        self.pods[pod["metadata"]["name"]] = copy.deepcopy(pod)

    def delete(self, name: str) -> None:
        """A pod is not there any more."""
        self.version += 1
        del self.pods[name]

    def count(self, verb: str) -> int:
        """How often it was asked for that."""
        return sum(asked == verb for asked, _ in self.asked)

    async def _list(self, request: kmock.Request) -> Object:
        params = self._begin("list", request)
        await asyncio.sleep(self.list_takes_s)
        if self.list_fails is not None:
            raise self.list_fails
        at, first = self.version, 0
        if "continue" in params:
            at, first = map(int, params["continue"].split(":"))
            if self.pages_expire:
                raise kmock.KubernetesError(410, "Expired", f"{at} is too old")
        elif int(params.get("resourceVersion") or 0) > self.version:
            raise kmock.KubernetesError(504, "Timeout", "Too large resource version")
        found = [
            pod for _, pod in sorted(self.pods.items()) if _matches(pod, params["labelSelector"])
        ]
        size = min(self.page, int(params.get("limit", "0")) or len(found))
        meta = {"resourceVersion": str(at)}
        if first + size < len(found):
            meta["continue"] = f"{at}:{first + size}"
        return {
            "kind": "PodList",
            "apiVersion": "v1",
            "metadata": meta,
            "items": found[first : first + size],
        }

    async def _scale(self, request: kmock.Request) -> Object:
        return self._scale_of(self._begin_scale("get", request))

    async def _rescale(self, request: kmock.Request) -> Object:
        name, wanted = self._begin_scale("put", request), request.data
        if wanted["metadata"]["resourceVersion"] != str(self._scale_versions.get(name, 1)):
            raise kmock.KubernetesError(409, "Conflict", "the object has been modified")
        self.rescale(name, wanted["spec"]["replicas"])
        if name in self.scale_answers_lost:
            self.scale_answers_lost.discard(name)
            raise kmock.KubernetesError(
                504, "Timeout", "request did not complete within the allotted duration"
            )
        return self._scale_of(name)

    def rescale(self, name: str, replicas: int) -> None:
        """As anybody may."""
        self.scales[name] = replicas
        self._scale_versions[name] = self._scale_versions.get(name, 1) + 1

    def _begin_scale(self, verb: str, request: kmock.Request) -> str:
        self._begin(verb, request)
        name = request.name or ""
        for case in (verb, f"{verb} {name}"):
            if case in self.scale_fails:
                raise self.scale_fails[case]
        if name not in self.scales:
            raise kmock.KubernetesError(404, "NotFound", f"deployments.apps {name} not found")
        return name

    def _scale_of(self, name: str) -> Object:
        meta = {
            "name": name,
            "namespace": self.namespace,
            "resourceVersion": str(self._scale_versions.get(name, 1)),
        }
        count = self.scales[name]
        about = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": meta}
        return about | {"spec": {"replicas": count} if count else {}, "status": {"replicas": count}}

    def _begin(self, verb: str, request: kmock.Request) -> dict[str, str]:
        if request._raw_request is not None and request._raw_request.transport is not None:
            self._transports.add(request._raw_request.transport)
        self.asked.append((verb, dict(request.params)))
        if request.namespace != self.namespace:
            raise kmock.KubernetesError(
                403, "Forbidden", f"cannot list pods in namespace {request.namespace}"
            )
        return dict(request.params)


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
            "ownerReferences": [{"kind": "ReplicaSet", "name": "x"}],
        },
        "spec": {
            "containers": [{"name": "sidecar"}, {"name": "node", "ports": ports}],
            "nodeName": "n1",
        },
        "status": {
            "phase": "Running",
            "podIP": host.strip("[]"),
            "conditions": [
                {"type": "Initialized", "status": "True", "lastProbeTime": None},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
            "containerStatuses": [
                {"name": "sidecar", "state": {"terminated": {"exitCode": 0}}},
                {
                    "name": "node",
                    "state": {"running": {"startedAt": "2026-01-01T00:00:01Z"}},
                    "restartCount": 0,
                },
            ],
        },
    }
