"""One node as the router knows it: what it says of itself, its load, and the places on it that legs have.

Keeps its own sums up to date, so that a choice among many nodes copies nothing. Opens no connection, reads no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from router.nodes.credit import Credit, Reservation, blocks_of
from router.nodes.rates import NodeRates
from router.nodes.standing import Standing
from router.policies.policy import NodeView
from router.prefix.index import Sent
from wire.config import Role
from wire.kv_events import KvEventsReport
from wire.outputs import Load
from wire.step_costs import StepCosts
from wire.transfer import KvFacts
from wire.versions import LEGS, Versions

__all__ = ["DRAINING", "NEW", "HealthReport", "Lease", "Node", "NodeKind"]

DRAINING = "draining"
"""What a node says that takes nothing new and ends what it has."""
NEW = "not checked yet"
"""Why a node takes no legs before its first health check."""
# What others have on a node is reckoned as what they usually have there, and only a part of what the newest report says
# beyond: it is old when it is used, and routers that all believe it run to the same node together. With more than a
# quarter, eight routers whose news is 0.5 s old place worse than if they knew of nobody but themselves, with none much
# worse than they could with fresh news (python -m benchmarks.simulate --scale).
_NEWS_BELIEVED = 0.1
_NEW_IN_USUAL = 0.05


class NodeKind(enum.StrEnum):
    """Whose node it is, and by which contract it hands over: only nodes of one kind can be a pair."""

    KVRELAY = "kvrelay"
    VLLM = "vllm"
    VLLM_P2P_NCCL = "vllm-p2p-nccl"


class HealthReport(msgspec.Struct, frozen=True):
    """The 200 answer of a node's GET /health, or what was found out of one that answers with less."""

    role: Role
    model: str
    status: str = "ok"
    max_model_len: int = 0
    engine_id: str = ""
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
    """The oldest version of the leg stream that it speaks; 0: none. Routers of version 1 want theirs here."""
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
    """What a step with prompts takes at most there beside requests that decode; 0: it has no such limit."""

    @property
    def leg_versions(self) -> Versions | None:
        """Those of the leg stream that it speaks."""
        return Versions(self.leg_stream, max(self.leg_stream, self.leg_stream_newest)) if self.leg_stream else None

    @property
    def leg_version(self) -> int | None:
        """The one that it and this router speak with each other; None: it speaks no leg stream, or none of ours."""
        return None if self.leg_versions is None else LEGS.common(self.leg_versions)

    @property
    def unspoken(self) -> str | None:
        """Why no leg can go there, of a node whose leg streams are all of other versions than ours."""
        if self.leg_versions is None or self.leg_version is not None:
            return None
        older = "router" if self.leg_versions.oldest > LEGS.newest else "node"
        return (
            f"it speaks version {self.leg_versions} of the leg stream and this router {LEGS}: upgrade the {older}, one "
            "release at a time"
        )

    @property
    def draining(self) -> bool:
        """It takes nothing new and ends what it has: a 503 with a report."""
        return self.status == DRAINING


@dataclass(eq=False, slots=True)
class Lease:
    """One leg's place on a node. `tokens` are those that the node must compute before it can answer."""

    node: Node
    tokens: int
    kv_tokens: int = 0
    """Of KV that the node is likely to need for it in all."""
    room: Reservation = field(default_factory=Reservation)
    sent: Sent | None = None
    """What the prefix index was told of it, while it runs."""
    company: int = 0
    """Requests that were there before it."""
    expected_queue_ms: float = 0.0
    """How long it was expected to wait for its turn."""
    cached_tokens: int = 0
    """Of the prompt, which the node was believed to have when it was chosen."""
    cut: Callable[[], None] | None = None
    """Called when the node is lost while the leg runs."""
    role: Role = field(init=False)
    """The node's when the leg began; it may have another one before the leg ends."""
    rates: NodeRates = field(init=False)
    """The node's in that role."""
    generation: str = field(init=False)
    """Of the node's process when the leg began."""

    def __post_init__(self) -> None:
        self.role, self.rates, self.generation = self.node.role, self.node.rates, self.node.generation

    @property
    def running(self) -> float:
        """Requests that have run there on average while this leg did, which is one of them all the time; of the others
        as many as there were at its beginning and are now. To be asked before it is given back."""
        return 1 + (self.company + max(0, self.node.requests - 1)) / 2

    @property
    def shared(self) -> bool:
        """Whether its prompt may have been computed in steps with others. To be asked before it is given back."""
        return self.company > 0 or self.node.requests > 1

    @property
    def beside(self) -> int:
        """Requests that decoded when its prompt was computed, which was when it came."""
        return self.company if self.role is Role.DECODE else 0


@dataclass(eq=False, slots=True, kw_only=True)
class Node(NodeView):
    """One node as the router knows it. `foreign_*` is what others are reckoned to have there: not our own legs."""

    role: Role
    flips_to: Role | None = None
    """It is changing its role to this one."""
    rates_as: dict[Role, NodeRates] = field(default_factory=dict)
    """How fast it was in another role."""
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
    """When an adapter was last loaded or unloaded here through this router: older reports do not know of it."""
    max_model_len: int = 0
    engine_id: str = ""
    generation: str = ""
    drain_asked: bool = False
    """An operator drains it through this router, and it has not been told itself: until it is asked to end that, or
    another process stands there."""
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
    foreign_requests: int = 0
    foreign_tokens: int = 0
    foreign_now: tuple[int, int] = (0, 0)
    """Of both, what the newest report has, too."""
    usual_requests: float | None = None
    usual_tokens: float = 0.0
    """What others have had there of late; no requests: nothing was reported yet."""
    certain_requests: int = 0
    certain_tokens: int = 0
    """As `requests` and `tokens`, but of others no more than the newest report has: what they usually have and have not
    now is a reason to choose another node, and none to refuse."""
    leases: set[Lease] = field(default_factory=set)
    own_tokens: int = 0
    """Sum over the leases."""
    credit: Credit = field(default_factory=Credit)
    kv: KvFacts | None = None
    standing: dict[Role, Standing] = field(default_factory=dict)
    """By kind of leg; kept by router/nodes/doors.py."""

    def take_role(self, role: Role) -> None:
        """Serve this role from now on. Legs of the other one go on; what is known of the node by legs stays."""
        self.rates_as[self.role] = self.rates
        self.rates = self.rates_as.pop(role, NodeRates())
        self.role, self.flips_to = role, None
        self.begins_anew()

    def begins_anew(self) -> None:
        """It is another process, or does another work: what others usually had there says nothing any more."""
        self.usual_requests = None

    @property
    def computes_prompts(self) -> bool:
        """Of a decode node, whether it does if asked."""
        return self.kv is not None and self.kv.computes_prompts

    def serves(self, base: str, name: str) -> bool:
        """Whether requests for `name`, the model `base` or an adapter of it, can run here."""
        return self.model == base and (name == base or name in self.adapters)

    def note_load(self, load: Load) -> None:
        """Take over a reported load. What we sent ourselves is in it and is not counted twice."""
        self.load = load
        requests = load.running + load.waiting - len(self.leases)
        tokens = load.waiting_tokens - self.own_tokens
        if self.usual_requests is None:
            self.usual_requests, self.usual_tokens = requests, tokens
        usual_requests = self.usual_requests + _NEW_IN_USUAL * (requests - self.usual_requests)
        usual_tokens = self.usual_tokens + _NEW_IN_USUAL * (tokens - self.usual_tokens)
        self.usual_requests, self.usual_tokens = usual_requests, usual_tokens
        self.foreign_requests = max(0, round(usual_requests + _NEWS_BELIEVED * (requests - usual_requests)))
        self.foreign_tokens = max(0, round(usual_tokens + _NEWS_BELIEVED * (tokens - usual_tokens)))
        self.foreign_now = max(0, min(self.foreign_requests, requests)), max(0, min(self.foreign_tokens, tokens))
        self.context_tokens = load.context_tokens
        self.credit.reported()
        self._sum_up()

    def take(self, lease: Lease) -> None:
        """Count a leg of ours, from now on."""
        self.leases.add(lease)
        self.own_tokens += lease.tokens
        if self.load.block_size:
            lease.room = self.credit.reserve(blocks_of(lease.kv_tokens, self.load.block_size))
        self._sum_up()

    def give_back(self, lease: Lease) -> None:
        """It has ended."""
        if lease in self.leases:
            self.leases.discard(lease)
            self.own_tokens -= lease.tokens
            self.credit.give_back(lease.room)
            self._sum_up()

    def answered(self, lease: Lease, kv_tokens: int) -> None:
        """The leg tells of its first token: nothing is to be computed, and the node has KV of so many tokens for it."""
        self.own_tokens -= lease.tokens
        lease.tokens = 0
        self.grown(lease, kv_tokens)
        self._sum_up()

    def grown(self, lease: Lease, kv_tokens: int) -> None:
        """The leg has KV of so many tokens by now."""
        if self.load.block_size:
            self.credit.holds(lease.room, blocks_of(kv_tokens, self.load.block_size))

    def _sum_up(self) -> None:
        """Our own legs, exact, plus what others were seen to have there."""
        self.requests = len(self.leases) + self.foreign_requests
        self.tokens = self.own_tokens + self.foreign_tokens
        requests, tokens = self.foreign_now
        self.certain_requests, self.certain_tokens = len(self.leases) + requests, self.own_tokens + tokens
        if self.load.block_size:
            self.kv_room = self.credit.left(self.load.free_blocks) * self.load.block_size
