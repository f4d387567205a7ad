"""The known nodes: role, health, load, and which requests run on each. Reads no clock.

A blamed failure takes a node down until a health check that *started* later succeeds. Three missed
health checks in a row, a dead engine, or a new generation also cut its requests: a stopped process
never closes its connections, and one whose engine hangs keeps them.

A node that no source names any more takes no new requests and is watched until its last one ends.
A node that is up takes requests unless its breaker is open, or it rests for want of room. Where
only open breakers are left, one request at a time may try.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache

from kvrelay.router.node_load import UNKNOWN, Share
from kvrelay.router.nodes.node import (
    DRAINS,
    NEW,
    HealthReport,
    Lease,
    Node,
    NodeKind,
    NodeSpec,
    Source,
    kv_mismatch,
    static_nodes,
)
from kvrelay.router.placement import AVOIDED_MS, LINK_MS
from kvrelay.router.prefix.index import Prefix, PrefixIndex
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode, Overloaded
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.versions import LEGS

__all__ = ["AVOID_S", "LOOK", "LOST_AFTER_MISSES", "Pool"]

LOST_AFTER_MISSES = 3
AVOID_S = 30.0
"""Seconds for which two nodes are avoided between which KV did not come."""
LOOK = "look at the router's /health"
_REST_CAP_S = 30.0
_MOST_KNOWN = 4096  # clients could name any number of models

_log = logging.getLogger("kvrelay.router")


class Pool:
    """A record of all nodes. Times are seconds of one monotonic clock."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.nodes: list[Node] = []
        """The wanted nodes; a new list with every change, so a caller may iterate and wait."""
        self._by_url: dict[str, Node] = {}
        self.leaving: list[Node] = []
        """Unwanted nodes whose requests have not ended."""
        self.members: dict[Source, dict[str, NodeSpec]] = {source: {} for source in Source}
        self.prefixes = PrefixIndex()
        self.joined: Callable[[Node], None] = lambda _node: None
        """Called for each node that comes."""
        self.left: Callable[[Node], None] = lambda _node: None
        """Called when the last request of an unwanted node has ended."""
        self._turns = itertools.count(1)
        self._failed_pairs: dict[tuple[str, str], float] = {}
        """Until when pairs of processes are avoided."""
        self._troubled: set[Node] = set()
        """Nodes that rest or whose breaker is not closed: others need no look."""
        known = lru_cache(_MOST_KNOWN)  # until a change
        self._up, self.base_of = known(self._find_up), known(self._find_base)
        self.node_kinds, self.typical_costs = known(self._find_kinds), known(self._find_costs)
        self.takers = known(self._find_takers)
        self.set_members(Source.STATIC, static_nodes(prefill, decode), 0.0)

    def _changed(self) -> None:
        for known in (
            self._up,
            self.base_of,
            self.node_kinds,
            self.typical_costs,
            self.takers,
        ):
            known.cache_clear()

    # Which nodes there are.

    def set_members(self, source: Source, specs: Iterable[NodeSpec], now: float) -> None:
        """Take over the list of all nodes that a source names now."""
        members = self.members | {source: {spec.url: spec for spec in specs}}
        before, wanted = ChainMap(*self.members.values()), ChainMap(*members.values())
        for url in self._by_url.keys() - wanted.keys():
            self._leave(self._by_url.pop(url), now)
        for url, spec in wanted.items():
            node = self._by_url.get(url)
            if node is None:
                self._join(spec, now)
            elif before.get(url, spec).role is not spec.role and node.role is not spec.role:
                self.blame(node, f"it is listed as a {spec.role} node now", now)
                self._set_role(node, spec.role)
        self.members = members  # last: what was not applied is told again

    def sources(self, url: str) -> list[Source]:
        return [source for source, specs in self.members.items() if url in specs]

    def find(self, url: str) -> Node | None:
        return self._by_url.get(url.rstrip("/"))

    def _join(self, spec: NodeSpec, now: float) -> None:
        node = next((each for each in self.leaving if each.url == spec.url), None)
        if node is not None:
            self.leaving.remove(node)
            self._set_role(node, spec.role)
            node.reason, node.blamed_at = NEW, now
        else:
            node = Node(spec.url, role=spec.role)
            self.joined(node)
        self.nodes, self._by_url[spec.url] = [*self.nodes, node], node
        self._changed()

    def _leave(self, node: Node, now: float) -> None:
        self.nodes = [each for each in self.nodes if each is not node]
        self.leaving.append(node)
        running = len(node.leases)
        _log.info("%s node %s is removed with %d requests running", node.role, node.url, running)
        self._take_down(node, "it was removed", now)
        self._changed()
        self._drop_if_idle(node)

    def _drop_if_idle(self, node: Node) -> None:
        if node in self.leaving and not node.leases:
            self.leaving.remove(node)
            self.prefixes.forget(node.url)
            self.left(node)

    def _set_role(self, node: Node, role: Role) -> None:
        if node.role is not role:
            _log.info("%s node %s is a %s node now", node.role, node.url, role)
            node.role, node.flips_to = role, None
            self._changed()

    # Which of them may take a request.

    def up(
        self,
        role: Role,
        exclude: Collection[Node] = (),
        model: str = "",
        kind: NodeKind | None = None,
    ) -> list[Node]:
        """Return the nodes of a role that are up, for a model or adapter, if one is named.

        The list is not the caller's to change.
        """
        up = self._up(role, model, kind)
        return [node for node in up if node not in exclude] if exclude else up

    def _find_up(self, role: Role, model: str, kind: NodeKind | None) -> list[Node]:
        base = self.base_of(model)
        return [
            node
            for node in self.nodes
            if node.role == role
            and node.up
            and (not model or (node.model == base and model in (base, *node.adapters)))
            and kind in (None, node.kind)
        ]

    def available(
        self,
        role: Role,
        model: str,
        exclude: Collection[Node],
        now: float,
        kind: NodeKind = NodeKind.KVRELAY,
    ) -> list[Node]:
        """Return nodes that may take a request. Raises NoNode, or Overloaded if they rest."""
        nodes = self.up(role, exclude, model, kind)
        if not nodes:
            raise self.no_node(role, model)
        if not self._troubled:
            return nodes
        self._troubled = {node for node in self._troubled if node.breaker.is_troubled(now)}
        for last in (False, True):
            if takers := [node for node in nodes if node.breaker.may_take(now, last=last)]:
                return takers
        # No name for the error: its traceback would keep this frame, and the frame the error.
        raise _to_be_retried(role, nodes, now)

    def no_node(self, role: Role, model: str = "") -> NoNode:
        if self.up(role, model=model):
            return NoNode(f"no {role} node that is up is of a prefill node's kind; {LOOK}")
        if model and self.up(role):
            return NoNode(f"no {role} node that is up has {model!r}; load it there too, or {LOOK}")
        listed = sum(node.role == role for node in self.nodes)
        return NoNode(f"no {role} node is up ({listed} listed); try again, or {LOOK}")

    def rest(self, node: Node, seconds: float | None, now: float) -> None:
        node.breaker.rest(min(_REST_CAP_S, 1.0 if seconds is None else max(0.1, seconds)), now)
        self._troubled.add(node)

    def failed(self, call: object, node: Node, why: str, now: float) -> None:
        if node.breaker.failed(call, why, now):
            _log.warning("%s gets no requests for a while, the last one failed: %s", node.url, why)
            self._troubled.add(node)

    def could_not_read(self, node: Node, now: float) -> None:
        call = object()
        node.breaker.begin(call)
        self.failed(call, node, "it fails on requests that others can read", now)

    # Which of them can hand over.

    def link_ms(self, prefill: Node, decode: Node, now: float) -> float:
        """Return the time of a hand-over, long where one failed lately; infinite: impossible."""
        if kv_mismatch(prefill.kv, decode.kv) is not None:
            return math.inf
        until = self._failed_pairs.get(_pair(prefill, decode), now)
        return AVOIDED_MS if now < until else LINK_MS

    def _find_takers(self, url: str, below: bool) -> frozenset[str]:
        """Return the nodes that can take the KV of one, and perhaps what lies below its pool."""
        kv = self._by_url[url].kv
        return frozenset(
            node.url
            for node in self.nodes
            if node.url != url
            and node.kv
            and node.kv.compares >= below
            and not kv_mismatch(kv, node.kv)
        )

    def kv_came(self, prefill: Node, decode: Node) -> None:
        self._failed_pairs.pop(_pair(prefill, decode), None)

    def kv_failed(self, prefill: Node, decode: Node, cause: str, now: float) -> None:
        _log.warning("%s says that the KV of %s did not come: %s", decode.url, prefill.url, cause)
        if cause != "LeaseLost":  # it says nothing of the way between them
            lately = {pair: until for pair, until in self._failed_pairs.items() if until > now}
            self._failed_pairs = lately | {_pair(prefill, decode): now + AVOID_S}

    def _find_kinds(self, model: str = "") -> list[NodeKind]:
        prefill, decode = (
            {node.kind for node in self.up(role, model=model)}
            for role in (Role.PREFILL, Role.DECODE)
        )
        return [kind for kind in NodeKind if kind in prefill & decode]

    def kind_for(self, model: str) -> NodeKind:
        """Return the kind of nodes that a request goes to: the one with the shortest queue."""
        kinds = self.node_kinds(model)
        if len(kinds) < 2:
            return kinds[0] if kinds else NodeKind.KVRELAY
        return min(self.up(Role.PREFILL, model=model), key=lambda node: node.state.depth).kind

    # What they serve.

    def _find_base(self, name: str) -> str:
        """Return the model that a name stands for: itself, or an adapter's; empty if unknown.

        An adapter's name in several models means one of them only, so that prefill and decode
        agree.
        """
        if not name or any(node.model == name for node in self.nodes):
            return name
        holders = (node.model for node in self._trusted() if name in node.adapters)
        return min(holders, default="")

    def models(self) -> dict[str, int]:
        """Return all models, each with its nodes' context in tokens; 0: never up.

        Nodes that are down count, too.
        """
        known = defaultdict[str, list[int]](list)
        for node in self.nodes:
            known[node.model].append(node.max_model_len)
        known.pop("", None)
        return {model: min(filter(None, each), default=0) for model, each in known.items()}

    def adapters(self) -> dict[str, str]:
        return {name: self.base_of(name) for node in self._trusted() for name in node.adapters}

    def _trusted(self) -> list[Node]:
        """Return the nodes whose word on adapters counts: those down only if none is up."""
        return [node for node in self.nodes if node.up] or self.nodes

    def _find_costs(self, model: str) -> StepCosts:
        """Return the step costs of a middling node of a model."""
        base = self.base_of(model)
        known = [node.state.costs for node in self.nodes if node.model == base]
        ordered = sorted(
            (each for each in known if each is not UNKNOWN), key=lambda each: each.decode_ms(1, 0)
        )
        return ordered[len(ordered) // 2] if ordered else UNKNOWN

    # Which requests they have.

    def hold(self, node: Node, share: Share, prefix: Prefix | None) -> Lease:
        node.turn = next(self._turns)
        lease = Lease(node, share)
        node.leases.add(lease)
        node.state.add(share)
        if prefix is not None:
            lease.sent = self.prefixes.send(prefix, node.url)
        return lease

    def give_back(self, lease: Lease) -> None:
        """End a lease; a second time changes nothing."""
        if lease.sent is not None:
            sent, lease.sent = lease.sent, None
            self.prefixes.end(sent)
        lease.node.leases.discard(lease)
        lease.node.state.remove(lease.share)
        self._drop_if_idle(lease.node)

    @staticmethod
    def _cut(node: Node) -> None:
        for lease in list(node.leases):
            cut, lease.cut = lease.cut, None  # once: an ending request cannot be cut again
            if cut is not None:
                cut()

    # What they tell.

    def note_report(self, node: Node, report: HealthReport, started: float, now: float) -> None:
        # A vLLM node without metrics does not say which process it is: taken for the same.
        generation = report.generation or node.generation
        if node.generation and generation != node.generation:
            self._cut(node)
            if not self.prefixes.follows(node.url):  # a new engine's host memory may be warm
                self.prefixes.forget(node.url)
            node.state.restarted()
            node.drain_asked = False
        before = (node.kind, node.model, node.adapters, node.up)
        node.misses, node.kind = 0, report.kind
        node.answered(generation, started, drains=report.draining or node.drain_asked)
        node.held_blocks, node.release = report.held_blocks, report.release
        node.leg_version = report.leg_version or 1
        node.note_load(report.load)
        if started >= node.blamed_at:
            self._follow_role(node, report)
        why = self._why_unfit(node, report)
        if why is not None:
            self._take_down(node, why, now)
        elif started >= node.blamed_at:
            self._bring_up(node, report, started, now)
        if before != (node.kind, node.model, node.adapters, node.up):
            self._changed()

    def _bring_up(self, node: Node, report: HealthReport, started: float, now: float) -> None:
        costs = report.costs
        if costs is not None and costs.is_sane and costs != node.state.costs:
            node.state.set_costs(costs, report.max_gap_ms or node.state.gap_ms)
            self._changed()
        node.model, node.max_model_len = report.model, report.max_model_len
        if report.kv != node.kv:  # else the old one, whose hash is known
            node.kv = report.kv
            self._changed()
            node.state.computes = report.kv is None or report.kv.computes_prompts
        if started >= node.adapters_at:
            node.adapters = frozenset(report.adapters)
        if not node.up:
            node.up, node.since, node.reason = True, now, ""
            _log.info("%s node %s is up", node.role, node.url)

    def _follow_role(self, node: Node, report: HealthReport) -> None:
        node.flips_to = report.flips_to
        listed = ChainMap(*self.members.values()).get(node.url)
        if report.flips and report.role is not Role.AGGREGATED:
            self._set_role(node, report.role)
        elif listed is not None:
            self._set_role(node, listed.role)

    def _why_unfit(self, node: Node, report: HealthReport) -> str | None:
        if node in self.leaving:
            return "it was removed"
        if report.draining or node.drain_asked:
            return DRAINS
        if node.flips_to is not None:
            return f"it changes its role from {node.role} to {node.flips_to}"
        if report.role != node.role:
            return (
                f"it is listed as a {node.role} node and says that it is {report.role}; "
                f"correct the list or its --role"
            )
        if report.leg_version is None:
            older = "router" if report.leg_stream > LEGS.newest else "node"
            return (
                f"it speaks version {report.legs} of the request stream and this router {LEGS}: "
                f"upgrade the {older}, one release at a time"
            )
        pod = self.members[Source.KUBERNETES].get(node.url)
        if pod is not None and report.pod_uid and report.pod_uid != pod.generation:
            return f"pod {pod.generation} had this address, and pod {report.pod_uid} answers there"
        return None

    def note_adapters(self, node: Node, names: Iterable[str], now: float) -> None:
        node.adapters, node.adapters_at = frozenset(names), now
        self._changed()

    # What befalls them.

    def blame(self, node: Node, why: str, now: float) -> None:
        """Take a node down until a health check that started after `now` succeeds."""
        node.blamed_at = now
        self._take_down(node, why, now)

    def note_draining(self, node: Node, now: float) -> None:
        """Note that the node takes nothing new until a later health check says otherwise."""
        node.drains()
        self.blame(node, DRAINS, now)

    def drain(self, node: Node, now: float) -> None:
        node.drain_asked = True
        self.note_draining(node, now)

    def undrain(self, node: Node, now: float) -> None:
        node.drain_asked, node.blamed_at = False, now

    def note_role_change(self, node: Node, role: Role, now: float) -> None:
        """Note that a node begins to change its role; a later health check tells the result."""
        node.flips_to = role
        self.blame(node, f"it changes its role from {node.role} to {role}", now)

    def note_unready(
        self,
        node: Node,
        why: str,
        now: float,
        *,
        missed: bool = False,
        died: bool = False,
        cut: bool = False,
    ) -> None:
        """Note a health check that failed, or was `missed`, as nothing answered in time.

        `died` tells that the process or its engine has ended; a draining one goes on until `cut`.
        """
        node.misses, node.flips_to = node.misses + 1 if missed else 0, None
        if died:
            node.died()
        self._take_down(node, why, now)
        if cut or node.misses >= LOST_AFTER_MISSES:
            self._cut(node)

    def _take_down(self, node: Node, why: str, now: float) -> None:
        if node.up or not node.reason:
            _log.warning("%s node %s is kept out: %s", node.role, node.url, why)
        if node.up:
            node.up, node.since = False, now
            self._changed()
        node.reason = why


def _to_be_retried(role: Role, nodes: Sequence[Node], now: float) -> NoNode | Overloaded:
    error: NoNode | Overloaded
    if any(node.breaker.rests(now) for node in nodes):
        error = Overloaded(f"no {role} node has room now; try again later")
    else:
        error = NoNode(f"all {role} nodes fail now, and the router is trying them; try again")
    error.retry_after_s = max(1, math.ceil(min(node.breaker.opens_in(now) for node in nodes)))
    return error


def _pair(prefill: Node, decode: Node) -> tuple[str, str]:
    # A node that is restarted is another one to its peers.
    return prefill.generation or prefill.url, decode.generation or decode.url
