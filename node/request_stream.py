"""Request streams (wire/frames.py) on a node: many requests over one connection.

KV events (wire/kv_events.py) are a request that ends with its router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.wire.errors import KvrelayError, NodeFailed, RequestBroke, RequestError
from kvrelay.wire.frames import (
    LEGS_MEDIA_TYPE,
    LEGS_VERSION_HEADER,
    MALFORMED,
    WINDOW_BYTES,
    Answer,
    Frame,
    FrameKind,
    Kind,
    MessageReader,
    Open,
    credit_of,
    frame_message,
    message,
)
from kvrelay.wire.kv_events import GPU, BlockHash, CacheChanges, all_held
from kvrelay.wire.ladder import History
from kvrelay.wire.outputs import Load
from kvrelay.wire.versions import LEGS

__all__ = ["KvEvents", "RequestStream", "RequestStreams", "Start", "check_version"]

Start = Callable[
    [str, Mapping[str, str], bytes], Awaitable[tuple[Load, AsyncGenerator[Frame, None]]]
]

_NOT_LAST = (FrameKind.TOKENS, FrameKind.TICKET)
_HEADER_BYTES = 1 << 16  # path and headers of a request, beside its body
_QUEUED = 1_024
"""Changes that wait for a router: 40 a second, and one with each ticket."""

log = logging.getLogger("kvrelay.node")


def check_version(headers: Mapping[str, str]) -> None:
    asked = headers.get(LEGS_VERSION_HEADER, "1")
    if not (asked.isascii() and asked.isdigit() and int(asked) in LEGS):
        raise RequestError(
            f"this node speaks version {LEGS} of the request stream, and was asked for "
            f"{asked[:20]!r}; the router and its nodes must be of one release, or of two that "
            f"follow each other"
        )


class KvEvents:
    """A record of what each medium of the prefix cache holds and held, and of its followers."""

    def __init__(self) -> None:
        self.history = History[BlockHash]()
        self.history.held[GPU] = {}
        self.followers: set[asyncio.Queue[bytes]] = set()
        """Their changes; an empty one tells a router that fell behind to begin anew."""

    def publish(self, changes: CacheChanges) -> None:
        news = changes.stored, changes.removed, time.monotonic()
        self.history.changed(changes.medium, *news, cleared=changes.cleared)
        packed = msgspec.msgpack.encode(changes)
        for queue in self.followers:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(b"")
            else:
                queue.put_nowait(packed)

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Yield all that is held, then each change; all again if the reader falls behind."""
        queue = asyncio.Queue[bytes](_QUEUED)
        self.followers.add(queue)
        try:
            while True:
                held = self.history.held.items()
                for part in [part for medium, names in held for part in all_held(names, medium)]:
                    yield Frame(FrameKind.TOKENS, msgspec.msgpack.encode(part))
                while packed := await queue.get():
                    yield Frame(FrameKind.TOKENS, packed)
        finally:
            self.followers.discard(queue)


class RequestStreams:
    def __init__(self, kv_events: KvEvents | None = None) -> None:
        self._kv_events = kv_events
        self._streams: set[RequestStream] = set()

    def open(self, start: Start, max_body_bytes: int) -> RequestStream:
        return RequestStream(start, max_body_bytes, self._streams)

    def running(self) -> int:
        """Return the requests that will end and have not, with those not yet tokenized."""
        followers = 0 if self._kv_events is None else len(self._kv_events.followers)
        return sum(stream.running() for stream in self._streams) - followers

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class _Credit:
    def __init__(self) -> None:
        self._bytes = WINDOW_BYTES
        self._more = asyncio.Event()

    def add(self, size: int) -> None:
        self._bytes += size
        self._more.set()

    async def spend(self, size: int) -> None:
        self._bytes -= size
        while self._bytes <= 0:
            self._more.clear()
            await self._more.wait()


class RequestStream(Response):
    """A connection, as the answer to its opening request; its end cancels all of its own."""

    def __init__(self, start: Start, max_body_bytes: int, streams: set[RequestStream]) -> None:
        super().__init__()
        self._start = start
        self._reader = MessageReader(max_body_bytes + _HEADER_BYTES)
        self._streams = streams
        self._requests: dict[int, tuple[_Credit, asyncio.Task[None]]] = {}
        self._out: list[bytes] = []
        self._wakeup = asyncio.Event()
        self._closed = False

    def running(self) -> int:
        return len(self._requests)

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.add(self)
        headers = [(b"content-type", LEGS_MEDIA_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._send(message(Kind.PONG))
        reading = asyncio.create_task(self._read(receive))
        try:
            while not self._closed:
                await self._wakeup.wait()
                self._wakeup.clear()
                # The frames of all requests in one step leave in one write.
                body = b"".join(self._out)
                self._out.clear()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            last = b"".join(self._out)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._streams.discard(self)
            tasks = [reading, *(task for _, task in self._requests.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _send(self, data: bytes) -> None:
        self._out.append(data)
        self._wakeup.set()

    async def _read(self, receive: Receive) -> None:
        try:
            while (event := await receive())["type"] == "http.request":
                for number, kind, body in self._reader.feed(event.get("body", b"")):
                    self._handle(number, kind, body)
                if not event.get("more_body", False):
                    return
        except NodeFailed as why:
            log.warning("a router's request stream is closed: %s", why)
        finally:
            self.close()

    def _handle(self, number: int, kind: int, body: memoryview) -> None:
        known = self._requests.get(number)
        if kind == Kind.PING:
            self._send(message(Kind.PONG))
        elif kind == Kind.OPEN and known is None:
            credit = _Credit()
            task = asyncio.create_task(self._serve(number, credit, bytes(body)))
            self._requests[number] = (credit, task)
            task.add_done_callback(lambda _: self._requests.pop(number, None))
        elif kind == Kind.CREDIT and known is not None:
            known[0].add(credit_of(body))
        elif kind == Kind.CANCEL and known is not None:
            known[1].cancel()

    async def _serve(self, number: int, credit: _Credit, body: bytes) -> None:
        try:
            load, frames = await self._start_request(body)
        except Exception as why:
            if not isinstance(why, KvrelayError):
                log.exception("request %d of a stream broke before it began", number)
                why = RequestBroke()
            self._answer(number, Answer(why.status, None, why.body(), why.retry_after_s))
            return
        self._answer(number, Answer(200, load))
        ended = False
        try:
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    ended = frame.kind not in _NOT_LAST
                    data = frame_message(number, frame)
                    self._send(data)
                    if not ended:
                        await credit.spend(len(data))
        except Exception:
            log.exception("request %d of a stream broke", number)
        if not ended:
            self._send(message(Kind.OVER, number))

    async def _start_request(self, body: bytes) -> tuple[Load, AsyncGenerator[Frame, None]]:
        try:
            opened = msgspec.msgpack.decode(body, type=Open)
        except MALFORMED as why:
            raise RequestError(f"the request is malformed: {why}") from why
        return await self._start(opened.path, opened.headers, opened.body)

    def _answer(self, number: int, answer: Answer) -> None:
        self._send(message(Kind.ANSWER, number, msgspec.msgpack.encode(answer)))
