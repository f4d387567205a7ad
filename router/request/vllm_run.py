"""One request on two vLLM nodes: prefill request, hand-over, decode request, and failures.

A failed request is tried on other nodes until the client has bytes; then it ends with an error,
because a vLLM node does not tell the state that another one would go on from.

KV that a decode node may have read is offered to no other: vLLM frees a prompt's blocks after the
first read without a fence, so a second reader could get another request's KV. KV that nobody
fetches stays until its node lets go of it (after 30 s, in older versions 480).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from kvrelay.openai_api.sse import DONE
from kvrelay.router.nodes.node import Lease, Node, NodeKind
from kvrelay.router.request.job import CHAT_PATH, Job, prefix_of
from kvrelay.router.request.placer import PlacementQuery
from kvrelay.router.request.poison import CrashRecord
from kvrelay.router.request.retries import Attempts, RunContext
from kvrelay.router.request.run import Run
from kvrelay.router.request.timeline import AttemptTimes, Timeline
from kvrelay.router.request.vllm_bodies import (
    Handover,
    check_fields,
    decode_body,
    error_in,
    forces_tools,
    handover_of,
    plain_answer,
    prefill_body,
    undivided_because,
)
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_errors import AttemptFailed, error_of_status
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.step_costs import StepCosts

__all__ = ["VllmRun", "learn_prefill_cost", "learn_step_cost", "whole_answer"]

_log = logging.getLogger("kvrelay.router")

_MAX_ANSWER_BYTES = 64 << 20
_WEIGHT = 1 / 16
_MAX_FACTOR = 4.0
_MIN_STEP_MS, _MIN_TOKEN_MS = 0.1, 0.001
_REQUEST_SHARE = 0.01  # of a step, for each request: so that requests spread
_MIN_STEPS = 4  # in a shorter answer, what was not a step weighs too much


class VllmRun(Run):
    """A request on its way through two vLLM nodes; each of the two is placed when it begins.

    `output_tokens` are as the node counts them; in a stream its events, about one for each token.
    """

    def __init__(
        self,
        job: Job,
        kind: NodeKind,
        headers: Mapping[str, str],
        timeline: Timeline,
        context: RunContext,
        crashes: CrashRecord,
    ) -> None:
        """`kind` is that of all nodes that the request may go to. Raises RequestError."""
        check_fields(job)
        super().__init__(job, headers, timeline, context, crashes)
        self._kind = kind
        self._prefix = prefix_of(job)
        self._pool = context.pool
        self._attempts = {role: Attempts(context, role) for role in (Role.PREFILL, Role.DECODE)}
        self._source: Node | None = None  # whose KV the decode request fetches
        self._round = 0
        self._handover_counted = False

    def wanted(self) -> PlacementQuery:
        return self.context.placer.wanted(self.job, self._prefix, self.prompt_tokens or 0)

    async def _answer(self) -> None:
        while not await self._prefill_and_decode():
            self._round += 1

    async def _prefill_and_decode(self) -> bool:
        # Runs one prefill request, and decode requests while its KV is good; returns whether one
        # has answered.
        headers, params = self._request_headers(), None
        self._source = None
        alone = undivided_because(self.job)
        if alone is None:
            params, alone = await self._prefill(headers)
        if alone is not None:
            self.context.metrics.undivided.labels(alone).inc()
        while True:
            with self._lease(Role.DECODE, self.job.prompt_tokens if alone else 0) as lease:
                try:
                    await self._decode(lease, decode_body(self.job, params), headers)
                    return True
                except AttemptFailed as why:
                    await self._note_failure(lease, Role.DECODE, why)
                    if why.reached or not why.lost:
                        return False
                    # Nobody listens there, so the KV is still good for another node.

    async def _prefill(self, headers: Mapping[str, str]) -> tuple[msgspec.Raw | None, str | None]:
        # Returns the hand-over, or why there is none.
        while True:
            with self._lease(Role.PREFILL, self.job.prompt_tokens) as lease:
                node, process = lease.node, (lease.node.url, lease.generation)
                forced = forces_tools(self.job)
                if forced and process in self.context.fails_on_forced_tools:
                    return None, "forced_tools"
                try:
                    handover = await self._attempt_prefill(lease, headers)
                except AttemptFailed as why:
                    failure = why
                else:
                    if handover.params is not None:
                        self._source = node
                        return handover.params, None
                    _log.warning(
                        "prefill node %s hands no KV over; start it with a NixlConnector", node.url
                    )
                    return None, "no_kv"
            if failure.status == 500 and forced:
                _log.warning(
                    "prefill node %s fails on forced tool calls, so decode nodes do those alone",
                    node.url,
                )
                self.context.fails_on_forced_tools.add(process)
                return None, "forced_tools"
            await self._note_failure(lease, Role.PREFILL, failure)

    async def _attempt_prefill(self, lease: Lease, headers: Mapping[str, str]) -> Handover:
        node, expected_ms = lease.node, lease.node.state.wait_ms  # this prompt is in it
        body = prefill_body(self.job)
        self.timeline.prefilled = None
        times = self.timeline.begin_attempt(time.monotonic(), decoding=False)
        client, path = self.context.node_client, self.job.path
        try:
            handover = handover_of(await whole_answer(client, lease, path, body, headers))
            self.timeline.note_first_token(times, 1, time.monotonic())
        finally:
            self.timeline.end_attempt(times, time.monotonic(), more=True)
        self.prompt_tokens = handover.prompt_tokens or None
        if handover.cached_tokens is not None:
            self.context.metrics.cached(lease.cached_tokens, handover.cached_tokens)
        learn_prefill_cost(node, expected_ms, time.monotonic() - times.began)
        return handover

    async def _decode(self, lease: Lease, body: bytes, headers: Mapping[str, str]) -> None:
        # Raises Refused; AttemptFailed while the client has nothing, else NodeFailed.
        job = self.job
        if self._source is not None and not self._handover_counted:
            self._handover_counted = True
            self.context.metrics.handed_over(job.model)
        fetches = self._source is not None
        times = self.timeline.begin_attempt(time.monotonic(), decoding=True, fetches=fetches)
        complete = False
        try:
            await (self._decode_stream if job.stream else self._decode_whole)(
                lease, times, body, headers
            )
            complete = True
        finally:
            self.timeline.end_attempt(times, time.monotonic(), more=not complete)
        if max(job.choices, job.best_of) == 1:
            self.context.placer.answered(
                job.model, self.output_tokens, self._prefix, self.prompt_tokens or 0
            )

    async def _decode_whole(
        self, lease: Lease, times: AttemptTimes, body: bytes, headers: Mapping[str, str]
    ) -> None:
        times.tokens = times.began  # the first token is not seen; most of an answer are its steps
        client, path = self.context.node_client, self.job.path
        answer = plain_answer(await whole_answer(client, lease, path, body, headers))
        if self.timeline.prefilled is not None:  # when the first token was computed
            self.timeline.note_tokens(self.timeline.prefilled)
            self.timeline.note_tokens(time.monotonic())
        self.prompt_tokens, self.output_tokens = answer.prompt_tokens, answer.output_tokens
        self.reply.put(self._with_stages(answer.body, times))

    async def _decode_stream(
        self, lease: Lease, times: AttemptTimes, body: bytes, headers: Mapping[str, str]
    ) -> None:
        job, newest, held_up = self.job, 0.0, False

        async def on_events(events: bytes) -> None:
            nonlocal newest, held_up
            if not self.output_tokens:
                lease.answered()
            self.timeline.note_tokens(now := time.monotonic())
            times.tokens = times.tokens or now
            if count := events.count(b"data: {"):
                self.output_tokens, newest = self.output_tokens + count, now
            self.reply.put(self._with_stages(events, times))
            if (room := self.reply.room()) is not None:
                held_up = True  # the client decides when events come
                await room

        client = self.context.node_client
        try:
            await stream_events(client, lease, job.path, body, headers, on_events)
        except AttemptFailed as why:
            if not self.output_tokens:
                raise
            self._pool.blame(lease.node, f"a request failed on it: {why.detail}", time.monotonic())
            raise NodeFailed(
                "the decode node broke in the middle of the answer, which a vLLM node's answer "
                f"cannot be continued after; send the request again ({why.message})"
            ) from why
        if max(job.choices, job.best_of) == 1 and times.tokens is not None and not held_up:
            steps = self.output_tokens - (job.path == CHAT_PATH) - job.include_usage - 1
            learn_step_cost(lease.node, steps, newest - times.tokens)

    def _with_stages(self, end: bytes, times: AttemptTimes) -> bytes:
        if not self.job.wants_stages or (self.job.stream and not end.endswith(DONE)):
            return end
        now = time.monotonic()
        self.timeline.count_unreported(times, now)
        return self.timeline.with_stages(end, now)

    @contextmanager
    def _lease(self, role: Role, tokens: int = 0) -> Iterator[Lease]:
        tried = self._attempts[role].nodes()
        lease = self.context.placer.hold_alone(role, self.wanted(), tried, self._kind, tokens)
        url, (prefill, decode) = lease.node.url, self.nodes
        self.nodes = (url, decode) if role is Role.PREFILL else (prefill, url)
        try:
            yield lease
        finally:
            self._pool.give_back(lease)

    def _request_headers(self) -> dict[str, str]:
        # An id is used for one hand-over, so that nothing left by another is found.
        unique = self.job.node_id if not self._round else f"{self.job.node_id}-{self._round}"
        return {**self.headers, "x-request-id": unique}

    async def _note_failure(self, lease: Lease, role: Role, why: AttemptFailed) -> None:
        # Raises what the client is told when there is nowhere to go.
        node, attempts, now = lease.node, self._attempts[role], time.monotonic()
        _log.warning(
            "id=%s: the %s request failed on %s: %s", self.job.id, role, node.url, why.detail
        )
        self._pool.blame(node, f"a request failed on it: {why.detail}", now)
        if why.lost and why.reached:
            self.crashes.lost(lease, now)
            await self.crashes.may_go_on()
        attempts.failed(node, why)
        if not self._pool.up(role, attempts.nodes(), self.job.model, self._kind):
            raise attempts.failure(why) from why
        attempts.require_another(why)


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
    on_events: Callable[[bytes], Awaitable[None]],
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
