"""One connector in a process of its own, for tests that stop and kill it. Speaks JSON lines on
stdin and stdout.

Started as `python peer_process.py shared PATH` or `python peer_process.py nixl|direct NUM_BLOCKS
BLOCK_BYTES DEVICE`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from child_process import ChildProcess

import kvrelay.kv_transfer.peers
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import TransferError
from kvrelay.wire.transfer import Fingerprint, Ticket

FINGERPRINT = Fingerprint(1, "tiny", "float32", 16, 2, 8, 2, 0, 1)
# Short, so that tests are: a lease is a little over three heartbeats.
CONFIG = TransferConfig(lease_s=1.0, heartbeat_s=0.3, transfer_deadline_s=1.4)
AT_ONCE_S = 3.0
"""What happens at once has happened by then on a machine that is busy with other tests. That it was
not for want of another sign (a lease, a deadline) is told by its reason.
"""


class PeerProcess(ChildProcess):
    """The parent's end."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        super().__init__(__file__, *arguments, env=env)

    def offer(self, request_id: str, blocks: list[int]) -> Ticket:
        return msgspec.convert(self.ask("offer", request_id, blocks, 1), Ticket)

    def events(self, count: int, within_s: float) -> list[list[Any]]:
        """Wait for events there: [kind, request id, ...]."""
        got: list[list[Any]] = []
        until = time.monotonic() + within_s
        while len(got) < count and time.monotonic() < until:
            got += self.ask("events")
            time.sleep(0.01)
        return got


def of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of this process cannot look into their sources' tables of leases: they have to ask."""

    def unseen(*_: object) -> None:
        raise TransferError("of another host")

    monkeypatch.setattr(kvrelay.kv_transfer.peers, "HeldWords", unseen)


@contextlib.contextmanager
def peer_process(*arguments: str, env: dict[str, str] | None = None) -> Iterator[PeerProcess]:
    peer = PeerProcess(*arguments, env=env)
    try:
        yield peer
    finally:
        peer.end()


def main(kind: str, *arguments: str) -> None:
    """The child's end: serve calls until stdin ends."""
    connector: Any
    plane: Any = None
    if kind == "shared":
        from shared_plane import BLOCKS, REGION, SharedPlane, pattern

        from kvrelay.kv_transfer.transfer_engine import TransferEngine

        plane = SharedPlane(Path(arguments[0]))
        for index in range(BLOCKS):
            plane.write(index, pattern(index))
        connector = TransferEngine(
            "child", FINGERPRINT, REGION, CONFIG, lambda: None, {"shared": plane}
        )
    else:
        from real_node import RealNode

        num_blocks, block_bytes = int(arguments[0]), int(arguments[1])
        node = RealNode("child", kind, num_blocks, block_bytes, arguments[2])
        node.fill()
        plane, connector = node.plane, node.desk
    for line in sys.stdin:
        method, *rest = json.loads(line)
        if method == "gate":
            answer = plane.gate.set() if rest[0] else plane.gate.clear()
        elif method == "posted":
            answer = plane.posted.wait(5.0)
        elif method == "events":
            answer = [
                [type(e).__name__, *msgspec.to_builtins(e).values()] for e in connector.events()
            ]
        elif method == "watch":
            answer = connector.watch(rest[0], msgspec.convert(rest[1], Ticket))
        else:
            answer = getattr(connector, method)(*rest)
        sys.stdout.write(json.dumps(msgspec.to_builtins(answer)) + "\n")
        sys.stdout.flush()
    connector.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-")]


if __name__ == "__main__":
    main(*sys.argv[1:])
