"""Growing tickets as their source keeps them: who hears what, against a twin that remembers all
that was said.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer.chunk_progress import ProgressTable
from kvrelay.kv_transfer.connector import Completion, LeaseId
from kvrelay.kv_transfer.messages import ChunkProgress

DONE = Completion([7])


def test_a_follower_hears_where_it_stands_and_all_that_is_new() -> None:
    table, lease = ProgressTable(), LeaseId("r", 1)
    table.begin(lease, 1)
    table.grow("r", 2)
    assert table.news == []
    assert table.follow(lease, b"a") == ChunkProgress(lease, 2, None)
    table.grow("r", 2)
    table.grow("r", 3)
    table.complete("r", 4, DONE)
    table.grow("r", 5)
    table.complete("r", 5, DONE)
    assert table.news == [
        (b"a", ChunkProgress(lease, 3, None)),
        (b"a", ChunkProgress(lease, 4, DONE)),
    ]


def test_it_vouches_for_what_can_be_read_under_the_lease_and_for_no_other_blocks() -> None:
    table, lease = ProgressTable(), LeaseId("r", 2)
    table.begin(lease, 1, [7, 8])
    assert table.readable(lease) == (7,)
    table.follow(lease, b"a")
    assert table.vouch(lease, {7: b"x"}) == ChunkProgress(lease, 1, None, {7: b"x"})
    table.complete("r", 2, DONE)
    assert table.readable(lease) == (7, 8)
    assert table.vouch(lease, {8: b"y"}) == ChunkProgress(lease, 2, DONE, {8: b"y"})
    assert table.follow(lease, b"a") == ChunkProgress(lease, 2, DONE)
    for other in (LeaseId("r", 1), LeaseId("s", 2)):
        assert table.readable(other) is None
        assert table.vouch(other, {7: b"x"}) is None
    table.forget("r")
    assert table.vouch(lease, {7: b"x"}) is None


def test_a_second_reader_takes_the_place_of_the_first() -> None:
    table, lease = ProgressTable(), LeaseId("r", 1)
    table.begin(lease, 0)
    table.follow(lease, b"a")
    table.follow(lease, b"b")
    table.grow("r", 1)
    assert table.news == [(b"b", ChunkProgress(lease, 1, None))]
    assert table.superseded(lease, b"a")
    assert not table.superseded(lease, b"b")
    assert not table.superseded(LeaseId("r", 2), b"a")


def test_a_lease_of_another_time_and_one_that_has_ended_are_not_known() -> None:
    table = ProgressTable()
    table.begin(LeaseId("r", 2), 0)
    assert table.follow(LeaseId("r", 1), b"a") is None
    table.forget("r")
    table.forget("r")
    assert table.follow(LeaseId("r", 2), b"a") is None
    table.grow("r", 1)
    table.complete("r", 1, DONE)
    assert table.news == []
    assert len(table) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["grow", "complete", "follow"]), st.integers(0, 5)), max_size=30
    )
)
def test_what_a_follower_has_heard_last_is_the_truth(operations: list[tuple[str, int]]) -> None:
    table, lease = ProgressTable(), LeaseId("r", 1)
    table.begin(lease, 0)
    ready, completion, heard = 0, None, None
    for operation, number in operations:
        if operation == "grow":
            table.grow("r", number)
            ready = ready if completion else max(ready, number)
        elif operation == "complete":
            table.complete("r", 6, DONE)
            ready, completion = 6, DONE
        else:
            heard = table.follow(lease, b"a")
        for _, news in table.news:
            heard = news
        table.news.clear()
        assert heard is None or heard == ChunkProgress(lease, ready, completion)
