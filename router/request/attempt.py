"""One prefill or decode request on one node, and what the running requests of a router share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvrelay.router.background import BackgroundTasks
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.breaker import BreakerCall
from kvrelay.router.nodes.health import NodeHealth
from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.request.placer import Placer
from kvrelay.router.request.progress import FramePosition
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_errors import AttemptFailed, Refused
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NodeFailed, Overloaded
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.router_config import RouterConfig

if TYPE_CHECKING:
    from kvrelay.router.request.run import RequestRun

__all__ = ["FLOOR", "SHARE", "WINDOW_S", "Attempt", "Attempts", "RetryBudget", "RunContext"]

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


class SilenceWatch:
    """A set of attempts that are checked for silence once a second, not with each frame."""

    def __init__(self) -> None:
        self._attempts: set[Attempt] = set()
        self._scheduled = False

    def add(self, attempt: Attempt) -> None:
        self._attempts.add(attempt)
        if not self._scheduled:
            self._schedule()

    def discard(self, attempt: Attempt) -> None:
        self._attempts.discard(attempt)

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_later(_CHECK_SILENCE_S, self._check)

    def _check(self) -> None:
        self._scheduled = False
        now = time.monotonic()
        for attempt in list(self._attempts):
            attempt.check_silence(now)
        if self._attempts:
            self._schedule()


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
    silence: SilenceWatch = field(default_factory=SilenceWatch)
    fails_on_forced_tools: set[tuple[str, str]] = field(default_factory=set)
    """URL and process of vLLM prefill nodes that fail on a forced tool call of one token."""

    async def release_kv(self, node: Node, request_id: str) -> None:
        """Have a prefill node free KV that no decode node will fetch."""
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
        """Return the error for the client when no attempt is left."""
        if isinstance(why, Refused):
            return why
        failure = NodeFailed(
            f"no {self._role} node could serve the request ({self._in_vain} tried); the last one: "
            f"{why.message}"
        )
        failure.status, failure.retry_after_s = why.status, why.retry_after_s
        return failure


class Attempt:
    """A prefill or decode request on one node; `source` has the KV that a decode node fetches."""

    __slots__ = (
        "_call",
        "_lease",
        "_patience_s",
        "_position",
        "_run",
        "_silent",
        "_source",
        "_times",
        "_watched_since",
    )

    def __init__(
        self, run: RequestRun, lease: Lease, position: FramePosition, source: Node | None = None
    ) -> None:
        now, health, decoding = time.monotonic(), run.context.node_health, position.decoding
        self._run, self._lease, self._position, self._source = run, lease, position, source
        computes = decoding and source is None
        self._call = health.begin(lease.node, lease.role, now, computes=computes)
        self._times = run.timeline.begin_attempt(now, decoding=decoding, fetches=source is not None)
        self._patience_s = health.patience_s(lease.tokens)
        self._watched_since = now
        self._silent = False  # it was cut because its node sent nothing

    async def run(self, body: bytes) -> FrameKind:
        """Run the request to its last frame. Raises AttemptFailed, Refused, Diverged,
        PoisonRequest.
        """
        run, lease, call, context = self._run, self._lease, self._call, self._run.context
        context.silence.add(self)
        try:
            end = await context.node_client.run(
                lease, run.job.path, body, run.headers, self.on_frame
            )
            if self._position.decoding and end is FrameKind.HANDOVER:
                raise AttemptFailed("the node handed a decode request over")
            call.succeeded(time.monotonic())
            return end
        except AttemptFailed as why:  # noqa: F841 - it is raised below
            if self._silent:
                why = AttemptFailed(f"the node has said nothing for {self._patience_s:g} s")
                why.paid = True
            context.note_failure(run.job.id, lease, call, why)
            if why.reading:
                run.unread.append(lease)
            if why.lost and why.reached and not call.answered:
                run.crashes.lost(lease, time.monotonic())
                await run.crashes.may_go_on()
            raise why  # in no other local variable, which its traceback would keep
        except Refused as why:
            if why.kv_error and self._source is not None:
                context.note_kv_failure(self._source, lease.node, why.kv_error)
            raise
        finally:
            context.silence.discard(self)
            run.timeline.end_attempt(self._times, time.monotonic(), more=not run.progress.ended)
            call.close()

    def on_frame(self, frame: Frame) -> Awaitable[None] | None:
        """Pass a frame on; return what to wait for if the client does not read."""
        # For every token of every answer: each call in here is 1 % of what the router costs.
        run, call = self._run, self._call
        now, ids, payload = time.monotonic(), frame.token_ids, frame.payload
        if frame.kind is not FrameKind.TOKENS:
            payload = self._on_other_frame(frame, now)
        if frame.kv_error and self._source is not None:
            run.kv_failed = True
            run.context.note_kv_failure(self._source, self._lease.node, frame.kv_error)
        timeline, progress, reply = run.timeline, run.progress, run.reply
        if progress.take(frame, self._position):
            if ids:
                timeline.last_token = now
                if timeline.first_token is None:
                    timeline.first_token = now
            if payload:
                last = progress.ended and not run.job.part
                (reply.put_last if last else reply.put)(payload)
        if ids and self._times.tokens is None and not frame.choice:
            timeline.note_first_token(self._times, self._position.at[0], now)
        if ids and call.steady:
            call.heard_at = now
        elif call.heard(now, tokens=bool(ids)):
            self._on_first_tokens()
        flow = reply.flow
        if flow is None or not flow.write_paused:
            return None
        return flow.drain()

    def _on_first_tokens(self) -> None:
        run = self._run
        run.context.node_health.answered(self._call)
        run.crashes.first_token.set()
        self._lease.answered()
        if self._source is not None and not run.kv_failed:
            run.context.node_health.kv_came(self._source, self._lease.node)

    def _on_other_frame(self, frame: Frame, now: float) -> bytes:
        run, timing = self._run, frame.timing
        if timing is not None:
            run.timeline.note_report(timing, self._times)
        if frame.kind is FrameKind.TICKET and not self._position.decoding:
            run.on_ticket(frame, self._lease)
        return run.on_end(frame, now) if frame.kind is FrameKind.END else frame.payload

    def check_silence(self, now: float) -> None:
        """Cut the request if its node has sent nothing for too long."""
        run, lease = self._run, self._lease
        since = max(self._watched_since, self._call.heard_at)
        if since + self._patience_s > now or lease.cut is None or self._silent:
            return
        self._watched_since = now
        # The client may not read, and a decode node may be waiting for the prefill node.
        if run.reply.full or (self._position.decoding and run.is_prefilling):
            return
        self._silent = run.context.retries.spend(now)
        if self._silent:
            lease.cut()
