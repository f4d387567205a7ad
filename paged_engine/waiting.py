"""Requests that wait for a seat, blocks or another request: in which order, and who cannot begin yet. Pure.

A *fork* has the prompt of another request, its parent, and waits until that prompt is computed or fetched. A fork whose
parent is gone starts by itself.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from paged_engine.request import Request, State

__all__ = ["WaitingLine"]


class WaitingLine:
    """Waiting requests in the order of their turns. `live` are all requests that have not ended, by id."""

    def __init__(self, live: Mapping[str, Request], block_tokens: int) -> None:
        self._live = live
        self._block_tokens = block_tokens
        self._line: list[Request] = []

    def __len__(self) -> int:
        return len(self._line)

    def __bool__(self) -> bool:
        return bool(self._line)

    def join(self, request: Request) -> None:
        """It waits, before all whose turn comes later."""
        request.state = State.WAITING
        bisect.insort(self._line, request, key=lambda each: each.turn)

    def leave(self, request: Request) -> None:
        """It waits no more."""
        self._line.remove(request)

    def candidates(self) -> list[Request]:
        """Those that may begin now, in order; the line may change meanwhile."""
        return [request for request in self._line if not self._held_back(request)]

    def parents_blocks(self, request: Request) -> list[int]:
        """Of a fork, the blocks that it shares with its parent; none if that is gone."""
        parent = self._parent(request)
        return [] if parent is None else parent.blocks[: self._forked(request)]

    @property
    def tokens(self) -> int:
        """Tokens to compute before all of them decode, without what they will share."""
        return sum(each.uncomputed - self._forked(each) * self._block_tokens for each in self._line)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert all(each.state is State.WAITING and not each.blocks for each in self._line)
        assert self._line == sorted(self._line, key=lambda each: each.turn)

    def _parent(self, request: Request) -> Request | None:
        return None if request.fork_of is None else self._live.get(request.fork_of)

    def _forked(self, request: Request) -> int:
        """Blocks that a fork shares: those that its prompt fills, without its newest token, whose logits it wants."""
        if self._parent(request) is None:
            return 0
        return min(request.prompt_tokens, len(request.token_ids) - 1) // self._block_tokens

    def _held_back(self, request: Request) -> bool:
        parent = self._parent(request)
        if parent is None:
            return False
        return parent.fetch is not None or parent.num_computed < self._forked(request) * self._block_tokens
