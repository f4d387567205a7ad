"""Which backend a pair of nodes takes: the best that both have, the next if that one cannot
reach the other.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_node import AT_ONCE_S, CONFIG, FINGERPRINT, SHORT, EngineNode
from shared_backend import BLOCKS, REGION, Missing, Refusing, SharedBackend, pattern

from kvrelay.kv_transfer.connector import Event, Fetched, FetchFailed
from kvrelay.kv_transfer.messages import HandshakeReply, HandshakeRequest, Message, decode, encode
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError


class Unprepared(SharedBackend):
    """Lacks what it needs to be opened."""

    def prepare(self) -> None:
        raise ConfigError(f"{self.path.name} is not installed")


class Node(EngineNode):
    """A node over several backends with one pool each."""

    def __init__(self, folder: Path, config: TransferConfig = CONFIG, **kinds: Any) -> None:
        backends = {
            kind: make(folder / f"{kind}-{time.monotonic_ns()}") for kind, make in kinds.items()
        }
        for backend in backends.values():
            for index in range(BLOCKS):
                backend.write(index, pattern(index))
        super().__init__("node", REGION, backends, config)

    def fetch_from(self, source: Node) -> Event:
        self.fetch("r", source.engine.offer("r", [5], 16), [5], [1])
        assert self.woken.wait(AT_ONCE_S)
        return self.engine.events()[0]

    def read_through(self) -> list[str]:
        return [kind for kind, backend in self.backends.items() if backend.posted.is_set()]


@pytest.fixture
def make(tmp_path: Path):
    nodes: list[Node] = []

    def made(**how: Any) -> Node:
        nodes.append(Node(tmp_path, **how))
        return nodes[-1]

    yield made
    for node in nodes:
        node.engine.close()


BOTH = {"a": SharedBackend, "b": SharedBackend}


@pytest.mark.parametrize(
    ("source", "reader", "taken"),
    [
        (BOTH, BOTH, "a"),
        ({"b": SharedBackend}, BOTH, "b"),
        (dict(reversed(BOTH.items())), BOTH, "a"),
        (BOTH, BOTH | {"a": Refusing}, "b"),
        (BOTH, BOTH | {"a": Missing}, "b"),
        (BOTH | {"a": Missing}, BOTH, "b"),
        (BOTH, {"c": Missing} | BOTH, "a"),
    ],
)
def test_the_readers_first_backend_that_works_is_taken(make, source, reader, taken) -> None:
    here = make(**reader)
    assert isinstance(here.fetch_from(make(**source)), Fetched)
    assert here.read_through() == [taken]


@pytest.mark.parametrize(
    ("source", "reader", "why"),
    [
        ({"c": SharedBackend}, BOTH, "no common KV connector, a, b here and c there"),
        ({"a": SharedBackend}, {"a": Refusing}, "TransferError: another host"),
        (
            BOTH | {"b": Missing},
            BOTH | {"a": Refusing},
            "could not open its KV connector b; its log says why",
        ),
    ],
)
def test_a_pair_without_a_backend_that_works_says_why(make, source, reader, why) -> None:
    event = make(**reader).fetch_from(make(**source))
    assert isinstance(event, FetchFailed)
    assert event.reason.endswith(why)


def test_without_any_backend_a_node_does_not_start(make) -> None:
    for kinds in ({"a": Missing}, {"a": Unprepared}):
        with pytest.raises(ConfigError, match="is not installed"):
            make(**kinds)
    why = r"no KV can be handed over: \S+ is not installed; \S+ is not installed"
    with pytest.raises(ConfigError, match=why):
        make(a=Missing, b=Missing)
    assert make(a=SharedBackend, b=Unprepared).engine.planes == ("a",)


# When backends are opened.


def opened(*nodes: Node) -> list[list[str]]:
    return [
        [kind for kind, backend in node.backends.items() if backend.opened.is_set()]
        for node in nodes
    ]


def test_a_backend_is_opened_at_both_ends_when_those_before_it_do_not_reach_the_peer(make) -> None:
    here, there = (
        make(a=Refusing, b=SharedBackend, c=SharedBackend),
        make(a=SharedBackend, b=SharedBackend, c=SharedBackend),
    )
    assert isinstance(here.fetch_from(there), Fetched)
    assert opened(here, there) == [["a", "b"], ["a", "b"]]


class Slow(SharedBackend):
    """Is opened when `may` is set."""

    may = threading.Event()

    def open(self) -> bytes:
        assert self.may.wait(AT_ONCE_S)
        return super().open()


@pytest.mark.parametrize(("mine", "theirs"), [(Slow, SharedBackend), (SharedBackend, Slow)])
def test_a_fetch_waits_for_a_backend_that_is_being_opened_and_keeps_its_lease(
    make, monkeypatch, mine, theirs
) -> None:
    may = threading.Event()
    monkeypatch.setattr(Slow, "may", may)
    threading.Timer(1.1 * SHORT.lease_s, may.set).start()
    here = make(config=SHORT, a=Refusing, b=mine)
    there = make(config=SHORT, a=SharedBackend, b=theirs)
    assert isinstance(here.fetch_from(there), Fetched)


@pytest.mark.parametrize(("mine", "theirs"), [(Missing, SharedBackend), (SharedBackend, Missing)])
def test_the_next_backend_is_taken_if_one_end_cannot_open_it(make, mine, theirs) -> None:
    here = make(a=Refusing, b=mine, c=SharedBackend)
    there = make(a=SharedBackend, b=theirs, c=SharedBackend)
    assert isinstance(here.fetch_from(there), Fetched)
    assert here.read_through() == ["c"]
    assert "b" not in (here if mine is Missing else there).engine.planes


def test_a_source_opens_once_what_is_asked_for_and_says_when_it_is_open(make, monkeypatch) -> None:
    may = threading.Event()
    monkeypatch.setattr(Slow, "may", may)
    there = make(a=SharedBackend, b=Slow)
    host, port = there.engine.address
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{host}:{port}")

        def reply() -> tuple[list[str], list[str]]:
            assert dealer.poll(AT_ONCE_S * 1e3)
            welcome = decode(dealer.recv())
            assert isinstance(welcome, HandshakeReply)
            return list(welcome.ranks[0].planes), welcome.on_request

        for opens in ([], ["b"], ["x", "b"]):
            dealer.send(encode(HandshakeRequest("reader", FINGERPRINT, opens)))
            assert reply() == (["a"], ["b"])
        may.set()
        assert reply() == (["a", "b"], [])
        assert not dealer.poll(100)


def test_a_source_that_is_slow_to_open_is_asked_once_a_heartbeat(make, monkeypatch) -> None:
    may, asked = threading.Event(), []
    monkeypatch.setattr(Slow, "may", may)
    here, there = make(a=Refusing, b=SharedBackend), make(a=SharedBackend, b=Slow)
    answer = there.engine.answer

    def heard(sender: bytes, message: Message) -> Message | None:
        asked.append(isinstance(message, HandshakeRequest))
        if sum(asked) == 4:  # one without it, one for it, and two heartbeats
            may.set()
        return answer(sender, message)

    monkeypatch.setattr(there.engine, "answer", heard)
    began = time.monotonic()
    assert isinstance(here.fetch_from(there), Fetched)
    assert time.monotonic() - began > CONFIG.heartbeat_s
