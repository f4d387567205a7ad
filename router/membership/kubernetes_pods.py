"""Pods, as an API server tells of them -> the nodes that they are. Pure: knows no API server and no
clock.

A pod is a node while it is Ready, not terminating, and says by its labels that it is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from kvrelay.router.nodes.members import NodeSpec
from kvrelay.wire.config import Role
from kvrelay.wire.errors import RequestError

__all__ = ["MODEL", "PORT", "PORT_NAME", "ROLE", "ListedPods", "Pod", "Pods", "Told"]

ROLE = "kvrelay/role"
"""Label: prefill or decode."""
MODEL = "kvrelay/model"
"""Label, or annotation for names that a label cannot have: the model that the node must report. May
be missing.
"""
PORT = "kvrelay/port"
"""Annotation: the port of the node. Without it the container port of this name is taken:"""
PORT_NAME = "http"


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    """A part of an object that is read; the rest is skipped. Null and missing are the same: Go
    writes either.
    """


class ObjectMeta(_Struct, frozen=True):
    """A pod's metadata."""

    name: str = ""
    uid: str = ""
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


class ContainerStatus(_Struct, frozen=True):
    """A container as it is."""

    name: str
    state: dict[str, object] | None = None
    """Has one of `running`, `waiting` and `terminated`."""


class PodCondition(_Struct, frozen=True):
    """A condition of a pod; Ready is one of them."""

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
    """A pod."""

    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def serves(self) -> bool:
        """Say whether it may get new legs: it is Ready, and nobody has asked for its end."""
        ready = any(
            each.type == "Ready" and each.status == "True" for each in self.status.conditions or ()
        )
        return ready and not self.terminating

    @property
    def terminating(self) -> bool:
        """Say whether its end was asked for; its process may still be there."""
        return self.metadata.deletion_timestamp is not None

    @property
    def ended(self) -> bool:
        """Say whether its process is not there any more (or not yet)."""
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
        """Return the node that it is, whether it serves or not. Raises RequestError if it cannot be
        one.
        """
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
            if not (said.isascii() and said.isdigit() and len(said) <= 5 and 0 < int(said) < 65536):
                raise RequestError(f"its annotation {PORT} must be a port, got {said!r}")
            return int(said)
        if self._named_port is None:
            raise RequestError(
                f"it has neither a container port named {PORT_NAME} nor an annotation {PORT}"
            )
        return self._named_port[1]

    @property
    def _named_port(self) -> tuple[str, int] | None:
        """Return the container that has the port of this name, and the port."""
        return next(
            (
                (container.name, port.container_port)
                for container in self.spec.containers or ()
                for port in container.ports or ()
                if port.name == PORT_NAME
            ),
            None,
        )


class ListMeta(_Struct, frozen=True):
    """A list's metadata. `more` asks for the next page."""

    resource_version: str = ""
    more: str | None = msgspec.field(default=None, name="continue")


class ListedPods(_Struct, frozen=True):
    """A list of pods, or a page of one."""

    metadata: ListMeta
    items: list[Pod] | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """A summary of what follows from all pods that are known."""

    nodes: tuple[NodeSpec, ...] = ()
    gone: frozenset[str] = frozenset()
    """Addresses that were nodes, whose process is known to have ended since the last time."""
    complaints: tuple[str, ...] = ()
    """Pods that serve and cannot be nodes; each complaint comes once."""


class Pods:
    """A record of all pods that the selector matches, as they were listed last.

    That a pod is not there any more proves its process's end only if it was terminating or ended
    before: one that has lost its label runs on. `gone` is told once, because others may have the
    address by then.
    """

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}
        self._named: dict[str, str] = {}
        """Addresses of pods that were nodes at some time and have not ended, by UID."""
        self._complaints: dict[str, str] = {}

    def listed(self, pods: Iterable[Pod]) -> Told:
        """Say what follows if these pods are there, and no others."""
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
        for uid, pod in sorted(
            self._pods.items(),
            key=lambda known: (known[1].metadata.creation_timestamp or "", known[0]),
        ):
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
        return Told(tuple(nodes.values()), frozenset(filter(None, ends - nodes.keys())), new)
