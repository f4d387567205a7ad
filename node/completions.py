"""Completions on a node: from a call to its frames, and frames as plain OpenAI answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from msgspec.structs import replace

from kvrelay.node.http_edge import authorize, client_left
from kvrelay.node.lifecycle import Node
from kvrelay.node.preprocess import prepare
from kvrelay.node.request_record import RequestRecord
from kvrelay.node.serving import Call
from kvrelay.openai_api.body import body_request_id
from kvrelay.openai_api.headers import safe_id, trace_headers
from kvrelay.openai_api.json_body import (
    check_node_body,
    check_shape,
    off_loop,
    read_body,
    unless_disconnected,
)
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.routes import body_excerpt
from kvrelay.openai_api.sse import joined_body, joined_end, summed_usage
from kvrelay.openai_api.stages import with_stages
from kvrelay.openai_api.types import AnyRequest
from kvrelay.openai_api.writer import AnswerWriter
from kvrelay.wire.engine_messages import Order
from kvrelay.wire.errors import DeadlineExceeded, KvrelayError, NotFound, Overloaded
from kvrelay.wire.frames import (
    Frame,
    FrameKind,
)
from kvrelay.wire.kv_events import KV_EVENTS_PATH
from kvrelay.wire.outputs import Finish, Load

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "complete",
    "read_request",
    "run_requests",
    "start_streamed",
]

log = logging.getLogger("kvrelay.node")

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
MAX_QUEUED = 1024
_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_SUBMITTED = Frame(FrameKind.TOKENS)

Frames = AsyncGenerator[Frame, None]
_Timed = Callable[[bytes, Frame], bytes]


async def read_request(node: Node, request: Request) -> bytes:
    """Return the body of an authorized request. Raises KvrelayError."""
    authorize(node.config.api_key, request)
    node.ready()
    body = await read_body(request, node.config.max_body_bytes)
    await off_loop(len(body), check_shape, body)
    return body


async def complete(node: Node, request: Request, body: bytes, *, chat: bool) -> Response:
    """Return the answer; errors before the first token are plain HTTP errors."""
    began = time.monotonic()
    given_id = request.headers.get("x-request-id") or await off_loop(
        len(body), body_request_id, body
    )
    call = Call(chat, body, safe_id(given_id), trace_headers(request.headers.get))
    started = await unless_disconnected(request, _start(node, call))
    if started is None:
        return client_left()
    requests, parsed, load, frames = started
    headers = {"x-request-id": call.id}

    def timed(payload: bytes, frame: Frame) -> bytes:
        if not parsed.include_metrics or frame.kind not in (FrameKind.END, FrameKind.HANDOVER):
            return payload
        stages = {**(frame.timing or {}), "total": (time.monotonic() - began) * 1e3}
        return with_stages(payload, stages, node.rungs(requests, began))

    first = await unless_disconnected(request, anext(frames))
    if first is None:
        await frames.aclose()
        return client_left()
    if first.kind is FrameKind.ERROR and first.error is not None:
        await frames.aclose()
        if first.status in (429, 503):
            headers["retry-after"] = str(load.retry_after_s)
        return Response(
            msgspec.json.encode({"error": first.error}), first.status, headers, "application/json"
        )
    if parsed.stream:
        events = _plain_events(first, frames, requests[0], timed)
        return StreamingResponse(
            events, media_type="text/event-stream", headers=headers | _SSE_HEADERS
        )
    answer = await unless_disconnected(request, _plain_body(first, frames, requests[0], timed))
    if answer is None:
        return client_left()
    status, content = answer
    return Response(content, status, headers, "application/json")


async def start_streamed(
    node: Node, path: str, headers: Mapping[str, str], body: bytes
) -> tuple[Load, Frames]:
    """Start a request of a stream; return the node's load and its frames. Raises KvrelayError."""
    if path == KV_EVENTS_PATH and node.kv_events is not None:
        return node.engine.load, node.kv_events.frames()
    if path not in (CHAT_PATH, COMPLETIONS_PATH):
        raise NotFound(f"there is no completion route {path} here")
    await off_loop(len(body), check_node_body, body, node.config.max_body_bytes)
    request_id = safe_id(headers.get("x-request-id"))
    call = Call(path == CHAT_PATH, body, request_id, trace_headers(headers.get))
    _, _, load, frames = await _start(node, call)
    return load, frames


async def _start(node: Node, call: Call) -> tuple[list[NodeRequest], AnyRequest, Load, Frames]:
    serving = node.ready()
    node.check_open()
    if node.engine.queue_depth() >= MAX_QUEUED:
        raise Overloaded(f"{MAX_QUEUED} requests are queued on this node; try again or add nodes")
    if node.config.log_bodies:
        log.info("%s body=%s", call.response_id, body_excerpt(call.body))
    requests, parsed = await prepare(serving, node.sandbox, call)
    node.ready()  # one that starts meanwhile would never hear of them
    frames = await run_requests(node, requests, call)
    load = replace(node.engine.load, leg=node.engine.submitted)
    return requests, parsed, load, frames


async def run_requests(node: Node, requests: Sequence[NodeRequest], call: Call) -> Frames:
    """Submit the requests of a call; return the frames of its one answer.

    Raises EngineDead, Overloaded.
    """
    parts = [_run(node, request, call) for request in requests]
    for part in parts:
        await anext(part)
    return parts[0] if len(parts) == 1 else _join_frames(parts, requests[0].writer)


async def _run(node: Node, request: NodeRequest, call: Call) -> Frames:
    """Yield frames, errors as an ERROR frame; closing it aborts the request.

    The first frame says that the engine has the request: only a generator that has begun is ever
    closed.
    """
    limit_s = node.config.request_deadline_s
    updates = node.engine.start_requests(request.submits, limit_s)
    if request.unneeded is not None:
        node.engine.give_up(request.unneeded)
    record = RequestRecord(request, call, node.role, node.metrics, node.tracing)
    error: str | None = None
    try:
        record.submit()
        yield _SUBMITTED
        for opening in request.opening_frames(node.engine.load):
            yield opening
        while request.finish is None:
            update, load = await updates.next()
            record.update(update)
            for frame in request.frames(update, load):
                yield frame
            if request.over(update.request_id):
                updates.abort(update.request_id)
    except KvrelayError as why:
        error = why.message
        yield request.error(why)
    except TimeoutError:
        error = f"not done within {limit_s:g} s"
        yield request.error(
            DeadlineExceeded(
                f"the request was {error}; ask for fewer tokens or raise request_deadline_s"
            )
        )
    finally:
        updates.close()
        last = record.last
        if last is not None and last.held is not None and request.finish is Finish.STOP:
            node.engine.send(
                Order("release", last.request_id)
            )  # a stop string ended it: no decode node will come
        record.close(error, node.rungs([request], record.began))


_Queue = asyncio.Queue[tuple[int, Frame | None]]


async def _join_frames(parts: Sequence[Frames], writer: AnswerWriter) -> Frames:
    """Yield the frames of all parts as they come, until the last END or the first ERROR."""
    queue: _Queue = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(at, part, queue)) for at, part in enumerate(parts)]
    ends: dict[int, Frame] = {}
    try:
        while len(ends) < len(parts):
            at, frame = await queue.get()
            if frame is None:
                await tasks[at]
                continue
            if frame.kind is FrameKind.END:
                ends[at] = frame
                if len(ends) == len(parts):
                    payload = _joined_end(frame, [ends[each] for each in sorted(ends)], writer)
                    yield replace(frame, payload=payload)
                    return
                payload = frame.payload if writer.streams else b""
                frame = replace(frame, kind=FrameKind.TOKENS, payload=payload)
            yield frame
            if frame.kind is FrameKind.ERROR:
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _joined_end(last: Frame, ends: Sequence[Frame], writer: AnswerWriter) -> bytes:
    usage = summed_usage([(*(each.usage or (0, 0, 0)), each.written) for each in ends])
    if not writer.streams:
        return joined_body([each.payload for each in ends], usage)
    return last.payload + joined_end(
        usage,
        writer.response_id,
        writer.created,
        writer.model,
        include_usage=writer.include_usage,
    )


async def _pump(at: int, part: Frames, queue: _Queue) -> None:
    # Iterates and closes in one task: a part may hold a deadline that belongs to its task.
    try:
        async with contextlib.aclosing(part):
            async for frame in part:
                queue.put_nowait((at, frame))
    finally:
        queue.put_nowait((at, None))


async def _plain_events(
    first: Frame, frames: Frames, request: NodeRequest, timed: _Timed
) -> AsyncIterator[bytes]:
    frame: Frame | None = first
    async with contextlib.aclosing(frames):
        while frame is not None:
            cut = request.writer.cut() if frame.kind is FrameKind.HANDOVER else b""
            yield timed(frame.payload + cut, frame)
            frame = await anext(frames, None)


async def _plain_body(
    first: Frame, frames: Frames, request: NodeRequest, timed: _Timed
) -> tuple[int, bytes]:
    async with contextlib.aclosing(frames):
        frame = first
        while frame.kind in (FrameKind.TOKENS, FrameKind.TICKET):
            frame = await anext(frames)
    if frame.kind is FrameKind.ERROR:
        return frame.status, msgspec.json.encode({"error": frame.error})
    payload = frame.payload
    if frame.kind is FrameKind.HANDOVER and frame.params is not None:
        # A third-party proxy delivers nothing itself: the decode node emits the first token too.
        payload = request.writer.cut(replace(frame.params, sent_text=None))
    return 200, timed(payload, frame)
