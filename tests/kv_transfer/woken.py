"""The events of a connector as the step loop would see them: fetched when it wakes us."""

from __future__ import annotations

import threading
import time

from kvrelay.kv_transfer.connector import Event
from kvrelay.kv_transfer.transfer_engine import TransferEngine


class Woken:
    """`watching` is the connector whose wake-up sets `woken`."""

    within_s = 10.0
    """How long events may take, unless a call says otherwise."""

    watching: TransferEngine

    def __init__(self) -> None:
        self.woken = threading.Event()

    def wait(self, count: int, within_s: float | None = None) -> list[Event]:
        """The next `count` events, of which the connector has woken us."""
        got: list[Event] = []
        until = time.monotonic() + (self.within_s if within_s is None else within_s)
        while len(got) < count and self.woken.wait(max(0.0, until - time.monotonic())):
            self.woken.clear()
            got += self.watching.events()
        assert len(got) == count, got
        return got

    def quiet(self, for_s: float = 0.1) -> None:
        """No event comes; to be woken is none, as it may be about one that was taken already."""
        until = time.monotonic() + for_s
        while self.woken.wait(max(0.0, until - time.monotonic())):
            self.woken.clear()
            assert not (events := self.watching.events()), events

    def renewed(self, name: str, within_s: float = 10.0) -> None:
        """Wait until the source of a watched request has said that it holds the KV: from then on it
        may be read.
        """
        fetch = self.watching._fetches._fetches[name]  # type: ignore[attr-defined]
        until = time.monotonic() + within_s
        while fetch.held_until < time.monotonic():
            assert time.monotonic() < until, "the lease is not renewed"
            time.sleep(0.005)
