"""What the times of legs tell of the speed of vLLM nodes: a card of two numbers each. Pure; times
are seconds.

A vLLM node tells no stages; what is seen is when a leg was sent and when bytes of its answer came.
A prefill leg's time is of its own prompt and of those before it, so what is learnt is by which
factor both took longer than was thought.
"""

from __future__ import annotations

from kvrelay.router.nodes.node import Node
from kvrelay.wire.step_costs import StepCosts

__all__ = ["prefilled", "streamed"]

_WEIGHT = 1 / 16
_MOST_OFF = 4.0
_LEAST_STEP_MS, _LEAST_TOKEN_MS = 0.1, 0.001
_ROW = 0.01  # of a step, for each request: so that they spread
# Of a shorter answer, what was not a step weighs too much.
_LEAST_STEPS = 4


def prefilled(node: Node, expected_ms: float, took_s: float) -> None:
    """Learn from a prompt that was computed, and had been expected to take so long with its wait."""
    costs = node.state.costs
    _measured(
        node, costs.step, costs.prompt_token * _moved(1.0, took_s * 1e3 / max(1e-3, expected_ms))
    )


def streamed(node: Node, steps: int, took_s: float) -> None:
    """Learn from a stream whose tokens behind the first took so many steps, and so long."""
    costs = node.state.costs
    if steps >= _LEAST_STEPS:
        _measured(node, _moved(costs.step, took_s / steps * 1e3), costs.prompt_token)


def _moved(known: float, seen: float) -> float:
    """Return a running mean that one outlier moves little."""
    return known + _WEIGHT * (min(max(seen, known / _MOST_OFF), known * _MOST_OFF) - known)


def _measured(node: Node, step_ms: float, prompt_token_ms: float) -> None:
    step_ms, prompt_token_ms = max(_LEAST_STEP_MS, step_ms), max(_LEAST_TOKEN_MS, prompt_token_ms)
    node.state.set_costs(
        StepCosts(step_ms, step_ms * _ROW, 0.0, 0.0, prompt_token_ms, 0.0), node.state.gap_ms
    )
