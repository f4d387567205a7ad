"""Parts of a chat message, ids of tool calls, and markers in text. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

__all__ = [
    "Arguments",
    "CallBegun",
    "CallIds",
    "Content",
    "Part",
    "Reasoning",
    "StateParser",
    "any_of",
    "beginning_at_end",
    "merged",
]

_SHORT = 9  # Mistral's templates refuse ids of any other length


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the answer's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call that begins; `index` counts a choice's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's JSON."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | Arguments


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with equal neighbours merged."""
    out = list(parts)
    if len(out) < 2:  # nearly always, and for every token
        return out
    parts, out = out, []
    for (kind, index), run in groupby(parts, _kind):
        if kind is CallBegun:
            out += run
            continue
        text = "".join([part.text for part in run if not isinstance(part, CallBegun)])
        if kind is Arguments:
            out.append(Arguments(index, text))
        else:
            out.append(Content(text) if kind is Content else Reasoning(text))
    return out


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, Arguments) else 0


@dataclass(frozen=True, slots=True)
class CallIds:
    """A source of call ids, equal on every node."""

    response_id: str
    choice: int
    form: str = "call_{hex}"
    """Format with `{hex}`, `{short}` (nine characters), `{name}`, `{index}`."""
    first: int = 0
    """Index of the first call in the chat."""

    def id_of(self, index: int, name: str) -> str:
        digest = hashlib.blake2b(
            f"{self.response_id}/{self.choice}/{index}".encode(), digest_size=12
        )
        letters = digest.hexdigest()
        return self.form.format(
            hex=letters, short=letters[:_SHORT], name=name, index=self.first + index
        )


def beginning_at_end(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that begins a marker."""
    beginnings, longest = _beginnings(markers)
    for length in range(min(longest, len(text)), 0, -1):
        if text[-length:] in beginnings:
            return length
    return 0


class StateParser:
    """A parser of text in pieces.

    A state is a method that consumes `_buffer` and returns whether the next state may run.
    """

    def __init__(self, state: Callable[[], bool]) -> None:
        self._state = state
        self._buffer = ""  # not looked at yet, or perhaps the beginning of a marker
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """Return what has become certain."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._new_parts()

    def _new_parts(self) -> list[Part]:
        parts, self._parts = merged(self._parts), []
        return parts


@lru_cache(maxsize=64)
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


@lru_cache(maxsize=64)
def _beginnings(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    all_of_them = frozenset(
        marker[:length] for marker in markers for length in range(1, len(marker))
    )
    return all_of_them, max(map(len, all_of_them), default=0)
