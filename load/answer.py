"""One streamed answer of an OpenAI server, as it comes: when its tokens were there, how many, and
what is wrong.

Pure: bytes come with the time at which they were read. An event is one line `data: ...`, as
OpenAI's are. Tokens are counted by the server's usage; an event without one counts as a token if it
has text, or says nothing but could have.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.load.records import Failure, Record
from kvrelay.wire.frames import MALFORMED

__all__ = ["Answer"]

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
    """Of one request; `keep`: its text is wanted, for the next turn."""

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
        """Its content, if it was kept."""
        return "".join(self._texts)

    def fail(self, failure: Failure, why: str) -> None:
        """The first failure counts."""
        if self.failure is None:
            self.failure, self.why = failure, why[:_MOST_WHY]

    def feed(self, data: bytes, now: float) -> None:
        """A part of the body, cut anywhere."""
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
        """The body is over; `exact`: the server was told to make as many tokens as it was asked
        for.
        """
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
        """Write down what was seen."""
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
