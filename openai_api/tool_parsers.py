"""Generated text into content and tool calls, as it comes. Pure.

One parser for each way in which models write calls. Pieces may be cut anywhere, and what comes out is a function of the
text: a node that goes on with an answer replays its text. A call is told as soon as it is certain to be one (its name
and the first character of its arguments); what is malformed before that is content, and nothing of it is lost. What
breaks later leaves a call with broken arguments, and the rest is content. White space next to calls is no content.

Markers that are special tokens in a vocabulary (`hidden`) never become content, not even those of malformed calls.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Collection
from functools import lru_cache

from openai_api.call_reader import ArgumentsReader, CallReader
from openai_api.message_parts import Arguments, CallBegun, CallIds, Content, Part, joined

__all__ = [
    "TOOL_PARSERS",
    "HermesParser",
    "JsonParser",
    "Llama3Parser",
    "MistralParser",
    "NamedParser",
    "TextParser",
    "beginning_at_end",
]


class TextParser:
    """The parser that finds no calls, and what all others have in common.

    A state is a method: it takes what it can from `_buffer` and says whether the next state may go on at once.
    """

    markers: tuple[str, ...] = ()
    """Texts that the parser must see also where they are special tokens, which otherwise have no text."""

    def __init__(self, ids: CallIds, hidden: Collection[str] = ()) -> None:
        self.calls = 0
        """Calls so far, with those that have just begun."""
        self._ids = ids
        self._hidden = tuple(hidden)
        self._state: Callable[[], bool] = self._text
        self._buffer = ""  # not looked at yet, or perhaps the beginning of a marker
        self._parts: list[Part] = []
        self._space = ""  # white space that is content only if content follows
        self._has_content = False

    def push(self, text: str) -> list[Part]:
        """What has become certain with this text."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._taken()

    def finish(self) -> list[Part]:
        """The rest, now that nothing follows."""
        self._content(self._rest())
        self._buffer = ""
        if self._space and not self.calls:
            self._parts.append(Content(self._space))
        self._space = ""
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = joined(self._parts), []
        return parts

    def _rest(self) -> str:
        """What of the buffer is content if nothing follows."""
        return self._without_hidden(self._buffer)

    def _text(self) -> bool:
        """The state of content: up to a marker."""
        return self._content_to(self._hidden) is not None

    def _content_to(self, markers: tuple[str, ...]) -> str | None:
        """Take content and the marker behind it; without one all content up to what may be the beginning of one."""
        found = _pattern(markers).search(self._buffer) if markers else None
        if found is not None:
            self._content(self._buffer[: found.start()])
            self._buffer = self._buffer[found.end() :]
            return found[0]
        keep = beginning_at_end(self._buffer, markers)
        cut = len(self._buffer) - keep
        self._content(self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return None

    def _content(self, text: str) -> None:
        """Text for the client. White space waits for what follows."""
        if not text:
            return
        end = len(text.rstrip())
        if end:
            if self._has_content or not self.calls:
                text, end = self._space + text, end + len(self._space)
            else:
                text, end = text.lstrip(), end - (len(text) - len(text.lstrip()))
            self._parts.append(Content(text[:end]))
            self._has_content, self._space = True, ""
        self._space += text[end:]

    def _without_hidden(self, text: str) -> str:
        return _pattern(self._hidden).sub("", text) if self._hidden else text


class _CallParser(TextParser, abc.ABC):
    """What parsers have in common that look for calls in a text."""

    openers: tuple[str, ...] = ()
    """Markers that open calls."""

    def __init__(self, ids: CallIds, hidden: Collection[str] = ()) -> None:
        super().__init__(ids, hidden)
        self._sought = (*self.openers, *(marker for marker in hidden if marker not in self.openers))
        self._held: list[str] = []  # all of what may become a call
        self._reader: ArgumentsReader | None = None
        self._begun = False

    @abc.abstractmethod
    def _opened(self) -> None:
        """A marker has opened a call."""

    @abc.abstractmethod
    def _call_ended(self, whole: bool) -> None:
        """A call is complete, or has broken in its arguments or behind them."""

    def _rest(self) -> str:
        return self._without_hidden("".join(self._held) + self._buffer)

    def _text(self) -> bool:
        marker = self._content_to(self._sought)
        if marker is None:
            return False
        if marker in self.openers:
            if marker not in self._hidden:
                self._held.append(marker)
            self._opened()
        return True

    def _call(self) -> bool:
        """A call, read by `_reader`."""
        reader = self._reader
        assert reader is not None
        end = reader.feed(self._buffer)
        taken, self._buffer = self._buffer[:end], self._buffer[end:]
        if reader.begun:
            if not self._begun:
                self._parts.append(CallBegun(self.calls, self._ids.of(self.calls), reader.name))
                self.calls += 1
                self._begun = True
                self._held.clear()
            piece = reader.take()
            if piece:
                self._parts.append(Arguments(self.calls - 1, piece))
        else:
            self._held.append(taken)
        if not (reader.failed or reader.done):
            return False
        if self._begun:
            self._call_ended(reader.done)
        else:
            self._release()
            self._state = self._text
        self._reader = None
        return True

    def _read(self, reader: ArgumentsReader) -> None:
        self._reader, self._begun = reader, False
        self._state = self._call

    def _release(self) -> None:
        """What was held is no call."""
        self._content(self._without_hidden("".join(self._held)))
        self._held.clear()


class HermesParser(_CallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number: Hermes, Qwen."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    markers = (_OPEN, _CLOSE)
    openers = (_OPEN,)

    def _opened(self) -> None:
        self._read(CallReader(may_lack_arguments=True))

    def _call_ended(self, whole: bool) -> None:
        self._state = self._behind_call

    def _behind_call(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._close
        return bool(self._buffer)

    def _close(self) -> bool:
        """Behind a call: what stands before its end is content, the marker itself never is."""
        marker = self._content_to((self._CLOSE, *self._sought))
        if marker is None:
            return False
        if marker == self._OPEN:
            self._buffer = marker + self._buffer
        if marker in self.markers:
            self._state = self._text
        return True

    def _rest(self) -> str:
        # A closing marker that was cut off has closed a call all the same.
        return "" if self._state in (self._behind_call, self._close) else super()._rest()


class _SeveralParser(_CallParser):
    """Calls as objects behind each other, between white space and separators."""

    _separators = ""

    def _objects(self) -> bool:
        """Where an object may stand, or behind one."""
        text = self._buffer.lstrip(" \t\r\n" + self._separators)
        self._held.append(self._buffer[: len(self._buffer) - len(text)])
        self._buffer = text
        if text.startswith("{"):
            self._read(CallReader(may_lack_arguments=False))
        elif text:
            self._no_object()
        return bool(text)

    def _no_object(self) -> None:
        """Something else stands there."""
        self._release()
        self._state = self._text

    def _opened(self) -> None:
        self._state = self._objects

    def _call_ended(self, whole: bool) -> None:
        self._state = self._objects if whole else self._text

    def _rest(self) -> str:
        # Separators alone are no content behind a call.
        return "" if self.calls and self._state == self._objects else super()._rest()


class Llama3Parser(_SeveralParser):
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, as the whole answer or behind a marker."""

    _MARKER = "<|python_tag|>"
    markers = (_MARKER,)
    openers = (_MARKER,)
    _separators = ";"

    def __init__(self, ids: CallIds, hidden: Collection[str] = ()) -> None:
        super().__init__(ids, hidden)
        self._state = self._start

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if text:
            self._state = self._objects if text[0] == "{" else self._text
        return bool(text)


class _ListParser(_SeveralParser):
    """Calls in a list."""

    _separators = ","

    def _no_object(self) -> None:
        if self._buffer[0] == "]" and self.calls:
            self._buffer = self._buffer[1:]
            self._held.clear()
            self._state = self._text
        else:
            super()._no_object()

    def _hold_to(self, end: int) -> None:
        self._held.append(self._buffer[:end])
        self._buffer = self._buffer[end:]


class MistralParser(_ListParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or since version 11 `[TOOL_CALLS]name{...}` for each.

    Between name and arguments there may be `[CALL_ID]id` and `[ARGS]`, by the version; the id is not used.
    """

    _OPEN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    markers = (_OPEN, _ID, _ARGS)
    openers = (_OPEN,)
    _NAME = re.compile(r"([^\s{}\[\]]+)(?:\[CALL_ID\][^\s{}\[\]]*)?(?:\[ARGS\])?\s*")
    _NAME_SO_FAR = re.compile(r"[^\s{}]*\s*")

    def _opened(self) -> None:
        self._state = self._behind_marker

    def _behind_marker(self) -> bool:
        text = self._buffer.lstrip()
        blanks = len(self._buffer) - len(text)
        if not text or text == "[":
            return False
        if text[0] == "{":
            self._state = self._objects
        elif text.startswith("[T"):  # the same marker again
            self._no_object()
        elif text[0] == "[":
            self._hold_to(blanks + 1)
            self._state = self._objects
        else:
            self._hold_to(blanks)
            self._state = self._named
        return True

    def _named(self) -> bool:
        """A name, and the arguments behind it."""
        head, brace, _ = self._buffer.partition("{")
        found = self._NAME.fullmatch(head)
        if brace and found is not None:
            self._hold_to(len(head))
            self._read(ArgumentsReader(found[1]))
        elif brace or self._NAME_SO_FAR.fullmatch(head) is None:
            self._release()
            self._state = self._text
        else:
            return False
        return True

    def _call_ended(self, whole: bool) -> None:
        super()._call_ended(whole and isinstance(self._reader, CallReader))


class JsonParser(_ListParser):
    """The whole answer is one object with name and arguments (or parameters), or a list of such."""

    def __init__(self, ids: CallIds, hidden: Collection[str] = ()) -> None:
        super().__init__(ids, hidden)
        self._state = self._start

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith("["):
            self._hold_to(len(self._buffer) - len(text) + 1)
        if text:
            self._state = self._objects if text[0] in "[{" else self._text
        return bool(text)


class NamedParser(TextParser):
    """The whole text is the arguments of one call, whose name the request gave."""

    def __init__(self, ids: CallIds, name: str) -> None:
        super().__init__(ids)
        self._name = name

    def push(self, text: str) -> list[Part]:
        """All of it."""
        if not text:
            return []
        begun: list[Part] = [] if self.calls else [CallBegun(0, self._ids.of(0), self._name)]
        self.calls = 1
        return [*begun, Arguments(0, text)]

    def finish(self) -> list[Part]:
        """Nothing is held."""
        return []


TOOL_PARSERS: dict[str, type[TextParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "json": JsonParser,
}
"""By the name that `--tool-call-parser` takes."""


def beginning_at_end(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that one of the markers begins with, without being all of it."""
    beginnings, longest = _beginnings(markers)
    for length in range(min(longest, len(text)), 0, -1):
        if text[-length:] in beginnings:
            return length
    return 0


@lru_cache(maxsize=64)
def _beginnings(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """(what markers begin with, the length of the longest such)."""
    all_of_them = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))
    return all_of_them, max(map(len, all_of_them), default=0)


@lru_cache(maxsize=64)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
