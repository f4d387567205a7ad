"""What the times of legs tell of the speed of vLLM nodes: a card of two numbers each. Pure; times are seconds.

A vLLM node tells no stages; what is seen is when a leg was sent and when bytes of its answer came. A prefill leg's time
is of its own prompt and of those before it, so what is learnt is by which factor both took longer than was thought.
"""

from __future__ import annotations

from router.node_load import NodeLoad
from router.nodes.node import Node
from wire.step_costs import StepCosts

__all__ = ["DecodeTimes", "prefilled"]

_WEIGHT = 1 / 16
_MOST_OFF = 4.0
_LEAST_STEP_MS, _LEAST_TOKEN_MS = 0.1, 0.001
_ROW = 0.01  # of a step, for each request: so that they spread
# Of a shorter answer, what was not a step weighs too much.
_LEAST_STEPS = 4


def prefilled(node: Node, expected_ms: float, took_s: float) -> None:
    """Learn from a prompt that was computed, and had been expected to take so long with its wait."""
    state = node.state
    known = state.costs.prompt_token
    _measured(state, state.costs.step, known * _moved(1.0, took_s * 1e3 / max(1e-3, expected_ms)))


def _moved(known: float, seen: float) -> float:
    """Return a running mean that one outlier moves little."""
    return known + _WEIGHT * (min(max(seen, known / _MOST_OFF), known * _MOST_OFF) - known)


def _measured(state: NodeLoad, step_ms: float, prompt_token_ms: float) -> None:
    step_ms, prompt_token_ms = max(_LEAST_STEP_MS, step_ms), max(_LEAST_TOKEN_MS, prompt_token_ms)
    state.measured(StepCosts(step_ms, step_ms * _ROW, 0.0, 0.0, prompt_token_ms, 0.0), state.gap_ms)


class DecodeTimes:
    """The events of one streamed decode leg, and when they came."""

    def __init__(self, node: Node) -> None:
        self._state = node.state
        self._first = self._last = 0.0
        self._events = 0
        self._held_up = False

    def come(self, events: int, now: float) -> None:
        """Count so many events of a stream."""
        if events:
            self._first = self._first if self._events else now
            self._events, self._last = self._events + events, now

    def held_up(self) -> None:
        """Note that the client takes no more: when the next events come is its doing."""
        self._held_up = True

    def streamed(self, others: int) -> None:
        """Learn from a stream that has ended; so many of its events told of no token."""
        steps = self._events - others - 1
        if steps >= _LEAST_STEPS and not self._held_up:
            each_ms = (self._last - self._first) / steps * 1e3
            _measured(self._state, _moved(self._state.costs.step, each_ms), self._state.costs.prompt_token)
