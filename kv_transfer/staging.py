"""The KV pool as rows of bytes, transfers cut into slices of staging memory, and the copies between the two.

Refuses to know who sends or receives. Copies on a GPU are torch's, in the order of the current stream.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kv_transfer.connector import PoolRegion
from wire.errors import TransferError

__all__ = ["BlockPool", "Slice", "cut"]

# From this size on, blocks on a GPU are copied one by one: to launch a copy takes 4 us, in which NVLink carries 1.4 MB.
COPY_BYTES = 2 << 20


class Slice(NamedTuple):
    """Bytes `start` to `stop` of each of `rows` blocks, from the `first` in a transfer's list on."""

    first: int
    rows: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size in staging."""
        return self.rows * (self.stop - self.start)


def cut(num_blocks: int, block_bytes: int, slice_bytes: int) -> list[Slice]:
    """A transfer in slices of at most `slice_bytes`: whole blocks, or parts of one that is larger."""
    if block_bytes > slice_bytes:
        starts = range(0, block_bytes, slice_bytes)
        return [Slice(i, 1, a, min(a + slice_bytes, block_bytes)) for i in range(num_blocks) for a in starts]
    rows = slice_bytes // block_bytes
    return [Slice(i, min(rows, num_blocks - i), 0, block_bytes) for i in range(0, num_blocks, rows)]


class BlockPool:
    """The KV pool as rows of bytes, [num_blocks, block_bytes], and copies between it and staging."""

    def __init__(self, region: PoolRegion, copy_bytes: int | None = None) -> None:
        """Maps the region; its memory stays the caller's. Blocks of `copy_bytes` or more are copied one by one."""
        self.num_blocks, self.block_bytes = region.num_blocks, region.block_bytes
        self.device = torch.device(region.device)
        self._rows = _mapped(region).view(region.num_blocks, region.block_bytes)
        if copy_bytes is None:
            copy_bytes = 0 if self.device.type == "cpu" else COPY_BYTES
        self._by_index = region.block_bytes < copy_bytes
        # Kernels move elements: the wider the better.
        self._element = torch.int64 if region.block_bytes % 8 == 0 and region.address % 8 == 0 else torch.uint8
        # A torch stream is one of 32, given out in turn; were it also one on which a pair receives, copies would wait
        # for that pair's peer.
        self._spare_streams: list[torch.cuda.Stream] = []

    @contextlib.contextmanager
    def lane(self) -> Iterator[None]:
        """This thread copies here from now on, on a stream of its own."""
        if self.device.type == "cpu":
            yield
            return
        torch.cuda.set_device(self.device)
        spare = self._spare_streams
        # 0 is the lowest priority there is.
        stream = spare.pop() if spare else torch.cuda.Stream(self.device, priority=0)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield
        spare.append(stream)

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Memory on the pool's device, [num_bytes] uint8. Raises TransferError if there is none."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise TransferError(f"no {num_bytes} bytes of staging memory on {self.device}: {error}") from error

    def gather(self, blocks: Sequence[int], piece: Slice, staging: torch.Tensor) -> None:
        """Pool -> staging, in the order of the current stream."""
        if self._by_index and piece.stop - piece.start == self.block_bytes:
            torch.index_select(
                self._rows.view(self._element), 0, self._index(blocks, piece), out=self._packed(piece, staging)
            )
        else:
            for row, part in self._runs(blocks, piece, staging):
                part.copy_(row)

    def scatter(self, blocks: Sequence[int], piece: Slice, staging: torch.Tensor) -> None:
        """Staging -> pool. Returns when the bytes are in the pool."""
        if self._by_index and piece.stop - piece.start == self.block_bytes:
            self._rows.view(self._element).index_copy_(0, self._index(blocks, piece), self._packed(piece, staging))
        else:
            for row, part in self._runs(blocks, piece, staging):
                row.copy_(part)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _packed(self, piece: Slice, staging: torch.Tensor) -> torch.Tensor:
        return staging[: piece.num_bytes].view(self._element).view(piece.rows, -1)

    def _index(self, blocks: Sequence[int], piece: Slice) -> torch.Tensor:
        return torch.tensor(blocks[piece.first : piece.first + piece.rows], dtype=torch.int64, device=self.device)

    def _runs(
        self, blocks: Sequence[int], piece: Slice, staging: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal shape, [blocks that are neighbours, bytes]: in the pool, in staging."""
        packed = staging[: piece.num_bytes].view(piece.rows, -1)
        ids = blocks[piece.first : piece.first + piece.rows]
        begin = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or ids[end] != ids[end - 1] + 1:
                yield self._rows[ids[begin] : ids[end - 1] + 1, piece.start : piece.stop], packed[begin:end]
                begin = end


class _DeviceMemory:
    """Memory of a GPU, in the words of the CUDA array interface."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _mapped(region: PoolRegion) -> torch.Tensor:
    """The region as a tensor that owns nothing, [bytes] uint8."""
    num_bytes = region.num_blocks * region.block_bytes
    if region.device == "cpu":
        memory = (ctypes.c_uint8 * num_bytes).from_address(region.address)
        return torch.frombuffer(memory, dtype=torch.uint8)
    return torch.as_tensor(_DeviceMemory(region.address, num_bytes), device=region.device)
