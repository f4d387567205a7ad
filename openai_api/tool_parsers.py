"""Generated text as content and tool calls, as it comes. Pure.

Models differ in their marks (model_formats.py). The result depends on the text only, wherever it is
cut, because another node replays it. A call is reported with its name and the arguments' first
character. What is malformed before is content; later faults leave broken arguments, and the rest is
content. White space next to calls and special tokens among the markers (`hidden`) are no content.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.openai_api.call_reader import (
    ArgumentsReader,
    CallArguments,
    CallReader,
    CallTags,
    PythonReader,
    TaggedReader,
)
from kvrelay.openai_api.message_parts import (
    Arguments,
    CallBegun,
    CallIds,
    Content,
    Part,
    StateParser,
    any_of,
    beginning_at_end,
)

__all__ = [
    "CallMarks",
    "ListedParser",
    "MarkedParser",
    "MistralParser",
    "NamedParser",
    "TextParser",
]

Tools = Sequence[Mapping[str, Any]]
_MAX_HEAD_CHARS = 600  # names have 256 at most (openai_api/tool_choice.py)


@dataclass(frozen=True, slots=True)
class CallMarks:
    """A model's markers around its calls."""

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    """Markers behind calls, never content there."""
    inner: tuple[str, ...] = ()
    """Further markers to render as special tokens."""
    head: str | None = None
    """Pattern of the text before arguments, with a group `name`; None: the object has the name."""
    head_end: str = ""
    """Pattern of the head's end."""
    tags: CallTags | None = None
    """Syntax of arguments other than JSON."""
    bare: bool = False
    """The text may begin with a call."""
    python: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openers, *self.closers, *self.inner)


class TextParser(StateParser):
    """A parser that finds no calls, and the base of others."""

    def __init__(self, ids: CallIds, hidden: Collection[str] = ()) -> None:
        self.calls = 0
        """Calls so far, with those that have just begun."""
        self._ids = ids
        self._hidden = tuple(hidden)
        super().__init__(self._text)
        self._space = ""  # white space that is content only if content follows
        self._has_content = False

    def finish(self) -> list[Part]:
        """Return the rest."""
        self._content(self._rest())
        self._buffer = ""
        if self._space and not self.calls:
            self._parts.append(Content(self._space))
        self._space = ""
        return self._new_parts()

    def _rest(self) -> str:
        return self._without_hidden(self._buffer)

    def _text(self) -> bool:
        return self._content_to(self._hidden) is not None

    def _content_to(self, markers: tuple[str, ...]) -> str | None:
        found = any_of(markers).search(self._buffer) if markers else None
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
        return any_of(self._hidden).sub("", text) if self._hidden else text


class _CallParser(TextParser, abc.ABC):
    def __init__(
        self, ids: CallIds, hidden: Collection[str], tools: Tools, marks: CallMarks
    ) -> None:
        super().__init__(ids, hidden)
        self._marks, self._tools = marks, tools
        openers = self._marks.openers
        self._sought = (*openers, *(marker for marker in hidden if marker not in openers))
        self._held: list[str] = []  # all of what may become a call
        self._reader: CallArguments | None = None
        self._begun = False

    @abc.abstractmethod
    def _opened(self) -> None:
        pass

    @abc.abstractmethod
    def _call_ended(self, whole: bool) -> None:
        pass

    def _rest(self) -> str:
        return self._without_hidden("".join(self._held) + self._buffer)

    def _text(self) -> bool:
        # After a call, closing markers are no content.
        marker = self._content_to(
            (*self._sought, *self._marks.closers) if self.calls else self._sought
        )
        if marker is None:
            return False
        if marker in self._marks.openers:
            if marker not in self._hidden:
                self._held.append(marker)
            self._opened()
        return True

    def _call(self) -> bool:
        reader = self._reader
        assert reader is not None
        end = reader.feed(self._buffer)
        taken, self._buffer = self._buffer[:end], self._buffer[end:]
        if reader.begun:
            if not self._begun:
                self._parts.append(
                    CallBegun(self.calls, self._ids.id_of(self.calls, reader.name), reader.name)
                )
                self.calls += 1
                self._begun = True
                self._held.clear()
            piece = reader.drain()
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

    def _read(self, reader: CallArguments) -> None:
        self._reader, self._begun = reader, False
        self._state = self._call

    def _release(self) -> None:
        self._content(self._without_hidden("".join(self._held)))
        self._held.clear()


class MarkedParser(_CallParser):
    """A parser of calls between markers."""

    def _opened(self) -> None:
        if self._marks.head is None:
            self._read(CallReader(may_lack_arguments=True))
        else:
            self._state = self._head

    def _head(self) -> bool:
        marks, text = self._marks, self._buffer.lstrip()
        assert marks.head is not None
        blanks = len(self._buffer) - len(text)
        end = re.compile(marks.head_end).search(text)
        if end is None and len(text) <= _MAX_HEAD_CHARS:
            return False
        found = (
            None
            if end is None or end.end() > _MAX_HEAD_CHARS
            else re.fullmatch(marks.head, text[: end.end()])
        )
        if found is None:
            self._release()
            self._state = self._text
            return True
        self._held.append(self._buffer[: blanks + found.end()])
        self._buffer = self._buffer[blanks + found.end() :]
        name = found["name"]
        tags = marks.tags
        self._read(
            ArgumentsReader(name)
            if tags is None
            else TaggedReader(name, tags, self._properties(name))
        )
        return True

    def _properties(self, name: str) -> Mapping[str, Any]:
        for tool in self._tools:
            if tool["function"]["name"] == name:
                found = (tool["function"].get("parameters") or {}).get("properties")
                return found if isinstance(found, Mapping) else {}
        return {}

    def _call_ended(self, whole: bool) -> None:
        self._state = self._behind_call

    def _behind_call(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._close
        return bool(self._buffer)

    def _close(self) -> bool:
        marker = self._content_to((*self._marks.closers, *self._sought))
        if marker is None:
            return False
        if marker in self._marks.openers:
            self._buffer = marker + self._buffer
        if marker in self._marks.openers or marker in self._marks.closers:
            self._state = self._text
        return True

    def _rest(self) -> str:
        # A marker that was cut off is no content either.
        cut_off = self._state in (self._behind_call, self._close) or (
            self._state == self._call and self._begun
        )
        return "" if cut_off else super()._rest()


class ListedParser(_CallParser):
    """A parser of calls in sequence or in a list, as JSON objects or Python."""

    _SEPARATORS = " \t\r\n,;"

    def __init__(
        self, ids: CallIds, hidden: Collection[str], tools: Tools, marks: CallMarks
    ) -> None:
        super().__init__(ids, hidden, tools, marks)
        if marks.bare:
            self._state = self._start

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith("["):
            self._hold_to(len(self._buffer) - len(text) + 1)
        if text:
            # Python's calls stand in a list: without one every sentence could begin one.
            found = text[0] == "[" or (text[0] == "{" and not self._marks.python)
            self._state = self._objects if found else self._text
            if not found:
                self._release()
        return bool(text)

    def _objects(self) -> bool:
        text = self._buffer.lstrip(self._SEPARATORS)
        self._held.append(self._buffer[: len(self._buffer) - len(text)])
        self._buffer = text
        if text.startswith("{") and not self._marks.python:
            self._read(CallReader(may_lack_arguments=False))
        elif text and self._marks.python and (text[0].isalpha() or text[0] == "_"):
            self._read(PythonReader())
        elif text.startswith("]") and self.calls:
            self._buffer = text[1:]
            self._held.clear()
            self._state = self._start if self._marks.bare else self._text
        elif text:
            self._release()
            self._state = self._text
        return bool(text)

    def _opened(self) -> None:
        self._state = self._start

    def _call_ended(self, whole: bool) -> None:
        self._state = self._objects if whole else self._text

    def _rest(self) -> str:
        # Separators alone are no content behind a call.
        return "" if self.calls and self._state == self._objects else super()._rest()

    def _hold_to(self, end: int) -> None:
        self._held.append(self._buffer[:end])
        self._buffer = self._buffer[end:]


class MistralParser(ListedParser):
    """A parser of `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` or
    `[TOOL_CALLS]name{...}`.

    By version, `[CALL_ID]id` (unused) and `[ARGS]` may stand before the arguments.
    """

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
            self._release()
            self._state = self._text
        elif text[0] == "[":
            self._hold_to(blanks + 1)
            self._state = self._objects
        else:
            self._hold_to(blanks)
            self._state = self._named
        return True

    def _named(self) -> bool:
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


class NamedParser(TextParser):
    """A parser for which all text is one call's arguments."""

    def __init__(self, ids: CallIds, name: str) -> None:
        super().__init__(ids)
        self._name = name

    def push(self, text: str) -> list[Part]:
        if not text:
            return []
        begun: list[Part] = (
            [] if self.calls else [CallBegun(0, self._ids.id_of(0, self._name), self._name)]
        )
        self.calls = 1
        return [*begun, Arguments(0, text)]

    def finish(self) -> list[Part]:
        return []
