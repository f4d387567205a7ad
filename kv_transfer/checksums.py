"""Checksums of KV blocks: which fetched blocks are compared with their source's, and by what.

Blocks may have changed since they were asked about; the lease tells.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.wire.errors import ConfigError

__all__ = ["MOST_BLOCKS", "Checks", "Checksums", "in_our_order"]

log = logging.getLogger(__name__)

# In one question and one launch: the answer has 256 KiB with 128 KV heads.
MOST_BLOCKS = 256
_CHECKSUM_BYTES = 8  # of a KV head's part of a block (kernels/block_checksums.py)

Sums = Callable[[Sequence[int]], list[bytes]]


def in_our_order(checksums: bytes, order: Sequence[int]) -> bytes:
    """Return a source's checksums of a block in our heads' order; empty if any is missing.

    `order`: where each head of each of our ranks lies in the source's.
    """
    size = _CHECKSUM_BYTES
    if len(checksums) < (max(order) + 1) * size:
        return b""
    return b"".join(checksums[place * size : (place + 1) * size] for place in order)


@dataclass(slots=True)
class Checks:
    """A fetch's comparison. The source's id names a block; its place is its index in the fetch."""

    places: dict[int, int] = field(default_factory=dict)
    """Drawn blocks whose source gives checksums, and their places."""
    theirs: dict[int, bytes] = field(default_factory=dict)
    ours: dict[int, bytes] = field(default_factory=dict)

    def add_theirs(self, checksums: Mapping[int, bytes]) -> None:
        """Add the source's. What was not asked for, or comes again, is ignored."""
        new = checksums.keys() & self.places.keys() - self.theirs.keys()
        self.theirs.update((block, checksums[block]) for block in new)

    @property
    def unanswered(self) -> list[int]:
        return [block for block in self.places if block not in self.theirs]

    @property
    def settled(self) -> bool:
        return len(self.theirs) == len(self.ours) == len(self.places)

    @property
    def wrong(self) -> list[int]:
        """Blocks that are not what the source has, by place."""
        known = (block for block in self.places if block in self.theirs and block in self.ours)
        return [block for block in known if self.theirs[block] != self.ours[block]]

    @property
    def sound(self) -> float:
        """Return how many first blocks a failed fetch may keep; none if any is wrong."""
        known = self.theirs.keys() & self.ours.keys()
        unknown = (place for block, place in self.places.items() if block not in known)
        return 0 if self.wrong else min(unknown, default=float("inf"))


class Checksums:
    def __init__(
        self, region: PoolRegion, kv_heads: int, on_error: Callable[[Exception], None]
    ) -> None:
        """Start; on a GPU this compiles. `on_error`: the thread has ended. Raises ConfigError."""
        self._sums = (_host_sums if region.device == "cpu" else _gpu_sums)(region, kv_heads)
        self._on_error = on_error
        self._asked: queue.Queue[tuple[Sequence[int], Callable[[list[bytes]], None]] | None]
        self._asked = queue.Queue()
        self._begun_at: float | None = None  # the question that is being answered
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-checksums", daemon=True)
        self._thread.start()

    def ask(self, blocks: Sequence[int], done: Callable[[list[bytes]], None]) -> None:
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


def _host_sums(region: PoolRegion, kv_heads: int) -> Sums:
    import numpy as np

    from kvrelay.kernels.block_checksums import WORD_BYTES, block_checksums, keys

    places = keys(_slice_bytes(region, kv_heads, WORD_BYTES) // WORD_BYTES)
    memory = (ctypes.c_uint8 * (region.num_blocks * region.block_bytes)).from_address(
        region.address
    )
    pool = np.ctypeslib.as_array(memory).view(np.int64).reshape(region.num_blocks, kv_heads, -1)
    return lambda blocks: [row.tobytes() for row in block_checksums(pool, blocks, places)]


def _gpu_sums(region: PoolRegion, kv_heads: int) -> Sums:
    import torch

    from kvrelay.kernels.gpu_checksums import VECTOR_BYTES, gpu_block_checksums

    slice_bytes = _slice_bytes(region, kv_heads, VECTOR_BYTES)
    device = torch.device(region.device)
    # A stream of the lowest priority: waiting programs of steps go first.
    stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]

    def sums(blocks: Sequence[int]) -> list[bytes]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            ids = torch.tensor(blocks, dtype=torch.int32, device=device)
            found = gpu_block_checksums(
                region.address, ids, kv_heads=kv_heads, slice_bytes=slice_bytes
            )
            return [row.tobytes() for row in found.cpu().numpy()]  # waits for this stream alone

    sums([0])  # compiles
    return sums


def _slice_bytes(region: PoolRegion, kv_heads: int, unit: int) -> int:
    slice_bytes, rest = divmod(region.block_bytes, kv_heads)
    if rest or slice_bytes % unit:
        raise ConfigError(
            f"kv_checksums reads {unit} bytes of a KV head at a time, and a block of "
            f"{region.block_bytes} bytes has {kv_heads} heads; leave kv_checksums out"
        )
    return slice_bytes
