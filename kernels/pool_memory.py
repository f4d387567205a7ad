"""Memory for a KV pool that other processes of this host can map: a memfd, or one cudaMalloc.

Behind the pool lies a *nonce*, by which a peer knows that it has mapped this very pool.

A memfd leaves nothing however a process ends, /dev/shm's size does not bound it, and it is sealed
against shrinking, so a peer's read cannot end in SIGBUS. CUDA IPC cannot share the expandable
segments of torch's allocator.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass

import torch

from kvrelay.kernels import cuda_runtime

__all__ = [
    "NONCE_BYTES",
    "CudaPiece",
    "PoolMemory",
    "nonce_offset",
    "pool_memory",
    "sealed_memory",
    "zeros",
]

NONCE_BYTES = 32
_PAGE = 4096
# Smaller allocations share a piece, which an IPC handle would open.
_CUDA_PIECE = 2 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class PoolMemory:
    address: int
    num_bytes: int
    # NONCE_BYTES bytes, at address + nonce_offset(num_bytes)
    nonce: bytes
    # descriptor of this process, the pool at offset 0; None on a GPU
    file: int | None


_pools: dict[int, PoolMemory] = {}


def zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [num_bytes], all zero, with every page there.

    Raises CudaError. A CPU without memfd gets memory that is not shared.
    """
    if device.type == "cuda":
        return _on_gpu(num_bytes, device)
    try:
        return _in_memfd(num_bytes)
    except (
        AttributeError,
        OSError,
    ):  # only sharing needs it
        return torch.zeros(num_bytes, dtype=torch.uint8)


def pool_memory(address: int) -> PoolMemory | None:
    """Return the pool that begins at this address, if it can be shared."""
    return _pools.get(address)


def nonce_offset(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def sealed_memory(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    """Return a memfd of a fixed size and its bytes, all zero.

    Raises OSError, AttributeError or ValueError where there is none.
    """
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        return file, mmap.mmap(file, num_bytes)
    except (OSError, ValueError):
        os.close(file)
        raise


def _in_memfd(num_bytes: int) -> torch.Tensor:
    offset = nonce_offset(num_bytes)
    file, mapping = sealed_memory("kvrelay-pool", offset + _PAGE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    nonce = os.urandom(NONCE_BYTES)
    mapping[offset : offset + NONCE_BYTES] = nonce
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    memory = PoolMemory(whole.data_ptr(), num_bytes, nonce, file)
    weakref.finalize(mapping, _forget, memory).atexit = False
    _pools[memory.address] = memory
    return whole[:num_bytes].zero_()


class CudaPiece:
    """A piece of a GPU's memory for torch.as_tensor."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _on_gpu(num_bytes: int, device: torch.device) -> torch.Tensor:
    offset = nonce_offset(num_bytes)
    with torch.cuda.device(device):
        address = cuda_runtime.allocate(-(-(offset + _PAGE) // _CUDA_PIECE) * _CUDA_PIECE)
        piece = CudaPiece(address, offset + NONCE_BYTES)
        memory = PoolMemory(address, num_bytes, os.urandom(NONCE_BYTES), None)
        weakref.finalize(piece, _forget, memory).atexit = False
        _pools[address] = memory
        whole = torch.as_tensor(piece, device=device)
        assert whole.data_ptr() == address  # not a copy
        whole.zero_()
        whole[offset:] = torch.frombuffer(bytearray(memory.nonce), dtype=torch.uint8).to(device)
        torch.cuda.synchronize(device)  # a peer may look from here on
    return whole[:num_bytes]


def _forget(memory: PoolMemory) -> None:
    # Another thread may have a new mapping at this place.
    if _pools.get(memory.address) is memory:
        del _pools[memory.address]
    if memory.file is not None:
        os.close(memory.file)
    else:
        cuda_runtime.free(memory.address)
