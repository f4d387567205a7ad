"""On which nodes one leg was tried, and whether it may be tried on another. Owns no connection."""

from __future__ import annotations

import time

from kvrelay.router.nodes.node import Node
from kvrelay.router.request.means import RunContext
from kvrelay.router.transport.node_client import AttemptFailed, Refused
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NodeFailed

__all__ = ["Attempts"]


class Attempts:
    """A record of the legs of one role of one walk."""

    def __init__(self, means: RunContext, role: Role) -> None:
        self._means, self._role = means, role
        self._generations: dict[Node, str] = {}  # of the nodes that broke: which process that was
        self._in_vain = 0

    def nodes(self) -> list[Node]:
        """Return those that are not asked again. Where another process stands by now, nothing was
        tried yet.
        """
        return [
            node for node, generation in self._generations.items() if node.generation == generation
        ]

    def failed(self, node: Node, why: AttemptFailed, *, told: bool = False) -> None:
        """Note that a leg broke there. `told`: of something new before; then the next one is the
        first try.

        A node that was lost or drains is down until it answers a health check, and may be asked
        again then.
        """
        if told:
            self._generations.clear()
            self._in_vain = 0
        else:
            self._in_vain += not why.draining
        if not (why.lost or why.draining):
            self._generations[node] = node.generation

    def require_another(self, why: AttemptFailed, *, begun: bool = False) -> None:
        """Raise NodeFailed unless the leg may be tried again, for which the retry budget is asked
        where it must be.

        `begun`: the client has a part of the answer. What a lost process had to do must be done
        elsewhere, too.
        """
        if self._in_vain < self._means.config.attempts:
            if (
                why.lost
                or why.draining
                or why.paid
                or begun
                or self._means.retries.take(time.monotonic())
            ):
                self._means.metrics.failovers.labels(self._role).inc()
                return
            self._means.metrics.retries_refused.inc()
        raise self.failure(why) from why

    def failure(self, why: AttemptFailed | Refused) -> NodeFailed | Refused:
        """Return what the client is told when there is nowhere left to go."""
        if isinstance(why, Refused):
            return why
        failure = NodeFailed(
            f"no {self._role} node could serve the request ({self._in_vain} tried); the last one: "
            f"{why.message}"
        )
        failure.status, failure.retry_after_s = why.status, why.retry_after_s
        return failure
