"""The KV pool as rows of bytes, and copies of slices between it and staging memory.

On a GPU a slice is one launch of kernels/gather_blocks.py, on a stream for copies alone, which
waits for no peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.kernels.pool_memory import CudaPiece
from kvrelay.kv_transfer.backend import runs
from kvrelay.kv_transfer.connector import BlockIds, PoolRegion
from kvrelay.wire.errors import PeerLost, TransferError

__all__ = ["Budget", "StagedPool", "Lane", "Places", "cut"]


def cut(num_blocks: int, row_bytes: int, slice_bytes: int) -> list[range]:
    """Cut a transfer into rows of at most `slice_bytes`, which hold at least one."""
    count = -(-num_blocks // (slice_bytes // row_bytes))
    edges = [num_blocks * k // count for k in range(count + 1)]
    return [range(first, stop) for first, stop in itertools.pairwise(edges)]


class Budget:
    """A limit on the memory of all pairs of a process."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.waiting = 0
        self.wanted: Callable[[], None] = lambda: None
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def share(
        self, num_bytes: int, deadline: float, given_up: Callable[[], bool]
    ) -> Iterator[None]:
        """Wait for room, then hold it. Raises PeerLost after `deadline`."""
        with self._changed:
            self.waiting += 1
            if self.used_bytes + num_bytes > self.limit_bytes:
                self.wanted()
            self._changed.wait_for(
                lambda: given_up() or self.used_bytes + num_bytes <= self.limit_bytes,
                max(0.0, deadline - time.monotonic()),
            )
            self.waiting -= 1
            if self.used_bytes + num_bytes > self.limit_bytes:
                raise PeerLost(
                    f"no room for another pair of {num_bytes} bytes: pairs in use hold "
                    f"{self.used_bytes} of {self.limit_bytes}; let fewer nodes read from each "
                    "other, or take kv_connector nixl"
                )
            self.used_bytes += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self.used_bytes -= num_bytes
                self._changed.notify_all()

    def nudge(self) -> None:
        """Look whether somebody who waits has given up."""
        with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """A transfer's place in the pool: `row_bytes` of each of `blocks`, from `offset` on."""

    blocks: BlockIds
    offset: int
    row_bytes: int
    table: Table | None
    """The blocks, if the kernel copies."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A reused int32 table of block ids: pinned memory costs half a millisecond to make."""

    host: torch.Tensor
    written: Any  # numpy's view of `host`
    blocks: torch.Tensor  # on the GPU
    counted: torch.Tensor  # 0, 1, 2, ... on the GPU


Rows = tuple[int, torch.Tensor, int]
"""A side of a copy: rows with ids (int32, on the GPU), an address and stride."""


class StagedPool:
    """A KV pool as rows of bytes, [num_blocks, block_bytes]."""

    def __init__(self, region: PoolRegion) -> None:
        self.num_blocks, self.block_bytes = region.num_blocks, region.block_bytes
        self.address = region.address
        self.device = torch.device(region.device)
        self.rows = _mapped(region).view(region.num_blocks, region.block_bytes)
        # torch's 32 shared streams could let copies wait for a peer.
        self._spare_streams: list[torch.cuda.Stream] = []

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """Have this thread copy, on a GPU on a stream of its own."""
        if self.device.type == "cpu":
            yield Lane(self, None)
            return
        torch.cuda.set_device(self.device)
        spare = self._spare_streams
        # 0 is the lowest priority.
        stream = spare.pop() if spare else torch.cuda.Stream(self.device, priority=0)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                yield Lane(self, stream)
        finally:
            stream.synchronize()
            spare.append(stream)

    def compile(self) -> None:
        with self.lane() as lane:
            places = lane.places([0], 0, self.block_bytes)
            if places.table is not None:
                null = self.address, places.table.blocks[:1], self.block_bytes
                lane.run_kernel(null, null, places)


class Lane:
    def __init__(
        self, pool: StagedPool, stream: torch.cuda.Stream | None, kernel: Any = None
    ) -> None:
        self._pool = pool
        self._stream = stream
        self._kernel = kernel
        self._tables: list[Table] = []  # unused
        if stream is not None:
            from kvrelay.kernels import gather_blocks

            self._kernel = gather_blocks
            self._tables.append(self._new_table(pool.num_blocks))

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] on the pool's device. Raises TransferError."""
        device = self._pool.device
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise TransferError(
                f"no {num_bytes} bytes of staging memory on {device}: {error}"
            ) from error

    def places(self, blocks: BlockIds, offset: int, row_bytes: int) -> Places:
        """Prepare to copy this part of these blocks, until `forget`."""
        pool = self._pool
        if self._kernel is None or any(
            number % self._kernel.VECTOR_BYTES
            for number in (row_bytes, pool.address, offset, pool.block_bytes)
        ):
            return Places(blocks, offset, row_bytes, None)
        count = len(blocks)
        table = self._tables.pop() if self._tables else None
        if table is None or len(table.host) < count:  # blocks may repeat
            table = self._new_table(max(count, pool.num_blocks))
        table.written[:count] = blocks
        self._kernel.copy_words(table.host[:count], table.blocks[:count])
        return Places(blocks, offset, row_bytes, table)

    def forget(self, places: Places) -> None:
        if places.table is not None:
            self._tables.append(places.table)

    def copy(self, places: Places, rows: range, staging: torch.Tensor, *, into_pool: bool) -> None:
        """Copy pool -> staging or back, in the current stream's order; complete when `settled`."""
        table, part = places.table, slice(rows.start, rows.stop)
        if table is None:
            packed_rows = staging[: len(rows) * places.row_bytes].view(len(rows), -1)
            ids, columns = (
                places.blocks[part],
                slice(places.offset, places.offset + places.row_bytes),
            )
            for first, begin, count in runs(ids, range(len(ids))):
                in_place = self._pool.rows[first : first + count, columns]
                row = packed_rows[begin : begin + count]
                target, source = (in_place, row) if into_pool else (row, in_place)
                target.copy_(source, non_blocking=True)
            return
        in_pool = self._pool.address + places.offset, table.blocks[part], self._pool.block_bytes
        packed = staging.data_ptr(), table.counted[: len(rows)], places.row_bytes
        if into_pool:
            self.run_kernel(packed, in_pool, places)
        else:
            self.run_kernel(in_pool, packed, places)

    def settled(self) -> bool:
        return self._stream is None or self._stream.query()

    def run_kernel(self, source: Rows, target: Rows, places: Places) -> None:
        (origin, source_ids, source_stride), (goal, target_ids, target_stride) = source, target
        self._kernel.gather_blocks(
            origin,
            goal,
            source_ids,
            target_ids,
            block_bytes=places.row_bytes,
            source_stride=source_stride,
            target_stride=target_stride,
        )

    def _new_table(self, size: int) -> Table:
        device = self._pool.device
        host = torch.empty(size, dtype=torch.int32, pin_memory=self._stream is not None)
        counted = torch.arange(size, dtype=torch.int32, device=device)
        return Table(host, host.numpy(), torch.empty_like(counted), counted)


def _mapped(region: PoolRegion) -> torch.Tensor:
    num_bytes = region.num_blocks * region.block_bytes
    if region.device == "cpu":
        memory = (ctypes.c_uint8 * num_bytes).from_address(region.address)
        return torch.frombuffer(memory, dtype=torch.uint8)
    return torch.as_tensor(CudaPiece(region.address, num_bytes), device=region.device)
