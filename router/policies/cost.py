"""The node where the request costs the least time, in expected milliseconds, from rates measured online.

A prefill node costs its queue, the prefill of what it has not cached (twice, see below), and the transfer of the KV. A
decode node costs what it must compute and fetch, the steps after admission (its own and what it adds to those of the
others), and, where KV room does not suffice, the wait until others have ended.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.candidates import looked_at
from router.policies.least_queue import least_queue
from router.policies.policy import Ask, N, NodeView
from wire.config import Role

__all__ = ["cost", "decode_ms", "prefill_ms"]

# Rates are not known more exactly; without it, whichever of two equal nodes was measured first would get all.
_AS_GOOD = 1.05
# What is computed pushes as much out of the node's cache, which will probably be computed again. Without it prompts are
# copied to every node whose queue is a little shorter, and the caches together hold less (simulated: mean wait +30 %).
_DISPLACED = 1.0


def cost(ask: Ask, nodes: Sequence[N], rng: random.Random) -> N:
    """The cheapest. Of those that are as good within what is known, one that has most of the prompt, then one with the
    least depth, then any."""
    few = looked_at(ask, nodes, rng)
    if len(few) == 1:
        return few[0]
    each_ms = decode_ms if ask.role is Role.DECODE else prefill_ms
    costs = [each_ms(ask, node) for node in few]
    most_ms = min(costs) * _AS_GOOD
    good = [node for node, ms in zip(few, costs, strict=True) if ms <= most_ms]
    if ask.cached:
        longest = max(ask.cached.get(node.url, 0) for node in good)
        good = [node for node in good if ask.cached.get(node.url, 0) == longest]
    return good[0] if len(good) == 1 else least_queue(ask, good, rng)


def prefill_ms(ask: Ask, node: NodeView) -> float:
    """Until the KV of the prompt is on a decode node, if this node computes it, and what others lose by it."""
    rates = node.rates
    computed_ms = rates.prefill_ms(ask.uncached(node))
    total = rates.queue_ms(node.tokens, node.requests) + computed_ms + _DISPLACED * computed_ms
    return total + rates.transfer_ms("", ask.tokens) + _room_ms(ask.kv_needed(node), node, ask)


def decode_ms(ask: Ask, node: NodeView) -> float:
    """Until the answer has ended, if this node generates it, and what those that run there lose by it."""
    rates, running = node.rates, node.requests
    total = 0.0
    uncached = ask.uncached(node)
    if uncached:
        # The others' steps carry its chunks meanwhile.
        total += rates.prompts_ms(node.tokens) + rates.prefill_ms(uncached) * (1 + running)
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
        lifetime_ms = rates.prompts_ms(max(node.tokens, tokens))
    else:
        lifetime_ms = rates.output_tokens() * rates.step_ms(max(1, node.requests))
    return lifetime_ms * short / max(1.0, tokens, node.context_tokens)
