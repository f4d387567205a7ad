"""One connection to each node that carries all of its requests (wire/frames.py).

Frames reach their request without a task between. A client that does not read has at most a window
of its own frames waiting, and holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvrelay.router.nodes.node import HealthReport, Lease, Node
from kvrelay.wire.errors import (
    Draining,
    EngineDead,
    ErrorBody,
    KvNotLoaded,
    KvrelayError,
    NodeFailed,
    RequestBroke,
)
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
from kvrelay.wire.outputs import Load

__all__ = [
    "LOST",
    "AttemptFailed",
    "Drain",
    "NodeStream",
    "OnFrame",
    "Refused",
    "deliver_last",
    "error_of_status",
    "open_stream",
    "parse_error",
    "parse_message",
]


LOST = "the node stopped answering health checks, was restarted, or says that its engine is dead"

Drain = Callable[[], Awaitable[None]]
OnFrame = Callable[[Frame], Drain | None]
"""Called with each frame; returns what to wait for before the node may send much more."""

_LARGE_READ_BYTES = 32 << 10
_CREDIT_BYTES = WINDOW_BYTES // 2  # a short answer never returns credit
_NOT_LAST = (FrameKind.TOKENS, FrameKind.TICKET)
_FRAME = int(Kind.FRAME)  # an enum's member costs a look-up each time

_log = logging.getLogger("kvrelay.router")


class _ErrorAnswer(msgspec.Struct):
    # Our nodes and newer vLLM wrap it in `error`.
    error: _ErrorAnswer | None = None
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class Refused(KvrelayError):
    """A node's 4xx or KvNotLoaded, which the client sees unchanged; no fault of the node."""

    def __init__(
        self, status: int, error: ErrorBody, retry_after_s: int | None, kv_error: str = ""
    ) -> None:
        super().__init__(error.message, param=error.param)
        self.status, self.retry_after_s, self.kv_error = status, retry_after_s, kv_error
        self._error = error

    def body(self) -> ErrorBody:
        return self._error


class AttemptFailed(NodeFailed):
    """A request that a node broke: no connection, a 5xx, or a cut stream."""

    reading = False
    """The node failed while reading the request; another will show whose fault that is."""
    draining = False
    """The node takes no new requests, and is not to blame."""

    def __init__(
        self,
        message: str,
        status: int = NodeFailed.status,
        retry_after_s: int | None = None,
        detail: str = "",
        *,
        lost: bool = False,
        reached: bool = True,
    ) -> None:
        """`detail` goes to the log only: it may name addresses.

        `lost`: the process or its engine seems gone. `reached`: it may have had the request.
        """
        super().__init__(message)
        self.lost, self.reached = lost, reached
        self.status, self.retry_after_s, self.detail = status, retry_after_s, detail or message


def deliver_last(frame: Frame, on_frame: OnFrame) -> FrameKind:
    """Deliver a request's last frame, and return its kind.

    Raises Refused, AttemptFailed for an error or a malformed hand-over.
    """
    if frame.kind is FrameKind.ERROR:
        retry_after_s = (frame.load or Load()).retry_after_s if frame.status in (429, 503) else None
        raise error_of_status(
            frame.status, frame.error, retry_after_s, kv_error=frame.kv_error, reached=True
        )
    if frame.kind is FrameKind.HANDOVER and frame.params is None:
        raise AttemptFailed("the node sent a hand-over without its parameters")
    on_frame(frame)
    return frame.kind


def error_of_status(
    status: int,
    error: ErrorBody | None,
    retry_after_s: int | None,
    *,
    kv_error: str = "",
    reached: bool = False,
) -> Refused | AttemptFailed:
    """Return the error that a status other than 200 means."""
    error = error or ErrorBody(f"a node answered {status} without a reason", NodeFailed.type)
    if status in (401, 403):
        # The nodes' key is the operator's mistake.
        _log.error(
            "a node refused the router's key; give the router the nodes' key as node_api_key"
        )
        wrong_key = ErrorBody("a node refused the router's key", NodeFailed.type)
        return Refused(NodeFailed.status, wrong_key, None)
    if 400 <= status < 500 or error.code == KvNotLoaded.code:
        return Refused(status, error, retry_after_s, kv_error)
    failed = AttemptFailed(
        error.message,
        max(status, 500),
        retry_after_s,
        lost=error.code == EngineDead.code,
        reached=reached,
    )
    failed.draining, failed.reading = error.code == Draining.code, error.code == RequestBroke.code
    return failed


def parse_message(body: bytes) -> str:
    return _parsed(body).message or "no message"


def parse_error(body: bytes, status: int = 500) -> tuple[ErrorBody, int]:
    """Return the error in an answer, and its status: `status` unless the body names one."""
    parsed = _parsed(body)
    own = parsed.code if isinstance(parsed.code, int) and 400 <= parsed.code < 600 else status
    message = parsed.message or f"a node answered {status} without a reason"
    error = ErrorBody(message, parsed.type or NodeFailed.type, parsed.param, parsed.code)
    return error, own


def _parsed(body: bytes) -> _ErrorAnswer:
    try:
        answer = msgspec.json.decode(body, type=_ErrorAnswer)
    except MALFORMED:
        return _ErrorAnswer()
    return answer.error or answer


@dataclass(eq=False, slots=True)
class _StreamedRequest:
    number: int
    lease: Lease
    _on_frame: OnFrame
    _send: Callable[[bytes], None]
    result: asyncio.Future[FrameKind] = field(default_factory=asyncio.Future)
    over: bool = False
    """The node will send nothing more."""
    _uncredited_bytes: int = 0
    _draining: asyncio.Task[None] | None = None
    """Set while the client does not read."""

    def receive(self, frame: Frame, size: int) -> None:
        self._uncredited_bytes += size
        drain = self._deliver(frame)
        if self._draining is None:
            if drain is None:
                self._credit()
            else:
                self._draining = asyncio.create_task(self._credit_after(drain))

    def fail(self, why: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(why)

    def close(self) -> None:
        del self.result  # the frames of its error have this request
        if self._draining is not None:
            self._draining.cancel()

    def _deliver(self, frame: Frame) -> Drain | None:
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

    async def _credit_after(self, drain: Drain) -> None:
        await drain()
        self._draining = None
        self._credit()

    def _credit(self) -> None:
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
    lines = "".join(f"{name}: {value}\r\n" for name, value in every.items())
    head = f"POST {at.path}{LEGS_PATH} HTTP/1.1\r\n{lines}\r\n".encode()
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
