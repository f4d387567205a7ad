"""Parts of a router that its running requests share, and the budget of retries."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvrelay.router.background import BackgroundTasks
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.breaker import BreakerCall
from kvrelay.router.nodes.health import NodeHealth
from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.request.placer import Placer
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_errors import AttemptFailed, Refused
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NodeFailed, Overloaded
from kvrelay.wire.router_config import RouterConfig

if TYPE_CHECKING:
    from kvrelay.router.request.attempt import Attempt

__all__ = ["FLOOR", "SHARE", "WINDOW_S", "Attempts", "RetryBudget", "RunContext", "watch_silence"]

SHARE = 0.2
FLOOR = 10
WINDOW_S = 10
_CHECK_SILENCE_S = 1.0

_log = logging.getLogger("kvrelay.router")


class RetryBudget:
    """A limit of retries: a share of the last seconds' requests, and a few. Pure.

    Prior art: the retry budgets of Finagle and Linkerd.
    """

    def __init__(self) -> None:
        self._second = 0
        self._requests = [0] * WINDOW_S
        self._retries = [0] * WINDOW_S

    def add_request(self, now: float) -> None:
        """Count a request; `now` is in monotonic seconds."""
        self._advance(now)
        self._requests[self._second % WINDOW_S] += 1

    def spend(self, now: float) -> bool:
        """Count a retry and return True, or return False if none is left."""
        self._advance(now)
        if sum(self._retries) >= FLOOR + SHARE * sum(self._requests):
            return False
        self._retries[self._second % WINDOW_S] += 1
        return True

    def _advance(self, now: float) -> None:
        second = int(now)
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._requests[passed % WINDOW_S] = self._retries[passed % WINDOW_S] = 0
        self._second = max(self._second, second)


async def watch_silence(attempts: set[Attempt]) -> None:
    """Check attempts for silence once a second, not with each frame."""
    while True:
        await asyncio.sleep(_CHECK_SILENCE_S)
        for attempt in list(attempts):
            attempt.check_silence(time.monotonic())


@dataclass(frozen=True, slots=True)
class RunContext:
    """A router's parts that its running requests use, and its configuration when they began."""

    pool: Pool
    node_health: NodeHealth
    placer: Placer
    node_client: NodeClient
    background: BackgroundTasks
    metrics: Metrics
    config: RouterConfig
    retries: RetryBudget = field(default_factory=RetryBudget)
    silence: set[Attempt] = field(default_factory=set)
    """Attempts that are watched for silence."""
    fails_on_forced_tools: set[tuple[str, str]] = field(default_factory=set)
    """URL and process of vLLM prefill nodes that fail on a forced tool call of one token."""

    async def release_kv(self, node: Node, request_id: str) -> None:
        released = await self.node_client.tell_of_kv(node, "release", request_id)
        self.metrics.releases.labels("yes" if released else "no").inc()

    def note_failure(
        self, job_id: str, lease: Lease, call: BreakerCall, why: AttemptFailed
    ) -> None:
        """Note that an attempt failed by its node's fault, or because the node drains."""
        node, now = lease.node, time.monotonic()
        if why.draining:
            self.pool.note_draining(node, now)
            return
        _log.warning(
            "id=%s: the %s request failed on %s: %s", job_id, lease.role, node.url, why.detail
        )
        if why.reading:
            return
        # A process that is lost with all of its requests has failed once.
        if node.up or not why.lost:
            self.node_health.failed(call, node, why.detail, now)
        if why.lost:
            self.pool.blame(node, f"a request failed on it: {why.detail}", now)
        elif why.retry_after_s is not None:
            self.node_health.rest(node, lease.role, why.retry_after_s, now)

    def note_if_full(self, lease: Lease, why: Refused) -> bool:
        """Return whether a node refused for want of room; then it rests."""
        if why.status != Overloaded.status:
            return False
        self.node_health.rest(lease.node, lease.role, why.retry_after_s, time.monotonic())
        self.metrics.full.labels(lease.role.value).inc()
        return True

    def note_kv_failure(self, prefill: Node, decode: Node, cause: str) -> None:
        """Note that a decode node did not get a prefill node's KV."""
        self.metrics.kv_failures.labels(cause).inc()
        self.node_health.kv_failed(prefill, decode, cause, time.monotonic())


class Attempts:
    """A record of one request's attempts for one role."""

    def __init__(self, context: RunContext, role: Role) -> None:
        self._context, self._role = context, role
        self._failed: dict[Node, str] = {}  # nodes, and their processes at that time
        self._in_vain = 0

    def nodes(self) -> list[Node]:
        """Return the nodes that are not tried again, unless they were restarted since."""
        return [node for node, process in self._failed.items() if node.generation == process]

    def failed(self, node: Node, why: AttemptFailed, *, progressed: bool = False) -> None:
        """Note a failed attempt; one that brought new tokens starts the count again.

        A node that was lost or drains may be tried again once it answers a health check.
        """
        if progressed:
            self._failed.clear()
            self._in_vain = 0
        else:
            self._in_vain += not why.draining
        if not (why.lost or why.draining):
            self._failed[node] = node.generation

    def require_another(self, why: AttemptFailed, *, begun: bool = False) -> None:
        """Raise NodeFailed unless another attempt is allowed.

        The retry budget is not asked if the client has a part of the answer (`begun`), nor for
        what a lost process was doing: its place is free.
        """
        if self._in_vain < self._context.config.attempts:
            free = why.lost or why.draining or why.paid or begun
            if free or self._context.retries.spend(time.monotonic()):
                self._context.metrics.failovers.labels(self._role).inc()
                return
            self._context.metrics.retries_refused.inc()
        raise self.failure(why) from why

    def failure(self, why: AttemptFailed | Refused) -> NodeFailed | Refused:
        if isinstance(why, Refused):
            return why
        failure = NodeFailed(
            f"no {self._role} node could serve the request ({self._in_vain} tried); the last one: "
            f"{why.message}"
        )
        failure.status, failure.retry_after_s = why.status, why.retry_after_s
        return failure
