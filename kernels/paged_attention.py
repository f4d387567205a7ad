"""Attention over paged KV, for any mix of prefill chunks and decodes, in torch: the CPU path.

An *item* is a tile of query tokens of one sequence against one split of its keys. Splits lie on a
fixed grid of 128 positions and every product has one shape, so a token's bits do not depend on the
batch, on chunks, or on the cached prefix. A plan drives all layers. Source of the split softmax:
Milakov and Gimelshein 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["AttentionPlan", "SequenceSpan", "attend", "plan_attention"]

SPLIT_TOKENS = 128
PREFILL_TILE_TOKENS = 32
# Below this, BLAS has other kernels and the bits change (1 to 4 rows).
ROW_MULTIPLE = 8
# Of one slab's scores.
SLAB_BYTES = 64 << 20
# Finite: the join gives a fully masked split a weight of zero.
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
    query_rows: (
        torch.Tensor
    )  # [items * kv_heads * rows] rows of the query seen as [tokens * heads, head_dim]
    pool_rows: (
        torch.Tensor
    )  # [items * kv_heads * blocks_per_split] rows of the pool seen as [num_blocks * kv_heads, ...]
    bias: (
        torch.Tensor
    )  # [items, 1, rows or 1, SPLIT_TOKENS] 0 where the key may be seen, else MASKED
    tile_of_item: torch.Tensor | None  # [items]; None when every tile has exactly one item
    tiles: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    slabs: tuple[_Slab, ...]
    output_rows: (
        torch.Tensor
    )  # [tokens * heads] rows of the slabs' results, seen as [tiles * kv_heads * rows, head_dim]


def plan_attention(
    spans: Sequence[SequenceSpan],
    *,
    tokens: int,
    block_size: int,
    kv_heads: int,
    group: int,
    window: int = 0,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Plan a step of `tokens` rows; `group` is query heads per KV head, `window` 0 is full.

    Rows that no span names get the finite output of some other row.
    """
    planner = _Planner(tokens, block_size, kv_heads, group, window, torch.device(device))
    decodes = [span for span in spans if span.count == 1]
    prefills = [span for span in spans if span.count > 1]
    for tile_tokens, members in ((1, decodes), (PREFILL_TILE_TOKENS, prefills)):
        row_bytes = _padded_rows(group * tile_tokens) * SPLIT_TOKENS * 4 * kv_heads
        max_items = max(1, SLAB_BYTES // row_bytes)
        pending: list[_Tile] = []
        items = 0
        for span in members:
            for first in range(0, span.count, tile_tokens):
                tile = _Tile(span, first, _splits_seen(span, first, tile_tokens, window))
                if pending and items + len(tile.splits) > max_items:
                    planner.add_slab(pending, tile_tokens)
                    pending, items = [], 0
                pending.append(tile)
                items += len(tile.splits)
        if pending:
            planner.add_slab(pending, tile_tokens)
    return planner.plan()


@dataclass(frozen=True, slots=True)
class _Tile:
    span: SequenceSpan
    first: int  # of its tokens, counted within the span
    splits: range


def _splits_seen(span: SequenceSpan, first: int, tile_tokens: int, window: int) -> range:
    newest = span.first_position + min(first + tile_tokens, span.count) - 1
    oldest = max(0, span.first_position + first - window + 1) if window else 0
    return range(oldest // SPLIT_TOKENS, newest // SPLIT_TOKENS + 1)


def _padded_rows(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


class _Planner:
    def __init__(
        self,
        tokens: int,
        block_size: int,
        kv_heads: int,
        group: int,
        window: int,
        device: torch.device,
    ) -> None:
        self._block_size, self._kv_heads, self._group, self._window = (
            block_size,
            kv_heads,
            group,
            window,
        )
        self._device = device
        self._slabs: list[_Slab] = []
        self._result_rows = 0
        self._output_rows = np.zeros((tokens, kv_heads, group), np.int64)

    def plan(self) -> AttentionPlan:
        return AttentionPlan(tuple(self._slabs), self._tensor(self._output_rows.reshape(-1)))

    def add_slab(self, tiles: list[_Tile], tile_tokens: int) -> None:
        # One that is not full repeats its last token.
        wanted = np.array([tile.first for tile in tiles])[:, None] + np.arange(
            tile_tokens
        )  # [tiles, tile_tokens]
        place = np.minimum(wanted, np.array([tile.span.count for tile in tiles])[:, None] - 1)
        token_rows = np.array([tile.span.start for tile in tiles])[:, None] + place
        positions = np.array([tile.span.first_position for tile in tiles])[:, None] + place
        per_tile = np.array([len(tile.splits) for tile in tiles])
        tile_of_item = np.repeat(np.arange(len(tiles)), per_tile)
        split_of_item = np.concatenate(
            [np.arange(tile.splits.start, tile.splits.stop) for tile in tiles]
        )
        rows = _padded_rows(self._group * tile_tokens)
        self._slabs.append(
            _Slab(
                rows=rows,
                query_rows=self._tensor(
                    self._query_rows(token_rows, rows)[tile_of_item].reshape(-1)
                ),
                pool_rows=self._tensor(self._pool_rows(tiles)),
                bias=self._tensor(self._bias(positions, rows, tile_of_item, split_of_item)),
                tile_of_item=None if (per_tile == 1).all() else self._tensor(tile_of_item),
                tiles=len(tiles),
            )
        )
        self._note_output(token_rows, wanted == place, rows)

    def _query_rows(self, token_rows: np.ndarray, rows: int) -> np.ndarray:
        # padding repeats row 0
        heads = np.arange(self._kv_heads * self._group).reshape(self._kv_heads, self._group)
        all_heads = self._kv_heads * self._group
        grid = (
            token_rows[:, None, None, :] * all_heads + heads[None, :, :, None]
        )  # [tiles, kv_heads, group, tokens]
        flat = grid.reshape(len(token_rows), self._kv_heads, -1)
        return np.concatenate(
            [flat, np.repeat(flat[:, :, :1], rows - flat.shape[2], axis=2)], axis=2
        )

    def _pool_rows(self, tiles: list[_Tile]) -> np.ndarray:
        per_split = SPLIT_TOKENS // self._block_size
        blocks = np.zeros(
            (sum(len(tile.splits) for tile in tiles), per_split), np.int64
        )  # block 0 is the null block
        item = 0
        for tile in tiles:
            for split in tile.splits:
                ids = tile.span.block_ids[split * per_split : (split + 1) * per_split]
                blocks[item, : len(ids)] = ids
                item += 1
        by_head = blocks[:, None, :] * self._kv_heads + np.arange(self._kv_heads)[None, :, None]
        return by_head.reshape(-1)  # [items * kv_heads * per_split]

    def _bias(
        self, positions: np.ndarray, rows: int, tile_of_item: np.ndarray, split_of_item: np.ndarray
    ) -> np.ndarray:
        keys = split_of_item[:, None, None] * SPLIT_TOKENS + np.arange(
            SPLIT_TOKENS
        )  # [items, 1, SPLIT]
        queries = positions[tile_of_item][:, :, None]  # [items, tile_tokens, 1]
        seen = keys <= queries
        if self._window:
            seen &= keys > queries - self._window
        bias = np.where(seen, np.float32(0), np.float32(MASKED))  # [items, tile_tokens, SPLIT]
        if bias.shape[1] > 1:
            bias = np.tile(bias, (1, self._group, 1))
            bias = np.concatenate(
                [bias, np.repeat(bias[:, :1], rows - bias.shape[1], axis=1)], axis=1
            )
        return bias[:, None]  # [items, 1, rows or 1, SPLIT]

    def _note_output(self, token_rows: np.ndarray, valid: np.ndarray, rows: int) -> None:
        tiles, tile_tokens = token_rows.shape
        start = (
            np.arange(tiles * self._kv_heads).reshape(tiles, self._kv_heads) * rows
            + self._result_rows
        )
        inside = np.arange(self._group * tile_tokens).reshape(self._group, tile_tokens)
        grid = start[:, :, None, None] + inside  # [tiles, kv_heads, group, tile_tokens]
        self._output_rows[token_rows[valid]] = grid.transpose(0, 3, 1, 2)[valid]
        self._result_rows += tiles * self._kv_heads * rows

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return causal softmax(scale * q k^T) v of every query token, [tokens, heads, head_dim].

    query [tokens, heads, head_dim]; caches [num_blocks, kv_heads, block_size, head_dim], one
    layer's views, with the step's own keys. `softcap` c: c * tanh(score / c).
    """
    tokens, heads, dim = query.shape
    flat = query.reshape(tokens * heads, dim).float()
    scale = dim**-0.5 if scale is None else scale
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
