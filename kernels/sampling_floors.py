"""Each row's *floor*, the lowest logit that top-k, top-p and min-p leave, without a sort. Triton.

Launches, over tiles of 1024 tokens; rows that are not cut exit at once:
  _bracket     (rows)             two values enclose the floor of top-k and top-p
  _narrow * 3  (tiles / 4, rows)  count or weigh what is above 8 pivots between them
  _gather      (tiles / 4, rows)  list the few hundred logits that are left
  _cut         (rows)             bisect these on the bits of their values
For top-k, k logits or more are as large as the k-th largest of the maxima of 128 tokens each. A
floor has the same bits in every batch. Twin: `kernels/sampling.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvrelay.kernels.sampling_slots import (
    FLOOR,
    IS_ADJUSTED,
    IS_CUT,
    IS_SEARCHED,
    SCALE,
    SUBTILE,
    TILE,
    TOP_K,
    TOP_P,
    UNIT,
    Rows,
    Tiles,
    has_flag,
    logits_of,
    masses_of,
    peak_and_masses,
    real_of,
    shares_of,
    word_of,
)

__all__ = ["find_floors"]

_TILES = tl.constexpr(4)  # per split
_PIVOTS = tl.constexpr(8)
_PASSES = 3
# Logits that `_cut` can bisect in registers. With more it reads the row once per bit: rare.
_ROOM = 4096

# The int64 words of a row's bracket: the lowest logit that stays is in (low, high]. What is above a
# logit is counted for top-k and weighed for top-p.
_LOW = tl.constexpr(0)
_HIGH = tl.constexpr(1)
_PEAK = tl.constexpr(2)
_LIMIT = tl.constexpr(3)
_ABOVE_LOW = tl.constexpr(4)  # 0: there are sure to be few
_ABOVE_HIGH = tl.constexpr(5)

_NO_LIMIT = tl.constexpr(1 << 62)


def find_floors(rows: Rows, tiles: Tiles, floors: torch.Tensor, options: dict[str, Any]) -> None:
    """Write the lowest logit that stays to floors [rows], in rows that are cut."""
    count, num_tiles = tiles.peaks.shape
    splits = triton.cdiv(num_tiles, _TILES.value)
    subtiles = num_tiles * (TILE.value // SUBTILE.value)
    device = floors.device
    brackets = torch.empty(_PASSES + 1, count, 8, dtype=torch.int64, device=device)
    amounts = torch.empty(_PASSES, count, splits, _PIVOTS.value, dtype=torch.int64, device=device)
    candidates = torch.empty(count, _ROOM, device=device)
    held = torch.empty(count, dtype=torch.int32, device=device)
    by_split = options | {
        "SPLITS": splits,
        "ALL_SPLITS": triton.next_power_of_2(splits),
        "ROOM": _ROOM,
        "num_warps": 4,
    }

    _bracket[(count,)](
        rows,
        tiles,
        brackets[0],
        held,
        floors,
        SUBTILES=subtiles,
        ALL_SUBTILES=triton.next_power_of_2(subtiles),
        ALL_TILES=triton.next_power_of_2(num_tiles),
        num_warps=4,
        **options,
    )
    for turn in range(_PASSES):
        last = max(turn - 1, 0)
        _narrow[(splits, count)](
            rows,
            tiles.peaks,
            brackets[last],
            amounts[last],
            brackets[turn],
            amounts[turn],
            FIRST=turn == 0,
            **by_split,
        )
    _gather[(splits, count)](
        rows, tiles.peaks, brackets[-2], amounts[-1], brackets[-1], candidates, held, **by_split
    )
    _cut[(count,)](rows, brackets[-1], candidates, held, floors, ROOM=_ROOM, num_warps=8, **options)


@triton.jit
def _bits_of(x):
    # in the order of the fp32
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _of_bits(ordered):
    bits = ordered.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _grain(rows, slot):
    # What bits of different logits differ by at least; an fp32 of 16 bits ends in zeros, or ones.
    grain = tl.full([], 2, tl.int64)
    if rows.logits.dtype.element_ty == tl.bfloat16:
        grain = tl.full([], 1 << 16, tl.int64)
    if rows.logits.dtype.element_ty == tl.float16:
        grain = tl.full([], 1 << 13, tl.int64)
    if rows.notes is not None:
        if has_flag(rows, slot, IS_ADJUSTED):
            grain = tl.full([], 2, tl.int64)
    return grain


@triton.jit
def _just_below(x):
    return x - (tl.abs(x) * 1e-6 + 1e-30)


@triton.jit
def _cuts_twice(rows, slot):
    # With top-p after top-k all that top-k leaves is needed.
    return (word_of(rows, slot, TOP_K) > 0) & (real_of(rows, slot, TOP_P) < 1)


@triton.jit
def _bracket(
    rows,
    tiles,
    bracket,
    held,
    floors,
    SUBTILES: tl.constexpr,
    ALL_SUBTILES: tl.constexpr,
    ALL_TILES: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not has_flag(rows, slot, IS_CUT):
        return
    scale = real_of(rows, slot, SCALE)
    peak, masses = peak_and_masses(tiles, row, rows.tiles, scale, ALL_TILES)
    tl.store(floors + row, peak + real_of(rows, slot, FLOOR))
    if not has_flag(rows, slot, IS_SEARCHED):
        return
    whole = tl.sum(masses, axis=0).to(tl.float32)
    top_k, top_p = word_of(rows, slot, TOP_K), real_of(rows, slot, TOP_P)
    if top_k > SUBTILES:
        index = tl.arange(0, ALL_TILES)
        minima = tl.load(
            tiles.minima + row * rows.tiles + index, mask=index < rows.tiles, other=float("inf")
        )
        low = _just_below(tl.min(minima, axis=0))
    elif top_k > 0:
        index = tl.arange(0, ALL_SUBTILES)
        maxima = tl.load(
            tiles.maxima + row * SUBTILES + index, mask=index < SUBTILES, other=-float("inf")
        )
        low = _just_below(_kth_largest(maxima, top_k, _grain(rows, slot)))
    else:
        # Logits below have less mass than the nucleus leaves out; 1 % is for rounding.
        low = peak + tl.log2((1.0 - top_p) * 0.99 * (whole / UNIT) / rows.vocab) / scale
    limit = tl.where(top_k > 0, top_k, (top_p * whole).to(tl.int64))
    above_low = tl.where(top_k > SUBTILES, rows.vocab, 0)
    above_low = tl.where(top_k > 0, above_low, whole.to(tl.int64))
    _write(bracket, row, low, peak, peak, limit, above_low, limit * 0)
    tl.store(held + row, 0)


@triton.jit
def _write(bracket, row, low, high, peak, limit, above_low, above_high):
    words = bracket + row * 8
    tl.store(words + _LOW, low.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(words + _HIGH, high.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(words + _PEAK, peak.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(words + _LIMIT, limit)
    tl.store(words + _ABOVE_LOW, above_low)
    tl.store(words + _ABOVE_HIGH, above_high)


@triton.jit
def _read(bracket, row):
    words = bracket + row * 8
    low = tl.load(words + _LOW).to(tl.int32).to(tl.float32, bitcast=True)
    high = tl.load(words + _HIGH).to(tl.int32).to(tl.float32, bitcast=True)
    peak = tl.load(words + _PEAK).to(tl.int32).to(tl.float32, bitcast=True)
    limit, above_low = tl.load(words + _LIMIT), tl.load(words + _ABOVE_LOW)
    return low, high, peak, limit, above_low, tl.load(words + _ABOVE_HIGH)


@triton.jit
def _kth_largest(values, k, grain):
    # A value that at least k reach, up to rounding.
    low, high = _bits_of(tl.min(values, axis=0)) - 1, _bits_of(tl.max(values, axis=0))
    while high - low >= grain:
        middle = (low + high) >> 1
        if tl.sum((values > _of_bits(middle)).to(tl.int32), axis=0) < k:
            high = middle
        else:
            low = middle
    return _of_bits(low + 1)


@triton.jit
def _pivots(low, high):
    return low + (high - low) * ((tl.arange(0, _PIVOTS) + 1).to(tl.float32) / (_PIVOTS + 1))


@triton.jit
def _is_crowded(rows, slot, low, peak, above_low, above_high, ROOM: tl.constexpr):
    # More logits in the bracket than room.
    count = (above_low - tl.where(_cuts_twice(rows, slot), 0, above_high)).to(tl.float32)
    if word_of(rows, slot, TOP_K) == 0:
        count /= (
            shares_of(low, peak, real_of(rows, slot, SCALE)) * UNIT
        )  # at most: none of them weighs less than low
    return count > ROOM


@triton.jit
def _narrowed(
    rows,
    slot,
    row,
    bracket,
    amounts,
    after,
    SPLITS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    # The bracket once amounts above its pivots are known; a row's first program writes it.
    low, high, peak, limit, above_low, above_high = _read(bracket, row)
    if _is_crowded(rows, slot, low, peak, above_low, above_high, ROOM):
        splits = tl.arange(0, ALL_SPLITS)[:, None]
        places = (row * SPLITS + splits) * _PIVOTS + tl.arange(0, _PIVOTS)[None, :]
        above = tl.sum(tl.load(amounts + places, mask=splits < SPLITS, other=0), axis=0)
        pivots = _pivots(low, high)
        stays = above < limit
        # Amounts fall: each of these four is that of the pivot next to the edge.
        low = tl.maximum(low, tl.max(tl.where(stays, -float("inf"), pivots), axis=0))
        above_low = tl.minimum(above_low, tl.min(tl.where(stays, _NO_LIMIT, above), axis=0))
        high = tl.minimum(high, tl.min(tl.where(stays, pivots, float("inf")), axis=0))
        above_high = tl.maximum(above_high, tl.max(tl.where(stays, above, 0), axis=0))
    if tl.program_id(0) == 0:
        _write(after, row, low, high, peak, limit, above_low, above_high)
    return low, high, peak, above_low, above_high


@triton.jit
def _narrow(
    rows,
    peaks,
    bracket,
    amounts,
    after,
    amounts_after,
    FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    # Narrows the bracket by the pass before; counts or weighs above new pivots.
    row, split = tl.program_id(1), tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not has_flag(rows, slot, IS_SEARCHED):
        return
    if FIRST:
        low, high, peak, _limit, above_low, above_high = _read(bracket, row)
    else:
        low, high, peak, above_low, above_high = _narrowed(
            rows, slot, row, bracket, amounts, after, SPLITS, ALL_SPLITS, ROOM
        )
    if not _is_crowded(rows, slot, low, peak, above_low, above_high, ROOM):
        return
    scale, counts = real_of(rows, slot, SCALE), word_of(rows, slot, TOP_K) > 0
    pivots = _pivots(low, high)
    above = tl.zeros([_PIVOTS, TILE], tl.float32)
    for tile in range(split * _TILES, tl.minimum(split * _TILES + _TILES, rows.tiles)):
        if tl.load(peaks + row * rows.tiles + tile) > low:
            x = logits_of(rows, slot, row, tl.arange(0, TILE) + tile * TILE)
            amount = tl.where(counts, 1.0, shares_of(x, peak, scale))
            larger = (x[None, :] > pivots[:, None]).to(
                tl.float32
            )  # two instructions for each pivot and logit
            above = tl.fma(larger, amount[None, :], above)
    # Eight places are added in an order given here; the rest as integers, in any order.
    for _ in tl.static_range(3):
        above = tl.sum(tl.reshape(above, [_PIVOTS, 2, above.shape[1] // 2]), axis=1)
    places = (row * SPLITS + split) * _PIVOTS + tl.arange(0, _PIVOTS)
    tl.store(
        amounts_after + places, tl.sum((above * tl.where(counts, 1.0, UNIT)).to(tl.int64), axis=1)
    )


@triton.jit
def _gather(
    rows,
    peaks,
    bracket,
    amounts,
    after,
    candidates,
    held,
    SPLITS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    # The logits in the bracket to `candidates` [rows, ROOM]; `held` counts them.
    row, split = tl.program_id(1), tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not has_flag(rows, slot, IS_SEARCHED):
        return
    low, high, _peak, _above_low, _above_high = _narrowed(
        rows, slot, row, bracket, amounts, after, SPLITS, ALL_SPLITS, ROOM
    )
    high = tl.where(_cuts_twice(rows, slot), float("inf"), high)
    for tile in range(split * _TILES, tl.minimum(split * _TILES + _TILES, rows.tiles)):
        if tl.load(peaks + row * rows.tiles + tile) > low:
            x = logits_of(rows, slot, row, tl.arange(0, TILE) + tile * TILE)
            within = ((x > low) & (x <= high)).to(tl.int32)
            count = tl.sum(within, axis=0)
            if count > 0:
                places = (
                    tl.atomic_add(held + row, count, sem="relaxed") + tl.cumsum(within, axis=0) - 1
                )
                tl.store(candidates + row * ROOM + places, x, mask=(within != 0) & (places < ROOM))


@triton.jit
def _cut(
    rows,
    bracket,
    candidates,
    held,
    floors,
    ROOM: tl.constexpr,
):
    # The lowest logit that stays, or min-p's floor if higher. Above `low` there is too much for
    # `low` to stay, above `high` there is not.
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row)
    if slot < 0:
        return
    if not has_flag(rows, slot, IS_SEARCHED):
        return
    low, high, peak, limit, _above_low, above_high = _read(bracket, row)
    scale, twice = real_of(rows, slot, SCALE), _cuts_twice(rows, slot)
    counts = word_of(rows, slot, TOP_K) > 0
    over = tl.where(twice, 0, above_high)  # above all candidates
    high = tl.where(twice, peak, high)
    listed = tl.load(held + row)
    index = tl.arange(0, ROOM)
    is_listed = (index < listed) & (listed <= ROOM)
    values = tl.load(candidates + row * ROOM + index, mask=is_listed, other=-float("inf"))
    masses = masses_of(shares_of(values, peak, scale))
    if (listed > 0) & (listed <= ROOM):
        low = _just_below(tl.min(tl.where(is_listed, values, float("inf")), axis=0))
        high = tl.max(values, axis=0)
    low, high = _bits_of(low), _bits_of(high)
    if listed == 0:  # by rounding
        low = high - 1
    top, grain = high, _grain(rows, slot)
    found = (values, masses, listed, peak, scale)
    for stage in range(2):
        if (stage == 0) | twice:
            count_low, mass_low = _above(_of_bits(low), rows, slot, row, found)
            count_high, mass_high = _above(_of_bits(high), rows, slot, row, found)
            while (high - low >= grain) & (count_low - count_high > 1):
                middle = (low + high) >> 1
                count, mass = _above(_of_bits(middle), rows, slot, row, found)
                if (
                    tl.where(counts, count.to(tl.int64), mass) + tl.where(listed <= ROOM, over, 0)
                    < limit
                ):
                    high, count_high, mass_high = middle, count, mass
                else:
                    low, count_low, mass_low = middle, count, mass
            if (stage == 0) & twice:
                # Of equals at its edge top-k weighs only as many as make up k.
                each = (mass_low - mass_high) // tl.maximum(count_low - count_high, 1)
                of_k = mass_high + each * (tl.minimum(limit, count_low.to(tl.int64)) - count_high)
                limit = (of_k.to(tl.float32) * real_of(rows, slot, TOP_P)).to(tl.int64)
                counts, high = counts & False, top
    tl.store(floors + row, tl.maximum(tl.load(floors + row), _of_bits(low + 1)))


@triton.jit
def _above(edge, rows, slot, row, found):
    # Number and mass of the candidates above `edge`, or of the whole row.
    values, masses, listed, peak, scale = found
    if listed <= values.shape[0]:
        count = tl.sum((values > edge).to(tl.int32), axis=0)
        mass = tl.sum(tl.where(values > edge, masses, 0), axis=0)
    else:
        counts = tl.zeros([TILE], tl.int32)
        sums = tl.zeros([TILE], tl.int64)
        for tile in range(rows.tiles):
            x = logits_of(rows, slot, row, tl.arange(0, TILE) + tile * TILE)
            counts += (x > edge).to(tl.int32)
            sums += tl.where(x > edge, masses_of(shares_of(x, peak, scale)), 0)
        count, mass = tl.sum(counts, axis=0), tl.sum(sums, axis=0)
    return count, mass
