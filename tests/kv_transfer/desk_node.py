"""A desk over a test plane, and its events as the step loop would see them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from peer_process import CONFIG, FINGERPRINT
from shared_plane import REGION, SharedPlane

from kv_transfer.connector import Event, FetchFailed
from kv_transfer.desk import Desk
from wire.config import TransferConfig
from wire.transfer import Fingerprint


class Node:
    """A desk, its plane, and its events as the step loop would see them."""

    def __init__(self, name: str, folder: Path, config: TransferConfig, fingerprint: Fingerprint) -> None:
        self.plane = SharedPlane(folder / f"{name}-{time.monotonic_ns()}")
        self.woken = threading.Event()
        self.desk = Desk(name, fingerprint, REGION, config, self.woken.set, {"shared": self.plane})

    def wait(self, count: int, within_s: float = 5.0) -> list[Event]:
        """The next `count` events, of which the desk has woken us."""
        got: list[Event] = []
        until = time.monotonic() + within_s
        while len(got) < count and self.woken.wait(max(0.0, until - time.monotonic())):
            self.woken.clear()
            got += self.desk.events()
        assert len(got) == count, got
        return got

    def quiet(self, for_s: float = 0.1) -> None:
        assert not self.woken.wait(for_s), self.desk.events()


@contextlib.contextmanager
def node(
    name: str, folder: Path, config: TransferConfig = CONFIG, fingerprint: Fingerprint = FINGERPRINT
) -> Iterator[Node]:
    it = Node(name, folder, config, fingerprint)
    try:
        yield it
    finally:
        it.desk.close()


def reason(event: Event) -> str:
    assert isinstance(event, FetchFailed), event
    return event.reason
