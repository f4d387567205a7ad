"""Attention of prefill chunks over paged 16-bit KV on Hopper, in Gluon; see paged_prefill.py.

A program's *loader* copies queries, and keys and values a strip at a time into a ring of slots, by
TMA, and runs ahead. Its two *halves* are warpgroups with 64 of a tile's 128 rows. A half starts the
product of the next keys before it waits for that of the last values, so that its softmax runs
beside the tensor cores; the halves take turns in starting products.

TMA sees the pool as rows of head_dim elements; a box is one block of one head, with zeros beyond
head_dim (80, 96).

A tile is TOKENS x HEADS = 128 rows, DIM is head_dim rounded up to a power of two, an *item* is one
tile for HEADS heads. Grid: (SMs), or (items) if fewer. Algorithm: Shah et al., "FlashAttention-3",
2024.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvrelay.kernels.paged_prefill import tile_heads, tile_tokens

__all__ = ["hopper_prefill"]

LOG2_E = 1 / math.log(2)
# Finite: a row that has seen no key gets no NaN.
LOWEST = gl.constexpr(-1e30)
ROWS = gl.constexpr(64)
SLOTS = gl.constexpr(2)
# Registers per thread; the halves and the loader share 504.
HALF_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(40)


def hopper_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    *,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    rows, heads, head_dim = query.shape
    num_blocks, kv_heads, block_size, _ = key_cache.shape
    block_rows, head_rows = (stride // head_dim for stride in key_cache.stride()[:2])
    pool_rows = (num_blocks - 1) * block_rows + (kv_heads - 1) * head_rows + block_size
    group, dim = heads // kv_heads, 1 << (head_dim - 1).bit_length()
    tile = [tile_tokens(group), tile_heads(group), dim]
    items = len(tiles) * heads // tile_heads(group)
    programs = min(items, torch.cuda.get_device_properties(query.device).multi_processor_count)
    _prefill_kernel[(programs,)](
        _descriptor(query, [rows, heads, head_dim], list(query.stride()), tile),
        _descriptor(key_cache, [pool_rows, head_dim], [head_dim, 1], [block_size, dim]),
        _descriptor(value_cache, [pool_rows, head_dim], [head_dim, 1], [block_size, dim]),
        out,
        block_tables,
        query_starts,
        context_lens,
        tiles,
        items,
        block_rows,
        head_rows,
        block_tables.stride(0),
        *out.stride()[:2],
        2 * LOG2_E * scale / softcap if softcap else LOG2_E * scale,
        LOG2_E * softcap,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        STRIP=128 if dim <= 128 else 64,
        WINDOW=window,
        SOFTCAP=softcap > 0,
        num_warps=4,
    )
    return out


def _descriptor(
    tensor: torch.Tensor, shape: list[int], strides: list[int], box: list[int]
) -> TensorDescriptor:
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[tensor.dtype]
    return TensorDescriptor(
        tensor, shape, strides, box, gl.NVMMASharedLayout.get_default_for(box, dtype)
    )


@gluon.jit(do_not_specialize=["items"])
def _prefill_kernel(
    queries,  # TMA descriptor of [T, Hq, D], boxes [TOKENS, HEADS, DIM]
    keys,  # TMA descriptor of [rows of the pool, D], boxes [block_size, DIM]
    values,
    out,
    block_tables,
    query_starts,
    context_lens,
    tiles,
    items,
    block_rows,
    head_rows,
    table_stride,
    out_token_stride,
    out_head_stride,
    to_exponent,
    cap,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STRIP: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    TOKENS: gl.constexpr = queries.block_type.shape[0]
    HEADS: gl.constexpr = queries.block_type.shape[1]
    DIM: gl.constexpr = queries.block_type.shape[2]
    query_tile = gl.allocate_shared_memory(queries.dtype, [TOKENS, HEADS, DIM], queries.layout)
    key_ring = gl.allocate_shared_memory(keys.dtype, [SLOTS, STRIP, DIM], keys.layout)
    value_ring = gl.allocate_shared_memory(values.dtype, [SLOTS, STRIP, DIM], values.layout)

    # `full`: TMA has written a slot. `free`: both halves have read it.
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    query_full = gl.allocate_shared_memory(gl.int64, [1, 1], layout)
    query_free = gl.allocate_shared_memory(gl.int64, [1, 1], layout)
    key_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], layout)
    key_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], layout)
    value_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], layout)
    value_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], layout)
    landed = gl.allocate_shared_memory(
        gl.int64, [1, 1], layout
    )  # values that the loader has yet to clean
    turns = gl.allocate_shared_memory(
        gl.int64, [2, 1], layout
    )  # it is this half's turn to start products
    mbarrier.init(query_full.index(0), count=1)
    mbarrier.init(query_free.index(0), count=2)
    mbarrier.init(landed.index(0), count=1)
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(key_full.index(slot), count=1)
        mbarrier.init(key_free.index(slot), count=2)
        mbarrier.init(value_full.index(slot), count=1)
        mbarrier.init(value_free.index(slot), count=2)
    fence_async_shared()

    buffers = (query_tile, key_ring, value_ring)
    full = (query_full, key_full, value_full)
    free = (query_free, key_free, value_free)
    work = (tiles, query_starts, context_lens, items)
    pool = (keys, values, block_tables, table_stride, block_rows, head_rows)
    result = (out, out_token_stride, out_head_stride)
    how = (KV_HEADS, GROUP, HEAD_DIM, WINDOW, SOFTCAP)
    gl.warp_specialize(
        [
            (_half, (0, buffers, full, free, turns, work, result, to_exponent, cap, how)),
            (_half, (1, buffers, full, free, turns, work, result, to_exponent, cap, how)),
            (_loader, (queries, pool, buffers, full, free, landed, work, how)),
        ],
        [4, 1],
        [HALF_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _place(turn):
    # Every second round in reverse: all programs get a like sum of work.
    place = gl.program_id(0)
    return gl.where(turn % 2 == 0, place, gl.num_programs(0) - 1 - place)


@gluon.jit
def _count_turns(items):
    programs = gl.num_programs(0)
    rounds = items // programs
    return rounds + (_place(rounds) < items - rounds * programs).to(gl.int32)


@gluon.jit
def _item(turn, work, head_tiles):
    # sequence, set of heads, row of the first token, row where the tokens stop, position of the
    # first token, tokens in all
    tiles, query_starts, context_lens, items = work
    item = turn * gl.num_programs(0) + _place(turn)
    tile = tiles + item // head_tiles * 2
    sequence = gl.load(tile)
    first = gl.load(tile + 1)
    start = gl.load(query_starts + sequence)
    stop = gl.load(query_starts + sequence + 1)
    context = gl.load(context_lens + sequence)
    return sequence, item % head_tiles, start + first, stop, context - stop + start + first, context


@gluon.jit
def _strips(oldest, context, TOKENS: gl.constexpr, STRIP: gl.constexpr, WINDOW: gl.constexpr):
    # Rows see keys in [begin, end); all see all of [whole, ragged).
    begin = 0
    if WINDOW > 0:
        begin = gl.maximum(oldest - WINDOW + 1, 0) // STRIP
    end = gl.maximum((gl.minimum(oldest + TOKENS, context) + STRIP - 1) // STRIP, begin + 1)
    whole = begin
    if WINDOW > 0:
        whole = gl.minimum((gl.maximum(oldest + TOKENS - WINDOW, 0) + STRIP - 1) // STRIP, end)
    ragged = gl.maximum((oldest + 1) // STRIP, whole)
    return begin, whole, ragged, end


@gluon.jit
def _loader(queries, pool, buffers, full, free, landed, work, how):
    KV_HEADS, GROUP, HEAD_DIM, WINDOW, SOFTCAP = how
    keys, values, block_tables, table_stride, block_rows, head_rows = pool
    query_tile, key_ring, value_ring = buffers
    query_full, key_full, value_full = full
    query_free, key_free, value_free = free
    TOKENS: gl.constexpr = queries.block_type.shape[0]
    HEADS: gl.constexpr = queries.block_type.shape[1]
    STRIP: gl.constexpr = key_ring.shape[1]
    BLOCK_TOKENS: gl.constexpr = keys.block_type.shape[0]
    STRIP_BYTES: gl.constexpr = keys.block_type.nbytes * STRIP // BLOCK_TOKENS
    done = 0  # strips of the items before; strip `number` of all lies in slot number % SLOTS
    cleaned = 0
    for turn in range(_count_turns(work[3])):
        sequence, head_tile, row, stop, oldest, context = _item(
            turn, work, KV_HEADS * GROUP // HEADS
        )
        mbarrier.wait(query_free.index(0), (turn & 1) ^ 1)
        mbarrier.expect(query_full.index(0), queries.block_type.nbytes)
        tma.async_copy_global_to_shared(
            queries, [row, head_tile * HEADS, 0], query_full.index(0), query_tile
        )

        begin, whole, ragged, end = _strips(oldest, context, TOKENS, STRIP, WINDOW)
        table = block_tables + sequence.to(gl.int64) * table_stride
        last_block = gl.maximum(context - 1, 0) // BLOCK_TOKENS
        source = (table, last_block, block_rows, head_tile * HEADS // GROUP * head_rows)
        for strip in range(begin, end + 1):
            number = done + strip - begin
            if strip < end:
                slot = number % SLOTS
                mbarrier.wait(key_free.index(slot), (number // SLOTS & 1) ^ 1)
                mbarrier.expect(key_full.index(slot), STRIP_BYTES)
                _copy_strip(keys, source, strip, key_full.index(slot), key_ring.index(slot))
            if strip > begin:
                number -= 1
                slot = number % SLOTS
                mbarrier.wait(value_free.index(slot), (number // SLOTS & 1) ^ 1)
                exist = context - (strip - 1) * STRIP
                if exist >= STRIP:
                    mbarrier.expect(value_full.index(slot), STRIP_BYTES)
                    _copy_strip(
                        values, source, strip - 1, value_full.index(slot), value_ring.index(slot)
                    )
                else:
                    # Zero times a value that nobody wrote might be a NaN.
                    mbarrier.expect(landed.index(0), STRIP_BYTES)
                    _copy_strip(values, source, strip - 1, landed.index(0), value_ring.index(slot))
                    mbarrier.wait(landed.index(0), cleaned & 1)
                    cleaned += 1
                    _clear_rows(value_ring.index(slot), exist)
                    fence_async_shared()
                    mbarrier.arrive(value_full.index(slot), count=1)
        done += end - begin


@gluon.jit
def _copy_strip(cache, source, strip, landed, slot):
    # A box for each block; beyond the last that one again, masked later.
    table, last_block, block_rows, head_row = source
    BLOCK_TOKENS: gl.constexpr = cache.block_type.shape[0]
    BLOCKS: gl.constexpr = slot.shape[0] // BLOCK_TOKENS
    for i in gl.static_range(BLOCKS):
        block = gl.load(table + gl.minimum(strip * BLOCKS + i, last_block))
        rows = slot.slice(i * BLOCK_TOKENS, BLOCK_TOKENS, 0)
        tma.async_copy_global_to_shared(cache, [block * block_rows + head_row, 0], landed, rows)


@gluon.jit
def _clear_rows(slot, first):
    # Zeros rows from `first` on; eight at a time: the loader has few registers.
    STRIP: gl.constexpr = slot.shape[0]
    DIM: gl.constexpr = slot.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [1, 1], [1, 0])
    for i in gl.static_range(STRIP // 8):
        rows = slot.slice(i * 8, 8, 0)
        old = rows.load(layout)
        keep = i * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout)) < first
        rows.store(gl.where(gl.expand_dims(keep, 1), old, gl.zeros_like(old)))


@gluon.jit
def _half(HALF: gl.constexpr, buffers, full, free, turns, work, result, to_exponent, cap, how):
    # rows [64 * HALF, 64 * HALF + 64) of each item
    KV_HEADS, GROUP, HEAD_DIM, WINDOW, SOFTCAP = how
    query_tile, key_ring, value_ring = buffers
    query_full, key_full, value_full = full
    query_free, key_free, value_free = free
    out, out_token_stride, out_head_stride = result
    TOKENS: gl.constexpr = query_tile.shape[0]
    HEADS: gl.constexpr = query_tile.shape[1]
    DIM: gl.constexpr = query_tile.shape[2]
    STRIP: gl.constexpr = key_ring.shape[1]
    dtype: gl.constexpr = key_ring.dtype
    mixed_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, mixed_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(
        1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STRIP, 16])
    )
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])

    flat: gl.constexpr = gl.NVMMASharedLayout(query_tile.layout.swizzle_byte_width, 16, 2)
    q = query_tile._reinterpret(dtype, [TOKENS * HEADS, DIM], flat).slice(HALF * ROWS, ROWS, 0)
    token = (HALF * ROWS + gl.arange(0, ROWS, row_layout)) // HEADS
    turn_count = _count_turns(work[3])
    done = 0
    item = _item(0, work, KV_HEADS * GROUP // HEADS)
    for turn in range(turn_count):
        sequence, head_tile, row, stop, oldest, context = item
        item = _item(gl.minimum(turn + 1, turn_count - 1), work, KV_HEADS * GROUP // HEADS)
        begin, whole, ragged, end = _strips(oldest, context, TOKENS, STRIP, WINDOW)
        rule = (oldest + token, to_exponent, cap)
        mixed = gl.zeros([ROWS, DIM], gl.float32, mixed_layout)
        top = gl.full([ROWS], LOWEST, gl.float32, row_layout)
        total = gl.zeros([ROWS], gl.float32, row_layout)

        mbarrier.wait(query_full.index(0), turn & 1)
        scores = _start_scores(HALF, q, key_ring, key_full, turns, done)
        mbarrier.arrive(turns.index(1 - HALF), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(done % SLOTS), count=1)
        weights, top, total, shrink = _softmax(
            scores, top, total, rule, begin * STRIP, True, WINDOW, SOFTCAP
        )
        state = (mixed, gl.convert_layout(weights.to(dtype), weight_layout), top, total)

        rings = (q, key_ring, value_ring, full, free, turns, done - begin)
        if WINDOW > 0:
            for strip in range(begin + 1, whole):
                state = _step(HALF, rings, state, rule, strip, True, how)
        for strip in range(gl.maximum(whole, begin + 1), ragged):
            state = _step(HALF, rings, state, rule, strip, False, how)
        for strip in range(gl.maximum(ragged, begin + 1), end):
            state = _step(HALF, rings, state, rule, strip, True, how)
        mbarrier.arrive(query_free.index(0), count=1)

        mixed, weights, top, total = state
        done += end - begin
        slot = (done - 1) % SLOTS
        mbarrier.wait(value_full.index(slot), (done - 1) // SLOTS & 1)
        mixed = warpgroup_mma(weights, value_ring.index(slot), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(value_free.index(slot), count=1)

        mixed = mixed / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, mixed_layout)), 1)
        place = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))
        dims = gl.arange(0, DIM, gl.SliceLayout(0, out_layout))
        out_row = row + place // HEADS
        head = head_tile * HEADS + place % HEADS
        offset = out_row.to(gl.int64) * out_token_stride + head * out_head_stride
        valid = gl.expand_dims(out_row < stop, 1) & gl.expand_dims(dims < HEAD_DIM, 0)
        at_out = out + gl.expand_dims(offset, 1) + gl.expand_dims(dims, 0)
        gl.store(at_out, gl.convert_layout(mixed.to(dtype), out_layout), mask=valid)


@gluon.jit
def _start_scores(HALF: gl.constexpr, q, key_ring, key_full, turns, number):
    # Starts a strip's q k^T when its keys are there and it is this half's turn.
    STRIP: gl.constexpr = key_ring.shape[1]
    # Half 0 begins: the phase before the first counts as over.
    mbarrier.wait(turns.index(HALF), (number & 1) ^ (1 - HALF))
    slot = number % SLOTS
    mbarrier.wait(key_full.index(slot), number // SLOTS & 1)
    zeros = gl.zeros(
        [ROWS, STRIP], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STRIP, 16])
    )
    return warpgroup_mma(
        q, key_ring.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def _step(HALF: gl.constexpr, rings, state, rule, strip, MASKED: gl.constexpr, how):
    # Scores and softmax of a strip, beside the weighted sum of the strip before.
    KV_HEADS, GROUP, HEAD_DIM, WINDOW, SOFTCAP = how
    q, key_ring, value_ring, full, free, turns, first_number = rings
    mixed, weights, top, total = state
    STRIP: gl.constexpr = key_ring.shape[1]
    number = first_number + strip
    before = (number - 1) % SLOTS
    scores = _start_scores(HALF, q, key_ring, full[1], turns, number)
    mbarrier.wait(full[2].index(before), (number - 1) // SLOTS & 1)
    mixed = warpgroup_mma(weights, value_ring.index(before), mixed, is_async=True)
    mbarrier.arrive(turns.index(1 - HALF), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(free[1].index(number % SLOTS), count=1)
    next_weights, top, total, shrink = _softmax(
        scores, top, total, rule, strip * STRIP, MASKED, WINDOW, SOFTCAP
    )
    total = _hold(total)
    mixed, weights = warpgroup_mma_wait(0, deps=[mixed, weights])
    mbarrier.arrive(free[2].index(before), count=1)
    mixed = mixed * gl.expand_dims(
        gl.convert_layout(shrink, gl.SliceLayout(1, mixed.type.layout)), 1
    )
    return mixed, gl.convert_layout(next_weights.to(weights.dtype), weights.type.layout), top, total


@gluon.jit
def _softmax(
    scores,
    top,
    total,
    rule,
    first_key,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    # A strip's weights relative to the new maximum; both sums; the factor for all before.
    position, to_exponent, cap = rule
    if SOFTCAP:
        scores = cap - 2 * cap / (gl.exp2(scores * to_exponent) + 1)  # cap * tanh
        to_exponent = 1.0
    if MASKED:
        key = gl.expand_dims(
            first_key + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout)), 0
        )
        newest = gl.expand_dims(position, 1)
        seen = key <= newest
        if WINDOW > 0:
            seen = seen & (key > newest - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * to_exponent)
    # Multiply-adds: masked and whole strips must round alike.
    weights = gl.exp2(gl.fma(scores, to_exponent, gl.expand_dims(-higher, 1)))
    shrink = gl.exp2(top - higher)
    return weights, higher, gl.fma(total, shrink, gl.sum(weights, 1)), shrink


@gluon.jit
def _hold(total):
    # ptxas would wait for the value product before the softmax. A store that depends on `total` and
    # never happens keeps it.
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; .reg .b32 nowhere; setp.lt.f32 never, $1, 0f00000000; mov.b32 "
        "nowhere, 0;"
        " @never st.volatile.shared.f32 [nowhere], $1; mov.b32 $0, $1; }",
        "=f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
