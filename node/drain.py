"""Draining: a node that is asked to ends the legs that it has, keeps KV until it is fetched, and
takes nothing new.

Owns whether it drains and when that is over. What ends the process afterwards is node/server.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvrelay.node.engine_client import EngineClient
from kvrelay.wire.errors import DeadlineExceeded, Draining, EngineDead

__all__ = ["DRAIN_DEADLINE_S", "Drain"]

# Then legs are cut, which go on elsewhere from where they are, and KV is dropped: decode nodes
# compute it.
DRAIN_DEADLINE_S = 30.0
_TICK_S = 0.05
_STATS_DEADLINE_S = 5.0

log = logging.getLogger("kvrelay.node")


class Drain:
    """See the module. `changed` is called whenever the node begins or ends to drain."""

    def __init__(self, engine: EngineClient, changed: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self.changed = changed
        self.begun = False

    def begin(self) -> None:
        """From now on no new legs. Twice is as once."""
        if not self.begun:
            log.info("draining: %d requests under way", self._engine.queue_depth())
            self.begun = True
            self.changed()

    def end(self) -> None:
        """Take legs again."""
        if self.begun:
            log.info("draining no more")
            self.begun = False
            self.changed()

    def check(self) -> None:
        """Raise Draining if no new leg may begin."""
        if self.begun:
            raise Draining(
                "this node is draining: it ends what it has and takes no new requests; ask "
                "another one"
            )

    async def over(self, deadline_s: float) -> bool:
        """Wait until no leg runs and no KV waits for its decode node; False if that is not so by
        the deadline.
        """
        with contextlib.suppress(EngineDead, TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._engine.queue_depth() or await self._held_blocks():
                    await asyncio.sleep(_TICK_S)
            return True
        return self._engine.ended.is_set()

    async def _held_blocks(self) -> int:
        if self._engine.info is None:
            return 0  # still loading
        try:
            return (await self._engine.fresh_stats(_STATS_DEADLINE_S)).held_blocks
        except DeadlineExceeded:  # a long step: ask again
            return 1
