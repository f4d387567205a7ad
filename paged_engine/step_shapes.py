"""The few shapes of steps with prompts that have CUDA graphs, and padding to them. Pure numpy.

Rows that pad a step are a prompt in the null block. They cost as much as others, so shapes count rows,
and have room for any number of decodes among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrelay.paged_engine.blocks import NULL_BLOCK
from kvrelay.paged_engine.step_values import PADDING_ROW, PADDING_SEQUENCE, StepValues

__all__ = [
    "MOST_PROMPTS",
    "StepShape",
    "padded",
    "smallest_shape",
    "step_shapes",
]

# cuBLAS takes longer for 448 rows than for 512, for 832 than for 1,024 and for 1,600 than for 1,792
# (bf16, H100; on an H200 a step of 448 takes 16 ms, one of 512 takes 12).
_ROWS = (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 1792, 2048, 2304)
_PADDING_PROMPTS = 2


def _prompts_of(rows: int) -> int:
    return max(16, rows // 256 * 8)


MOST_PROMPTS = _prompts_of(_ROWS[-1])


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of `rows`: up to `decodes` one-row sequences, then prompts, then padding."""

    rows: int
    decodes: int
    samples: int

    @property
    def prompts(self) -> int:
        """Return room for the step's prompts, the padding's, and one without rows."""
        return _prompts_of(self.rows)


def step_shapes(*, max_num_seqs: int, max_prompt_rows: int) -> list[StepShape]:
    """Return shapes of prompts alone and of prompts beside decodes, by rows."""
    if max_prompt_rows < 2:
        return []
    most = min(max_prompt_rows + max_num_seqs, _ROWS[-1])
    return [
        shape
        for rows in [*(n for n in _ROWS if n < most), most]
        for shape in (
            StepShape(rows, 0, min(_prompts_of(rows), max_num_seqs)),
            StepShape(rows, min(rows, max_num_seqs), min(rows, max_num_seqs)),
        )
    ]


def smallest_shape(values: StepValues, shapes: Sequence[StepShape]) -> StepShape | None:
    """Return the first of the sorted `shapes` that fits; None if rows are scored."""
    if len(values.scored_rows):
        return None
    decodes, rows = values.decodes, values.rows.shape[1]
    prompts = len(values.counts) - decodes
    if not prompts:
        return None
    return next(
        (
            shape
            for shape in shapes
            if shape.rows >= rows
            and shape.prompts - _PADDING_PROMPTS >= prompts
            and shape.decodes >= decodes
            and shape.samples >= len(values.sampled_rows)
        ),
        None,
    )


def padded(values: StepValues, shape: StepShape, *, null_slot: int, block_size: int) -> StepValues:
    used, here = values.rows.shape[1], len(values.counts)
    spare = shape.rows - used
    rows = np.repeat(PADDING_ROW[:, None], shape.rows, axis=1)
    rows[:, :used] = values.rows
    rows[4, used:] = np.arange(spare) % block_size
    sequences = np.repeat(PADDING_SEQUENCE[:, None], shape.decodes + shape.prompts, axis=1)
    counts = np.zeros(sequences.shape[1], np.int32)
    sequences[:, :here], counts[:here] = values.sequences, values.counts
    if spare:
        sequences[:, here], counts[here] = (null_slot, spare, NULL_BLOCK), spare
    return replace(values, rows=rows, sequences=sequences, counts=counts)
