"""What the end of a leg tells of the speed of its node. Pure."""

from __future__ import annotations

from router.nodes.node import Lease, Node
from wire.config import Role
from wire.frames import Frame

__all__ = ["learn"]

# Of a shorter answer, what was not a step weighs too much.
_LEAST_STEPS = 4


def learn(lease: Lease, frame: Frame, generated: int, peer: Node | None) -> None:
    """The frame of a leg that holds its node's timing. `generated`: tokens that the leg has told of, 0 if of several
    choices. `peer`: the prefill node whose KV it was given, if it is a decode leg."""
    timing, rates = frame.timing, lease.rates
    if timing is None:
        return
    prompt, _, cached = frame.usage or (0, 0, 0)
    if frame.params is not None:
        prompt, cached = frame.params.prompt_tokens or frame.params.num_tokens, frame.params.cached_tokens
    # Before the prompt, of whose time it is subtracted.
    if "decode" in timing and generated > _LEAST_STEPS:
        rates.stepped(lease.running, timing["decode"] / (generated - 1))
    if "queue" in timing:
        if lease.role is Role.PREFILL:  # elsewhere it waits for steps that decode, and that is no queue of prompts
            rates.waited(lease.expected_queue_ms, timing["queue"])
        rates.prefilled(prompt - cached, timing.get("prefill", 0.0), shared=lease.shared, beside=lease.beside)
    elif "exposed" in timing and "prefill" not in timing and peer is not None:
        rates.fetched(peer.url, prompt, timing["exposed"])
        peer.rates.fetched("", prompt, timing["exposed"])
    if frame.usage is not None:
        rates.generated(frame.usage[1])
