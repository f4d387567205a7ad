"""The plan that cuts the keys of a batch of decodes into equal shares, one for each program.

The work is a line of units of 64 keys: sequence after sequence, in each KV head after KV head, for
all layers of one window.

Grid: (programs / 16). Source: Osama et al., "Stream-K", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvrelay.kernels.launch import processors

__all__ = ["UNIT", "DecodeWorkspace", "Tiling", "decode_programs", "first_key", "plan_decode"]

UNIT = tl.constexpr(64)
PLAN_ROWS = tl.constexpr(16)

# Shares for each program that runs at a time: a slow SM then takes fewer.
MAX_WAVES = 2
# Each share fills its pipeline anew.
WAVE_UNITS = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class Tiling:
    # per tile
    keys: int
    warps: int
    # tiles in shared memory, plus one
    stages: int
    # per thread, at most
    registers: int


class DecodeWorkspace:
    """A plan and its scratch memory, at addresses that stay valid in CUDA graphs.

    Layers with another window need their own. Not to be shared by two streams.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        element_bytes: int = 2,
    ) -> None:
        self.max_batch, self.num_kv_heads = max_batch, num_kv_heads
        self.device = torch.device(device)
        self.tiling, self.resident = _launch_shape(head_dim, element_bytes, self.device)
        self.planned: tuple[int, int] | None = None
        programs, group = MAX_WAVES * self.resident, num_heads // num_kv_heads
        self.line = self._zeros(2)  # units per share, units in all
        self.starts = self._zeros(
            programs, 4
        )  # of each share: sequence, its length, KV head, unit within the piece
        self.arrivals = self._zeros(programs)
        # Slot p: what began before program p's share. Slot programs + p: in it.
        self.part_mixed = torch.empty(2 * programs, group, head_dim, device=device)
        self.part_weight = torch.empty(
            2 * programs, group, device=device
        )  # log2 of the sum of exponentials

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def _launch_shape(head_dim: int, element_bytes: int, device: torch.device) -> tuple[Tiling, int]:
    # H200, 128 dimensions, batch 128 x 1k: four programs of two warps and 32 keys 4.25 TB/s, three
    # of four warps and 64 keys 3.76. fp8 is bound by its conversion, and best in two programs of
    # 128 keys.
    shared_bytes = 228 << 10
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared_bytes = properties.shared_memory_per_multiprocessor
    dims = triton.next_power_of_2(head_dim)
    other_bytes = 8 << 10
    if dims == 256:
        keys, warps, per_sm, tiles = 32, 4, 2, 4
    else:
        keys, warps, per_sm, tiles = (32, 2, 4, 3) if element_bytes == 2 else (128, 4, 2, 2)
    tile_bytes = 2 * keys * dims * element_bytes
    per_sm = max(1, min(per_sm, shared_bytes // (2 * tile_bytes + other_bytes)))
    tiles = min(tiles, (shared_bytes // per_sm - other_bytes) // tile_bytes)
    registers = min(255, 65536 // (per_sm * warps * 32) & ~7)
    return Tiling(keys, warps, stages=tiles + 1, registers=registers), per_sm * processors(
        device, 2
    )


def decode_programs(batch: int, workspace: DecodeWorkspace) -> int:
    """Return as many waves of programs as the batch's pieces fill."""
    waves = batch * workspace.num_kv_heads // workspace.resident
    return workspace.resident * max(1, min(waves, MAX_WAVES))


def plan_decode(
    context_lens: torch.Tensor, workspace: DecodeWorkspace, *, block_size: int, window: int = 0
) -> None:
    """Cut the keys of a batch into equal shares, for all layers with this window; no host sync.

    context_lens [B] int32: keys of each sequence, its newest token's included; 0 is a padding row.
    """
    (batch,) = context_lens.shape
    assert batch <= workspace.max_batch
    assert block_size in (16, 32, 64)
    programs = decode_programs(batch, workspace)
    _plan_kernel[(triton.cdiv(programs, PLAN_ROWS.value),)](
        context_lens,
        workspace.line,
        workspace.starts,
        batch,
        programs,
        workspace.resident,
        window,
        KV_HEADS=workspace.num_kv_heads,
        BATCH=triton.next_power_of_2(batch),
    )
    workspace.planned = (batch, window)


# Not specialized: one binary serves all batch sizes and windows.
@triton.jit(do_not_specialize=["batch", "programs", "resident", "window"])
def _plan_kernel(
    context_lens,  # [batch] int32
    line,  # [2] int32
    # [programs, 4] int32
    starts,
    batch,
    programs,
    resident,
    window,
    KV_HEADS: tl.constexpr,
    BATCH: tl.constexpr,
):
    sequence = tl.arange(0, BATCH)
    length = tl.load(context_lens + sequence, mask=sequence < batch, other=0)
    units = tl.cdiv(length, UNIT) - first_key(length, window) // UNIT  # [BATCH] of each KV head
    end = tl.cumsum(units * KV_HEADS, 0)  # where each sequence ends on the line
    total = tl.sum(units * KV_HEADS, 0)
    waves = tl.minimum(tl.maximum(total // (resident * WAVE_UNITS), 1), programs // resident)
    share = tl.maximum(tl.cdiv(total, waves * resident), 1)
    # Pieces that half of the programs would cut stay whole (batch 32 x 1k, H200: 36 us against 40).
    pieces, longest = tl.sum((units > 0).to(tl.int32), 0) * KV_HEADS, tl.max(units, 0)
    share = tl.where(
        (longest <= 2 * share) & (pieces * 17 >= resident * 8), tl.maximum(share, longest), share
    )
    program = tl.program_id(0) * PLAN_ROWS + tl.arange(0, PLAN_ROWS)
    begin = program * share
    passed = (
        end[None, :] <= begin[:, None]
    )  # [PLAN_ROWS, BATCH] the sequences before the one in which a share begins
    current = tl.sum(passed.to(tl.int32), 1)
    inside = begin - tl.sum(tl.where(passed, units[None, :] * KV_HEADS, 0), 1)
    here = current[:, None] == sequence[None, :]
    piece = tl.sum(tl.where(here, units[None, :], 0), 1)
    head = inside // tl.maximum(piece, 1)
    start = starts + program * 4
    real = begin < total
    tl.store(start, current, mask=real)
    tl.store(start + 1, tl.sum(tl.where(here, length[None, :], 0), 1), mask=real)
    tl.store(start + 2, head, mask=real)
    tl.store(start + 3, inside - head * piece, mask=real)
    if tl.program_id(0) == 0:
        tl.store(line, share)
        tl.store(line + 1, total)


@triton.jit
def first_key(length, window):
    """Return the oldest key that the newest token sees."""
    return tl.where(window > 0, tl.maximum(length - window, 0), 0)
