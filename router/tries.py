"""On which nodes one leg was tried, and whether it may be tried on another. Owns no connection."""

from __future__ import annotations

import time

from router.legs import LegFailed, Refused
from router.means import Means
from router.node import Node, NodeKind
from router.policies.policy import Ask
from wire.config import Role
from wire.errors import NodeFailed, NoNode, Overloaded

__all__ = ["Tries"]


class Tries:
    """Of the legs of one kind of one walk. `nodes` are those that broke, or had no room."""

    def __init__(self, means: Means) -> None:
        self.nodes: list[Node] = []
        self._means = means

    def another(self, ask: Ask) -> bool:
        """Whether there is another node, now or soon."""
        try:
            nodes = self._means.doors.takers(ask, self.nodes, time.monotonic())
        except Overloaded:
            return ask.role is Role.DECODE  # it will wait for them
        except NoNode:
            return False
        if ask.role is Role.DECODE:
            return True
        return bool(
            self._means.doors.with_partner(
                nodes, self._means.pool.up(Role.DECODE, model=ask.model, kind=NodeKind.KVRELAY)
            )[0]
        )

    def may_go_on(self, why: LegFailed, *, begun: bool) -> bool:
        """Whether a leg may be tried again, for which the retry budget is asked where it must be.

        `begun`: the client has a part of the answer. What a lost process had to do must be done elsewhere, too."""
        if len(self.nodes) >= self._means.attempts:
            return False
        if why.lost or why.draining or begun or self._means.retries.take(time.monotonic()):
            return True
        self._means.metrics.retries_refused.inc()
        return False

    def failure(self, role: Role, why: LegFailed | Refused) -> NodeFailed | Refused:
        """What the client is told when there is nowhere left to go."""
        if isinstance(why, Refused):
            return why
        tried = len(self.nodes)
        failure = NodeFailed(f"no {role} node could serve the request ({tried} tried); the last one: {why.message}")
        failure.status, failure.retry_after_s = why.status, why.retry_after_s
        return failure
