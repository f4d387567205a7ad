"""Pools of a CPU that peers map: what a peer must be told, the mapping, and copying out of it with
numpy.

A pool is a memfd (kernels/pool_memory.py). Used by kv_transfer/via_direct.py alone.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from kvrelay.kernels.pool_memory import NONCE_BYTES, PoolMemory, nonce_offset
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.host_files import HostFile, mapped, place_of
from kvrelay.kv_transfer.planes import Source
from kvrelay.kv_transfer.shares import Share

__all__ = ["HostSide", "runs"]

# One call of `poll` copies for so long, and looks at the clock after each step (1 ms or less). The
# plane's thread sleeps up to 1 ms between two calls.
SLICE_S = 0.010
STEP_BYTES = 4 << 20


class HostSide:
    """All methods run on one thread; see kv_transfer/via_direct.py, `Side`."""

    def __init__(self, region: PoolRegion) -> None:
        self._region = region
        self._reads: deque[Iterator[None]] = deque()

    def open(self, memory: PoolMemory) -> HostFile:
        """Get ready to copy into our pool. Raises OSError without /proc."""
        import numpy as np

        self._np = np
        assert memory.file is not None
        self._local = np.ctypeslib.as_array(
            (ctypes.c_uint8 * memory.num_bytes).from_address(memory.address)
        )
        return place_of(memory.file)

    def map(self, source: Source, place: HostFile) -> Any:
        """The peer's pool and its nonce as a numpy array, read-only; unmapped with its last
        reference.

        Raises TransferError naming what is missing.
        """
        size = nonce_offset(source.region.num_blocks * source.region.block_bytes) + NONCE_BYTES
        mapping = mapped(place, size, source.engine_id, "KV pool")
        return self._np.frombuffer(mapping, dtype=self._np.uint8)

    def nonce(self, pool: Any, offset: int) -> bytes:
        """What lies there behind the pool."""
        return bytes(pool[offset : offset + NONCE_BYTES])

    def unmap(self, pool: Any) -> None:
        """Nothing to do: references are counted, and a read in flight has one."""

    def start(
        self, source: Source, pool: Any, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> Iterator[None]:
        """Queue a read."""
        there, here = source.region, self._region
        if source.part == Share(0, 0, here.block_bytes) and there.block_bytes == here.block_bytes:
            read = self._copy(pool, runs(remote_blocks, local_blocks))
        else:
            read = self._copy_part(source, pool, runs(remote_blocks, local_blocks))
        self._reads.append(read)
        return read

    def poll(self, handle: Iterator[None]) -> bool:
        """Copy for a while if it is this read's turn. One after the other: sharing would make the
        first ones late.
        """
        if handle is not self._reads[0]:
            return False
        until = time.monotonic() + SLICE_S
        for _ in handle:
            if time.monotonic() >= until:
                return False
        self._reads.popleft()
        return True

    def _copy(self, pool: Any, pieces: Iterator[tuple[int, int, int]]) -> Iterator[None]:
        """One step per item; numpy lets go of the GIL in it."""
        for remote, local, count in pieces:
            source, target, left = (
                number * self._region.block_bytes for number in (remote, local, count)
            )
            while left:
                step = min(left, STEP_BYTES)
                self._np.copyto(self._local[target : target + step], pool[source : source + step])
                source, target, left = source + step, target + step, left - step
                yield

    def _copy_part(
        self, peer: Source, pool: Any, pieces: Iterator[tuple[int, int, int]]
    ) -> Iterator[None]:
        """The same where the bytes of neighbours are not neighbours: a rectangle of rows of equal
        length per item.
        """
        part, theirs, ours = peer.part, peer.region, self._region
        pool_bytes = theirs.num_blocks * theirs.block_bytes
        source = pool[:pool_bytes].reshape(theirs.num_blocks, theirs.block_bytes)[
            :, part.remote_start :
        ]
        target = self._local.reshape(ours.num_blocks, ours.block_bytes)[:, part.local_start :]
        width = min(part.num_bytes, STEP_BYTES)
        rows = max(1, STEP_BYTES // width)
        for remote, local, count in pieces:
            for row in range(0, count, rows):
                end = min(count, row + rows)
                for start in range(0, part.num_bytes, width):
                    columns = slice(start, min(start + width, part.num_bytes))
                    self._np.copyto(
                        target[local + row : local + end, columns],
                        source[remote + row : remote + end, columns],
                    )
                    yield


def runs(
    remote_blocks: Sequence[int], local_blocks: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """(remote, local, count) of blocks that follow one another on both sides."""
    run: tuple[int, int, int] | None = None
    for remote, local in zip(remote_blocks, local_blocks, strict=True):
        if run is not None and (run[0] + run[2], run[1] + run[2]) == (remote, local):
            run = (run[0], run[1], run[2] + 1)
            continue
        if run is not None:
            yield run
        run = (remote, local, 1)
    if run is not None:
        yield run
