"""Decisions on a request that failed on a node: whose fault it was, and whether it is tried again.

A request's fingerprint is a hash of its API key and whole body, so that sending it again gives it
no fresh nodes. A lost process counts once. A fully answered request is forgotten: most requests on
a node that dies are innocent. After the first loss a request goes on at once; before a third node
it waits until health checks show which processes have died.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.request.placer import Placer
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_stream import AttemptFailed, Refused
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NodeFailed, Overloaded, PoisonRequest
from kvrelay.wire.router_config import RouterConfig

__all__ = [
    "MAX_LOST",
    "REFUSED_S",
    "Attempts",
    "CrashRecord",
    "Poison",
    "RunContext",
    "Suspect",
    "fingerprint_of",
]

SHARE, FLOOR, WINDOW_S = 0.2, 10, 10.0
MAX_LOST = 2
"""Processes that one request may be lost with: its first node, and one more."""
REFUSED_S = 300.0
"""Seconds that a request is refused after the last death: about a large model's load time."""
_MAX_SUSPECTS = 4096
# By then a node has shown if it lives: a node that is down is asked twice a second, and has 2 s to
# answer.
_VERDICT_S = 5.0

_log = logging.getLogger("kvrelay.router")


class RetryBudget:
    """A limit of retries: a share of the last seconds' requests, and a few. Pure.

    Prior art: the retry budgets of Finagle and Linkerd. Both counts decay by `e` in WINDOW_S.
    """

    def __init__(self) -> None:
        self._requests = self._retries = self._at = 0.0

    def add_request(self, now: float) -> None:
        self._decay(now)
        self._requests += 1

    def spend(self, now: float) -> bool:
        self._decay(now)
        allowed = self._retries + 1 <= FLOOR + SHARE * self._requests
        self._retries += allowed
        return allowed

    def _decay(self, now: float) -> None:
        left = math.exp((self._at - now) / WINDOW_S)
        self._requests, self._retries, self._at = self._requests * left, self._retries * left, now


@dataclass(slots=True)
class RunContext:
    """A router's parts that its running requests use, and its configuration now."""

    pool: Pool
    placer: Placer
    node_client: NodeClient
    metrics: Metrics
    config: RouterConfig
    retries: RetryBudget = field(default_factory=RetryBudget)

    def note_failure(self, job_id: str, lease: Lease, call: object, why: AttemptFailed) -> None:
        """Note that an attempt failed by its node's fault, or because the node drains."""
        node, now = lease.node, time.monotonic()
        if why.draining:
            if lease.role is node.role:  # else it drained to change its role, and has
                self.pool.note_draining(node, now)
            return
        _log.warning(
            "id=%s: the %s request failed on %s: %s", job_id, lease.role, node.url, why.detail
        )
        if why.reading:
            return  # another node will show whose fault that is
        # A process lost with all of its requests has failed once.
        if node.up or not why.lost:
            self.pool.failed(call, node, why.detail, now)
        if why.lost:
            self.pool.blame(node, f"a request failed on it: {why.detail}", now)
        elif why.retry_after_s is not None:
            self.pool.rest(node, why.retry_after_s, now)

    def note_if_full(self, lease: Lease, why: Refused) -> bool:
        """Return whether a node refused for want of room; then it rests."""
        if why.status != Overloaded.status:
            return False
        self.pool.rest(lease.node, why.retry_after_s, time.monotonic())
        self.metrics.full.labels(lease.role.value).inc()
        return True

    def note_kv_failure(self, prefill: Node, decode: Node, cause: str) -> None:
        self.metrics.kv_failures.labels(cause).inc()
        self.pool.kv_failed(prefill, decode, cause, time.monotonic())


@dataclass
class Attempts:
    _context: RunContext
    _role: Role
    _failed: dict[Node, str] = field(default_factory=dict)
    """Nodes, and the process of each then."""
    _in_vain: int = 0

    def nodes(self) -> list[Node]:
        """Return the nodes not to try again, unless restarted since."""
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

        The retry budget is not asked if the client has a part of the answer (`begun`), nor after a
        lost process, whose place is free.
        """
        if self._in_vain < self._context.config.attempts:
            free = why.lost or why.draining or begun
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


Suspect = tuple[frozenset[str], float]
"""The processes that died with a request, and until when that counts."""
_NOBODY: Suspect = frozenset(), 0.0


class Poison:
    """A table of suspects of one router process; false while there are none. Pure."""

    def __init__(self) -> None:
        self._suspects: dict[bytes, Suspect] = {}  # by fingerprint, the oldest death first
        self.tell: Callable[[bytes, str], None] = lambda _fingerprint, _process: None
        """Called with each death; without a process when a request was answered."""

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def died(self, fingerprint: bytes, process: str, now: float) -> None:
        processes, _ = self._suspects.pop(fingerprint, _NOBODY)
        self._suspects[fingerprint] = processes | {process}, now + REFUSED_S
        if len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self.tell(fingerprint, process)

    def spared(self, fingerprint: bytes) -> None:
        """Forget a fully answered request, unless it is refused."""
        if 0 < len(self._suspects.get(fingerprint, _NOBODY)[0]) < MAX_LOST:
            del self._suspects[fingerprint]
        self.tell(fingerprint, "")

    def suspects(self, now: float) -> Mapping[bytes, Suspect]:
        while self._suspects and next(iter(self._suspects.values()))[1] <= now:
            del self._suspects[next(iter(self._suspects))]
        return self._suspects

    def take_over(self, suspects: Mapping[bytes, Suspect]) -> None:
        self._suspects = dict(suspects)

    def known(self, fingerprint: bytes, now: float) -> Suspect:
        return self.suspects(now).get(fingerprint, _NOBODY)


def fingerprint_of(key: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=hashlib.sha256(key.encode()).digest()).digest()


class CrashRecord:
    def __init__(self, poison: Poison, metrics: Metrics, fingerprint: Callable[[], bytes]) -> None:
        """`fingerprint` is called at most once: it takes 1 ms per MB of body."""
        self._poison, self._metrics = poison, metrics
        self._make = fingerprint
        self.first_token = asyncio.Event()
        """A node has sent a token: the request can be computed."""
        self._died: dict[str, asyncio.Future[bool]] = {}  # by process

    @cached_property
    def _fingerprint(self) -> bytes:
        return self._make()

    def _known(self) -> Suspect:
        if not self._poison:  # saves the fingerprint
            return _NOBODY
        return self._poison.known(self._fingerprint, time.monotonic())

    def check(self) -> None:
        """Raise PoisonRequest while the request is refused."""
        processes, until = self._known()
        if len(processes) >= MAX_LOST:
            again_s = until - time.monotonic()
            self._metrics.poison.labels("refused").inc()
            died = f"{MAX_LOST} nodes died while they had this request"
            raise _poison_request(f"{died}, so it is refused for {again_s:.0f} s more", again_s)

    async def lost(self, lease: Lease) -> None:
        """Note a lost process; return if the request may go to one more node. Raises PoisonRequest.

        A process that is still silent counts as dead for this request alone.
        """
        process = f"{lease.node.url} {lease.generation}"
        if process not in self._died:
            verdict = self._died[process] = asyncio.get_running_loop().create_future()
            # Not the body, which the verdict outlives.
            poison, fingerprint, asked = self._poison, self._fingerprint, self._died

            def tell(died: bool) -> None:
                verdict.set_result(died)
                if died and process in asked:
                    poison.died(fingerprint, process, time.monotonic())

            lease.node.ask_if_died(lease.generation, time.monotonic(), tell)
        if self._count() < MAX_LOST:
            return
        unknown = [verdict for verdict in self._died.values() if not verdict.done()]
        if unknown:
            await asyncio.wait(unknown, timeout=_VERDICT_S)
        if self._count() >= MAX_LOST:
            self._metrics.poison.labels("stopped").inc()
            lost = f"{MAX_LOST} nodes were lost while they had this request"
            raise _poison_request(f"{lost}, so it is tried on no other", REFUSED_S)

    def answered(self) -> None:
        self._died.clear()  # a death that is told later counts no more
        if self._known()[0]:
            self._poison.spared(self._fingerprint)

    def _count(self) -> int:
        lost = {each for each, died in self._died.items() if not died.done() or died.result()}
        return len(lost | self._known()[0]) if lost else 0


def _poison_request(why: str, again_s: float) -> PoisonRequest:
    error = PoisonRequest(f"{why}; change it, or send it again after the time in Retry-After")
    error.retry_after_s, error.headers = math.ceil(again_s), {"x-should-retry": "false"}
    return error
