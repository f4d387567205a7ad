"""The known nodes: role, health, load, and which requests run on each. Reads no clock.

A blamed failure takes a node down until a health check that *started* later succeeds. Three missed
health checks in a row, a dead engine, or a new generation also cut its requests: a stopped process
never closes its connections, and one whose engine hangs keeps them.

A node that no source names any more takes no new requests and is watched until its last one ends.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvrelay.router.node_load import UNKNOWN, Share
from kvrelay.router.nodes.node import (
    NEW,
    HealthReport,
    Lease,
    Node,
    NodeKind,
    NodeSpec,
    Reach,
    Source,
    kv_reach,
    static_nodes,
)
from kvrelay.router.prefix.index import Prefix, PrefixIndex
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import KvFacts

__all__ = ["DRAINS", "LOST_AFTER_MISSES", "Pool"]

LOST_AFTER_MISSES = 3
DRAINS = "it is draining"
_LOOK = "look at the router's /health"

_log = logging.getLogger("kvrelay.router")


class Pool:
    """A record of all nodes. Times are seconds of one monotonic clock."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.nodes: list[Node] = []
        """The wanted nodes; a new list with every change, so a caller may iterate and wait."""
        self._by_url: dict[str, Node] = {}
        self._has_foreign = False
        self._up: dict[tuple[Role, str, NodeKind | None], list[Node]] = {}
        self._bases: dict[str, str] = {}
        self.leaving: list[Node] = []
        """Unwanted nodes whose requests have not ended."""
        self.members: dict[Source, dict[str, NodeSpec]] = {source: {} for source in Source}
        self.prefixes = PrefixIndex()
        self.joined: Callable[[Node], None] = lambda _node: None
        """Called for each node that comes."""
        self.left: Callable[[Node], None] = lambda _node: None
        """Called when the last request of an unwanted node has ended."""
        self._turns = 0
        self._kv_mixed: bool | None = None  # None: not compared since a change
        self._typical_costs: dict[str, StepCosts] = {}
        self.set_members(Source.STATIC, static_nodes(prefill, decode), 0.0)

    def set_members(self, source: Source, specs: Iterable[NodeSpec], now: float) -> None:
        """Take over the list of all nodes that a source names now."""
        members = self.members | {source: {spec.url: spec for spec in specs}}
        before, wanted = _wanted(self.members), _wanted(members)
        self._forget_choices()
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

    def _leave(self, node: Node, now: float) -> None:
        self.nodes = [each for each in self.nodes if each is not node]
        self.leaving.append(node)
        node.wanted = False
        running = len(node.leases)
        _log.info("%s node %s is removed with %d requests running", node.role, node.url, running)
        self._take_down(node, "it was removed", now)
        self._drop_if_idle(node)

    def _join(self, spec: NodeSpec, now: float) -> None:
        node = next((each for each in self.leaving if each.url == spec.url), None)
        if node is not None:
            self.leaving.remove(node)
            self._set_role(node, spec.role)
            node.wanted, node.reason, node.blamed_at = True, NEW, now
        else:
            node = Node(spec.url, role=spec.role, model=spec.model)
            self.joined(node)
        self.nodes, self._by_url[spec.url] = [*self.nodes, node], node

    def _set_role(self, node: Node, role: Role) -> None:
        if node.role is not role:
            _log.info("%s node %s is a %s node now", node.role, node.url, role)
            node.role, node.flips_to = role, None
            self._forget_choices()

    def _drop_if_idle(self, node: Node) -> None:
        if node in self.leaving and not node.leases:
            self.leaving.remove(node)
            self._kv_mixed = None
            self.prefixes.forget(node.url)
            self.left(node)

    def _forget_choices(self) -> None:
        self._up.clear()
        self._bases.clear()
        self._kv_mixed = None

    def find(self, url: str) -> Node | None:
        return self._by_url.get(url.rstrip("/"))

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
        key = (role, model, kind)
        up = self._up.get(key)
        if up is None:
            base = self.base_of(model)
            up = [
                node
                for node in self.nodes
                if node.role == role
                and node.up
                and (not model or node.serves(base, model))
                and kind in (None, node.kind)
            ]
            if up:
                self._up[key] = up
        return [node for node in up if node not in exclude] if exclude else up

    def node_kinds(self, model: str = "") -> list[NodeKind]:
        prefill, decode = (
            {node.kind for node in self.up(role, model=model)}
            for role in (Role.PREFILL, Role.DECODE)
        )
        return [kind for kind in NodeKind if kind in prefill & decode]

    def kind_for(self, model: str) -> NodeKind:
        """Return the kind of nodes that a request goes to: the one with the shortest queue."""
        kinds = self.node_kinds(model) if self._has_foreign else ()
        if len(kinds) < 2:
            return kinds[0] if kinds else NodeKind.KVRELAY
        prefill = (node for node in self.up(Role.PREFILL, model=model) if node.kind in kinds)
        return min(prefill, key=lambda node: node.depth).kind

    def base_of(self, name: str) -> str:
        """Return the model that a name stands for: itself, or an adapter's; empty if unknown.

        An adapter's name in several models means one of them only, so that prefill and decode
        agree.
        """
        base = self._bases.get(name)
        if base is None:
            if not name or any(node.model == name for node in self.nodes):
                base = name
            else:
                holders = (node.model for node in self._trusted() if name in node.adapters)
                base = min(holders, default="")
            if base:  # else clients could name any number
                self._bases[name] = base
        return base

    def models(self) -> dict[str, int]:
        """Return all models, each with its nodes' context in tokens; 0: never up.

        Nodes that are down count, too.
        """
        known: dict[str, int] = {}
        for node in self.nodes:
            if node.model:
                lengths = [each for each in (node.max_model_len, known.get(node.model, 0)) if each]
                known[node.model] = min(lengths, default=0)
        return known

    def adapters(self) -> dict[str, str]:
        return {name: self.base_of(name) for node in self._trusted() for name in node.adapters}

    def _trusted(self) -> list[Node]:
        """Return the nodes whose word on adapters counts: those down only if none is up."""
        return [node for node in self.nodes if node.up] or self.nodes

    def no_node(self, role: Role, model: str = "") -> NoNode:
        if self.up(role, model=model):
            found = (f"{node.role} node {node.url}: {node.kind}" for node in self.nodes if node.up)
            return NoNode(
                f"no {role} node that is up is of a prefill node's kind ({', '.join(found)})"
            )
        if model and self.up(role):
            return NoNode(f"no {role} node that is up has {model!r}; load it there too, or {_LOOK}")
        listed = sum(node.role == role for node in self.nodes)
        return NoNode(f"no {role} node is up ({listed} listed); try again, or {_LOOK}")

    def typical_costs(self, model: str) -> StepCosts:
        """Return the step costs of a middling node of a model."""
        base = self.base_of(model)
        costs = self._typical_costs.get(base)
        if costs is None:
            known = [
                node.state.costs
                for node in self.nodes
                if node.model == base and node.state.costs is not UNKNOWN
            ]
            ordered = sorted(known, key=lambda each: each.decode_ms(1, 0))
            costs = ordered[len(ordered) // 2] if ordered else UNKNOWN
            self._typical_costs[base] = costs
        return costs

    def hold(
        self, node: Node, share: Share, prefix: Prefix | None, cached: Mapping[str, int]
    ) -> Lease:
        self._turns += 1
        node.turn = self._turns
        lease = Lease(node, share, cached.get(node.url, 0))
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
        if not lease.node.wanted:
            self._drop_if_idle(lease.node)

    def blame(self, node: Node, why: str, now: float) -> None:
        """Take a node down until a health check that started after `now` succeeds."""
        node.blamed_at = now
        self._take_down(node, why, now)

    def note_report(self, node: Node, report: HealthReport, started: float, now: float) -> None:
        # A vLLM node without metrics does not say which process it is: taken for the same.
        generation = report.generation or node.generation
        if node.generation and generation != node.generation:
            self._cut(node)
            self.prefixes.forget(node.url)
            node.state.restarted()
            node.drain_asked = False
        node.misses, node.reported_at = 0, max(node.reported_at, started)
        before = (node.kind, node.model, node.adapters, node.up)
        node.generation, node.kind = generation, report.kind
        self._has_foreign = self._has_foreign or node.kind is not NodeKind.KVRELAY
        node.deaths.answered(generation, started, drains=report.draining or node.drain_asked)
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
            self._forget_choices()

    def _bring_up(self, node: Node, report: HealthReport, started: float, now: float) -> None:
        costs = report.costs
        if costs is not None and costs.is_sane and costs != node.state.costs:
            node.state.set_costs(costs, report.max_gap_ms or node.state.gap_ms)
            self._typical_costs.clear()
        node.model, node.max_model_len = report.model, report.max_model_len
        if report.kv != node.kv:
            node.note_kv(report.kv)
            self._kv_mixed = None
        if started >= node.adapters_at:
            node.adapters = frozenset(report.adapters)
        if not node.up:
            node.up, node.since, node.reason = True, now, ""
            node.came_up = started, report
            _log.info("%s node %s is up", node.role, node.url)

    @property
    def kv_mixed(self) -> bool:
        """Return whether some two nodes of a model cannot hand over; else no choice compares."""
        if self._kv_mixed is None:
            kinds, hosts = (
                defaultdict[str, set[KvFacts | None]](set),
                defaultdict[str, set[str]](set),
            )
            for node in (*self.nodes, *self.leaving):
                kinds[node.model].add(node.kv_kind)
                hosts[node.model].add(node.host)
            self._kv_mixed = any(
                reach is Reach.NONE or (reach is Reach.ONE_HOST and len(hosts[model] - {""}) > 1)
                for model, known in kinds.items()
                for reach in itertools.starmap(kv_reach, itertools.product(known, repeat=2))
            )
        return self._kv_mixed

    def _follow_role(self, node: Node, report: HealthReport) -> None:
        node.flips_to = report.flips_to
        listed = next((of[node.url] for of in self.members.values() if node.url in of), None)
        if report.flips and report.role is not Role.AGGREGATED:
            self._set_role(node, report.role)
        elif listed is not None:
            self._set_role(node, listed.role)

    def note_adapters(self, node: Node, names: Iterable[str], now: float) -> None:
        node.adapters, node.adapters_at = frozenset(names), now
        self._forget_choices()

    def note_draining(self, node: Node, now: float) -> None:
        """Note that the node takes nothing new until a later health check says otherwise."""
        node.deaths.drains(node.generation)
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

    def note_unready(self, node: Node, why: str, now: float) -> None:
        node.misses, node.flips_to = 0, None
        self._take_down(node, why, now)

    def note_refused(self, node: Node, now: float) -> None:
        """Note that nobody listens at a node's address.

        A draining process goes on, a dead one is lost.
        """
        node.deaths.died(node.generation)
        self.note_unready(node, "it refuses connections", now)

    def note_dead(self, node: Node, why: str, now: float) -> None:
        """Note that the process or its engine has ended."""
        node.deaths.died(node.generation)
        self.blame(node, why, now)
        node.misses, node.flips_to = 0, None
        self._cut(node)

    def note_miss(self, node: Node, why: str, now: float) -> None:
        node.flips_to, node.misses = None, node.misses + 1
        self._take_down(node, why, now)
        if node.misses >= LOST_AFTER_MISSES:
            self._cut(node)

    def _why_unfit(self, node: Node, report: HealthReport) -> str | None:
        if not node.wanted:
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
        if report.version_conflict is not None:
            return report.version_conflict
        pod = self.members[Source.KUBERNETES].get(node.url)
        if pod is not None and report.pod_uid and report.pod_uid != pod.generation:
            return f"pod {pod.generation} had this address, and pod {report.pod_uid} answers there"
        if pod is not None and pod.model and report.model != pod.model:
            return (
                f"its pod is labelled with the model {pod.model!r} and it serves "
                f"{report.model!r}; correct the label"
            )
        return None

    def _take_down(self, node: Node, why: str, now: float) -> None:
        if node.up or not node.reason:
            _log.warning("%s node %s is kept out: %s", node.role, node.url, why)
        elif node.reason != why:
            _log.debug("%s node %s is still kept out: %s", node.role, node.url, why)
        if node.up:
            node.up, node.since = False, now
            self._forget_choices()
        node.reason = why

    @staticmethod
    def _cut(node: Node) -> None:
        for lease in list(node.leases):
            cut, lease.cut = lease.cut, None  # once: an ending request cannot be cut again
            if cut is not None:
                cut()


def _wanted(members: Mapping[Source, Mapping[str, NodeSpec]]) -> dict[str, NodeSpec]:
    # Where sources disagree the first of Source counts; nodes stay in the order of sources.
    wanted: dict[str, NodeSpec] = {}
    for specs in members.values():
        wanted = {**wanted, **specs, **wanted}
    return wanted
