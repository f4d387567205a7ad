"""Tool calls in generated text, read as it comes: JSON objects, tags and Python. Pure.

Of JSON only brackets, strings and a call's members are looked at; clients find other faults.
"""

from __future__ import annotations

import abc
import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvrelay.openai_api.message_parts import any_of, beginning_at_end

__all__ = [
    "ArgumentsReader",
    "CallArguments",
    "CallReader",
    "CallTags",
    "PythonReader",
    "TaggedReader",
]

_MAX_KEY_CHARS = 256
_STRING_MARKS = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_PYTHON_NAME = re.compile(r"([A-Za-z_][\w.\-]*)\(")
_PYTHON_NAME_SO_FAR = re.compile(r"[A-Za-z_][\w.\-]*")
_SCALAR = re.compile(r"[.+\-0-9Eaeflnrstu]*+")
_FIRST = {"key": '"', "name": '"', "arguments": "{", "other": '"{[-0123456789tfn'}
"""First characters of an item in a call's object, by the kind of the item."""
_JSON_WORDS = {"true": True, "false": False, "null": None}
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


class CallArguments(abc.ABC):
    """A reader of a call's arguments in any syntax, as JSON."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.begun = self.done = self.failed = False
        """From `begun` on it is a call, whatever follows."""
        self._pieces: list[str] = []

    def drain(self) -> str:
        """Return the arguments since the last time."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    @abc.abstractmethod
    def feed(self, text: str) -> int:
        """Return the index after the consumed text; the rest is fed again, with more."""


class _BracketReader(CallArguments):
    quotes: ClassVar[str] = '"'
    opening: ClassVar[str] = "{["
    closing: ClassVar[str] = "}]"
    plain: ClassVar[re.Pattern[str]] = re.compile(r"[\s:,.+\-0-9Eaeflnrstu]*+")

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _to_end(self, text: str, i: int) -> int:
        """From an opening bracket or quote, or from within, read to the closing one."""
        while i < len(text):
            if self._escaped:
                self._escaped = False
                i += 1
            elif self._quote:
                found = _STRING_MARKS[self._quote].search(text, i)
                i = len(text) if found is None else found.end()
                if found is not None:
                    self._escaped = found[0] == "\\"
                    self._quote = self._quote if self._escaped else ""
            elif (end := self.plain.match(text, i).end()) > i:  # type: ignore[union-attr]
                i = end
            else:
                char = text[i]
                if char in self.quotes:
                    self._quote = char
                elif char in self.opening:
                    self._depth += 1
                elif char in self.closing:
                    self._depth -= 1
                else:
                    self.failed = True
                    break
                i += 1
            if not (self._depth or self._quote):
                break
        return i


class ArgumentsReader(_BracketReader):
    """A reader of a JSON object, the arguments of a named call."""

    def feed(self, text: str) -> int:
        i = 0 if self.begun else len(text) - len(text.lstrip())
        if i == len(text):
            return i
        if not self.begun:
            self.begun, self.failed = text[i] == "{", text[i] != "{"
        if self.failed:
            return i
        end = self._to_end(text, i)
        self._pieces.append(text[i:end])
        self.done = not self._depth
        return end


class CallReader(_BracketReader):
    """A reader of an object with name and arguments (or parameters) in any order."""

    def __init__(self, may_lack_arguments: bool) -> None:
        super().__init__()
        self._may_lack = may_lack_arguments
        self._have_arguments = False
        self._item = "key"  # this one or the next, as in `_FIRST`
        self._raw: list[str] = []  # of a key or the name
        self._due = "{"  # what may come behind white space; within an item nothing
        self._step: Callable[[str, int], int] = self._mark

    def feed(self, text: str) -> int:
        i = 0
        while i < len(text) and not (self.done or self.failed):
            if self._due and text[i].isspace():
                i += 1
            elif self._due and text[i] not in self._due:
                self.failed = True
            else:
                i = self._step(text, i)
        self.begun = bool(self.name) and (self._have_arguments or self.done)
        return i

    def _mark(self, text: str, i: int) -> int:
        if text[i] == "}":
            if self._may_lack and not self._have_arguments and self.name:
                self._have_arguments = True
                self._pieces.append("{}")
            self.done = bool(self.name) and self._have_arguments
            self.failed = not self.done
            return i + self.done
        self._due, self._step = _FIRST[self._item], self._begin
        return i + 1

    def _begin(self, text: str, i: int) -> int:
        self._have_arguments |= self._item == "arguments"
        self._raw.clear()
        self._due, self._step = "", self._nested if text[i] in '"{[' else self._scalar
        return i

    def _nested(self, text: str, i: int) -> int:
        end = self._to_end(text, i)
        if self._item != "other":
            (self._pieces if self._item == "arguments" else self._raw).append(text[i:end])
        if not (self._depth or self._quote):
            self._ended()
        return end

    def _scalar(self, text: str, i: int) -> int:
        end = _SCALAR.match(text, i).end()  # type: ignore[union-attr]
        if end < len(text):
            self._ended()
        return end

    def _ended(self) -> None:
        ended, self._item, self._due = self._item, "key", ",}"
        self._step = self._mark
        if ended not in ("key", "name"):
            return
        try:
            word = json.loads("".join(self._raw), strict=False)
        except ValueError:
            self.failed = True
            return
        if ended == "name":
            # No tool has an unprintable name, such as half a surrogate pair.
            self.failed = not (word and word.isprintable())
            self.name = "" if self.failed else word
            return
        self._due, self._item = ":", "other"
        if word == "name" and not self.name:
            self._item = "name"
        elif word in ("arguments", "parameters") and not self._have_arguments:
            self._item = "arguments"


@dataclass(frozen=True, slots=True)
class CallTags:
    """A syntax of arguments: tags around keys and values, and a last tag."""

    key: tuple[str, str]
    value: tuple[str, str]
    """With an empty first tag the value follows the key's second one."""
    end: str
    padding: str = ""
    """Text around a value."""


class TaggedReader(CallArguments):
    """A reader of arguments in tags. Texts are passed on as they come, others when complete.

    `properties` of a JSON schema tell which are texts.
    """

    def __init__(self, name: str, tags: CallTags, properties: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._tags, self._properties = tags, properties
        closing = tags.value[1]
        self._closers = (tags.padding + closing, closing) if tags.padding else (closing,)
        between = rf"\s*{re.escape(tags.value[0])}" if tags.value[0] else ""
        self._behind_key = re.compile(re.escape(tags.key[1]) + between)
        self._step: Callable[[str, int], int | None] = self._between
        self._keys = 0
        self._kinds: frozenset[str] = frozenset()  # of the value
        self._value: list[str] = []

    def feed(self, text: str) -> int:
        i = 0
        while not (self.done or self.failed):
            end = self._step(text, i)
            if end is None:
                break
            i = end
        return i

    def _between(self, text: str, i: int) -> int | None:
        rest = text[i:].lstrip()
        if len(rest) < len(text) - i:
            return len(text) - len(rest)
        for marker in (self._tags.key[0], self._tags.end):
            if rest.startswith(marker):
                self._pieces.append("" if self.begun else "{")
                self.begun, self.done = True, marker == self._tags.end
                self._pieces.append("}" if self.done else "")
                self._step = self._key
                return i + len(marker)
        self.failed = not any(
            marker.startswith(rest) for marker in (self._tags.key[0], self._tags.end)
        )
        return None

    def _key(self, text: str, i: int) -> int | None:
        found = self._behind_key.search(text, i, i + _MAX_KEY_CHARS)
        if found is None:
            self.failed = len(text) - i >= _MAX_KEY_CHARS
            return None
        key = text[i : found.start()].strip()
        self._pieces.append(f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys += 1
        self._kinds = _kinds(self._properties.get(key))
        self._step = self._open_value
        return found.end()

    def _open_value(self, text: str, i: int) -> int | None:
        if i == len(text):
            return None
        if self._kinds == {"string"}:
            self._pieces.append('"')
        self._value.clear()
        self._step = self._read_value
        padding = self._tags.padding
        return i + len(padding) if padding and text.startswith(padding, i) else i

    def _read_value(self, text: str, i: int) -> int | None:
        found = any_of(self._closers).search(text, i)
        end = (
            len(text) - beginning_at_end(text[i:], self._closers)
            if found is None
            else found.start()
        )
        piece = text[i:end]
        if self._kinds == {"string"}:
            self._pieces.append(json.dumps(piece, ensure_ascii=False)[1:-1])
        else:
            self._value.append(piece)
        if found is None:
            return end if end > i else None
        self._pieces.append(
            '"' if self._kinds == {"string"} else _typed("".join(self._value), self._kinds)
        )
        self._step = self._between
        return found.end()


class PythonReader(_BracketReader):
    """A reader of a whole Python call, `name(key=value, ...)`."""

    quotes = "\"'"
    opening = "([{"
    closing = ")]}"
    plain = re.compile(r"[^\"'()\[\]{}]*+")

    def feed(self, text: str) -> int:
        i = 0
        if not self.name:
            found = _PYTHON_NAME.match(text)
            if found is None:
                self.failed = _PYTHON_NAME_SO_FAR.fullmatch(text) is None
                return 0
            self.name, i = found[1], found.end() - 1
        end = self._to_end(text, i)
        self._pieces.append(text[i:end])
        if not self._depth:
            self._end()
        return end

    def _end(self) -> None:
        try:
            call = ast.parse(f"f{''.join(self._pieces)}", mode="eval").body
            if (
                not isinstance(call, ast.Call)
                or call.args
                or any(keyword.arg is None for keyword in call.keywords)
            ):
                raise ValueError
            values = {str(each.arg): _evaluated(each.value) for each in call.keywords}
            self._pieces = [_dumped(values)]
        except _UNREADABLE:
            self.failed = True
        self.begun = self.done = not self.failed


class _WithWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _evaluated(node: ast.expr) -> Any:
    return ast.literal_eval(_WithWords().visit(node))


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _kinds(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    if "enum" in schema and isinstance(schema["enum"], list) and "type" not in schema:
        return frozenset(_kind(value) for value in schema["enum"])
    allowed = schema.get("type")
    listed = allowed if isinstance(allowed, list) else [allowed] if allowed else []
    found = {kind for kind in listed if isinstance(kind, str)}
    inner = schema.get("anyOf") or schema.get("oneOf")
    if not found and isinstance(inner, list):
        found = {kind for each in inner for kind in _kinds(each)}
    return frozenset(found)


def _kind(value: Any) -> str:
    for types, kind in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, types):
            return kind
    return "null" if value is None else "string"


def _typed(text: str, kinds: frozenset[str]) -> str:
    for read in (_read_json, _read_python):
        try:
            value = read(text.strip())
            found = _dumped(value)
        except _UNREADABLE:
            continue
        kind = _kind(value)
        if "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds):
            return found
        break
    return json.dumps(text, ensure_ascii=False)


def _read_json(text: str) -> Any:
    return json.loads(text, strict=False)


def _read_python(text: str) -> Any:
    return _evaluated(ast.parse(text, mode="eval").body)
