"""Reads between host memory and a GPU of one machine, by the GPU's copy engines.

The reader copies, as in every direct read: a cache process maps the engine's pool, so that a store
takes nothing of the engine but a lease. No kernel runs here: one of another process takes turns
with the engine's steps on the whole GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvrelay.kernels import cuda_runtime
from kvrelay.kernels.pool_memory import NONCE_BYTES, nonce_offset
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.host_memory import HostFile, mapped
from kvrelay.kv_transfer.mapped_gpu import GpuPiece, open_piece, visible_gpus
from kvrelay.wire.errors import TransferError

__all__ = ["PinnedSide"]

log = logging.getLogger(__name__)

# Four of 32 MiB last 2.3 ms at 55 GB/s; the next `poll` comes within 1 ms. The small uploads of
# steps wait behind what a copy engine was given.
SLICE_BYTES = 32 << 20
SLICES_AHEAD = 4
# Pinning holds locks of the driver, which steps need, too.
PIECE_BYTES = 128 << 20
_PAGE = 4096


class _Pins:
    """A range of host memory, pinned in pieces of whole blocks; the driver stages copies of the rest."""

    def __init__(self, address: int, num_bytes: int, block_bytes: int, *, read_only: bool) -> None:
        """Pin the first piece. Raises CudaError."""
        least = math.lcm(block_bytes, _PAGE)
        self._address, self._num_bytes, self._read_only = address, num_bytes, read_only
        self._piece = max(1, PIECE_BYTES // least) * least
        self._pinned = 0
        self.more()

    def more(self) -> None:
        """Pin the next piece, if there is any. Raises CudaError."""
        size = min(self._piece, self._num_bytes - self._pinned)
        if size:
            cuda_runtime.pin(self._address + self._pinned, size, read_only=self._read_only)
            self._pinned += size

    def stop(self) -> None:
        self._num_bytes = self._pinned

    def close(self) -> None:
        for start in range(0, self._pinned, self._piece):
            with contextlib.suppress(cuda_runtime.CudaError):
                cuda_runtime.unpin(self._address + start)


@dataclass(frozen=True, slots=True)
class _Pool:
    address: int
    stream: Any
    mapping: Any = None
    """A numpy view of the peer's host memory; None for a GPU's."""


@dataclass(slots=True)
class _Read:
    pool: _Pool
    copies: deque[tuple[int, int]]
    """Where to and from where, of the blocks that are left."""
    part_bytes: int
    slices: deque[Any] = field(default_factory=deque)
    """Events of unended copies."""


class PinnedSide:
    """A side of the direct backend, for peers whose memory is of the other kind, on one thread.

    A copy that breaks raises CudaError: the process has lost the GPU and has to end.
    """

    def __init__(self, region: PoolRegion) -> None:
        self._region = region
        self._pins: dict[int, _Pins] = {}
        """Pinned host memory, by address; our own until `close`. A GPU keeps the addresses of what is
        unmapped without `unpin`, and whatever comes to lie there fails."""
        self._reads = 0

    def map(self, source: Source, place: HostFile | GpuPiece) -> _Pool:
        """Map a peer's pool, and begin to pin host memory. Raises TransferError."""
        region, who = self._region, source.engine_id
        theirs = source.region
        num_bytes = theirs.num_blocks * theirs.block_bytes
        if isinstance(place, HostFile):
            import numpy as np

            size = nonce_offset(num_bytes) + NONCE_BYTES
            view = np.frombuffer(mapped(place, size, who, "KV pool"), dtype=np.uint8)
            self._pin(view.ctypes.data, num_bytes, theirs.block_bytes, read_only=True)
            return _Pool(view.ctypes.data, self._stream(region.gpu or 0), view)
        device = visible_gpus().get(place.gpu)
        if device is None:
            raise TransferError(f"this process does not see GPU {place.gpu}, which {who} is on")
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:  # its memory is full
            raise TransferError(f"no CUDA context of GPU {place.gpu}: {error}") from error
        own = region.num_blocks * region.block_bytes
        self._pin(region.address, own, region.block_bytes, read_only=False)
        return _Pool(open_piece(place, who), self._stream(device))

    def _stream(self, device: int) -> Any:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _pin(self, address: int, num_bytes: int, block_bytes: int, *, read_only: bool) -> None:
        if address in self._pins:
            return
        try:
            self._pins[address] = _Pins(address, num_bytes, block_bytes, read_only=read_only)
        except cuda_runtime.CudaError as error:
            raise TransferError(f"host memory cannot be pinned: {error}") from error

    def nonce(self, pool: _Pool, offset: int) -> bytes:
        if pool.mapping is not None:
            return bytes(pool.mapping[offset : offset + NONCE_BYTES])
        found = ctypes.create_string_buffer(NONCE_BYTES)
        source, stream = pool.address + offset, pool.stream
        try:
            cuda_runtime.copy(ctypes.addressof(found), source, NONCE_BYTES, stream.cuda_stream)
            stream.synchronize()
        except cuda_runtime.CudaError as error:
            raise TransferError(
                f"a peer's KV pool is mapped but cannot be read: {error}"
            ) from error
        return found.raw

    def unmap(self, pool: _Pool) -> None:
        pool.stream.synchronize()  # bounded by SLICES_AHEAD
        if pool.mapping is not None:
            self._pins.pop(pool.address).close()
            return
        with contextlib.suppress(cuda_runtime.CudaError):
            cuda_runtime.close_handle(pool.address)

    def close(self) -> None:
        """Unpin our own memory, after all pools."""
        while self._pins:
            self._pins.popitem()[1].close()

    def start(
        self,
        source: Source,
        pool: _Pool,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
    ) -> _Read:
        part, ours, theirs = source.part, self._region, source.region
        target, origin = ours.address + part.local_start, pool.address + part.remote_start
        copies = deque(
            (target + local * ours.block_bytes, origin + remote * theirs.block_bytes)
            for remote, local in zip(remote_blocks, local_blocks, strict=True)
        )
        read = _Read(pool, copies, part.num_bytes)
        self._reads += 1
        self._launch(read)
        return read

    def poll(self, read: _Read) -> bool:
        while read.slices and read.slices[0].query():
            read.slices.popleft()
        self._launch(read)
        if read.slices:
            return False
        self._reads -= 1
        return True

    def progress(self) -> None:
        """Pin another piece, unless a read is under way."""
        for pins in () if self._reads else self._pins.values():
            try:
                pins.more()
            except cuda_runtime.CudaError as error:
                log.warning("a part of host memory stays unpinned, and slow: %s", error)
                pins.stop()

    def _launch(self, read: _Read) -> None:
        stream, each = read.pool.stream, max(1, SLICE_BYTES // read.part_bytes)
        while read.copies and len(read.slices) < SLICES_AHEAD:
            for _ in range(min(each, len(read.copies))):
                cuda_runtime.copy(*read.copies.popleft(), read.part_bytes, stream.cuda_stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            read.slices.append(event)
