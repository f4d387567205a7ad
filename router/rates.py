"""How fast a node is, measured from what the router sees of it. Pure: no clock, no node; milliseconds and tokens.

Estimates are priors until something was measured, and what is old counts less and less.
"""

from __future__ import annotations

__all__ = ["NodeRates"]

_PREFILL_MS_PER_TOKEN = 0.05
_STEP_MS = 10.0
_STEP_MS_PER_REQUEST = 0.1
_TRANSFER_MS = 2.0
_TRANSFER_MS_PER_TOKEN = 0.001


class NodeRates:
    """Of one node."""

    __slots__ = ()

    def prefill_ms(self, tokens: int) -> float:
        """To compute a prompt of which so many tokens are not cached; never less for more tokens."""
        return tokens * _PREFILL_MS_PER_TOKEN

    def queue_ms(self, tokens: int, requests: int) -> float:
        """Until so many tokens, of so many requests, are computed that are ahead in the queue."""
        return tokens * _PREFILL_MS_PER_TOKEN

    def step_ms(self, running: int, context_tokens: int = 0) -> float:
        """One decode step of so many running requests that have so many tokens of KV together."""
        return _STEP_MS + running * _STEP_MS_PER_REQUEST

    def transfer_ms(self, peer: str, tokens: int) -> float:
        """What a request waits for the KV of so many tokens to come from `peer` (any, if empty)."""
        return _TRANSFER_MS + tokens * _TRANSFER_MS_PER_TOKEN
