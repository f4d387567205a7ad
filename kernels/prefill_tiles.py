"""The tile table of paged prefill attention: which query tokens of which sequence a program
computes. Host side, numpy.

A tile has 128 rows: some query heads that share a KV head, times consecutive tokens of one
sequence, token-major (row = token * heads + head). Heads are packed because a tile then spans few
tokens: short chunks and single decode rows fill it better, and K and V are read once for all heads
of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["TILE_ROWS", "prefill_tiles", "tile_heads", "tile_tokens"]

TILE_ROWS = 128


def tile_heads(group: int) -> int:
    """Query heads in one tile: the largest power of two that divides `group`, the query heads of
    one KV head.
    """
    return min(group & -group, TILE_ROWS // 2)


def tile_tokens(group: int) -> int:
    """Query tokens in one tile."""
    return TILE_ROWS // tile_heads(group)


def prefill_tiles(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    group: int,
    head_dim: int,
    window: int = 0,
) -> np.ndarray:
    """Cut each sequence's query tokens into tiles: int32 [tiles, 2] of (sequence, first query token
    in it).

    query_lens are the tokens of this step, context_lens all tokens including them; `window` 0 is
    full attention. Tiles with many keys come first: programs take them in this order, and small
    ones fill the last round. Tiles of all head dims are of one size.
    """
    del head_dim
    tokens = tile_tokens(group)
    queries, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    if (contexts < queries).any():
        raise ValueError("a sequence has fewer tokens in all than in this step")
    per_sequence = -(-queries // tokens)
    sequence = np.repeat(np.arange(len(queries)), per_sequence)
    before = np.cumsum(per_sequence) - per_sequence
    first = (np.arange(len(sequence)) - before[sequence]) * tokens
    newest = np.minimum((contexts - queries)[sequence] + first + tokens, contexts[sequence])
    keys = np.minimum(newest, window + tokens) if window else newest
    order = np.argsort(-keys, kind="stable")
    return np.stack([sequence, first], axis=1)[order].astype(np.int32)
