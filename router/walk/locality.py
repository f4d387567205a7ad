"""Where a prompt is computed: on a prefill node, or on the decode node that goes on with it.

On the decode node where no prefill node can, or where that is better by the measured costs
(router/walk/conditional.py). Counts these by reason. Owns no leg.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from router.metrics import Metrics
from router.nodes.doors import Doors
from router.nodes.node import Node, NodeKind
from router.nodes.pool import Pool
from router.policies.policy import Ask
from router.walk.binding import Binding
from wire.config import Role
from wire.errors import KvNotLoaded, NodeFailed, NoNode, Overloaded

__all__ = ["Locality", "Source"]


class Source(msgspec.Struct, frozen=True):
    """A prefill node is to compute the prompt."""

    ask: Ask
    """With what is known of the prompt, if that was looked up already."""
    node: Node | None
    """The one that was compared with the decode node. None: it is chosen when its leg is sent."""


class Locality:
    """One for all walks of a router."""

    def __init__(self, pool: Pool, doors: Doors, binding: Binding, metrics: Metrics, conditional: bool) -> None:
        self._pool, self._doors, self._binding, self._metrics = pool, doors, binding, metrics
        self._conditional = conditional

    def source(self, prefill: Ask, decode: Ask) -> Source | None:
        """For a new request, by what its two legs ask: None if its whole prompt is computed on its decode node.

        Raises NoNode, Overloaded, KvNotLoaded if it can go nowhere at all."""
        if not self._pool.up(Role.DECODE, model=prefill.model, kind=NodeKind.KVRELAY):
            raise self._pool.no_node(Role.DECODE, prefill.model)
        try:
            takers = self._doors.takers(prefill, (), time.monotonic())
        except NoNode as why:
            self.local(decode, "no_prefill_node", why)
            return None
        paired, unlike = self._doors.with_partner(takers, prefill.model)
        if not paired:
            self.local(decode, "incompatible", KvNotLoaded.because("Incompatible", unlike))
            return None
        return self._compared(prefill, paired)

    def again(self, prefill: Ask) -> Node | None:
        """For an answer that has begun and has lost its KV: the prefill node that makes it again, if that is better."""
        try:
            takers = self._doors.takers(prefill, (), time.monotonic())
        except (NoNode, Overloaded):
            return None
        paired, _ = self._doors.with_partner(takers, prefill.model)
        if not paired:
            return None
        node, told = self._pool.choose(prefill, paired)
        if self._conditional:
            decision = self._binding.decide(told, node)
            if decision is None or decision.local:
                return None
        return node

    def local(self, decode: Ask, reason: str, otherwise: NoNode | KvNotLoaded | NodeFailed) -> None:
        """The prompt is computed on a decode node; raises `otherwise` if none may."""
        try:
            self._binding.computing(decode)
        except NoNode:
            raise otherwise from None
        self._metrics.local(decode.model, reason)

    def _compared(self, prefill: Ask, paired: Sequence[Node]) -> Source | None:
        if not self._conditional:
            return Source(prefill, None)
        node, told = self._pool.choose(prefill, paired)
        decision = self._binding.decide(told, node)
        if decision is None or not decision.local:
            return Source(told, node)
        self._metrics.local(prefill.model, decision.reason.value)
        return None
