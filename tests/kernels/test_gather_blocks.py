"""Blocks gathered by tiles against torch's own indexing; what the compiler makes of the kernel."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.compiling import run_compiler

pytest.importorskip("triton")
from kvrelay.kernels.gather_blocks import TILE_BYTES, gather_blocks

POOL_BLOCKS = 13


@pytest.mark.parametrize("part_bytes", [16, TILE_BYTES - 16, TILE_BYTES, 20 * TILE_BYTES + 48])
@pytest.mark.parametrize(("before", "behind"), [(0, 0), (64, 0), (32, 16)])
def test_a_part_of_blocks_of_two_sizes_goes_where_it_belongs(part_bytes, before, behind, device):
    """The heads that two ranks have in common, or whole blocks."""
    generator = torch.Generator().manual_seed(part_bytes)
    source, target = (
        torch.randint(
            0, 256, (POOL_BLOCKS, part_bytes + more), dtype=torch.uint8, generator=generator
        ).to(device)
        for more in (before + behind, 6 * behind)
    )
    expected = target.clone()
    source_blocks, target_blocks = (
        torch.randperm(POOL_BLOCKS, generator=generator)[:7].to(device, torch.int32)
        for _ in range(2)
    )
    expected[target_blocks.long(), behind : behind + part_bytes] = source[
        source_blocks.long(), before : before + part_bytes
    ]
    gather_blocks(
        source.data_ptr() + before,
        target.data_ptr() + behind,
        source_blocks,
        target_blocks,
        block_bytes=part_bytes,
        source_stride=source.shape[1],
        target_stride=target.shape[1],
    )
    assert torch.equal(target, expected)


@pytest.mark.gpu
def test_pools_of_more_than_4_gib(device):
    """Offsets pass int32 at 2 GiB and uint32 at 4 GiB."""
    block_bytes, blocks = 8 << 20, 640
    source = torch.zeros(blocks, block_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    ids = torch.tensor([0, 255, 256, 511, 512, 639], dtype=torch.int32, device=device)
    source[ids.long()] = torch.randint(0, 256, (6, block_bytes), dtype=torch.uint8, device=device)
    strides = {"source_stride": block_bytes, "target_stride": block_bytes}
    gather_blocks(
        *(source.data_ptr(), target.data_ptr(), ids, ids.flip(0)),
        block_bytes=block_bytes,
        **strides,
    )
    assert torch.equal(target[ids.flip(0).long()], source[ids.long()])
    assert target.any(dim=1).sum() == 6


COMPILE = """
from kvrelay.kernels.gather_blocks import TILE_BYTES, _gather

names = _gather.arg_names
types = dict(zip(names, ["i64", "i64", "*i32", "*i32", *["i32"] * 4, "constexpr"]))
aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
constants = dict(TILE_WORDS=TILE_BYTES // 4)
source = triton.compiler.ASTSource(_gather, types, constants, aligned)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
data = re.findall(r"(?:ld\\.global\\.cg|st\\.global)[.\\w:]*", ptx)
print(sorted({one.split("global")[0] + one[-7:] for one in data}))
"""


def test_loads_and_stores_vectors_of_16_bytes() -> None:
    assert run_compiler(COMPILE).strip() == "['ld..v4.b32', 'st..v4.b32']"
