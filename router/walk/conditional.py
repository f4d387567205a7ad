"""Whether a prompt is better computed on the decode node itself than on a prefill node. Pure: the decision alone.

Both ways are reckoned in milliseconds from measured rates. Computed on the decode node a prompt waits for no hand-over,
but all that run there wait for it: each of them is delayed by as long as it takes, and that is counted for all of them.
A prompt that takes longer than a few decode steps never stays, even where nobody runs now: those that come would wait.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
    alone_ms = decode.rates.queue_ms(decode.tokens, 0) + decode.rates.prefill_ms(uncached)
    local_ms = alone_ms + decode.rates.prefill_ms(uncached) * decode.requests
    handover_ms = (
        prefill.rates.queue_ms(prefill.tokens, prefill.requests)
        + prefill.rates.prefill_ms(ask.uncached(prefill))
        + decode.rates.transfer_ms(prefill.url, uncached)
    )
    if decode.rates.prefill_ms(uncached) > MOST_STEPS * decode.rates.step_ms(decode.requests + 1):
        reason = Reason.TOO_LONG
    elif ask.kv_needed(decode) > decode.kv_room:
        reason = Reason.NO_ROOM
    elif local_ms < handover_ms:
        reason = Reason.CHEAPER
    else:
        reason = Reason.STREAMS_WAIT if alone_ms < handover_ms else Reason.HANDOVER_CHEAPER
    return Decision(reason is Reason.CHEAPER, reason, local_ms, handover_ms)
