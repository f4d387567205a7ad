"""Incremental reading of JSON: where a value ends, and a tool call in an object. Pure.

Control characters in strings pass, because models write line breaks there; everything else that is
not JSON fails at its first character.
"""

from __future__ import annotations

import abc
import enum
import json
import re
from collections.abc import Callable

__all__ = ["ArgumentsReader", "CallArguments", "CallReader", "JsonValue"]

_BLANKS = " \t\r\n"
_BLANK = re.compile(r"[ \t\r\n]*")
_STRING_ENDS = re.compile(r'["\\]')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.eE0123456789")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class _At(enum.Enum):
    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # or the end of the array
    FIRST_KEY = enum.auto()  # or the end of the object
    KEY = enum.auto()
    COLON = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()
    BEHIND = enum.auto()  # a comma or the end of what holds the value
    DONE = enum.auto()
    FAILED = enum.auto()


class JsonValue:
    """A reader that finds the end of one JSON value.

    A number alone ends before the first character that is not its own.
    """

    def __init__(self) -> None:
        self._at = _At.VALUE
        self._closers: list[str] = []
        self._in_key = False
        self._word = ""  # of a number: so far; of a literal: what must follow
        self._hex = 0  # digits that must follow

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        return self._at is _At.FAILED

    def feed(self, text: str, begin: int = 0) -> int:
        """Return the index after the last character of `text` that belongs to the value."""
        i = begin
        while i < len(text) and self._at not in (_At.DONE, _At.FAILED):
            if self._at is _At.STRING:
                found = _STRING_ENDS.search(text, i)
                if found is None:
                    return len(text)
                i = found.end()
                if found[0] == "\\":
                    self._at = _At.ESCAPE
                else:
                    self._string_ended()
            elif text[i] in _BLANKS and self._between():
                i = _BLANK.match(text, i).end()  # type: ignore[union-attr]
            elif self._take(text[i]):
                i += 1
        return i

    def _between(self) -> bool:
        return self._at in (
            _At.VALUE,
            _At.FIRST_ITEM,
            _At.FIRST_KEY,
            _At.KEY,
            _At.COLON,
            _At.BEHIND,
        )

    def _take(self, char: str) -> bool:
        at = self._at
        if at is _At.NUMBER:
            return self._number(char)
        if at in (_At.ESCAPE, _At.HEX):
            return self._escaped(char)
        if at is _At.LITERAL:
            return self._literal(char)
        if (
            self._closers
            and char == self._closers[-1]
            and at in (_At.FIRST_ITEM, _At.FIRST_KEY, _At.BEHIND)
        ):
            self._closers.pop()
            return self._value_ended()
        if at in (_At.VALUE, _At.FIRST_ITEM):
            return self._value(char)
        if at in (_At.FIRST_KEY, _At.KEY) and char == '"':
            self._in_key = True
            return self._go(_At.STRING)
        if at is _At.COLON and char == ":":
            return self._go(_At.VALUE)
        if at is _At.BEHIND and char == ",":
            return self._go(_At.KEY if self._closers[-1] == "}" else _At.VALUE)
        return self._fail()

    def _value(self, char: str) -> bool:
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            return self._go(_At.FIRST_KEY if char == "{" else _At.FIRST_ITEM)
        if char == '"':
            return self._go(_At.STRING)
        if char in _LITERALS:
            self._word = _LITERALS[char][1:]
            return self._go(_At.LITERAL)
        if char in _NUMBER_CHARS:
            self._word = char
            return self._go(_At.NUMBER)
        return self._fail()

    def _number(self, char: str) -> bool:
        if char in _NUMBER_CHARS:
            self._word += char
            return True
        if _NUMBER.fullmatch(self._word) is None:
            return self._fail()
        self._value_ended()
        return False  # read again, as what follows the number

    def _literal(self, char: str) -> bool:
        if char != self._word[0]:
            return self._fail()
        self._word = self._word[1:]
        return bool(self._word) or self._value_ended()

    def _escaped(self, char: str) -> bool:
        if self._at is _At.ESCAPE:
            self._hex = 4 if char == "u" else 0
            if char not in '"\\/bfnrtu':
                return self._fail()
        else:
            self._hex -= 1
            if char not in "0123456789abcdefABCDEF":
                return self._fail()
        return self._go(_At.HEX if self._hex else _At.STRING)

    def _string_ended(self) -> None:
        if self._in_key:
            self._in_key = False
            self._at = _At.COLON
        else:
            self._value_ended()

    def _value_ended(self) -> bool:
        return self._go(_At.BEHIND if self._closers else _At.DONE)

    def _go(self, at: _At) -> bool:
        self._at = at
        return True

    def _fail(self) -> bool:
        self._at = _At.FAILED
        return False


class CallArguments(abc.ABC):
    """A reader of a call's arguments, whatever their syntax; they become JSON."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.begun = self.done = self.failed = False
        """From `begun` on it is a call, whatever follows."""
        self._pieces: list[str] = []

    def drain(self) -> str:
        """Return the arguments that have come since the last time, as JSON."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    @abc.abstractmethod
    def feed(self, text: str) -> int:
        """Return the index after the last consumed character; the rest is fed again, with more."""


class ArgumentsReader(CallArguments):
    """A reader of a JSON object, the arguments of a call whose name is known."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self._value: JsonValue | None = None

    def feed(self, text: str) -> int:
        end = self._arguments(text, _skip_blanks(text, 0) if self._value is None else 0)
        self.begun = self._value is not None
        self.done = self._value is not None and self._value.done
        return end

    def _arguments(self, text: str, i: int) -> int:
        if i == len(text):
            return i
        if self._value is None:
            if text[i] != "{":
                self.failed = True
                return i
            self._value = JsonValue()
        end = self._value.feed(text, i)
        self._pieces.append(text[i:end])
        self.failed = self._value.failed
        return end


class CallReader(ArgumentsReader):
    """A reader of an object with a name and arguments (or parameters), in any order.

    Without arguments it is a call only if `may_lack_arguments`.
    """

    def __init__(self, may_lack_arguments: bool) -> None:
        super().__init__()
        self._may_lack = may_lack_arguments
        self._step: Callable[[str, int], int] = self._open
        self._other: JsonValue | None = None  # a key, or a value that is not the arguments
        self._raw: list[str] = []  # of `_other`
        self._key = ""
        self._keys = 0
        self._have_arguments = False

    def feed(self, text: str) -> int:
        i = 0
        while not (self.done or self.failed):
            if self._other is None and not self._within_arguments():
                i = _skip_blanks(text, i)
            if i >= len(text):
                break
            i = self._step(text, i)
        self.begun = bool(self.name) and (self._have_arguments or self.done)
        return i

    def _within_arguments(self) -> bool:
        return self._value is not None and not self._value.done

    def _open(self, text: str, i: int) -> int:
        return self._next(text[i] == "{", i, self._key_or_end)

    def _key_or_end(self, text: str, i: int) -> int:
        if text[i] == "}" and self._keys == 0:
            return self._close(i)
        self._keys += 1
        self._other, self._raw = JsonValue(), []
        return self._next(text[i] == '"', i, self._read_key, 0)

    def _read_key(self, text: str, i: int) -> int:
        end = self._read_other(text, i)
        if self._other is None:
            self._key = str(json.loads("".join(self._raw), strict=False))
            self._step = self._colon
        return end

    def _colon(self, text: str, i: int) -> int:
        return self._next(text[i] == ":", i, self._begin_value)

    def _begin_value(self, text: str, i: int) -> int:
        if self._key in ("arguments", "parameters") and not self._have_arguments:
            if text[i] != "{":
                return self._next(False, i, self._begin_value)
            self._have_arguments = True
            return self._next(True, i, self._read_arguments, 0)
        self._other, self._raw = JsonValue(), []
        return self._next(True, i, self._read_value, 0)

    def _read_arguments(self, text: str, i: int) -> int:
        end = self._arguments(text, i)
        if self._value is not None and self._value.done:
            self._step = self._comma_or_end
        return end

    def _read_value(self, text: str, i: int) -> int:
        end = self._read_other(text, i)
        if self._other is None:
            if self._key == "name" and not self.name:
                value = json.loads("".join(self._raw), strict=False)
                # No tool has an unprintable name, such as half a surrogate pair.
                self.failed = not (isinstance(value, str) and value and value.isprintable())
                self.name = "" if self.failed else value
            self._step = self._comma_or_end
        return end

    def _comma_or_end(self, text: str, i: int) -> int:
        if text[i] == "}":
            return self._close(i)
        return self._next(text[i] == ",", i, self._key_or_end)

    def _close(self, i: int) -> int:
        if not self._have_arguments and self._may_lack and self.name:
            self._have_arguments = True
            self._pieces.append("{}")
        self.done = bool(self.name) and self._have_arguments
        self.failed = not self.done
        return i + (not self.failed)

    def _read_other(self, text: str, i: int) -> int:
        assert self._other is not None
        end = self._other.feed(text, i)
        self._raw.append(text[i:end])
        self.failed = self._other.failed
        if self._other.done:
            self._other = None
        return end

    def _next(self, expected: bool, i: int, step: Callable[[str, int], int], width: int = 1) -> int:
        if not expected:
            self.failed = True
            return i
        self._step = step
        return i + width


def _skip_blanks(text: str, i: int) -> int:
    return _BLANK.match(text, i).end()  # type: ignore[union-attr]
