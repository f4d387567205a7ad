"""The leg stream of a fake node: node/request_stream.py over aiohttp, its legs answered by the
node's script.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvrelay.node.request_stream import KvEvents, RequestStreams
from kvrelay.wire.errors import ErrorBody, KvrelayError, NodeFailed, NotFound
from kvrelay.wire.frames import LEGS_MEDIA_TYPE, Frame
from kvrelay.wire.kv_events import KV_EVENTS_PATH
from kvrelay.wire.outputs import Load

__all__ = ["Put", "serve_stream"]

_END = object()


class _Answered(KvrelayError):
    """What a script has answered instead of frames."""

    def __init__(self, answer: web.Response) -> None:
        body = answer.body
        assert isinstance(body, bytes)
        said = msgspec.json.decode(body) if body else {}
        self._error = msgspec.convert(
            said.get("error", {"message": "no", "type": "none"}), ErrorBody
        )
        super().__init__(self._error.message)
        self.status = answer.status
        after = answer.headers.get("retry-after")
        self.retry_after_s = None if after is None else int(after)

    def body(self) -> ErrorBody:
        return self._error


Put = Callable[..., Awaitable[None]]
"""Sends what a leg says: first the node's load, then frames. Returns when it was written."""
Leg = Callable[[dict[str, Any], dict[str, str], Put], Awaitable[web.StreamResponse | None]]
"""Runs a script for a body and headers."""


async def serve_stream(
    request: web.Request, leg: Leg, events: KvEvents | None = None
) -> web.StreamResponse:
    """Until the router has gone."""
    response = web.StreamResponse(headers={"content-type": LEGS_MEDIA_TYPE})

    async def begin(
        path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Load, AsyncGenerator[Frame, None]]:
        if path == KV_EVENTS_PATH:
            if events is None:
                raise NotFound("no such request, as a node without KV events says")
            return Load(), events.frames()
        said: asyncio.Queue[Any] = asyncio.Queue()

        async def put(*things: Any) -> None:
            for thing in things:
                said.put_nowait(thing)
            while (not said.empty() or stream._out) and not stream._closed:
                await asyncio.sleep(0)

        every = {name.lower(): value for name, value in {**request.headers, **headers}.items()}
        script = asyncio.ensure_future(leg(msgspec.json.decode(body), every, put))
        script.add_done_callback(lambda _: said.put_nowait(_END))
        try:
            load = await said.get()
        except asyncio.CancelledError:
            script.cancel()
            await asyncio.gather(script, return_exceptions=True)
            raise
        if load is _END:
            answer = script.result()
            raise (
                _Answered(answer)
                if isinstance(answer, web.Response)
                else NodeFailed("the script said nothing")
            )
        return load, _frames(
            script, said
        )  # None says nothing of the load, as HTTP without its header

    async def receive() -> dict[str, Any]:
        try:
            chunk = await request.content.readany()
        except ConnectionError:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            await response.prepare(request)
        elif message.get("body"):
            with contextlib.suppress(ConnectionError):
                await response.write(message["body"])

    stream = RequestStreams().open(begin, 1 << 20)
    await stream({"type": "http"}, receive, send)  # type: ignore[arg-type]
    return response


async def _frames(
    script: asyncio.Future[Any], said: asyncio.Queue[Any]
) -> AsyncGenerator[Frame, None]:
    try:
        while (frame := await said.get()) is not _END:
            yield frame
    finally:
        script.cancel()
        await asyncio.gather(script, return_exceptions=True)
