"""The answer that a client sees: headers as late as is honest, then bytes, never a silent end.

A stream's bytes bypass ASGI, whose `send` would need a task, about 5 us, for each piece.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvrelay.openai_api.connections import HttpConnection
from kvrelay.openai_api.dialects.base import AS_IS, Dialect, openai_error
from kvrelay.openai_api.front import CORS_HEADERS
from kvrelay.openai_api.sse import error_event
from kvrelay.wire.errors import Draining, ErrorBody, KvrelayError, NodeFailed, without_frames

__all__ = [
    "CLIENT_GONE",
    "HOLD_S",
    "ClientConnection",
    "Relay",
    "Reply",
    "arrived_body",
    "error_response",
]

HOLD_S = 10.0
"""Seconds until headers go without a payload; afterwards, until a keep-alive comment."""
CLIENT_GONE = 499
_KEY = "kvrelay.client"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

Finished = Callable[[int, KvrelayError | None], None]
"""Called with the status, also of an in-band error, and what went wrong."""

_log = logging.getLogger("kvrelay.router")


class Reply:
    """A writer of one answer's bytes: kept, or passed on as they come.

    `put` never waits, so a payload is counted and put, or neither; the `last` one may wait for the
    end of the answer. Whoever puts waits for `flow`: a slow client slows its nodes instead of
    filling memory.
    """

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self.flow: FlowControl | None = None
        self.detach()

    def pass_on(self, put: Callable[[bytes, bool], None], flow: FlowControl | None) -> None:
        self.put, self.flow = put, flow

    def detach(self) -> None:
        kept = self._kept  # no reference to this object, which would hold itself
        self.pass_on(lambda payload, last: kept.append(payload), None)

    def kept(self) -> bytes:
        return b"".join(self._kept)


class ClientConnection(HttpConnection):
    on_gone: Callable[[], None] | None = None
    streaming = False
    """A stream may wait for its client for as long as its request may take."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.scope[_KEY] = self, self.cycle  # type: ignore[literal-required]

    def pause_writing(self) -> None:
        """Give an answer that is no stream a deadline to be read."""
        super().pause_writing()
        if not self.streaming:
            self.flush_in_time()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.flush_at_leisure()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_gone is not None:
            self.on_gone()


def arrived_body(scope: Scope) -> bytes | None:
    """Take the body of a request if it has come as a whole; else return None."""
    cycle = scope[_KEY][1] if _KEY in scope else None
    if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.message_event.clear()
    return body


def error_response(
    why: KvrelayError,
    headers: Mapping[str, str] | None = None,
    shape: Callable[[int, ErrorBody], bytes] = openai_error,
) -> Response:
    every = {**(headers or {}), **why.headers}
    if why.retry_after_s is not None:
        every["retry-after"] = str(why.retry_after_s)
    return Response(shape(why.status, why.body()), why.status, every, "application/json")


class Relay(Response):
    """An answer that runs its own request, in the client's dialect."""

    _pieces = 0
    """Sent since they were last counted."""
    _running = False
    _left = False
    """The client went away before the end."""
    _begun = False
    """Headers were sent."""
    _complete = False
    _broken: NodeFailed | None = None

    def __init__(
        self,
        answer: Callable[[], Awaitable[None]],
        reply: Reply,
        headers: dict[str, str],
        finished: Finished,
        dialect: Dialect,
        *,
        stream: bool,
    ) -> None:
        """`answer` is awaited once and puts into `reply`; `finished` is called in any case."""
        super().__init__()
        self._answer, self._reply, self._stream = answer, reply, stream
        self._extra, self._finished, self._dialect = headers, finished, dialect
        self._unsent: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection, cycle = scope.pop(_KEY)  # else they would hold each other
        self._task, self._connection, self._cycle = task, connection, cycle
        self._cors = scope.get(CORS_HEADERS, ())
        connection.on_gone = self._leave
        # A pipelined request behind this one has paused reading, which would hide a close.
        cycle.flow.resume_reading()
        self._left = cycle.disconnected
        failure: KvrelayError | None = None
        try:
            if self._stream:
                self._reply.pass_on(self._pass, cycle.flow)
                self._holding = task.get_loop().call_later(HOLD_S, self._hold)
            failure = None if self._left else await self._failure_of_answer()
            if self._stream:
                self._holding.cancel()
            if not self._left:
                failure = await self._end(failure, scope, receive, send)
        finally:
            connection.on_gone = None
            status = 200 if failure is None else failure.status
            self._finished(status if self._complete else CLIENT_GONE, failure)
            # Frees a long body now instead of when the collector runs.
            self._reply.detach()
            del self._answer
            if failure is not None:
                without_frames(failure)

    def _leave(self) -> None:
        self._left = not self._complete
        if self._running:
            self._task.cancel()

    async def _failure_of_answer(self) -> KvrelayError | None:
        self._running = True
        try:
            await self._answer()
        except KvrelayError as why:
            return why
        except asyncio.CancelledError:
            self._task.uncancel()
            if not self._left and self._broken is None:  # the server's grace period is over
                return Draining(
                    "the router is shutting down and its time for open requests is over; send the "
                    "request again"
                )
            return self._broken
        except Exception:  # noqa: BLE001 - the edge of a request: it must end, with an honest answer
            job_id = self._extra["x-request-id"]
            _log.exception("id=%s: the request failed by an error of the router", job_id)
            return KvrelayError("the router broke on this request; its log says how")
        finally:
            self._running = False
        return None

    def _pass(self, payload: bytes, last: bool) -> None:
        if self._broken is None:
            try:
                self._send(self._dialect.events(payload))
            except NodeFailed as why:
                self._broken = why
                self._task.cancel()

    def _send(self, events: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._begin()
            if self._dialect is AS_IS:  # the rest needs nothing from here
                self._reply.pass_on(self._write, self._cycle.flow)
        self._write(events, last=False)

    def _hold(self) -> None:
        if not self._pieces:
            self._send(self._dialect.keep_alive())
        self._pieces = 0
        self._holding = self._task.get_loop().call_later(HOLD_S, self._hold)

    def _begin(self) -> None:
        cycle, connection = self._cycle, self._connection
        if cycle.disconnected:
            return
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        connection.streaming = True
        connection.flush_at_leisure()
        extra = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in self._extra.items()
        ]
        headers = (*cycle.default_headers, *_STREAM_HEADERS, *extra, *self._cors)
        lines = [b"%b: %b\r\n" % header for header in headers]
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        connection.loop.call_soon(self._flush)
        self._unsent += (STATUS_LINE[200], *lines, close, b"transfer-encoding: chunked\r\n\r\n")

    def _write(self, payload: bytes, last: bool) -> None:
        # The last piece is sent with the end, which must follow.
        if not (last or self._unsent):
            self._connection.loop.call_soon(self._flush)
        if payload and not self._cycle.disconnected:
            self._pieces += 1
            self._unsent.append(b"%x\r\n%b\r\n" % (len(payload), payload))

    def _flush(self) -> None:
        if self._unsent and not self._cycle.disconnected:
            self._cycle.transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def _finish(self) -> None:
        cycle, connection = self._cycle, self._connection
        if cycle.disconnected:
            return
        self._unsent.append(b"0\r\n\r\n")
        self._flush()
        cycle.response_complete = True
        cycle.message_event.set()
        connection.streaming = False
        if not cycle.keep_alive:
            cycle.transport.close()
        if cycle.flow.write_paused:
            connection.flush_in_time()
        cycle.on_response()

    async def _end(
        self, failure: KvrelayError | None, scope: Scope, receive: Receive, send: Send
    ) -> KvrelayError | None:
        # Returns what went wrong in the end.
        if self._stream and (failure is None or self._begun):
            self._send(self._dialect.events(b"" if failure is None else error_event(failure)))
            self._finish()
            self._complete = True
            return failure
        if failure is None:
            try:
                body = self._reply.kept()
                if not body:
                    raise NodeFailed("a node ended the request without an answer; send it again")
                answer = Response(self._dialect.whole(body), 200, self._extra, "application/json")
            except NodeFailed as why:
                failure = why
        if failure is not None:
            answer = error_response(failure, self._extra, self._dialect.error)
        await answer(scope, receive, send)
        self._complete = not self._left
        return failure
