"""Which promises were kept: from what clients saw, what was struck, and what the router logged.

Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrelay.load.measures import percentile
from kvrelay.router.request.failures import MAX_LOST, REFUSED_S
from tests.soak.chaos.crowd import Seen

__all__ = [
    "Outage",
    "Span",
    "Verdict",
    "failed_over",
    "judged",
    "logged_ends",
    "meets",
    "none_up",
]

MARGIN_S = 2.5
"""The router sees that a node is up again so much later at most: an interval and a deadline of its
health checks.
"""
_BROKE = re.compile(r"\bid=(\S+): the (?:prefill|decode) request failed on ")
_ENDED = re.compile(r"\bid=(\S+) path=\S+ status=")
_ROUTER_MARGIN_S = 1.0
Span = tuple[float, float]


class Outage(NamedTuple):
    """When there was no router. `drained`: when the time was over that it had for what was under
    way, if it had been told to end; else it was killed.
    """

    begin: float
    end: float
    drained: float | None = None


@dataclass(slots=True)
class Verdict:
    """What became of the streams. `broken`: promises that were not kept, each in a sentence."""

    ends: Counter[str] = field(default_factory=Counter)
    failed_over: int = 0
    gap_ms: dict[str, float] = field(default_factory=dict)
    """The longest wait of each stream."""
    broken: list[str] = field(default_factory=list)


def failed_over(log: Iterable[str]) -> int:
    """How many requests have had a broken leg, as the router tells it."""
    return len({match[1] for line in log if (match := _BROKE.search(line))})


def logged_ends(log: Iterable[str]) -> Counter[str]:
    """How often each request has ended, by its id, as the router tells it."""
    return Counter(match[1] for line in log if (match := _ENDED.search(line)))


def none_up(down: Iterable[Sequence[Span]]) -> list[Span]:
    """When none of these nodes was up; `down` has the spans of each, which may overlap."""
    together: list[Span] = [(float("-inf"), float("inf"))]
    for spans in down:
        wider = [(begin, end + MARGIN_S) for begin, end in spans]
        both = [(max(a, c), min(b, d)) for a, b in together for c, d in wider]
        together = sorted({(begin, end) for begin, end in both if begin < end})
    return together


def judged(
    seen: Sequence[Seen],
    no_decode: Sequence[Span],
    gap_s: float,
    no_router: Sequence[Outage] = (),
    lost: Collection[Sequence[Span]] = (),
) -> Verdict:
    """`no_decode`: when no decode node was up, `no_router`: when the router was not. `gap_s`:
    nobody waits longer for a part at any other time. `lost`: of each node, when it was down or
    badly connected.
    """
    verdict, no_decode = Verdict(), joined(no_decode)
    excused = joined(
        [*no_decode, *((each.begin, each.end + _ROUTER_MARGIN_S) for each in no_router)]
    )
    longest_ms: list[float] = []
    for each in seen:
        verdict.ends[each.end] += 1
        told = f"{each.kind} {each.number}, id {each.id}"
        if each.end == "left":
            continue
        if each.end == "done" or (not each.past_router and _lost_with(each, no_router)):
            pass
        elif each.end in ("refused", "error"):
            lacking = meets(each.began, each.ended, no_decode) or _killed_two(each, lost)
            if each.past_router or not lacking:
                verdict.broken.append(
                    f"{told}: {each.end} {each.status} though nodes were up: {each.error}"
                )
        else:
            verdict.broken.append(
                f"{told}: {each.end} {each.ended - each.began:.1f} s later: {each.error}"
            )
        gaps = [] if each.slow else each.gaps()
        if gaps and each.end == "done":
            longest_ms.append(max(end - begin for begin, end in gaps) * 1e3)
        verdict.broken += [
            f"{told}: nothing came for {end - begin:.1f} s from {begin:.1f} on"
            for begin, end in gaps
            if end - begin - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in excused) > gap_s
        ]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    verdict.gap_ms = {name: percentile(longest_ms, share) for name, share in shares.items()}
    return verdict


def meets(began: float, ended: float, spans: Iterable[Span]) -> bool:
    """Whether something that lasted so long has a moment in common with one of these."""
    return any(a <= ended and began <= b for a, b in spans)


def _lost_with(each: Seen, routers: Iterable[Outage]) -> bool:
    for router in routers:
        if router.begin <= each.ended and each.began <= router.end + _ROUTER_MARGIN_S:
            killed = router.drained is None
            if each.end == "broken" and (killed or not each.status):
                return True
            if each.end == "refused" and each.status == 503:
                return True
            if each.end == "error" and router.drained is not None and each.ended >= router.drained:
                return True
    return False


def _killed_two(each: Seen, lost: Iterable[Sequence[Span]]) -> bool:
    """Return whether it was refused for two nodes that were lost with it or, before, its like."""
    before_s = REFUSED_S * ("it is refused for" in each.error)
    nodes = sum(meets(each.began - before_s, each.ended, spans) for spans in lost)
    return "while they had this request" in each.error and nodes >= MAX_LOST


def joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
