"""Slices of transfers, and copies between the pool and staging: torch's, and the kernel's in
Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.staging import Lane, StagedPool, cut

BLOCKS, BLOCK_BYTES = 16, 96


@pytest.mark.parametrize(
    ("num_blocks", "row_bytes", "slice_bytes", "sizes"),
    [(7, 10, 100, [7]), (3, 10, 10, [1] * 3), (9, 8, 64, [4, 5]), (64, 8, 67, [8] * 8)],
)
def test_slices_are_all_rows_in_order_as_few_and_as_equal_as_can_be(
    num_blocks: int, row_bytes: int, slice_bytes: int, sizes: list[int]
) -> None:
    slices = cut(num_blocks, row_bytes, slice_bytes)
    assert [len(rows) for rows in slices] == sizes
    assert [row for rows in slices for row in rows] == list(range(num_blocks))


@pytest.fixture(params=["torch", "kernel"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return (
        None if request.param == "torch" else pytest.importorskip("kvrelay.kernels.gather_blocks")
    )


@pytest.mark.parametrize("slice_bytes", [96, 300])
@pytest.mark.parametrize(("offset", "row_bytes"), [(0, 96), (32, 32), (80, 16), (95, 1), (8, 24)])
def test_what_is_gathered_is_scattered(
    kernel: Any, offset: int, row_bytes: int, slice_bytes: int
) -> None:
    pool, expected, region = some_pool()
    there, here = [3, 4, 5, 9, 1], [0, 2, 10, 11, 12]
    part = slice(offset, offset + row_bytes)
    expected[here, part] = expected[there, part]
    lane = Lane(StagedPool(region), None, kernel)
    staging = lane.staging(slice_bytes)
    sources, targets = (lane.places(blocks, offset, row_bytes) for blocks in (there, here))
    assert (sources.table is not None) == (kernel is not None and row_bytes % 16 == 0)
    for piece in cut(5, row_bytes, slice_bytes):
        lane.copy(sources, piece, staging, into_pool=False)
        lane.copy(targets, piece, staging, into_pool=True)
    assert lane.settled()
    assert torch.equal(pool, expected)


def test_block_ids_of_two_transfers_lie_apart_until_one_is_forgotten() -> None:
    kernel = pytest.importorskip("kvrelay.kernels.gather_blocks")
    pool, expected, region = some_pool()
    lane = Lane(StagedPool(region), None, kernel)
    staging = lane.staging(20 * BLOCK_BYTES)
    (piece,), (long,) = cut(2, BLOCK_BYTES, 2 * BLOCK_BYTES), cut(20, BLOCK_BYTES, 20 * BLOCK_BYTES)
    first, second = lane.places([1, 2], 0, BLOCK_BYTES), lane.places([5, 6], 0, BLOCK_BYTES)
    lane.copy(first, piece, staging, into_pool=False)
    lane.copy(second, piece, staging, into_pool=True)
    expected[[5, 6]] = expected[[1, 2]]
    assert torch.equal(pool, expected)
    lane.forget(first)
    lane.forget(second)
    again = lane.places([3, 4], 0, BLOCK_BYTES)
    assert again.table in (first.table, second.table)
    # More than the pool has: the same block again and again.
    lane.copy(lane.places([7] * 20, 0, BLOCK_BYTES), long, staging, into_pool=False)
    assert torch.equal(staging.view(20, -1), expected[[7] * 20])


@pytest.mark.gpu
def test_gpu_lane_copies_by_kernel_and_settles() -> None:
    pool = torch.randint(0, 256, (64, 1 << 20), dtype=torch.uint8, device="cuda:0")
    expected = pool.clone()
    blocks = StagedPool(PoolRegion(pool.data_ptr(), 64, 1 << 20, "cuda:0"))
    torch.cuda.synchronize()
    blocks.compile()
    there, here = list(range(32)), list(range(63, 31, -1))
    with blocks.lane() as lane:
        staging = lane.staging(10 << 20)
        sources, targets = (lane.places(blocks, 0, 1 << 20) for blocks in (there, here))
        assert sources.table is not None
        for piece in cut(32, 1 << 20, 10 << 20):
            lane.copy(sources, piece, staging, into_pool=False)
            lane.copy(targets, piece, staging, into_pool=True)
    assert lane.settled()
    expected[here] = expected[there]
    assert torch.equal(pool, expected)


def some_pool() -> tuple[torch.Tensor, torch.Tensor, PoolRegion]:
    """A pool on 16 bytes with other bytes everywhere, its copy, and where it is."""
    pool = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    assert pool.data_ptr() % 16 == 0
    return pool, pool.clone(), PoolRegion(pool.data_ptr(), BLOCKS, BLOCK_BYTES, "cpu")
