"""KV pools of a GPU that peers map by CUDA IPC, and the kernel that reads them.

A pool is one cudaMalloc (kernels/pool_memory.py).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvrelay.kernels import cuda_runtime
from kvrelay.kernels.pool_memory import NONCE_BYTES, PoolMemory
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.wire.errors import ConfigError, TransferError

__all__ = ["GpuPiece", "GpuSide", "open_piece", "visible_gpus"]

# One launch copies so much (0.36 ms at 370 GB/s), and so many wait in the stream, to last until the
# next `poll`.
SLICE_BYTES = 128 << 20
SLICES_AHEAD = 4


class GpuPiece(msgspec.Struct, frozen=True, tag="gpu"):
    """An IPC handle, and the UUID of the GPU that has the memory."""

    ipc_namespace: int
    handle: bytes
    gpu: str


@dataclass(slots=True)
class _Table:
    host: Any
    written: Any  # numpy's view of `host`
    gpu: Any


@dataclass(slots=True)
class _GpuRead:
    source: int  # where the part of block 0 begins, here and there
    target: int
    source_stride: int  # bytes of a block in the peer's pool
    part_bytes: int
    table: _Table
    remote: Any  # int32 [blocks] on the GPU
    local: Any
    tiles: int
    launched: int = 0
    slices: deque[Any] = field(default_factory=deque)
    """Events of unended launches."""


class GpuSide:
    """A GPU's side of the direct backend, on one thread.

    A read that breaks raises torch's own error: the process has lost the GPU and has to end.
    """

    def __init__(self, region: PoolRegion) -> None:
        assert region.gpu is not None
        self._region = region
        self._device = region.gpu
        self._tables: list[_Table] = []  # unused

    def open(self, memory: PoolMemory) -> GpuPiece:
        """Take a stream and compile the kernel, which may take seconds. Raises ConfigError."""
        from kvrelay.kernels import gather_blocks

        self._kernel = gather_blocks
        if self._region.block_bytes % gather_blocks.VECTOR_BYTES:
            raise ConfigError(
                f"kv_connector direct copies {gather_blocks.VECTOR_BYTES} bytes at a time, and a "
                f"block has {self._region.block_bytes}; use kv_connector nixl"
            )
        torch.cuda.set_device(self._device)
        # 0 is the lowest priority: waiting programs of steps go first.
        self._stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)  # of this thread alone
        try:
            handle = cuda_runtime.handle_of(memory.address)
        except cuda_runtime.CudaError as error:
            raise ConfigError(
                f"the KV pool cannot be shared with other processes: {error}"
            ) from error
        # Compile: copy the unused null block 0 onto itself.
        ourselves = Source("", "", self._region, b"")
        read = self.start(ourselves, memory.address, [0], [0])
        self._stream.synchronize()
        assert self.poll(read)
        return GpuPiece(_ipc_namespace(), handle, _uuid(self._device))

    def map(self, source: Source, place: GpuPiece) -> int:
        """Return the peer's pool's address on our GPU. Raises TransferError."""
        who = source.engine_id
        # CUDA opens memory of a hidden GPU, but cannot be asked about it.
        theirs = visible_gpus().get(place.gpu, self._device)
        if theirs != self._device and not torch.cuda.can_device_access_peer(self._device, theirs):
            raise TransferError(
                f"GPU {self._device} cannot read from GPU {theirs}, which has the KV pool of {who}"
            )
        return open_piece(place, who)

    def nonce(self, pool: int, offset: int) -> bytes:
        found = torch.zeros(
            NONCE_BYTES, dtype=torch.uint8, device=torch.device("cuda", self._device)
        )
        try:
            cuda_runtime.copy(
                found.data_ptr(), pool + offset, NONCE_BYTES, self._stream.cuda_stream
            )
        except cuda_runtime.CudaError as error:
            raise TransferError(
                f"a peer's KV pool is mapped but cannot be read: {error}"
            ) from error
        return bytes(found.tolist())

    def unmap(self, pool: int) -> None:
        # Other transfers under way are bounded by SLICES_AHEAD.
        self._stream.synchronize()
        with contextlib.suppress(cuda_runtime.CudaError):
            cuda_runtime.close_handle(pool)

    def start(
        self, source: Source, pool: int, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> _GpuRead:
        count, part = len(remote_blocks), source.part
        table = self._tables.pop() if self._tables else self._new_table()
        table.written[:count], table.written[count : 2 * count] = remote_blocks, local_blocks
        self._kernel.copy_words(table.host[: 2 * count], table.gpu[: 2 * count])
        read = _GpuRead(
            pool + part.remote_start,
            self._region.address + part.local_start,
            source.region.block_bytes,
            part.num_bytes,
            table,
            table.gpu[:count],
            table.gpu[count : 2 * count],
            self._kernel.tiles_in(count, part.num_bytes),
        )
        self._launch(read)
        return read

    def poll(self, handle: _GpuRead) -> bool:
        while handle.slices and handle.slices[0].query():
            handle.slices.popleft()
        self._launch(handle)
        if handle.slices:
            return False
        self._tables.append(handle.table)
        return True

    def _new_table(self) -> _Table:
        size = 2 * self._region.num_blocks
        host = torch.empty(size, dtype=torch.int32, pin_memory=True)
        gpu = torch.empty(size, dtype=torch.int32, device=torch.device("cuda", self._device))
        return _Table(host, host.numpy(), gpu)

    def _launch(self, read: _GpuRead) -> None:
        step = SLICE_BYTES // self._kernel.TILE_BYTES
        while read.launched < read.tiles and len(read.slices) < SLICES_AHEAD:
            end = min(read.tiles, read.launched + step)
            self._kernel.gather_blocks(
                read.source,
                read.target,
                read.remote,
                read.local,
                block_bytes=read.part_bytes,
                source_stride=read.source_stride,
                target_stride=self._region.block_bytes,
                tiles=range(read.launched, end),
            )
            read.launched = end
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            read.slices.append(event)


def visible_gpus() -> dict[str, int]:
    """Return the numbers of the GPUs that this process sees, by UUID."""
    return {_uuid(index): index for index in range(torch.cuda.device_count())}


def open_piece(place: GpuPiece, who: str) -> int:
    """Map a peer's pool by CUDA IPC; return its address. Raises TransferError."""
    try:
        return cuda_runtime.open_handle(place.handle)
    except (cuda_runtime.CudaError, ValueError) as error:  # ValueError: no handle
        raise TransferError(
            f"the KV pool of {who} cannot be mapped ({error}): CUDA IPC needs {_lacking(place)}"
        ) from error


def _lacking(place: GpuPiece) -> str:
    lacking = []
    if place.ipc_namespace != _ipc_namespace():
        lacking.append("one IPC namespace for both nodes (containers: docker run --ipc, hostIPC)")
    if place.gpu not in visible_gpus():
        lacking.append(f"the peer's GPU {place.gpu} in this container too")
    return " and ".join(lacking) or "a GPU and driver that support it"


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _ipc_namespace() -> int:
    return Path("/proc/self/ns/ipc").stat().st_ino
