"""Stages of a request: their names and durations. Pure.

docs/guides/clients.md says what they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvrelay.openai_api import sse
from kvrelay.wire.engine_messages import Timing
from kvrelay.wire.json_object import JsonObject

__all__ = ["MOVED", "STAGES", "TOLD", "stages_ms", "with_stages"]

STAGES = (
    "queue",
    "prefill",
    "announce",
    "transfer",
    "exposed",
    "decode_queue",
    "first_step",
    "decode",
    "total",
)
TOLD = "told"
"""From the news of complete KV to the first step's token; for the router."""
MOVED = "transfer_bytes"
"""Bytes of fetched KV; for the router."""


def stages_ms(timing: Timing) -> dict[str, float]:
    """Return milliseconds of stages in one engine, with TOLD and MOVED."""
    stages_s: dict[str, float] = {}
    if timing.transfer_s:
        if timing.prefill_s:
            stages_s["prefill"] = timing.prefill_s
        stages_s |= {"transfer": timing.transfer_s, "exposed": timing.exposed_s}
        stages_s["decode_queue"] = timing.decode_queue_s
    else:
        stages_s |= {"queue": timing.queue_s, "prefill": timing.prefill_s}
    if timing.first_step_s:
        stages_s |= {"first_step": timing.first_step_s, "decode": timing.decode_s}
    if timing.told_s:
        stages_s[TOLD] = timing.told_s
    stages = {name: round(seconds * 1e3, 3) for name, seconds in stages_s.items()}
    return stages | {MOVED: float(timing.transfer_bytes)} if timing.transfer_bytes else stages


def with_stages(end: bytes, stages: Mapping[str, float], rungs: Mapping[str, int]) -> bytes:
    """Add a member `kvrelay` to an answer's last JSON object, without decoding.

    It has milliseconds, and in `prompt` the tokens of each rung (wire/ladder.py).
    """
    tail = b"}\n\n" + sse.DONE
    if not end.endswith(tail):
        tail = b"}"
    if not end.endswith(tail):
        return end
    named: JsonObject = {f"{name}_ms": round(stages[name], 3) for name in STAGES if name in stages}
    if rungs:
        named["prompt"] = rungs
    return end.removesuffix(tail) + b',"kvrelay":' + msgspec.json.encode(named) + tail
