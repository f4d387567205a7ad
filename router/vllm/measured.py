"""What the times of legs tell of the speed of vLLM nodes. Pure: times are given, in seconds of any one clock.

A vLLM node tells no stages; what is seen is when a leg was sent and when bytes of its answer came. A time that is of
several parts is divided between them as their estimates are, so that all of these get better by the same factor.
"""

from __future__ import annotations

from router.nodes.node import Lease, Node

__all__ = ["DecodeTimes", "prefilled"]

# Of a shorter answer, what was not a step weighs too much.
_LEAST_STEPS = 4
# The first token comes a step after its KV. Where a step is thought to take as long as all of it, this is left.
_LEAST_EXPOSED = 0.05


def prefilled(lease: Lease, prompt_tokens: int, cached_tokens: int, took_s: float) -> None:
    """A prompt of so many tokens was computed but for those that were cached; with its wait in the node's queue."""
    if prompt_tokens < 1:
        return
    rates = lease.node.rates
    tokens = max(1, prompt_tokens - cached_tokens)  # the last one is computed always
    computed_ms = rates.prefill_ms(tokens)
    part = computed_ms / (computed_ms + lease.expected_queue_ms)
    # The queue is of prompts like this one, so that its part says of the same rate what this one does.
    rates.prefilled(tokens, took_s * 1e3 * part, shared=lease.shared, beside=lease.beside)


class DecodeTimes:
    """Of one decode leg, from when it was sent."""

    def __init__(self, lease: Lease, peer: Node | None, prompt_tokens: int, now: float) -> None:
        """`peer`: the prefill node whose KV is fetched; None: the node computes the prompt, too, of 0 tokens if nobody
        has counted them."""
        self._lease = lease
        self._peer = peer
        self._prompt_tokens = prompt_tokens
        self._sent = now
        self._first = 0.0
        self._last = 0.0
        self._events = 0
        self._held_up = False

    def come(self, events: int, now: float) -> None:
        """So many events of a stream have come."""
        if not events:
            return  # its end alone
        if not self._events:
            self._first = now
            self._began(now - self._sent)
        self._events += events
        self._last = now

    def held_up(self) -> None:
        """The client takes no more: when the next events come is its doing."""
        self._held_up = True

    def streamed(self, others: int) -> None:
        """The stream has ended; so many of its events told of no token."""
        tokens = self._events - others
        if tokens < 1:
            return
        self._lease.node.rates.generated(tokens)
        if tokens - 1 >= _LEAST_STEPS and not self._held_up:
            self._stepped((self._last - self._first) / (tokens - 1))

    def whole(self, prompt_tokens: int, tokens: int, now: float) -> None:
        """An answer that is no stream has come, of so many tokens."""
        if tokens < 1:
            return
        self._prompt_tokens = prompt_tokens
        rates = self._lease.node.rates
        rates.generated(tokens)
        if tokens < _LEAST_STEPS:
            return
        steps_ms = tokens * rates.step_ms(self._lease.running)
        if self._peer is None:
            before_ms = self._lease.expected_queue_ms + rates.prefill_ms(self._uncached)
        else:
            before_ms = rates.transfer_ms(self._peer.url, self._uncached)
        self._stepped((now - self._sent) * steps_ms / (steps_ms + before_ms) / tokens)

    @property
    def _uncached(self) -> int:
        return max(1, self._prompt_tokens - self._lease.cached_tokens)

    def _stepped(self, each_s: float) -> None:
        self._lease.node.rates.stepped(self._lease.running, each_s * 1e3)

    def _began(self, took_s: float) -> None:
        node, peer = self._lease.node, self._peer
        if not self._prompt_tokens:
            return
        if peer is None:
            prefilled(self._lease, self._prompt_tokens, self._lease.cached_tokens, took_s)
        elif not node.load.waiting:  # else it may have waited for a seat
            ms = took_s * 1e3
            exposed_ms = max(ms - node.rates.step_ms(self._lease.running), _LEAST_EXPOSED * ms)
            node.rates.fetched(peer.url, self._uncached, exposed_ms)
            peer.rates.fetched("", self._uncached, exposed_ms)
