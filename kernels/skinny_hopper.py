"""y = x W^T for 2 to 64 rows of x on Hopper, in Gluon: the ring kernel of `kernels/skinny_gemm.py`.

A program multiplies ROWS weight rows by x, over all columns or, where a weight is small, a part.
Its *loader* copies weights and x to shared memory by TMA, 64 columns at a time, into a ring of
slots, which it fills with weights before it waits for the kernel that writes x. Four warps multiply
(wgmma, the weight on the left). A step of 32 requests took 5.31 ms with rings of 200 KB per SM,
5.88 with half (H200, 8B shape).

Weight rows come in groups of 16, two halves of 8; for a gate these are gate's and up's rows, so
that one thread has both.

x [M, K], weight [N, K] or gated [2 N, K]; BM is M rounded up to 16, 32 or 64, SPACE is ROWS rounded
up to a power of two. Grid: (cdiv(rows of the weight, ROWS) * SPLIT,). Programs that share a tile
leave sums as `tile_kernel` does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["COLUMNS", "GROUP", "ring_descriptors", "ring_kernel"]

# of a slot: the 128 bytes that TMA and wgmma swizzle
COLUMNS = gl.constexpr(64)
GROUP = gl.constexpr(16)
LOADER_REGISTERS = gl.constexpr(40)
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def ring_descriptors(
    x: torch.Tensor, weight: torch.Tensor, *, block_m: int, rows: int, gated: bool
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return descriptors of x [M, K] and of the weight in groups [1, 2, 8, COLUMNS]."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    groups = rows // GROUP.value
    of_rows, columns = weight.shape
    half = of_rows // 2 * columns if gated else 8 * columns
    group = (8 if gated else 16) * columns
    box = [groups & -groups, 2, 8, COLUMNS.value]
    x_box = [block_m, COLUMNS.value]
    return (
        TensorDescriptor(x, list(x.shape), list(x.stride()), x_box, _layout(*x_box, dtype=dtype)),
        TensorDescriptor(
            weight,
            [of_rows // 16, 2, 8, columns],
            [group, half, columns, 1],
            box,
            _layout(*box, dtype=dtype),
        ),
    )


@functools.cache
def _layout(*box: int, dtype: Any) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), dtype)


@gluon.jit(do_not_specialize=["M"])
def ring_kernel(
    x,  # TMA descriptor of [M, K], boxes [BM, COLUMNS]
    weight,  # TMA descriptor of [groups, 2, 8, K]
    bias,
    residual,
    out,
    partials,
    arrivals,
    M,
    N,
    residual_stride,
    out_stride,
    STEPS: gl.constexpr,  # K / COLUMNS
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    SPACE: gl.constexpr,
    SLOTS: gl.constexpr,
    GATE: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    BM: gl.constexpr = x.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(x.dtype, [SLOTS, BM, COLUMNS], x.layout)
    weight_ring = gl.allocate_shared_memory(
        weight.dtype, [SLOTS, SPACE // GROUP, 2, 8, COLUMNS], weight.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)

    ring = (x_ring, weight_ring, full, free)
    after = (bias, residual, out, partials, arrivals, M, N, residual_stride, out_stride)
    gl.warp_specialize(
        [
            (_multiply, (ring, after, STEPS, SPLIT, ROWS, GATE, PDL)),
            (_loader, (x, weight, ring, STEPS, SPLIT, ROWS, PDL)),
        ],
        [1],
        [LOADER_REGISTERS],
    )


@gluon.jit
def _share(STEPS: gl.constexpr, SPLIT: gl.constexpr):
    EACH: gl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    tile = gl.program_id(0) // SPLIT
    first = gl.program_id(0) % SPLIT * EACH
    return tile, first, gl.minimum(STEPS - first, EACH)


@gluon.jit
def _loader(
    x, weight, ring, STEPS: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, PDL: gl.constexpr
):
    x_ring, weight_ring, full, free = ring
    SLOTS: gl.constexpr = x_ring.shape[0]
    tile, first, steps = _share(STEPS, SPLIT)
    for i in gl.static_range(SLOTS):
        if i < steps:
            _copy_weights(x, weight, tile, first + i, full.index(i), weight_ring.index(i), ROWS)
    if PDL:
        gdc_wait()
    for i in gl.static_range(SLOTS):
        if i < steps:
            tma.async_copy_global_to_shared(
                x, [0, (first + i) * COLUMNS], full.index(i), x_ring.index(i)
            )
    for step in range(SLOTS, steps):
        slot = step % SLOTS
        mbarrier.wait(free.index(slot), (step // SLOTS & 1) ^ 1)
        _copy_weights(
            x, weight, tile, first + step, full.index(slot), weight_ring.index(slot), ROWS
        )
        tma.async_copy_global_to_shared(
            x, [0, (first + step) * COLUMNS], full.index(slot), x_ring.index(slot)
        )


@gluon.jit
def _copy_weights(x, weight, tile, step, full, slot, ROWS: gl.constexpr):
    GROUPS: gl.constexpr = ROWS // GROUP
    BOX: gl.constexpr = weight.block_type.shape[0]
    mbarrier.expect(full, GROUPS // BOX * weight.block_type.nbytes + x.block_type.nbytes)
    for box in gl.static_range(GROUPS // BOX):
        place = slot.slice(box * BOX, BOX, 0)
        group = tile * GROUPS + box * BOX
        tma.async_copy_global_to_shared(weight, [group, 0, 0, step * COLUMNS], full, place)


@gluon.jit
def _multiply(
    ring,
    after,
    STEPS: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    GATE: gl.constexpr,
    PDL: gl.constexpr,
):
    x_ring, weight_ring, full, free = ring
    SLOTS: gl.constexpr = x_ring.shape[0]
    BM: gl.constexpr = x_ring.shape[1]
    SPACE: gl.constexpr = weight_ring.shape[1] * GROUP
    flat: gl.constexpr = gl.NVMMASharedLayout(x_ring.layout.swizzle_byte_width, 16, 2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    tile, first, steps = _share(STEPS, SPLIT)
    acc = gl.zeros([SPACE, BM], gl.float32, layout)
    for step in range(steps):
        slot = step % SLOTS
        mbarrier.wait(full.index(slot), step // SLOTS & 1)
        weights = weight_ring.index(slot)._reinterpret(x_ring.dtype, [SPACE, COLUMNS], flat)
        acc = warpgroup_mma(weights, x_ring.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index((step + SLOTS - 1) % SLOTS), count=1, pred=step > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if PDL:
        gdc_wait()

    bias, residual, out, partials, arrivals, M, N, residual_stride, out_stride = after
    row = gl.expand_dims(gl.arange(0, SPACE, gl.SliceLayout(1, layout)), 1)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, layout)), 0)
    if SPLIT == 1:
        _finish(acc, row, m, tile, after, ROWS, GATE)
    else:
        place = _place(row, m)
        gl.store(partials + gl.program_id(0) * SPACE * BM + place, acc)
        _barrier()  # all have stored
        arrived = gl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            total = gl.zeros([SPACE, BM], gl.float32, layout)
            for part in gl.static_range(SPLIT):
                theirs = partials + (tile * SPLIT + part) * SPACE * BM
                total += gl.load(theirs + place, cache_modifier=".cg")
            gl.store(arrivals + tile, 0)
            _finish(total, row, m, tile, after, ROWS, GATE)


@gluon.jit
def _place(row, m):
    # Pairs of each thread's registers, so that those of a warp lie together. A thread has rows r
    # and r + 8 of each 64, and of each 8 rows of x two neighbours.
    BM: gl.constexpr = m.shape[1]
    thread = row // 16 % 4 * 32 + row % 8 * 4 + m // 2 % 4
    pair = (row // 64 * 2 + row // 8 % 2) * (BM // 8) + m // 8
    return gl.max_contiguous(gl.multiple_of((pair * 128 + thread) * 2 + m % 2, [1, 2]), [1, 2])


@gluon.jit
def _finish(acc, row, m, tile, after, ROWS: gl.constexpr, GATE: gl.constexpr):
    bias, residual, out, partials, arrivals, M, N, residual_stride, out_stride = after
    OUTPUTS: gl.constexpr = ROWS if GATE is None else ROWS // 2
    n = tile * OUTPUTS + (row if GATE is None else row // 16 * 8 + row % 8)
    real = (row < ROWS) & (n < N)
    if bias is not None:
        beyond = 0 if GATE is None else gl.where(row % 16 < 8, 0, N)
        acc += gl.load(bias + beyond + n, mask=real, other=0.0).to(gl.float32)
    inside = real & (m < M)
    m = m.to(gl.int64)
    if residual is not None:
        acc += gl.load(residual + m * residual_stride + n, mask=inside, other=0.0).to(gl.float32)
    at = m * out_stride + n
    if GATE is not None:
        gate, up = _halves(acc)
        acc = _activate(gate, GATE) * up
        at = _halves(at)[0]
        inside = _halves(inside.to(gl.int32))[0] > 0
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _halves(t):
    # [SPACE, BM] -> first and second 8 of each 16 rows, [SPACE / 16, 8, BM]
    return gl.split(gl.permute(gl.reshape(t, [t.shape[0] // 16, 2, 8, t.shape[1]]), (0, 2, 3, 1)))


@gluon.jit
def _activate(gate, ACT: gl.constexpr):
    # 0.5 g (1 + tanh(u)) = g sigmoid(2 u), with u = sqrt(2 / pi) (g + 0.044715 g^3).
    z = gate
    if ACT == "gelu_tanh":
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + gl.exp(-z))
