"""Notices that a leg's node has said nothing for too long, and cuts the leg. Decides nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from router.nodes.node import Lease
from router.nodes.passage import Passage

__all__ = ["LegWatch"]


class LegWatch:
    """A context around one leg, with a timer: nothing is done for each frame."""

    def __init__(self, lease: Lease, passage: Passage, patience_s: float, may_cut: Callable[[], bool]) -> None:
        """`may_cut` is asked each time when the patience is over; if not, the leg has as much time again."""
        self.patience_s = patience_s
        self.silent = False
        """It was cut for its silence."""
        self._lease, self._passage, self._may_cut = lease, passage, may_cut
        self._since = time.monotonic()

    def __enter__(self) -> LegWatch:
        """Look from now on."""
        self._look_in(self.patience_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Cut the leg if its node has said nothing for too long."""
        now = time.monotonic()
        left_s = max(self._since, self._passage.heard_at) + self.patience_s - now
        if left_s <= 0:
            if self._lease.cut is not None and self._may_cut():
                self.silent = True
                self._lease.cut()
                return
            self._since, left_s = now, self.patience_s
        self._look_in(left_s)
