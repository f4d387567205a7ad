"""Attention over paged KV, for any mix of prefill chunks and decodes. Torch reference and CPU path.

The work is cut into *items*: one tile of query tokens of one sequence against one split of its keys. Splits lie on a
fixed grid of 128 key positions and every product has a fixed shape, so the bits of a token's output do not depend on
the batch, on how its prompt was cut into chunks, or on which prefix was cached: this is the batch-invariant mode of
design §3.4, and on the CPU it costs nothing. There is no loop over sequences: a plan (index tensors, made once per
step) drives all layers. Source of the split softmax: Milakov and Gimelshein 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["AttentionPlan", "SequenceSpan", "attend", "plan_attention"]

SPLIT_TOKENS = 128
PREFILL_TILE_TOKENS = 32
# Rows of every product: below this, BLAS picks other kernels for fewer rows and the bits change (seen at 1 to 4 rows).
ROW_MULTIPLE = 16
# Scores of one slab of items stay below this size, whatever the context length.
SLAB_BYTES = 64 << 20
# A finite "minus infinity" for row maxima, so that a fully masked split gives exp(-inf) = 0 and not NaN.
LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Query tokens of one sequence in this step: rows [start, start + count), positions [first_position, + count)."""

    start: int
    count: int
    first_position: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Slab:
    """Items of whole tiles, all tiles of one size. `rows_of_tile` repeats a valid row where a tile is not full."""

    rows_of_tile: torch.Tensor  # [tiles, tile_tokens] rows of q
    valid: torch.Tensor | None  # [tiles, tile_tokens] bool; None when every tile is full
    tile_of_item: torch.Tensor | None  # [items]; None when every tile has exactly one item
    pool_rows: (
        torch.Tensor
    )  # [items * kv_heads * blocks_per_split] rows of the pool seen as [num_blocks * kv_heads, ...]
    bias: torch.Tensor  # [items, 1, 1, tile_tokens, SPLIT_TOKENS] 0 where the key may be seen, else -inf

    def on(self, device: torch.device) -> _Slab:
        """The same slab on a device."""
        return _Slab(
            self.rows_of_tile.to(device),
            None if self.valid is None else self.valid.to(device),
            None if self.tile_of_item is None else self.tile_of_item.to(device),
            self.pool_rows.to(device),
            self.bias.to(device),
        )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one step share."""

    slabs: tuple[_Slab, ...]


def plan_attention(
    spans: Sequence[SequenceSpan],
    *,
    block_tokens: int,
    kv_heads: int,
    group: int,
    window: int = 0,
    device: torch.device | None = None,
) -> AttentionPlan:
    """Cut the step into slabs. `group` is query heads per KV head; `window` 0 is full causal attention."""
    decodes = [span for span in spans if span.count == 1]
    prefills = [span for span in spans if span.count > 1]
    slabs: list[_Slab] = []
    for tile_tokens, members in ((1, decodes), (PREFILL_TILE_TOKENS, prefills)):
        row_bytes = _padded_rows(group * tile_tokens) * SPLIT_TOKENS * 4 * kv_heads
        max_items = max(1, SLAB_BYTES // row_bytes)
        pending: list[tuple[SequenceSpan, int, range]] = []
        items = 0
        for span in members:
            for tile_start in range(0, span.count, tile_tokens):
                splits = _splits_seen(span, tile_start, tile_tokens, window)
                if pending and items + len(splits) > max_items:
                    slabs.append(_slab(pending, tile_tokens, block_tokens, kv_heads, window))
                    pending, items = [], 0
                pending.append((span, tile_start, splits))
                items += len(splits)
        if pending:
            slabs.append(_slab(pending, tile_tokens, block_tokens, kv_heads, window))
    return AttentionPlan(tuple(slab.on(device) for slab in slabs) if device is not None else tuple(slabs))


def _splits_seen(span: SequenceSpan, tile_start: int, tile_tokens: int, window: int) -> range:
    """The splits of keys that any query of this tile may see."""
    first = span.first_position + tile_start
    last = span.first_position + min(tile_start + tile_tokens, span.count) - 1
    oldest = max(0, first - window + 1) if window else 0
    return range(oldest // SPLIT_TOKENS, last // SPLIT_TOKENS + 1)


def _padded_rows(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _slab(
    tiles: list[tuple[SequenceSpan, int, range]], tile_tokens: int, block_tokens: int, kv_heads: int, window: int
) -> _Slab:
    per_split = SPLIT_TOKENS // block_tokens
    num_items = sum(len(splits) for _, _, splits in tiles)
    rows = np.empty((len(tiles), tile_tokens), np.int64)
    positions = np.empty((len(tiles), tile_tokens), np.int64)
    valid = np.ones((len(tiles), tile_tokens), np.bool_)
    tile_of_item = np.empty(num_items, np.int64)
    split_of_item = np.empty(num_items, np.int64)
    blocks = np.zeros((num_items, per_split), np.int64)  # block 0 is the null block: masked by the bias
    item = 0
    for tile, (span, tile_start, splits) in enumerate(tiles):
        token = np.minimum(np.arange(tile_start, tile_start + tile_tokens), span.count - 1)
        rows[tile], positions[tile] = span.start + token, span.first_position + token
        valid[tile] = np.arange(tile_start, tile_start + tile_tokens) < span.count
        for split in splits:
            ids = span.block_ids[split * per_split : (split + 1) * per_split]
            blocks[item, : len(ids)] = ids
            tile_of_item[item], split_of_item[item] = tile, split
            item += 1
    keys = split_of_item[:, None] * SPLIT_TOKENS + np.arange(SPLIT_TOKENS)  # [items, SPLIT]
    queries = positions[tile_of_item]  # [items, tile_tokens]
    seen = keys[:, None, :] <= queries[:, :, None]
    if window:
        seen &= keys[:, None, :] > queries[:, :, None] - window
    bias = np.where(seen, np.float32(0), np.float32(-np.inf))
    pool_rows = blocks[:, None, :] * kv_heads + np.arange(kv_heads)[None, :, None]  # [items, kv_heads, per_split]
    return _Slab(
        rows_of_tile=torch.from_numpy(rows),
        valid=None if valid.all() else torch.from_numpy(valid),
        tile_of_item=None if num_items == len(tiles) else torch.from_numpy(tile_of_item),
        pool_rows=torch.from_numpy(pool_rows.reshape(-1)),
        bias=torch.from_numpy(bias)[:, None, None],
    )


def attend(query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan) -> torch.Tensor:
    """Causal softmax(q k^T / sqrt(head_dim)) v of every query token over its sequence's blocks.

    query [tokens, heads, head_dim]; pool [num_blocks, kv_heads, layers, 2, block_tokens, head_dim], which must hold the
    step's own keys already. Returns [tokens, heads, head_dim]; rows that no span names are zero.
    """
    out = torch.zeros_like(query)
    for slab in plan.slabs:
        tiled = _attend_slab(query, pool, layer, slab)  # [tiles, tile_tokens, heads, head_dim]
        if slab.valid is None:
            out[slab.rows_of_tile.view(-1)] = tiled.flatten(0, 1)
        else:
            out[slab.rows_of_tile[slab.valid]] = tiled[slab.valid]
    return out


def _attend_slab(query: torch.Tensor, pool: torch.Tensor, layer: int, slab: _Slab) -> torch.Tensor:
    num_blocks, kv_heads, num_layers, _, block_tokens, dim = pool.shape
    tiles, tile_tokens = slab.rows_of_tile.shape
    group = query.shape[1] // kv_heads
    rows = group * tile_tokens
    padded = _padded_rows(rows)

    q = query[slab.rows_of_tile].view(tiles, tile_tokens, kv_heads, group, dim)
    tile_q = torch.zeros(tiles, kv_heads, padded, dim, device=query.device)
    tile_q[:, :, :rows] = (q.permute(0, 2, 3, 1, 4).float() * dim**-0.5).reshape(tiles, kv_heads, rows, dim)
    if slab.tile_of_item is not None:
        tile_q = tile_q[slab.tile_of_item]
    items = tile_q.shape[0]

    by_head = pool.view(num_blocks * kv_heads, num_layers, 2, block_tokens * dim)[:, layer]
    keys, values = (
        by_head[:, kind].index_select(0, slab.pool_rows).view(items * kv_heads, SPLIT_TOKENS, dim).float()
        for kind in (0, 1)
    )
    scores = torch.bmm(tile_q.view(items * kv_heads, padded, dim), keys.transpose(1, 2))
    scores = scores.view(items, kv_heads, padded, SPLIT_TOKENS)
    scores[:, :, :rows].view(items, kv_heads, group, tile_tokens, SPLIT_TOKENS).add_(slab.bias)
    peak = scores.amax(-1, keepdim=True).clamp_min_(LOWEST)  # [items, kv_heads, padded, 1]
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    mixed = torch.bmm(weights.view(items * kv_heads, padded, SPLIT_TOKENS), values).view(items, kv_heads, padded, dim)
    if slab.tile_of_item is not None:
        mixed, total = _combine(mixed, total, peak, slab.tile_of_item, tiles)
    result = (mixed[:, :, :rows] / total[:, :, :rows]).view(tiles, kv_heads, group, tile_tokens, dim)
    return result.permute(0, 3, 1, 2, 4).reshape(tiles, tile_tokens, kv_heads * group, dim).to(query.dtype)


def _combine(
    mixed: torch.Tensor, total: torch.Tensor, peak: torch.Tensor, tile_of_item: torch.Tensor, tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the splits of each tile in ascending order; a masked split adds an exact zero."""
    top = torch.full((tiles, *peak.shape[1:]), LOWEST, device=peak.device)
    top.scatter_reduce_(0, tile_of_item.view(-1, 1, 1, 1).expand_as(peak), peak, "amax")
    scale = (peak - top[tile_of_item]).exp_()
    joined = mixed.new_zeros(tiles, *mixed.shape[1:]).index_add_(0, tile_of_item, mixed * scale)
    joined_total = total.new_zeros(tiles, *total.shape[1:]).index_add_(0, tile_of_item, total * scale)
    return joined, joined_total
