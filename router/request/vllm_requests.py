"""Requests to vLLM nodes over HTTP, and what their times tell of a node's speed.

A vLLM node tells no stages. What is seen is when a request was sent and when bytes came.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from kvrelay.openai_api.sse import DONE
from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.request.vllm_bodies import error_in
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_errors import AttemptFailed, error_of_status
from kvrelay.wire.step_costs import StepCosts

__all__ = ["OnEvents", "learn_prefill_cost", "learn_step_cost", "stream_events", "whole_answer"]

OnEvents = Callable[[bytes], Awaitable[None]]
"""Called with whole events in order; may wait for the client."""

_MAX_ANSWER_BYTES = 64 << 20
_WEIGHT = 1 / 16
_MAX_FACTOR = 4.0
_MIN_STEP_MS, _MIN_TOKEN_MS = 0.1, 0.001
_REQUEST_SHARE = 0.01  # of a step, for each request: so that requests spread
_MIN_STEPS = 4  # in a shorter answer, what was not a step weighs too much


async def whole_answer(
    client: NodeClient, lease: Lease, path: str, body: bytes, headers: Mapping[str, str]
) -> bytes:
    """Return the body of a 200 answer. Raises AttemptFailed, Refused.

    Cancelling closes the connection, which aborts the request on the node.
    """
    async with client.posted(lease, path, body, headers) as answer:
        held = bytearray()
        while chunk := await answer.content.readany():
            held += chunk
            if len(held) > _MAX_ANSWER_BYTES:
                raise AttemptFailed(f"the node's answer is longer than {_MAX_ANSWER_BYTES} bytes")
        return bytes(held)


async def stream_events(
    client: NodeClient,
    lease: Lease,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    on_events: OnEvents,
) -> None:
    """Pass on a stream's events to its [DONE]. Raises AttemptFailed, Refused; so does an error
    event.

    Cancelling closes the connection, which aborts the request on the node.
    """
    async with client.posted(lease, path, body, headers) as answer:
        if answer.content_type != "text/event-stream":
            raise AttemptFailed(f"the node answered a stream with {answer.content_type}")
        held = b""
        while chunk := await answer.content.readany():
            last, end, held = (held + chunk).rpartition(b"\n\n")
            if len(held) > _MAX_ANSWER_BYTES:
                raise AttemptFailed(
                    f"the node sent an event of more than {_MAX_ANSWER_BYTES} bytes"
                )
            if not end:
                continue
            events = last + end
            if (found := error_in(events)) is not None:
                at, error, status = found
                if at:
                    await on_events(events[:at])
                raise error_of_status(status, error, None)
            await on_events(events)
            if events.endswith(DONE):
                return
        raise AttemptFailed(f"the stream was cut before its end, {len(held)} bytes into an event")


def learn_prefill_cost(node: Node, expected_ms: float, took_s: float) -> None:
    """Learn from a prompt's time, and the time that it and those before it were expected to take."""
    costs = node.state.costs
    factor = _moved(1.0, took_s * 1e3 / max(1e-3, expected_ms))
    _set_costs(node, costs.step, costs.prompt_token * factor)


def learn_step_cost(node: Node, steps: int, took_s: float) -> None:
    """Learn from the steps behind a stream's first token."""
    costs = node.state.costs
    if steps >= _MIN_STEPS:
        _set_costs(node, _moved(costs.step, took_s / steps * 1e3), costs.prompt_token)


def _moved(known: float, seen: float) -> float:
    # A running mean that one outlier moves little.
    return known + _WEIGHT * (min(max(seen, known / _MAX_FACTOR), known * _MAX_FACTOR) - known)


def _set_costs(node: Node, step_ms: float, prompt_token_ms: float) -> None:
    step_ms, prompt_token_ms = max(_MIN_STEP_MS, step_ms), max(_MIN_TOKEN_MS, prompt_token_ms)
    costs = StepCosts(step_ms, step_ms * _REQUEST_SHARE, 0.0, 0.0, prompt_token_ms, 0.0)
    node.state.set_costs(costs, node.state.gap_ms)
