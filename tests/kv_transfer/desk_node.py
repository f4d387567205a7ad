"""A desk over a test plane, and its events as the step loop would see them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from peer_process import CONFIG, FINGERPRINT
from shared_plane import REGION, SharedPlane
from woken import Woken

from kvrelay.kv_transfer.connector import Event, FetchFailed
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.transfer import Fingerprint


class Node(Woken):
    """A desk, its plane, and its events as the step loop would see them."""

    within_s = 10.0

    def __init__(
        self, name: str, folder: Path, config: TransferConfig, fingerprint: Fingerprint
    ) -> None:
        super().__init__()
        self.plane = SharedPlane(folder / f"{name}-{time.monotonic_ns()}")
        self.desk = self.watching = TransferEngine(
            name, fingerprint, REGION, config, self.woken.set, {"shared": self.plane}
        )


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
