"""Leases on cached blocks that no request offers: asks, answers, and who gets none."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from engine_node import CONFIG, FINGERPRINT, SLOW, SharedNode, node, wait_until
from peer_process import peer_process
from shared_backend import pattern

from kvrelay.kv_transfer.cached import MOST_ASKED, Asks, Callers
from kvrelay.kv_transfer.connector import CachedAsked, Granted, Released, lease_of, peer_of
from kvrelay.kv_transfer.fetches import FetchTable
from kvrelay.kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    HandshakeReply,
    HandshakeRequest,
    LeaseCached,
    Leased,
    encode,
)
from kvrelay.kv_transfer.peers import Peers
from kvrelay.kv_transfer.tickets import asking_refusal, sealed_address
from kvrelay.wire import transfer
from kvrelay.wire.transfer import Source, Ticket

NEWEST = msgspec.structs.replace(FINGERPRINT, protocol_newest=2)
HASHES = [bytes([number]) * 16 for number in range(1, 5)]
SECRET = "the secret of this cluster"
SOURCE = Source("127.0.0.1", 4000, "g", 64)
PEER = peer_of(SOURCE)
ASK = LeaseCached(1, "g", 0, b"".join(HASHES))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SharedNode]:
    with node("source", tmp_path, fingerprint=NEWEST) as it:
        yield it


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[SharedNode]:
    with node("reader", tmp_path, fingerprint=NEWEST) as it:
        yield it


def place(source: SharedNode, **changes: object) -> Source:
    engine = source.engine
    mine = Source(*engine.address, engine.generation, 64, engine.address_seal)
    return msgspec.structs.replace(mine, **changes)


def ask(reader: SharedNode, source: SharedNode, within_s: float = 20.0) -> None:
    reader.engine.ask("r", place(source), HASHES, 3, within_s)


def asked(source: SharedNode) -> str:
    (event,) = source.wait(1)
    assert isinstance(event, CachedAsked)
    assert event.hashes == HASHES
    return event.request_id


def granted(reader: SharedNode) -> Granted:
    (event,) = reader.wait(1)
    assert isinstance(event, Granted)
    assert event.request_id == "r"
    return event


def test_a_leased_prefix_is_fetched_like_any_other(source: SharedNode, reader: SharedNode) -> None:
    ask(reader, source)
    lease = asked(source)
    source.engine.answer_cached(lease, [5, 2, 9])
    ticket = granted(reader).ticket
    assert ticket is not None
    assert (ticket.remote_block_ids, ticket.num_tokens) == ([[5, 2, 9]], (3 + 3) * 16)
    reader.fetch("r", ticket, [5, 2, 9], [7, 3, 11])
    reader.fetched()
    assert [reader.backend.read(i) for i in (7, 3, 11)] == [pattern(i) for i in (5, 2, 9)]
    assert source.wait(1) == [Released(lease, expired=False)]
    assert reader.engine.stats().ask_failures == {}


def test_nothing_held_is_an_answer(source: SharedNode, reader: SharedNode) -> None:
    ask(reader, source)
    source.engine.answer_cached(asked(source), [])
    assert granted(reader) == Granted("r", None, "NotHeld")
    assert reader.engine.stats().ask_failures == {"NotHeld": 1}
    assert len(source.engine._offers) == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_lease_that_nobody_waits_for_ends_at_once(tmp_path: Path, *, late: bool) -> None:
    with (
        node("source", tmp_path, SLOW, NEWEST) as source,
        node("reader", tmp_path, SLOW, NEWEST) as reader,
    ):
        ask(reader, source)
        lease = asked(source)
        if not late:
            source.engine.answer_cached(lease, [5])
            wait_until(lambda: reader.engine._asks.events)
        reader.engine.cancel("r")
        if late:
            source.engine.answer_cached(lease, [5])
        assert source.wait(1) == [Released(lease, expired=False)]
        assert reader.engine.events() == []


def test_a_source_that_sleeps_costs_the_deadline(source: SharedNode, reader: SharedNode) -> None:
    ask(reader, source, 0.2)
    assert granted(reader).reason == "TransferTimeout: no answer in time"
    lease = asked(source)
    source.engine.answer_cached(lease, [5])
    assert source.wait(1) == [Released(lease, expired=False)]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_dtype": "bfloat16"}, "kv_dtype is "),
        ({"protocol_newest": 0}, "leases no cached KV: it speaks protocol 1"),
    ],
)
def test_another_fingerprint_or_the_previous_release_gets_no_ask(
    tmp_path: Path, reader: SharedNode, fields: dict[str, object], why: str
) -> None:
    with node("source", tmp_path, fingerprint=msgspec.structs.replace(NEWEST, **fields)) as source:
        ask(reader, source)
        reason = granted(reader).reason
        assert reason.startswith("Incompatible: ")
        assert why in reason
        source.quiet()


def test_another_generation_and_a_dead_peer_get_no_ask(
    tmp_path: Path, source: SharedNode, reader: SharedNode
) -> None:
    reader.engine.ask("r", place(source, generation="old"), HASHES, 0, 20.0)
    assert "has restarted: the KV is of old" in granted(reader).reason
    with node("other", tmp_path, fingerprint=NEWEST) as other:
        gone = place(other)
    reader.engine.ask("r", gone, HASHES, 0, 20.0)
    assert granted(reader).reason.startswith("PeerLost: ")
    source.quiet()
    assert reader.engine.stats().ask_failures == {"PeerLost": 2}


def test_nodes_with_a_secret_ask_each_other(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, cluster_secret=SECRET)
    with (
        node("source", tmp_path, config, NEWEST) as source,
        node("reader", tmp_path, config, NEWEST) as reader,
    ):
        ask(reader, source)
        source.engine.answer_cached(asked(source), [5])
        ticket = granted(reader).ticket
        assert ticket is not None
        assert ticket.signature is not None


def test_a_killed_source_fails_the_ask_at_once(tmp_path: Path, reader: SharedNode) -> None:
    made = (SharedNode, "child", tmp_path, CONFIG, NEWEST)
    with peer_process(*made) as child:
        peer = Source(*child.ask("engine.address"), child.ask("engine.generation"), 64)
        reader.engine.ask("r", peer, HASHES, 0, 20.0)
        (event,) = child.events(1, within_s=20.0)
        child.ask("engine.answer_cached", event.request_id, [5])
        assert granted(reader).ticket is not None
        reader.engine.ask("r", peer, HASHES, 0, 20.0)
        child.kill()
        assert granted(reader).reason.startswith("PeerLost: ")


# What a source answers whom.


def test_without_a_secret_only_loopback_addresses_are_asked() -> None:
    asks = Asks("")
    away = msgspec.structs.replace(SOURCE, host="10.0.0.1")
    assert not asks.begin("r", away, HASHES, 0, 1.0)
    (event,) = asks.events
    assert event.reason.startswith("Incompatible: without cluster_secret only loopback")
    assert asks.begin("r", SOURCE, HASHES, 0, 1.0)


@pytest.mark.parametrize("changes", [{"host": "10.0.0.2"}, {"port": 1}, {"generation": "h"}])
def test_with_a_secret_only_addresses_are_dialled_that_their_nodes_have_sealed(
    changes: dict[str, Any],
) -> None:
    peer = PEER._replace(host="10.0.0.1")
    seal = sealed_address(peer, SECRET)
    assert asking_refusal(peer, seal, SECRET) is None
    for other, mark in ((peer._replace(**changes), seal), (peer, sealed_address(peer, "other"))):
        why = asking_refusal(other, mark, SECRET)
        assert why is not None
        assert "no node with this cluster_secret" in why


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"first": -1}, "first is "),
        ({"first": 1 << 63}, "first is "),
        *(({"hashes": b"x" * size}, "are no hashes") for size in (0, 15, 16 * (MOST_ASKED + 1))),
    ],
)
def test_an_ask_for_what_cannot_be_is_refused(wrong: dict[str, Any], why: str) -> None:
    callers = Callers()
    answer = callers.asked(b"", msgspec.structs.replace(ASK, **wrong))
    assert answer is not None
    assert why in answer.refused
    assert callers.events == []


def test_a_caller_has_so_many_asks_in_flight() -> None:
    callers = Callers()
    answers = [callers.asked(b"one", ASK) for _ in range(65)]
    assert answers[:64] == [None] * 64
    assert answers[64] == Leased(1, None, "64 asks of yours wait; ask again later")
    assert callers.asked(b"two", ASK) is None
    callers.take(callers.events[0].request_id)
    assert callers.asked(b"one", ASK) is None


def test_the_longest_ask_and_its_answer_fit_a_message() -> None:
    asks = Asks(SECRET)
    sealed = msgspec.structs.replace(SOURCE, seal=sealed_address(PEER, SECRET))
    asks.begin("r", sealed, HASHES * MOST_ASKED, 0, 1.0)
    (message,) = asks.to_send(PEER)
    assert asks.to_send(PEER) == []
    assert MAX_MESSAGE_BYTES * 0.9 < len(encode(message)) <= MAX_MESSAGE_BYTES
    encode(Leased(1, Ticket(remote_block_ids=[[2**31] * MOST_ASKED])))


def ticket(blocks: Sequence[int], **changes: object) -> Ticket:
    mine = Ticket(
        remote_block_ids=[list(blocks)], remote_host=PEER.host, remote_port=PEER.port,
        generation=PEER.generation, remote_request_id="cached.1", lease_epoch=7,
    )  # fmt: skip
    return msgspec.structs.replace(mine, **changes)


@pytest.mark.parametrize(
    "wrong",
    [
        ticket([]),
        ticket(range(5)),
        ticket([1], growing=True),
        ticket([1], generation="x"),
        ticket([1], remote_port=1),
        ticket([1], remote_block_ids=[]),
        ticket([1], remote_block_ids=[[1], [2]]),
        ticket([0]),
        ticket([1 << 63]),
    ],
)
def test_a_ticket_about_something_else_is_given_back(wrong: Ticket) -> None:
    asks = Asks("")
    asks.begin("r", SOURCE, HASHES, 0, 1.0)
    assert asks.answered(PEER, Leased(1, wrong)) == ("cached.1", 7)
    (event,) = asks.events
    assert event.ticket is None
    assert asks.next_deadline() == float("inf")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_ticket_has_a_list_for_each_group_of_the_reader(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    monkeypatch.setattr(transfer, "KV_GROUPS", groups)
    asks = Asks("")
    for number, lists in enumerate(([[1]], [[1], [2]], [[1], [2, 3]], [[1], [2], [3]]), 1):
        asks.begin("r", SOURCE, HASHES[:1], 0, 1.0)
        asks.answered(PEER, Leased(number, ticket([], remote_block_ids=lists)))
    assert [each.ticket and each.ticket.blocks for each in asks.events] == [
        [*range(1, groups + 1)] if number == groups else None for number in (1, 2, 9, 3)
    ]


def test_another_peer_cannot_answer() -> None:
    asks = Asks("")
    asks.begin("r", SOURCE, HASHES, 0, 1.0)
    other = PEER._replace(port=1)
    assert asks.answered(other, Leased(1, ticket([1], remote_port=1))) == ("cached.1", 7)
    assert asks.events == []
    assert asks.next_deadline() == 1.0


def test_none_of_ten_thousand_stale_or_foreign_asks_is_granted() -> None:
    rng, asks, outside = random.Random(1), Asks(SECRET), Mock()
    hello = HandshakeRequest("reader", NEWEST)
    peers = Peers(hello, CONFIG, FetchTable(CONFIG, 512), asks, outside, outside)
    welcome = HandshakeReply("source", PEER.generation, NEWEST, [])
    too_late = "TransferTimeout: no answer in time"
    whys = {
        "altered address": "Incompatible: no node with this cluster_secret has given the address",
        "old process": "PeerLost: 127.0.0.1:4000 has restarted: the KV is of ",
        "foreign ticket": "Incompatible: the ticket is not about what was asked for",
        "foreign peer": too_late,
        "foreign token": too_late,
        "late answer": too_late,
    }
    hows = Counter[str]()
    for token in range(1, 10_001):
        how, mine = rng.choice([*whys]), ticket([1], lease_epoch=rng.randrange(1 << 40))
        old = PEER._replace(generation=rng.randbytes(8).hex())
        other = rng.choice([old, PEER._replace(port=rng.randrange(4000))])
        seal = sealed_address(old if how == "old process" else PEER, SECRET)
        place = {"altered address": other, "old process": old}.get(how, PEER)
        begun = asks.begin("r", Source(*place, 64, seal), HASHES, 0, token)
        assert begun == (how != "altered address")
        if how == "old process":
            peers.ask(old, 0.0)
            peers.on_message(old, welcome, 0.0)
        if how == "late answer":
            asks.tick(token)
        if begun and how != "old process":
            if how == "foreign ticket":
                wrong = {"generation": other.generation, "remote_port": other.port}
                mine = msgspec.structs.replace(mine, **wrong)
            answer = Leased(rng.randrange(token) if how == "foreign token" else token, mine)
            sender = other if how == "foreign peer" else PEER
            assert asks.answered(sender, answer) == lease_of(mine)  # which is given back
        asks.tick(token)
        (event,) = asks.events
        asks.events.clear()
        assert event.ticket is None
        assert event.reason.startswith(whys[how]), (how, event)
        hows[how] += 1
    counted = Counter[str]()
    for how, times in hows.items():
        counted[whys[how].partition(":")[0]] += times
    assert asks.failures == counted
    assert min(hows[how] for how in whys) > 1000
