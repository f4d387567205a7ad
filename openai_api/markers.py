"""Markers in text that comes in pieces. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["any_of", "beginning_at_end"]


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
