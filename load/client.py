"""The HTTP side of the load client: one streamed request to an OpenAI server, by aiohttp."""

from __future__ import annotations

import errno
import time
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from kvrelay.load.measures import Failure, Record
from kvrelay.wire.frames import MALFORMED

__all__ = ["AnswerReader", "http_session", "stream"]

_MAX_LINE_BYTES = 1 << 20
_MAX_WHY_CHARS = 300
_KEEP_ALIVE_S = 4.0
"""Below uvicorn's 5 s: a server must not close an idle connection just as it is used again."""
_TOO_FEW = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
"""The client has too few files or ports."""


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


class AnswerReader:
    """Reads the lines of a streamed answer into the record of its request.

    `keep_text` keeps the text for the next turn.
    """

    def __init__(self, record: Record, *, keep_text: bool = False) -> None:
        self.record = record
        self._keep_text, self._texts = keep_text, list[str]()
        self._finished = self._done = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def fail(self, failure: Failure, why: str) -> None:
        if not self.record.failure:
            self.record.failure, self.record.why = str(failure), why[:_MAX_WHY_CHARS]

    def read_line(self, line: bytes, now_s: float) -> None:
        """Read a line that came `now_s` after the begin of the run."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = _decode(data)
        except MALFORMED as why:
            self.fail(Failure.MALFORMED, f"{why}: {data[:200]!r}")
            return
        if event.object == "error" or event.error is not None:
            self.fail(Failure.IN_BAND, data.decode(errors="replace"))
            return
        self._read_event(event, now_s)

    def _read_event(self, event: _Event, now_s: float) -> None:
        record = self.record
        if (usage := event.usage) is not None:
            record.usage = True
            record.output_tokens = usage.completion_tokens
            record.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if not event.choices:
            return
        choice = event.choices[0]
        if choice.finish_reason:
            self._finished = True
        text = choice.text if choice.delta is None else choice.delta.content
        if self._keep_text and text:
            self._texts.append(text)
        if _has_token(choice):
            record.output_tokens += not record.usage
            self._add_chunk(now_s)

    def _add_chunk(self, now_s: float) -> None:
        record = self.record
        if record.chunks:
            record.gaps_s.append(now_s - record.last_s)
        else:
            record.first_s = now_s
        record.last_s = now_s
        record.chunks += 1

    def finish(self, *, exact: bool) -> None:
        """Judge the answer; `exact`: the server had to make all tokens that were asked for."""
        record = self.record
        if not (self._done and self._finished):
            missing = "[DONE]" if self._finished else "a finish reason"
            self.fail(
                Failure.EARLY_END,
                f"the stream ended without {missing} after {record.output_tokens} tokens",
            )
        elif not record.chunks or record.output_tokens < 1:
            self.fail(Failure.EMPTY, "an answer without a token")
        elif exact and record.usage and record.output_tokens < record.asked_tokens:
            self.fail(Failure.SHORT, f"{record.output_tokens} tokens of {record.asked_tokens}")


def _has_token(choice: _Choice) -> bool:
    if choice.delta is None:
        return bool(choice.text) or not choice.finish_reason
    delta = choice.delta
    if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
        return True
    return delta.role is None and not choice.finish_reason


def http_session(api_key: str, headers: dict[str, str]) -> aiohttp.ClientSession:
    """Return a session without limits on connections or time; the caller closes it."""
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    plain = {"content-type": "application/json", "accept-encoding": "identity"}
    return aiohttp.ClientSession(
        headers={**plain, **key, **headers},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=_MAX_LINE_BYTES // 2,  # aiohttp takes lines of twice as many bytes
    )


async def stream(
    session: aiohttp.ClientSession, url: str, body: bytes, answer: AnswerReader, begin: float
) -> None:
    """Send a request and read its answer, which notes failures; `begin` is the run's monotonic."""
    status = 0
    try:
        async with session.post(url, data=body) as response:
            status = response.status
            if status != 200:
                why = await response.text(errors="replace")
                answer.fail(Failure.STATUS, f"{status}: {why}")
                return
            async for line in response.content:
                answer.read_line(line, time.monotonic() - begin)
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as why:
        failure = Failure.EARLY_END
        if not status:
            ours = getattr(why, "errno", None) in _TOO_FEW
            failure = Failure.CLIENT if ours else Failure.CONNECT
        answer.fail(failure, f"{type(why).__name__}: {why}")
    except (aiohttp.ClientResponseError, HttpProcessingError, ValueError) as why:
        answer.fail(Failure.MALFORMED, f"{type(why).__name__}: {why}")
