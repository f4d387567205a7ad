"""The node where the request costs the least time, in expected milliseconds, from rates measured online.

A prefill node costs its queue, the prefill of what it has not cached, and the transfer of the KV. A decode node costs
what it must compute and fetch, the steps after admission (its own and what it adds to those of the others), and, where
KV room does not suffice, the wait until others have ended.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.candidates import looked_at
from router.policies.policy import Ask, N, NodeView
from wire.config import Role

__all__ = ["cost", "decode_ms", "prefill_ms"]


def cost(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """The cheapest, ties broken by `rng`."""
    few = looked_at(ask, nodes, rng)
    if len(few) == 1:
        return few[0]
    each_ms = decode_ms if ask.role is Role.DECODE else prefill_ms
    costs = [each_ms(ask, node) for node in few]
    least = min(costs)
    return few[rng.choice([at for at, ms in enumerate(costs) if ms == least])]


def prefill_ms(ask: Ask, node: NodeView) -> float:
    """Until the KV of the prompt is on a decode node, if this node computes it."""
    rates = node.rates
    # A request that is there costs a little even if it says nothing of its tokens.
    queue = rates.queue_ms(node.tokens) + node.requests * rates.prefill_ms(1)
    return (
        queue
        + rates.prefill_ms(ask.uncached(node))
        + rates.transfer_ms("", ask.tokens)
        + _room_ms(ask.kv_needed(node), node, ask)
    )


def decode_ms(ask: Ask, node: NodeView) -> float:
    """Until the answer has ended, if this node generates it, and what those that run there lose by it."""
    rates, running = node.rates, node.requests
    total = 0.0
    uncached = ask.uncached(node)
    if uncached:
        # The others' steps carry its chunks meanwhile.
        total += rates.queue_ms(node.tokens) + rates.prefill_ms(uncached) * (1 + running)
    fetched = ask.kv_tokens - max(ask.tokens, ask.cached.get(node.url, 0))
    if fetched > 0:
        total += rates.transfer_ms(ask.peer, fetched)
    after_ms = rates.step_ms(running + 1)
    # Each of those that run has added as much on average; the slope at one point would be mostly noise.
    added_ms = after_ms - rates.step_ms(1)
    steps = rates.output_tokens(ask.output_tokens)
    return total + steps * (after_ms + added_ms) + _room_ms(ask.kv_needed(node) + steps, node, ask)


def _room_ms(tokens: float, node: NodeView, ask: Ask) -> float:
    """How long it waits until so many tokens of KV find room: running requests give theirs back as they end."""
    short = tokens - node.kv_room
    if short <= 0:
        return 0.0
    rates = node.rates
    if ask.role is Role.PREFILL:
        lifetime_ms = rates.queue_ms(max(node.tokens, tokens))
    else:
        lifetime_ms = rates.output_tokens() * rates.step_ms(max(1, node.requests))
    return lifetime_ms * short / max(1.0, tokens, node.context_tokens)
