"""Parts of a chat message, ids of tool calls, and markers in text. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

__all__ = ["Part", "any_of", "beginning_at_end", "call_id", "merged"]

_SHORT = 9  # Mistral's templates refuse ids of any other length


class Part(NamedTuple):
    """A piece of a message: text, a call's name when it begins, or a piece of its JSON."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    at: int = 0
    """Index of the call among the choice's."""


def merged(parts: Iterable[Part]) -> list[Part]:
    runs = [list(run) for _, run in groupby(parts, attrgetter("kind", "at"))]
    return [
        run[0] if len(run) == 1 else run[0]._replace(text="".join([part.text for part in run]))
        for run in runs
    ]


def call_id(response_id: str, choice: int, index: int, *, short: bool) -> str:
    seed = f"{response_id}/{choice}/{index}".encode()
    digest = hashlib.blake2b(seed, digest_size=12).hexdigest()
    return digest[:_SHORT] if short else f"call_{digest}"


def beginning_at_end(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that begins a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


@lru_cache(maxsize=64)
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
