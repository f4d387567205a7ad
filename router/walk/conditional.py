"""Whether a prompt is better computed on the decode node itself than on a prefill node. Pure: the decision alone.

Both ways are reckoned in milliseconds from measured rates. Computed on the decode node a prompt waits for no hand-over,
but all that run there wait for it: each of them is delayed by as long as it takes, and that is counted for all of them.
A prompt that takes longer than a few decode steps never stays, even where nobody runs now: those that come would wait.

Targets change what is better. A first token that would be late from a prefill node and is in time from the decode node
is worth a stall there that those who run can spare: then a queue before the prefill nodes flows over to where time is
left.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from router.nodes.spare_time import SPARE, ahead_ms, stalled_ms
from router.policies.policy import Ask, NodeView

__all__ = ["MOST_STEPS", "Decision", "Reason", "decide"]

MOST_STEPS = 4.0
"""A prompt that stays takes at most as long as this many decode steps of its node."""


class Reason(enum.StrEnum):
    """Why a prompt is computed where it is. Values of a metric's label."""

    CHEAPER = "cheaper"
    """On the decode node: what the others lose by it is less than what is saved."""
    HANDOVER_CHEAPER = "handover_cheaper"
    """It would be slower on the decode node even if nobody ran there."""
    STREAMS_WAIT = "streams_wait"
    """It would be faster there for itself, but those that run would lose more than it wins."""
    TOO_LONG = "too_long"
    """More than MOST_STEPS."""
    IN_TIME = "in_time"
    """On the decode node: its first token would be late otherwise, and those that run there stay in time."""
    NO_ROOM = "no_room"
    """The decode node has no room for its KV now, and a prefill node can keep it until it has."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`local`: the decode node computes the prompt. Costs in milliseconds, until the second token can be computed."""

    local: bool
    reason: Reason
    local_ms: float
    """What those lose that run there is in it."""
    handover_ms: float


def decide(ask: Ask, prefill: NodeView, decode: NodeView) -> Decision:
    """For a prefill leg's `ask` (its role does not matter), and the nodes that its two legs would go to."""
    uncached = ask.uncached(decode)
    computed_ms = decode.rates.prefill_ms(uncached)
    alone_ms = ahead_ms(decode, uncached) + computed_ms
    local_ms = alone_ms + computed_ms * decode.requests
    # What others usually have on the prefill node and have not now is a reason to choose another one, and none to make
    # streams wait.
    queue_ms = prefill.rates.queue_ms(prefill.certain_tokens, prefill.certain_requests)
    first_ms = queue_ms + prefill.rates.prefill_ms(ask.uncached(prefill))
    handover_ms = first_ms + decode.rates.transfer_ms(prefill.url, uncached)
    in_time_ms = SPARE * ask.ttft_ms
    if ask.kv_needed(decode) > decode.kv_room:
        reason = Reason.NO_ROOM
    elif first_ms > in_time_ms > 0 and stalled_ms(decode, uncached, ask.tpot_ms) < in_time_ms:
        reason = Reason.IN_TIME
    elif computed_ms > MOST_STEPS * decode.rates.step_ms(decode.requests + 1):
        reason = Reason.TOO_LONG
    elif local_ms < handover_ms:
        reason = Reason.CHEAPER
    else:
        reason = Reason.STREAMS_WAIT if alone_ms < handover_ms else Reason.HANDOVER_CHEAPER
    return Decision(reason in (Reason.CHEAPER, Reason.IN_TIME), reason, local_ms, handover_ms)
