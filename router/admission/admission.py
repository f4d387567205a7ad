"""Which requests begin now, which wait, and which are told to come back, and when. Pure: times are
given, in seconds.

One queue for the nodes of one model, bounded. The first in it begins as soon as it can be placed.
How a request would be placed is asked of a `Look`: a place, or that there is none now, or that a
target would be missed wherever it went.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvrelay.router.admission.fair_queue import E, FairQueue
from kvrelay.router.admission.rate_limits import Refusal
from kvrelay.router.placement import Refuse, Wait
from kvrelay.wire.errors import KvrelayError

__all__ = ["Admission", "Look"]

P = TypeVar("P")
Look = Callable[[E], P | Wait | Refuse]
"""Say where a request would be placed now; nothing is taken. Raises KvrelayError: no node could
take it.
"""
_RATE_WEIGHT = 1 / 16
_LATER = "try again after the time in Retry-After"


class Admission(Generic[E, P]):
    """A queue in front of one model's nodes."""

    def __init__(self, max_queue: int, look: Look[E, P]) -> None:
        self.queue: FairQueue[E] = FairQueue()
        self.max_queue = max_queue
        """How many may wait; may be changed at any time, for those that come."""
        self.look = look
        self._begun_at: float | None = None
        self._each_s = 0.0
        """Between two that begin out of the queue, on average of late; 0: none has."""
        self._next_late = math.inf
        """Nobody in the queue is late before."""
        self._displaced: list[tuple[E, Refusal]] = []

    def arrive(self, entrant: E, max_of_key: int = 0) -> P | Wait | Refusal:
        """Take in a newcomer, and say where it begins now, or that it waits, or why it does
        neither.

        `max_of_key` bounds how many of its key may wait; 0 does not. Raises KvrelayError.
        """
        found = self.look(entrant)
        if isinstance(found, Refuse):
            return _refusal(found)
        if not (self.queue or isinstance(found, Wait)):
            self.queue.begin(entrant)
            return found
        mine, all_s = self.queue.waiting(entrant.key), self._each_s * len(self.queue)
        if max_of_key and mine >= max_of_key:
            why = f"{mine} requests of this key wait, and its limit is {max_of_key}; {_LATER}"
            return Refusal("key_queue_full", why, all_s)
        if len(self.queue) >= self.max_queue:
            full = f"{len(self.queue)} requests wait, and the limit is {self.max_queue}; {_LATER}"
            displaced = self.queue.displaced_by(entrant)
            if displaced is None:
                return Refusal("queue_full", full, all_s)
            self.queue.remove(displaced)
            less = (
                "less important"
                if displaced.priority > entrant.priority
                else "of a key with more of them"
            )
            self._displaced.append(
                (displaced, Refusal("displaced", f"{full} (it was {less})", all_s))
            )
        self._next_late = min(self._next_late, entrant.begin_by)
        self.queue.push(entrant)
        return Wait("others came before")

    def turns(self, now: float) -> Iterator[tuple[E, P | Refusal | KvrelayError]]:
        """Yield who leaves the queue now, each with the place where it begins or why it does not.

        A place must be taken before the next one is asked for.
        """
        while self._displaced:
            yield self._displaced.pop()
        if now >= self._next_late:
            for entrant in [entrant for entrant in self.queue if entrant.begin_by <= now]:
                self.queue.remove(entrant)
                yield entrant, self._late(entrant, now)
            self._next_late = min((entrant.begin_by for entrant in self.queue), default=math.inf)
        while (first := self.queue.first()) is not None:
            try:
                found = self.look(first)
            except KvrelayError as why:  # there are no nodes any more
                self.queue.remove(first)
                yield first, why
                continue
            if isinstance(found, Refuse) and found.never:
                self.queue.remove(first)
                yield first, _refusal(found)
                continue
            if isinstance(
                found, Wait | Refuse
            ):  # a target that would be missed now: it is late when that is over
                return
            self.queue.begin(first)
            if self._begun_at is not None:
                passed = now - self._begun_at
                self._each_s += _RATE_WEIGHT * (passed - self._each_s) if self._each_s else passed
            self._begun_at = now if self.queue else None
            yield first, found

    def _late(self, entrant: E, now: float) -> Refusal:
        """Say why it leaves whose time is over: of the request, or for a first token as it was
        wanted.
        """
        waited = now - entrant.arrived
        if entrant.deadline <= now:
            why = (
                f"the request waited for {waited:.1f} s, until its deadline, and no node had "
                f"room; try again later"
            )
            return Refusal("deadline", why, None)
        target = f"its target for the first token is {entrant.ttft_s or 0.0:g} s"
        why = f"the request waited for {waited:.2f} s, and {target}; {_LATER}"
        return Refusal("ttft_passed", why, self._each_s * len(self.queue))


def _refusal(why: Refuse) -> Refusal:
    limit = f"the target is {why.limit_ms:g} ms"
    if why.what == "tpot":
        takes = f"a token takes about {why.expected_ms:.1f} ms on an idle node"
        return Refusal("tpot_never", f"{takes}, and {limit}; send a higher one", None)
    if why.never:
        takes = (
            f"the first token of this prompt takes about {why.expected_ms:.0f} ms without any queue"
        )
        return Refusal(
            "ttft_never", f"{takes}, and {limit}; send a shorter prompt or a higher target", None
        )
    takes = f"the first token would take about {why.expected_ms:.0f} ms"
    later = f"{_LATER}, or send a higher target"
    return Refusal("ttft", f"{takes}, and {limit}; {later}", (why.expected_ms - why.limit_ms) / 1e3)
