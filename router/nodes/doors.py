"""Which nodes may take a leg now, and what the end of a leg means for its node. Pure: `now` is an
argument.

A node that is up (router/nodes/pool.py) takes a leg unless its breaker is open, or it rests: it has
said for how long it has no room. Where only open breakers are left, one leg at a time may try: a
cluster's last node is never given up.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection

from kvrelay.router.nodes.breaker import Breaker, State, Verdict
from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.nodes.pairing import FailedPairs, Links
from kvrelay.router.nodes.passage import Passage
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.placement import LINK_MS
from kvrelay.router.policies import Ask
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode, Overloaded

__all__ = ["Doors"]

_REST_CAP_S = 30.0
# A leg without a word for so long is lost. Only a backstop: a node that hangs is seen by its health
# checks.
_PATIENCE_S = 60.0
_PATIENCE_S_PER_TOKEN = 0.01
_PATIENCE_TIMES = 8.0
_FADING = 0.999
# A pair that failed lately is worth a detour of so long.
_AVOIDED_MS = 10_000.0

_UNTIL_THEY_MEET_AGAIN_S = 75.0

_log = logging.getLogger("kvrelay.router")


class Doors:
    """A judge of which nodes of a pool may take legs."""

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        self.faults = FailedPairs()
        self.links = Links()
        self._pool = pool
        self._rng = rng
        self._troubled: set[Node] = set()
        """Those of which some breaker is not closed, or which rest: all others need no look."""
        self._slowest_s = 0.0

    def breaker(self, node: Node, leg: Role) -> Breaker:
        """Return that of a node for a kind of leg."""
        if leg not in node.breakers:
            node.breakers[leg] = Breaker(self._rng)
        return node.breakers[leg]

    def takers(
        self, ask: Ask, exclude: Collection[Node], now: float, *, computes: bool = False
    ) -> list[Node]:
        """Return the nodes that may take this leg, whatever room they have. Raises NoNode, or
        Overloaded if they rest.

        `computes`: a decode leg that computes its prompt itself.
        """
        nodes = self._pool.up(ask.role, exclude, ask.model, NodeKind.KVRELAY)
        if not nodes:
            raise self._pool.no_node(ask.role, ask.model)
        if not self._troubled:
            return nodes
        self._troubled = {
            node
            for node in self._troubled
            if any(
                each.state(now) is not State.CLOSED or each.opens_in(now)
                for each in node.breakers.values()
            )
        }
        legs = (Role.PREFILL, Role.DECODE) if computes else (ask.role,)
        breakers = {node: [self.breaker(node, leg) for leg in legs] for node in nodes}
        verdicts = {node: max(each.verdict(now) for each in breakers[node]) for node in nodes}
        best = min(verdicts.values())
        if best in (Verdict.TAKES, Verdict.LAST):
            return [node for node in nodes if verdicts[node] is best]
        soonest_s = max(
            1, math.ceil(min(max(one.opens_in(now) for one in each) for each in breakers.values()))
        )
        raise _nobody(
            ask.role, soonest_s, rest=best is Verdict.RESTS
        )  # kept in no local variable: a circle

    def link_ms(self, now: float) -> Callable[[str, str], float] | None:
        """Return what a hand-over takes by the addresses of its nodes; None if all are alike."""
        if not (self.faults or self.links.differ):
            return None

        def link_ms(prefill: str, decode: str) -> float:
            p, d = self._pool.find(prefill), self._pool.find(decode)
            if p is None or d is None:
                return LINK_MS
            avoided = self.faults.avoided(_name(p), _name(d), now)
            return _AVOIDED_MS if avoided else self.links.ms(prefill, decode)

        return link_ms

    def enter(self, node: Node, leg: Role, now: float, *, computes: bool) -> Passage:
        """Begin a leg on this node."""
        return Passage(
            self.breaker(node, Role.PREFILL if computes else leg), self.breaker(node, leg), now
        )

    def patience_s(self, tokens: int) -> float:
        """Return for how many seconds a leg that waits for so many tokens may say nothing before it
        counts as lost.
        """
        return max(_PATIENCE_S + tokens * _PATIENCE_S_PER_TOKEN, _PATIENCE_TIMES * self._slowest_s)

    def began(self, passage: Passage) -> None:
        """Note that the leg's first tokens came."""
        self._slowest_s = max(passage.first_s or 0.0, self._slowest_s * _FADING)

    def rest(self, node: Node, leg: Role, seconds: float | None, now: float) -> None:
        """Send the node no such legs for a while: it has no room, and says for how long."""
        self.breaker(node, leg).rest(
            min(_REST_CAP_S, 1.0 if seconds is None else max(0.1, seconds)), now
        )
        self._troubled.add(node)

    def failed(self, passage: Passage, node: Node, why: str, now: float) -> None:
        """Note that the leg broke by the node's own fault."""
        if passage.failed(why, now):
            _log.warning("%s gets no legs for a while, the last one broke: %s", node.url, why)
            self._troubled.add(node)

    def could_not_read(self, node: Node, leg: Role, now: float) -> None:
        """Count a request against a node that has failed as it read it, and that another one could
        read.
        """
        self.failed(
            self.enter(node, leg, now, computes=False),
            node,
            "it fails on requests that others can read",
            now,
        )

    def kv_came(self, peer: Node, node: Node) -> None:
        """Note that the decode node has the prefill node's KV."""
        self.faults.worked(_name(peer), _name(node))

    def kv_failed(self, peer: Node, node: Node, cause: str, now: float) -> None:
        """Note that the decode node says that the prefill node's KV did not come."""
        _log.warning("%s says that the KV of %s did not come: %s", node.url, peer.url, cause)
        self.faults.failed(_name(peer), _name(node), cause, now)

    def met(self, peer: Node, node: Node, *, failed: bool, now: float) -> None:
        """Note that they were asked to hand a block over (router/nodes/warm_up.py), and will be
        again if it failed.
        """
        if failed:
            self.faults.failed(
                _name(peer), _name(node), "TransferError", now, _UNTIL_THEY_MEET_AGAIN_S
            )
        else:
            self.kv_came(peer, node)


def _nobody(role: Role, soonest_s: int, *, rest: bool) -> NoNode | Overloaded:
    none: NoNode | Overloaded
    if rest:
        none = Overloaded(f"no {role} node has room now; try again in {soonest_s} s")
    else:
        none = NoNode(f"all {role} nodes break now, and the router is trying them; try again")
    none.retry_after_s = soonest_s
    return none


def _name(node: Node) -> str:
    """Return the name of its process: one that is restarted is another to its peers."""
    return node.generation or node.url
