"""Sampling: logits bf16 [rows, 128256] -> tokens, as the GpuSampler launches it. The limit is to
read the logits once.

Few rows fit in the L2 cache, where the product that makes them leaves them: here as in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from triton.errors import TritonError

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels import sampling_floors
from kvrelay.kernels.fused_sampling import sample
from kvrelay.kernels.sampling_slots import SlotTables, note_of, record_of

__all__ = ["rows", "sweep"]

VOCAB = 128256
ROWS = (1, 32, 256)
WORKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-p 0.95, flat logits": {"temperature": 2.0, "top_p": 0.95},
    "all penalties": {"temperature": 0.8, "repetition": 1.1, "presence": 0.3, "frequency": 0.2},
}


def rows() -> Iterator[Row]:
    """The table of RESULTS.md."""
    for work in WORKS:
        for count in ROWS:
            yield _measure(work, count)


def sweep() -> Iterator[Row]:
    """Dependent launch; warps and tiles of the passes over all logits; what one pass of the search
    for top-p does.
    """
    for work in WORKS:
        for pdl in (False, True):
            yield from _try(work, 1, f"pdl {pdl}", pdl=pdl)
    for count in ROWS:
        for num_warps in (1, 2, 4):
            for tiles in (1, 2, 4, 8):
                config = f"num_warps {num_warps}, tiles per program {tiles}"
                yield from _try(
                    "temperature", count, config, num_warps=num_warps, tiles_per_program=tiles
                )
    for count in (1, 256):
        for tiles in (2, 4, 8):
            for pivots, passes in ((4, 4), (8, 3), (16, 2)):
                config = f"{tiles} tiles per split, {pivots} pivots, {passes} passes"
                with patch.multiple(
                    sampling_floors, _TILES_PER_SPLIT=tiles, _PIVOTS=pivots, _PASSES=passes
                ):
                    yield from _try("top-p 0.95, flat logits", count, config)


def _try(work: str, count: int, config: str, **options: Any) -> Iterator[Row]:
    try:
        yield _measure(work, count, config, **options)
    except (
        TritonError,
        torch.OutOfMemoryError,
    ) as why:  # that a configuration does not fit is a result too
        print(f"sampling, {work}, {count} rows, {config}: {why}")


def _measure(work: str, count: int, config: str = "", **options: Any) -> Row:
    device = torch.device("cuda")
    own = WORKS[work]
    adjusted = "repetition" in own
    tables = SlotTables.empty(count, VOCAB, device)
    records = b"".join(record_of(seed=row, choice=0, token_index=0, **own) for row in range(count))
    tables.parameters.copy_(torch.frombuffer(bytearray(records), dtype=torch.int32).view(count, -1))
    if adjusted:
        seen = torch.rand(count, VOCAB, device=device) < 0.01
        tables.notes.copy_(seen * note_of(count=3, in_prompt=1))
    slots = torch.arange(count, dtype=torch.int32, device=device)
    copies = max(4, min(32, (200 << 20) // (count * VOCAB * 2)))
    inputs = [(torch.randn(count, VOCAB, device=device) * 2.5).bfloat16() for _ in range(copies)]
    cut = "top_p" in own or "top_k" in own

    options |= {"cut": cut, "adjusted": adjusted}
    us = median_us([partial(sample, logits, slots, tables, **options) for logits in inputs])
    return Row(
        "sampling", f"{count} rows, {work}", us, bytes_moved=count * VOCAB * 2.0, config=config
    )
