"""Notices that a leg's node has said nothing for too long, and cuts the leg. Owns one timer, decides nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from router.nodes.node import Lease
from router.nodes.passage import Passage

__all__ = ["LegWatch", "LegWatches"]


class LegWatches:
    """All legs of a router. The timer is set for the first that could be too late: nothing is done for each frame."""

    def __init__(self) -> None:
        self._all: set[LegWatch] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def add(self, watch: LegWatch) -> None:
        """Look after this one, too."""
        self._all.add(watch)
        if self._timer is None or watch.due < self._due:
            self._arm(watch.due)

    def drop(self, watch: LegWatch) -> None:
        """It has ended."""
        self._all.discard(watch)
        if not self._all and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._look)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for watch in list(self._all):
            watch.look(now)
        if self._all:
            self._arm(min(watch.due for watch in self._all))


class LegWatch:
    """A context around one leg. `silent` once it was cut for its silence."""

    def __init__(
        self, among: LegWatches, lease: Lease, passage: Passage, patience_s: float, may_cut: Callable[[], bool]
    ) -> None:
        """`may_cut` is asked each time when the patience is over; if not, the leg has as much time again."""
        self.patience_s = patience_s
        self.silent = False
        self._among, self._lease, self._passage = among, lease, passage
        self._may_cut = may_cut
        self._since = time.monotonic()
        self.due = self._since + patience_s
        """The first moment at which it may be too late."""

    def __enter__(self) -> LegWatch:
        """Look from now on."""
        self._among.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        """Look no more."""
        self._among.drop(self)

    def look(self, now: float) -> None:
        """Cut the leg if its node has said nothing for too long."""
        heard = max(self._since, self._passage.heard_at)
        if not self.silent and self._lease.cut is not None:
            self.silent = heard + self.patience_s <= now and self._may_cut()
            if self.silent:
                self._lease.cut()
        if heard + self.patience_s <= now:
            heard = self._since = now
        self.due = heard + self.patience_s
