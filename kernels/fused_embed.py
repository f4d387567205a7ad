"""Token ids -> embedding rows, taking ids that the previous step has just sampled from device
memory. Triton.

Grid: one program per token and tile of BLOCK columns. Torch twin: `kernels/norm_rope_act.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvrelay.kernels.fused_norm import pdl_works
from kvrelay.kernels.launch_sizes import cdiv, power_of_2

__all__ = ["embed"]

Tile = tuple[int, int]
"""(columns per program, warps)."""


def embed(
    token_ids: torch.Tensor,
    sampled: torch.Tensor,
    source: torch.Tensor,
    table: torch.Tensor,
    *,
    scale: float = 1.0,
    pdl: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Row t is the embedding of token sampled[source[t]] where source[t] >= 0, else of token_ids[t]
    -> [T, H].

    token_ids and source int32 | int64 [T], sampled int64 [max_slots]. table [V, H], rows may be
    strided; V is more than any of the ids that are looked up, because nothing here checks them.
    scale: Gemma's; rounded to the table's dtype before the product, which is rounded again. tile:
    None takes the tuned one.
    """
    tokens, hidden = token_ids.shape[0], table.shape[1]
    if source.shape != (tokens,):
        raise ValueError(f"{tokens} tokens: source {tuple(source.shape)} does not fit")
    if table.stride(1) != 1:
        raise ValueError("the elements of a row must be contiguous")
    out = torch.empty(tokens, hidden, dtype=table.dtype, device=table.device)
    if tokens:
        block, warps = tile or _tile(tokens, hidden)
        pdl = pdl and pdl_works(table.device)
        _embed[(tokens * cdiv(hidden, block),)](
            token_ids, sampled, source, table, out,
            torch.tensor(scale, dtype=table.dtype).item(), table.stride(0),
            H=hidden, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return out


def _tile(tokens: int, hidden: int) -> Tile:
    block = min(power_of_2(hidden), 1024 if tokens <= 512 else 4096)
    return block, max(block // 512, 1)


@triton.jit(do_not_specialize_on_alignment=["token_ids", "sampled", "source"])  # type: ignore[untyped-decorator]
def _embed(  # type: ignore[no-untyped-def]
    token_ids,
    sampled,
    source,
    table,
    out,
    scale,
    table_stride,
    H: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    tiles: tl.constexpr = tl.cdiv(H, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(source + row)
    token = tl.load(token_ids + row)
    token = tl.where(slot >= 0, tl.load(sampled + slot, mask=slot >= 0, other=0), token)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    value = (
        tl.load(table + token * table_stride + column, mask=inside, other=0.0).to(tl.float32)
        * scale
    )
    tl.store(out + row * H + column, value.to(out.dtype.element_ty), mask=inside)
