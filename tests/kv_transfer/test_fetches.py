"""Fetches of the reader side, by hand through each path (at random: test_fetch_histories.py)."""

from __future__ import annotations

import pytest

from kvrelay.kv_transfer.connector import (
    Ask,
    Completion,
    End,
    Fetched,
    FetchFailed,
    LeaseId,
    PeerKey,
    Read,
    Settled,
    Sum,
)
from kvrelay.kv_transfer.fetch import FetchLimits
from kvrelay.kv_transfer.fetches import FetchTable
from kvrelay.wire.errors import PeerLost, TransferError

PEER = PeerKey("127.0.0.1", 5600, "g1")
LIMITS = FetchLimits(lease_s=5.0, deadline_s=10.0, floor_bytes_s=100.0, block_bytes=100)


def watched(now: float = 0.0) -> tuple[FetchTable, LeaseId]:
    """A table with request r watched, its peer ready and its lease renewed at `now`."""
    table, lease = FetchTable(LIMITS), LeaseId("source-r", 1)
    table.watch("r", PEER, lease)
    table.peer_ready(PEER, now)
    table.renewed(PEER, [lease], [], now, now)
    return table, lease


def reading(now: float = 0.0) -> tuple[FetchTable, LeaseId, Read]:
    """The same, with its READ of two blocks posted."""
    table, lease = watched(now)
    table.fetch("r", [1, 2], [3, 4], now)
    (read,) = table.commands
    assert isinstance(read, Read)
    table.commands.clear()
    return table, lease, read


def token(table: FetchTable) -> int:
    """Of the End that the table waits for."""
    (end,) = table.commands
    assert isinstance(end, End)
    return end.token


def drained(table: FetchTable) -> list[object]:
    table.check()
    events: list[object] = list(table.events)
    table.events.clear()
    return events


def test_confirmed_read_is_fetched() -> None:
    table, lease, read = reading()
    assert read == Read(read.read_id, PEER, (1, 2), (3, 4))
    table.read_ended(read.read_id, 0.1)
    assert drained(table) == []
    (end,) = table.commands
    assert isinstance(end, End)
    assert (end.peer, end.lease) == (PEER, lease)
    assert end.token
    table.confirmed(PEER, end.token, held=True, now=0.5)
    assert drained(table) == [Fetched("r", 200, 0.5, None, 0.5, read_s=0.1)]
    assert table.next_deadline() is None


def test_read_that_the_source_does_not_confirm_is_never_fetched() -> None:
    table, _, read = reading()
    table.read_ended(read.read_id, 0.0)
    table.confirmed(PEER, token(table), held=False, now=0.1)
    failed, settled = drained(table)
    assert isinstance(failed, FetchFailed)
    assert failed.reason.startswith("LeaseLost: 127.0.0.1:5600 no longer holds")
    assert settled == Settled("r")


def test_read_waits_until_a_renewal_young_enough_is_acknowledged() -> None:
    table, lease = watched(now=0.0)
    table.fetch("r", [1], [2], now=4.6)  # 4.5 s is the lease minus its margin
    assert table.commands == []
    table.renewed(PEER, [lease], [], sent_at=0.05, now=4.7)
    assert table.commands == []
    table.renewed(PEER, [lease], [], sent_at=4.65, now=4.8)
    assert [type(command) for command in table.commands] == [Read]


def test_fetch_waits_for_its_peer() -> None:
    table, lease = FetchTable(LIMITS), LeaseId("r", 1)
    table.watch("r", PEER, lease)
    table.fetch("r", [1], [2], 0.0)
    table.renewed(PEER, [lease], [], 0.0, 0.0)
    assert table.commands == []
    table.peer_ready(PEER, 0.1)
    assert [type(command) for command in table.commands] == [Read]


def test_deadline_is_its_constant_plus_size_at_floor_speed_and_late_bytes_stay_quarantined() -> (
    None
):
    table, lease, read = reading()
    assert table.next_deadline() == 12.0  # 10 s + 200 bytes at 100 bytes/s
    table.tick(11.9)
    assert drained(table) == []
    table.tick(12.0)
    (failed,) = drained(table)
    assert isinstance(failed, FetchFailed)
    assert failed.reason.startswith(
        "TransferTimeout: fetch of 2 blocks from 127.0.0.1:5600 took longer than 12.00 s"
    )
    assert table.commands == [End(PEER, lease, 0)]
    table.tick(100.0)
    assert drained(table) == []
    assert table.reading(PEER)
    table.read_ended(read.read_id, 0.0)
    assert drained(table) == [Settled("r")]
    assert not table.reading(PEER)


def test_broken_read_settles_only_when_nothing_can_land_any_more() -> None:
    table, _, read = reading()
    table.read_failed(read.read_id, TransferError("x"), 0.0, in_flight=True)
    assert drained(table) == [FetchFailed("r", "TransferError: x")]
    table.read_failed(read.read_id, PeerLost("y"), 0.0, in_flight=False)
    assert drained(table) == [Settled("r")]


def test_a_read_that_broke_and_is_over_is_tried_again_once() -> None:
    table, lease = growing()
    table.fetch("r", [7, 8, 9], [1, 2, 3], 0.0)
    table.grown(PEER, lease, 1, None, 0.1)
    table.read_ended(1, 0.2)
    table.grown(PEER, lease, 2, None, 0.3)
    table.grown(PEER, lease, 3, None, 0.4)  # not a part of the READ that breaks
    assert reads(table) == [((7,), (1,)), ((8,), (2,))]
    table.read_failed(2, TransferError("x"), 0.5, in_flight=False)
    assert drained(table) == []
    assert reads(table) == [((8, 9), (2, 3))]
    table.read_failed(3, TransferError("x"), 0.6, in_flight=False)
    assert drained(table) == [FetchFailed("r", "TransferError: x"), Settled("r")]
    assert (table.retries, dict(table.failures)) == (1, {"TransferError": 1})


def test_a_read_from_a_lost_peer_is_not_tried_again() -> None:
    table, _, read = reading()
    table.read_failed(read.read_id, PeerLost("x"), 0.1, in_flight=False)
    assert drained(table) == [FetchFailed("r", "PeerLost: x"), Settled("r")]


def test_lost_peer_fails_its_fetches_and_their_reads_end_by_themselves() -> None:
    table, _, read = reading()
    table.watch("other", PeerKey("127.0.0.1", 5601, "g2"), LeaseId("other", 1))
    table.peer_lost(PEER, PeerLost("gone"))
    assert drained(table) == [FetchFailed("r", "PeerLost: gone")]
    assert table.commands == []  # nobody to tell
    table.read_failed(read.read_id, PeerLost("z"), 0.0, in_flight=False)
    assert drained(table) == [Settled("r")]


def test_lease_lost_while_queueing_fails_the_later_fetch_at_once() -> None:
    table, lease = watched()
    table.renewed(PEER, [], [lease], 1.0, 1.0)
    assert drained(table) == []
    assert table.leases(PEER) == []
    table.fetch("r", [1], [2], 2.0)
    assert [type(event) for event in drained(table)] == [FetchFailed, Settled]
    assert table.commands == []


def test_renewal_answered_behind_our_end_does_not_fail_a_confirming_fetch() -> None:
    table, lease, read = reading()
    table.read_ended(read.read_id, 0.0)
    table.renewed(PEER, [], [lease], 0.1, 0.1)
    assert drained(table) == []
    table.confirmed(PEER, token(table), held=True, now=0.2)
    assert [type(event) for event in drained(table)] == [Fetched]


def test_empty_fetch_releases_and_is_fetched_at_once() -> None:
    table, lease = watched()
    table.fetch("r", [], [], 1.0)
    assert table.commands == [End(PEER, lease, 0)]
    assert drained(table) == [Fetched("r", 0, 0.0)]


def growing(now: float = 0.0) -> tuple[FetchTable, LeaseId]:
    """A table with a growing ticket of three blocks watched, its peer ready and its lease renewed
    at `now`.
    """
    table, lease = FetchTable(LIMITS), LeaseId("source-r", 1)
    table.watch("r", PEER, lease, growing=3)
    assert table.growing(PEER) == [lease]
    table.peer_ready(PEER, now)
    table.renewed(PEER, [lease], [], now, now)
    return table, lease


def content(block: int) -> bytes:
    """The checksum of a block as its source has it."""
    return b"%d" % block


def reads(table: FetchTable) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = [(c.remote_blocks, c.local_blocks) for c in table.commands if isinstance(c, Read)]
    assert not any(isinstance(command, End) for command in table.commands)
    table.commands.clear()
    return found


def test_growing_blocks_are_read_as_they_are_announced() -> None:
    table, lease = growing()
    table.fetch("r", [7, 8, 9], [1, 2, 3], 0.0)
    assert reads(table) == []
    table.grown(PEER, lease, 1, None, 0.1)
    assert reads(table) == [((7,), (1,))]
    table.grown(PEER, lease, 2, None, 0.2)  # while a READ is in flight
    assert reads(table) == []
    table.read_ended(1, 0.3)
    assert reads(table) == [((8,), (2,))]
    table.read_ended(2, 0.4)
    assert reads(table) == []
    for second in range(1000):  # the prompt is still being computed
        table.renewed(PEER, [lease], [], second, second)
        assert table.next_deadline() == second + LIMITS.lease_s
        table.tick(second + LIMITS.lease_s - 0.1)
    assert drained(table) == []
    table.renewed(PEER, [lease], [], 1000.0, 1000.0)
    done = Completion([5])
    table.grown(PEER, lease, 3, done, 1001.0)
    assert table.next_deadline() == 1001.0 + 10.0 + 1.0  # one block is left
    assert reads(table) == [((9,), (3,))]
    table.read_ended(3, 1001.2)
    table.confirmed(PEER, token(table), held=True, now=1001.5)
    assert drained(table) == [Fetched("r", 300, 1001.5, done, 0.5, read_s=pytest.approx(0.5))]


@pytest.mark.parametrize("reading", [False, True])
def test_a_source_that_computes_but_says_nothing_for_a_lease_is_given_up(reading: bool) -> None:
    table, lease = growing()
    table.fetch("r", [7, 8, 9], [1, 2, 3], 1.0)
    if reading:
        table.grown(PEER, lease, 1, None, 2.0)
    assert table.next_deadline() == 6.0
    table.tick(5.9)
    assert drained(table) == []
    table.tick(6.0)
    failed, *settled = drained(table)
    assert isinstance(failed, FetchFailed)
    assert failed.reason.startswith(
        "PeerLost: 127.0.0.1:5600 computes the prompt but has not renewed its lease for 5 s"
    )
    assert settled == ([] if reading else [Settled("r")])


def test_of_a_growing_ticket_whose_first_blocks_are_cached_here_the_rest_is_read() -> None:
    table, lease = growing()
    table.grown(PEER, lease, 2, None, 0.0)
    table.fetch("r", [9], [3], 0.0)
    assert reads(table) == []
    table.grown(PEER, lease, 3, Completion([5]), 0.1)
    assert reads(table) == [((9,), (3,))]


def test_of_a_growing_ticket_that_is_all_cached_here_the_completion_is_waited_for() -> None:
    table, lease = growing()
    table.fetch("r", [], [], 0.0)
    assert table.commands == []
    done = Completion([5])
    table.grown(PEER, lease, 3, done, 0.1)
    table.confirmed(PEER, token(table), held=True, now=0.2)
    assert drained(table) == [Fetched("r", 0, 0.2, done, 0.1)]


def test_a_growing_ticket_may_be_complete_before_it_is_asked_for() -> None:
    table, lease = growing()
    table.grown(PEER, lease, 3, Completion([5]), 0.1)
    assert table.growing(PEER) == []
    table.fetch("r", [7, 8, 9], [1, 2, 3], 0.2)
    assert reads(table) == [((7, 8, 9), (1, 2, 3))]
    assert table.next_deadline() == 13.2


def test_cancel_between_two_reads_settles_at_once() -> None:
    table, lease = growing()
    table.fetch("r", [7, 8, 9], [1, 2, 3], 0.0)
    table.grown(PEER, lease, 1, None, 0.1)
    table.read_ended(1, 0.2)
    table.commands.clear()
    table.cancel("r")
    assert table.commands == [End(PEER, lease, 0)]
    assert drained(table) == [Settled("r")]


def test_cancel_of_a_watched_request_only_releases() -> None:
    table, lease = watched()
    table.cancel("r")
    table.cancel("r")
    assert table.commands == [End(PEER, lease, 0)]
    assert drained(table) == []


def test_cancel_of_a_read_settles_when_the_bytes_are_in() -> None:
    table, lease, read = reading()
    table.cancel("r")
    table.cancel("r")
    assert table.commands == [End(PEER, lease, 0)]
    assert drained(table) == []
    table.read_ended(read.read_id, 0.0)
    assert drained(table) == [Settled("r")]


@pytest.mark.parametrize("held", [True, False])
def test_cancel_takes_back_what_the_step_loop_has_not_seen(held: bool) -> None:
    table, _, read = reading()
    table.read_ended(read.read_id, 0.0)
    table.confirmed(PEER, token(table), held=held, now=0.1)
    table.cancel("r")
    assert drained(table) == [Settled("r")]


def test_answer_meant_for_another_request_of_the_same_lease_confirms_nothing() -> None:
    table, _, read = reading()
    table.read_ended(read.read_id, 0.0)
    table.confirmed(PEER, 0, held=True, now=0.1)
    table.confirmed(PEER, token(table) + 1, held=True, now=0.1)
    assert drained(table) == []


def test_misuse_is_refused() -> None:
    table, lease, _ = reading()
    with pytest.raises(ValueError, match="'r' is already reading"):
        table.watch("r", PEER, lease)
    with pytest.raises(ValueError, match="'r' is reading"):
        table.fetch("r", [1], [1], 0.0)
    with pytest.raises(ValueError, match="'s' is not watched"):
        table.fetch("s", [1], [1], 0.0)
    table.watch("s", PEER, lease)
    with pytest.raises(ValueError, match="2 remote blocks for 1 local"):
        table.fetch("s", [1, 2], [1], 0.0)
    table.watch("t", PEER, lease, growing=1)
    with pytest.raises(ValueError, match="2 blocks of a ticket for 1"):
        table.fetch("t", [1, 2], [1, 2], 0.0)


def checking(places: list[tuple[int, ...]]) -> tuple[FetchTable, LeaseId]:
    """A table that checks everything, with a READ for each of `places` ended: block p of ours is 10
    + p of the peer.
    """
    table, lease = FetchTable(LIMITS, 1.0), LeaseId("source-r", 1)
    count = sum(map(len, places))
    table.watch("r", PEER, lease, growing=count)
    table.peer_ready(PEER, 0.0, vouches=True)
    table.renewed(PEER, [lease], [], 0.0, 0.0)
    table.fetch("r", [10 + p for p in range(count)], list(range(count)), 0.0)
    for number, some in enumerate(places):
        end = some[-1] + 1
        table.grown(PEER, lease, end, Completion([5]) if end == count else None, 0.1)
        read, ask = table.commands
        assert isinstance(read, Read)
        assert ask == Ask(PEER, lease, tuple(10 + p for p in some))
        table.commands.clear()
        table.read_ended(read.read_id, 0.2 + number)
        (total, *_) = table.commands
        assert isinstance(total, Sum)
        assert total.local_blocks == some
        table.commands.clear()
        table.summed(total.number, [b"%d" % p for p in some], 0.2 + number)
    return table, lease


def test_the_source_is_let_go_when_it_has_vouched_for_all() -> None:
    table, lease = checking([(0, 1), (2,)])
    table.vouched(PEER, lease, {10: b"0", 12: b"2"}, 2.0)
    assert table.commands == []
    assert table.unanswered(PEER) == [Ask(PEER, lease, (11,))]
    table.vouched(PEER, lease, {11: b"1"}, 2.1)
    assert table.unanswered(PEER) == []
    table.confirmed(PEER, token(table), held=True, now=2.2)
    assert [type(event) for event in drained(table)] == [Fetched]
    assert (table.checked_blocks, table.wrong_blocks, table.unchecked_blocks) == (3, 0, 0)


@pytest.mark.parametrize("held", [True, False])
def test_a_difference_is_corruption_only_if_the_lease_was_held(held: bool) -> None:
    table, lease = checking([(0,), (1,)])
    table.renewed(PEER, [lease], [], 1.5, 1.5)  # both are verified
    table.vouched(PEER, lease, {10: b"0", 11: b"x"}, 2.0)
    table.confirmed(PEER, token(table), held=held, now=2.2)
    failed, settled = drained(table)
    assert isinstance(failed, FetchFailed)
    assert (failed.cause, failed.verified) == ("KvCorrupted" if held else "LeaseLost", 0)
    assert settled == Settled("r")
    assert (table.checked_blocks, table.wrong_blocks) == ((2, 1) if held else (0, 0))
    if held:
        assert "1 of 2 blocks that were checked are not what 127.0.0.1:5600 has" in failed.reason
        assert "its block 11, which is 1 here" in failed.reason


def test_our_own_checksums_may_come_last_and_the_source_may_be_gone_by_then() -> None:
    table, lease = FetchTable(LIMITS, 1.0), LeaseId("source-r", 1)
    table.watch("r", PEER, lease)
    table.peer_ready(PEER, 0.0, vouches=True)
    table.renewed(PEER, [lease], [], 0.0, 0.0)
    table.fetch("r", [1], [3], 0.0)
    table.read_ended(1, 0.1)
    (total,) = [command for command in table.commands if isinstance(command, Sum)]
    table.commands.clear()
    table.vouched(PEER, lease, {1: b"a"}, 0.2)
    table.confirmed(PEER, token(table), held=True, now=0.3)
    table.renewed(PEER, [], [lease], 0.4, 0.4)
    table.peer_lost(PEER, PeerLost("gone"))
    assert drained(table) == []
    table.summed(total.number, [b"a"], 0.5)
    assert [type(event) for event in drained(table)] == [Fetched]


def test_checksums_that_do_not_come_end_the_fetch_by_its_deadline() -> None:
    table, lease = checking([(0,)])
    table.tick(100.0)
    failed, _ = drained(table)
    assert isinstance(failed, FetchFailed)
    assert failed.reason.startswith("TransferTimeout")
    assert "(its checksums missing)" in failed.reason
    assert failed.reason.endswith("set the limit, or lower kv_checksums")
    assert failed.verified == 0
    assert table.commands == [End(PEER, lease, 0)]


def test_what_fails_for_another_reason_keeps_no_block_behind_one_that_is_not_compared() -> None:
    table, lease = checking([(0,), (1,), (2, 3)])
    table.renewed(PEER, [lease], [], 9.0, 9.0)  # all are verified
    table.vouched(PEER, lease, {10: b"0", 12: b"2", 13: b"3"}, 9.1)
    table.peer_lost(PEER, PeerLost("gone"))
    assert drained(table) == [FetchFailed("r", "PeerLost: gone", 1), Settled("r")]


def test_a_source_without_checksums_is_not_asked_and_its_blocks_are_counted() -> None:
    lease = LeaseId("source-r", 1)
    table = FetchTable(LIMITS, 1.0)
    table.watch("r", PEER, lease)
    table.peer_ready(PEER, 0.0)
    table.renewed(PEER, [lease], [], 0.0, 0.0)
    table.fetch("r", [1, 2], [3, 4], 0.0)
    assert [type(command) for command in table.commands] == [Read]
    table.commands.clear()
    table.read_ended(1, 0.1)
    table.confirmed(PEER, token(table), held=True, now=0.2)
    assert [type(event) for event in drained(table)] == [Fetched]
    assert (table.checked_blocks, table.unchecked_blocks) == (0, 2)
