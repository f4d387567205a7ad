"""Whether memory and latency stay as they are over a long time: the same processes, under load, in
windows. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.soak.chaos.crowd import Seen
from tests.soak.chaos.lookout import Size
from tests.soak.chaos.verdict import Times

__all__ = ["WINDOWS", "Window", "not_flat", "windows"]

WINDOWS = 12
_WARM, _LAST = 3, 3
"""The windows of warming up, and those at the end that are held against the same number behind the
warming up.
"""
_MORE_BYTES = 24 << 20
_MORE_FILES = 64
_SLOWER = 1.5


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the time. Of sizes the most that was seen in it."""

    begin_s: float
    answers: int
    first_token: Times
    gap: Times
    sizes: dict[str, Size]


def windows(
    seen: Sequence[Seen],
    sizes: Sequence[tuple[float, Mapping[str, Size]]],
    began: float,
    ended: float,
) -> list[Window]:
    """`WINDOWS` of equal length. Gaps are those between two parts of a stream."""
    found = []
    length = (ended - began) / WINDOWS
    for at in range(WINDOWS):
        begin, end = began + at * length, began + (at + 1) * length
        done = [
            each
            for each in seen
            if begin <= each.ended < end and each.end == "done" and not each.slow
        ]
        first = Times.of(each.times[0] - each.began for each in done if each.times)
        gaps = Times.of(b - a for each in done for a, b in itertools.pairwise(each.times))
        most: dict[str, Size] = {}
        for moment, of in sizes:
            if begin <= moment < end:
                for name, size in of.items():
                    most[name] = size if name not in most else _larger(most[name], size)
        found.append(Window(begin - began, len(done), first, gaps, most))
    return found


def not_flat(of: Sequence[Window]) -> list[str]:
    """What has grown, or became slower, from behind the warming up until the end."""
    early, late = of[_WARM : _WARM + _LAST], of[-_LAST:]
    told = []
    for what in ("first_token", "gap"):
        was, is_ = (sum(getattr(each, what).p50 for each in part) / _LAST for part in (early, late))
        if not is_ <= _SLOWER * was:
            told.append(f"{what} p50 has grown from {was:.1f} to {is_:.1f} ms")
    for name in late[-1].sizes:
        for what, more in (
            ("memory", _MORE_BYTES),
            ("files", _MORE_FILES),
            ("sockets", _MORE_FILES),
            ("threads", 8),
        ):
            was, is_ = (
                sum(getattr(each.sizes[name], what) for each in part if name in each.sizes) / _LAST
                for part in (early, late)
            )
            if is_ - was > more:
                told.append(f"{name} has grown from {was:,.0f} to {is_:,.0f} {what}")
    return told


def _larger(one: Size, other: Size) -> Size:
    most = [
        max(getattr(one, what), getattr(other, what))
        for what in ("memory", "files", "sockets", "threads")
    ]
    return Size(other.pid, *most)
