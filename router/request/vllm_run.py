"""One request on two vLLM nodes: prefill request, hand-over, decode request, and failures.

The contract is that of vLLM's NixlConnector: the prefill request asks for one token with
`do_remote_decode`; the answer's `kv_transfer_params` go to the decode node unchanged, which draws
the token again.

A failed request is tried on other nodes until the client has bytes; then it ends with an error, as
a vLLM node does not tell the state from which another could go on. KV that a decode node may have
read is offered to no other: vLLM frees a prompt's blocks after the first read without a fence, so a
second reader could get another request's KV. Unfetched KV stays until its node drops it (after 30
s, in older versions 480).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from itertools import count
from typing import Annotated, Any

import msgspec

from kvrelay.openai_api.sse import DONE
from kvrelay.router.nodes.node import Lease
from kvrelay.router.request.failures import Attempts
from kvrelay.router.request.job import Job
from kvrelay.router.request.placer import PlacementQuery
from kvrelay.router.request.run import Run
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_errors import AttemptFailed, error_of_status, parse_error
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ErrorBody, NodeFailed, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "VllmRun",
    "decode_body",
    "error_in",
    "handover_of",
    "plain_answer",
    "prefill_body",
    "undivided_because",
    "whole_answer",
]

_log = logging.getLogger("kvrelay.router")

_MAX_ANSWER_BYTES = 64 << 20
_ASK_TO_HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Both forms in which versions begin an error event; quotes inside strings are escaped.
_ERROR_EVENT = re.compile(rb'data: (\{"(?:error"|object": ?"error")[^\n]*)')


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None
    """If the node was started with --enable-prompt-tokens-details."""


class _Answer(msgspec.Struct):
    """A whole answer as the router reads it; decoding proves the rest is JSON."""

    choices: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Held(msgspec.Struct):
    do_remote_prefill: bool


class VllmRun(Run):
    """A request on two vLLM nodes, each placed when it begins.

    `output_tokens` are as the node counts them; in a stream its events, about one for each token.
    """

    def __post_init__(self) -> None:
        """Raise RequestError for KV-transfer fields that the router's check cannot see."""
        # vLLM merges this object with kv_transfer_params, which could point a node at an address.
        if b"kv_transfer_params" in bytes(self.job.fields.get("vllm_xargs", b"")):
            raise RequestError(
                "kv_transfer_params is set by the router; leave it out of vllm_xargs",
                param="vllm_xargs",
            )
        super().__post_init__()
        self._kind = self._pool.kind_for(self.job.model)
        self._attempts = {role: Attempts(self.context, role) for role in Role}
        self._handover_counted = False

    def wanted(self) -> PlacementQuery:
        return self.context.placer.wanted(self.job, self._prefix, self.prompt_tokens or 0)

    async def _answer(self) -> None:
        unique = self.job.node_id
        for again in count(1):
            # One id per hand-over, so that nothing left by another is found.
            if await self._prefill_and_decode({**self.headers, "x-request-id": unique}):
                return
            unique = f"{self.job.node_id}-{again}"

    async def _prefill_and_decode(self, headers: Mapping[str, str]) -> bool:
        # Runs decode requests while the KV is good; returns whether one has answered.
        params, alone = None, undivided_because(self.job)
        if alone is None:
            params = await self._prefill(headers)
            alone = "no_kv" if params is None else None
        if alone is not None:
            self.context.metrics.undivided.labels(alone).inc()
        elif not self._handover_counted:
            self._handover_counted = True
            self.context.metrics.handed_over(self.job.model)
        body, tokens = decode_body(self.job, params), self.job.prompt_tokens if alone else 0
        while True:
            with self._lease(Role.DECODE, tokens) as lease:
                try:
                    await self._decode(lease, body, headers)
                    return True
                except AttemptFailed as why:
                    await self._note_failure(lease, why)
                    if why.reached or not why.lost:
                        return False
                    # Nobody listens there, so the KV is still good for another node.

    async def _prefill(self, headers: Mapping[str, str]) -> msgspec.Raw | None:
        while True:
            with self._lease(Role.PREFILL, self.job.prompt_tokens) as lease:
                client, body = self.context.node_client, prefill_body(self.job)
                self.timeline.prefilled = None
                try:
                    answer = await whole_answer(client, lease, self.job.path, body, headers)
                    params, usage = handover_of(answer)
                except AttemptFailed as why:
                    failure = why
                else:
                    self.timeline.prefilled = time.monotonic()
                    self.prompt_tokens = usage.prompt_tokens or None
                    if usage.prompt_tokens_details is not None:
                        cached = usage.prompt_tokens_details.cached_tokens
                        self.context.metrics.cached(lease.cached_tokens, cached)
                    if params is None:
                        told = "prefill node %s hands no KV over; start it with a NixlConnector"
                        _log.warning(told, lease.node.url)
                    return params
            await self._note_failure(lease, failure)

    async def _decode(self, lease: Lease, body: bytes, headers: Mapping[str, str]) -> None:
        # Raises Refused; AttemptFailed while the client has nothing, else NodeFailed.
        job, client = self.job, self.context.node_client
        if job.stream:
            await self._decode_stream(lease, body, headers)
        else:
            answer = await whole_answer(client, lease, job.path, body, headers)
            plain, usage = plain_answer(answer)
            if self.timeline.prefilled is not None:
                self.timeline.note_tokens(self.timeline.prefilled)
                self.timeline.note_tokens(time.monotonic())
            self.prompt_tokens = usage.prompt_tokens
            self.output_tokens = usage.completion_tokens or 0
            self.reply.put(plain)
        if max(job.choices, job.best_of) == 1:
            self.context.placer.answered(
                job.model, self.output_tokens, self._prefix, self.prompt_tokens or 0
            )

    async def _decode_stream(self, lease: Lease, body: bytes, headers: Mapping[str, str]) -> None:
        client = self.context.node_client
        try:
            async with aclosing(_events(client, lease, self.job.path, body, headers)) as stream:
                async for events in stream:
                    if not self.output_tokens:
                        lease.answered()
                    self.timeline.note_tokens(time.monotonic())
                    self.output_tokens += events.count(b"data: {")
                    self.reply.put(events)
                    if (flow := self.reply.flow) is not None and flow.write_paused:
                        await flow.drain()
        except AttemptFailed as why:
            if not self.output_tokens:
                raise
            self._pool.blame(lease.node, f"a request failed on it: {why.detail}", time.monotonic())
            raise NodeFailed(
                "the decode node broke in the middle of the answer, which a vLLM node's answer "
                f"cannot be continued after; send the request again ({why.message})"
            ) from why

    @contextmanager
    def _lease(self, role: Role, tokens: int) -> Iterator[Lease]:
        tried = self._attempts[role].nodes()
        lease = self.context.placer.hold_alone(role, self.wanted(), tried, self._kind, tokens)
        self.nodes[role] = lease.node.url
        self.timeline.sent = self.timeline.sent or time.monotonic()
        try:
            yield lease
        finally:
            self._pool.give_back(lease)

    async def _note_failure(self, lease: Lease, why: AttemptFailed) -> None:
        # Raises what the client is told.
        attempts = self._attempts[lease.role]
        self.context.note_failure(self.job.id, lease, None, why)
        if why.lost and why.reached:
            await self.crashes.lost(lease)
        attempts.failed(lease.node, why)
        if not self._pool.up(lease.role, attempts.nodes(), self.job.model, self._kind):
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


async def _events(
    client: NodeClient, lease: Lease, path: str, body: bytes, headers: Mapping[str, str]
) -> AsyncGenerator[bytes]:
    """Yield a stream's whole events to its [DONE].

    Raises AttemptFailed, Refused; so does an error event.
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
            events = last + end
            at, error, status = error_in(events)
            if events[:at]:
                yield events[:at]
            if error is not None:
                raise error_of_status(status, error, None)
            if events.endswith(DONE):
                return
        raise AttemptFailed(f"the stream was cut before its end, {len(held)} bytes into an event")


def undivided_because(job: Job) -> str | None:
    """Return why the decode node must do the request alone, as a metric's label; None if not.

    One hand-over is for one sequence; and fetched KV has no logits for a prompt's
    log-probabilities.
    """
    values = {name: bytes(value).strip() for name, value in job.fields.items()}
    given = {name for name, value in values.items() if value not in (b"null", b"false")}
    prompt = values.get("prompt", b"")
    reasons = {
        "choices": max(job.choices, job.best_of) > 1,
        "beam_search": "use_beam_search" in given,
        "prompts": prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"["),
        "prompt_embeds": "prompt_embeds" in given,
        "prompt_logprobs": job.prompt_only
        or "prompt_logprobs" in given
        or {"echo", "logprobs"} <= given,
    }
    return next((why for why, so in reasons.items() if so), None)


def prefill_body(job: Job) -> bytes:
    """Return the body of the prefill request.

    Left out are fields that do not go with one token, and stops: older versions free KV of a
    stopped request at once.
    """
    fields: dict[str, Any] = dict(job.fields)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    for name in ("stream_options", "min_tokens", "stop_token_ids", "return_token_ids"):
        fields.pop(name, None)
    fields |= {"max_tokens": 1, "stream": False, "ignore_eos": True}
    return msgspec.json.encode(fields | {"kv_transfer_params": _ASK_TO_HOLD})


def decode_body(job: Job, params: msgspec.Raw | None) -> bytes:
    fields = dict(job.fields)
    fields.pop("kv_transfer_params", None)
    return msgspec.json.encode(
        fields if params is None else fields | {"kv_transfer_params": params}
    )


def handover_of(body: bytes) -> tuple[msgspec.Raw | None, _Usage]:
    """Return what a prefill node offers, None if it holds nothing. Raises AttemptFailed."""
    answer = _decoded(body)
    try:
        held = msgspec.json.decode(answer.kv_transfer_params, type=_Held).do_remote_prefill
    except MALFORMED:
        held = False
    return answer.kv_transfer_params if held else None, answer.usage or _Usage()


def plain_answer(body: bytes) -> tuple[bytes, _Usage]:
    """Return a decode node's whole answer without its KV fields. Raises AttemptFailed."""
    answer = _decoded(body)
    if bytes(answer.kv_transfer_params).strip() != b"null":
        # Addresses that a node offers to prefill nodes are no business of a client.
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        del fields["kv_transfer_params"]
        body = msgspec.json.encode(fields)
    return body, answer.usage or _Usage()


def _decoded(body: bytes) -> _Answer:
    try:
        return msgspec.json.decode(body, type=_Answer)
    except MALFORMED as why:
        raise AttemptFailed(f"the node's answer is malformed: {why}") from why


def error_in(events: bytes) -> tuple[int, ErrorBody | None, int]:
    """Return place, body and status of an error in whole events; the end and None without one."""
    found = _ERROR_EVENT.search(events)
    return (len(events), None, 200) if found is None else (found.start(), *parse_error(found[1]))
