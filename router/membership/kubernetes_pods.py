"""Follows the pods of a Kubernetes namespace and tells the pool which nodes they are.

Pods are listed once a second. The first list is read from etcd (and in pages); later ones ask for
what is not older than the newest version seen, which the API server answers from memory (a page
limit would have older ones read etcd), and without going back in time, as version 0 may after one
server of several has fallen behind. A list costs the server our pods as JSON: those that match the
selector and have the label of the role.

An API server that is away, slow or refuses takes no node down: its last list stays, and each node's
health decides. The client is synchronous: it has a thread of its own. Only this file imports the
package `kubernetes`; `Pods` is pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from kvrelay.router.nodes.members import NodeSpec, Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, RequestError

__all__ = [
    "MODEL",
    "PORT",
    "PORT_NAME",
    "ROLE",
    "Pace",
    "Pod",
    "PodList",
    "PodNodes",
    "Pods",
    "follow_pods",
    "kubernetes_client",
    "listed_gauge",
]

ROLE = "kvrelay/role"
"""Label: prefill or decode."""
MODEL = "kvrelay/model"
"""Label, or annotation for names that a label cannot have: the model that the node must report."""
PORT = "kvrelay/port"
"""Annotation: the port of the node, instead of the container port named PORT_NAME."""
PORT_NAME = "http"

_PAGE = 500
_MAX_LIST_BYTES = 256 << 20
_LEAST_BACK_OFF_S = 0.25
_COMPLAIN_S = 30.0
_STOP_S = 1.0
_GONE, _TOO_NEW = 410, 504
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_log = logging.getLogger("kvrelay.router")


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    # Go writes null or leaves a field out.
    pass


class ObjectMeta(_Struct, frozen=True):
    """A pod's metadata."""

    name: str = ""
    uid: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ContainerPort(_Struct, frozen=True):
    """A port of a container."""

    container_port: int
    name: str | None = None


class Container(_Struct, frozen=True):
    """A container as it is wanted."""

    name: str
    ports: list[ContainerPort] | None = None


class ContainerStatus(_Struct, frozen=True):
    """A container as it is; `state` has one of `running`, `waiting` and `terminated`."""

    name: str
    state: dict[str, object] | None = None


class PodCondition(_Struct, frozen=True):
    """A condition of a pod, such as Ready."""

    type: str
    status: str


class PodSpec(_Struct, frozen=True):
    """A pod as it is wanted."""

    containers: list[Container] | None = None


class PodStatus(_Struct, frozen=True):
    """A pod as it is."""

    phase: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[PodCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class Pod(_Struct, frozen=True):
    """A pod. It is a node while it is Ready, not terminating, and labelled with a role."""

    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def serves(self) -> bool:
        """Return whether the pod may get new requests."""
        conditions = self.status.conditions or ()
        ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
        return ready and not self.terminating

    @property
    def terminating(self) -> bool:
        """Return whether the pod is to end; its process may still be there."""
        return self.metadata.deletion_timestamp is not None

    @property
    def ended(self) -> bool:
        """Return whether the node's process has ended, or has not begun."""
        if self.status.phase in ("Succeeded", "Failed"):
            return True
        named = self._named_port
        states = [
            each.state
            for each in self.status.container_statuses or ()
            if each.state is not None and (named is None or each.name == named[0])
        ]
        return bool(states) and all(state.get("running") is None for state in states)

    def node(self) -> NodeSpec:
        """Return the node that the pod is. Raises RequestError if it cannot be one."""
        metadata, address = self.metadata, self.status.pod_ip or ""
        labels, annotations = metadata.labels or {}, metadata.annotations or {}
        role = labels.get(ROLE, "")
        if role not in (Role.PREFILL, Role.DECODE):
            raise RequestError(f"its label {ROLE} must be prefill or decode, got {role!r}")
        if not address:
            raise RequestError("it has no address")
        host = f"[{address}]" if ":" in address else address
        model = annotations.get(MODEL) or labels.get(MODEL, "")
        return NodeSpec(f"http://{host}:{self._port(annotations)}", Role(role), model, metadata.uid)

    def _port(self, annotations: Mapping[str, str]) -> int:
        if (port := annotations.get(PORT)) is not None:
            if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
                raise RequestError(f"its annotation {PORT} must be a port, got {port!r}")
            return int(port)
        if self._named_port is None:
            raise RequestError(
                f"it has neither a container port named {PORT_NAME} nor an annotation {PORT}"
            )
        return self._named_port[1]

    @property
    def _named_port(self) -> tuple[str, int] | None:
        ports = (
            (container.name, port.container_port)
            for container in self.spec.containers or ()
            for port in container.ports or ()
            if port.name == PORT_NAME
        )
        return next(ports, None)


class ListMeta(_Struct, frozen=True):
    """A list's metadata. `more` asks for the next page."""

    resource_version: str = ""
    more: str | None = msgspec.field(default=None, name="continue")


class PodList(_Struct, frozen=True):
    """A list of pods, or a page of one."""

    metadata: ListMeta
    items: list[Pod] | None = None


_pod_list: msgspec.json.Decoder[PodList] = msgspec.json.Decoder(PodList)


@dataclass(frozen=True, slots=True)
class PodNodes:
    """A list of nodes that follow from all known pods."""

    nodes: tuple[NodeSpec, ...] = ()
    gone: frozenset[str] = frozenset()
    """Addresses that were nodes, whose process has ended since the last list."""
    complaints: tuple[str, ...] = ()
    """Pods that serve and cannot be nodes; each complaint comes once."""


class Pods:
    """A record of all pods that the selector matches, as they were listed last.

    A pod that has vanished proves its process's end only if it was terminating or ended before: one
    that has lost its label runs on. `gone` is told once, because others may get the address.
    """

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}
        self._named: dict[str, str] = {}
        """Addresses of pods that were nodes at some time and have not ended, by UID."""
        self._complaints: dict[str, str] = {}

    def listed(self, pods: Iterable[Pod]) -> PodNodes:
        """Return what follows if there are these pods, and no others."""
        before, self._pods = self._pods, {pod.metadata.uid: pod for pod in pods}
        ends: set[str | None] = set()
        for uid in before.keys() - self._pods.keys():
            address = self._named.pop(uid, None)
            if before[uid].terminating:
                ends.add(address)
        nodes: dict[str, NodeSpec] = {}
        complaints: dict[str, str] = {}
        # Of two pods at one address the younger one is there: an address is given away again when
        # its pod has ended.
        by_age = sorted(
            self._pods.items(),
            key=lambda item: (item[1].metadata.creation_timestamp or "", item[0]),
        )
        for uid, pod in by_age:
            if pod.ended:
                ends.add(self._named.pop(uid, None))
            elif pod.serves:
                try:
                    node = pod.node()
                except RequestError as why:
                    complaints[uid] = f"pod {pod.metadata.name} cannot be a node: {why.message}"
                    continue
                if self._named.get(uid) != node.url:
                    ends.add(self._named.get(uid))
                self._named[uid] = node.url
                nodes[node.url] = node
        new = tuple(said for uid, said in complaints.items() if self._complaints.get(uid) != said)
        self._complaints = complaints
        return PodNodes(tuple(nodes.values()), frozenset(filter(None, ends - nodes.keys())), new)


@dataclass(frozen=True, slots=True)
class Pace:
    """A set of times for listing, in seconds.

    A pod that is gone is named for relist_s and as long as two lists take: below 5 s with lists of
    up to 2 s.
    """

    relist_s: float = 1.0
    list_deadline_s: float = 10.0
    connect_s: float = 2.0
    most_back_off_s: float = 3.0


def listed_gauge(registry: CollectorRegistry) -> Gauge:
    """Return the metric of this file."""
    return Gauge(
        "kvrelay_router_kubernetes_listed_timestamp_seconds",
        "When the pods were last listed whole, as Unix time; 0: not yet.",
        registry=registry,
    )


@asynccontextmanager
async def follow_pods(
    pool: Pool, selector: str, namespace: str, registry: CollectorRegistry, pace: Pace | None = None
) -> AsyncIterator[None]:
    """Follow pods for the length of the block; with an empty selector do nothing.

    An empty namespace is the one that this process or its kubeconfig is in. Raises ConfigError.
    """
    if not selector:
        yield
        return
    api = await asyncio.to_thread(_Api, selector, namespace, pace or Pace())
    follower = _Follower(api, pool, listed_gauge(registry))
    thread = threading.Thread(target=follower.run, name="kubernetes", daemon=True)
    _log.info("nodes are the pods of namespace %s that match %s", api.namespace, api.selector)
    thread.start()
    try:
        yield
    finally:
        follower.stopped.set()
        await asyncio.to_thread(thread.join, _STOP_S)  # a daemon: it holds nobody up


class _Api:
    def __init__(self, selector: str, namespace: str, pace: Pace) -> None:
        settings, self.namespace = kubernetes_client(namespace)
        import kubernetes.client

        self.selector = f"{selector},{ROLE}"
        self.pace = pace
        self._list_pods = kubernetes.client.CoreV1Api(
            kubernetes.client.ApiClient(settings)
        ).list_namespaced_pod

    def listed(self, version: str) -> tuple[list[Pod], str]:
        """Return the pods, not older than `version` if there is one; and the list's version."""
        if version:
            page = self._page(resource_version=version, resource_version_match="NotOlderThan")
        else:
            page = self._page(limit=_PAGE)
        pods = list(page.items or ())
        while page.metadata.more:
            page = self._page(limit=_PAGE, _continue=page.metadata.more)
            pods += page.items or ()
        return pods, page.metadata.resource_version

    def _page(self, **asked: Any) -> PodList:
        until = time.monotonic() + self.pace.list_deadline_s
        body = bytearray()
        response = self._list_pods(
            self.namespace,
            label_selector=self.selector,
            _preload_content=False,
            _request_timeout=(self.pace.connect_s, self.pace.list_deadline_s),
            **asked,
        )
        with contextlib.closing(response):
            for piece in response.stream(1 << 20):
                body += piece
                if time.monotonic() > until:
                    raise TimeoutError(f"a list takes longer than {self.pace.list_deadline_s:g} s")
                if len(body) > _MAX_LIST_BYTES:
                    raise ValueError(
                        f"a list of more than {_MAX_LIST_BYTES} bytes; give a narrower selector"
                    )
        return _pod_list.decode(body)


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
    settings = kubernetes.client.Configuration()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            kubernetes.config.load_incluster_config(client_configuration=settings)
            own = (
                _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
                if _OWN_NAMESPACE.exists()
                else ""
            )
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
    settings.retries = False  # we do that
    return settings, namespace or own or "default"


class _Follower:
    def __init__(self, api: _Api, pool: Pool, listed: Gauge) -> None:
        self.stopped = threading.Event()
        self._api, self._pool, self._listed = api, pool, listed
        self._loop = asyncio.get_running_loop()
        self._pods = Pods()
        self._version = ""  # the newest that was seen
        self._found = PodNodes()
        self._failures = 0
        self._complained_at = -inf

    def run(self) -> None:
        wait_s = 0.0
        while not self.stopped.wait(wait_s):
            try:
                pods, self._version = self._api.listed(self._version)
                found = self._pods.listed(pods)
            except Exception as why:  # noqa: BLE001 - the edge of this thread: it must go on
                wait_s = self._failed(why)
                continue
            if self._failures:
                _log.info("the Kubernetes API server tells of its pods again")
            self._failures, self._complained_at = 0, -inf
            self._listed.set_to_current_time()
            for complaint in found.complaints:
                _log.warning("%s", complaint)
            if found.nodes != self._found.nodes or found.gone:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._tell_pool, found)
            self._found = found
            wait_s = self._api.pace.relist_s

    def _tell_pool(self, found: PodNodes) -> None:
        if not self.stopped.is_set():
            now = time.monotonic()
            self._pool.set_members(Source.KUBERNETES, found.nodes, now, found.gone)

    def _failed(self, why: Exception) -> float:
        self._failures += 1
        if getattr(why, "status", 0) in (_GONE, _TOO_NEW):
            self._version = ""
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            _log.warning(
                "the Kubernetes API server does not tell of its pods (%s); the %d nodes that it "
                "named stay, and their health decides; trying on",
                _shown(why),
                len(self._found.nodes),
            )
        longest = min(
            self._api.pace.most_back_off_s, _LEAST_BACK_OFF_S * 2 ** min(self._failures, 10)
        )
        return random.uniform(longest / 2, longest)


def _shown(why: Exception) -> str:
    if (status := getattr(why, "status", 0)) in (401, 403):
        return f"it answers {status}; the service account must be allowed to list pods"
    first = str(why).strip().partition("\n")[0][:300]
    return f"{type(why).__name__}: {first}"
