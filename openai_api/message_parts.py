"""Parts of a chat message, ids of tool calls, and markers in text that comes in pieces. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
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
    "any_of",
    "beginning_at_end",
    "joined",
]

_ALPHANUMERICS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHORT = 9  # Mistral's templates refuse ids of any other length


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of what the client reads as the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call: `index` counts those of one choice from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON of a call's arguments, exactly as the model wrote it."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | Arguments


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours of one kind as one."""
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
    """Ids of the calls of one choice: functions of these values, so that every node gives a call
    the same one.
    """

    response_id: str
    choice: int
    form: str = "call_{hex}"
    """What an id looks like to the model, with `{hex}`, `{short}` (nine letters and digits),
    `{name}` and `{index}`.
    """
    first: int = 0
    """Index of the first one in the whole chat."""

    def of(self, index: int, name: str) -> str:
        """The id of the call with that index, of the tool of that name."""
        digest = hashlib.blake2b(
            f"{self.response_id}/{self.choice}/{index}".encode(), digest_size=12
        )
        number, letters = int.from_bytes(digest.digest()), []
        for _ in range(_SHORT):
            number, place = divmod(number, len(_ALPHANUMERICS))
            letters.append(_ALPHANUMERICS[place])
        return self.form.format(
            hex=digest.hexdigest(), short="".join(letters), name=name, index=self.first + index
        )


def beginning_at_end(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that one of the markers begins with, without being all of
    it.
    """
    beginnings, longest = _beginnings(markers)
    for length in range(min(longest, len(text)), 0, -1):
        if text[-length:] in beginnings:
            return length
    return 0


@lru_cache(maxsize=64)
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """The pattern of the markers."""
    return re.compile("|".join(map(re.escape, markers)))


@lru_cache(maxsize=64)
def _beginnings(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """(what markers begin with, the length of the longest such)."""
    all_of_them = frozenset(
        marker[:length] for marker in markers for length in range(1, len(marker))
    )
    return all_of_them, max(map(len, all_of_them), default=0)
