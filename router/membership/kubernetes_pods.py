"""Pods, as an API server tells of them -> the nodes that they are. Pure: knows no API server and no clock.

A pod is a node while it is Ready, not terminating, and says by its labels that it is one. Level-triggered: whatever
events were lost, after a list all is as the list says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from router.membership.members import NodeSpec
from wire.config import Role
from wire.errors import RequestError

__all__ = ["MODEL", "PORT", "PORT_NAME", "ROLE", "ListedPods", "Pod", "Pods", "Told", "WatchEvent"]

ROLE = "kvrelay/role"
"""Label: prefill or decode."""
MODEL = "kvrelay/model"
"""Label, or annotation for names that a label cannot have: the model that the node must report. May be missing."""
PORT = "kvrelay/port"
"""Annotation: the port of the node. Without it the container port of this name is taken:"""
PORT_NAME = "http"


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    """What is read of an object; the rest is skipped. Null and missing are the same: Go writes either."""


class ObjectMeta(_Struct, frozen=True):
    """metadata of a pod; of a bookmark, too, which has a version alone."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ContainerPort(_Struct, frozen=True):
    """A port that a container names."""

    container_port: int
    name: str | None = None


class Container(_Struct, frozen=True):
    """A container as it is wanted."""

    name: str
    ports: list[ContainerPort] | None = None


class ContainerState(_Struct, frozen=True):
    """One of these, or waiting."""

    running: dict[str, object] | None = None
    terminated: dict[str, object] | None = None
    waiting: dict[str, object] | None = None


class ContainerStatus(_Struct, frozen=True):
    """A container as it is."""

    name: str
    state: ContainerState | None = None


class PodCondition(_Struct, frozen=True):
    """Ready is one of them."""

    type: str
    status: str


class PodSpec(_Struct, frozen=True):
    """spec of a pod."""

    containers: list[Container] | None = None


class PodStatus(_Struct, frozen=True):
    """status of a pod."""

    phase: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[PodCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class Pod(_Struct, frozen=True):
    """One pod."""

    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def serves(self) -> bool:
        """Whether it may get new legs: Ready, and nobody has asked for its end."""
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions or ())
        return ready and not self.terminating and not self.ended

    @property
    def terminating(self) -> bool:
        """Its end was asked for; its process may still be there."""
        return self.metadata.deletion_timestamp is not None

    @property
    def ended(self) -> bool:
        """Its process is not there any more (or not yet)."""
        if self.status.phase in ("Succeeded", "Failed"):
            return True
        states = {each.name: each.state for each in self.status.container_statuses or () if each.state is not None}
        if (node := self._container_of_port()) is not None:
            states = {name: state for name, state in states.items() if name == node}
        return bool(states) and all(state.running is None for state in states.values())

    def node(self) -> NodeSpec:
        """The node that it is, whether it serves or not. Raises RequestError if it cannot be one."""
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
        if (said := annotations.get(PORT)) is not None:
            if not (said.isascii() and said.isdigit() and 0 < int(said[:6]) < 65536):
                raise RequestError(f"its annotation {PORT} must be a port, got {said!r}")
            return int(said)
        for container in self.spec.containers or ():
            for port in container.ports or ():
                if port.name == PORT_NAME:
                    return port.container_port
        raise RequestError(f"it has neither a container port named {PORT_NAME} nor an annotation {PORT}")

    def _container_of_port(self) -> str | None:
        for container in self.spec.containers or ():
            if any(port.name == PORT_NAME for port in container.ports or ()):
                return container.name
        return None


class ListMeta(_Struct, frozen=True):
    """metadata of a list. `more` asks for the next page."""

    resource_version: str = ""
    more: str | None = msgspec.field(default=None, name="continue")


class ListedPods(_Struct, frozen=True):
    """A list of pods, or a page of one."""

    metadata: ListMeta
    items: list[Pod] | None = None


class WatchEvent(_Struct, frozen=True):
    """One line of a watch. What `object` is depends on `type`."""

    type: str
    object: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Told:
    """What follows from all pods that are known."""

    nodes: tuple[NodeSpec, ...] = ()
    gone: frozenset[str] = frozenset()
    """Addresses that were nodes, whose process is known to have ended since the last time."""
    complaints: tuple[str, ...] = ()
    """Pods that serve and cannot be nodes; each complaint comes once."""


class Pods:
    """All pods that the selector matches, as far as they are known.

    That a pod is not there any more proves its process's end only if it was terminating or ended before: one that has
    lost its label runs on. `gone` is told once, because others may have the address by then.
    """

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}
        self._named: dict[str, str] = {}
        """Addresses of pods that were nodes at some time and have not ended, by UID."""
        self._ends: set[str] = set()
        self._complaints: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._pods)

    def listed(self, pods: Iterable[Pod]) -> None:
        """These pods are there, and no others."""
        now = {pod.metadata.uid: pod for pod in pods}
        for uid in self._pods.keys() - now.keys():
            self._forget(self._pods[uid])
        self._pods = now

    def seen(self, pod: Pod) -> None:
        """A pod is there, or has changed."""
        self._pods[pod.metadata.uid] = pod

    def deleted(self, pod: Pod) -> None:
        """A pod is not there any more, or does not match any more; `pod` is how it was last."""
        self._forget(pod)

    def told(self) -> Told:
        """What is to be told now."""
        nodes: dict[str, NodeSpec] = {}
        complaints: dict[str, str] = {}
        # Of two pods at one address the younger one is there: an address is given away again when its pod has ended.
        for uid, pod in sorted(
            self._pods.items(), key=lambda known: (known[1].metadata.creation_timestamp or "", known[0])
        ):
            if pod.ended:
                self._ends.update(filter(None, [self._named.pop(uid, None)]))
            elif pod.serves:
                try:
                    node = pod.node()
                except RequestError as why:
                    complaints[uid] = f"pod {pod.metadata.name} cannot be a node: {why.message}"
                    continue
                if self._named.get(uid, node.url) != node.url:
                    self._ends.add(self._named[uid])
                self._named[uid] = node.url
                nodes[node.url] = node
        new = tuple(said for uid, said in complaints.items() if self._complaints.get(uid) != said)
        self._complaints = complaints
        gone, self._ends = frozenset(self._ends - nodes.keys()), set()
        return Told(tuple(nodes.values()), gone, new)

    def _forget(self, last: Pod) -> None:
        uid = last.metadata.uid
        before = self._pods.pop(uid, last)
        address = self._named.pop(uid, None)
        if address is not None and any(pod.terminating or pod.ended for pod in (before, last)):
            self._ends.add(address)
