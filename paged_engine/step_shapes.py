"""The few shapes of steps with prompts that have CUDA graphs, and padding to them. Pure numpy.

Padding is decodes without a context, and a prompt in the null block.
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
    "prompt_rows_of",
    "smallest_shape",
    "step_shapes",
]

# A step's rows, those of decodes among them. cuBLAS takes longer for 448 than for 512, for 832 than
# for 1,024 and for 1,600 than for 1,792 (bf16, H100; on an H200 a step with 448 has 16 ms, not 12).
_ROWS = (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 1792, 2048)
_MOST_PROMPT_ROWS = _ROWS[-1]
_DECODES = (0, 8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
_PADDING_PROMPTS = 2


def _prompts_of(rows: int) -> int:
    return max(16, rows // 256 * 8)


MOST_PROMPTS = _prompts_of(_MOST_PROMPT_ROWS)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of `decodes` one-row sequences, then prompts with `prompt_rows` rows in all."""

    prompt_rows: int
    decodes: int
    samples: int

    @property
    def rows(self) -> int:
        return self.decodes + self.prompt_rows

    @property
    def prompts(self) -> int:
        """Return room for the step's prompts, the padding's, and one without rows."""
        return _prompts_of(self.prompt_rows)


def step_shapes(*, max_num_seqs: int, max_prompt_rows: int) -> list[StepShape]:
    if max_prompt_rows < 2:
        return []
    most = min(max_prompt_rows, _MOST_PROMPT_ROWS)
    shapes = [
        StepShape(rows, n, min(n + _prompts_of(rows), max_num_seqs))
        for n in [*(n for n in _DECODES if n < max_num_seqs), max_num_seqs]
        for rows in [*(rows - n for rows in _ROWS if n < rows < most + n), most]
    ]
    # A long prompt's first parts fill a step each, and sample nothing.
    shapes.append(StepShape(most, 0, 0))
    return sorted(shapes, key=lambda shape: (shape.rows, shape.decodes, shape.samples))


def prompt_rows_of(shapes: Sequence[StepShape]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the sorted prompt rows of sorted `shapes`, by decodes."""
    found: dict[int, dict[int, None]] = {}
    for shape in shapes:
        found.setdefault(shape.decodes, {})[shape.prompt_rows] = None
    return tuple((decodes, tuple(found[decodes])) for decodes in sorted(found))


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
