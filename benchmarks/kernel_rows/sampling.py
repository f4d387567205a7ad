"""Sampling: logits bf16 [rows, 128256] -> tokens, as the GpuSampler launches it. The limit is to
read the logits once.

Few rows fit in the L2 cache, where the product that makes them leaves them: here as in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import Row, median_us
from kvrelay.kernels.fused_sampling import sample
from kvrelay.kernels.sampling_slots import SlotTables, note_of, record_of

__all__ = ["rows"]

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
    for work in WORKS:
        for count in ROWS:
            yield _measure(work, count)


def _measure(work: str, count: int) -> Row:
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

    calls = [
        partial(sample, logits, slots, tables, cut=cut, adjusted=adjusted) for logits in inputs
    ]
    return Row("sampling", f"{count} rows, {work}", median_us(calls), count * VOCAB * 2.0)
