"""How far offered KV has grown, who follows it, and questions for its checksums. Pure.

A reader that follows a lease hears where it stands, and again each time it has grown. One reader at
a time follows a lease: a second one is there because the first has failed. A reader asks again for
checksums with each heartbeat: what it waits for is not summed twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.kv_transfer.checksums import MOST_BLOCKS
from kvrelay.kv_transfer.connector import Completion, LeaseId
from kvrelay.kv_transfer.messages import ChunkProgress

__all__ = ["ProgressTable", "Question"]

# One is summed, and the next lies ready for whichever rank is through with it.
AT_ONCE = 2


@dataclass(slots=True)
class _Offer:
    lease: LeaseId
    ready: int
    blocks: tuple[int, ...] = ()
    completion: Completion | None = None
    follower: bytes | None = None

    def news(self) -> ChunkProgress:
        return ChunkProgress(self.lease, self.ready, self.completion)


@dataclass(frozen=True, slots=True)
class Question:
    """A question of one reader for checksums of blocks."""

    sender: bytes
    lease: LeaseId
    blocks: tuple[int, ...]

    def waited_for(self) -> set[tuple[bytes, LeaseId, int]]:
        return {(self.sender, self.lease, block) for block in self.blocks}


class ProgressTable:
    """A source's offers, and its readers' unanswered questions."""

    def __init__(self) -> None:
        self.news: list[tuple[bytes, ChunkProgress]] = []
        """Messages to followers, by their connection."""
        self._offers: dict[str, _Offer] = {}
        self._waiting: deque[Question] = deque()
        self._summing = 0
        self._open: set[tuple[bytes, LeaseId, int]] = set()  # who waits for which block

    def __len__(self) -> int:
        return len(self._offers) + len(self._open)

    def begin(self, lease: LeaseId, ready: int, blocks: Sequence[int] = ()) -> None:
        """Add a lease on these blocks, of which the first `ready` can be read."""
        self._offers[lease.request_id] = _Offer(lease, ready, tuple(blocks))

    def grow(self, request_id: str, ready: int, completion: Completion | None = None) -> None:
        """Note that so many blocks can be read; all, with a completion. Ignores unknown ids."""
        offer = self._offers.get(request_id)
        if offer is None or offer.completion is not None:
            return
        if completion is not None or ready > offer.ready:
            offer.ready, offer.completion = ready, completion
            if offer.follower is not None:
                self.news.append((offer.follower, offer.news()))

    def follow(self, lease: LeaseId, follower: bytes) -> ChunkProgress | None:
        """Return where a lease stands, and send `news` to this reader from now on.

        None for an unknown lease.
        """
        offer = self._under(lease)
        if offer is None:
            return None
        offer.follower = follower
        return offer.news()

    def superseded(self, lease: LeaseId, reader: bytes) -> bool:
        offer = self._under(lease)
        return offer is not None and offer.follower not in (None, reader)

    def forget(self, request_id: str) -> None:
        self._offers.pop(request_id, None)

    def ask(self, sender: bytes, lease: LeaseId, blocks: Sequence[int]) -> bool:
        """Add a reader's question. Returns False if the lease is over.

        More than `MOST_BLOCKS` blocks, and any that cannot be read, are not answered.
        """
        offer = self._under(lease)
        if offer is None:
            return False
        new = [block for block in dict.fromkeys(blocks) if (sender, lease, block) not in self._open]
        if 0 < len(new) <= MOST_BLOCKS and set(blocks) <= set(offer.blocks[: offer.ready]):
            question = Question(sender, lease, tuple(new))
            self._open |= question.waited_for()
            self._waiting.append(question)
        return True

    def next(self) -> Question | None:
        """Return what to sum now, until `answered`; None if nothing waits, or enough is summed."""
        while self._waiting and self._summing < AT_ONCE:
            question = self._waiting.popleft()
            if self._under(question.lease) is not None:
                self._summing += 1
                return question
            self._open -= question.waited_for()
        return None

    def answered(self, question: Question, checksums: Sequence[bytes]) -> ChunkProgress | None:
        """Return the answer for the reader; None if the lease is over."""
        self._summing -= 1
        self._open -= question.waited_for()
        offer = self._under(question.lease)
        if offer is None:
            return None
        sums = dict(zip(question.blocks, checksums, strict=True))
        return ChunkProgress(offer.lease, offer.ready, offer.completion, sums)

    def _under(self, lease: LeaseId) -> _Offer | None:
        offer = self._offers.get(lease.request_id)
        return offer if offer is not None and offer.lease == lease else None
