"""Fetches of the reader side, by hand through each path (at random: test_simulated_faults.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvrelay.kv_transfer.connector import (
    Completion,
    Fetched,
    FetchFailed,
    LeaseId,
    PeerKey,
    Read,
    Settled,
)
from kvrelay.kv_transfer.fetches import FetchTable, Sum
from kvrelay.kv_transfer.messages import End, Follow, Renew
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import PeerLost, TransferError

PEER, LEASE = PeerKey("127.0.0.1", 5600, "g1"), LeaseId("source-r", 1)
LEASE_S = 5.0
CONFIG = TransferConfig(lease_s=LEASE_S, transfer_deadline_s=10.0, transfer_floor_bytes_s=100.0)
DONE = Completion([5])
GONE, BROKE = PeerLost("gone"), TransferError("x")
FAILED = FetchFailed("r", "TransferError: x")


class Table(FetchTable):
    """A table that watches request r, whose peer is ready and whose lease was renewed at 0 s."""

    def __init__(
        self, growing: int | None = None, share: float = 0.0, *, vouches: bool = True
    ) -> None:
        super().__init__(replace(CONFIG, kv_checksums=share), 100)
        self.watch("r", PEER, LEASE, growing)
        self.peer_ready(PEER, 0.0, vouches=vouches)
        self.renew(0.0)

    def renew(self, sent_at: float, now: float | None = None, *, kept: bool = True) -> None:
        now = sent_at if now is None else now
        self.renewed(PEER, [LEASE] * kept, [LEASE] * (not kept), sent_at, now)

    def ask(self, *blocks: int, now: float = 0.0) -> None:
        """Remote block b goes into local block b - 6."""
        self.fetch("r", blocks, [block - 6 for block in blocks], now)

    def grow(self, ready: int, now: float, completion: Completion | None = None) -> None:
        self.grown(PEER, LEASE, ready, completion, now)

    def sent(self) -> list[object]:
        """The commands since the last call, messages without their peer."""
        commands, self.commands = self.commands, []
        return [
            each[1] if isinstance(each, tuple) and each[0] == PEER else each for each in commands
        ]

    def reads(self) -> list[tuple[int, ...]]:
        """Remote blocks of the READs since the last call; nothing was given back."""
        sent = self.sent()
        assert not any(isinstance(command, End) for command in sent)
        return [command.remote_blocks for command in sent if isinstance(command, Read)]

    def confirm(self, now: float, *, held: bool = True) -> None:
        (end,) = (command for command in self.sent() if isinstance(command, End))
        assert end.token
        self.confirmed(PEER, end.token, held=held, now=now)

    def seen(self) -> list[object]:
        """The events since the last call."""
        self.check()
        events, self.events = self.events, []
        return list(events)

    def failed(self) -> FetchFailed:
        """The failure, which is settled."""
        failed, settled = self.seen()
        assert isinstance(failed, FetchFailed)
        assert settled == Settled("r")
        return failed


@pytest.fixture
def whole() -> Table:
    """A whole ticket of two blocks, whose READ, number 1, is posted."""
    table = Table()
    table.ask(7, 8)
    assert table.sent() == [Read(1, PEER, (7, 8), (1, 2))]
    return table


@pytest.fixture
def growing() -> Table:
    """A growing ticket of three blocks that is asked for."""
    table = Table(growing=3)
    assert table.leases(PEER, growing=True) == [LEASE]
    table.ask(7, 8, 9)
    assert table.sent() == []
    return table


def test_a_read_is_fetched_when_the_source_confirms_it(whole: Table) -> None:
    whole.read_ended(1, 0.1)
    whole.confirmed(PEER, 0, held=True, now=0.2)  # the answer to another End
    assert whole.seen() == []
    whole.confirm(0.5)
    assert whole.seen() == [Fetched("r", 200, None, 0.5)]
    assert whole.next_deadline() == float("inf")


def test_the_deadline_grows_with_the_size_and_late_bytes_stay_quarantined(whole: Table) -> None:
    assert whole.next_deadline() == 12.0  # 10 s + 200 bytes at 100 bytes/s
    whole.tick(11.9)
    assert whole.seen() == []
    whole.tick(12.0)
    (failed,) = whole.seen()
    assert isinstance(failed, FetchFailed)
    assert failed.reason.startswith(
        "TransferTimeout: fetch of 2 blocks from 127.0.0.1:5600 took longer than 12.00 s"
    )
    assert whole.sent() == [End(LEASE, 0)]
    whole.tick(100.0)
    assert whole.seen() == []
    assert whole.reading(PEER)
    whole.read_ended(1, 100.0)
    assert whole.seen() == [Settled("r")]
    assert not whole.reading(PEER)


def test_a_read_that_broke_fails_and_is_settled_when_nothing_of_it_is_in_flight(
    whole: Table,
) -> None:
    whole.read_failed(1, BROKE, in_flight=True)
    assert whole.seen() == [FAILED]
    whole.read_failed(1, BROKE, in_flight=False)
    assert whole.seen() == [Settled("r")]
    assert whole.stats.failures == {"TransferError": 1}


def test_a_lease_lost_while_queueing_fails_the_later_fetch_at_once() -> None:
    table = Table()
    table.renew(1.0, kept=False)
    assert table.seen() == table.leases(PEER) == []
    table.ask(7, now=2.0)
    assert table.failed().cause == "LeaseLost"
    assert table.sent() == []


def test_a_renewal_answered_behind_our_end_fails_no_confirming_fetch(whole: Table) -> None:
    whole.read_ended(1, 0.0)
    whole.renew(0.1, kept=False)
    assert whole.seen() == []
    whole.confirm(0.2)
    assert [type(event) for event in whole.seen()] == [Fetched]


def test_an_empty_fetch_releases_and_is_fetched_at_once() -> None:
    table = Table()
    table.ask(now=1.0)
    assert table.sent() == [End(LEASE, 0)]
    assert table.seen() == [Fetched("r", 0)]


def test_growing_blocks_are_read_as_they_are_announced(growing: Table) -> None:
    growing.grow(1, 0.1)
    assert growing.reads() == [(7,)]
    growing.grow(2, 0.2)  # while a READ is in flight
    assert growing.reads() == []
    growing.read_ended(1, 0.3)
    assert growing.reads() == [(8,)]
    growing.read_ended(2, 0.4)
    assert growing.reads() == []
    for second in range(1000):  # the prompt is still being computed
        growing.renew(second)
        assert growing.next_deadline() == second + LEASE_S
        growing.tick(second + LEASE_S - 0.1)
    assert growing.seen() == []
    growing.renew(1000.0)
    growing.grow(3, 1001.0, DONE)
    assert growing.next_deadline() == 1001.0 + 10.0 + 1.0  # one block is left
    assert growing.reads() == [(9,)]
    growing.read_ended(3, 1001.2)
    growing.confirm(1001.5)
    assert growing.seen() == [Fetched("r", 300, DONE, 0.5)]


@pytest.mark.parametrize("reading", [False, True])
def test_a_source_that_computes_but_is_silent_for_a_lease_is_given_up(
    growing: Table, reading: bool
) -> None:
    if reading:
        growing.grow(1, 2.0)
    assert growing.next_deadline() == 5.0
    growing.tick(4.9)
    assert growing.seen() == []
    growing.tick(5.0)
    failed, *settled = growing.seen()
    assert isinstance(failed, FetchFailed)
    assert failed.reason.startswith(
        "PeerLost: 127.0.0.1:5600 computes the prompt but has not renewed its lease for 5 s"
    )
    assert settled == ([] if reading else [Settled("r")])


def test_blocks_of_a_growing_ticket_that_are_cached_are_not_read() -> None:
    table = Table(growing=3)
    table.grow(2, 0.0)
    table.ask(9)
    assert table.reads() == []
    table.grow(3, 0.1, DONE)
    assert table.leases(PEER, growing=True) == []
    assert table.reads() == [(9,)]


def test_the_completion_of_a_growing_ticket_that_is_all_cached_is_waited_for() -> None:
    table = Table(growing=3)
    table.ask()
    assert table.sent() == []
    table.grow(3, 0.1, DONE)
    table.confirm(0.2)
    assert table.seen() == [Fetched("r", 0, DONE, 0.1)]


def test_a_cancel_releases_and_settles_when_the_bytes_are_in(whole: Table) -> None:
    for _ in range(2):
        whole.cancel("r")
    assert whole.sent() == [End(LEASE, 0)]
    assert whole.seen() == []
    whole.read_ended(1, 0.0)
    assert whole.seen() == [Settled("r")]


@pytest.mark.parametrize("held", [True, False])
def test_a_cancel_takes_back_what_the_step_loop_has_not_seen(whole: Table, held: bool) -> None:
    whole.read_ended(1, 0.0)
    whole.confirm(0.1, held=held)
    whole.cancel("r")
    assert whole.seen() == [Settled("r")]


def test_misuse_is_refused(whole: Table) -> None:
    for name, blocks, why in (
        ("r", ([1], [1]), "'r' is reading"),
        ("t", ([1], [1]), "'t' is not watched"),
    ):
        with pytest.raises(ValueError, match=why):
            whole.fetch(name, *blocks, 0.0)
    with pytest.raises(ValueError, match="'r' is already reading"):
        whole.watch("r", PEER, LEASE)


# What a failed fetch keeps.


def test_a_renewal_is_sent_as_soon_as_a_part_is_in(growing: Table) -> None:
    growing.grow(1, 0.1)
    growing.sent()
    growing.read_ended(1, 0.2)
    assert growing.sent() == [Renew(0.2, [LEASE])]


@pytest.mark.parametrize(
    ("renewals", "verified"), [([], 0), ([0.15], 0), ([0.2], 1), ([0.4, 0.6], 2)]
)
@pytest.mark.parametrize("end", ["peer", "lease", "broken", "over"])
def test_blocks_are_kept_if_the_source_held_them_after_they_were_in(
    growing: Table, renewals: Sequence[float], verified: int, end: str
) -> None:
    """Two blocks are in at 0.2 and 0.5 s; a third one is being read when the fetch ends."""
    growing.grow(1, 0.1)
    growing.read_ended(1, 0.2)
    growing.grow(2, 0.3)
    growing.read_ended(2, 0.5)
    growing.grow(3, 0.6)
    for sent_at in renewals:
        growing.renew(sent_at, 4.0)
    if end == "peer":
        growing.peer_lost(PEER, GONE)
    elif end == "lease":
        growing.renew(4.0, kept=False)
    elif end == "broken":
        growing.read_failed(3, BROKE, in_flight=True)
    else:
        growing.read_failed(3, BROKE, in_flight=False)
    failed = growing.seen()[0]
    assert isinstance(failed, FetchFailed)
    assert failed.verified == verified


def test_all_is_kept_if_only_the_answer_to_the_end_is_missing(growing: Table) -> None:
    growing.grow(3, 0.3)
    growing.read_ended(1, 0.4)
    growing.renew(0.5)
    growing.grow(3, 0.7, DONE)
    growing.peer_lost(PEER, GONE)
    assert growing.failed().verified == 3


# Checks.


def checking(*places: tuple[int, ...]) -> Table:
    """All blocks are checked; a READ for each of `places` has ended, and our sums are there."""
    count = sum(map(len, places))
    table = Table(count, share=1.0)
    table.fetch("r", [10 + place for place in range(count)], range(count), 0.0)
    for number, some in enumerate(places):
        end = some[-1] + 1
        table.grow(end, 0.1, DONE if end == count else None)
        read, ask = table.sent()
        assert isinstance(read, Read)
        assert ask == Follow(LEASE, [10 + place for place in some])
        table.read_ended(read.read_id, 0.2 + number)
        total = table.sent()[0]
        assert isinstance(total, Sum)
        assert total.local_blocks == list(some)
        table.summed(total, [b"%d" % place for place in some], 0.2 + number)
    return table


def test_the_source_is_let_go_when_it_has_vouched_for_all() -> None:
    table = checking((0, 1), (2,))
    table.vouched(PEER, LEASE, {10: b"0", 12: b"2", 99: b"not asked for"}, 2.0)
    assert table.sent() == []
    table.vouched(PEER, LEASE, {10: b"again", 11: b"1"}, 2.1)
    table.confirm(2.2)
    assert [type(event) for event in table.seen()] == [Fetched]
    stats = table.stats
    assert (stats.checked_blocks, stats.wrong_blocks, stats.unchecked_blocks) == (3, 0, 0)


@pytest.mark.parametrize("held", [True, False])
def test_a_difference_is_corruption_only_if_the_lease_was_held(held: bool) -> None:
    table = checking((0,), (1,))
    table.renew(1.5)  # both are verified
    table.vouched(PEER, LEASE, {10: b"0", 11: b"x"}, 2.0)
    table.confirm(2.2, held=held)
    failed = table.failed()
    assert (failed.cause, failed.verified) == ("KvCorrupted" if held else "LeaseLost", 0)
    counted = table.stats.checked_blocks, table.stats.wrong_blocks
    assert counted == ((2, 1) if held else (0, 0))
    if held:
        assert "1 of 2 blocks that were checked are not what 127.0.0.1:5600 has" in failed.reason
        assert "its block 11, which is 1 here" in failed.reason


def test_our_own_checksums_may_come_last_and_the_source_may_be_gone_by_then() -> None:
    table = Table(share=1.0)
    table.ask(7)
    table.sent()
    table.read_ended(1, 0.1)
    total = table.sent()[0]
    table.vouched(PEER, LEASE, {7: b"a"}, 0.2)
    table.confirm(0.3)
    table.renew(0.4, kept=False)
    table.peer_lost(PEER, GONE)
    assert table.seen() == []
    assert isinstance(total, Sum)
    table.summed(total, [b"a"], 0.5)
    assert [type(event) for event in table.seen()] == [Fetched]


def test_checksums_that_do_not_come_end_the_fetch_by_its_deadline() -> None:
    table = checking((0,))
    table.tick(100.0)
    failed = table.failed()
    assert (failed.cause, failed.verified) == ("TransferTimeout", 0)
    assert "(its checksums missing)" in failed.reason
    assert failed.reason.endswith("set the limit, or lower kv_checksums")
    assert table.sent() == [End(LEASE, 0)]


def test_no_block_behind_one_that_is_not_compared_is_kept() -> None:
    table = checking((0,), (1,), (2, 3))
    table.renew(9.0)  # all are verified
    table.vouched(PEER, LEASE, {10: b"0", 12: b"2", 13: b"3"}, 9.1)
    table.peer_lost(PEER, GONE)
    assert table.failed() == FetchFailed("r", "PeerLost: gone", 1)


def test_a_source_without_checksums_is_not_asked_and_its_blocks_are_counted() -> None:
    table = Table(share=1.0, vouches=False)
    table.ask(7, 8)
    assert [type(command) for command in table.sent()] == [Read]
    table.read_ended(1, 0.1)
    table.confirm(0.2)
    assert [type(event) for event in table.seen()] == [Fetched]
    assert (table.stats.checked_blocks, table.stats.unchecked_blocks) == (0, 2)
