"""The router's end of leg streams (wire/leg_stream.py): one connection for each node, and all legs
there.

A frame goes from the connection to whoever takes it without a task in between. A leg whose client
does not read keeps its own frames, at most a window of them, and nobody else's. What a stream
cannot do (the node speaks none, it is broken and not mended yet, its node does not read) is left to
HTTP, so a stream that is missing costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvrelay.router.client_connection import send_written
from kvrelay.router.nodes.node import HealthReport, Lease, Node
from kvrelay.router.transport.node_errors import LOST, AttemptFailed, TakeFrame, ending, refusal
from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.frames import MALFORMED, Frame, FrameKind
from kvrelay.wire.leg_stream import (
    HEAD_BYTES,
    LEGS_MEDIA_TYPE,
    LEGS_PATH,
    LEGS_VERSION_HEADER,
    WINDOW_BYTES,
    Answer,
    Kind,
    MessageReader,
    Open,
    credit,
    frame_of,
    message,
)

__all__ = ["NodeStream", "NodeStreams"]

_WRITE_BUFFER_BYTES = 1 << 20
_MUCH_BYTES = 32 << 10
_LONGEST_BACKOFF_S = 30.0
_SILENT_CHECKS = 3  # as many as a node may miss before its legs are cut
_CREDIT_BYTES = WINDOW_BYTES // 2  # is given back at once: a short answer needs none
_GOES_ON = (FrameKind.TOKENS, FrameKind.TICKET)
_FRAME = int(Kind.FRAME)  # an enum's member is looked up in its class each time

_log = logging.getLogger("kvrelay.router")


class _Leg:
    """One leg on a stream. `ended` is its last frame's kind, or what went wrong."""

    def __init__(
        self, number: int, lease: Lease, take: TakeFrame, say: Callable[[bytes], None]
    ) -> None:
        """`say` tells the node."""
        self.number = number
        self.ended: asyncio.Future[FrameKind] = asyncio.get_running_loop().create_future()
        self.over = False
        """The node will say nothing more."""
        self.lease = lease
        self._take = take
        self._say = say
        self._taken = 0
        self._behind: deque[tuple[Frame, int]] | None = None
        """Frames that wait for the client to read; None while it does."""
        self._catching_up: asyncio.Task[None] | None = None

    def hear(self, frame: Frame, size: int) -> None:
        """A frame came, in a message of so many bytes."""
        if self._behind is not None:
            self._behind.append((frame, size))
            return
        room = self._deliver(frame)
        if room is not None:
            self._behind = deque()
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up(room, size))
            return
        self._count(size)

    def fail(self, why: Exception) -> None:
        """It broke."""
        if not self.ended.done():
            self.ended.set_exception(why)

    def leave(self) -> None:
        """Nobody waits for it any more."""
        if self._catching_up is not None:
            self._catching_up.cancel()

    def _deliver(self, frame: Frame) -> Awaitable[None] | None:
        if self.ended.done():
            return None
        try:
            if frame.load is not None:
                self.lease.note_load(frame.load)
            if frame.kind in _GOES_ON:
                return self._take(frame)
            self.over = True
            self.ended.set_result(ending(frame, self._take))
        except Exception as why:  # noqa: BLE001 - whoever waits for the leg gets it
            self.fail(why)
        return None

    async def _catch_up(self, room: Awaitable[None], size: int) -> None:
        assert self._behind is not None
        await room
        self._count(size)
        while self._behind:
            frame, size = self._behind.popleft()
            more = self._deliver(frame)
            if more is not None:
                await more
            self._count(size)
        self._behind = None

    def _count(self, size: int) -> None:
        self._taken += size
        if self._taken >= _CREDIT_BYTES and not self.over:
            self._say(credit(self.number, self._taken))
            self._taken = 0


class NodeStream(asyncio.Protocol):
    """One connection. `ready` once the node has said something; `broken` for good."""

    def __init__(self, head: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._unsent: list[bytes] = []
        self.broken = False
        self.paused = False
        """The node does not read."""
        self._head = head
        self._legs: dict[int, _Leg] = {}
        self._numbers = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._reader = MessageReader()
        self._pinged: float | None = None

    async def run(
        self, lease: Lease, path: str, body: bytes, headers: Mapping[str, str], take: TakeFrame
    ) -> FrameKind:
        """As NodeClient.run."""
        self._numbers += 1
        leg = self._legs[self._numbers] = _Leg(self._numbers, lease, take, self._say)
        self._say(
            message(Kind.OPEN, leg.number, msgspec.msgpack.encode(Open(path, dict(headers), body)))
        )
        lease.cut = lambda: leg.fail(AttemptFailed(LOST, lost=True))
        try:
            return await leg.ended
        finally:
            lease.cut = None
            leg.leave()
            del self._legs[leg.number]
            if not leg.over:
                self._say(message(Kind.CANCEL, leg.number))

    def ping(self, now: float, deadline_s: float) -> None:
        """Ask whether the node is still there, or give the stream up if it was asked too long ago."""
        if self._pinged is None:
            self._pinged = now
            self._say(message(Kind.PING))
        elif now - self._pinged > deadline_s:
            self.give_up(
                "the connection failed", f"the leg stream was silent for {now - self._pinged:.1f} s"
            )

    def give_up(self, why: str, detail: str = "") -> None:
        """End it; all of its legs fail."""
        if self.broken:
            return
        self.broken = True
        self._transport.abort()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(detail or why))
        for leg in self._legs.values():
            leg.fail(AttemptFailed(why, detail=detail, lost=True))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the stream."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._transport.write(self._head)

    def connection_lost(self, exc: Exception | None) -> None:
        """By the node, or the network."""
        self.give_up(
            "the connection failed",
            f"the leg stream was cut, {self._reader.pending} bytes into a message",
        )

    def pause_writing(self) -> None:
        """New legs go another way."""
        self.paused = True

    def resume_writing(self) -> None:
        """It reads again."""
        self.paused = False

    def data_received(self, data: bytes) -> None:
        """Hand on all frames that are complete, and send what came of them."""
        if len(data) >= _MUCH_BYTES:
            # The event loop would go on reading as long as there is anything, and all else, health
            # checks too, wait.
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)
        legs = self._legs
        try:
            self._parser.feed_data(data)
            for number, kind, body in self._reader.feed(b"".join(self._parts)):
                if kind == _FRAME:
                    leg = legs.get(number)
                    if leg is not None:  # else it was cancelled
                        leg.hear(frame_of(body), HEAD_BYTES + len(body))
                else:
                    self._hear(number, kind, body)
        except (httptools.HttpParserError, NodeFailed, *MALFORMED) as why:
            self.give_up("the node's answer is malformed", f"the leg stream is malformed: {why}")
        self._parts.clear()
        send_written()

    def _read_on(self) -> None:
        if not self.broken:
            self._transport.resume_reading()

    def on_headers_complete(self) -> None:
        """Of the HTTP parser."""
        status = self._parser.get_status_code()
        if status != 200:
            self.give_up("the connection failed", f"the node answers {status} to {LEGS_PATH}")

    def on_body(self, part: bytes) -> None:
        """Of the HTTP parser."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """Of the HTTP parser: the node ends the stream."""
        self.give_up("the connection failed", "the node ended the leg stream")

    def _hear(self, number: int, kind: int, body: memoryview) -> None:
        leg = self._legs.get(number)
        if leg is None:
            if kind == Kind.PONG:
                self._pinged = None
                if not self.ready.done():
                    self.ready.set_result(None)
            # Else it was cancelled.
        elif kind == Kind.ANSWER:
            answer = msgspec.msgpack.decode(body, type=Answer)
            if answer.load is not None:
                leg.lease.note_load(answer.load)
            if answer.status != 200:
                leg.over = True
                leg.fail(refusal(answer.status, answer.error, answer.retry_after_s))
        elif kind == Kind.OVER:
            leg.over = True
            leg.fail(AttemptFailed("the answer was cut before its end"))

    def _say(self, said: bytes) -> None:
        """Send what is said in one turn of the event loop at once, if the stream still stands."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(said)

    def _flush(self) -> None:
        said = b"".join(self._unsent)
        self._unsent.clear()
        if not self.broken:
            self._transport.write(b"%x\r\n%b\r\n" % (len(said), said))


@dataclass(slots=True)
class _Link:
    """A node's stream, if there is one, and when the next one is tried."""

    stream: NodeStream | None = None
    generation: str = ""
    connecting: bool = False
    failures: int = 0
    next_try: float = 0.0


class NodeStreams:
    """The leg streams of all nodes that speak it. They are opened and mended when a node reports
    its health.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        trusted: ssl.SSLContext | bool,
        connect_deadline_s: float,
        health_deadline_s: float,
    ) -> None:
        """`trusted`: for nodes at https addresses."""
        self._headers = headers
        self._trusted = trusted
        self._connect_deadline_s = connect_deadline_s
        self._silence_s = _SILENT_CHECKS * health_deadline_s
        self._links: dict[Node, _Link] = {}

    def ready(self, node: Node) -> NodeStream | None:
        """The node's stream, if a leg can begin there now."""
        link = self._links.get(node)
        stream = None if link is None else link.stream
        return None if stream is None or stream.broken or stream.paused else stream

    async def heard(self, node: Node, report: HealthReport) -> None:
        """A node has reported its health: see that its stream stands, and that it is this
        process's.
        """
        version = report.leg_version
        if version is None:
            self.forget(node)
            return
        link, now = self._links.setdefault(node, _Link()), time.monotonic()
        if link.stream is not None and link.generation != report.generation:
            link.stream.give_up(LOST)
        if link.stream is not None and not link.stream.broken:
            link.stream.ping(now, self._silence_s)
        # Checks of a node that is down overlap: the one that connects has not ended yet.
        if (
            (link.stream is None or link.stream.broken)
            and now >= link.next_try
            and not link.connecting
        ):
            link.stream, link.generation, link.connecting = None, report.generation, True
            try:
                await self._connect(node, link, version)
            finally:
                link.connecting = False

    def forget(self, node: Node) -> None:
        """No legs go there any more."""
        link = self._links.pop(node, None)
        if link is not None and link.stream is not None:
            link.stream.give_up("the connection failed", "the node is gone")

    def close(self) -> None:
        """End them all."""
        for node in list(self._links):
            self.forget(node)

    async def _connect(self, node: Node, link: _Link, version: int) -> None:
        at = urlsplit(node.url)
        lines = [
            f"POST {at.path}{LEGS_PATH} HTTP/1.1",
            f"host: {at.netloc}",
            f"content-type: {LEGS_MEDIA_TYPE}",
        ]
        lines += ["transfer-encoding: chunked", f"{LEGS_VERSION_HEADER}: {version}"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        head = "".join(f"{line}\r\n" for line in (*lines, "")).encode()
        stream: NodeStream | None = None
        secure = at.scheme == "https"
        try:
            async with asyncio.timeout(self._connect_deadline_s):
                _, stream = await asyncio.get_running_loop().create_connection(
                    lambda: NodeStream(head),
                    at.hostname or "",
                    at.port or (443 if secure else 80),
                    ssl=self._trusted if secure else None,
                )
                await stream.ready
            if self._links.get(node) is link:
                link.stream, link.failures = stream, 0
        except OSError as why:
            link.failures += 1
            link.next_try = time.monotonic() + min(
                _LONGEST_BACKOFF_S, 2.0 ** min(link.failures, 10)
            )
            _log.warning(
                "node %s has no leg stream, its legs go over HTTP: %s",
                node.url,
                why or type(why).__name__,
            )
        finally:
            # Whoever waited for it was cancelled, or the node was forgotten meanwhile.
            if stream is not None and link.stream is not stream:
                stream.give_up("the connection failed")
