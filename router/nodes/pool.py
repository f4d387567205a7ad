"""The known nodes: role, health, load, and which legs run on each. Opens no connection and reads no
clock.

A node takes legs only while it is up. A blamed failure takes it down until a health check that was
*started* later succeeds. Three health checks missed in a row, a dead engine, or a new generation
also cut the legs that still wait for it: a process that is stopped never closes its connections,
and one whose engine hangs keeps them.

Nodes come and go at run time (router/nodes/members.py says which are to be there). One that no
source names any more takes no new legs and is watched until its last one has ended.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from kvrelay.router.node_load import UNKNOWN, Share
from kvrelay.router.nodes.members import Change, Members, NodeSpec, Source, static_nodes
from kvrelay.router.nodes.node import NEW, HealthReport, Lease, News, Node, NodeKind, NodeNews
from kvrelay.router.nodes.pairing import Kinds
from kvrelay.router.prefix.index import Prefix, PrefixIndex
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode
from kvrelay.wire.outputs import Load
from kvrelay.wire.step_costs import StepCosts

__all__ = ["DRAINS", "LOST_AFTER_MISSES", "Pool"]

_depth = attrgetter("depth")

LOST_AFTER_MISSES = 3
DRAINS = "it is draining"
"""Why a node that drains takes no legs."""
_NEWS = 256

_log = logging.getLogger("kvrelay.router")


class Pool:
    """A record of all nodes of the cluster. Times are any one monotonic clock, given by the caller."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """Begin with these, the static list of nodes. Raises RequestError for an address that is
        none.
        """
        self.nodes: list[Node] = []
        """Those that are wanted: a new list with every change, so that who goes through one may
        wait meanwhile.
        """
        self._by_url: dict[str, Node] = {}
        self._foreign = False
        """Whether a node of another kind than ours was seen."""
        self._ups: dict[tuple[Role, str, NodeKind | None], list[Node]] = {}
        self._bases: dict[str, str] = {}
        self.leaving: list[Node] = []
        """Nodes that nobody wants any more, with legs that have not ended."""
        self.members = Members()
        self.prefixes = PrefixIndex()
        self._followers: list[tuple[Callable[[Node], None], Callable[[Node], None]]] = []
        self.choices: Counter[tuple[Role, bool]] = Counter()
        """How often nodes of a role were chosen that have nothing of the prompt, or some of it."""
        self._turns = 0
        self.news: deque[NodeNews] = deque(maxlen=_NEWS)
        """What has happened to nodes, the last at the end."""
        self.kinds = Kinds()
        self._typical: dict[str, StepCosts] = {}
        self.tell(Source.STATIC, static_nodes(prefill, decode), 0.0)

    def follow(
        self, joined: Callable[[Node], None], left: Callable[[Node], None]
    ) -> Callable[[], None]:
        """Call `joined` for every node that is there or will be, `left` when one is gone with its
        last leg.

        Until the function is called that is returned.
        """
        follower = (joined, left)
        self._followers.append(follower)
        for node in (*self.nodes, *self.leaving):
            joined(node)
        return lambda: self._followers.remove(follower)

    def tell(
        self, source: Source, specs: Iterable[NodeSpec], now: float, gone: Collection[str] = ()
    ) -> None:
        """Note that a source sees these nodes now, and no others. `gone`: addresses whose process
        has ended.

        Nodes that no source names any more take no new legs; those that they have end by
        themselves, or are cut if the process has ended, or when it is seen to be lost.
        """
        self._change(self.members.tell(source, specs), now)
        for url in gone:
            self.process_ended(url, now)

    def add(self, spec: NodeSpec, source: Source, now: float) -> None:
        """Note that a source sees this node, too. Twice is as once."""
        self.tell(source, [*self.members.told[source].values(), spec], now)

    def remove(self, url: str, sources: Collection[Source], now: float) -> None:
        """Note that these sources see this node no more."""
        for source in sources:
            self.tell(
                source,
                [spec for spec in self.members.told[source].values() if spec.url != url],
                now,
            )

    def _change(self, change: Change, now: float) -> None:
        self._changed()
        for url in change.left:
            node = self._by_url.pop(url)
            self.nodes = [each for each in self.nodes if each is not node]
            self.leaving.append(node)
            node.wanted = False
            _log.info(
                "%s node %s is removed with %d legs under way", node.role, url, len(node.leases)
            )
            self._take_down(node, "it was removed", now)
            self._end_if_idle(node)
        for spec in change.joined:
            self._join(spec, now)
        for spec in change.replaced:
            self._replaced(spec, now)
        for spec in change.relisted:
            node = self._by_url[spec.url]
            if node.role is not spec.role:
                self.blame(node, f"it is listed as a {spec.role} node now", now)
                self._refile(node, spec.role)

    def _join(self, spec: NodeSpec, now: float) -> None:
        node = next((each for each in self.leaving if each.url == spec.url), None)
        if node is not None:
            self.leaving.remove(node)
            self._refile(node, spec.role)
            node.wanted, node.reason, node.blamed_at = True, NEW, now
        else:
            node = Node(spec.url, role=spec.role, model=spec.model)
            for joined, _ in self._followers:
                joined(node)
        self.nodes, self._by_url[spec.url] = [*self.nodes, node], node

    def _refile(self, node: Node, role: Role) -> None:
        """Give a node another role. Its legs go on; its prefix index, breakers and connections
        stay.
        """
        if node.role is not role:
            _log.info("%s node %s is a %s node now", node.role, node.url, role)
            node.role, node.flips_to = role, None
            self._changed()

    def _replaced(self, spec: NodeSpec, now: float) -> None:
        """Take no more legs there until it is known which process stands there: a source says that
        it is another.
        """
        node = self.find(spec.url)
        if node is None or node.generation == spec.generation:
            return  # its health has told already
        if not node.generation:
            self._cut(node)
        # Else its next health report tells: legs of the process that answers now must not be cut.
        self.blame(node, "it was replaced", now)

    def process_ended(self, url: str, now: float) -> None:
        """Cut the legs of a node whose process has ended."""
        self._note("ended", url)
        for node in (*self.nodes, *self.leaving):
            if node.url == url.rstrip("/"):
                self.dead(node, "its process has ended", now)

    def _end_if_idle(self, node: Node) -> None:
        if node in self.leaving and not node.leases:
            self.leaving.remove(node)
            self.prefixes.forget(node.url)
            for _, left in self._followers:
                left(node)

    def _note(self, what: News, url: str, word: str = "") -> None:
        number = self.news[-1].number + 1 if self.news else 1
        self.news.append(NodeNews(number, what, url, word))

    def find(self, url: str) -> Node | None:
        """Return the wanted node at this address."""
        return self._by_url.get(url.rstrip("/"))

    def up(
        self,
        role: Role,
        exclude: Collection[Node] = (),
        model: str = "",
        kind: NodeKind | None = None,
    ) -> list[Node]:
        """Return the nodes of a role that take legs now, for this model or adapter; empty stands
        for any.

        Of any kind if none is named. The list is not the caller's to change.
        """
        key = (role, model, kind)
        up = self._ups.get(key)
        if up is None:
            base = self.base_of(model)
            up = [
                node
                for node in self.nodes
                if node.role == role and node.up and (not model or node.serves(base, model))
            ]
            if kind:
                up = [node for node in up if node.kind is kind]
            if up:
                self._ups[key] = up
        return [node for node in up if node not in exclude] if exclude else up

    def node_kinds(self, model: str = "") -> list[NodeKind]:
        """Return those of which nodes of both roles are up for this model or adapter."""
        there = [
            {node.kind for node in self.up(role, model=model)}
            for role in (Role.PREFILL, Role.DECODE)
        ]
        return [kind for kind in NodeKind if all(kind in of_role for of_role in there)]

    def base_of(self, name: str) -> str:
        """Return the model that a name stands for: itself, or that of an adapter; empty if no node
        has reported either.

        An adapter's name that nodes of several models have means one of them only, so that both
        legs agree.
        """
        base = self._bases.get(name)
        if base is None:
            if not name or any(node.model == name for node in self.nodes):
                base = name
            else:
                base = min(
                    (node.model for node in self._holders() if name in node.adapters), default=""
                )
            if base:  # else clients could name as many as they like
                self._bases[name] = base
        return base

    def _changed(self) -> None:
        """Forget which nodes take which legs: it may be otherwise now."""
        self._ups.clear()
        self._bases.clear()

    def require_ready(self, model: str = "") -> None:
        """Raise NoNode unless a request for this model or adapter could walk through both of its
        legs now.
        """
        for role in (Role.PREFILL, Role.DECODE):
            if not self.up(role, model=model):
                raise self.no_node(role, model)
        if not self.node_kinds(model):
            raise self.no_node(Role.DECODE, model)

    def models(self) -> dict[str, int]:
        """Return the models of all nodes, down ones too, with the longest context that each node of
        one can take.

        In tokens: what those say that were up once, 0 if none was.
        """
        known: dict[str, int] = {}
        for node in self.nodes:
            if node.model:
                told = [each for each in (node.max_model_len, known.get(node.model, 0)) if each]
                known[node.model] = min(told, default=0)
        return known

    def adapters(self) -> dict[str, str]:
        """Return the names of adapters that a node has, with the model that each is for."""
        return {name: self.base_of(name) for node in self._holders() for name in node.adapters}

    def _holders(self) -> list[Node]:
        """Return whose word on adapters counts: that of nodes that are down only if none is up."""
        return [node for node in self.nodes if node.up] or self.nodes

    def no_node(self, role: Role, model: str = "") -> NoNode:
        """Return why no leg of this role can be sent."""
        if self.up(role, model=model):
            found = (f"{node.role} node {node.url}: {node.kind}" for node in self.nodes if node.up)
            return NoNode(
                f"no {role} node that is up is of a prefill node's kind ({', '.join(found)})"
            )
        if model and self.up(role):
            return NoNode(
                f"no {role} node that is up has {model!r}; load it there too, or look at the "
                f"router's /health"
            )
        listed = sum(node.role == role for node in self.nodes)
        return NoNode(
            f"no {role} node is up ({listed} listed); try again, or look at the router's /health"
        )

    def kind_for(self, model: str) -> NodeKind:
        """Return of which kind the nodes are to be that a request goes to: that of the shortest
        queue.
        """
        kinds = self.node_kinds(model) if self._foreign else ()
        if len(kinds) < 2:
            return kinds[0] if kinds else NodeKind.KVRELAY
        return min(
            (node for node in self.up(Role.PREFILL, model=model) if node.kind in kinds), key=_depth
        ).kind

    def typical(self, model: str) -> StepCosts:
        """Return the card of a middling node of a model, by which what users expect of it is
        reckoned.
        """
        base = self.base_of(model)
        costs = self._typical.get(base)
        if costs is None:
            known = [
                node.state.costs
                for node in self.nodes
                if node.model == base and node.state.costs is not UNKNOWN
            ]
            ordered = sorted(known, key=lambda each: each.decode_ms(1, 0))
            costs = self._typical[base] = ordered[len(ordered) // 2] if ordered else UNKNOWN
        return costs

    def hold(
        self,
        node: Node,
        share: Share,
        tokens: int,
        prefix: Prefix | None,
        cached: Mapping[str, int],
    ) -> Lease:
        """Take a place on a node, to be given back, for a leg that computes so many tokens less
        those cached.
        """
        self._turns += 1
        node.turn = self._turns
        has = cached.get(node.url, 0)
        lease = Lease(node, max(0, tokens - has), share, has)
        self.choices[node.role, lease.cached_tokens > 0] += 1
        node.leases.add(lease)
        node.state.take(share)
        if prefix is not None:
            lease.sent = self.prefixes.send(prefix, node.url)
        return lease

    def give_back(self, lease: Lease) -> None:
        """Note that the leg has ended; twice is as once."""
        if lease.sent is not None:
            sent, lease.sent = lease.sent, None
            self.prefixes.end(sent)
        lease.node.leases.discard(lease)
        lease.node.state.end(lease.share)
        if not lease.node.wanted:
            self._end_if_idle(lease.node)

    def blame(self, node: Node, why: str, now: float) -> None:
        """Take the node down until a health check that started after `now` succeeds."""
        node.blamed_at = now
        self._take_down(node, why, now)

    def report(self, node: Node, report: HealthReport, started: float, now: float) -> None:
        """Take over what a health check says that was started at `started`."""
        # A vLLM node whose metrics are not to be had does not say which process it is: none other,
        # for all we know.
        generation = report.generation or node.generation
        if node.generation and generation != node.generation:
            self._cut(node)
            self.prefixes.forget(node.url)
            node.state.begins_anew()
            node.drain_asked = False
        node.misses, node.reported_at = 0, max(node.reported_at, started)
        known = (node.kind, node.model, node.adapters, node.up)
        node.generation, node.kind = generation, report.kind
        self._foreign = self._foreign or node.kind is not NodeKind.KVRELAY
        node.fates.answered(generation, started, drains=report.draining or node.drain_asked)
        node.held_blocks, node.release, node.leg_version = (
            report.held_blocks,
            report.release,
            report.leg_version or 1,
        )
        node.note_load(report.load)
        if started >= node.blamed_at:
            self._follow_role(node, report)
        why = self._misfit(node, report)
        if why is not None:
            self._take_down(node, why, now)
        elif started >= node.blamed_at:
            if (
                report.costs is not None
                and report.costs.is_sane
                and report.costs != node.state.costs
            ):
                node.state.measured(report.costs, report.max_gap_ms or node.state.gap_ms)
                self._typical.clear()
            node.model, node.max_model_len = report.model, report.max_model_len
            if report.kv != node.kv:
                node.kv = report.kv
                self.kinds.meet(report.model, report.kv)
            if started >= node.adapters_at:
                node.adapters = frozenset(report.adapters)
            if not node.up:
                node.up, node.since, node.reason = True, now, ""
                _log.info("%s node %s is up", node.role, node.url)
        if known != (node.kind, node.model, node.adapters, node.up):
            self._changed()

    def _follow_role(self, node: Node, report: HealthReport) -> None:
        """File a node whose role has changed while it ran under what it says, any other as it is
        listed.
        """
        node.flips_to = report.flips_to
        listed = self.members.listed(node.url)
        if report.flips and report.role is not Role.AGGREGATED:
            self._refile(node, report.role)
        elif listed is not None:
            self._refile(node, listed.role)

    def note_emptied(self, node: Node) -> None:
        """Forget what was sent there: its prefix cache was reset. A node that tells KV events says
        so itself.
        """
        self._note("emptied", node.url)
        if not self.prefixes.trusts(node.url):
            self.prefixes.forget(node.url)

    def note_adapter(self, node: Node, name: str, *, loaded: bool, now: float) -> None:
        """Note that the node has just said that it has loaded or unloaded an adapter."""
        node.adapters = node.adapters | {name} if loaded else node.adapters - {name}
        node.adapters_at = now
        self._note("loaded" if loaded else "unloaded", node.url, name)
        self._changed()

    def heard(self, url: str, load: Load, now: float, *, draining: bool) -> None:
        """Take over what the node at this address has told of itself, unasked."""
        node = self.find(url)
        if node is not None:
            node.note_load(load)
            if draining:
                self.drains(node, now)

    def note_p2p_address(self, url: str, address: str) -> None:
        """Note where the ZMQ socket of a vLLM node's P2pNcclConnector is."""
        node = self.find(url)
        if node is not None:
            node.p2p_address = address

    def drains(self, node: Node, now: float) -> None:
        """Note that the node takes no new legs: a health check that was started later may say
        otherwise.
        """
        if node.up or node.reason != DRAINS:
            self._note("drains", node.url)
        node.fates.drains(node.generation)
        self.blame(node, DRAINS, now)

    def drain(self, node: Node, now: float) -> None:
        """Send it no new legs, because an operator wants so; those that it has go on."""
        node.drain_asked = True
        self.drains(node, now)

    def flips(self, node: Node, role: Role, now: float) -> None:
        """Note that the node changes its role: a health check that was started later says how that
        went.
        """
        node.flips_to = role
        self._note("flips", node.url, role)
        self.blame(node, f"it changes its role from {node.role} to {role}", now)

    def undrain(self, node: Node, now: float) -> None:
        """Let it take legs again when its next health check says that it does."""
        node.drain_asked, node.blamed_at = False, now

    def unready(self, node: Node, why: str, now: float) -> None:
        """Send no legs to a node that answered its health check, but not with 200: it ends those it
        has itself.
        """
        node.misses, node.flips_to = 0, None
        self._take_down(node, why, now)

    def refuses(self, node: Node, now: float) -> None:
        """Note that nobody listens there. A draining process goes on with its legs, a dead one has
        lost them.
        """
        node.fates.died(node.generation)
        self.unready(node, "it refuses connections", now)

    def dead(self, node: Node, why: str, now: float) -> None:
        """Note that no leg will be answered: the process has ended, or says that its engine has, or
        hangs.
        """
        node.fates.died(node.generation)
        self.blame(node, why, now)
        node.misses, node.flips_to = 0, None
        self._cut(node)

    def miss(self, node: Node, why: str, started: float, now: float) -> None:
        """Count a health check that was not answered at all, and began at `started`. Those that
        overlap are one.
        """
        node.flips_to = None
        if started >= node.missed_at:
            node.misses, node.missed_at = node.misses + 1, now
        self._take_down(node, why, now)
        if node.misses >= LOST_AFTER_MISSES:
            self._cut(node)

    def _misfit(self, node: Node, report: HealthReport) -> str | None:
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
        if report.unspoken is not None:
            return report.unspoken
        pod = self.members.told[Source.KUBERNETES].get(node.url)
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
            self._changed()
        node.reason = why

    def _cut(self, node: Node) -> None:
        for lease in list(node.leases):
            cut, lease.cut = (
                lease.cut,
                None,
            )  # once: a leg that is ending already cannot be cut again
            if cut is not None:
                cut()
