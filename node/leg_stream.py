"""The node's end of leg streams (wire/leg_stream.py): legs that come over one connection, each as a
task of its own.

Owns the connection's messages and how many bytes of each leg are on their way. What a leg is, and
what it answers, is told by the caller's `begin`, which serves legs over HTTP too. A stream that
ends takes all of its legs with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.wire.errors import KvrelayError, NodeFailed, RequestBroke, RequestError
from kvrelay.wire.frames import MALFORMED, Frame, FrameKind
from kvrelay.wire.leg_stream import (
    LEGS_MEDIA_TYPE,
    LEGS_VERSION_HEADER,
    WINDOW_BYTES,
    Answer,
    Kind,
    MessageReader,
    Open,
    credit_of,
    frame_message,
    message,
)
from kvrelay.wire.outputs import Load
from kvrelay.wire.versions import LEGS

__all__ = ["Begin", "LegStream", "LegStreams", "check_version"]

Begin = Callable[
    [str, Mapping[str, str], bytes], Awaitable[tuple[Load, AsyncGenerator[Frame, None]]]
]
"""Given path, headers and body of a leg: the node's load and the leg's frames. Raises KvrelayError."""

_GOES_ON = (FrameKind.TOKENS, FrameKind.TICKET)

log = logging.getLogger("kvrelay.node")


def check_version(headers: Mapping[str, str]) -> None:
    """Raise RequestError for a leg stream of a version that is not spoken here."""
    asked = headers.get(LEGS_VERSION_HEADER, "1")
    if not (asked.isascii() and asked.isdigit() and int(asked) in LEGS):
        raise RequestError(
            f"this node speaks version {LEGS} of the leg stream, and was asked for "
            f"{asked[:20]!r}; the router and its "
            "nodes must be of one release, or of two that follow each other"
        )


class LegStreams:
    """All leg streams of a node."""

    def __init__(self) -> None:
        self._open: set[LegStream] = set()

    def stream(self, begin: Begin, max_body_bytes: int) -> LegStream:
        """The answer to a request for one more. `max_body_bytes` of a leg."""
        return LegStream(begin, max_body_bytes, self._open)

    def close(self) -> None:
        """End them all: the node ends."""
        for stream in self._open:
            stream.close()


class _Leg:
    """What a leg may still send."""

    def __init__(self) -> None:
        self.credit = WINDOW_BYTES
        self.more = asyncio.Event()

    async def sent(self, size: int) -> None:
        """Count bytes; wait until there is credit for more."""
        self.credit -= size
        while self.credit <= 0:
            self.more.clear()
            await self.more.wait()


class LegStream(Response):
    """One connection, as the answer to the request that has opened it."""

    def __init__(self, begin: Begin, max_body_bytes: int, among: set[LegStream]) -> None:
        super().__init__()
        self._begin = begin
        # Beside its body a leg has a path and a few headers.
        self._reader = MessageReader(max_body_bytes + (1 << 16))
        self._among = among
        self._legs: dict[int, tuple[_Leg, asyncio.Task[None]]] = {}
        self._out: list[bytes] = []
        self._news = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        """End it, with all of its legs."""
        self._closed = True
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the router has gone, or `close`."""
        self._among.add(self)
        headers = [(b"content-type", LEGS_MEDIA_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._say(message(Kind.PONG))
        reading = asyncio.create_task(self._read(receive))
        try:
            while not self._closed:
                await self._news.wait()
                self._news.clear()
                # All that the legs have said since: a step's frames leave in one write.
                body = b"".join(self._out)
                self._out.clear()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._among.discard(self)
            tasks = [reading, *(task for _, task in self._legs.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _say(self, said: bytes) -> None:
        self._out.append(said)
        self._news.set()

    async def _read(self, receive: Receive) -> None:
        try:
            while (event := await receive())["type"] == "http.request":
                for leg, kind, body in self._reader.feed(event.get("body", b"")):
                    self._hear(leg, kind, body)
                if not event.get("more_body", False):
                    return
        except NodeFailed as why:
            log.warning("a router's leg stream is given up: %s", why)
        finally:
            self.close()

    def _hear(self, number: int, kind: int, body: memoryview) -> None:
        known = self._legs.get(number)
        if kind == Kind.PING:
            self._say(message(Kind.PONG))
        elif kind == Kind.OPEN and known is None:
            leg = _Leg()
            task = asyncio.create_task(self._serve(number, leg, bytes(body)))
            self._legs[number] = (leg, task)
            task.add_done_callback(lambda _: self._legs.pop(number, None))
        elif kind == Kind.CREDIT and known is not None:
            known[0].credit += credit_of(body)
            known[0].more.set()
        elif kind == Kind.CANCEL and known is not None:
            known[1].cancel()

    async def _serve(self, number: int, leg: _Leg, body: bytes) -> None:
        """One leg, from its bytes to its last frame."""
        try:
            load, frames = await self._begun(body)
        except KvrelayError as why:
            self._say(_answer(number, Answer(why.status, None, why.body(), why.retry_after_s)))
            return
        except Exception:
            log.exception("leg %d broke before it began", number)
            broken = RequestBroke()
            self._say(_answer(number, Answer(broken.status, None, broken.body())))
            return
        self._say(_answer(number, Answer(200, load)))
        ended = False
        try:
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    ended = frame.kind not in _GOES_ON
                    said = frame_message(number, frame)
                    self._say(said)
                    if not ended:
                        await leg.sent(len(said))
        except Exception:
            log.exception("leg %d broke", number)
        if not ended:
            self._say(message(Kind.OVER, number))

    async def _begun(self, body: bytes) -> tuple[Load, AsyncGenerator[Frame, None]]:
        try:
            asked = msgspec.msgpack.decode(body, type=Open)
        except MALFORMED as why:
            raise RequestError(f"the leg is malformed: {why}") from why
        return await self._begin(asked.path, asked.headers, asked.body)


def _answer(number: int, answer: Answer) -> bytes:
    return message(Kind.ANSWER, number, msgspec.msgpack.encode(answer))
