"""Lists the pods of a Kubernetes namespace once a second and tells the pool which nodes they are.

An API server that is away, slow or refuses takes no node down: its last list stays, and each node's
health decides. The client is synchronous: it has a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from kvrelay.router.nodes.members import NodeSpec, Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, RequestError

__all__ = ["follow_pods", "kubernetes_client", "listed_gauge", "node_of", "nodes_of"]

_ROLE = "kvrelay/role"  # a label
_MODEL = "kvrelay/model"  # a label, or an annotation for names that a label cannot have
_PORT = "kvrelay/port"  # an annotation, instead of the container port of this name:
_PORT_NAME = "http"

RELIST_S = 1.0
# To connect, and between two pieces of a list.
DEADLINES_S = 2.0, 10.0
_COMPLAIN_S = 30.0
_STOP_S = 1.0
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_log = logging.getLogger("kvrelay.router")
_Pod = dict[str, Any]


def node_of(pod: _Pod) -> NodeSpec | None:
    """Return the node that a pod is while it is Ready and not terminating.

    Raises RequestError if it cannot be one.
    """
    # Go writes null or leaves a field out.
    metadata, spec, status = (pod.get(part) or {} for part in ("metadata", "spec", "status"))
    labels, annotations = (metadata.get(part) or {} for part in ("labels", "annotations"))
    ready = any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in status.get("conditions") or ()
    )
    ended = status.get("phase") in ("Succeeded", "Failed") or metadata.get("deletionTimestamp")
    if ended or not ready:
        return None
    role = labels.get(_ROLE, "")
    if role not in (Role.PREFILL, Role.DECODE):
        raise RequestError(f"its label {_ROLE} must be prefill or decode, got {role!r}")
    host = status.get("podIP")
    if not host:
        raise RequestError("it has no address")
    named = (
        port["containerPort"]
        for container in spec.get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("name") == _PORT_NAME
    )
    port = annotations.get(_PORT) or next(named, None)
    if port is None:
        raise RequestError(
            f"it has neither a container port named {_PORT_NAME} nor an annotation {_PORT}"
        )
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    model = annotations.get(_MODEL) or labels.get(_MODEL, "")
    return NodeSpec(url, Role(role), model, metadata["uid"])


def nodes_of(pods: Iterable[_Pod]) -> tuple[dict[str, NodeSpec], set[str]]:
    nodes: dict[str, NodeSpec] = {}
    complaints: set[str] = set()
    # Of two pods at one address the younger one is there: an address is given away again when its
    # pod has ended.
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or ""):
        try:
            node = node_of(pod)
        except RequestError as why:
            complaints.add(f"pod {pod['metadata']['name']} cannot be a node: {why.message}")
            continue
        if node is not None:
            nodes[node.url] = node
    return nodes, complaints


def listed_gauge(registry: CollectorRegistry) -> Gauge:
    return Gauge(
        "kvrelay_router_kubernetes_listed_timestamp_seconds",
        "When the pods were last listed whole, as Unix time; 0: not yet.",
        registry=registry,
    )


@asynccontextmanager
async def follow_pods(
    pool: Pool, selector: str, namespace: str, registry: CollectorRegistry
) -> AsyncIterator[None]:
    """Follow pods for the length of the block; with an empty selector do nothing.

    An empty namespace is the one that this process or its kubeconfig is in. Raises ConfigError.
    """
    if not selector:
        yield
        return
    settings, namespace = await asyncio.to_thread(kubernetes_client, namespace)
    follower = _Follower(pool, settings, namespace, f"{selector},{_ROLE}", listed_gauge(registry))
    thread = threading.Thread(target=follower.run, name="kubernetes", daemon=True)
    _log.info("nodes are the pods of namespace %s that match %s", namespace, selector)
    thread.start()
    try:
        yield
    finally:
        follower.stopped.set()
        await asyncio.to_thread(thread.join, _STOP_S)  # a daemon: it holds nobody up


def kubernetes_client(namespace: str) -> tuple[Any, str]:
    """Return the client's settings, and the namespace; an empty one is our own.

    Asks nobody. Raises ConfigError if there is no client, or no API server is known.
    """
    try:
        import kubernetes.client
        import kubernetes.config
    except ImportError as why:
        raise ConfigError(
            f"asking a Kubernetes API server takes the package kubernetes ({why}); run: "
            "pip install 'kvrelay[kubernetes]'"
        ) from why
    settings, own = kubernetes.client.Configuration(), ""
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            kubernetes.config.load_incluster_config(client_configuration=settings)
            if _OWN_NAMESPACE.exists():
                own = _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
        else:
            file = os.environ.get("KUBECONFIG")  # the client reads it only when it is imported
            kubernetes.config.load_kube_config(config_file=file, client_configuration=settings)
            context = kubernetes.config.list_kube_config_contexts(config_file=file)[1]["context"]
            own = context.get("namespace", "")
    except (kubernetes.config.ConfigException, OSError) as why:
        raise ConfigError(
            f"a Kubernetes API server is to be asked, and none is known: {why}; run the router in "
            f"a pod with a service account, or set KUBECONFIG"
        ) from why
    settings.retries = False  # the next list is one
    return settings, namespace or own or "default"


class _Follower:
    def __init__(
        self, pool: Pool, settings: Any, namespace: str, selector: str, listed: Gauge
    ) -> None:
        import kubernetes.client

        client: Any = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(settings))
        self._list_pods: Callable[[], Any] = lambda: client.list_namespaced_pod(
            namespace,
            label_selector=selector,
            _preload_content=False,  # the client's own types would be made of each pod
            _request_timeout=DEADLINES_S,
        )
        self.stopped = threading.Event()
        self._pool, self._listed = pool, listed
        self._loop = asyncio.get_running_loop()
        self._nodes: dict[str, NodeSpec] = {}
        self._complaints: set[str] = set()
        self._complained_at = -inf

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                self._list()
            except Exception as why:  # noqa: BLE001 - the edge of this thread: it must go on
                self._complain(why)
            self.stopped.wait(RELIST_S)

    def _list(self) -> None:
        pods = msgspec.json.decode(self._list_pods().data)["items"] or ()
        nodes, complaints = nodes_of(pods)
        self._listed.set_to_current_time()
        self._complained_at = -inf
        for complaint in complaints - self._complaints:
            _log.warning("%s", complaint)
        self._complaints = complaints
        if nodes != self._nodes:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell_pool, nodes)

    def _tell_pool(self, nodes: dict[str, NodeSpec]) -> None:
        if not self.stopped.is_set():
            self._pool.set_members(Source.KUBERNETES, nodes.values(), time.monotonic())
            self._nodes = nodes

    def _complain(self, why: Exception) -> None:
        now = time.monotonic()
        if now - self._complained_at < _COMPLAIN_S:
            return
        self._complained_at = now
        said = f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0][:300]}"
        if (status := getattr(why, "status", 0)) in (401, 403):
            said = f"it answers {status}; the service account must be allowed to list pods"
        _log.warning(
            "the Kubernetes API server does not tell of its pods (%s); the %d nodes that it named "
            "stay, and their health decides; trying on",
            said,
            len(self._nodes),
        )
