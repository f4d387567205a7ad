"""From logits [rows, vocab] to one token per row: adjust, cut, draw. Triton; no copy, no sort.

A token depends on its own row only, bit for bit. Launches, over tiles of 1024 tokens:
  _summarize   (tiles / each, rows)  each tile's largest logit and sum of exp
  find_floors  the lowest logit that stays, only where rows are cut
  _weigh_kept  (tiles / each, rows)  the sums without what is below
  _choose      (rows)                the tile, then the token, where the running sum passes the draw
Twins and formulas: `kernels/sampling.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvrelay.kernels.sampling_floors import find_floors
from kvrelay.kernels.sampling_slots import (
    CHOICE,
    IS_CUT,
    IS_PENALIZED,
    IS_SEARCHED,
    SCALE,
    SEED,
    SUBTILE,
    TILE,
    TOKEN_INDEX,
    Rows,
    SlotTables,
    Tiles,
    TokenMask,
    has_flag,
    logits_of,
    masses_of,
    peak_and_masses,
    real_of,
    shares_of,
    word_of,
)

__all__ = ["sample"]


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: SlotTables,
    *,
    cut: bool = True,
    adjusted: bool = True,
    mask: TokenMask | None = None,
) -> torch.Tensor:
    """Return each row's next token, int64 [rows], 0 for padding; its slot has one token more.

    logits [rows or more, vocab], rows may be strided; slots int32 [rows], each at most once. cut,
    adjusted: whether any row has top-k, top-p or min-p; bias, min_tokens or penalties.
    """
    count, vocab = slots.shape[0], tables.notes.shape[1]
    num_tiles = triton.cdiv(vocab, TILE.value)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tokens = scratch(count, dtype=torch.int64)
    rows = Rows(
        logits,
        logits.stride(0),
        vocab,
        num_tiles,
        slots,
        tables.parameters,
        tables.notes if adjusted else None,
        tables.biases if adjusted else None,
        mask.words if mask else None,
        mask.of_row if mask else None,
    )
    tiles = Tiles(
        peaks=scratch(count, num_tiles),
        sums=scratch(count, num_tiles),
        bests=scratch(count, num_tiles, dtype=torch.int32),
        maxima=scratch(count, num_tiles * (TILE.value // SUBTILE.value)) if cut else None,
        minima=scratch(count, num_tiles) if cut else None,
    )
    floors = scratch(count) if cut else None
    # Rounded one by one, as torch does.
    options: dict[str, Any] = {"enable_fp_fusion": False}
    each = 1 if count <= 16 else 4
    num_warps = 1 if rows.notes is None and rows.mask_words is None else 4
    grid = (triton.cdiv(num_tiles, each), count)
    all_tiles = triton.next_power_of_2(num_tiles)

    _summarize[grid](rows, tiles, each, num_warps=num_warps, **options)
    if floors is not None:
        find_floors(rows, tiles, floors, options)
        _weigh_kept[grid](rows, tiles, floors, each, num_warps=num_warps, **options)
    _choose[(count,)](
        rows,
        tiles,
        floors,
        tokens,
        tables.sampled,
        tables.notes,
        ALL_TILES=all_tiles,
        num_warps=4,
        **options,
    )
    return tokens


# --- tiles


@triton.jit
def _sum(x):
    # Adds x [1024] in pairs, first the 8 of a thread, then its others.
    tl.static_assert(x.shape[0] == 1024)
    for _ in tl.static_range(3):
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), axis=1)
    for _ in tl.static_range(7):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), axis=0)
    return tl.sum(x, axis=0)


@triton.jit(do_not_specialize=["each"])
def _summarize(rows, tiles, each):
    row = tl.program_id(1)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    scale = real_of(rows, slot, SCALE)
    first = tl.program_id(0) * each
    for tile in range(first, tl.minimum(first + each, rows.tiles)):
        place = row * rows.tiles + tile
        tokens = tl.arange(0, TILE) + tile * TILE
        x = logits_of(rows, slot, row, tokens)
        peak = tl.max(x, axis=0)
        tl.store(tiles.peaks + place, peak)
        if scale > 0:
            tl.store(tiles.sums + place, _sum(shares_of(x, peak, scale)))
        else:
            tl.store(tiles.bests + place, tl.min(tl.where(x == peak, tokens, rows.vocab), axis=0))
        if tiles.maxima is not None:
            if has_flag(rows, slot, IS_SEARCHED):
                parts: tl.constexpr = TILE // SUBTILE
                maxima = tl.max(tl.reshape(x, [parts, SUBTILE]), axis=1)
                tl.store(tiles.maxima + place * parts + tl.arange(0, parts), maxima)
                tl.store(
                    tiles.minima + place,
                    tl.min(tl.where(x > -float("inf"), x, float("inf")), axis=0),
                )


@triton.jit(do_not_specialize=["each"])
def _weigh_kept(rows, tiles, floors, each):
    row = tl.program_id(1)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not has_flag(rows, slot, IS_CUT):
        return
    scale, floor = real_of(rows, slot, SCALE), tl.load(floors + row)
    first = tl.program_id(0) * each
    for tile in range(first, tl.minimum(first + each, rows.tiles)):
        place = row * rows.tiles + tile
        peak = tl.load(tiles.peaks + place)
        if peak >= floor:
            x = logits_of(rows, slot, row, tl.arange(0, TILE) + tile * TILE)
            tl.store(tiles.sums + place, _sum(tl.where(x >= floor, shares_of(x, peak, scale), 0.0)))
        else:
            tl.store(tiles.sums + place, 0.0)


# --- the draw


@triton.jit
def _draw(rows, slot, total):
    # uniform() times `total`, in integers
    seed_low = word_of(rows, slot, SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed_high = word_of(rows, slot, SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    index, choice = word_of(rows, slot, TOKEN_INDEX), word_of(rows, slot, CHOICE)
    bits, _1, _2, _3 = tl.philox((seed_high << 32) | seed_low, index, choice, 0, 0)
    uniform = (bits >> 8).to(tl.int64)  # in units of 2**-24
    return (total >> 24) * uniform + (((total & 0xFFFFFF) * uniform) >> 24)


@triton.jit
def _first_past(point, masses, places, last):
    # The first place up to `last` at which the running sum exceeds `point`, and the sum before;
    # else the last that has mass.
    running = tl.cumsum(masses, axis=0)
    found = tl.min(tl.where(running > point, places, last + 1), axis=0)
    if found > last:
        found = tl.max(tl.where(masses > 0, places, 0), axis=0)
    return found, tl.sum(tl.where(places == found, running - masses, 0), axis=0)


@triton.jit
def _choose(
    rows,
    tiles,
    floors,
    chosen,
    sampled,
    notes,
    ALL_TILES: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        tl.store(chosen + row, 0)
        return
    scale = real_of(rows, slot, SCALE)
    index = tl.arange(0, ALL_TILES)
    if scale > 0:
        peak, masses = peak_and_masses(tiles, row, rows.tiles, scale, ALL_TILES)
        point = _draw(rows, slot, tl.sum(masses, axis=0))
        tile, before = _first_past(point, masses, index, rows.tiles - 1)
        tokens = tl.arange(0, TILE) + tile * TILE
        x = logits_of(rows, slot, row, tokens)
        shares = shares_of(x, peak, scale)
        if floors is not None:
            if has_flag(rows, slot, IS_CUT):
                shares = tl.where(x >= tl.load(floors + row), shares, 0.0)
        token, _before = _first_past(point - before, masses_of(shares), tokens, rows.vocab - 1)
    else:
        inside = index < rows.tiles
        peaks = tl.load(tiles.peaks + row * rows.tiles + index, mask=inside, other=-float("inf"))
        bests = tl.load(tiles.bests + row * rows.tiles + index, mask=inside, other=0)
        token = tl.min(tl.where(peaks == tl.max(peaks, axis=0), bests, rows.vocab), axis=0)
    token = tl.minimum(token, rows.vocab - 1)
    tl.store(chosen + row, token.to(tl.int64))
    tl.store(sampled + slot, token.to(tl.int64))
    tl.store(rows.parameters + slot * 16 + TOKEN_INDEX, word_of(rows, slot, TOKEN_INDEX) + 1)
    if has_flag(rows, slot, IS_PENALIZED):
        note = notes + slot.to(tl.int64) * rows.vocab + token
        tl.store(note, tl.load(note) + 1)
