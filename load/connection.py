"""Connections of the client: HTTP/1.1, one request at a time on each, kept alive. Raw asyncio and
httptools.

aiohttp's client takes more than twice as much of a core for each chunk
(benchmarks/bench_client.py), and what it reads late would be measured as the server's.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

from kvrelay.load.answer import Answer
from kvrelay.load.records import Failure

__all__ = ["Connections"]

_OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
"""What the client has too few of: files, ports."""
_STALE_S = 0.05
"""Within this a request tells that its idle connection was closed already; a round trip."""


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._over: asyncio.Future[None] | None = None
        self._answer = Answer()
        self.open = True
        self.heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    async def ask(self, request: bytes, answer: Answer) -> bool:
        self._answer, self._whole, self.heard = answer, False, False
        self._parser = httptools.HttpResponseParser(self)
        self._over = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._over
        return self._whole

    def data_received(self, data: bytes) -> None:
        self._now, self.heard = time.monotonic(), True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError) as why:
            self._answer.fail(Failure.MALFORMED, f"no HTTP: {why}: {data[:100]!r}")
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.feed(body, self._now)

    def on_message_complete(self) -> None:
        if self._answer.status >= 200:  # not "100 Continue"
            self._whole = True
            self.open = self.open and self._parser.should_keep_alive()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end()

    def _end(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class Connections:
    """To one server."""

    def __init__(self, url: str, api_key: str, chat: bool, headers: Mapping[str, str]) -> None:
        to = urlsplit(url)
        self._host, self._secure = to.hostname or "", to.scheme == "https"
        self._port = to.port or (443 if self._secure else 80)
        self._tls = ssl.create_default_context() if self._secure else None
        self._idle: list[_Connection] = []
        path = f"{to.path.rstrip('/')}/v1/{'chat/completions' if chat else 'completions'}"
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {to.netloc}\r\ncontent-type: "
            f"application/json\r\n{key}{more}"
        )
        self._head = head.encode()

    async def ask(self, body: bytes, answer: Answer, asked: int, *, exact: bool) -> None:
        """Put a request and wait for its answer, which says itself what went wrong."""
        request = b"%bcontent-length: %d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            while True:
                connection, fresh = await self._take()
                began = time.monotonic()
                try:
                    whole = await connection.ask(request, answer)
                finally:
                    self._give_back(connection)
                # A server may close an idle connection just as it is used again: nothing was asked
                # then. One that dies later dies with a request, which has failed.
                if whole or connection.heard or fresh or time.monotonic() - began > _STALE_S:
                    break
        except OSError as why:
            answer.fail(
                Failure.CLIENT if why.errno in _OURS else Failure.CONNECT,
                f"{type(why).__name__}: {why}",
            )
            return
        if not whole and not connection.heard:
            answer.fail(Failure.CONNECT, "the connection was closed without an answer")
        answer.end(asked, exact=exact)

    async def _take(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection, False
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return made, True

    def _give_back(self, connection: _Connection) -> None:
        over = connection._over
        if connection.open and over is not None and over.done() and not over.cancelled():
            self._idle.append(connection)
        else:
            connection.open = False
            connection.transport.abort()

    def close(self) -> None:
        """Those that are idle; others end with their requests."""
        for connection in self._idle:
            connection.transport.abort()
