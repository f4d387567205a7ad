"""How far offered KV has grown, who follows it, and questions for its checksums. Pure.

The source's side of a growing ticket. A reader that follows a lease hears where it stands, and
again each time it has grown. One reader at a time follows a lease: a second one is there because
the first has failed. A reader asks again for checksums with each heartbeat: what it waits for is
not summed twice, and a question about a lease that has ended is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.kv_transfer.checksums import MOST_BLOCKS
from kvrelay.kv_transfer.connector import Completion, LeaseId
from kvrelay.kv_transfer.messages import ChunkProgress

__all__ = ["ProgressTable", "Question", "QuestionTable"]


@dataclass(slots=True)
class _Offer:
    lease: LeaseId
    ready: int
    blocks: tuple[int, ...] = ()
    completion: Completion | None = None
    follower: bytes | None = None

    def news(self) -> ChunkProgress:
        return ChunkProgress(self.lease, self.ready, self.completion)


class ProgressTable:
    """A table of all offers. `news` are messages to followers, by their connection."""

    def __init__(self) -> None:
        self.news: list[tuple[bytes, ChunkProgress]] = []
        self._growths: dict[str, _Offer] = {}

    def __len__(self) -> int:
        return len(self._growths)

    def begin(self, lease: LeaseId, ready: int, blocks: Sequence[int] = ()) -> None:
        """Add a lease on these blocks, of which the first `ready` can be read."""
        self._growths[lease.request_id] = _Offer(lease, ready, tuple(blocks))

    def grow(self, request_id: str, ready: int) -> None:
        """Note that the first `ready` blocks can be read. Unknown ids are ignored."""
        growth = self._growths.get(request_id)
        if growth is not None and growth.completion is None and ready > growth.ready:
            growth.ready = ready
            self._tell(growth)

    def complete(self, request_id: str, ready: int, completion: Completion) -> None:
        """Note that all blocks can be read, and what was generated. Unknown ids are ignored."""
        growth = self._growths.get(request_id)
        if growth is not None and growth.completion is None:
            growth.ready, growth.completion = ready, completion
            self._tell(growth)

    def follow(self, lease: LeaseId, follower: bytes) -> ChunkProgress | None:
        """Return where a lease stands, and send `news` to this reader from now on.

        None for an unknown lease.
        """
        growth = self._growths.get(lease.request_id)
        if growth is None or growth.lease != lease:
            return None
        growth.follower = follower
        return growth.news()

    def readable(self, lease: LeaseId) -> tuple[int, ...] | None:
        """Return the blocks that can be read under this lease; None if it is over."""
        growth = self._growths.get(lease.request_id)
        return (
            growth.blocks[: growth.ready] if growth is not None and growth.lease == lease else None
        )

    def vouch(self, lease: LeaseId, checksums: dict[int, bytes]) -> ChunkProgress | None:
        """Return the answer to a reader that asked for checksums; None if the lease is over."""
        growth = self._growths.get(lease.request_id)
        if growth is None or growth.lease != lease:
            return None
        return ChunkProgress(lease, growth.ready, growth.completion, checksums)

    def superseded(self, lease: LeaseId, reader: bytes) -> bool:
        """Return whether another reader has followed this lease since."""
        growth = self._growths.get(lease.request_id)
        return (
            growth is not None and growth.lease == lease and growth.follower not in (None, reader)
        )

    def forget(self, request_id: str) -> None:
        """Remove a lease. Unknown ids are ignored."""
        self._growths.pop(request_id, None)

    def _tell(self, growth: _Offer) -> None:
        if growth.follower is not None:
            self.news.append((growth.follower, growth.news()))


# One is summed, and the next lies ready for whichever rank is through with it.
AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Question:
    """A question of one reader for checksums of blocks."""

    sender: bytes
    lease: LeaseId
    blocks: tuple[int, ...]


class QuestionTable:
    """A source's unanswered questions. None is summed twice, and none of an ended lease."""

    def __init__(self, growths: ProgressTable) -> None:
        self._growths = growths
        self._waiting: deque[Question] = deque()
        self._summing = 0
        self._open: set[tuple[bytes, LeaseId, int]] = set()  # who waits for which block

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, sender: bytes, lease: LeaseId, blocks: Sequence[int]) -> bool:
        """Add a reader's question. Returns False if the lease is over.

        More than `MOST_BLOCKS` blocks, and any that cannot be read, are not answered.
        """
        readable = self._growths.readable(lease)
        if readable is None:
            return False
        new = tuple(
            block for block in dict.fromkeys(blocks) if (sender, lease, block) not in self._open
        )
        if new and len(new) <= MOST_BLOCKS and set(blocks) <= set(readable):
            self._open.update((sender, lease, block) for block in new)
            self._waiting.append(Question(sender, lease, new))
        return True

    def next(self) -> Question | None:
        """Return what to sum now, until `answered`; None if nothing waits, or enough is summed."""
        while self._waiting and self._summing < AT_ONCE:
            question = self._waiting.popleft()
            if self._growths.readable(question.lease) is not None:
                self._summing += 1
                return question
            self._close(question)
        return None

    def answered(self, question: Question, checksums: Sequence[bytes]) -> ChunkProgress | None:
        """Return the answer for the reader; None if the lease is over."""
        self._summing -= 1
        self._close(question)
        return self._growths.vouch(
            question.lease, dict(zip(question.blocks, checksums, strict=True))
        )

    def _close(self, question: Question) -> None:
        self._open.difference_update(
            (question.sender, question.lease, block) for block in question.blocks
        )
