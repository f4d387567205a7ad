"""Attention over paged KV, for any mix of prefill chunks and decodes, in torch: the CPU path.

An *item* is a tile of query tokens of one sequence against one split of its keys. Splits lie on a
fixed grid of 128 positions and every product has one shape, so a token's bits do not depend on the
batch, on chunks, or on the cached prefix. A plan drives all layers. Source of the split softmax:
Milakov and Gimelshein 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["AttentionPlan", "SequenceSpan", "attend", "plan_attention"]

SPLIT_TOKENS = 128
PREFILL_TILE_TOKENS = 32
# Below this, BLAS has other kernels and the bits change (1 to 4 rows).
ROW_MULTIPLE = 8
# Of one slab's scores.
SLAB_BYTES = 64 << 20
# Finite: the join gives a fully masked split zero weight.
MASKED = -1e30


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """A sequence's query tokens: rows [start, + count), from `first_position` on."""

    start: int
    count: int
    first_position: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Slab:
    # Items of whole tiles, all of one size. A tile has `rows` rows per KV head: its tokens for each
    # query head of the group, then padding.

    rows: int
    # [items * kv_heads * rows] rows of the query seen as [tokens * heads, head_dim]
    query_rows: torch.Tensor
    # [items * kv_heads * blocks_per_split] rows of the pool seen as [num_blocks * kv_heads, ...]
    pool_rows: torch.Tensor
    # [items, 1, rows or 1, SPLIT_TOKENS] 0 where the key may be seen, else MASKED
    bias: torch.Tensor
    tile_of_item: torch.Tensor | None  # [items]; None when every tile has exactly one item
    tiles: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    slabs: tuple[_Slab, ...]
    # [tokens * heads] rows of the slabs' results, seen as [tiles * kv_heads * rows, head_dim]
    output_rows: torch.Tensor


def plan_attention(
    spans: Sequence[SequenceSpan],
    *,
    tokens: int,
    block_size: int,
    kv_heads: int,
    group: int,
    window: int = 0,
) -> AttentionPlan:
    """Plan a step of `tokens` rows; `group` is query heads per KV head, `window` 0 is full.

    Rows that no span names get the finite output of some other row.
    """
    shape = _Shape(block_size, kv_heads, group, window)
    output_rows = np.zeros((tokens, kv_heads, group), np.int64)
    slabs: list[_Slab] = []
    result_rows = 0
    decodes = [span for span in spans if span.count == 1]
    prefills = [span for span in spans if span.count > 1]
    for tile_tokens, members in ((1, decodes), (PREFILL_TILE_TOKENS, prefills)):
        rows = -(-group * tile_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        max_items = max(1, SLAB_BYTES // (rows * SPLIT_TOKENS * 4 * kv_heads))
        for tiles in _slabs_of_tiles(members, tile_tokens, window, max_items):
            # A tile that is not full repeats its last token.
            wanted = _column(tiles, lambda tile: tile.first) + np.arange(tile_tokens)
            place = np.minimum(wanted, _column(tiles, lambda tile: tile.span.count) - 1)
            token_rows = _column(tiles, lambda tile: tile.span.start) + place
            positions = _column(tiles, lambda tile: tile.span.first_position) + place
            slabs.append(_slab(shape, tiles, token_rows, positions, rows))
            starts = result_rows + np.arange(len(tiles) * kv_heads).reshape(-1, kv_heads) * rows
            inside = np.arange(group * tile_tokens).reshape(group, tile_tokens)
            grid = starts[:, :, None, None] + inside  # [tiles, kv_heads, group, tile_tokens]
            real = wanted == place
            output_rows[token_rows[real]] = grid.transpose(0, 3, 1, 2)[real]
            result_rows += len(tiles) * kv_heads * rows
    return AttentionPlan(tuple(slabs), torch.from_numpy(output_rows.reshape(-1)))


class _Shape(NamedTuple):
    block_size: int
    kv_heads: int
    group: int
    window: int


class _Tile(NamedTuple):
    span: SequenceSpan
    first: int  # of its tokens, counted within the span
    splits: range


def _slabs_of_tiles(
    spans: Sequence[SequenceSpan], tile_tokens: int, window: int, max_items: int
) -> Iterator[list[_Tile]]:
    pending: list[_Tile] = []
    items = 0
    for span in spans:
        for first in range(0, span.count, tile_tokens):
            newest = span.first_position + min(first + tile_tokens, span.count) - 1
            oldest = max(0, span.first_position + first - window + 1) if window else 0
            splits = range(oldest // SPLIT_TOKENS, newest // SPLIT_TOKENS + 1)
            if pending and items + len(splits) > max_items:
                yield pending
                pending, items = [], 0
            pending.append(_Tile(span, first, splits))
            items += len(splits)
    if pending:
        yield pending


def _column(tiles: Sequence[_Tile], of: Callable[[_Tile], int]) -> np.ndarray:
    return np.array([of(tile) for tile in tiles])[:, None]


def _slab(
    shape: _Shape,
    tiles: list[_Tile],
    token_rows: np.ndarray,
    positions: np.ndarray,
    rows: int,
) -> _Slab:
    # token_rows and positions [tiles, tile_tokens]
    per_tile = np.array([len(tile.splits) for tile in tiles])
    tile_of_item = np.repeat(np.arange(len(tiles)), per_tile)
    items = [(tile.span.block_ids, split) for tile in tiles for split in tile.splits]
    per_split = SPLIT_TOKENS // shape.block_size
    blocks = np.zeros((len(items), per_split), np.int64)  # block 0 is the null block
    for item, (ids, split) in enumerate(items):
        ids = ids[split * per_split : (split + 1) * per_split]
        blocks[item, : len(ids)] = ids
    kv_heads = np.arange(shape.kv_heads)
    pool_rows = blocks[:, None, :] * shape.kv_heads + kv_heads[None, :, None]

    heads = np.arange(shape.kv_heads * shape.group).reshape(shape.kv_heads, shape.group)
    grid = token_rows[:, None, None, :] * heads.size + heads[None, :, :, None]
    flat = grid.reshape(len(tiles), shape.kv_heads, -1)  # [tiles, kv_heads, group * tokens]
    padding = np.repeat(flat[:, :, :1], rows - flat.shape[2], axis=2)
    query_rows = np.concatenate([flat, padding], axis=2)[tile_of_item]

    split_of_item = np.array([split for _, split in items])
    keys = split_of_item[:, None, None] * SPLIT_TOKENS + np.arange(SPLIT_TOKENS)
    queries = positions[tile_of_item][:, :, None]  # [items, tile_tokens, 1]
    seen = keys <= queries
    if shape.window:
        seen &= keys > queries - shape.window
    bias = np.where(seen, np.float32(0), np.float32(MASKED))  # [items, tile_tokens, SPLIT_TOKENS]
    if bias.shape[1] > 1:
        bias = np.tile(bias, (1, shape.group, 1))
        padding = np.repeat(bias[:, :1], rows - bias.shape[1], axis=1)
        bias = np.concatenate([bias, padding], axis=1)
    return _Slab(
        rows,
        torch.from_numpy(query_rows.reshape(-1)),
        torch.from_numpy(pool_rows.reshape(-1)),
        torch.from_numpy(bias[:, None]),
        None if (per_tile == 1).all() else torch.from_numpy(tile_of_item),
        len(tiles),
    )


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return causal softmax(scale * q k^T) v of every query token, [tokens, heads, head_dim].

    query [tokens, heads, head_dim]; caches [num_blocks, kv_heads, block_size, head_dim], one
    layer's views, with the step's own keys. `softcap` c: c * tanh(score / c).
    """
    tokens, heads, dim = query.shape
    flat = query.reshape(tokens * heads, dim).float()
    results = [
        _attend_slab(flat, key_cache, value_cache, slab, scale, softcap) for slab in plan.slabs
    ]
    result = results[0] if len(results) == 1 else torch.cat(results)
    return result.index_select(0, plan.output_rows).view(tokens, heads, dim).to(query.dtype)


def _attend_slab(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slab: _Slab,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    num_blocks, kv_heads, block_size, dim = key_cache.shape
    products = slab.bias.shape[0] * kv_heads
    keys, values = (
        cache.view(num_blocks * kv_heads, block_size * dim)
        .index_select(0, slab.pool_rows)
        .view(products, SPLIT_TOKENS, dim)
        .float()
        for cache in (key_cache, value_cache)
    )
    tile_query = query.index_select(0, slab.query_rows).view(products, slab.rows, dim)
    bias = slab.bias.expand(-1, kv_heads, slab.rows, -1).reshape(products, slab.rows, SPLIT_TOKENS)
    if softcap is None:
        scores = torch.baddbmm(bias, tile_query, keys.transpose(1, 2), alpha=scale)
    else:
        scores = (
            torch.bmm(tile_query, keys.transpose(1, 2))
            .mul_(scale / softcap)
            .tanh_()
            .mul_(softcap)
            .add_(bias)
        )
    mixed = torch.bmm(scores.softmax(-1), values)
    if slab.tile_of_item is not None:
        mixed = _join(
            mixed.view(-1, kv_heads, slab.rows, dim), scores, slab.tile_of_item, slab.tiles
        )
    return mixed.view(-1, dim)


def _join(
    mixed: torch.Tensor, scores: torch.Tensor, tile_of_item: torch.Tensor, tiles: int
) -> torch.Tensor:
    # Weighs a tile's splits by their share of the softmax, in ascending order.
    weight = scores.logsumexp(-1).view(*mixed.shape[:3], 1)  # [items, kv_heads, rows, 1]
    index = tile_of_item.view(-1, 1, 1, 1).expand_as(weight)
    shape = (tiles, *weight.shape[1:])
    top = weight.new_full(shape, MASKED).scatter_reduce_(0, index, weight, "amax")
    share = (weight - top[tile_of_item]).exp_()
    total = share.new_zeros(shape).index_add_(0, tile_of_item, share)
    joined = mixed.new_zeros(tiles, *mixed.shape[1:]).index_add_(0, tile_of_item, mixed * share)
    return joined / total
