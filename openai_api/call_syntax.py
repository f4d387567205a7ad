"""Incremental reading of tool calls that are not JSON, as JSON: in tags and in Python. Pure."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.openai_api.call_reader import CallArguments
from kvrelay.openai_api.message_parts import any_of, beginning_at_end

__all__ = ["CallTags", "PythonReader", "TaggedReader"]

_MAX_KEY_CHARS = 256
_MAX_DEPTH = 64
_PYTHON_NAME = re.compile(r"([A-Za-z_][\w.\-]*)\(")
_PYTHON_NAME_SO_FAR = re.compile(r"[A-Za-z_][\w.\-]*")
_PYTHON_MARK = re.compile(r"""["'()\[\]{}\\]""")
_JSON_WORDS = {"true": True, "false": False, "null": None}
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class CallTags:
    """A model's syntax of arguments: tags around keys and values, and a tag at the end."""

    key: tuple[str, str]
    value: tuple[str, str]
    """The first may be empty: then the value follows the key's second tag."""
    end: str
    padding: str = ""
    """Text around a value."""


class TaggedReader(CallArguments):
    """A reader of arguments in tags. Texts are passed on as they come, other values when complete.

    `properties` is a JSON schema's: it says which arguments are texts.
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


class PythonReader(CallArguments):
    """A reader of a call as Python writes one, `name(key=value, ...)`, as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self._raw: list[str] = []
        self._closers: list[str] = []
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int:
        i = 0
        if not self.name:
            found = _PYTHON_NAME.match(text)
            if found is None:
                self.failed = _PYTHON_NAME_SO_FAR.fullmatch(text) is None
                return 0
            self.name, i = found[1], found.end()
        begin = i
        while i < len(text) and not (self.done or self.failed):
            if self._escaped:
                self._escaped = False
                i += 1
                continue
            found = _PYTHON_MARK.search(text, i)
            if found is None:
                i = len(text)
            elif self._quote or found[0] != ")" or self._closers:
                self._mark(found[0])
                i = found.end()
            else:
                self._raw.append(text[begin : found.start()])
                self._end()
                return found.end() if self.done else found.start()
        self._raw.append(text[begin:i])
        return i

    def _mark(self, mark: str) -> None:
        if self._quote:
            self._escaped = mark == "\\"
            self._quote = "" if mark == self._quote else self._quote
        elif mark in "\"'":
            self._quote = mark
        elif mark in "([{":
            self._closers.append({"(": ")", "[": "]", "{": "}"}[mark])
            self.failed = len(self._closers) > _MAX_DEPTH
        else:
            self.failed = not self._closers or self._closers.pop() != mark

    def _end(self) -> None:
        try:
            call = ast.parse(f"f({''.join(self._raw)}\n)", mode="eval").body
            if (
                not isinstance(call, ast.Call)
                or call.args
                or any(keyword.arg is None for keyword in call.keywords)
            ):
                raise ValueError
            values = {str(each.arg): _evaluated(each.value) for each in call.keywords}
            self._pieces.append(_dumped(values))
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
