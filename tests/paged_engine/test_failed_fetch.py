"""What a request does when its KV does not come: it keeps what is verified, or ends.

Random failures are in test_scheduler.py.
"""

from __future__ import annotations

import pytest
from invariants import check_scheduler
from scheduling import BLOCK, EOS, all_free, drain, expected, fetching, make, start_fetch, step

from kvrelay.paged_engine.request import State
from kvrelay.wire.outputs import Finish


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("verified", "kept"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_what_is_verified_is_kept_and_the_rest_is_computed(
    verified: int, kept: int, prefix_cache: bool
) -> None:
    """The third block is not full: nobody could find it again, and one token must be computed
    anyway.
    """
    scheduler = make(prefix_cache=prefix_cache)
    req = fetching("r", list(range(40)), early=True)
    scheduler.add(req)
    fetch = start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", verified)
    check_scheduler(scheduler)
    assert req.blocks == fetch.local_blocks[:kept]
    assert scheduler.kept.quarantined == 3 - kept
    assert scheduler.kept_blocks == kept
    assert req.fetch_error == "PeerLost: gone"
    assert scheduler.pool.cached == (kept if prefix_cache else 0)
    assert step(scheduler) == [("r", kept * BLOCK, 40 - kept * BLOCK)]
    scheduler.kept.settle("r")
    drain(scheduler)
    assert req.token_ids == expected(list(range(40)), 5)
    assert all_free(scheduler)
    assert scheduler.kept.quarantined == 0


@pytest.mark.parametrize(("early", "chunk"), [(True, (16, 16)), (False, (32, 1))])
def test_of_whole_blocks_the_last_is_kept_if_the_first_token_is_known(
    early: bool, chunk: tuple[int, int]
) -> None:
    scheduler = make()
    scheduler.add(fetching("r", list(range(32)), early=early))
    start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", 2)
    assert step(scheduler) == [("r", *chunk)]


def test_verified_blocks_come_behind_those_that_were_cached() -> None:
    scheduler = make()
    scheduler.add(fetching("before", list(range(20)), max_tokens=1, early=True))
    start_fetch(scheduler)
    scheduler.finish_fetch("before", [EOS])
    req = fetching("r", list(range(60)), early=True)
    scheduler.add(req)
    fetch = start_fetch(scheduler)
    assert fetch.remote_blocks == [501, 502, 503]
    scheduler.fail_fetch("r", "PeerLost: gone", 1)
    assert step(scheduler) == [("r", 32, 28)]
    assert scheduler.kept_blocks == 1


def test_without_room_for_the_rest_it_waits_and_finds_the_verified_blocks_again() -> None:
    scheduler = make(blocks=6)  # 5, of which 4 are fetched to; the quarantine leaves too few
    req = fetching("r", list(range(60)), early=True)
    scheduler.add(req)
    start_fetch(scheduler)
    scheduler.fail_fetch("r", "PeerLost: gone", 1)
    assert req.state is State.WAITING
    assert step(scheduler) == []
    scheduler.kept.settle("r")
    assert step(scheduler) == [("r", 16, 44)]
    assert scheduler.preemptions == 0


def test_a_request_that_is_given_up_ends_with_an_error_and_its_blocks_stay_until_settled() -> None:
    scheduler = make()
    req = fetching("r", list(range(40)), early=True)
    scheduler.add(req)
    start_fetch(scheduler)
    scheduler.end_failed_fetch("r", "PeerLost: gone")
    check_scheduler(scheduler)
    assert (req.finish, req.fetch_error) == (Finish.ERROR, "PeerLost: gone")
    assert scheduler.kept.quarantined == 3
    assert not scheduler.has_work
    scheduler.kept.settle("r")
    assert all_free(scheduler)
