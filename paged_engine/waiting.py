"""Requests that wait for a seat, blocks or another request, in order. Pure.

Among equal priorities the shortest prompt goes first, until later requests that overtake one have
together OVERTAKEN times its tokens. Fetches keep the order of arrival. A *fork* waits until its
parent's prompt is in the prefix cache, or its parent is gone.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from kvrelay.paged_engine.request import Request, State

__all__ = ["OVERTAKEN", "WaitingQueue"]

# A request waits for thrice its own tokens at most.
OVERTAKEN = 2


class WaitingQueue:
    """A queue in the order of turns; `live` are all requests by id."""

    def __init__(self, live: Mapping[str, Request], block_size: int) -> None:
        self._live = live
        self._block_size = block_size
        self._line: list[Request] = []
        self._arrivals = 0
        self._arrived_tokens = 0
        self.tokens = 0
        """To compute before all of them decode."""
        self.pairs = 0.0
        """Each token times those before it in its request."""
        self.wanted = 0

    def __len__(self) -> int:
        return len(self._line)

    def __bool__(self) -> bool:
        return bool(self._line)

    def add(self, request: Request, cached: int = 0) -> None:
        request.state = State.WAITING
        request.shared = max(cached, self._forked(request) * self._block_size)
        handed_over = request.fetch is not None and request.pull_from is None
        request.work = 0 if handed_over else request.uncomputed - request.shared
        request.wanted = request.expected_tokens - request.shared
        self._count(request, 1)
        if not request.order:
            self._set_turn(request)
        bisect.insort(self._line, request, key=lambda each: each.turn)

    def remove(self, request: Request) -> None:
        self._line.remove(request)
        self._count(request, -1)

    def candidates(self, before: Request | None = None) -> list[Request]:
        """Return those that may begin now, in order, before another's turn."""
        end = len(self._line)
        if before is not None:
            end = bisect.bisect_left(self._line, before.turn, key=lambda each: each.turn)
        return [request for request in self._line[:end] if not self._held_back(request)]

    def _count(self, request: Request, by: int) -> None:
        self.tokens += by * request.work
        self.pairs += by * request.work * (request.shared + request.work / 2)
        self.wanted += by * request.wanted

    def _set_turn(self, request: Request) -> None:
        self._arrivals += 1
        request.order = self._arrivals
        self._arrived_tokens += request.work if request.fetch is None else request.fetch.num_tokens
        request.rank = self._arrived_tokens + OVERTAKEN * request.work
        parent = self._parent(request)
        if parent is not None:
            request.rank = max(request.rank, parent.rank)

    def _parent(self, request: Request) -> Request | None:
        return None if request.fork_of is None else self._live.get(request.fork_of)

    def _forked(self, request: Request) -> int:
        if self._parent(request) is None:
            return 0
        return min(request.prompt_tokens, len(request.token_ids) - 1) // self._block_size

    def _held_back(self, request: Request) -> bool:
        parent = self._parent(request)
        if request.asking or parent is None:
            return request.asking
        return (
            parent.fetch is not None
            or parent.num_computed < self._forked(request) * self._block_size
        )
