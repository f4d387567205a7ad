"""Notices that a leg's node has said nothing for too long, and cuts the leg. Decides nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from kvrelay.router.nodes.breaker import BreakerCall
from kvrelay.router.nodes.node import Lease

__all__ = ["LegWatch", "LegWatches"]

_LOOK_S = 1.0


class LegWatches:
    """A set of all legs of a router. It is looked at once a second: nothing is done for each frame."""

    def __init__(self) -> None:
        self._all: set[LegWatch] = set()
        self._looking = False

    def add(self, watch: LegWatch) -> None:
        """Look after this one, too."""
        self._all.add(watch)
        if not self._looking:
            self._look_later()

    def drop(self, watch: LegWatch) -> None:
        """Look after it no more."""
        self._all.discard(watch)

    def _look_later(self) -> None:
        self._looking = True
        asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = False
        now = time.monotonic()
        for watch in list(self._all):
            watch.look(now)
        if self._all:
            self._look_later()


class LegWatch:
    """A context around one leg."""

    def __init__(
        self,
        among: LegWatches,
        lease: Lease,
        call: BreakerCall,
        patience_s: float,
        may_cut: Callable[[], bool],
    ) -> None:
        """`may_cut` is asked each time when the patience is over; if not, the leg has as much time
        again.
        """
        self.silent = False
        """It was cut for its silence."""
        self._among, self._lease, self._call = among, lease, call
        self._patience_s, self._may_cut = patience_s, may_cut
        self._since = time.monotonic()

    def __enter__(self) -> LegWatch:
        """Look from now on."""
        self._among.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None
    ) -> None:
        """Look no more."""
        self._among.drop(self)

    def look(self, now: float) -> None:
        """Cut the leg if its node has said nothing for too long."""
        if (
            max(self._since, self._call.heard_at) + self._patience_s > now
            or self._lease.cut is None
            or self.silent
        ):
            return
        self._since = now
        self.silent = self._may_cut()
        if self.silent:
            self._lease.cut()
