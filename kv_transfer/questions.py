"""Readers' questions for checksums of offered blocks, from when they come until they are answered.
Pure.

Owns who waits for which block, and what is summed next; no clock, no threads, no bytes. A reader
that has no answer yet asks again with each heartbeat: what it waits for already is not summed
twice. A lease may end while a question about it waits: that one is dropped before anything is
summed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.kv_transfer.checks import MOST_BLOCKS
from kvrelay.kv_transfer.growth import GrowthTable
from kvrelay.kv_transfer.leases import LeaseId
from kvrelay.kv_transfer.messages import Grown

__all__ = ["Question", "QuestionTable"]

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

    def __init__(self, growths: GrowthTable) -> None:
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

    def answered(self, question: Question, checksums: Sequence[bytes]) -> Grown | None:
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
