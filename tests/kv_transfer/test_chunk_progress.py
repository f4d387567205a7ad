"""Growing tickets at their source, and questions for checksums of their blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer import chunk_progress
from kvrelay.kv_transfer.chunk_progress import ProgressTable, Question
from kvrelay.kv_transfer.connector import Completion, LeaseId
from kvrelay.kv_transfer.messages import ChunkProgress

DONE = Completion([7])
LEASE, OTHER = LeaseId("r", 2), LeaseId("s", 3)


@given(
    st.lists(
        st.tuples(st.sampled_from(["grow", "complete", "follow"]), st.integers(0, 5)), max_size=30
    )
)
def test_what_a_follower_has_heard_last_is_the_truth(operations: list[tuple[str, int]]) -> None:
    table = ProgressTable()
    table.begin(LEASE, 0)
    ready, completion, heard = 0, None, None
    for operation, number in operations:
        if operation == "grow":
            table.grow("r", number)
            ready = ready if completion else max(ready, number)
        elif operation == "complete":
            table.grow("r", 6, DONE)
            ready, completion = 6, DONE
        else:
            heard = table.follow(LEASE, b"a")
        if table.news:
            heard = table.news[-1][1]
        table.news.clear()
        assert heard is None or heard == ChunkProgress(LEASE, ready, completion)


def test_a_follower_hears_only_what_is_new() -> None:
    table = ProgressTable()
    table.begin(LEASE, 1)
    table.grow("r", 2)
    assert table.news == []
    table.follow(LEASE, b"a")
    for ready in (2, 3, 3):
        table.grow("r", ready)
    assert table.news == [(b"a", ChunkProgress(LEASE, 3, None))]


def test_a_second_reader_takes_the_place_of_the_first() -> None:
    table = ProgressTable()
    table.begin(LEASE, 0)
    table.follow(LEASE, b"a")
    table.follow(LEASE, b"b")
    table.grow("r", 1)
    assert table.news == [(b"b", ChunkProgress(LEASE, 1, None))]
    assert table.superseded(LEASE, b"a")
    assert not table.superseded(LEASE, b"b")
    assert not table.superseded(LeaseId("r", 1), b"a")


def test_a_lease_of_another_time_and_one_that_has_ended_are_not_known() -> None:
    table = ProgressTable()
    table.begin(LEASE, 1, [7, 8])
    earlier = LeaseId("r", 1)
    assert table.follow(earlier, b"a") is None
    assert not table.ask(b"a", earlier, [7])
    for _ in range(2):
        table.forget("r")
    assert table.follow(LEASE, b"a") is None
    assert not table.ask(b"a", LEASE, [7])
    table.grow("r", 1)
    table.grow("r", 1, DONE)
    assert table.news == []
    assert len(table) == 0


@pytest.fixture
def asked() -> ProgressTable:
    """Two leases, with blocks 1 to 4 and 5 to 8."""
    asked = ProgressTable()
    asked.begin(LEASE, 4, [1, 2, 3, 4])
    asked.begin(OTHER, 3, [5, 6, 7, 8])
    return asked


def test_what_is_waited_for_already_is_not_summed_again(asked: ProgressTable) -> None:
    for blocks in ([1, 2], [1, 2], [1, 2, 3], [3, 3, 2]):
        assert asked.ask(b"a", LEASE, blocks)
    assert asked.ask(b"b", LEASE, [2])
    first, second = asked.next(), asked.next()
    assert (first, second) == (Question(b"a", LEASE, (1, 2)), Question(b"a", LEASE, (3,)))
    assert asked.next() is None  # enough is being summed
    assert first is not None
    assert asked.answered(first, [b"x", b"y"]) == ChunkProgress(LEASE, 4, None, {1: b"x", 2: b"y"})
    assert asked.next() == Question(b"b", LEASE, (2,))
    assert asked.ask(b"a", LEASE, [1])  # the answer may have been lost
    assert second is not None
    asked.answered(second, [b"z"])
    assert asked.next() == Question(b"a", LEASE, (1,))


def test_nothing_of_a_lease_that_is_over_is_summed_and_nobody_hears(asked: ProgressTable) -> None:
    asked.ask(b"a", LEASE, [1])
    asked.ask(b"a", LEASE, [2])
    begun = asked.next()
    asked.ask(b"a", OTHER, [5])
    asked.forget("r")
    assert not asked.ask(b"a", LEASE, [3])
    assert asked.next() == Question(b"a", OTHER, (5,))
    assert begun is not None
    assert asked.answered(begun, [b"x"]) is None
    assert asked.next() is None
    assert len(asked) == 2


@pytest.mark.parametrize("blocks", [[8], [5, 9], [5, 6, 7]])
def test_blocks_that_cannot_be_read_and_too_many_are_not_answered(
    asked: ProgressTable, blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_progress, "MOST_BLOCKS", 2)
    assert asked.ask(b"a", OTHER, blocks)
    assert asked.next() is None
    assert len(asked) == 2
