"""vLLM's nodes over HTTP: health as a report of ours, answers as our frames.

The contract is that of vLLM's NixlConnector: a prefill request asks for one token with
`do_remote_decode`; the answer's `kv_transfer_params` go to the decode node unchanged, which draws
the token again.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Annotated

import aiohttp
import msgspec

from kvrelay.openai_api.sse import DONE
from kvrelay.router.nodes.node import HealthReport, Node, NodeKind, VllmHandover
from kvrelay.router.transport.node_stream import (
    AttemptFailed,
    OnFrame,
    error_of_status,
    parse_error,
)
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ErrorBody
from kvrelay.wire.frames import MALFORMED, Frame, FrameKind
from kvrelay.wire.outputs import Load

__all__ = [
    "deliver_answer",
    "end_frame",
    "error_in",
    "handover_frame",
    "report_of",
    "vllm_report",
]

Fetch = Callable[[str], Awaitable[tuple[int, bytes]]]

_MAX_ANSWER_BYTES = 64 << 20
# Both forms in which versions begin an error event; quotes inside strings are escaped.
_ERROR_EVENT = re.compile(rb'data: (\{"(?:error"|object": ?"error")[^\n]*)')
_METRICS = re.compile(
    rb"(?m)^(vllm:num_requests_(?:running|waiting)|process_start_time_seconds)(?:\{[^\n]*\})? "
    rb"(\d+(?:\.\d+)?(?:e[-+]?\d\d?)?)$"
)


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


async def deliver_answer(
    answer: aiohttp.ClientResponse, role: Role, on_frame: OnFrame, *, stream: bool
) -> FrameKind:
    """Deliver a 200 answer as frames, and return the kind of the last.

    Their tokens are zeros, about one for each event of a stream. Raises AttemptFailed, Refused.
    """
    if stream and role is Role.DECODE:
        return await _deliver_events(answer, on_frame)
    held = bytearray()
    while chunk := await answer.content.readany():
        held += chunk
        if len(held) > _MAX_ANSWER_BYTES:
            raise AttemptFailed(f"the node's answer is longer than {_MAX_ANSWER_BYTES} bytes")
    body = bytes(held)
    frame = end_frame(body) if role is Role.DECODE else handover_frame(body, stream=stream)
    on_frame(frame)
    return frame.kind


async def _deliver_events(answer: aiohttp.ClientResponse, on_frame: OnFrame) -> FrameKind:
    if answer.content_type != "text/event-stream":
        raise AttemptFailed(f"the node answered a stream with {answer.content_type}")
    held = b""
    while chunk := await answer.content.readany():
        last, end, held = (held + chunk).rpartition(b"\n\n")
        if len(held) > _MAX_ANSWER_BYTES:
            raise AttemptFailed(f"the node sent an event of more than {_MAX_ANSWER_BYTES} bytes")
        events = last + end
        at, error, status = error_in(events)
        over = error is None and events.endswith(DONE)
        if payload := events[:at]:
            kind = FrameKind.END if over else FrameKind.TOKENS
            drain = on_frame(Frame(kind, payload, [0] * payload.count(b"data: {")))
            if drain is not None:
                await drain()
        if error is not None:
            raise error_of_status(status, error, None)
        if over:
            return FrameKind.END
    raise AttemptFailed(f"the stream was cut before its end, {len(held)} bytes into an event")


def handover_frame(body: bytes, *, stream: bool) -> Frame:
    """Return what a prefill node offers; it may hold nothing. Raises AttemptFailed."""
    answer, usage = _decoded(body)
    try:
        held = msgspec.json.decode(answer.kv_transfer_params, type=_Held).do_remote_prefill
    except MALFORMED:
        held = False
    params = VllmHandover(
        remote_engine_id="vllm" if held else None,
        own=answer.kv_transfer_params,
        cached_tokens=usage[2],
    )
    # A client of a stream sees no token yet.
    return Frame(FrameKind.HANDOVER, token_ids=[] if stream else [0], params=params, usage=usage)


def end_frame(body: bytes) -> Frame:
    """Return a decode node's whole answer without its KV fields. Raises AttemptFailed."""
    answer, usage = _decoded(body)
    if bytes(answer.kv_transfer_params).strip() != b"null":
        # Addresses that a node offers to prefill nodes are no business of a client.
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        del fields["kv_transfer_params"]
        body = msgspec.json.encode(fields)
    return Frame(FrameKind.END, body, [0], usage=usage)


def _decoded(body: bytes) -> tuple[_Answer, tuple[int, int, int]]:
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except MALFORMED as why:
        raise AttemptFailed(f"the node's answer is malformed: {why}") from why
    usage = answer.usage or _Usage()
    cached = (usage.prompt_tokens_details or _Details()).cached_tokens
    return answer, (usage.prompt_tokens, usage.completion_tokens or 0, cached)


def error_in(events: bytes) -> tuple[int, ErrorBody | None, int]:
    """Return place, body and status of an error in whole events; the end and None without one."""
    found = _ERROR_EVENT.search(events)
    return (len(events), None, 200) if found is None else (found.start(), *parse_error(found[1]))


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def vllm_report(node: Node, fetch: Fetch) -> HealthReport | str:
    """Return the report of a vLLM node, or why it takes no requests."""
    if node.kind is NodeKind.KVRELAY:  # not known yet
        status, body = await fetch("/version")
        if status != 200 or b'"version"' not in body:
            return (
                "its /health is empty and it has no /version: it is neither a node of ours nor "
                "of vLLM"
            )
    (status, models), (metrics_status, metrics) = await asyncio.gather(
        fetch("/v1/models"), fetch("/metrics")
    )
    if status != 200:
        return f"its /v1/models answers {status}" + (
            "; give the router its key" if status in (401, 403) else ""
        )
    return report_of(node.role, models, metrics if metrics_status == 200 else b"")


def report_of(role: Role, models: bytes, metrics: bytes) -> HealthReport | str:
    """Return the report that two answers amount to, or what is wrong with them. Pure.

    `role` is as listed: a vLLM node does not tell. Without metrics its load is unknown.
    """
    try:
        cards = msgspec.json.decode(models, type=_Cards).data
    except MALFORMED as why:
        return f"its /v1/models is malformed: {why}"
    base = next((card for card in cards if card.parent is None), None)
    if base is None:
        return "its /v1/models names no model"
    told = defaultdict[bytes, float](float)
    for name, value in _METRICS.findall(metrics):
        told[name] += float(value)
    running, waiting = (int(told[b"vllm:num_requests_" + of]) for of in (b"running", b"waiting"))
    return HealthReport(
        role=role,
        model=base.id,
        max_model_len=base.max_model_len or 0,
        # A restart changes this time.
        generation=str(told[b"process_start_time_seconds"] or ""),
        # On a prefill node each is a prompt still to be computed.
        load=Load(0, running + waiting) if role is Role.PREFILL else Load(running, waiting),
        adapters=[card.id for card in cards if card.id != base.id],
        kind=NodeKind.VLLM,
    )
