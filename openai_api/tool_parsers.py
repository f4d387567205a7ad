"""Generated text as reasoning, content and tool calls, as it comes. Pure.

Models differ in their marks (model_formats.py). The result depends on the text only, wherever it is
cut, because another node replays it. Text that is malformed before the arguments' first character
is content, and without an end all is reasoning. White space next to reasoning and calls, and special
tokens among the markers (`hidden`), belong to neither.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvrelay.openai_api.message_parts import Part, any_of, beginning_at_end, merged
from kvrelay.openai_api.model_formats import Opening, ReasoningFormat, ToolFormat
from kvrelay.wire.json_object import JsonObject

__all__ = ["CallParser", "NamedParser", "TextParser", "Tools"]

Tools = Sequence[JsonObject]

_MAX_HEAD_CHARS = 600  # names have 256 at most (openai_api/constraints.py)
_MAX_NAMELESS_CHARS = 4096  # of arguments that stand before their call's name
_SEPARATORS = " \t\r\n,;"
_TEXT = frozenset({"string"})


class ArgumentsReader:
    """A reader of JSON arguments; without a name, of an object with name and arguments.

    Only brackets and strings are looked at: clients find other faults. The name comes first, or
    within the first 4,096 characters.
    """

    _MEMBERS = (  # such as "type": "function", "id": 1,
        r'(?:"(?!(?:name|arguments|parameters)")[^"\\]*+"\s*:\s*(?:"[^"\\]*+"|true|false|null|'
        r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)\s*,\s*)*+"
    )
    _HEAD = re.compile(
        rf'\{{\s*{_MEMBERS}"name"\s*:\s*("(?:[^"\\]|\\.)*+")\s*,\s*'
        rf'{_MEMBERS}"(?:arguments|parameters)"\s*:\s*(?=\{{)'
    )
    _STRING_MARK = re.compile(r'["\\]')
    _PLAIN = re.compile(r"[\s:,.+\-0-9Eaeflnrstu]*+")
    _JSON = json.JSONDecoder(strict=False)

    def __init__(self, name: str = "", *, may_lack_arguments: bool = False) -> None:
        self.name = name
        self.begun = self.done = self.failed = False
        """From `begun` on it is a call, whatever follows."""
        self._may_lack = may_lack_arguments
        self._pieces: list[str] = []
        self._outer = 0 if name else 1  # brackets around the arguments
        self._depth = self._outer
        self._quoted = self._escaped = self._over = False

    def drain(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def feed(self, text: str) -> int:
        """Return the index after the consumed text; the rest is fed again, with more."""
        i = 0 if self.begun else self._begin(text)
        if self.begun and not self._over:
            end = self._to_depth(self._outer, text, i)
            self._pieces.append(text[i:end])
            self._over = self._depth == self._outer
            i = end
        if self._over and not self.done:
            i = self._to_depth(0, text, i) if self._depth else i
            self.done = not self._depth
        return i

    def _begin(self, text: str) -> int:
        if self.name:
            i = len(text) - len(text.lstrip())
            self.begun, self.failed = text[i : i + 1] == "{", text[i : i + 1] not in ("{", "")
            return i
        head = self._HEAD.match(text)
        try:
            whole, end = self._JSON.raw_decode(head[1] if head else text)
        except json.JSONDecodeError as why:
            # An error is certain once more text than a cut literal or escape follows it.
            certain = why.pos + 10 < len(text) and "Unterminated" not in why.msg
            self.failed = certain or len(text) > _MAX_NAMELESS_CHARS
            return 0
        except (ValueError, RecursionError):
            self.failed = True
            return 0
        if head:
            whole, end = {"name": whole, "arguments": {}}, head.end()
        name = whole.get("name")
        arguments = whole.get("arguments", whole.get("parameters", {} if self._may_lack else None))
        # No tool has an unprintable name, such as half a surrogate pair.
        named = isinstance(name, str) and name and name.isprintable()
        if not named or not isinstance(arguments, dict) or end > _MAX_NAMELESS_CHARS:
            self.failed = True
            return 0
        if not head:
            try:
                self._pieces.append(_dumped(arguments))
            except ValueError:  # a number too large for JSON
                self.failed = True
                return 0
            self._over = self.done = True
        self.name, self.begun = name, True
        return end

    def _to_depth(self, depth: int, text: str, i: int) -> int:
        """From an opening bracket, or from within, read until so many are open."""
        while i < len(text):
            if self._escaped:
                self._escaped = False
                i += 1
            elif self._quoted:
                found = self._STRING_MARK.search(text, i)
                i = len(text) if found is None else found.end()
                if found is not None:
                    self._escaped = found[0] == "\\"
                    self._quoted = self._escaped
            elif (end := self._PLAIN.match(text, i).end()) > i:  # type: ignore[union-attr]
                i = end
            else:
                change = {'"': 0, "{": 1, "[": 1, "}": -1, "]": -1}.get(text[i])
                if change is None:
                    self.failed = True
                    break
                self._quoted = not change
                self._depth += change
                i += 1
                if self._depth == depth:
                    break
        return i


class TaggedReader(ArgumentsReader):
    """A reader of `<parameter=KEY>` tags. Texts are passed on as they come, others when complete.

    `properties` of a JSON schema tell which are texts.
    """

    _TAG = re.compile(r"\s*(?:<parameter=(?P<key>[^<>]{1,256})>(?:\n|(?=[^\n]))|</function>)")
    _TAGS = ("<parameter=", "</function>")
    _CLOSERS = ("\n</parameter>", "</parameter>")

    def __init__(self, name: str, properties: JsonObject) -> None:
        super().__init__(name)
        self._properties = properties
        self._types: frozenset[str] | None = None  # of the value, None between values
        self._value: list[str] = []

    def feed(self, text: str) -> int:
        i = 0
        while not (self.done or self.failed):
            end = self._between(text, i) if self._types is None else self._in_value(text, i)
            if end is None:
                break
            i = end
        return i

    def _between(self, text: str, i: int) -> int | None:
        found = self._TAG.match(text, i)
        if found is None:
            rest = text[i : i + _MAX_HEAD_CHARS].lstrip()
            cut = rest.startswith(self._TAGS[0]) and "<" not in rest[1:] and len(rest) < 300
            self.failed = not (cut or any(tag.startswith(rest) for tag in self._TAGS))
            return None
        self._pieces.append(", " if self.begun else "{")
        key = found["key"]
        if key is None:
            self._pieces[-1] = "}" if self.begun else "{}"
            self.done = True
        else:
            self._types = _types(self._properties.get(key.strip()))
            self._pieces.append(f"{_dumped(key.strip())}: ")
            self._pieces.append('"' if self._types == _TEXT else "")
        self.begun = True
        return found.end()

    def _in_value(self, text: str, i: int) -> int | None:
        found = any_of(self._CLOSERS).search(text, i)
        end = found.start() if found else len(text) - beginning_at_end(text[i:], self._CLOSERS)
        texts = self._types == _TEXT
        piece = text[i:end]
        (self._pieces if texts else self._value).append(_dumped(piece)[1:-1] if texts else piece)
        if found is None:
            return end if end > i else None
        self._pieces.append('"' if texts else _typed("".join(self._value), self._types or ()))
        self._value.clear()
        self._types = None
        return found.end()


def _dumped(value: Any) -> str:
    # In ASCII: half a surrogate pair could not be sent.
    return json.dumps(value, allow_nan=False)


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    listed, inner = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    kinds = listed if isinstance(listed, list) else [listed]
    found = {each for each in kinds if isinstance(each, str)}
    if not found and isinstance(inner, list):
        found = {kind for each in inner for kind in _types(each)}
    choices = schema.get("enum")
    if not found and isinstance(choices, list) and all(isinstance(each, str) for each in choices):
        found = {"string"}
    return frozenset(found)


def _typed(text: str, types: Collection[str]) -> str:
    if "string" in types:
        return "null" if "null" in types and text.strip() == "null" else _dumped(text)
    for read in (json.loads, ast.literal_eval):
        try:
            return _dumped(read(text.strip()))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return _dumped(text)


class TextParser:
    """A parser of reasoning and content that finds no calls, and the base of others.

    A state is a method that consumes `_buffer` and returns whether the next state may run.
    """

    def __init__(
        self,
        hidden: Collection[str] = (),
        reasoning: ReasoningFormat | None = None,
        opening: Opening = Opening.FREE,
    ) -> None:
        self.calls = 0
        """Calls so far, with those that have just begun."""
        self._hidden = tuple(hidden)
        self._reasoning = reasoning or ReasoningFormat()
        self._inside = opening is Opening.INSIDE
        self._buffer = ""  # not looked at yet, or perhaps the beginning of a marker
        self._parts: list[Part] = []
        self._space = ""  # white space that is content only if content follows
        self._has_content = False
        self._state: Callable[[], bool] = self._opening
        if reasoning is None or opening is Opening.BEHIND:
            self._begin_content()

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = merged(self._parts), []
        return parts

    def finish(self) -> list[Part]:
        if self._state == self._opening:
            self._open()
        parts = self.push("")
        self._content(self._rest())
        self._buffer = ""
        if self._space and not self.calls and not self._inside:
            self._parts.append(Part("content", self._space))
        self._space = ""
        return merged([*parts, *self.push("")])

    def _opening(self) -> bool:
        text = self._buffer.lstrip()
        openers = self._reasoning.openers
        opener = next((each for each in openers if text.startswith(each)), None)
        if opener is not None:
            self._buffer, self._inside = text[len(opener) :], True
        elif any(each.startswith(text) for each in openers):
            return False
        self._open()
        return True

    def _open(self) -> None:
        if self._inside:
            self._state = self._behind_marker
        else:
            self._begin_content()

    def _behind_marker(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer and self._inside:
            self._state = self._thinking
        elif self._buffer:
            self._begin_content()
        return bool(self._buffer)

    def _thinking(self) -> bool:
        closers = self._reasoning.closers
        marker = self._content_to((*closers, *self._hidden))
        if marker in closers:
            self._inside = self._has_content = False
            self._space = ""
            self._state = self._behind_marker
        return marker is not None

    def _begin_content(self) -> None:
        self._state = self._text

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
            self._parts.append(Part("reasoning" if self._inside else "content", text[:end]))
            self._has_content, self._space = True, ""
        self._space += text[end:]

    def _without_hidden(self, text: str) -> str:
        return any_of(self._hidden).sub("", text) if self._hidden else text


class CallParser(TextParser):
    """A parser of calls behind markers or, in a bare format, of a text that begins with one.

    Calls follow each other, perhaps in a list: objects, or arguments behind a head with the name.
    `begins` are the arguments `reasoning` and `opening` of TextParser.
    """

    def __init__(
        self, hidden: Collection[str], tools: Tools, form: ToolFormat, *begins: Any
    ) -> None:
        self._form, self._tools = form, tools
        self._sought = tuple(dict.fromkeys((*form.openers, *hidden)))
        self._held = ""  # all of what may become a call
        self._reader: ArgumentsReader | None = None
        self._in_list = False
        super().__init__(hidden, *begins)

    def _begin_content(self) -> None:
        self._state = self._start if self._form.bare else self._text

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if text:
            self._state = self._between_calls if text[0] in "[{" else self._text
        return bool(text)

    def _text(self) -> bool:
        # After a call, closing markers are no content.
        closers = self._form.closers if self.calls else ()
        marker = self._content_to((*self._sought, *closers))
        if marker in self._form.openers:
            self._held = marker or ""
            self._state = self._between_calls
        return marker is not None

    def _between_calls(self) -> bool:
        form = self._form
        text = self._buffer.lstrip(_SEPARATORS)
        self._hold(len(self._buffer) - len(text))
        markers = (*form.openers, *form.closers)
        marker = next((each for each in markers if text.startswith(each)), None)
        if not text or (marker is None and any(each.startswith(text) for each in markers)):
            return False
        if marker in form.openers:
            self._hold(len(marker or ""))
        elif marker is not None and self.calls:
            self._buffer, self._held = text[len(marker) :], ""
            self._state = self._text
        elif text[0] == "{":
            self._read(ArgumentsReader(may_lack_arguments=not form.bare))
        elif text[0] == "[" and not self._in_list:
            self._in_list = True
            self._hold(1)
        elif text[0] == "]" and self.calls:
            self._in_list = False
            self._buffer, self._held = text[1:], ""
            self._state = self._start if form.bare else self._text
        elif form.head is not None and (not self.calls or self._held.strip(_SEPARATORS)):
            return self._named(form.head)  # behind a call only after another opener
        else:
            self._release()
        return True

    def _named(self, head: str) -> bool:
        found = re.compile(head).match(self._buffer)
        if found is not None and found.end() <= _MAX_HEAD_CHARS:
            self._hold(found.end())
            self._read(
                TaggedReader(found["name"], self._properties(found["name"]))
                if self._form.tagged
                else ArgumentsReader(found["name"])
            )
        elif "{" in self._buffer or len(self._buffer) > _MAX_HEAD_CHARS:
            self._release()
        else:
            return False
        return True

    def _properties(self, name: str) -> JsonObject:
        for tool in self._tools:
            if tool["function"]["name"] == name:
                found = (tool["function"].get("parameters") or {}).get("properties")
                return found if isinstance(found, dict) else {}
        return {}

    def _read(self, reader: ArgumentsReader) -> None:
        self._reader = reader
        self._state = self._call

    def _call(self) -> bool:
        reader = self._reader
        assert reader is not None
        had_begun = reader.begun
        end = reader.feed(self._buffer)
        if reader.begun:
            if not had_begun:
                self._parts.append(Part("call", reader.name, self.calls))
                self.calls += 1
                self._held = ""
            self._buffer = self._buffer[end:]
            if piece := reader.drain():
                self._parts.append(Part("arguments", piece, self.calls - 1))
        else:
            self._hold(end)
        if reader.failed and reader.begun:
            self._state = self._text
        elif reader.failed:
            self._release()
        elif reader.done:
            self._state = self._between_calls
        return reader.failed or reader.done

    def _hold(self, count: int) -> None:
        self._held, self._buffer = self._held + self._buffer[:count], self._buffer[count:]

    def _release(self) -> None:
        self._content(self._without_hidden(self._held))
        self._held = ""
        self._in_list = False
        self._state = self._text

    def _rest(self) -> str:
        # Separators and a marker that was cut off are no content behind a call.
        begun = self._reader is not None and self._reader.begun and self._state == self._call
        cut_off = self.calls and self._state == self._between_calls
        if cut_off and self._buffer:
            markers = (*self._form.openers, *self._form.closers)
            cut_off = any(each.startswith(self._buffer) for each in markers)
        return "" if begun or cut_off else self._without_hidden(self._held + self._buffer)


class NamedParser(TextParser):
    """A parser for which all text is one call's arguments."""

    def __init__(self, name: str, *begins: Any) -> None:
        super().__init__(*begins)
        self._name = name

    def _text(self) -> bool:
        if not self.calls:
            self._parts.append(Part("call", self._name))
        self.calls = 1
        self._parts.append(Part("arguments", self._buffer))
        self._buffer = ""
        return False
