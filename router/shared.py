"""What all worker processes of one port have in common, as one of them sees it.

Owns the interface, and its case without any others: a router of one process. With several it is
router/workers/worker.py's, and what is common lives in their parent (router/workers/parent.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from openai_api.response_store import KeptHere, Responses
from router.admission.poison import Poison
from router.admission.rate_limits import HeldHere, Limits
from router.console.picture import WorkerSeen
from router.membership.members import NodeSpec, Source
from router.metrics import Metrics
from router.nodes.doors import Doors
from router.nodes.node import Node
from router.nodes.pool import Pool
from router.reload import Reread, read_again, static_nodes
from wire.router_config import RouterConfig

__all__ = ["Alone", "Make", "Shared", "TakesOver", "nobody"]

TakesOver = Callable[[RouterConfig], None]
"""Serves with this configuration from now on."""


class Shared(Protocol):
    """See the module. What changes membership has reached all of them, this one too, when it returns."""

    limits: Limits
    responses: Responses
    poison: Poison
    leads: bool
    """Whether this one does what one of them must do alone: it has nodes meet, and change their roles."""

    async def add(self, spec: NodeSpec) -> None:
        """An operator names a node. Raises Unavailable."""
        ...

    async def remove(self, url: str) -> None:
        """Neither operator nor flags name it any more. Raises Unavailable."""
        ...

    async def drain(self, node: Node, *, begin: bool) -> None:
        """An operator wants a node to take no new legs, or to take them again. Raises Unavailable."""
        ...

    async def adapter(self, node: Node, name: str, *, loaded: bool) -> None:
        """A node has just loaded or unloaded an adapter. Who cannot be told sees it at his next health check."""
        ...

    async def emptied(self, node: Node) -> None:
        """A node's prefix cache was reset. Raises Unavailable."""
        ...

    async def legs_elsewhere(self) -> dict[str, int]:
        """By the addresses of nodes, the legs of the others."""
        ...

    async def exposition(self) -> bytes:
        """The metrics of all. Raises Unavailable."""
        ...

    def met(self, prefill: Node, decode: Node, *, failed: bool) -> None:
        """Two nodes have met, or were seen to be unable to."""
        ...

    def died(self, fingerprint: bytes, process: str) -> None:
        """A process died while a request was unanswered there: all their `poison` learn of it."""
        ...

    def spared(self, fingerprint: bytes) -> None:
        """A request of which that was said was answered to its end."""
        ...

    def reloads(self, config: RouterConfig, take_over: TakesOver) -> None:
        """This is the configuration now, and this takes another one over."""
        ...

    async def reload(self) -> list[str]:
        """All take over what is read now: the names of settings that are new. Raises RequestError, ConfigError."""
        ...

    def shows(self, look: Callable[[float], WorkerSeen]) -> None:
        """For the console of whichever is asked: what this one sees, its requests that ended after a Unix time."""
        ...

    async def seen_elsewhere(self, since: float) -> list[WorkerSeen]:
        """What the others see, if they answer. Raises Unavailable."""
        ...

    def workers(self) -> dict[str, int] | None:
        """How many there are, and which is this; None: it is alone."""
        ...


class Make(Protocol):
    """How a router comes by it."""

    def __call__(self, pool: Pool, doors: Doors, metrics: Metrics) -> Shared:
        """Of the router with these."""
        ...


class Alone:
    """The Shared of a router of one process."""

    leads = True

    def __init__(self, pool: Pool, doors: Doors, metrics: Metrics, reread: Reread | None = None) -> None:
        self._pool, self._doors, self._metrics, self._reread = pool, doors, metrics, reread
        self._config = RouterConfig()
        self._take_over: TakesOver = nobody
        self.limits: Limits = HeldHere()
        self.responses: Responses = KeptHere()
        self.poison = Poison()

    async def add(self, spec: NodeSpec) -> None:
        """See Shared."""
        self._pool.add(spec, Source.ADMIN, time.monotonic())

    async def remove(self, url: str) -> None:
        """See Shared."""
        self._pool.remove(url, [Source.ADMIN, Source.STATIC], time.monotonic())

    async def drain(self, node: Node, *, begin: bool) -> None:
        """See Shared."""
        change = self._pool.drain if begin else self._pool.undrain
        change(node, time.monotonic())

    async def adapter(self, node: Node, name: str, *, loaded: bool) -> None:
        """See Shared."""
        self._pool.note_adapter(node, name, loaded=loaded, now=time.monotonic())

    async def emptied(self, node: Node) -> None:
        """See Shared."""
        self._pool.note_emptied(node)

    async def legs_elsewhere(self) -> dict[str, int]:
        """See Shared."""
        return {}

    async def exposition(self) -> bytes:
        """See Shared."""
        return self._metrics.text()

    def met(self, prefill: Node, decode: Node, *, failed: bool) -> None:
        """See Shared."""
        self._doors.met(prefill, decode, failed=failed, now=time.monotonic())

    def died(self, fingerprint: bytes, process: str) -> None:
        """See Shared."""
        self.poison.died(fingerprint, process, time.monotonic())

    def spared(self, fingerprint: bytes) -> None:
        """See Shared."""
        self.poison.spared(fingerprint)

    def reloads(self, config: RouterConfig, take_over: TakesOver) -> None:
        """See Shared."""
        self._config, self._take_over = config, take_over

    async def reload(self) -> list[str]:
        """See Shared."""
        config, changed = read_again(self._config, self._reread)
        if {"prefill", "decode"} & set(changed):  # else a node that an operator has removed would come back
            self._pool.tell(Source.STATIC, static_nodes(config), time.monotonic())
        self._take_over(config)
        self._config = config
        return changed

    def shows(self, look: Callable[[float], WorkerSeen]) -> None:
        """See Shared."""

    async def seen_elsewhere(self, since: float) -> list[WorkerSeen]:
        """See Shared."""
        return []

    def workers(self) -> dict[str, int] | None:
        """See Shared."""
        return None


def nobody(_: RouterConfig) -> None:
    """Before there is a router."""
