"""The break-down of a request by stage: the names, the same everywhere, and its place in an answer.
Pure.

A request of two nodes goes through them in this order; one that is served whole has no hand-over.

    queue         waiting for a node and for a seat on it prefill       computing the prompt, token
    1 included; on the decode node too, if it had to announce      from token 1 at the router until
    the decode node knows that the KV is complete transfer      the decode node's fetch, beside the
    prefill for the most part exposed       of that, what came after the news that the KV is
    complete decode_queue  on the decode node: waiting for a seat and blocks, and for the step
    behind the last byte first_step    the first decode step, from its launch to its token decode
    from token 1, or from the last byte of its KV, to the end total         from arrival to end

Of a leg that was cut, broke or is vLLM's, no node tells: the router counts what it saw. Until its
first token that is `prefill` if the leg computes the prompt, `announce` if it fetches KV, and from
there on `decode`; the wait for another node behind it is `queue`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvrelay.openai_api import sse
from kvrelay.wire.engine_messages import Timing

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
"""No stage, and for the router only: from the news that the KV is complete to the token of the
first step.
"""
MOVED = "transfer_bytes"
"""No stage and no time, and for the router only: bytes of KV that were fetched."""


def stages_ms(timing: Timing) -> dict[str, float]:
    """Milliseconds of the stages that a request went through in one engine, TOLD, and MOVED if
    anything was.
    """
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


def with_stages(end: bytes, stages: Mapping[str, float]) -> bytes:
    """The end of an answer, a stream or a JSON body, whose last JSON object gets a member `kvrelay`
    with milliseconds.

    Bytes are put into bytes: nothing is decoded, and all others stay what they are.
    """
    tail = b"}\n\n" + sse.DONE
    if not end.endswith(tail):
        tail = b"}"
    if not end.endswith(tail):
        return end
    named = {f"{name}_ms": round(stages[name], 3) for name in STAGES if name in stages}
    return end.removesuffix(tail) + b',"kvrelay":' + msgspec.json.encode(named) + tail
