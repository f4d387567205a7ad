"""Decides which requests begin now, wait, or are refused. Pure: times are given, in seconds.

One bounded queue for the nodes of one model. The first in it begins as soon as it can be placed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvrelay.router.admission.fair_queue import E, FairQueue
from kvrelay.router.admission.rate_limits import Refusal
from kvrelay.router.placement import Refuse, Wait
from kvrelay.wire.errors import KvrelayError

__all__ = ["AdmissionQueue", "FindPlace"]

P = TypeVar("P")
FindPlace = Callable[[E], P | Wait | Refuse]
"""Return where a request would be placed now, taking nothing. Raises KvrelayError: no node can."""
_RATE_WEIGHT = 1 / 16
_LATER = "try again after the time in Retry-After"


class AdmissionQueue(Generic[E, P]):
    def __init__(self, max_queue: int, find: FindPlace[E, P]) -> None:
        self.queue: FairQueue[E] = FairQueue()
        self.max_queue = max_queue
        self._find = find
        self._begun_at: float | None = None
        self._interval_s = 0.0  # mean time between two that begin out of the queue
        self._next_late = math.inf  # no request in the queue is late before
        self._displaced: list[tuple[E, Refusal]] = []

    def arrive(self, request: E, max_of_key: int = 0) -> P | Wait | Refusal:
        """Return where a new request begins now, or that it waits, or why it does neither.

        `max_of_key` limits how many of its key may wait; 0: no limit. Raises KvrelayError.
        """
        found = self._find(request)
        if isinstance(found, Refuse):
            return _refusal(found)
        if not (self.queue or isinstance(found, Wait)):
            self.queue.begin(request)
            return found
        mine, wait_s = self.queue.waiting(request.key), self._interval_s * len(self.queue)
        if max_of_key and mine >= max_of_key:
            why = f"{mine} requests of this key wait, and its limit is {max_of_key}; {_LATER}"
            return Refusal("key_queue_full", why, wait_s)
        if len(self.queue) >= self.max_queue:
            full = f"{len(self.queue)} requests wait, and the limit is {self.max_queue}; {_LATER}"
            displaced = self.queue.displaced_by(request)
            if displaced is None:
                return Refusal("queue_full", full, wait_s)
            self.queue.remove(displaced)
            less = displaced.priority > request.priority
            why = "less important" if less else "of a key with more of them"
            refusal = Refusal("displaced", f"{full} (it was {why})", wait_s)
            self._displaced.append((displaced, refusal))
        self._next_late = min(self._next_late, request.begin_by)
        self.queue.push(request)
        return Wait("others came before")

    def leaving(self, now: float) -> Iterator[tuple[E, P | Refusal | KvrelayError]]:
        """Yield the requests that leave the queue now, each with its place or why it has none.

        A place must be taken before the next one is asked for.
        """
        while self._displaced:
            yield self._displaced.pop()
        if now >= self._next_late:
            for request in [each for each in self.queue if each.begin_by <= now]:
                self.queue.remove(request)
                yield request, self._late(request, now)
            self._next_late = min((each.begin_by for each in self.queue), default=math.inf)
        while (first := self.queue.first()) is not None:
            try:
                found = self._find(first)
            except KvrelayError as why:  # there are no nodes any more
                self.queue.remove(first)
                yield first, why
                continue
            if isinstance(found, Refuse) and found.never:
                self.queue.remove(first)
                yield first, _refusal(found)
                continue
            if isinstance(found, Wait | Refuse):
                return  # a target that would be missed now: the request is late when that is over
            self.queue.begin(first)
            if self._begun_at is not None:
                passed = now - self._begun_at
                weight = _RATE_WEIGHT if self._interval_s else 1.0
                self._interval_s += weight * (passed - self._interval_s)
            self._begun_at = now if self.queue else None
            yield first, found

    def _late(self, request: E, now: float) -> Refusal:
        waited = now - request.arrived
        if request.deadline <= now:
            why = (
                f"the request waited for {waited:.1f} s, until its deadline, and no node had "
                f"room; try again later"
            )
            return Refusal("deadline", why, None)
        target = f"its target for the first token is {request.ttft_s or 0.0:g} s"
        why = f"the request waited for {waited:.2f} s, and {target}; {_LATER}"
        return Refusal("ttft_passed", why, self._interval_s * len(self.queue))


def _refusal(why: Refuse) -> Refusal:
    limit = f"the target is {why.limit_ms:g} ms"
    if why.what == "tpot":
        takes = f"a token takes about {why.expected_ms:.1f} ms on an idle node"
        return Refusal("tpot_never", f"{takes}, and {limit}; send a higher one", None)
    if why.never:
        takes = f"the first token of this prompt takes about {why.expected_ms:.0f} ms without any"
        remedy = "send a shorter prompt or a higher target"
        return Refusal("ttft_never", f"{takes} queue, and {limit}; {remedy}", None)
    takes = f"the first token would take about {why.expected_ms:.0f} ms"
    later = f"{_LATER}, or send a higher target"
    return Refusal("ttft", f"{takes}, and {limit}; {later}", (why.expected_ms - why.limit_ms) / 1e3)
