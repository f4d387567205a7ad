"""An NCCL plane in a process of its own, for tests that stop and kill it. Speaks JSON lines on stdin and stdout.

Started as `python nccl_peer.py NUM_BLOCKS BLOCK_BYTES SLICE_BYTES DEVICE`. A plane alone, without a desk: its peers and
its reads are told by calls, so that a test decides at which moment what happens.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kv_transfer.connector import PoolRegion
from kv_transfer.planes import Source
from kv_transfer.via_nccl import NcclPlane
from wire.errors import TransferError
from wire.transfer import Fingerprint

FINGERPRINT = Fingerprint(1, "tiny", "float32", 16, 2, 8, 2, 0, 1)
# How long a pair may take to be made, and a slice; the second is what tests of a stopped peer wait for.
MEET_S, PATIENCE_S = 10.0, 1.5


class PlaneNode:
    """A plane and its pool, called from this thread as the plane's thread would."""

    def __init__(
        self, num_blocks: int, block_bytes: int, slice_bytes: int, device: str = "cpu", **settings: float
    ) -> None:
        pool = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        self.pool = pool.view(num_blocks, block_bytes)
        self.region = PoolRegion(self.pool.data_ptr(), num_blocks, block_bytes, device)
        times = {"meet_s": MEET_S, "patience_s": PATIENCE_S}
        self.plane = NcclPlane(self.region, "127.0.0.1", slice_bytes=slice_bytes, **(times | settings))  # type: ignore[arg-type]
        self.generation = uuid.uuid4().hex
        self.metadata = self.plane.open()

    def fill(self, seed: int) -> None:
        """Bytes that follow from the seed, unlike in any other block."""
        values = torch.randint(
            0, 256, self.pool.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
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


class PeerPlane:
    """The parent's end."""

    def __init__(self, num_blocks: int, block_bytes: int, slice_bytes: int, device: str = "cpu") -> None:
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *map(str, (num_blocks, block_bytes, slice_bytes)), device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.region = PoolRegion(0, num_blocks, block_bytes, device)

    def ask(self, method: str, *arguments: Any, timeout_s: float = 30.0) -> Any:
        self.tell(method, *arguments)
        return self.answer(timeout_s)

    def tell(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = 30.0) -> Any:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout_s), f"no answer within {timeout_s} s"
        return json.loads(self.process.stdout.readline())

    @property
    def welcome(self) -> Source:
        generation, metadata = self.ask("introduce")
        return Source("peer", generation, self.region, base64.b64decode(metadata))

    def meet(self, welcome: Source) -> None:
        """Let it read from that plane."""
        device, blocks, size = welcome.region.device, welcome.region.num_blocks, welcome.region.block_bytes
        self.ask("meet", welcome.generation, base64.b64encode(welcome.metadata).decode(), device, blocks, size)

    def stop(self) -> None:
        """SIGSTOP, and wait until it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


@contextlib.contextmanager
def peer_plane(num_blocks: int, block_bytes: int, slice_bytes: int, device: str = "cpu") -> Iterator[PeerPlane]:
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
        elif method == "meet":
            generation, metadata, device, blocks, size = rest
            region = PoolRegion(0, blocks, size, device)
            node.plane.add_peer(Source("peer", generation, region, base64.b64decode(metadata)))
        elif method == "read":
            try:
                answer = node.ended(node.plane.post_read(*rest))
            except TransferError as error:
                answer = f"{type(error).__name__}: {error.message}"
        elif method == "used":
            answer = node.plane.budget.used_bytes
        elif method == "close":
            node.plane.close()
            answer = [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
