"""Block tables kept on the device from step to step, so that a step uploads only what is new.

A slot is a running request's row in `slot_tables` [slots, max_blocks] int32. Attention reads
`tables` [sequences, max_blocks], rows in the step's order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["append_blocks", "step_tables"]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["index", "block"])
def _append_blocks(slot_tables, index, block, count, BLOCK: tl.constexpr):
    # grid: (cdiv(count, BLOCK),)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    place = tl.load(index + item, mask=inside, other=0)
    tl.store(slot_tables + place, tl.load(block + item, mask=inside, other=0), mask=inside)


def append_blocks(slot_tables: torch.Tensor, index: torch.Tensor, block: torch.Tensor) -> None:
    """Set slot_tables.flatten()[index[i]] = block[i]; index and block int32 [items]."""
    count = index.numel()
    _append_blocks[(triton.cdiv(count, 256),)](slot_tables, index, block, count, BLOCK=256)


@triton.jit(do_not_specialize_on_alignment=["slots", "context_lens", "last_blocks"])
def _step_tables(
    slots,
    context_lens,
    last_blocks,
    slot_tables,
    tables,
    max_blocks,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: (sequences,)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    context_len = tl.load(context_lens + row)
    if slot >= 0:
        last = (context_len - 1) // BLOCK_TOKENS
        newest = tl.load(last_blocks + row)
        source = slot_tables + slot.to(tl.int64) * max_blocks
        target = tables + row.to(tl.int64) * max_blocks
        tl.store(source + last, newest)
        for start in range(0, last + 1, BLOCK):
            place = start + tl.arange(0, BLOCK)
            block = tl.load(source + place, mask=place < last, other=0)
            tl.store(target + place, tl.where(place == last, newest, block), mask=place <= last)


def step_tables(
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    last_blocks: torch.Tensor,
    slot_tables: torch.Tensor,
    tables: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Add each sequence's newest block to its slot's table, and copy that to `tables`.

    slots, context_lens, last_blocks int32 [sequences]; last_blocks[i] takes the KV of the last
    token. Slot -1 is padding.
    """
    assert slot_tables.shape[1] == tables.shape[1]
    grid = (slots.numel(),)
    _step_tables[grid](
        slots,
        context_lens,
        last_blocks,
        slot_tables,
        tables,
        tables.shape[1],
        BLOCK_TOKENS=block_size,
        BLOCK=256,
        num_warps=2,
    )
