"""Which promises were kept: from what clients saw, what was struck, and what the router logged. Pure.

A request may fail if it says so, and if at some moment of it no decode node was up: nothing else could be done then.
Without a prefill node decode nodes compute the prompts. A request whose router was ended is lost with it, but not
without a sign.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.crowd import Seen
from load.measures import percentile

__all__ = ["MARGIN_S", "Times", "Verdict", "broken_legs", "joined", "judged", "logged_ends", "none_up"]

MARGIN_S = 2.5
"""The router sees that a node is up again so much later at most: an interval and a deadline of its health checks."""
_BROKE = re.compile(r"([0-9.]+) .*id=(\S+): the (prefill|decode) leg broke on (\S+): ")
_ENDED = re.compile(r"\bid=(\S+) path=\S+ status=")
_ROUTER_MARGIN_S = 1.0
Span = tuple[float, float]
Leg = tuple[float, str, str]
"""When it broke, its role, and the address of its node."""
Blow = tuple[float, str, str]
"""When, which kind, and the address of the node."""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Times:
        """nan of nothing."""
        ms = [second * 1e3 for second in seconds]
        return cls(percentile(ms, 0.5), percentile(ms, 0.99), max(ms, default=float("nan")))


@dataclass(slots=True)
class Verdict:
    """What became of the streams. `broken`: promises that were not kept, each in a sentence."""

    ends: Counter[str] = field(default_factory=Counter)
    equal_by_kind: Counter[str] = field(default_factory=Counter)
    honest: Counter[str] = field(default_factory=Counter)
    """Errors that clients were told, by status and message."""
    failed_over: int = 0
    gap_ms: Times = field(default_factory=lambda: Times.of([]))
    """At a fail-over: between the two parts of a stream around the moment at which its decode leg broke."""
    gap_ms_by_fault: dict[str, Times] = field(default_factory=dict)
    undisturbed_gap_ms: Times = field(default_factory=lambda: Times.of([]))
    """The longest wait of each stream of which no leg broke."""
    first_token_ms: Times = field(default_factory=lambda: Times.of([]))
    first_token_failed_over_ms: Times = field(default_factory=lambda: Times.of([]))
    """Of those of which a leg broke before their first token."""
    broken: list[str] = field(default_factory=list)


def broken_legs(log: Iterable[str]) -> dict[str, list[Leg]]:
    """By request id, which of its legs broke. Each line begins with the monotonic second at which it came (logs.py)."""
    found: dict[str, list[Leg]] = {}
    for line in log:
        if match := _BROKE.search(line):
            found.setdefault(match[2], []).append((float(match[1]), match[3], match[4]))
    return found


def logged_ends(log: Iterable[str]) -> Counter[str]:
    """How often each request has ended, by its id, as the router tells it."""
    return Counter(match[1] for line in log if (match := _ENDED.search(line)))


def none_up(down: Mapping[str, Sequence[Sequence[Span]]]) -> dict[str, list[Span]]:
    """When no node of a role was up, by role; `down` has the spans of each node of a role, which may overlap."""
    found: dict[str, list[Span]] = {}
    for role, nodes in down.items():
        together: list[Span] = [(float("-inf"), float("inf"))]
        for spans in nodes:
            wider = [(begin, end + MARGIN_S) for begin, end in spans]
            both = [(max(a, c), min(b, d)) for a, b in together for c, d in wider]
            together = sorted({(begin, end) for begin, end in both if begin < end})
        found[role] = together
    return found


def judged(
    seen: Sequence[Seen],
    legs: Mapping[str, Sequence[Leg]],
    blows: Sequence[Blow],
    no_decode: Sequence[Span],
    gap_s: float,
    no_router: Sequence[Span] = (),
) -> Verdict:
    """`no_decode`: when no decode node was up, `no_router`: when the router was not. `gap_s`: nobody waits longer for a
    part at any other time."""
    verdict, no_decode = Verdict(), joined(no_decode)
    excused = joined([*no_decode, *((begin, end + _ROUTER_MARGIN_S) for begin, end in no_router)])
    gaps: dict[str, list[float]] = {}
    others: list[float] = []
    firsts: list[float] = []
    late_firsts: list[float] = []
    for each in seen:
        verdict.ends[each.end] += 1
        broke = legs.get(each.id, [])
        told = f"{each.kind} {each.number}, id {each.id}"
        if each.end == "done":
            verdict.equal_by_kind[each.kind] += 1
        elif each.end == "left":
            continue
        elif each.end in ("broken", "silent", "refused", "error") and _meets(each, no_router, _ROUTER_MARGIN_S):
            verdict.honest["lost with the router"] += 1
        elif each.honest:
            verdict.honest[f"{each.status} {re.sub('[0-9a-f]{32}', '..', each.error)}"] += 1
            if not _meets(each, no_decode):
                verdict.broken.append(f"{told}: {each.end} {each.status} though nodes were up: {each.error}")
        else:
            verdict.broken.append(f"{told}: {each.end} {each.ended - each.began:.1f} s later: {each.error}")
        begin, end = each.gap()
        if each.times and each.end == "done" and not each.slow:
            for at, role, url in broke:
                if role == "decode" and (gap := each.gap_at(at)):
                    gaps.setdefault(_last_blow(blows, url, at), []).append(gap)
            if not broke:
                others.append(end - begin)
            (late_firsts if broke and broke[0][0] < each.times[0] else firsts).append(each.times[0] - each.began)
        wait_s = end - begin - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in excused)
        if wait_s > gap_s and not each.slow:
            verdict.broken.append(f"{told}: nothing came for {end - begin:.1f} s from {begin:.1f} on")
    verdict.failed_over = sum(bool(legs.get(each.id)) for each in seen)
    verdict.gap_ms, verdict.undisturbed_gap_ms = Times.of(itertools.chain(*gaps.values())), Times.of(others)
    verdict.gap_ms_by_fault = {kind: Times.of(seconds) for kind, seconds in sorted(gaps.items())}
    verdict.first_token_ms = Times.of([*firsts, *late_firsts])
    verdict.first_token_failed_over_ms = Times.of(late_firsts)
    return verdict


def _meets(each: Seen, spans: Iterable[Span], margin_s: float = 0.0) -> bool:
    return any(a <= each.ended and each.began <= b + margin_s for a, b in spans)


def _last_blow(blows: Sequence[Blow], url: str, until: float) -> str:
    """The kind of the last one that struck this node."""
    return max((blow for blow in blows if blow[2] == url and blow[0] <= until), default=(0.0, "no fault", ""))[1]


def joined(spans: Iterable[Span]) -> list[Span]:
    """Without overlaps."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
