"""How much memory all pairs of a process may take together: staging, and what their communicators
need.

Refuses to know who has to give way when somebody waits for room; `wanted` says that somebody does.
Bytes, seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from kvrelay.wire.errors import PeerLost

__all__ = ["Budget"]


class Budget:
    """Memory of all pairs of a process. A pair holds its share until its communicator is closed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.waiting = 0
        self.wanted: Callable[[], None] = lambda: None
        """Called from any thread when somebody begins to wait."""
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def share(
        self, num_bytes: int, deadline: float, given_up: Callable[[], bool]
    ) -> Iterator[None]:
        """Wait for room, then hold it. Raises PeerLost if there is none by `deadline`."""
        with self._changed:
            self.waiting += 1
            if self.used_bytes + num_bytes > self.limit_bytes:
                self.wanted()
            self._changed.wait_for(
                lambda: given_up() or self.used_bytes + num_bytes <= self.limit_bytes,
                max(0.0, deadline - time.monotonic()),
            )
            self.waiting -= 1
            if self.used_bytes + num_bytes > self.limit_bytes:
                raise PeerLost(
                    f"no room for another pair of {num_bytes} bytes: pairs in use hold "
                    f"{self.used_bytes} of"
                    f" {self.limit_bytes}; let fewer nodes read from each other, or take "
                    f"kv_connector nixl"
                )
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        try:
            yield
        finally:
            with self._changed:
                self.used_bytes -= num_bytes
                self._changed.notify_all()

    def nudge(self) -> None:
        """Somebody who waits may have given up."""
        with self._changed:
            self._changed.notify_all()
