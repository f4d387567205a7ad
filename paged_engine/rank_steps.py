"""What rank 0 of a GPU's tensor-parallel group tells the others of a step, as msgpack. See
paged_engine/ranks.py.
"""

from __future__ import annotations

from dataclasses import fields

import msgspec
import numpy as np

from kvrelay.paged_engine.guide import RowMasks
from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.step_values import PlannedStep, SlotState, StepValues
from kvrelay.wire.engine_messages import Submit

__all__ = ["RankMasks", "RankStep"]


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells the others of a step."""

    arrays: list[tuple[tuple[int, ...], bytes]]  # the fields of StepValues: shape and int32 values
    admitted: list[tuple[int, Submit]]
    states: list[SlotState]
    guided: bool  # the tokens are chosen when a RankMasks has come

    @classmethod
    def of(cls, planned: PlannedStep, guided: bool) -> RankStep:
        arrays = [getattr(planned.values, field.name) for field in fields(StepValues)]
        admitted = [(slot, _submit(request)) for slot, request in planned.admitted]
        return cls([(a.shape, a.tobytes()) for a in arrays], admitted, planned.states, guided)

    def values(self) -> StepValues:
        return StepValues(
            *(np.frombuffer(raw, np.int32).reshape(shape) for shape, raw in self.arrays)
        )


class RankMasks(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells the others of the step that it told last: which tokens its guides allow."""

    rows: list[int]
    words: bytes

    @classmethod
    def of(cls, masks: RowMasks | None) -> RankMasks:
        return cls([], b"") if masks is None else cls(masks.rows, masks.words.tobytes())

    def masks(self) -> RowMasks | None:
        if not self.rows:
            return None
        return RowMasks(self.rows, np.frombuffer(self.words, np.uint32).reshape(len(self.rows), -1))


def _submit(request: Request) -> Submit:
    prompt, generated = (
        request.token_ids[: request.prompt_tokens],
        request.token_ids[request.prompt_tokens :],
    )
    # Only rank 0 has guides; the others are told masks.
    params = msgspec.structs.replace(
        request.params, constraint=None, allowed_token_ids=None, bad_words=()
    )
    return Submit(request.request_id, prompt, params, generated=generated)
