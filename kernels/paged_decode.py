"""Attention of decodes over paged KV, Triton: one query token per sequence, bound by memory.

A program walks its share of the plan (`kernels/decode_plan.py`) as *pieces*: keys of one sequence
and KV head, for all query heads of the group (rows of `tl.dot`, padded to 16). A piece cut over
programs leaves *parts* in the workspace; the last to arrive joins them in ascending order and
resets the counter. Bits depend on the batch, whose lengths decide the cuts.

fp8 is read as pairs, because `ldmatrix` wants 16-bit elements: each becomes two fp16 numbers,
exactly, and each product two, over the even and the odd dimensions.

Grid: (programs), a multiple of the SMs. Twin: `kernels/paged_attention.py`. Sources: Dao et al.,
"Flash-Decoding", 2023; Milakov and Gimelshein 2018.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.kernels.decode_plan import UNIT, DecodeWorkspace, decode_programs, first_key
from kvrelay.kernels.launch import capability

__all__ = ["paged_decode"]

# Finite: a tile without a visible key gets a finite softmax, later times zero.
MASKED = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)
JOIN_ELEMENTS = tl.constexpr(4096)
# In batches up to this one the next kernel may start only when this one's keys are read.
# (Llama-3.1-8B step, batch 1: 4.2 ms with an early start, 4.0 without any.)
LATE_START_BATCH = 8


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return softmax(scale q k^T) v of each sequence's newest token, whose KV is in its blocks.

    query, out [B, heads, head_dim], bf16 or fp16, strided. Caches [num_blocks, kv_heads,
    block_size, head_dim], one layer's views of the pool; fp8 ones with fp32 scales [num_blocks,
    kv_heads, block_size]. block_tables [B, max_blocks], context_lens [B] int32 as given to
    `plan_decode` for this step and window; rows of length 0 get zeros. `window`: the last keys
    only, 0 all. `softcap` c: c tanh(scores / c), 0 none. pdl: the preceding kernel must not write
    plan, lengths or tables.
    """
    batch, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    assert workspace.planned == (batch, window)
    tiling = workspace.tiling
    if key_scales is not None:
        key_cache, value_cache = key_cache.view(torch.int16), value_cache.view(torch.int16)
    _decode_kernel[(decode_programs(batch, workspace),)](
        query,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        block_tables,
        context_lens,
        out,
        workspace.line,
        workspace.starts,
        workspace.arrivals,
        workspace.part_mixed,
        workspace.part_weight,
        batch,
        window,
        scale,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_scales.stride(0) if key_scales is not None else 0,
        key_scales.stride(1) if key_scales is not None else 0,
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_size,
        TILE=tiling.keys,
        STAGES=tiling.stages,
        SOFTCAP=softcap,
        FP8_INSTRUCTION=capability(query.device) >= (8, 9),
        PDL=pdl,
        LATE_START=batch <= LATE_START_BATCH,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@triton.jit(do_not_specialize=["batch", "window"])
def _decode_kernel(
    query,  # [batch, heads, head_dim]
    # [num_blocks, kv_heads, block_size, head_dim], or int16 pairs of fp8 [..., head_dim / 2]
    key_cache,
    value_cache,
    key_scales,  # [num_blocks, kv_heads, block_size] fp32, or None
    value_scales,
    block_tables,  # [batch, max_blocks]
    context_lens,  # [batch]
    out,  # [batch, heads, head_dim]
    line,
    starts,
    arrivals,  # [programs]; zeros between launches
    part_mixed,  # [2 * programs, GROUP, HEAD_DIM] fp32
    part_weight,  # [2 * programs, GROUP] fp32
    batch,
    window,
    scale,
    query_row_stride,
    query_head_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    out_row_stride,
    out_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8_INSTRUCTION: tl.constexpr,
    PDL: tl.constexpr,
    LATE_START: tl.constexpr,
):
    # Program p walks units [p * share, (p + 1) * share) of the line.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = tl.load(line)
    position = program * share
    end = tl.minimum(position + share, tl.load(line + 1))
    sequence = tl.load(starts + program * 4)
    length = tl.load(starts + program * 4 + 1)
    head = tl.load(starts + program * 4 + 2)
    unit = tl.load(starts + program * 4 + 3)
    if PDL:
        if position < end:
            first = (first_key(length, window) // UNIT + unit) * UNIT
            _prefetch(
                key_cache + head * head_stride,
                value_cache + head * head_stride,
                block_stride,
                block_tables + sequence * table_stride,
                first,
                length,
                BLOCK_TOKENS,
                BLOCK_TOKENS * (HEAD_DIM if key_scales is not None else 2 * HEAD_DIM),
            )
        tl.extra.cuda.gdc_wait()
        if not LATE_START:
            tl.extra.cuda.gdc_launch_dependents()
    while position < end:
        oldest = first_key(length, window)
        first_unit = oldest // UNIT
        units = tl.cdiv(length, UNIT) - first_unit
        taken = tl.minimum(units - unit, end - position)
        begin_key = (first_unit + unit) * UNIT
        end_key = tl.minimum(begin_key + taken * UNIT, length)
        piece = position - unit
        first_program = piece // share
        parts = (piece + units - 1) // share - first_program + 1
        arrival = arrivals + first_program
        first_slot = programs + first_program
        slot = tl.where(program == first_program, first_slot, program)
        position += taken
        unit = 0
        if begin_key < end_key:
            group_query = query + sequence * query_row_stride + head * GROUP * query_head_stride
            group_out = out + sequence * out_row_stride + head * GROUP * out_head_stride
            of_head = (key_cache + head * head_stride, value_cache + head * head_stride)
            scales = (key_scales, value_scales, head * scale_head_stride, scale_block_stride)
            mixed, weight = _attend(
                group_query,
                query_head_stride,
                of_head,
                block_stride,
                scales,
                block_tables + sequence * table_stride,
                oldest,
                begin_key,
                end_key,
                scale,
                GROUP,
                HEAD_DIM,
                BLOCK_TOKENS,
                TILE,
                STAGES,
                SOFTCAP,
                FP8_INSTRUCTION,
            )
            place = (part_mixed, part_weight, first_slot, first_program, parts)
            _finish(
                mixed, weight, group_out, out_head_stride, arrival, slot, place, GROUP, HEAD_DIM
            )
        head += 1
        if head == KV_HEADS:
            head = 0
            sequence += 1
            length = tl.load(context_lens + sequence, mask=position < end, other=0)
    if PDL and LATE_START:
        tl.extra.cuda.gdc_launch_dependents()
    # Programs without a share write the zeros of padding rows.
    for row in range(programs - 1 - program, batch, programs):
        if tl.load(context_lens + row) == 0:
            _store_zeros(out + row * out_row_stride, out_head_stride, KV_HEADS * GROUP, HEAD_DIM)


@triton.jit
def _prefetch(
    key_head,
    value_head,
    block_stride,
    table,
    first,
    length,
    BLOCK_TOKENS: tl.constexpr,
    BYTES: tl.constexpr,
):
    # A unit's keys and values, from key `first` on, into L2.
    for i in tl.static_range(UNIT // BLOCK_TOKENS):
        key = first + i * BLOCK_TOKENS
        block = tl.load(table + key // BLOCK_TOKENS, mask=key < length, other=0).to(tl.int64)
        _prefetch_block(key_head + block * block_stride, BYTES)
        _prefetch_block(value_head + block * block_stride, BYTES)


@triton.jit
def _prefetch_block(begin, BYTES: tl.constexpr):
    tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, "
        "0;"
        " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [begin.to(tl.int64), BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _attend(
    query,
    query_head_stride,
    of_head,  # keys and values [num_blocks, BLOCK_TOKENS, words] of one KV head
    block_stride,
    scales,
    table,
    oldest,
    begin_key,
    end_key,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8_INSTRUCTION: tl.constexpr,
):
    # The mean of values of keys [begin_key, end_key) by softmax weight, and log2 of its sum.
    key_head, value_head = of_head
    key_scales, value_scales, scale_offset, scale_block_stride = scales
    ROWS: tl.constexpr = (
        triton.next_power_of_2(GROUP) if GROUP > 16 else 16
    )  # the least that `tl.dot` takes
    DIMS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    PAIRS: tl.constexpr = key_scales is not None
    WORDS: tl.constexpr = DIMS // 2 if PAIRS else DIMS
    KEY_WORDS: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    queries = tl.load(
        query + row * query_head_stride + dim, mask=(row < GROUP) & (dim < HEAD_DIM), other=0.0
    )
    if PAIRS:
        even_queries, odd_queries = tl.split(tl.reshape(queries.to(tl.float16), [ROWS, WORDS, 2]))
    word = tl.arange(0, WORDS)[None, :]
    top = tl.full([ROWS], MASKED, tl.float32)
    total = tl.zeros([ROWS, TILE], tl.float32)
    mixed = tl.zeros([ROWS, WORDS], tl.float32)
    odd_mixed = tl.zeros([ROWS, WORDS], tl.float32)
    next_blocks = _blocks_of_tile(table, begin_key, end_key, BLOCK_TOKENS, TILE)
    for tile in tl.range(begin_key, end_key, TILE, num_stages=STAGES):
        key_index = tile + tl.arange(0, TILE)
        visible = (key_index >= oldest) & (key_index < end_key)
        token = key_index % BLOCK_TOKENS
        block = next_blocks.to(tl.int64)
        # One tile ahead: copies need not wait for block ids.
        next_blocks = _blocks_of_tile(table, tile + TILE, end_key, BLOCK_TOKENS, TILE)
        offsets = (block * block_stride + token * KEY_WORDS)[:, None] + word
        loaded = visible[:, None] & (word < KEY_WORDS)
        key = tl.load(key_head + offsets, mask=loaded, other=0)
        value = tl.load(value_head + offsets, mask=loaded, other=0)
        if PAIRS:
            scale_offsets = block * scale_block_stride + scale_offset + token
            even, odd = _halves(key, FP8_INSTRUCTION)
            scores = tl.dot(
                odd_queries, tl.trans(odd), tl.dot(even_queries, tl.trans(even))
            )  # [ROWS, TILE]
            scores *= tl.load(key_scales + scale_offsets, mask=visible, other=0.0)[None, :]
        else:
            scores = tl.dot(queries, tl.trans(key))
        if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = (
                SOFTCAP * LOG2_E * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / SOFTCAP * scale)) + 1))
            )
        else:
            scores *= scale * LOG2_E
        scores = tl.where(visible[None, :], scores, MASKED)
        new_top = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - new_top)[:, None]
        weights = tl.exp2(scores - new_top[:, None])
        total = total * fade + weights
        if PAIRS:
            weights *= (
                tl.load(value_scales + scale_offsets, mask=visible, other=0.0)[None, :] * FP8_MAX
            )
            weights = weights.to(tl.float16)
            even, odd = _halves(value, FP8_INSTRUCTION)
            mixed = tl.dot(weights, even, mixed * fade)
            odd_mixed = tl.dot(weights, odd, odd_mixed * fade)
        else:
            mixed = tl.dot(weights.to(value.dtype), value, mixed * fade)
        top = new_top
    denominator = tl.sum(total, 1)
    if PAIRS:
        mixed = tl.interleave(mixed, odd_mixed) / FP8_MAX
    return mixed / denominator[:, None], top + tl.log2(denominator)


@triton.jit
def _blocks_of_tile(table, tile, end_key, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    if TILE <= BLOCK_TOKENS:
        blocks = tl.load(table + tile // BLOCK_TOKENS, mask=tile < end_key, other=0)
    else:
        key_index = tile + tl.arange(0, TILE)
        blocks = tl.load(table + key_index // BLOCK_TOKENS, mask=key_index < end_key, other=0)
    return blocks


@triton.jit
def _halves(pairs, FP8_INSTRUCTION: tl.constexpr):
    # int16 pairs of fp8 (e4m3) -> the low and the high bytes as fp16, exactly
    if FP8_INSTRUCTION:
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 s; prmt.b32 t, $1, 0, 0x4420; mov.b32 {s, _}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, s; }",
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 s; prmt.b32 t, $1, 0, 0x4431; mov.b32 {s, _}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, s; }",
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:  # fp16's exponent has a bias greater by 8
        low = (((pairs << 8) & -0x8000) | ((pairs << 7) & 0x3F80)).to(
            tl.float16, bitcast=True
        ) * 256
        high = ((pairs & -0x8000) | ((pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256
    return low, high


@triton.jit
def _finish(
    mixed,
    weight,
    out,
    out_head_stride,
    arrival,
    slot,
    place,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    # Writes a whole piece; or leaves a part, and joins all if it is the last.
    part_mixed, part_weight, first_slot, next_slot, parts = place
    row = tl.arange(0, mixed.shape[0])
    dim = tl.arange(0, mixed.shape[1])[None, :]
    real = (row < GROUP)[:, None] & (dim < HEAD_DIM)
    if parts == 1:
        tl.store(
            out + row[:, None] * out_head_stride + dim, mixed.to(out.dtype.element_ty), mask=real
        )
    else:
        tl.store(
            part_mixed + slot * (GROUP * HEAD_DIM) + row[:, None] * HEAD_DIM + dim, mixed, mask=real
        )
        tl.store(part_weight + slot * GROUP + row, weight, mask=row < GROUP)
        # All threads have stored before one releases; it acquires before any loads.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            tl.store(arrival, 0)
            _join(out, out_head_stride, place, GROUP, HEAD_DIM)


@triton.jit
def _join(out, out_head_stride, place, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    # Part i > 0 has slot next_slot + i.
    part_mixed, part_weight, first_slot, next_slot, parts = place
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    DIMS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    JOIN_PARTS: tl.constexpr = JOIN_ELEMENTS // (ROWS * DIMS) if ROWS * DIMS < JOIN_ELEMENTS else 1
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)[None, :]
    real = (row < GROUP)[:, None] & (dim < HEAD_DIM)
    top = tl.full([ROWS], MASKED, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    joined = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(0, parts, JOIN_PARTS):
        part = first + tl.arange(0, JOIN_PARTS)
        slot = tl.where(part == 0, first_slot, next_slot + part)
        there = (part < parts)[:, None]
        # .cg: from L2, where the other programs' stores are
        weight_at = part_weight + slot[:, None] * GROUP + row[None, :]
        weight = tl.load(
            weight_at, mask=there & (row < GROUP)[None, :], other=MASKED, cache_modifier=".cg"
        )
        mixed_at = (
            part_mixed
            + slot[:, None, None] * (GROUP * HEAD_DIM)
            + (row[:, None] * HEAD_DIM + dim)[None]
        )
        mixed = tl.load(
            mixed_at, mask=there[:, :, None] & real[None], other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(weight, 0))
        fade = tl.exp2(top - new_top)
        share = tl.exp2(weight - new_top[None, :])
        total = total * fade + tl.sum(share, 0)
        joined = joined * fade[:, None] + tl.sum(share[:, :, None] * mixed, 0)
        top = new_top
    joined /= total[:, None]
    tl.store(out + row[:, None] * out_head_stride + dim, joined.to(out.dtype.element_ty), mask=real)


@triton.jit
def _store_zeros(out, out_head_stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    zeros = tl.zeros([head.shape[0], dim.shape[1]], out.dtype.element_ty)
    tl.store(out + head * out_head_stride + dim, zeros, mask=(head < HEADS) & (dim < HEAD_DIM))
