"""Checksums of a pool's KV blocks, for the fetch that compares them (fetch.py).

Blocks may have changed since they were asked about; the lease tells.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kvrelay.kernels.block_checksums import CHECKSUM_BYTES, VECTOR_BYTES, block_checksums
from kvrelay.kv_transfer.connector import BlockIds, OnError, PoolRegion
from kvrelay.wire.errors import ConfigError

__all__ = ["MOST_BLOCKS", "Checksums", "Done", "in_our_order", "sums_of"]

log = logging.getLogger(__name__)

# In one question and one launch: the answer has 256 KiB with 128 KV heads.
MOST_BLOCKS = 256

Sums = Callable[[BlockIds], list[bytes]]
Done = Callable[[list[bytes]], None]


def in_our_order(checksums: bytes, order: Sequence[int]) -> bytes:
    """Return a source's checksums of a block in our heads' order; empty if any is missing.

    `order`: where each head of each of our ranks lies in the source's.
    """
    size = CHECKSUM_BYTES
    if len(checksums) < (max(order) + 1) * size:
        return b""
    return b"".join(checksums[place * size : (place + 1) * size] for place in order)


class Checksums:
    def __init__(self, region: PoolRegion, kv_heads: int, on_error: OnError) -> None:
        """Start; on a GPU this compiles. `on_error`: the thread has ended. Raises ConfigError."""
        self._sums = sums_of(region, kv_heads)
        self._on_error = on_error
        self._asked = queue.SimpleQueue[tuple[BlockIds, Done] | None]()
        self._begun_at: float | None = None  # the question that is being answered
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-checksums", daemon=True)
        self._thread.start()

    def ask(self, blocks: BlockIds, done: Done) -> None:
        """Call `done` later, from the thread, with the checksums of at most `MOST_BLOCKS` blocks."""
        self._asked.put((blocks, done))

    def silent_s(self) -> float:
        """Return the seconds since the thread was seen at work; 0 without a question."""
        begun_at = self._begun_at
        return 0.0 if begun_at is None else time.monotonic() - begun_at

    def close(self, timeout_s: float) -> None:
        """End the thread; questions not begun are never answered."""
        self._closing = True
        self._asked.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (asked := self._asked.get()) is not None and not self._closing:
                blocks, done = asked
                self._begun_at = time.monotonic()
                done(self._sums(blocks))
                self._begun_at = None
        except Exception as error:
            # The edge of this thread: the step loop must hear of it.
            log.exception("the thread of KV checksums ended")
            self._on_error(error)


def sums_of(region: PoolRegion, kv_heads: int) -> Sums:
    """Return what sums blocks of a pool; for a GPU this compiles. Raises ConfigError."""
    if region.block_bytes % (kv_heads * VECTOR_BYTES):
        raise ConfigError(
            f"kv_checksums reads {VECTOR_BYTES} bytes of a KV head at a time, and a block of "
            f"{region.block_bytes} bytes has {kv_heads} heads; leave kv_checksums out"
        )
    return (_host_sums if region.device == "cpu" else _gpu_sums)(region, kv_heads)


def _host_sums(region: PoolRegion, kv_heads: int) -> Sums:
    size = region.block_bytes
    pool = memoryview((ctypes.c_uint8 * (region.num_blocks * size)).from_address(region.address))
    return lambda blocks: [
        block_checksums(pool[block * size : (block + 1) * size], kv_heads) for block in blocks
    ]


def _gpu_sums(region: PoolRegion, kv_heads: int) -> Sums:
    import torch

    from kvrelay.kernels.gpu_checksums import gpu_block_checksums

    slice_bytes = region.block_bytes // kv_heads
    device = torch.device(region.device)
    # A stream of the lowest priority: waiting programs of steps go first.
    stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]

    def sums(blocks: BlockIds) -> list[bytes]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            ids = torch.tensor(blocks, dtype=torch.int32, device=device)
            found = gpu_block_checksums(region.address, ids, kv_heads, slice_bytes)
            return [row.tobytes() for row in found.cpu().numpy()]  # waits for this stream alone

    sums([0])  # compiles
    return sums
