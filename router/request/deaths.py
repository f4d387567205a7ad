"""The processes that died, or may have, while one request was unanswered there, and where that
ends.

After the first such loss the request goes on at once. Before it would go to a third node it waits
until the health checks tell which processes have died (router/nodes/node.py). One that is still
silent then counts as dead here, but against the fingerprint only once it is known to be.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import cached_property

from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.node import Lease
from kvrelay.router.request.poison import DEATHS, REFUSED_S, Poison
from kvrelay.wire.errors import PoisonRequest

__all__ = ["CrashRecord"]

_FATE_S = 5.0
"""How long the health checks are waited for. Whoever lives or refuses connections has shown it by
then: by default a node that is down is asked twice a second, and has 2 s to answer.
"""


class CrashRecord:
    """A record of one request, over all legs of all its prompts."""

    def __init__(self, poison: Poison, metrics: Metrics, fingerprint: Callable[[], bytes]) -> None:
        """`fingerprint` is asked for when it matters, once: it takes 1 ms for each MB of the body."""
        self._poison, self._metrics = poison, metrics
        self._make = fingerprint
        self.first_token = asyncio.Event()
        """Set once a node has told a token of it: it can be computed."""
        self._fates: dict[str, asyncio.Future[bool]] = {}  # by process: whether it has died

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
            died = f"{DEATHS} nodes died while they had this request"
            raise _refusal(f"{died}, so it is refused for {refused_s:.0f} s more", refused_s)

    def lost(self, lease: Lease, now: float) -> None:
        """A leg was lost with its process before that had answered anything of it."""
        process = f"{lease.node.url} {lease.generation}"
        if process in self._fates:
            return
        fate = self._fates[process] = asyncio.get_running_loop().create_future()
        poison, fingerprint = (
            self._poison,
            self._fingerprint,
        )  # not the body: it may be long until that is known

        def tell(died: bool) -> None:
            fate.set_result(died)
            if died:
                poison.died(fingerprint, process, time.monotonic())

        lease.node.deaths.ask(lease.generation, now, tell)

    async def may_go_on(self) -> None:
        """Return if the request may go to one more node. Raises PoisonRequest."""
        if self._count() < DEATHS:
            return
        unknown = [fate for fate in self._fates.values() if not fate.done()]
        if unknown:
            await asyncio.wait(unknown, timeout=_FATE_S)
        if self._count() >= DEATHS:
            self._metrics.poison.labels("stopped").inc()
            lost = f"{DEATHS} nodes were lost while they had this request"
            raise _refusal(f"{lost}, so it is tried on no other", REFUSED_S)

    def answered(self) -> None:
        """The request was answered to its end."""
        if self._poison and self._poison.processes(self._fingerprint, time.monotonic()):
            self._poison.spared(self._fingerprint)

    def _count(self) -> int:
        """Processes that have died of it, or may have."""
        doubtful = {
            process for process, fate in self._fates.items() if not fate.done() or fate.result()
        }
        if doubtful and self._poison:
            doubtful |= self._poison.processes(self._fingerprint, time.monotonic())
        return len(doubtful)


def _refusal(why: str, again_s: float) -> PoisonRequest:
    error = PoisonRequest(f"{why}; change it, or send it again after the time in Retry-After")
    error.retry_after_s, error.headers = math.ceil(again_s), {"x-should-retry": "false"}
    return error
