"""Notices that a leg's node has said nothing for too long, and cuts the leg. Owns one timer, decides nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from router.node import Lease
from router.standing import Passage

__all__ = ["LegWatch"]


class LegWatch:
    """A context around one leg. `silent` once it was cut for its silence."""

    def __init__(self, lease: Lease, passage: Passage, patience_s: float, may_cut: Callable[[], bool]) -> None:
        """`may_cut` is asked each time when the patience is over; if not, the leg has as much time again."""
        self.patience_s = patience_s
        self.silent = False
        self._lease, self._passage = lease, passage
        self._may_cut = may_cut
        self._since = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> LegWatch:
        """Look from now on."""
        self._arm(self.patience_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, seconds: float) -> None:
        # One timer per leg that looks when the last word was: nothing is to be done for each frame.
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        left_s = max(self._since, self._passage.heard_at) + self.patience_s - now
        if left_s > 0:
            self._arm(left_s)
        elif self._lease.cut is None or not self._may_cut():
            self._since = now
            self._arm(self.patience_s)
        else:
            self.silent = True
            self._lease.cut()
