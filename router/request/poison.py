"""Requests on which nodes die: how they are known, and where they are stopped.

A request's fingerprint is a hash of its API key and whole body, so that sending it again gives it
no fresh nodes. A process counts once. A request that is answered to its end is forgotten: most
requests on a node that dies are innocent.

After the first loss a request goes on at once. Before a third node it waits until health checks
show which processes have died.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Set
from functools import cached_property

import msgspec

from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.node import Lease
from kvrelay.wire.errors import PoisonRequest

__all__ = ["MAX_LOST", "REFUSED_S", "CrashRecord", "Poison", "Suspect", "fingerprint_of"]

MAX_LOST = 2
"""Processes that one request may be lost with: its first node, and one more."""
REFUSED_S = 300.0
"""Seconds that a request is refused after the last death: as long as a large model takes to load."""
_MAX_SUSPECTS = 4096
# By then a node that lives, or refuses connections, has shown it: by default a node that is down is
# asked twice a second, and has 2 s to answer.
_VERDICT_S = 5.0


class Suspect(msgspec.Struct, frozen=True, array_like=True):
    """A request's list of processes that died with it, and until when that counts."""

    processes: frozenset[str] = frozenset()
    until: float = 0.0


_NOBODY = Suspect()


class Poison:
    """A table of suspects of one router process; false while there are none. Pure."""

    def __init__(self) -> None:
        self._suspects: dict[bytes, Suspect] = {}  # by fingerprint, the oldest death first
        self.tell: Callable[[bytes, str], None] = lambda _fingerprint, _process: None
        """Called with each death, and without a process when a request was answered."""

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def died(self, fingerprint: bytes, process: str, now: float) -> None:
        known = self._suspects.pop(fingerprint, _NOBODY)
        self._suspects[fingerprint] = Suspect(known.processes | {process}, now + REFUSED_S)
        if len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self.tell(fingerprint, process)

    def spared(self, fingerprint: bytes) -> None:
        """Forget a request that was answered to its end, unless it is refused."""
        suspect = self._suspects.get(fingerprint)
        if suspect is not None and len(suspect.processes) < MAX_LOST:
            del self._suspects[fingerprint]
        self.tell(fingerprint, "")

    def suspects(self, now: float) -> Mapping[bytes, Suspect]:
        """Return the suspects that count now, by fingerprint."""
        while self._suspects and next(iter(self._suspects.values())).until <= now:
            del self._suspects[next(iter(self._suspects))]
        return self._suspects

    def take_over(self, suspects: Mapping[bytes, Suspect]) -> None:
        self._suspects = dict(suspects)

    def processes(self, fingerprint: bytes, now: float) -> Set[str]:
        return self.suspects(now).get(fingerprint, _NOBODY).processes

    def refused_s(self, fingerprint: bytes, now: float) -> float:
        """Return for how many seconds the request is still refused; 0 if it is not."""
        if len(self.processes(fingerprint, now)) < MAX_LOST:
            return 0.0
        return self._suspects[fingerprint].until - now


def fingerprint_of(key: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=hashlib.sha256(key.encode()).digest()).digest()


class CrashRecord:
    """A record of the processes that one request was lost with."""

    def __init__(self, poison: Poison, metrics: Metrics, fingerprint: Callable[[], bytes]) -> None:
        """`fingerprint` is called at most once: it takes 1 ms for each MB of the body."""
        self._poison, self._metrics = poison, metrics
        self._make = fingerprint
        self.first_token = asyncio.Event()
        """Set once a node has sent a token: the request can be computed."""
        self._died: dict[str, asyncio.Future[bool]] = {}  # by process

    @cached_property
    def _fingerprint(self) -> bytes:
        return self._make()

    def check(self) -> None:
        """Raise PoisonRequest while the request is refused."""
        if not self._poison:
            return
        refused_s = self._poison.refused_s(self._fingerprint, time.monotonic())
        if refused_s > 0:
            self._metrics.poison.labels("refused").inc()
            died = f"{MAX_LOST} nodes died while they had this request"
            raise _poison_request(f"{died}, so it is refused for {refused_s:.0f} s more", refused_s)

    def lost(self, lease: Lease, now: float) -> None:
        process = f"{lease.node.url} {lease.generation}"
        if process in self._died:
            return
        verdict = self._died[process] = asyncio.get_running_loop().create_future()
        # Not the body, which the verdict may outlive by far.
        poison, fingerprint = self._poison, self._fingerprint

        def tell(died: bool) -> None:
            verdict.set_result(died)
            if died:
                poison.died(fingerprint, process, time.monotonic())

        lease.node.deaths.ask(lease.generation, now, tell)

    async def may_go_on(self) -> None:
        """Return if the request may go to one more node. Raises PoisonRequest.

        A process that is still silent counts as dead for this request alone.
        """
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
        if self._poison and self._poison.processes(self._fingerprint, time.monotonic()):
            self._poison.spared(self._fingerprint)

    def _count(self) -> int:
        lost = {each for each, died in self._died.items() if not died.done() or died.result()}
        if lost and self._poison:
            lost |= self._poison.processes(self._fingerprint, time.monotonic())
        return len(lost)


def _poison_request(why: str, again_s: float) -> PoisonRequest:
    error = PoisonRequest(f"{why}; change it, or send it again after the time in Retry-After")
    error.retry_after_s, error.headers = math.ceil(again_s), {"x-should-retry": "false"}
    return error
