"""One node as the router knows it: what it says of itself, its load, and the places on it that legs
have.

Keeps its own sums up to date, so that a choice among many nodes copies nothing. Opens no
connection, reads no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import msgspec

from kvrelay.router.node_load import NodeLoad, Share
from kvrelay.router.nodes.breaker import Breaker
from kvrelay.router.nodes.fates import Fates
from kvrelay.router.prefix.index import Sent
from kvrelay.wire.config import Role
from kvrelay.wire.kv_events import KvEventsReport
from kvrelay.wire.outputs import Load
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import KvFacts
from kvrelay.wire.versions import LEGS, Versions

__all__ = ["DRAINING", "NEW", "HealthReport", "Lease", "News", "Node", "NodeKind", "NodeNews"]

DRAINING = "draining"
"""What a node says that takes nothing new and ends what it has."""
NEW = "not checked yet"
"""Why a node takes no legs before its first health check."""


class NodeKind(enum.StrEnum):
    """A make of node, and the contract by which it hands over: only nodes of one kind can be a
    pair.
    """

    KVRELAY = "kvrelay"
    VLLM = "vllm"
    VLLM_P2P_NCCL = "vllm-p2p-nccl"


News = Literal["ended", "emptied", "drains", "flips", "loaded", "unloaded"]


class NodeNews(msgspec.Struct, frozen=True, array_like=True):
    """An event of a node, or a word of it or of an operator: for other processes of this router."""

    number: int
    what: News
    url: str
    word: str = ""
    """The adapter that was loaded or unloaded, or the role that it is to have."""


class HealthReport(msgspec.Struct, frozen=True):
    """A node's 200 answer to GET /health, or what was found out of one that answers with less."""

    role: Role
    model: str
    status: str = "ok"
    max_model_len: int = 0
    generation: str = ""
    load: Load = Load()
    adapters: list[str] = []
    kv: KvFacts | None = None
    kv_events: KvEventsReport | None = None
    kind: NodeKind = NodeKind.KVRELAY
    aliases: list[str] = []
    """Of `adapters` of a vLLM node, those that are further names of its model."""
    engines: int = 1
    """Of a vLLM node, those behind its address; each has a prefix cache of its own."""
    held_blocks: int = 0
    leg_stream: int = 0
    """The oldest version of the leg stream that it speaks; 0: none. Routers of version 1 want
    theirs here.
    """
    leg_stream_newest: int = 0
    """The newest; 0 says nothing: then it is the oldest."""
    release: str = ""
    """Of kvrelay."""
    pod_uid: str = ""
    """Of the Kubernetes pod that it runs in, if it was told."""
    flips: int = 0
    """How often its role has changed while it ran."""
    flips_to: Role | None = None
    """The role that it is changing to: it takes nothing new, and ends what it has."""
    costs: StepCosts | None = None
    """What its steps cost, as it has measured them when it started."""
    max_gap_ms: float = 0.0
    """What a step with prompts takes at most there beside requests that decode; 0: it has no such
    limit.
    """

    @property
    def leg_versions(self) -> Versions | None:
        """Return those of the leg stream that it speaks."""
        return (
            Versions(self.leg_stream, max(self.leg_stream, self.leg_stream_newest))
            if self.leg_stream
            else None
        )

    @property
    def leg_version(self) -> int | None:
        """Return the one that it and this router speak with each other. None: it speaks none, or
        none of ours.
        """
        return None if self.leg_versions is None else LEGS.common(self.leg_versions)

    @property
    def unspoken(self) -> str | None:
        """Return why no leg can go there, of a node whose leg streams are all of other versions
        than ours.
        """
        if self.leg_versions is None or self.leg_version is not None:
            return None
        older = "router" if self.leg_versions.oldest > LEGS.newest else "node"
        return (
            f"it speaks version {self.leg_versions} of the leg stream and this router {LEGS}: "
            f"upgrade the {older}, one "
            "release at a time"
        )

    @property
    def draining(self) -> bool:
        """Say whether it takes nothing new and ends what it has: a 503 with a report."""
        return self.status == DRAINING


@dataclass(eq=False, slots=True)
class Lease:
    """A leg's place on a node."""

    node: Node
    tokens: int = 0
    """To compute before it can answer."""
    share: Share = field(default_factory=Share)
    cached_tokens: int = 0
    """Of the prompt, which the node was believed to have when it was chosen."""
    sent: Sent | None = None
    """What the prefix index was told of it, while it runs."""
    cut: Callable[[], None] | None = None
    """Called when the node is lost while the leg runs."""
    role: Role = field(init=False)
    """The node's when the leg began; it may have another one before the leg ends."""
    generation: str = field(init=False)
    """Of the node's process when the leg began."""

    def __post_init__(self) -> None:
        self.role, self.generation = self.node.role, self.node.generation

    def answered(self) -> None:
        """Note that the leg has told of a token: nothing is to be computed before it any more."""
        self.node.state.first_token(self.share)

    def note_load(self, load: Load) -> None:
        """Take over what the node says of itself as it answers this leg."""
        self.share.number = self.share.number or load.leg
        self.node.note_load(load)


@dataclass(eq=False, slots=True)
class Node:
    """A node as the router knows it."""

    url: str
    role: Role
    turn: int = 0
    """When it was last chosen: the number of that choice, counted from 1."""
    state: NodeLoad = field(init=False)
    """As placement sees it."""
    flips_to: Role | None = None
    """It is changing its role to this one."""
    kind: NodeKind = NodeKind.KVRELAY
    p2p_address: str = ""
    """Of a vLLM node with a P2pNcclConnector: host and port of its ZMQ socket, as it has told."""
    up: bool = False
    since: float = 0.0
    reason: str = NEW
    wanted: bool = True
    """Some source names it. One that is not wanted any more only ends the legs that it has."""
    model: str = ""
    adapters: frozenset[str] = frozenset()
    adapters_at: float = float("-inf")
    """When an adapter was last loaded or unloaded here through this router: older reports do not
    know of it.
    """
    max_model_len: int = 0
    generation: str = ""
    fates: Fates = field(default_factory=Fates)
    """Of the processes at its address."""
    drain_asked: bool = False
    """An operator drains it through this router, and it has not been told itself: until it is asked
    to end that, or another process stands there.
    """
    held_blocks: int = 0
    """Of KV on a prefill node that no decode node has fetched yet, as it was last told."""
    release: str = ""
    leg_version: int = 1
    """Of the legs that it and this router speak with each other."""
    misses: int = 0
    missed_at: float = float("-inf")
    """When the last of them was noticed."""
    blamed_at: float = float("-inf")
    reported_at: float = float("-inf")
    """When the newest health check began that it has answered with a report."""
    load: Load = field(default_factory=Load)
    leases: set[Lease] = field(default_factory=set)
    kv: KvFacts | None = None
    breakers: dict[Role, Breaker] = field(default_factory=dict)
    """By kind of leg; kept by router/nodes/doors.py."""

    def __post_init__(self) -> None:
        self.state = NodeLoad(self.url)

    @property
    def depth(self) -> float:
        """Return its queue, in requests; prompts that wait count by their length."""
        return self.state.depth

    @property
    def computes_prompts(self) -> bool:
        """Say whether a decode node computes prompts if asked; another project's does."""
        return self.kv is None or self.kv.computes_prompts

    def serves(self, base: str, name: str) -> bool:
        """Say whether requests for `name`, the model `base` or an adapter of it, can run here."""
        return self.model == base and (name == base or name in self.adapters)

    def note_load(self, load: Load) -> None:
        """Take over a reported load, unless it says what no node can have."""
        if not all(0 <= getattr(load, name) < inf for name in Load.__struct_fields__):
            return
        self.load = load
        self.state.announced(load)
