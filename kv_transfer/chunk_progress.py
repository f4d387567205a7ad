"""How far offered KV has grown, and which reader wants to hear of it: the source's side of a
growing ticket. Pure.

Owns a line per lease and the news that are to be told; no clock, no sockets, no blocks. A reader
that follows a lease hears where it stands, and again each time it has grown. One reader at a time
follows a lease: a second one is there because the first has failed.
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
    """`news` are messages to followers, by the name under which the control channel knows them."""

    def __init__(self) -> None:
        self.news: list[tuple[bytes, ChunkProgress]] = []
        self._growths: dict[str, _Offer] = {}

    def __len__(self) -> int:
        """Leases that are known here."""
        return len(self._growths)

    def begin(self, lease: LeaseId, ready: int, blocks: Sequence[int] = ()) -> None:
        """A lease was granted on these blocks, of which the first `ready` can be read."""
        self._growths[lease.request_id] = _Offer(lease, ready, tuple(blocks))

    def grow(self, request_id: str, ready: int) -> None:
        """The first `ready` blocks can be read. Unknown ids, and news that are none, are ignored."""
        growth = self._growths.get(request_id)
        if growth is not None and growth.completion is None and ready > growth.ready:
            growth.ready = ready
            self._tell(growth)

    def complete(self, request_id: str, ready: int, completion: Completion) -> None:
        """All blocks can be read, and this is what the request has generated. Unknown ids are
        ignored.
        """
        growth = self._growths.get(request_id)
        if growth is not None and growth.completion is None:
            growth.ready, growth.completion = ready, completion
            self._tell(growth)

    def follow(self, lease: LeaseId, follower: bytes) -> ChunkProgress | None:
        """A reader wants to hear: where it stands now, and from now on in `news`. None if the lease
        is not known.
        """
        growth = self._growths.get(lease.request_id)
        if growth is None or growth.lease != lease:
            return None
        growth.follower = follower
        return growth.news()

    def readable(self, lease: LeaseId) -> tuple[int, ...] | None:
        """The blocks that can be read under this lease; None if it is not known, or over."""
        growth = self._growths.get(lease.request_id)
        return (
            growth.blocks[: growth.ready] if growth is not None and growth.lease == lease else None
        )

    def vouch(self, lease: LeaseId, checksums: dict[int, bytes]) -> ChunkProgress | None:
        """What a reader is told that has asked for these, however the lease stands now; None if it
        is over.
        """
        growth = self._growths.get(lease.request_id)
        if growth is None or growth.lease != lease:
            return None
        return ChunkProgress(lease, growth.ready, growth.completion, checksums)

    def superseded(self, lease: LeaseId, reader: bytes) -> bool:
        """Whether another reader has followed this lease since."""
        growth = self._growths.get(lease.request_id)
        return (
            growth is not None and growth.lease == lease and growth.follower not in (None, reader)
        )

    def forget(self, request_id: str) -> None:
        """The lease has ended. Unknown ids are ignored."""
        self._growths.pop(request_id, None)

    def _tell(self, growth: _Offer) -> None:
        if growth.follower is not None:
            self.news.append((growth.follower, growth.news()))


# One is summed, and the next lies ready for whichever rank is through with it.
AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Question:
    """Of one reader, as the control channel knows it."""

    sender: bytes
    lease: LeaseId
    blocks: tuple[int, ...]


class QuestionTable:
    """All questions that a source has not answered."""

    def __init__(self, growths: ProgressTable) -> None:
        """`growths` knows which blocks can be read under which lease."""
        self._growths = growths
        self._waiting: deque[Question] = deque()
        self._summing = 0
        self._open: set[tuple[bytes, LeaseId, int]] = set()  # who waits for which block

    def __len__(self) -> int:
        """Blocks that are waited for, each once for each who does."""
        return len(self._open)

    def ask(self, sender: bytes, lease: LeaseId, blocks: Sequence[int]) -> bool:
        """A reader wants the checksums of these blocks. False if the lease is over.

        More than `MOST_BLOCKS`, and any that cannot be read, are not answered."""
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
        """What to sum now, until `answered`; None if nothing waits, or enough is being summed."""
        while self._waiting and self._summing < AT_ONCE:
            question = self._waiting.popleft()
            if self._growths.readable(question.lease) is not None:
                self._summing += 1
                return question
            self._close(question)
        return None

    def answered(self, question: Question, checksums: Sequence[bytes]) -> ChunkProgress | None:
        """These are summed: what the reader is told, None if the lease is over."""
        self._summing -= 1
        self._close(question)
        return self._growths.vouch(
            question.lease, dict(zip(question.blocks, checksums, strict=True))
        )

    def _close(self, question: Question) -> None:
        self._open.difference_update(
            (question.sender, question.lease, block) for block in question.blocks
        )
