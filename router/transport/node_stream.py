"""One connection to each node that carries all of its requests (wire/frames.py).

Frames reach their request without a task between. A client that does not read keeps at most a
window of its own frames, and holds up no other.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvrelay.router.nodes.node import HealthReport, Lease, Node
from kvrelay.router.transport.node_errors import (
    LOST,
    AttemptFailed,
    OnFrame,
    deliver_last,
    error_of_status,
)
from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.frames import (
    HEAD_BYTES,
    LEGS_MEDIA_TYPE,
    LEGS_PATH,
    LEGS_VERSION_HEADER,
    MALFORMED,
    WINDOW_BYTES,
    Answer,
    Frame,
    FrameKind,
    Kind,
    MessageReader,
    Open,
    credit,
    frame_of,
    message,
)

__all__ = ["NodeStream", "open_stream"]

_LARGE_READ_BYTES = 32 << 10
_CREDIT_BYTES = WINDOW_BYTES // 2  # a short answer never returns credit
_NOT_LAST = (FrameKind.TOKENS, FrameKind.TICKET)
_FRAME = int(Kind.FRAME)  # an enum's member costs a look-up each time


class _StreamedRequest:
    def __init__(
        self, number: int, lease: Lease, on_frame: OnFrame, send: Callable[[bytes], None]
    ) -> None:
        self.number = number
        self.result: asyncio.Future[FrameKind] = asyncio.get_running_loop().create_future()
        self.over = False  # the node will send nothing more
        self.lease = lease
        self._on_frame = on_frame
        self._send = send
        self._uncredited_bytes = 0
        self._backlog: deque[tuple[Frame, int]] | None = None  # None while the client reads
        self._catching_up: asyncio.Task[None] | None = None

    def receive(self, frame: Frame, size: int) -> None:
        if self._backlog is not None:
            self._backlog.append((frame, size))
            return
        room = self._deliver(frame)
        if room is not None:
            self._backlog = deque()
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up(room, size))
            return
        self._credit(size)

    def fail(self, why: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(why)

    def close(self) -> None:
        if self._catching_up is not None:
            self._catching_up.cancel()

    def _deliver(self, frame: Frame) -> Awaitable[None] | None:
        if self.result.done():
            return None
        try:
            if frame.load is not None:
                self.lease.note_load(frame.load)
            if frame.kind in _NOT_LAST:
                return self._on_frame(frame)
            self.over = True
            self.result.set_result(deliver_last(frame, self._on_frame))
        except Exception as why:  # noqa: BLE001 - raised in the task that runs the request
            self.fail(why)
        return None

    async def _catch_up(self, room: Awaitable[None], size: int) -> None:
        assert self._backlog is not None
        await room
        self._credit(size)
        while self._backlog:
            frame, size = self._backlog.popleft()
            more = self._deliver(frame)
            if more is not None:
                await more
            self._credit(size)
        self._backlog = None

    def _credit(self, size: int) -> None:
        self._uncredited_bytes += size
        if self._uncredited_bytes >= _CREDIT_BYTES and not self.over:
            self._send(credit(self.number, self._uncredited_bytes))
            self._uncredited_bytes = 0


class NodeStream(asyncio.Protocol):
    """A connection to one process of a node, usable once `ready` is set."""

    def __init__(self, head: bytes, generation: str = "") -> None:
        self.generation = generation
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.broken = False
        self._unsent: list[bytes] = []
        self._head = head
        self._requests: dict[int, _StreamedRequest] = {}
        self._numbers = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._reader = MessageReader()
        self._pinged: float | None = None

    async def run(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str], on_frame: OnFrame
    ) -> FrameKind:
        """Run a request to its last frame. Raises AttemptFailed, Refused, what `on_frame` raises.

        Cancelling aborts the request on the node.
        """
        self._numbers += 1
        number = self._numbers
        request = self._requests[number] = _StreamedRequest(number, lease, on_frame, self._send)
        opening = msgspec.msgpack.encode(Open(path, dict(headers), body))
        self._send(message(Kind.OPEN, number, opening))
        lease.cut = lambda: request.fail(AttemptFailed(LOST, lost=True))
        try:
            return await request.result
        finally:
            lease.cut = None
            request.close()
            del self._requests[number]
            if not request.over:
                self._send(message(Kind.CANCEL, number))

    def ping(self, now: float, deadline_s: float) -> None:
        """Ping the node, or give the stream up if the last ping is unanswered too long."""
        if self._pinged is None:
            self._pinged = now
            self._send(message(Kind.PING))
        elif now - self._pinged > deadline_s:
            self.give_up(
                "the connection failed",
                f"the request stream was silent for {now - self._pinged:.1f} s",
            )

    def give_up(self, why: str, detail: str = "") -> None:
        if self.broken:
            return
        self.broken = True
        self._transport.abort()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(detail or why))
        for request in self._requests.values():
            request.fail(AttemptFailed(why, detail=detail, lost=True))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._transport.write(self._head)

    def connection_lost(self, exc: Exception | None) -> None:
        cut = f"the request stream was cut, {self._reader.pending} bytes into a message"
        self.give_up("the connection failed", cut)

    def data_received(self, data: bytes) -> None:
        if len(data) >= _LARGE_READ_BYTES:
            # Otherwise the event loop reads on while there is data, and health checks wait.
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)
        requests = self._requests
        try:
            self._parser.feed_data(data)
            for number, kind, body in self._reader.feed(b"".join(self._parts)):
                if kind == _FRAME:
                    request = requests.get(number)
                    if request is not None:  # else it was cancelled
                        request.receive(frame_of(body), HEAD_BYTES + len(body))
                else:
                    self._receive_other(number, kind, body)
        except (httptools.HttpParserError, NodeFailed, *MALFORMED) as why:
            self.give_up(
                "the node's answer is malformed", f"the request stream is malformed: {why}"
            )
        self._parts.clear()

    def _read_on(self) -> None:
        if not self.broken:
            self._transport.resume_reading()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.give_up("the connection failed", f"the node answers {status} to {LEGS_PATH}")

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self.give_up("the connection failed", "the node ended the request stream")

    def _receive_other(self, number: int, kind: int, body: memoryview) -> None:
        request = self._requests.get(number)
        if request is None:
            if kind == Kind.PONG:
                self._pinged = None
                if not self.ready.done():
                    self.ready.set_result(None)
        elif kind == Kind.ANSWER:
            answer = msgspec.msgpack.decode(body, type=Answer)
            if answer.load is not None:
                request.lease.note_load(answer.load)
            if answer.status != 200:
                request.over = True
                request.fail(error_of_status(answer.status, answer.error, answer.retry_after_s))
        elif kind == Kind.OVER:
            request.over = True
            request.fail(AttemptFailed("the answer was cut before its end"))

    def _send(self, data: bytes) -> None:
        # One write per turn of the event loop.
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        data = b"".join(self._unsent)
        self._unsent.clear()
        if not self.broken:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def open_stream(
    node: Node, report: HealthReport, headers: Mapping[str, str], tls: ssl.SSLContext | bool
) -> NodeStream:
    """Connect to a node and return once it answers there. Raises OSError."""
    at = urlsplit(node.url)
    secure = at.scheme == "https"
    every = {
        "host": at.netloc,
        "content-type": LEGS_MEDIA_TYPE,
        "transfer-encoding": "chunked",
        LEGS_VERSION_HEADER: str(report.leg_version),
        **headers,
    }
    lines = [f"POST {at.path}{LEGS_PATH} HTTP/1.1", *(f"{k}: {v}" for k, v in every.items())]
    head = "".join(f"{line}\r\n" for line in (*lines, "")).encode()
    _, stream = await asyncio.get_running_loop().create_connection(
        lambda: NodeStream(head, report.generation),
        at.hostname or "",
        at.port or (443 if secure else 80),
        ssl=tls if secure else None,
    )
    try:
        await stream.ready
    except BaseException:
        stream.give_up("the connection failed")
        raise
    return stream
