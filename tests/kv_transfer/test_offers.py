"""Offers of the source side: leases against a model, news of growing KV, questions for checksums."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrelay.kv_transfer import offers as module
from kvrelay.kv_transfer.connector import Completion, LeaseId, Released
from kvrelay.kv_transfer.messages import ChunkProgress
from kvrelay.kv_transfer.offers import Offers
from kvrelay.wire.transfer import Ticket

LEASE_S = 5.0
DONE = Completion([7])
LEASE = LeaseId("r", 1)


class Words(set[int]):
    """Epochs that readers of this host see as held."""

    begin, end = set[int].add, set[int].remove


class Table(Offers):
    """A table of offers of blocks 1 to 4, in two groups."""

    def __init__(self) -> None:
        self.words = Words()
        super().__init__(LEASE_S, cast(Any, self.words))

    def offer(self, name: str, now: float = 0.0, ready: int | None = None) -> Ticket:
        ticket = Ticket(
            remote_request_id=name, remote_block_ids=[[1, 3], [2, 4]], growing=ready is not None
        )
        return self.add(ticket, 4 if ready is None else ready, now)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["offer", "begin", "follow", "complete", "renew", "prolong", "end", "release"]
            ),
            st.sampled_from("abc"),
            st.integers(0, 1),  # how many epochs old the reader's knowledge is
            st.floats(0.001, 4.0),
        ),
        max_size=60,
    )
)
@example(  # both run out in one step, the older one last
    [
        ("offer", "a", 0, 0.1),
        ("offer", "b", 0, 0.1),
        ("renew", "a", 0, 0.1),
        ("release", "c", 0, 4.0),
        ("release", "c", 0, 4.0),
    ]
)
@example(  # the reader leaves while the KV grows: the lease ends when it is complete
    [("begin", "a", 0, 0.1), ("end", "a", 0, 0.1), ("complete", "a", 0, 0.1)]
)
@example(  # another reader has come
    [
        ("begin", "a", 0, 0.1),
        ("end", "a", 0, 0.1),
        ("follow", "a", 0, 0.1),
        ("complete", "a", 0, 0.1),
    ]
)
def test_leases_equal_a_model(operations: list[tuple[str, str, int, float]]) -> None:
    offers, now = Table(), 0.0
    held: dict[str, tuple[int, float]] = {}  # by request: epoch, and end or infinity
    epochs: dict[str, int] = {}
    unwanted: set[str] = set()
    ended: list[Released] = []
    for operation, name, age, seconds in operations:
        now += seconds
        offers.expire(now)
        over = [each for each in held if held[each][1] <= now]
        for late in sorted(over, key=lambda each: held[each][1]):
            ended.append(Released(late, expired=True))
            del held[late]
        lease = LeaseId(name, epochs.get(name, 0) - age)
        epoch, until = held.get(name, (0, 0.0))
        known = epoch == lease.epoch != 0
        grows = until == math.inf
        ends = operation == "release" or (operation == "end" and known and not grows)
        ends = ends or (operation == "complete" and name in unwanted)
        goes_on = operation == "prolong" or (operation == "renew" and known)
        match operation:
            case "offer" | "begin" if name in held:
                with pytest.raises(ValueError, match="already has a lease"):
                    offers.offer(name, now)
            case "offer":
                epochs[name] = offers.offer(name, now).lease_epoch
                held[name] = epochs[name], now + LEASE_S
            case "begin":
                epochs[name] = offers.offer(name, now, ready=1).lease_epoch
                held[name] = epochs[name], math.inf
            case "complete":
                assert (offers.complete(name, DONE, now) is not None) == (grows and not ends)
            case "follow":
                assert (offers.follow(lease, b"reader") is not None) == known
            case "renew":
                both = ([lease], []) if known else ([], [lease])
                assert offers.renew([lease, lease], now) == both
            case "prolong":
                offers.prolong(name, now)
            case "end":
                assert offers.end(lease, b"reader", now) == ends
            case "release":
                offers.release(name)
        if known and grows and operation in ("end", "follow"):
            (unwanted.add if operation == "end" else unwanted.discard)(name)
        if epoch and ends:
            unwanted.discard(name)
            ended.append(Released(name, expired=False))
            del held[name]
        elif epoch and (operation == "complete" if grows else goes_on):
            held[name] = epoch, now + LEASE_S
        offers.check()
        assert offers.events == ended
        assert offers.words == {epoch for epoch, _ in held.values()}
        assert offers.next_expiry() == min((until for _, until in held.values()), default=math.inf)


@given(
    st.lists(
        st.tuples(st.sampled_from(["grow", "complete", "follow"]), st.integers(0, 4)), max_size=30
    )
)
def test_what_a_follower_has_heard_last_is_the_truth(operations: list[tuple[str, int]]) -> None:
    offers = Table()
    assert offers.offer("r", ready=0).growing
    ready, completion, heard = 0, None, None
    for operation, number in operations:
        offers.news.clear()
        if operation == "grow":
            offers.grow("r", number)
            ready = ready if completion else max(ready, number)
        elif operation == "complete":
            ticket = offers.complete("r", DONE, 0.0)
            assert (ticket is None) == (completion is not None)
            assert ticket is None or not ticket.growing
            ready, completion = 4, DONE
        else:
            heard = offers.follow(LEASE, b"a")
        if heard is not None and offers.news:
            ((reader, news),) = offers.news
            assert (reader, news) != (b"a", heard)  # only what is new
            heard = news
        assert heard is None or heard == ChunkProgress(LEASE, ready, completion)


def test_a_second_reader_takes_the_place_of_the_first() -> None:
    offers = Table()
    offers.offer("r", ready=0)
    for reader in (b"a", b"b"):
        offers.follow(LEASE, reader)
    offers.grow("r", 1)
    assert offers.news == [(b"b", ChunkProgress(LEASE, 1, None))]
    offers.complete("r", DONE, 0.0)
    assert offers.end(LEASE, b"a", 1.0)  # what it has read counts
    assert offers.events == []
    assert offers.end(LEASE, b"b", 1.0)
    assert offers.events == [Released("r", expired=False)]


def test_a_lease_of_another_time_and_one_that_has_ended_are_not_known() -> None:
    offers = Table()
    offers.offer("r")
    assert offers.find(LeaseId("r", 2)) is offers.follow(LeaseId("r", 2), b"a") is None
    assert offers.ask(LeaseId("r", 2), b"a", [1]) is None
    offers.release("r")
    assert offers.follow(LEASE, b"a") is offers.ask(LEASE, b"a", [1]) is None
    assert offers.vouch(LEASE, b"a", {1: b"1"}) is None
    offers.grow("r", 1)
    assert (offers.news, len(offers)) == ([], 0)


def test_none_of_ten_thousand_stale_or_foreign_leases_is_held() -> None:
    rng, offers, now = random.Random(1), Table(), 0.0
    held, over = dict[str, int](), [LEASE]
    for _ in range(10_000):
        now += rng.random()
        name = rng.choice("abcdefgh")
        if rng.random() < 0.5:
            offers.release(name)
        offers.expire(now)
        over += [LeaseId(each.request_id, held.pop(each.request_id)) for each in offers.events]
        offers.events.clear()
        if name not in held:
            held[name] = offers.offer(name, now).lease_epoch
        ahead = LeaseId(name, held[name] + rng.randrange(1, 1 << 40))
        wrong = rng.choice([rng.choice(over), ahead, LeaseId("nobody", held[name])])
        assert offers.follow(wrong, b"a") is offers.ask(wrong, b"a", [1]) is None
        assert offers.vouch(wrong, b"a", {1: b"1"}) is None
        assert offers.renew([wrong], now) == ([], [wrong])
        assert not offers.end(wrong, b"a", now)
        assert offers.words == {*held.values()}
        assert (offers.events, offers.news) == ([], [])
    offers.check()
    assert len(over) + len(held) == 1 + offers.granted
    assert min(offers.released, offers.expired) > 1000


def test_a_reader_hears_each_checksum_once_a_question_and_none_of_what_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_BLOCKS", 2)
    offers = Table()
    offers.offer("r", ready=3)
    asked = [offers.ask(LEASE, b"a", blocks) for blocks in ([1], [2, 2, 1], [1, 2], [4], [9, 3])]
    assert asked == [[1], [2], [], [], []]
    told = offers.vouch(LEASE, b"a", {2: b"2"})
    assert told == ChunkProgress(LEASE, 3, None, {2: b"2"})
    assert offers.ask(LEASE, b"a", [1, 2]) == [2]  # the lease's next fetch
    assert offers.ask(LEASE, b"b", [1, 2, 3]) == []  # too many
    assert offers.ask(LEASE, b"b", [1, 2]) == [1, 2]
