"""The HTTP client: kept-alive connections with one request at a time, and streamed answers.

Raw asyncio and httptools: aiohttp's client takes more than twice as much of a core for each chunk,
and what it reads late would be measured as the server's.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvrelay.load.records import Failure, Record
from kvrelay.wire.frames import MALFORMED

__all__ = ["Answer", "Connections"]

_MOST_LINE_BYTES = 1 << 20
_MOST_WHY = 300


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str = ""


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """A streamed answer as it comes; `keep` keeps its text for the next turn.

    Tokens are counted by the server's usage; without it, an event counts as one token if it has
    text.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.status = 0
        self.first: float | None = None
        """When the first token was read; then the last one, by the same clock as what was fed."""
        self.last = 0.0
        self.gaps: list[float] = []
        self.counts: list[int] = []
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self.usage = False
        self.failure: Failure | None = None
        self.why = ""
        self._keep, self._texts = keep, list[str]()
        self._tail, self._refused = b"", b""
        self._finished = self._done = False

    @property
    def chunks(self) -> int:
        """How often tokens came."""
        return len(self.gaps) + 1 if self.first is not None else 0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def fail(self, failure: Failure, why: str) -> None:
        """Note a failure; the first one counts."""
        if self.failure is None:
            self.failure, self.why = failure, why[:_MOST_WHY]

    def feed(self, data: bytes, now: float) -> None:
        """Take a part of the body, cut anywhere, that was read at `now`."""
        if self.status != 200:
            self._refused = (self._refused + data)[:_MOST_WHY]
            return
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
        if len(self._tail) > _MOST_LINE_BYTES:
            self.fail(Failure.MALFORMED, f"a line of more than {_MOST_LINE_BYTES} bytes")
            self._tail = b""

    def _event(self, said: bytes, now: float) -> None:
        if said == b"[DONE]":
            self._done = True
            return
        try:
            event = _decode(said)
        except MALFORMED as why:
            self.fail(Failure.MALFORMED, f"{why}: {said[:200]!r}")
            return
        if event.object == "error" or event.error is not None:
            self.fail(Failure.IN_BAND, said.decode(errors="replace"))
            return
        before = self.tokens
        if event.usage is not None:
            self._used(event.usage)
        if not event.choices:
            return
        choice = event.choices[0]
        if choice.finish_reason:
            self._finished = True
        if self._keep and (text := choice.text if choice.delta is None else choice.delta.content):
            self._texts.append(text)
        if self.usage and event.usage is not None:
            came = self.tokens - before
        else:
            came = int(_has_token(choice))
            if not self.usage:
                self.tokens += came
        if came:
            self._arrived(came, now)

    def _used(self, usage: _Usage) -> None:
        self.usage = True
        self.tokens, self.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def _arrived(self, count: int, now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.counts.append(count)

    def end(self, asked: int, *, exact: bool) -> None:
        """Note that the body is over; `exact`: the server had to make all tokens asked for."""
        if not self.status:
            self.fail(Failure.EARLY_END, "the connection was closed within the head of the answer")
        elif self.status != 200:
            self.fail(Failure.STATUS, f"{self.status}: {self._refused.decode(errors='replace')}")
        elif not (self._done and self._finished):
            what = "[DONE]" if self._finished else "a finish reason"
            self.fail(
                Failure.EARLY_END, f"the stream ended without {what} after {self.tokens} tokens"
            )
        elif self.first is None or self.tokens < 1:
            self.fail(Failure.EMPTY, "an answer without a token")
        elif exact and self.usage and self.tokens < asked:
            self.fail(Failure.SHORT, f"{self.tokens} tokens of {asked}")

    def into(self, record: Record, begin: float) -> None:
        """Write what was seen into a record; `begin` is the begin of the run."""
        if self.first is not None:
            record.first_s, record.last_s = self.first - begin, self.last - begin
        record.prompt_tokens, record.cached_tokens = self.prompt_tokens, self.cached_tokens
        record.output_tokens, record.chunks, record.usage = self.tokens, self.chunks, self.usage
        record.gaps_s, record.counts = self.gaps, self.counts if self._counted() else []
        record.failure, record.why = (str(self.failure), self.why) if self.failure else ("", "")

    def _counted(self) -> bool:
        return sum(self.counts) == self.tokens


def _has_token(choice: _Choice) -> bool:
    if choice.delta is None:
        return bool(choice.text) or not choice.finish_reason
    delta = choice.delta
    if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
        return True
    return delta.role is None and not choice.finish_reason


_OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
"""The client has too few files or ports."""
_STALE_S = 0.05
"""A request learns within a round trip that its idle connection was closed already."""


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
    """Kept-alive connections to one server."""

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
        """Send a request and wait for its answer, which notes what goes wrong."""
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
        """Close the idle connections; others end with their requests."""
        for connection in self._idle:
            connection.transport.abort()
