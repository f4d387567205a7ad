"""The few shapes of steps with prompts that have CUDA graphs, and padding to them. Pure numpy.

Padding is decodes without a context, and a prompt in the null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrelay.paged_engine.blocks import NULL_BLOCK
from kvrelay.paged_engine.step_values import PADDING_ROW, PADDING_SEQUENCE, StepValues

__all__ = ["MOST_PROMPTS", "StepShape", "padded", "smallest_shape", "step_shapes"]

# Rows that pad a step cost as much as any. On an H200 a prompt of 1,032 tokens takes 24 ms without
# padding, 26 with 120 rows of it, 34 with 504.
_PROMPT_ROWS = (32, *range(64, 512, 64), *range(512, 2049, 128))
_DECODES = (0, 8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
_PADDING_PROMPTS = 2


def _prompts_of(rows: int) -> int:
    return max(16, rows // 256 * 8)


MOST_PROMPTS = _prompts_of(_PROMPT_ROWS[-1])


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """A step of `decodes` one-row sequences, then prompts with `prompt_rows` rows in all."""

    prompt_rows: int
    decodes: int
    samples: int

    @property
    def prompts(self) -> int:
        """Return room for the step's prompts, the padding's, and one without rows."""
        return _prompts_of(self.prompt_rows)


def step_shapes(*, max_num_seqs: int, max_prompt_rows: int) -> list[StepShape]:
    if max_prompt_rows < 2:
        return []
    decodes = [*(n for n in _DECODES if n < max_num_seqs), max_num_seqs]
    most_rows = min(max_prompt_rows, _PROMPT_ROWS[-1])
    prompt_rows = [*(n for n in _PROMPT_ROWS if n < most_rows), most_rows]
    shapes = [
        StepShape(rows, n, min(n + _prompts_of(rows), max_num_seqs))
        for rows in prompt_rows
        for n in decodes
    ]
    # A long prompt's first parts fill a step each, and sample nothing.
    return sorted([*shapes, StepShape(most_rows, 0, 0)])


def smallest_shape(values: StepValues, shapes: Sequence[StepShape]) -> StepShape | None:
    """Return the smallest of the sorted `shapes` that fits; None if rows are scored."""
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
            if shape.prompt_rows >= rows - decodes
            and shape.prompts - _PADDING_PROMPTS >= prompts
            and shape.decodes >= decodes
            and shape.samples >= len(values.sampled_rows)
        ),
        None,
    )


def padded(values: StepValues, shape: StepShape, *, null_slot: int, block_size: int) -> StepValues:
    decodes, prompts = values.decodes, len(values.counts) - values.decodes
    spare = shape.prompt_rows - (values.rows.shape[1] - decodes)
    rows = np.repeat(PADDING_ROW[:, None], shape.decodes + shape.prompt_rows, axis=1)
    end = shape.decodes + shape.prompt_rows - spare
    rows[:, :decodes] = values.rows[:, :decodes]
    rows[:, shape.decodes : end] = values.rows[:, decodes:]
    rows[2, end:] = np.arange(spare)
    rows[4, end:] = rows[2, end:] % block_size
    sequences = np.repeat(PADDING_SEQUENCE[:, None], shape.decodes + shape.prompts, axis=1)
    counts = np.concatenate((np.ones(shape.decodes, np.int32), np.zeros(shape.prompts, np.int32)))
    behind = shape.decodes + prompts
    for whole, part in ((sequences, values.sequences), (counts, values.counts)):
        whole[..., :decodes] = part[..., :decodes]
        whole[..., shape.decodes : behind] = part[..., decodes:]
    if spare:
        sequences[:, behind], counts[behind] = (null_slot, spare, NULL_BLOCK), spare
    moved = np.where(values.sampled_rows < decodes, 0, shape.decodes - decodes).astype(np.int32)
    return replace(
        values,
        rows=rows,
        sequences=sequences,
        counts=counts,
        sampled_rows=values.sampled_rows + moved,
    )
