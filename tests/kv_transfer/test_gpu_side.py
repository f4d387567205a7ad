"""Reads with a GPU, by a CUDA of the test's: what is copied, and pinned when."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from kvrelay.kernels import cuda_runtime
from kvrelay.kernels.cuda_runtime import CudaError
from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer import gpu_side
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.direct import DirectBackend, Metadata
from kvrelay.kv_transfer.gpu_side import GpuPiece, GpuSide
from kvrelay.kv_transfer.shares import Share
from kvrelay.wire.errors import TransferError

BLOCKS, BLOCK_BYTES = 5, 2048
PIECE = 2 * BLOCK_BYTES  # whole pages


class Cuda:
    """A GPU whose memory is the host's. Copies are over when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: dict[int, tuple[int, bool]] = {}
        self.room, self.over, self.streams = 99, False, list[int]()
        self.batches, self.singly = list[int](), 0
        stream = SimpleNamespace(cuda_stream=0, device=0, synchronize=lambda: None)
        event = SimpleNamespace(record=lambda _: None, query=lambda: self.over)
        for name in ("pin", "unpin", "copy", "copy_all"):
            monkeypatch.setattr(cuda_runtime, name, getattr(self, name))
        for name, it in {"Event": event, "set_device": None}.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, it=it, **__: it)
        monkeypatch.setattr(
            torch.cuda, "Stream", lambda device, **_: self.streams.append(device) or stream
        )
        sizes = {"PIECE": PIECE, "HOST_SLICE": 768, "GPU_SLICE": 2 * BLOCK_BYTES}
        for name, size in sizes.items():
            monkeypatch.setattr(gpu_side, f"{name}_BYTES", size)
        monkeypatch.setattr(gpu_side, "SLICES_AHEAD", 2)

    def pin(self, address: int, num_bytes: int, *, read_only: bool) -> None:
        if len(self.pinned) == self.room:
            raise CudaError("no more")
        if any(
            address < at + size and at < address + num_bytes
            for at, (size, _) in self.pinned.items()
        ):
            raise CudaError("already mapped")
        self.pinned[address] = num_bytes, read_only

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def copy(self, target: int, source: int, num_bytes: int, _: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def copy_all(self, copies: list[tuple[int, int, int]], stream: int, *, pinned: bool) -> None:
        if pinned:
            self.batches.append(len(copies))
        else:
            self.singly += len(copies)
        for each in copies:
            self.copy(*each, stream)


class Pool:
    def __init__(self) -> None:
        memory = zeros(BLOCKS * BLOCK_BYTES, torch.device("cpu"))
        self.blocks = memory.view(BLOCKS, BLOCK_BYTES)
        self.blocks[:] = torch.arange(memory.numel()).view(self.blocks.shape).to(torch.uint8) + 1
        self.region = PoolRegion(memory.data_ptr(), BLOCKS, BLOCK_BYTES, "cpu")
        opened = DirectBackend(self.region).open()
        self.metadata = msgspec.msgpack.decode(opened, type=Metadata)

    def source(self, share: Share | None = None) -> Source:
        return Source("peer", "g", self.region, b"", share)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.fixture
def here() -> Pool:
    pool = Pool()
    pool.blocks.zero_()
    return pool


def test_a_gpu_reads_a_share_of_a_peers_host_memory(cuda: Cuda, here: Pool) -> None:
    there = Pool()
    side = GpuSide(PoolRegion(here.region.address, BLOCKS, BLOCK_BYTES, "cuda:0"))
    source = there.source(Share(512, 1024, 768))
    pool = side.map(source, there.metadata.place)
    assert side.nonce(pool, PIECE * 3) == there.metadata.nonce
    read = side.start(source, pool, [4, 1, 2], [0, 3, 1])
    assert (cuda.singly, cuda.batches) == (2, [])
    side.progress()  # nothing is pinned meanwhile
    assert list(cuda.pinned.values()) == [(PIECE, True)]
    assert not side.poll(read)
    cuda.over = True
    while not side.poll(read):
        pass
    assert torch.equal(here.blocks[[0, 3, 1], 1024:1792], there.blocks[[4, 1, 2], 512:1280])
    assert not here.blocks[[2, 4]].any()
    assert not here.blocks[:, :1024].any()
    for _ in range(3):
        side.progress()
    assert list(cuda.pinned.values()) == [(PIECE, True), (PIECE, True), (BLOCK_BYTES, True)]
    assert side.poll(side.start(source, pool, [3, 0], [2, 4]))
    assert torch.equal(here.blocks[[2, 4], 1024:1792], there.blocks[[3, 0], 512:1280])
    assert (cuda.singly, cuda.batches) == (3, [1, 1])
    side.unmap(pool)
    assert not cuda.pinned


def test_a_closed_backend_leaves_nothing_pinned_where_other_memory_comes_to_lie(
    cuda: Cuda, here: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, closed = Pool(), list[int]()
    monkeypatch.setattr(gpu_side, "visible_gpus", lambda: {"GPU-1": 1})
    monkeypatch.setattr(gpu_side, "_open_piece", lambda *_: there.region.address)
    monkeypatch.setattr(cuda_runtime, "close_handle", closed.append)
    place = GpuPiece(1, b"", "GPU-1")
    metadata = msgspec.msgpack.encode(msgspec.structs.replace(there.metadata, place=place))
    source = replace(there.source(), metadata=metadata)
    for at in range(1, 3):  # a node, and another one with the same memory
        backend = DirectBackend(here.region)
        backend.open()
        backend.add_peer(source)
        backend.progress()
        assert list(cuda.pinned.values()) == [(PIECE, False)] * 2
        read = backend.post_read(source, [2, 3], [4, 1])
        cuda.over = True
        assert backend.poll(read)
        assert torch.equal(here.blocks[[4, 1]], there.blocks[[2, 3]])
        backend.close()
        assert not cuda.pinned
        assert closed == [there.region.address] * at


def test_a_gpu_reads_those_that_it_reaches_or_that_are_hidden_by_the_streams_of_the_last(
    cuda: Cuda, here: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, closed = Pool(), list[int]()
    monkeypatch.setattr(gpu_side, "visible_gpus", lambda: {"GPU-0": 0, "GPU-1": 1})
    monkeypatch.setattr(gpu_side, "_open_piece", lambda *_: there.region.address)
    monkeypatch.setattr(cuda_runtime, "close_handle", closed.append)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    side = GpuSide(PoolRegion(here.region.address, BLOCKS, BLOCK_BYTES, "cuda:0"))
    with pytest.raises(TransferError, match="GPU 0 cannot read from GPU 1, which has the KV pool"):
        side.map(there.source(), GpuPiece(1, b"", "GPU-1"))
    cuda.over = True
    for gpu in ("GPU-0", "GPU-9"):
        here.blocks.zero_()
        pool = side.map(there.source(), GpuPiece(1, b"", gpu))
        assert side.nonce(pool, PIECE * 3) == there.metadata.nonce
        assert side.poll(side.start(there.source(), pool, [2, 3], [4, 1]))
        assert torch.equal(here.blocks[[4, 1]], there.blocks[[2, 3]])
        cuda.batches.clear()
        assert side.poll(side.start(there.source(), pool, [1, 2, 3, 0], [0, 1, 2, 4]))
        assert torch.equal(here.blocks[[0, 1, 2, 4]], there.blocks[[1, 2, 3, 0]])
        assert cuda.batches == [2, 2]
        side.unmap(pool)
    assert closed == [there.region.address] * 2
    assert cuda.streams == [0]
    assert not cuda.pinned


def test_a_gpu_without_room_for_a_context_is_left_to_another_backend(
    cuda: Cuda, here: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gpu_side, "visible_gpus", lambda: {"GPU-1": 1})
    monkeypatch.setattr(torch.cuda, "set_device", full)
    with pytest.raises(TransferError, match="no CUDA context of GPU GPU-1: out of memory"):
        GpuSide(here.region).map(here.source(), GpuPiece(1, b"", "GPU-1"))
    assert not cuda.pinned


def test_memory_that_cannot_be_pinned_is_left_to_another_backend(cuda: Cuda, here: Pool) -> None:
    there, side = Pool(), GpuSide(here.region)
    cuda.room = 0
    with pytest.raises(TransferError, match="host memory cannot be pinned: no more"):
        side.map(there.source(), there.metadata.place)
    # A part may stay unpinned.
    cuda.room = 1
    pool = side.map(there.source(), there.metadata.place)
    side.progress()
    cuda.room = 2
    side.progress()
    assert len(cuda.pinned) == 1
    side.unmap(pool)
    assert not cuda.pinned
