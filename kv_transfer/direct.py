"""The direct backend: nodes of one host map each other's KV pool, and the reader copies blocks.

The source takes no part in a read, so it always ends. Fences of fetches tell whether the bytes were
still the right ones. With a GPU on one side or on both: kv_transfer/gpu_side.py.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvrelay.kernels.pool_memory import NONCE_BYTES, PoolMemory, nonce_offset, pool_memory
from kvrelay.kv_transfer.backend import Source, runs
from kvrelay.kv_transfer.connector import BlockIds, PoolRegion
from kvrelay.kv_transfer.gpu_side import GpuPiece, GpuSide
from kvrelay.kv_transfer.host_memory import HostFile, mapped, place_of
from kvrelay.wire.errors import ConfigError, TransferError
from kvrelay.wire.frames import MALFORMED

__all__ = ["DirectBackend", "HostSide", "Metadata"]


class Metadata(msgspec.Struct, frozen=True):
    boot_id: str
    nonce: bytes
    place: HostFile | GpuPiece


class DirectBackend:
    helps_readers = False

    def __init__(self, region: PoolRegion) -> None:
        """Take nothing yet. The region's pool must outlive the backend."""
        self._region = region
        self._gpus = GpuSide(region)
        self._side: Any = HostSide(region) if region.device == "cpu" else self._gpus
        self._pools: dict[str, tuple[Any, Any]] = {}
        """Sides, and pools as they have mapped them, by generation."""

    def prepare(self) -> None: ...

    def open(self) -> bytes:
        """Return the metadata. Raises ConfigError."""
        memory = pool_memory(self._region.address)
        if memory is None or memory.num_bytes != self._region.num_blocks * self._region.block_bytes:
            raise ConfigError(
                "kv_connector direct needs a KV pool in memory that peers can map, and this "
                "system gave none (memfd is missing or forbidden); use kv_connector nixl"
            )
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
            self._boot_id = boot_id.strip()
            self._place = self._side.open(memory)
        except OSError as error:
            raise ConfigError(
                f"kv_connector direct needs /proc ({error}); use kv_connector nixl"
            ) from error
        return msgspec.msgpack.encode(Metadata(self._boot_id, memory.nonce, self._place))

    def add_peer(self, source: Source) -> None:
        try:
            metadata = msgspec.msgpack.decode(source.metadata, type=Metadata)
        except MALFORMED as error:
            raise TransferError(
                f"{source.engine_id} speaks another language than kv_connector direct"
            ) from error
        if metadata.boot_id != self._boot_id:
            raise TransferError(
                f"kv_connector direct needs one host, and {source.engine_id} runs on another one"
            )
        alike = type(metadata.place) is type(self._place)
        side = self._side if alike else self._gpus
        pool = side.map(source, metadata.place)
        offset = nonce_offset(source.region.num_blocks * source.region.block_bytes)
        try:
            if side.nonce(pool, offset) != metadata.nonce:
                raise TransferError(
                    f"what {source.engine_id} said is its KV pool is another's: it has ended or "
                    f"restarted"
                )
        except TransferError:
            side.unmap(pool)
            raise
        self._pools[source.generation] = side, pool

    def post_read(self, source: Source, remote_blocks: BlockIds, local_blocks: BlockIds) -> object:
        side, pool = self._pools[source.generation]
        return side, side.start(source, pool, remote_blocks, local_blocks)

    def poll(self, handle: Any) -> bool:
        """Go on copying. Raises only if the GPU has failed for good."""
        side, read = handle
        return bool(side.poll(read))

    def peer_gone(self, generation: str) -> None: ...

    def drop_peer(self, generation: str) -> None:
        side, pool = self._pools.pop(generation)
        side.unmap(pool)

    def progress(self) -> None:
        self._gpus.progress()

    def close(self) -> None:
        """Unmap all pools. Nothing lands after this."""
        for generation in list(self._pools):
            self.drop_peer(generation)
        self._gpus.close()


# One `poll` copies for so long, and looks at the clock after each step, of a block at least. The
# backend's thread sleeps up to 1 ms between two.
SLICE_S = 0.010
STEP_BYTES = 4 << 20


class HostSide:
    """A CPU's side of the backend."""

    def __init__(self, region: PoolRegion) -> None:
        self._region = region
        self._reads: deque[Iterator[None]] = deque()

    def open(self, memory: PoolMemory) -> HostFile:
        assert memory.file is not None
        self._local = np.ctypeslib.as_array(
            (ctypes.c_uint8 * memory.num_bytes).from_address(memory.address)
        )
        return place_of(memory.file)

    def map(self, source: Source, place: HostFile) -> Any:
        """Return the peer's pool and nonce as a numpy array, read-only. Raises TransferError."""
        size = nonce_offset(source.region.num_blocks * source.region.block_bytes) + NONCE_BYTES
        mapping = mapped(place, size, source.engine_id, "KV pool")
        return np.frombuffer(mapping, dtype=np.uint8)

    def nonce(self, pool: Any, offset: int) -> bytes:
        return bytes(pool[offset : offset + NONCE_BYTES])

    def unmap(self, pool: Any) -> None:
        """Give a mapping back: references are counted, and a read in flight has one."""

    def start(
        self, source: Source, pool: Any, remote_blocks: BlockIds, local_blocks: BlockIds
    ) -> Iterator[None]:
        read = self._copy(source, pool, runs(remote_blocks, local_blocks))
        self._reads.append(read)
        return read

    def poll(self, handle: Iterator[None]) -> bool:
        """Copy for a while if it is this read's turn: reads end one by one."""
        if handle is not self._reads[0]:
            return False
        until = time.monotonic() + SLICE_S
        for _ in handle:
            if time.monotonic() >= until:
                return False
        self._reads.popleft()
        return True

    def _copy(
        self, peer: Source, pool: Any, pieces: Iterator[tuple[int, int, int]]
    ) -> Iterator[None]:
        part, theirs, ours = peer.part, peer.region, self._region
        pool_bytes = theirs.num_blocks * theirs.block_bytes
        source = pool[:pool_bytes].reshape(theirs.num_blocks, theirs.block_bytes)[
            :, part.remote_start :
        ]
        target = self._local.reshape(ours.num_blocks, ours.block_bytes)[:, part.local_start :]
        rows = max(1, STEP_BYTES // part.num_bytes)
        for remote, local, count in pieces:
            for row in range(0, count, rows):
                end, columns = min(count, row + rows), slice(part.num_bytes)
                np.copyto(
                    target[local + row : local + end, columns],
                    source[remote + row : remote + end, columns],
                )
                yield
