"""What readers ask of a source's checksums: none is summed twice while it is, and none of a lease
that is over.
"""

from __future__ import annotations

import pytest

from kvrelay.kv_transfer import chunk_progress
from kvrelay.kv_transfer.chunk_progress import ProgressTable, Question, QuestionTable
from kvrelay.kv_transfer.connector import LeaseId
from kvrelay.kv_transfer.messages import ChunkProgress

LEASE, OTHER = LeaseId("r", 1), LeaseId("s", 2)


def table() -> tuple[ProgressTable, QuestionTable]:
    """Of two leases, with blocks 1 to 4 and 5 to 8."""
    growths = ProgressTable()
    growths.begin(LEASE, 4, [1, 2, 3, 4])
    growths.begin(OTHER, 3, [5, 6, 7, 8])
    return growths, QuestionTable(growths)


def test_what_is_waited_for_already_is_not_summed_again() -> None:
    _, asked = table()
    for blocks in ([1, 2], [1, 2], [1, 2, 3], [3, 3, 2]):
        assert asked.ask(b"a", LEASE, blocks)
    assert asked.ask(b"b", LEASE, [2])
    first, second = asked.next(), asked.next()
    assert (first, second) == (Question(b"a", LEASE, (1, 2)), Question(b"a", LEASE, (3,)))
    assert asked.next() is None  # enough is being summed
    assert asked.ask(b"a", LEASE, [1, 2, 3])
    assert first is not None
    assert asked.answered(first, [b"x", b"y"]) == ChunkProgress(LEASE, 4, None, {1: b"x", 2: b"y"})
    assert asked.next() == Question(b"b", LEASE, (2,))
    assert asked.ask(b"a", LEASE, [1])  # the answer may have been lost
    assert second is not None
    asked.answered(second, [b"z"])
    assert asked.next() == Question(b"a", LEASE, (1,))


def test_of_a_lease_that_is_over_nothing_is_summed_and_nobody_hears() -> None:
    growths, asked = table()
    asked.ask(b"a", LEASE, [1])
    asked.ask(b"a", LEASE, [2])
    begun = asked.next()
    asked.ask(b"a", OTHER, [5])
    growths.forget("r")
    assert not asked.ask(b"a", LEASE, [3])
    assert asked.next() == Question(b"a", OTHER, (5,))
    assert begun is not None
    assert asked.answered(begun, [b"x"]) is None
    assert asked.next() is None
    assert len(asked) == 1


@pytest.mark.parametrize("blocks", [[8], [5, 9], [5, 6, 7]])
def test_blocks_that_cannot_be_read_and_too_many_are_not_answered(
    blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_progress, "MOST_BLOCKS", 2)
    _, asked = table()
    assert asked.ask(b"a", OTHER, blocks)
    assert asked.next() is None
    assert len(asked) == 0
