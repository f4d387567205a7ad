"""Mixture of experts in Triton: routing, two grouped products, the sum over a token's experts.

T tokens of H features, E experts of I. A place is (token, choice), token * top_k + choice. Places
are sorted by expert, each expert's cut into tiles of `rows`. Grids are for the worst case, and
programs without a tile end at once.

Grids: route (chunks of tokens); arrange (chunks; with one chunk route does it); gate-up with
activation and down (tiles x column blocks); sum (tokens x column blocks). No atomics, sums in one
order. Twin: `kernels/decoder_layer.py`. Source: Gale et al., "MegaBlocks", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.fused_elementwise import activate
from kvrelay.kernels.launch import cdiv, dependent, pdl_works, power_of_2, wait_for_previous

__all__ = ["Tiling", "moe"]

ROUTE_ELEMENTS = 8192
MAX_CHUNK = 128
TILE_BLOCK = tl.constexpr(32)
# Tiles side by side, so that they share an expert's weights in L2.
TILE_GROUP = tl.constexpr(8)
SUM_COLUMNS = tl.constexpr(1024)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile shape of a grouped product: output columns (of gate and up each), depth along k."""

    columns: int
    depth: int
    warps: int
    stages: int
    # by TMA: compute capability 9.0 on, rows of whole 16 bytes
    tma: bool = False


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool,
    act: str = "silu",
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    tilings: tuple[int, Tiling, Tiling] | None = None,
) -> torch.Tensor:
    """Return the sum over experts e of weight_e * down_e(act(gate_e(x)) * up_e(x)), [T, H].

    x [T, H] bf16 | fp16 (rows may be strided), router_logits [T, E], gate_up [E, 2 * I, H] (gate's
    rows first), down [E, H, I]. Experts are the top_k logits, weighted by softmax over all, which
    `renormalize` divides by the chosen ones' sum. act: "silu" or "gelu_tanh". residual [T, H] is
    added; `out` may be the residual. batch_invariant: one tile shape for all T.
    """
    tokens, hidden = x.shape
    experts, _, inner = down.shape
    if out is None:
        out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    if tilings is None:
        tilings = INVARIANT if batch_invariant else _tilings(tokens * top_k, experts, x.device)
    rows, first, second = tilings
    weights, sorted_places = _sort_by_expert(
        router_logits, top_k, renormalize, rows, batch_invariant
    )
    gated = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    results = torch.empty(tokens * top_k, hidden, dtype=x.dtype, device=x.device)
    _product(x, gate_up, gated, sorted_places, rows, first, places_per_row=top_k, act=act)
    _product(gated, down, results, sorted_places, rows, second, places_per_row=1, act=None)
    _sum[(tokens, cdiv(hidden, SUM_COLUMNS.value))](
        results,
        weights,
        residual,
        out,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        H=hidden,
        TOP_K=top_k,
        num_warps=2,
        **dependent(x.device),
    )
    return out


INVARIANT = 64, Tiling(64, 64, 4, 4), Tiling(128, 64, 4, 4)

# places [tiles * rows]; expert and number of places of each tile [tiles]; int32
SortedPlaces = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _sort_by_expert(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    rows: int,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, SortedPlaces]:
    tokens, experts = router_logits.shape
    places = tokens * top_k
    # Each expert has at most one tile that is not full.
    tiles = (places + min(experts, places) * (rows - 1)) // rows
    experts_pad, choices_pad = power_of_2(experts), power_of_2(top_k)
    # The chunk decides in which order a row's sums are added.
    chunk = max(1, min(ROUTE_ELEMENTS // experts_pad, MAX_CHUNK))
    if not batch_invariant:
        chunk = min(power_of_2(tokens), chunk)
    chunks = cdiv(tokens, chunk)
    warps = max(1, min(chunk * experts_pad // 1024, 8))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=router_logits.device)

    weights = torch.empty(places, dtype=torch.float32, device=router_logits.device)
    sorted_places = ints(tiles * rows), ints(tiles), ints(tiles)
    # expert of each place, its number among the chunk's of that expert; each chunk's number of each
    chosen, ranks, counts = ints(places), ints(places), ints(chunks, experts)
    sizes = {
        "E": experts,
        "E_PAD": experts_pad,
        "TOP_K": top_k,
        "K_PAD": choices_pad,
        "CHUNK": chunk,
        "ROWS": rows,
    }
    _route[(chunks,)](
        router_logits,
        weights,
        chosen,
        ranks,
        counts,
        *sorted_places,
        tokens,
        router_logits.stride(0),
        tiles,
        **sizes,
        RENORMALIZE=renormalize,
        ONE_CHUNK=chunks == 1,
        num_warps=warps,
        **dependent(router_logits.device),
    )
    if chunks > 1:
        _arrange[(chunks,)](
            chosen,
            ranks,
            counts,
            *sorted_places,
            places,
            tiles,
            **sizes,
            num_warps=4,
            **dependent(router_logits.device),
        )
    return weights, sorted_places


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    sorted_places: SortedPlaces,
    rows: int,
    tiling: Tiling,
    *,
    places_per_row: int,
    act: str | None,
) -> None:
    # Row p of out = row p // places_per_row of x through p's expert.
    depth, columns, tiles = x.shape[1], out.shape[1], sorted_places[1].shape[0]
    block_k = min(tiling.depth, power_of_2(depth))
    source: torch.Tensor | TensorDescriptor = weight
    tma = tiling.tma and depth * weight.itemsize % 16 == 0
    if tma:
        source = TensorDescriptor.from_tensor(weight.flatten(0, 1), [tiling.columns, block_k])
    _grouped_product[(tiles * cdiv(columns, tiling.columns),)](
        x,
        source,
        out,
        *sorted_places,
        x.stride(0),
        tiles,
        K=depth,
        N=columns,
        PLACES_PER_ROW=places_per_row,
        ACT=act,
        ROWS=rows,
        COLUMNS=tiling.columns,
        DEPTH=block_k,
        TMA=tma,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **dependent(x.device),
    )


def _tilings(places: int, experts: int, device: torch.device) -> tuple[int, Tiling, Tiling]:
    hopper, per_expert = pdl_works(device), places / experts
    if per_expert <= 8:
        return 16, Tiling(32, 128, 4, 4), Tiling(64, 128, 4, 4)
    if per_expert <= 24:
        return 32, Tiling(32, 128, 4, 4), Tiling(64, 128, 4, 4)
    if per_expert <= 48:
        return 64, Tiling(64, 64, 4, 4, hopper), Tiling(128, 64, 4, 4, hopper)
    if hopper:
        return 128, Tiling(128, 64, 8, 4, tma=True), Tiling(256, 64, 8, 4, tma=True)
    return 128, Tiling(64, 64, 8, 3), Tiling(128, 64, 8, 3)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _route(
    logits,
    weights,
    chosen,
    ranks,
    counts,
    tile_places,
    tile_experts,
    tile_counts,
    tokens,
    logits_stride,
    tiles,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    line = tl.arange(0, CHUNK)
    token = tl.program_id(0) * CHUNK + line
    expert, choice = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    live = token < tokens
    wait_for_previous(PDL)
    where = logits + token.to(tl.int64)[:, None] * logits_stride + expert[None, :]
    score = tl.load(where, mask=live[:, None] & (expert < E)[None, :], other=float("-inf")).to(
        tl.float32
    )
    top = tl.max(score, axis=1)
    denominator = tl.sum(tl.exp(score - top[:, None]), axis=1)

    count = tl.zeros((E_PAD,), tl.int32)
    best_of = tl.zeros((CHUNK, K_PAD), tl.int32)
    rank_of = tl.zeros((CHUNK, K_PAD), tl.int32)
    share_of = tl.zeros((CHUNK, K_PAD), tl.float32)
    for j in range(TOP_K):
        best = tl.minimum(tl.argmax(score, axis=1), E - 1)  # within bounds for NaN
        share = tl.exp(tl.max(score, axis=1) - top)
        is_best = expert[None, :] == best[:, None]
        score = tl.where(is_best, float("-inf"), score)
        earlier = (best[None, :] == best[:, None]) & (line[None, :] < line[:, None])
        rank = tl.gather(count, best, 0) + tl.sum(earlier.to(tl.int32), axis=1)
        count += tl.sum((is_best & live[:, None]).to(tl.int32), axis=0)
        is_j = choice[None, :] == j
        best_of = tl.where(is_j, best[:, None], best_of)
        rank_of = tl.where(is_j, rank[:, None], rank_of)
        share_of = tl.where(is_j, share[:, None], share_of)
    if RENORMALIZE:
        denominator = tl.sum(share_of, axis=1)

    place = token[:, None] * TOP_K + choice[None, :]
    is_place = live[:, None] & (choice < TOP_K)[None, :]
    tl.store(weights + place, share_of / denominator[:, None], mask=is_place)
    if ONE_CHUNK:
        start = _starts(count, ROWS)
        for j in range(TOP_K):
            is_j = choice[None, :] == j
            best = tl.sum(tl.where(is_j, best_of, 0), axis=1)
            rank = tl.sum(tl.where(is_j, rank_of, 0), axis=1)
            tl.store(tile_places + tl.gather(start, best, 0) + rank, token * TOP_K + j, mask=live)
        _describe_tiles(count, start, 0, tiles, tile_experts, tile_counts, E_PAD, ROWS)
    else:
        tl.store(chosen + place, best_of, mask=is_place)
        tl.store(ranks + place, rank_of, mask=is_place)
        tl.store(counts + tl.program_id(0) * E + expert, count, mask=expert < E)


@triton.jit(do_not_specialize=["places", "tiles"])
def _arrange(
    chosen,
    ranks,
    counts,
    tile_places,
    tile_experts,
    tile_counts,
    places,
    tiles,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, E_PAD)
    wait_for_previous(PDL)
    total = tl.zeros((E_PAD,), tl.int32)
    before = tl.zeros((E_PAD,), tl.int32)
    for first in range(0, chunks, 16):
        other = first + tl.arange(0, 16)
        mask = (other < chunks)[:, None] & (expert < E)[None, :]
        count = tl.load(counts + other[:, None] * E + expert[None, :], mask=mask, other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < chunk)[:, None], count, 0), axis=0)
    start = _starts(total, ROWS)

    line = tl.arange(0, CHUNK * K_PAD)
    place = chunk * CHUNK * TOP_K + line
    is_place = (line < CHUNK * TOP_K) & (place < places)
    best = tl.load(chosen + place, mask=is_place, other=0)
    at = tl.gather(start + before, best, 0) + tl.load(ranks + place, mask=is_place, other=0)
    tl.store(tile_places + at, place, mask=is_place)
    share = tl.cdiv(tiles, chunks)
    last = tl.minimum((chunk + 1) * share, tiles)
    _describe_tiles(total, start, chunk * share, last, tile_experts, tile_counts, E_PAD, ROWS)


@triton.jit
def _starts(count, ROWS: tl.constexpr):
    # First of each expert's places.
    padded = tl.cdiv(count, ROWS) * ROWS
    return tl.cumsum(padded, axis=0) - padded


@triton.jit
def _describe_tiles(
    count,
    start,
    first,
    last,
    tile_experts,
    tile_counts,
    E_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    expert = tl.arange(0, E_PAD)
    for block in range(first, last, TILE_BLOCK):
        tile = block + tl.arange(0, TILE_BLOCK)
        left = count[None, :] - (tile[:, None] * ROWS - start[None, :])
        is_its = (tile[:, None] * ROWS >= start[None, :]) & (left > 0)
        tl.store(
            tile_experts + tile,
            tl.sum(tl.where(is_its, expert[None, :], 0), axis=1),
            mask=tile < last,
        )
        tile_count = tl.sum(tl.where(is_its, tl.minimum(left, ROWS), 0), axis=1)
        tl.store(tile_counts + tile, tile_count, mask=tile < last)


@triton.jit(do_not_specialize=["tiles"])
def _grouped_product(
    x,
    weight,  # [E * N, K], with a gate [E * 2 * N, K]; a tensor descriptor with TMA
    out,  # [P, N]
    tile_places,
    tile_experts,
    tile_counts,
    x_stride,
    tiles,
    K: tl.constexpr,
    N: tl.constexpr,
    PLACES_PER_ROW: tl.constexpr,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    blocks: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // (TILE_GROUP * blocks)
    in_group = tl.program_id(0) % (TILE_GROUP * blocks)
    group_size = tl.minimum(tiles - group * TILE_GROUP, TILE_GROUP)
    tile = group * TILE_GROUP + in_group % group_size
    column = in_group // group_size * COLUMNS
    wait_for_previous(PDL)
    count = tl.load(tile_counts + tile)
    if count == 0:
        return
    sections: tl.constexpr = 2 if ACT is not None else 1
    first_row = tl.load(tile_experts + tile) * (sections * N) + column
    line = tl.arange(0, ROWS)
    # Lines without a place repeat the first, and are not stored.
    place = tl.load(tile_places + tile * ROWS + tl.where(line < count, line, 0)).to(tl.int64)
    k = tl.arange(0, DEPTH)
    x_at = x + (place // PLACES_PER_ROW)[:, None] * x_stride + k[None, :]
    n = tl.arange(0, COLUMNS)
    # Columns beyond the last are not stored.
    weight_row = (first_row + tl.minimum(n, N - 1 - column)).to(tl.int64)

    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            x_tile = tl.load(x_at + start)
        else:
            x_tile = tl.load(x_at + start, mask=(start + k < K)[None, :], other=0.0)
        weights = _weights(weight, first_row, weight_row, start, K, DEPTH, TMA)
        if ACT is not None:
            gate = tl.dot(x_tile, weights, gate)
            weights = _weights(weight, first_row + N, weight_row + N, start, K, DEPTH, TMA)
        total = tl.dot(x_tile, weights, total)
    if ACT is not None:
        total = activate(gate, ACT) * total
    mask = (line < count)[:, None] & (column + n < N)[None, :]
    tl.store(
        out + place[:, None] * N + (column + n)[None, :], total.to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def _weights(
    weight,
    first_row,
    row,
    start,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
):
    # a tile [DEPTH, COLUMNS] of the transposed weights
    if TMA:
        tile = weight.load([first_row, start]).T
    else:
        k = start + tl.arange(0, DEPTH)
        where = weight + row[None, :] * K + k[:, None]
        tile = (
            tl.load(where) if K % DEPTH == 0 else tl.load(where, mask=(k < K)[:, None], other=0.0)
        )
    return tile


@triton.jit
def _sum(
    results,  # [P, H]
    weights,  # [P]
    residual,
    out,
    residual_stride,
    out_stride,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SUM_COLUMNS + tl.arange(0, SUM_COLUMNS)
    inside = column < H
    wait_for_previous(PDL)
    total = tl.zeros((SUM_COLUMNS,), tl.float32)
    for j in tl.static_range(TOP_K):
        place = token * TOP_K + j
        result = tl.load(results + place * H + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + place) * result
    if residual is not None:
        total += tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=inside)
