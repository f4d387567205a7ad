"""A pool's memory: zero, sealed, recognisable, and gone with its tensor."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest
import torch

from kvrelay.kernels.pool_memory import (
    NONCE_BYTES,
    PoolMemory,
    _forget,
    nonce_offset,
    pool_memory,
    zeros,
)

SIZE = 10_000
CPU = torch.device("cpu")


def held() -> tuple[int, int]:
    """Pools that this process has open, and mapped."""
    files = 0
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            files += "kvrelay-pool" in os.readlink(f"/proc/self/fd/{file}")
    return files, Path("/proc/self/maps").read_text().count("kvrelay-pool")


def test_a_pool_is_zero_and_its_nonce_lies_on_a_page_behind_it() -> None:
    pool = zeros(SIZE, CPU)
    assert pool.shape == (SIZE,)
    assert pool.dtype == torch.uint8
    assert not pool.any()
    memory = pool_memory(pool.data_ptr())
    assert memory is not None
    assert memory.file is not None
    assert (memory.num_bytes, len(memory.nonce)) == (SIZE, NONCE_BYTES)
    pool[-1] = 7
    assert os.pread(memory.file, 2, SIZE - 1) == b"\x07\0"
    assert nonce_offset(SIZE) == 3 * 4096
    assert os.pread(memory.file, NONCE_BYTES, nonce_offset(SIZE)) == memory.nonce
    other = zeros(SIZE, CPU)
    assert pool_memory(other.data_ptr()).nonce != memory.nonce  # type: ignore[union-attr]


def test_nobody_can_make_a_pool_shorter_so_reading_it_cannot_fault() -> None:
    pool = zeros(SIZE, CPU)
    file = pool_memory(pool.data_ptr()).file  # type: ignore[union-attr]
    assert file is not None
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)


def test_a_pool_goes_with_the_last_view_of_it() -> None:
    gc.collect()
    before = held()
    pool = zeros(SIZE, CPU)
    address, view = pool.data_ptr(), pool.view(100, 100)[3:]
    assert held() == (before[0] + 2, before[1] + 1)  # one file is the mapping's own
    assert not [
        name for name in os.listdir("/dev/shm") if "kvrelay" in name
    ]  # no name that a crash could leave
    del pool
    assert pool_memory(address) is not None
    del view
    assert pool_memory(address) is None
    assert held() == before


def test_a_system_without_memfd_gives_a_pool_that_is_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError("sealed off")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    pool = zeros(SIZE, CPU)
    assert not pool.any()
    assert pool_memory(pool.data_ptr()) is None


@pytest.mark.gpu
def test_on_a_gpu_a_pool_is_a_piece_of_its_own_and_comes_back() -> None:
    device = torch.device("cuda:0")
    use_and_drop_a_pool(
        device
    )  # CUDA loads each kernel into the GPU's memory when it is first launched
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_before = torch.cuda.mem_get_info(device)[0]
    use_and_drop_a_pool(device)
    torch.cuda.empty_cache()
    assert abs(torch.cuda.mem_get_info(device)[0] - free_before) < 64 << 20


def use_and_drop_a_pool(device: torch.device) -> None:
    pool = zeros(256 << 20, device)
    address = pool.data_ptr()
    memory = pool_memory(address)
    assert memory is not None
    assert memory.file is None
    assert address % (2 << 20) == 0
    assert not pool.any()
    view = pool.view(torch.bfloat16)
    view.fill_(1.0)
    assert float(view.float().mean()) == 1.0
    del pool, view
    gc.collect()
    assert pool_memory(address) is None


def test_a_pool_that_takes_the_place_of_one_that_goes_is_not_forgotten_with_it() -> None:
    """Python tells of the end of a mapping when its place is free already, and maybe taken by
    another thread.
    """
    pool = zeros(SIZE, CPU)
    new = pool_memory(pool.data_ptr())
    assert new is not None
    gone = PoolMemory(new.address, SIZE, b"", os.open("/dev/null", os.O_RDONLY))
    _forget(gone)
    assert pool_memory(pool.data_ptr()) is new
