"""A client's connection while its request is answered, beside ASGI.

ASGI's `send` is a coroutine: the pieces of an answer would need a task, about 5 us for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from kvrelay.openai_api.connections import HttpConnection
from kvrelay.openai_api.front import CORS_HEADERS

__all__ = [
    "Client",
    "ClientConnection",
    "Flow",
    "Reply",
    "arrived_body",
    "headers_of",
    "send_written",
    "take_client",
]

_KEY, _HEADERS = "kvrelay.client", "kvrelay.headers"


class Flow(Protocol):
    write_paused: bool

    def drain(self) -> Awaitable[None]: ...


class Reply:
    """A writer of one answer's bytes: kept, or passed on as they come.

    `put` never waits, so a payload is either counted and put, or neither, whenever the request is
    cut off. `room` waits, so a slow client slows its nodes instead of filling memory.
    """

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self.put: Callable[[bytes], None] = self._kept.append
        self.put_last = self.put
        self.flow: Flow | None = None

    def pass_on(
        self,
        put: Callable[[bytes], None],
        flow: Flow,
        put_last: Callable[[bytes], None] | None = None,
    ) -> None:
        """Give each payload to `put` from now on, the last one to `put_last`."""
        self.put, self.put_last, self.flow = put, put_last or put, flow

    def detach(self) -> None:
        self.put = self.put_last = self._kept.append
        self.flow = None

    def kept(self) -> bytes:
        return b"".join(self._kept)

    @property
    def full(self) -> bool:
        """Return whether the client has to read before more is put."""
        return self.flow is not None and self.flow.write_paused

    def room(self) -> Awaitable[None] | None:
        """Return what to wait for before more is put, if anything."""
        return self.flow.drain() if self.flow is not None and self.flow.write_paused else None


class _Outbox:
    def __init__(self) -> None:
        self._clients: list[Client] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:  # tests have one loop after another
            self._clients, self._loop = [], loop
        if not self._clients:
            loop.call_soon(self.send)
        self._clients.append(client)

    def send(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            if not client.ending:
                client.flush()


_outbox = _Outbox()


def send_written() -> None:
    _outbox.send()


class ClientConnection(HttpConnection):
    on_gone: Callable[[], None] | None = None
    streaming = False
    """A stream may wait for its client for as long as its request may take."""

    def on_headers_complete(self) -> None:
        """Add the `Client`; the request's task exists and has not begun."""
        super().on_headers_complete()
        self.scope[_KEY] = Client(self, self.cycle)  # type: ignore[literal-required]

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


class Client:
    """A client of one request: `begin`, any number of `write`, then `end`.

    Nothing is written to a client that is gone.
    """

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self.cycle = cycle
        self._unsent: list[bytes] = []
        self.ending = False
        """`end` follows at once, and sends what is unsent."""
        self.headers: Iterable[tuple[bytes, bytes]] = ()
        self.pieces = 0

    @property
    def gone(self) -> bool:
        return self.cycle.disconnected

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Call `on_gone` if the client goes away; None ends that."""
        self._connection.on_gone = on_gone
        if on_gone is not None:
            # A pipelined request behind this one has paused reading, which would hide a close.
            self.cycle.flow.resume_reading()

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        cycle = self.cycle
        if cycle.disconnected:
            return
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        self._connection.streaming = True
        self._connection.flush_at_leisure()
        lines = [
            b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers, *self.headers)
        ]
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        head = b"".join((STATUS_LINE[status], *lines, close, b"transfer-encoding: chunked\r\n\r\n"))
        _outbox.add(self, self._connection.loop)
        self._unsent.append(head)

    def write(self, payload: bytes) -> None:
        """Write a piece of the body, sent at `send_written` or the next turn of the event loop."""
        if payload and not self.cycle.disconnected:
            self.pieces += 1
            if not self._unsent:
                _outbox.add(self, self._connection.loop)
            self._unsent.append(b"%x\r\n%b\r\n" % (len(payload), payload))

    def write_last(self, payload: bytes) -> None:
        self.ending = True
        self.write(payload)

    @property
    def flow(self) -> Flow:
        return self.cycle.flow

    def end(self) -> None:
        cycle = self.cycle
        if cycle.disconnected:
            return
        self._unsent.append(b"0\r\n\r\n")
        self.flush()
        cycle.response_complete = True
        cycle.message_event.set()
        self._connection.streaming = False
        if not cycle.keep_alive:
            cycle.transport.close()
        if cycle.flow.write_paused:
            self._connection.flush_in_time()
        cycle.on_response()

    def flush(self) -> None:
        if self._unsent and not self.cycle.disconnected:
            self.cycle.transport.write(b"".join(self._unsent))
        self._unsent.clear()


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a request's headers by lower-case name, the first of several; cached in the scope."""
    known: dict[str, str] | None = scope.get(_HEADERS)
    if known is None:
        pairs = reversed(scope["headers"])
        known = scope[_HEADERS] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in pairs
        }
    return known


def arrived_body(scope: Scope) -> bytes | None:
    """Take the body of a request if it has come as a whole; else return None."""
    client = scope.get(_KEY)
    cycle = client.cycle if isinstance(client, Client) else None
    if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.message_event.clear()
    return body


def take_client(scope: Scope) -> Client:
    """Take a request's client out of its scope, once: the two would hold each other."""
    client = scope.pop(_KEY)
    assert isinstance(client, Client)
    client.headers = scope.get(CORS_HEADERS, ())
    return client
