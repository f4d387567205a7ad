"""An NCCL plane without a desk: here, and on a GPU in a process of its own, as a source.

The process is started as `python nccl_peer.py NUM_BLOCKS BLOCK_BYTES SLICE_BYTES DEVICE`, and
speaks JSON lines on stdin and stdout.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from child_process import ChildProcess
from fake_nccl import FakeNccl

from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.nccl import NcclBackend

# How long a pair may take to be made, and a slice; the second is what tests of a stopped peer wait
# for.
MEET_S, PATIENCE_S = 10.0, 1.5


class PlaneNode:
    """A plane and its pool, called from this thread as the plane's thread would."""

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        slice_bytes: int,
        device: str = "cpu",
        **settings: float,
    ) -> None:
        pool = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        self.pool = pool.view(num_blocks, block_bytes)
        self.region = PoolRegion(self.pool.data_ptr(), num_blocks, block_bytes, device)
        times = {"meet_s": MEET_S, "patience_s": PATIENCE_S}
        self.nccl = FakeNccl(PATIENCE_S) if device == "cpu" else None
        self.plane = NcclBackend(
            self.region, "127.0.0.1", slice_bytes=slice_bytes, nccl=self.nccl, **(times | settings)
        )  # type: ignore[arg-type]
        self.generation = uuid.uuid4().hex
        self.plane.prepare()
        self.metadata = self.plane.open()

    def fill(self, seed: int) -> None:
        """Bytes that follow from the seed, unlike in any other block."""
        values = torch.randint(
            0,
            256,
            self.pool.shape,
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        self.pool.copy_(values)

    @property
    def welcome(self) -> Source:
        return Source("peer", self.generation, self.region, self.metadata)

    def digest(self, blocks: Sequence[int]) -> str:
        return hashlib.sha256(self.pool[list(blocks)].cpu().numpy().tobytes()).hexdigest()

    def ended(self, handle: object, within_s: float = 10.0) -> bool:
        """Poll until a read ends: True, or its error is raised. False if it does not end in time."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if self.plane.poll(handle):
                return True
            self.plane.progress()
            time.sleep(0.002)
        return False


class PeerPlane(ChildProcess):
    """The parent's end."""

    answer_s = 90.0

    def __init__(self, num_blocks: int, block_bytes: int, slice_bytes: int, device: str) -> None:
        super().__init__(__file__, *map(str, (num_blocks, block_bytes, slice_bytes)), device)
        self.region = PoolRegion(0, num_blocks, block_bytes, device)

    @property
    def welcome(self) -> Source:
        generation, metadata = self.ask("introduce")
        return Source("peer", generation, self.region, base64.b64decode(metadata))


@contextlib.contextmanager
def peer_plane(
    num_blocks: int, block_bytes: int, slice_bytes: int, device: str
) -> Iterator[PeerPlane]:
    peer = PeerPlane(num_blocks, block_bytes, slice_bytes, device)
    try:
        yield peer
    finally:
        peer.end()


def main(num_blocks: str, block_bytes: str, slice_bytes: str, device: str) -> None:
    """The child's end: serve calls until stdin ends."""
    node = PlaneNode(int(num_blocks), int(block_bytes), int(slice_bytes), device)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=listen, daemon=True).start()
    while line := lines.get():
        method, *rest = json.loads(line)
        answer: Any = None
        if method == "introduce":
            answer = [node.generation, base64.b64encode(node.metadata).decode()]
        elif method == "fill":
            node.fill(rest[0])
        elif method == "digest":
            answer = node.digest(rest[0])
        elif method == "used":
            answer = node.plane.budget.used_bytes
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
