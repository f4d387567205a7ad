"""One node as the router knows it: who names it, its reports, its load, its requests. Pure.

Sources of membership are level-triggered: a source gives its whole list, as often as it likes, and
a lost message is mended by the next one. A node stays for as long as any source names it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

import msgspec

from kvrelay.router.node_load import UNKNOWN, NodeLoad, Share
from kvrelay.router.prefix.index import Sent
from kvrelay.wire.config import Role
from kvrelay.wire.config_checks import MAX_URL_CHARS, is_base_url, is_loopback
from kvrelay.wire.errors import RequestError
from kvrelay.wire.outputs import Load
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import KvFacts, KvTransferParams
from kvrelay.wire.versions import LEGS, Versions

__all__ = [
    "DRAINING",
    "DRAINS",
    "FAILURES_IN_A_ROW",
    "NEW",
    "OPEN_CAP_S",
    "Breaker",
    "BreakerState",
    "HealthReport",
    "Lease",
    "Node",
    "NodeKind",
    "NodeSpec",
    "Source",
    "VllmHandover",
    "State",
    "kv_mismatch",
    "static_nodes",
]

DRAINING = "draining"
"""The status of a node that takes nothing new and finishes what it has."""
_SAME_HOST_PLANE = "direct"
DRAINS, NEW = "it is draining", "not checked yet"
FAILURES_IN_A_ROW = 5
OPEN_CAP_S = 60.0


class Source(enum.StrEnum):
    """A source of membership; where two disagree about a role, the first here counts."""

    STATIC = "static"
    KUBERNETES = "kubernetes"
    HEARTBEATS = "heartbeats"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node that a source names. Raises RequestError for a bad address or role.

    `generation`: the UID of its pod, if any.
    """

    url: str
    role: Role
    generation: str = ""

    def __post_init__(self) -> None:
        if not is_base_url(self.url):
            raise RequestError(
                f"node address {self.url[:MAX_URL_CHARS]!r} must be http:// or https://, a host "
                f"and a port, within {MAX_URL_CHARS} characters",
                param="url",
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))
        if self.role not in (Role.PREFILL, Role.DECODE):
            raise RequestError(f"role must be prefill or decode, got {self.role}", param="role")


def static_nodes(prefill: Iterable[str], decode: Iterable[str]) -> list[NodeSpec]:
    return [
        *(NodeSpec(url, Role.PREFILL) for url in prefill),
        *(NodeSpec(url, Role.DECODE) for url in decode),
    ]


class NodeKind(enum.StrEnum):
    """A make of node, and its hand-over contract: a pair consists of two nodes of one kind."""

    KVRELAY = "kvrelay"
    VLLM = "vllm"


class VllmHandover(KvTransferParams, kw_only=True):
    """A set of hand-over parameters, of which `own` go to the decode node byte for byte."""

    own: msgspec.Raw


class HealthReport(msgspec.Struct, frozen=True):
    """A node's answer to GET /health, or what was learnt otherwise."""

    role: Role
    model: str
    status: str = "ok"
    max_model_len: int = 0
    generation: str = ""
    load: Load = Load()
    adapters: list[str] = []
    kv: KvFacts | None = None
    kind: NodeKind = NodeKind.KVRELAY
    held_blocks: int = 0
    leg_stream: int = LEGS.oldest
    """The oldest version of the request stream that the node speaks."""
    leg_stream_newest: int = 0
    """The newest version; 0 stands for the oldest."""
    release: str = ""
    pod_uid: str = ""
    flips: int = 0
    flips_to: Role | None = None
    costs: StepCosts | None = None
    max_gap_ms: float = 0.0
    """The longest step with prompts beside requests that decode; 0: no limit."""

    @property
    def legs(self) -> Versions:
        return Versions(self.leg_stream, max(self.leg_stream, self.leg_stream_newest))

    @property
    def leg_version(self) -> int | None:
        return LEGS.common(self.legs)

    @property
    def draining(self) -> bool:
        return self.status == DRAINING


class State(enum.StrEnum):
    """A breaker's state: CLOSED lets requests through, OPEN none, HALF_OPEN one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerState(msgspec.Struct, frozen=True):
    state: str
    reason: str = ""
    opens_in_s: float = 0.0


class Breaker:
    """A circuit breaker of a node. Times are seconds of one monotonic clock.

    Closed until FAILURES_IN_A_ROW requests have failed; then open for a second, and after each
    failed trial twice as long; then half-open: one request at a time is a trial, whose success
    closes it. Only a node's own faults count: never a 4xx, a refusal, or a client that left. Prior
    art: Nygard, Release It! (2007).
    """

    def __init__(self) -> None:
        self._why = ""  # of the last opening
        self._failures = 0  # in a row
        self._open_until = self._resting_until = -inf
        self._trial: object = None

    def state(self, now: float) -> State:
        if self._failures < FAILURES_IN_A_ROW:
            return State.CLOSED
        return State.OPEN if now < self._open_until else State.HALF_OPEN

    def may_take(self, now: float, *, last: bool = False) -> bool:
        """Return whether a request may go to the node; `last` if no other node is left."""
        if now < self._resting_until:
            return False
        may_try = last or now >= self._open_until
        return self._failures < FAILURES_IN_A_ROW or (may_try and self._trial is None)

    def is_troubled(self, now: float) -> bool:
        return self.state(now) is not State.CLOSED or now < self._resting_until

    def rests(self, now: float) -> bool:
        """Return whether want of room alone keeps requests away."""
        return now < self._resting_until and self.state(now) is not State.OPEN

    def rest(self, seconds: float, now: float) -> None:
        self._resting_until = max(self._resting_until, now + seconds)

    def opens_in(self, now: float) -> float:
        open_s = self._open_until - now if self.state(now) is State.OPEN else 0.0
        return max(0.0, open_s, self._resting_until - now)

    def begin(self, call: object) -> None:
        if self._trial is None and self._failures >= FAILURES_IN_A_ROW:
            self._trial = call

    def end(self, call: object) -> None:
        if self._trial is call:
            self._trial = None

    def succeeded(self, call: object) -> None:
        """Note a success. A request that was sent before an opening changes nothing."""
        if self._trial is call:
            self._trial, self._why, self._failures = None, "", 0
        elif self._failures < FAILURES_IN_A_ROW:
            self._failures = 0

    def answered(self, call: object) -> None:
        """Note that a request has tokens, which is enough for a trial; others count at their end."""
        if self._trial is call:
            self.succeeded(call)

    def failed(self, call: object, why: str, now: float) -> bool:
        """Count a failure that is the node's own fault; return whether it opens the breaker."""
        trial = self._trial is call
        self.end(call)
        state = self.state(now)
        if state is State.OPEN or (state is State.HALF_OPEN and not trial):
            return False  # it was sent before the opening
        self._failures += 1
        if self._failures < FAILURES_IN_A_ROW:
            return False
        self._open_until = now + min(OPEN_CAP_S, 2.0 ** min(self._failures - FAILURES_IN_A_ROW, 32))
        self._why = why
        return True

    def shown(self, now: float) -> BreakerState:
        return BreakerState(self.state(now), self._why, round(self.opens_in(now), 3))


@dataclass(eq=False, slots=True)
class Lease:
    node: Node
    share: Share = field(default_factory=Share)
    sent: Sent | None = None
    cut: Callable[[], None] | None = None
    role: Role = field(init=False)
    generation: str = field(init=False)

    def __post_init__(self) -> None:
        self.role, self.generation = self.node.role, self.node.generation

    def answered(self) -> None:
        self.node.state.first_token(self.share)

    def note_load(self, load: Load) -> None:
        self.share.number = self.share.number or load.leg
        self.node.note_load(load)


@dataclass(eq=False, slots=True)
class Node:
    url: str
    role: Role
    turn: int = 0
    """The number, from 1, of the choice that last chose this node."""
    state: NodeLoad = field(init=False)
    flips_to: Role | None = None
    kind: NodeKind = NodeKind.KVRELAY
    up: bool = False
    since: float = 0.0
    reason: str = NEW
    model: str = ""
    adapters: frozenset[str] = frozenset()
    adapters_at: float = -inf
    """When this router last changed its adapters; older reports do not know."""
    max_model_len: int = 0
    generation: str = ""
    drain_asked: bool = False
    """Only this router drains the node, and the node does not know."""
    held_blocks: int = 0
    release: str = ""
    leg_version: int = 1
    misses: int = 0
    blamed_at: float = -inf
    reported_at: float = -inf
    """When the newest answered health check began."""
    leases: set[Lease] = field(default_factory=set)
    kv: KvFacts | None = None
    breaker: Breaker = field(default_factory=Breaker)
    _died: str | None = None
    """The process that died last."""
    _drains: str | None = None
    """The process that drained last."""
    _questions: list[tuple[str, float, Callable[[bool], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = NodeLoad(self.url)

    @property
    def unsettled(self) -> str:
        """Return why roles cannot be reckoned with this node now; empty if they can."""
        # One that drains may change its role, as its next health check says.
        if self.flips_to or (self.reason == DRAINS and self.reported_at < self.since):
            return f"{self.url} changes its role"
        unknown = self.up and self.state.costs is UNKNOWN
        return f"{self.url} has not said what its steps cost" if unknown else ""

    def note_load(self, load: Load) -> None:
        """Take over a load, unless a figure in it is impossible."""
        if all(0 <= getattr(load, name) < inf for name in Load.__struct_fields__):
            self.state.announced(load)

    def ask_if_died(self, process: str, since: float, answer: Callable[[bool], None]) -> None:
        """Call `answer` once it is known whether a process has died that lost a request `since`.

        A broken connection proves nothing. A process has died if its address refuses connections,
        another process answers there, or its engine is dead. A process that answers a health check
        begun after the loss lives. The end of a process that drains is no death.
        """
        self._questions.append((process, since, answer))
        self._settle()

    def answered(self, process: str, began: float, *, drains: bool) -> None:
        """Note that a health check which began then was answered, and by which process."""
        self.reported_at = max(self.reported_at, began)
        self.generation = process
        if self._died == process:  # an engine that hung, and goes on
            self._died = None
        if drains:
            self._drains = process
        elif self._drains == process:
            self._drains = None
        self._settle()

    def drains(self) -> None:
        self._drains = self.generation

    def died(self) -> None:
        self._died = self.generation
        self._settle()

    def _settle(self) -> None:
        questions, self._questions = self._questions, []
        for question in questions:
            process, since, answer = question
            died = self._has_died(process, since)
            if died is None:
                self._questions.append(question)
            else:
                answer(died)

    def _has_died(self, process: str, since: float) -> bool | None:
        if self._drains == process:
            return False
        if self._died == process or self.generation not in ("", process):
            return True
        return False if self.reported_at >= since else None


@functools.lru_cache(1 << 14)
def kv_mismatch(prefill: KvFacts | None, decode: KvFacts | None) -> str | None:
    """Return why the decode node cannot take the prefill node's KV, naming both values, if so.

    A vLLM node reports nothing of its KV and fits all: its own handshake will show.
    """
    if prefill is None or decode is None:
        return None
    difference = prefill.fingerprint.difference(decode.fingerprint)
    if difference is not None:
        return difference.replace(" here and ", " on the prefill node and ").replace(
            " there", " on the decode node"
        )
    shared = [plane for plane in prefill.planes if plane in decode.planes]
    if not shared:
        mine, theirs = (", ".join(facts.planes) or "none" for facts in (prefill, decode))
        return f"data planes are {mine} on the prefill node and {theirs} on the decode node"
    if not prefill.host or not decode.host or prefill.host == decode.host:
        return None
    if shared != [_SAME_HOST_PLANE] and not is_loopback(prefill.address):
        return None
    return (
        f"{', '.join(shared)} at {prefill.address} is for nodes of one host, the prefill node is on "
        f"host {prefill.host} and the decode node on {decode.host}"
    )
