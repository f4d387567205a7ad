"""The role of a running node, and its change: a *flip* from prefill to decode or back, without
another process.

Owns which role the node has and which it is about to have. The engine process knows no roles:
weights, KV pool, prefix cache, CUDA graphs, threads and connector are the same for both, made at
start, and stay. So a flip is this: new legs are refused, those that run end and KV that is held is
fetched (node/drain.py says when), then legs of the other role are served. What is left by the
deadline is not cut: it ends beside the new role.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvrelay.node.drain import DRAIN_DEADLINE_S, Drain
from kvrelay.node.engine_client import EngineClient
from kvrelay.wire.config import Role
from kvrelay.wire.errors import Conflict, Draining, RequestError

__all__ = ["FLIPPING", "NodeRole"]

FLIPPING = "flipping"
"""The status of a node while it flips."""

log = logging.getLogger("kvrelay.node")


class NodeRole:
    """See the module. `changed` is called when a flip begins and when it ends."""

    def __init__(
        self, role: Role, engine: EngineClient, drain: Drain, deadline_s: float = DRAIN_DEADLINE_S
    ) -> None:
        self.now = role
        self.flips_to: Role | None = None
        self.flips = 0
        """How often the role has changed since the start: with any, a router believes the node and
        not its lists.
        """
        self.changed: Callable[[], None] = lambda: None
        self.counted: Callable[[str], None] = lambda _: None
        """Told how a flip ended: done or cancelled."""
        self._engine, self._drain, self._deadline_s = engine, drain, deadline_s
        self._flip: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise Draining if no new leg may begin."""
        if self.flips_to is not None:
            raise Draining(
                f"this node changes its role from {self.now} to {self.flips_to}: it ends what it "
                f"has; ask another one"
            )

    def ask(self, wanted: Role) -> None:
        """Begin to flip; the role that the node has calls a flip off. Raises RequestError,
        Conflict.
        """
        if Role.AGGREGATED in (self.now, wanted):
            raise RequestError(
                f"a node changes between prefill and decode; this one is {self.now}, and {wanted} "
                f"was asked for",
                param="role",
            )
        if wanted is self.now:
            self.cancel()
        elif self.flips_to is not None:
            raise Conflict(
                f"this node is changing its role from {self.now} to {self.flips_to} already; wait "
                f"until GET /health "
                f"says that it has, or ask for {self.now} to call it off",
                code=FLIPPING,
            )
        elif self._drain.begun:
            raise Conflict(
                "this node drains; have it take requests again (POST /undrain) before its role "
                "changes"
            )
        else:
            log.info(
                "flipping from %s to %s: %d requests under way",
                self.now,
                wanted,
                self._engine.queue_depth(),
            )
            self.flips_to = wanted
            self._flip = asyncio.create_task(self._run(wanted))
            self._flip.add_done_callback(self._over)
            self.changed()

    def cancel(self) -> None:
        """Call a flip off that is under way: the old role is served again."""
        if self._flip is not None and self.flips_to is not None:
            self._flip.cancel()
            self._end("cancelled")

    async def _run(self, wanted: Role) -> None:
        began, was = time.monotonic(), self.now
        idle = await self._drain.over(self._deadline_s)
        if (
            self._engine.ended.is_set() or self._drain.begun
        ):  # this process ends, or takes nothing at all
            self._end("cancelled")
            return
        self.now, self.flips = wanted, self.flips + 1
        self._end("done")
        log.info(
            "this %s node is a %s node now: flipped in %.3f s",
            was,
            wanted,
            time.monotonic() - began,
        )
        if not idle:
            left = self._engine.queue_depth()
            log.warning(
                "%d requests, and KV that is held, of the old role were not over by then: they go "
                "on",
                left,
            )

    def _over(self, flip: asyncio.Task[None]) -> None:
        """A flip that broke by a mistake of ours leaves the old role."""
        if not flip.cancelled() and (why := flip.exception()) is not None:
            log.error("the change of role broke", exc_info=why)
            if flip is self._flip and self.flips_to is not None:
                self._end("cancelled")

    def _end(self, how: str) -> None:
        if how == "cancelled":
            log.info("not flipping to %s: this is a %s node still", self.flips_to, self.now)
        self.flips_to = None
        self.counted(how)
        self.changed()
