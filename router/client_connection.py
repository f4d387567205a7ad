"""A client while its request is answered: a way beside ASGI to write to it without waiting.

ASGI's `send` is a coroutine: an answer's pieces would need a task that waits for them, about 5 us
for each. A `Client` writes straight to the connection instead, and tells who has to wait (`flow`).
What the connection may do is openai_api/connections.py's and uvicorn's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from kvrelay.openai_api.connections import HttpConnection
from kvrelay.openai_api.front import CORS_HEADERS
from kvrelay.router.request.reply import Flow

__all__ = ["Client", "ClientConnection", "arrived", "client_of", "headers_of", "send_written"]

_KEY, _HEADERS = "kvrelay.client", "kvrelay.headers"


class _Outbox:
    """Clients that something was written to and not sent yet."""

    def __init__(self) -> None:
        self._clients: list[Client] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        """Has something to send, and had nothing before."""
        if self._loop is not loop:  # a process has one after the other, if several
            self._clients, self._loop = [], loop
        if not self._clients:
            loop.call_soon(self.send)
        self._clients.append(client)

    def send(self) -> None:
        """Send it."""
        clients, self._clients = self._clients, []
        for client in clients:
            if not client.ending:
                client.flush()


_outbox = _Outbox()


def send_written() -> None:
    """Send what was written to all clients."""
    _outbox.send()


class ClientConnection(HttpConnection):
    """One connection. Each request's scope has its `Client`."""

    on_gone: Callable[[], None] | None = None
    """Of the request that is being answered."""
    streaming = False
    """What a client does not read holds an answer up that is not over, for as long as its walk may
    take.
    """

    def on_headers_complete(self) -> None:
        """The request's task has been made and has not begun."""
        super().on_headers_complete()
        self.scope[_KEY] = Client(self, self.cycle)  # type: ignore[literal-required]

    def pause_writing(self) -> None:
        """Answers behind this one wait for as long as uvicorn's `send` does."""
        super().pause_writing()
        if not self.streaming:
            self.flush_in_time()

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        if not self.transport.is_closing():
            self.flush_at_leisure()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the answer that nobody will read it."""
        super().connection_lost(exc)
        if self.on_gone is not None:
            self.on_gone()


class Client:
    """The connection while one request is answered: `begin`, any number of `write`, `end`. Nothing
    is written to a client that is gone.
    """

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self.cycle = cycle
        self._unsent: list[bytes] = []
        self.ending = False
        """`end` is about to be called: what waits is sent with it."""
        self.headers: Iterable[tuple[bytes, bytes]] = ()
        """Of the answer, whoever gives it."""
        self.pieces = 0
        """Of the body that were written."""

    @property
    def gone(self) -> bool:
        """It went away before the end."""
        return self.cycle.disconnected

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Whom to tell if it goes away; None: nobody any more."""
        self._connection.on_gone = on_gone
        if on_gone is not None:
            # a further request behind this one has paused it; else nobody would see
            self.cycle.flow.resume_reading()

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Status and headers of an answer in chunks."""
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
        """A piece of the body. Pieces wait for each other until `send_written`, or the next turn of
        the event loop.
        """
        if payload and not self.cycle.disconnected:
            self.pieces += 1
            if not self._unsent:
                _outbox.add(self, self._connection.loop)
            self._unsent.append(b"%x\r\n%b\r\n" % (len(payload), payload))

    def write_last(self, payload: bytes) -> None:
        """The last piece: it goes out together with the `end`, which must follow."""
        self.ending = True
        self.write(payload)

    @property
    def flow(self) -> Flow:
        """Whether it reads what was written."""
        return self.cycle.flow

    def end(self) -> None:
        """The body is over."""
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
        """Send what was written."""
        if self._unsent and not self.cycle.disconnected:
            self.cycle.transport.write(b"".join(self._unsent))
        self._unsent.clear()


def headers_of(scope: Scope) -> dict[str, str]:
    """A request's headers by their names in lower case; of several of one name the first. Read once
    per request.
    """
    known: dict[str, str] | None = scope.get(_HEADERS)
    if known is None:
        pairs = reversed(scope["headers"])
        known = scope[_HEADERS] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in pairs
        }
    return known


def arrived(scope: Scope) -> bytes | None:
    """The body of a request, if it has come as a whole and nobody has asked for it; else None."""
    client = scope.get(_KEY)
    cycle = client.cycle if isinstance(client, Client) else None
    if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.message_event.clear()
    return body


def client_of(scope: Scope) -> Client:
    """Take the client of a request out of its scope, which it has itself. Once."""
    client = scope.pop(_KEY)
    assert isinstance(client, Client)
    client.headers = scope.get(CORS_HEADERS, ())
    return client
