"""Which requests begin now, which wait, and which are told to come back, and when. Pure: times are given, in seconds.

One queue for the nodes of one model, bounded. The first in it begins as soon as it can be placed. How a request would
be placed is asked of `Look`: a place, or that there is none now, or that a target would be missed wherever it went.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.admission.fair_queue import Entrant, FairQueue
from router.placement import Refuse, Wait

__all__ = ["Admission", "Arrival", "Look", "Refusal"]

P = TypeVar("P")
Look = Callable[[Entrant], P | Wait | Refuse]
"""Say where a request would be placed now; nothing is taken."""
_RATE_WEIGHT = 1 / 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not. `reason` is one of few words, for metrics."""

    reason: str
    message: str
    retry_after_s: float | None
    """How long it would wait from now on if it came again; None: it will never be taken as it is. 0 is not known."""


@dataclass(frozen=True, slots=True)
class Arrival(Generic[P]):
    """The fate of a newcomer: it begins with a place, or is refused, or waits; and who must leave the queue for it."""

    begins: bool = False
    place: P | None = None
    refusal: Refusal | None = None
    displaced: Entrant | None = None
    displacement: Refusal | None = None


class Admission:
    """A queue in front of one model's nodes. Who waits leaves once: by `next`, `late` or `leave`."""

    def __init__(self, max_queue: int) -> None:
        self.queue = FairQueue()
        self._max_queue = max_queue
        self._begun_at: float | None = None
        self._each_s = 0.0
        """Between two that begin out of the queue, on average of late; 0: none has."""
        self._next_late = math.inf
        """Nobody in the queue is late before."""

    def take_over(self, max_queue: int) -> None:
        """Have so many wait at most from now on; those that wait go on waiting."""
        self._max_queue = max_queue

    def arrive(self, entrant: Entrant, look: Look[P], max_of_key: int = 0) -> Arrival[P]:
        """Take in a newcomer. `max_of_key` bounds how many of its key may wait; 0 does not."""
        found = look(entrant)
        if isinstance(found, Refuse):
            return Arrival(refusal=_refusal(found))
        if not (self.queue or isinstance(found, Wait)):
            self.queue.begin(entrant)
            return Arrival(True, found)
        return self._line_up(entrant, max_of_key)

    def next(self, look: Look[P], now: float) -> tuple[Entrant, P | Refusal] | None:
        """Begin the first that waits, if there is a place for it; or take it out, if there will never be one."""
        first = self.queue.first()
        if first is None:
            return None
        found = look(first)
        if isinstance(found, Refuse) and found.never:
            self.queue.remove(first)
            return first, _refusal(found)
        if isinstance(found, Wait | Refuse):  # a target that would be missed now: `late` says when it is over
            return None
        self.queue.begin(first)
        if self._begun_at is not None:
            passed = now - self._begun_at
            self._each_s += _RATE_WEIGHT * (passed - self._each_s) if self._each_s else passed
        self._begun_at = now if self.queue else None
        return first, found

    def late(self, now: float) -> list[tuple[Entrant, Refusal]]:
        """Take those out of the queue whose time is over: of the request, or for a first token as it was wanted."""
        if now < self._next_late:
            return []
        found: list[tuple[Entrant, Refusal]] = []
        for entrant in [entrant for entrant in self.queue if entrant.begin_by <= now]:
            self.queue.remove(entrant)
            waited = now - entrant.arrived
            if entrant.deadline <= now:
                why = (
                    f"the request waited for {waited:.1f} s, until its deadline, and no node had room; try again later"
                )
                found.append((entrant, Refusal("deadline", why, None)))
            else:
                target = f"its target for the first token is {entrant.ttft_s or 0.0:g} s"
                why = f"the request waited for {waited:.2f} s, and {target}; {_LATER}"
                found.append((entrant, Refusal("ttft_passed", why, self._wait_s)))
        self._next_late = min((entrant.begin_by for entrant in self.queue), default=math.inf)
        return found

    def leave(self, entrant: Entrant) -> None:
        """Take it out of the queue: its client has gone."""
        self.queue.remove(entrant)

    def ended(self, entrant: Entrant, tokens: int) -> None:
        """Note what one that began has cost in fact, however it ended."""
        self.queue.correct(entrant, tokens)

    @property
    def _wait_s(self) -> float:
        """How long the queue takes; 0 is not known."""
        return self._each_s * len(self.queue)

    def _line_up(self, entrant: Entrant, max_of_key: int) -> Arrival[P]:
        mine = self.queue.waiting(entrant.key)
        if max_of_key and mine >= max_of_key:
            why = f"{mine} requests of this key wait, and its limit is {max_of_key}; {_LATER}"
            return Arrival(refusal=Refusal("key_queue_full", why, self._wait_s))
        if len(self.queue) < self._max_queue:
            self._push(entrant)
            return Arrival()
        full = f"{len(self.queue)} requests wait, and the limit is {self._max_queue}; {_LATER}"
        displaced = self.queue.displaced_by(entrant)
        if displaced is None:
            return Arrival(refusal=Refusal("queue_full", full, self._wait_s))
        self.queue.remove(displaced)
        self._push(entrant)
        less = "less important" if displaced.priority > entrant.priority else "of a key with more of them"
        return Arrival(displaced=displaced, displacement=Refusal("displaced", f"{full} (it was {less})", self._wait_s))

    def _push(self, entrant: Entrant) -> None:
        target = math.inf if entrant.ttft_s is None else entrant.arrived + entrant.ttft_s
        entrant.begin_by = min(entrant.deadline, target)
        self._next_late = min(self._next_late, entrant.begin_by)
        self.queue.push(entrant)


def _refusal(why: Refuse) -> Refusal:
    limit = f"the target is {why.limit_ms:g} ms"
    if why.what == "tpot":
        takes = f"a token takes about {why.expected_ms:.1f} ms on an idle node"
        return Refusal("tpot_never", f"{takes}, and {limit}; send a higher one", None)
    if why.never:
        takes = f"the first token of this prompt takes about {why.expected_ms:.0f} ms without any queue"
        return Refusal("ttft_never", f"{takes}, and {limit}; send a shorter prompt or a higher target", None)
    takes = f"the first token would take about {why.expected_ms:.0f} ms"
    later = f"{_LATER}, or send a higher target"
    return Refusal("ttft", f"{takes}, and {limit}; {later}", (why.expected_ms - why.limit_ms) / 1e3)


_LATER = "try again after the time in Retry-After"
