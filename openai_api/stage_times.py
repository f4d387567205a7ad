"""When each stage of a leg was, in seconds of one clock, out of how long each took (wire Timing).
Pure.

An engine tells durations, and its stages follow each other without gaps; so the leg's end is what
they are counted back from. The names are those of openai_api/stages.py.
"""

from __future__ import annotations

from typing import NamedTuple

from kvrelay.wire.engine_messages import Timing

__all__ = ["StageTime", "stage_times"]


class StageTime(NamedTuple):
    """A stage, from `start` to `end`."""

    name: str
    start: float
    end: float


def stage_times(timing: Timing, began: float, ended: float) -> list[StageTime]:
    """The stages of a leg that was here from `began` to `ended`, those that took no time left out."""
    decode = max(began, ended - timing.decode_s)
    prefill = max(began, decode - timing.prefill_s)
    spent: list[StageTime] = []
    if timing.transfer_s:
        transfer = max(began, prefill - timing.transfer_s)
        # The wait for a seat is told as one with the wait for the first step, which came after the
        # last byte.
        before = min(timing.decode_queue_s, transfer - began)
        behind = min(timing.decode_queue_s - before, ended - decode)
        spent += [
            StageTime("decode_queue", transfer - before, transfer),
            StageTime("transfer", transfer, prefill),
            StageTime("exposed", max(transfer, prefill - timing.exposed_s), prefill),
            StageTime("decode_queue", decode, decode + behind),
        ]
    else:
        behind = 0.0
        spent.append(StageTime("queue", max(began, prefill - timing.queue_s), prefill))
    first = min(decode + behind + timing.first_step_s, ended) if timing.first_step_s else decode
    spent += [
        StageTime("prefill", prefill, decode),
        StageTime("first_step", decode + behind, first),
        StageTime("decode", decode, ended),
    ]
    return [stage for stage in spent if stage.end > stage.start]
