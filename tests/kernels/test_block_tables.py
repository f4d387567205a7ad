"""Block tables per slot against plain lists."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from kvrelay.kernels.block_tables import append_blocks, step_tables


@pytest.mark.parametrize("block_size", [16, 64])
def test_tables_follow_their_slots(block_size, device):
    generator = torch.Generator().manual_seed(block_size)
    slots_total, max_blocks = 7, 300
    slot_tables = torch.full((slots_total, max_blocks), -9, dtype=torch.int32, device=device)
    lens = torch.tensor([1, block_size, block_size + 1, 0, 290 * block_size])
    slots = torch.tensor([4, 0, 6, -1, 2])
    blocks = [
        torch.randint(1, 10_000, (-(-int(n) // block_size),), generator=generator).tolist()
        for n in lens
    ]
    # All but the newest block of each sequence were written in earlier steps.
    known = [
        (int(s) * max_blocks + i, b)
        for s, ids in zip(slots, blocks, strict=True)
        for i, b in enumerate(ids[:-1])
    ]
    index, values = (
        torch.tensor(column, dtype=torch.int32, device=device)
        for column in zip(*known, strict=True)
    )
    append_blocks(slot_tables, index, values)
    tables = torch.full((5, max_blocks), -1, dtype=torch.int32, device=device)
    last = torch.tensor([ids[-1] if ids else 0 for ids in blocks], dtype=torch.int32, device=device)
    step_tables(
        slots.to(device, torch.int32),
        lens.to(device, torch.int32),
        last,
        slot_tables,
        tables,
        block_size=block_size,
    )
    for row, ids in enumerate(blocks):
        assert tables[row, : len(ids)].tolist() == ids
        assert (tables[row, len(ids) :] == -1).all()
        if ids:
            assert slot_tables[slots[row], : len(ids)].tolist() == ids
