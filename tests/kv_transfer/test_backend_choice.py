"""Which backend a pair of nodes takes: the best that both have, the next if that one cannot
reach the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from engine_node import CONFIG, FINGERPRINT, EngineNode
from shared_backend import BLOCKS, REGION, Missing, Refusing, SharedBackend, pattern

import kvrelay.kv_transfer.backends
from kvrelay.kv_transfer.connector import Event, Fetched, FetchFailed
from kvrelay.kv_transfer.messages import HandshakeReply, HandshakeRequest, decode, encode
from kvrelay.wire.errors import ConfigError


class Unprepared(SharedBackend):
    """Lacks what it needs to be opened."""

    def prepare(self) -> None:
        raise ConfigError(f"{self.path.name} is not installed")


class Node(EngineNode):
    """A node over several backends with one pool each."""

    def __init__(self, folder: Path, **kinds: Callable[[Path], SharedBackend]) -> None:
        backends = {
            kind: make(folder / f"{kind}-{time.monotonic_ns()}") for kind, make in kinds.items()
        }
        for backend in backends.values():
            for index in range(BLOCKS):
                backend.write(index, pattern(index))
        super().__init__("node", REGION, backends)

    def fetch_from(self, source: Node) -> Event:
        self.fetch("r", source.engine.offer("r", [5], 16), [5], [1])
        assert self.woken.wait(10.0)
        return self.engine.events()[0]

    def read_through(self) -> list[str]:
        return [kind for kind, backend in self.backends.items() if backend.posted.is_set()]


@pytest.fixture
def make(tmp_path: Path):
    nodes: list[Node] = []

    def made(**kinds: Callable[[Path], SharedBackend]) -> Node:
        nodes.append(Node(tmp_path, **kinds))
        return nodes[-1]

    yield made
    for node in nodes:
        node.engine.close()


BOTH = {"a": SharedBackend, "b": SharedBackend}
NONE_THERE = "the node that is read does not have"


@pytest.mark.parametrize(
    ("source", "reader", "taken", "missed"),
    [
        (BOTH, BOTH, "a", {}),
        ({"b": SharedBackend}, BOTH, "b", {"a": NONE_THERE}),
        (dict(reversed(BOTH.items())), BOTH, "a", {}),
        (BOTH, BOTH | {"a": Refusing}, "b", {"a": "another host"}),
        (BOTH, BOTH | {"a": Missing}, "b", {"a": "the node that reads: a-"}),
        (BOTH | {"a": Missing}, BOTH, "b", {"a": NONE_THERE}),
        (BOTH, {"c": Missing} | BOTH, "a", {"c": "the node that reads: c-"}),
    ],
)
def test_the_readers_first_backend_that_works_is_taken_and_it_says_why_no_better_one(
    make, source, reader, taken, missed
) -> None:
    here, there = make(**reader), make(**source)
    ticket = there.engine.offer("later", [5], 16)
    assert here.engine.way(ticket) is None
    assert isinstance(here.fetch_from(there), Fetched)
    assert here.read_through() == [taken]
    way = here.engine.way(ticket)
    assert way is not None
    assert (way.plane, list(way.missed)) == (taken, list(missed))
    for kind, why in missed.items():
        assert why in way.missed[kind]


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
        assert self.may.wait(10)
        return super().open()


@pytest.mark.parametrize(("mine", "theirs"), [(Slow, SharedBackend), (SharedBackend, Slow)])
def test_a_fetch_waits_for_a_backend_that_is_being_opened_and_keeps_its_lease(
    make, monkeypatch, mine, theirs
) -> None:
    may = threading.Event()
    monkeypatch.setattr(Slow, "may", may)
    threading.Timer(1.1 * CONFIG.lease_s, may.set).start()
    here, there = make(a=Refusing, b=mine), make(a=SharedBackend, b=theirs)
    assert isinstance(here.fetch_from(there), Fetched)


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (Missing, SharedBackend, "is not installed"),
        (SharedBackend, Missing, "could not open its KV connector b; its log"),
    ],
)
def test_the_next_backend_is_taken_if_one_end_cannot_open_it(make, mine, theirs, why) -> None:
    here = make(a=Refusing, b=mine, c=SharedBackend)
    there = make(a=SharedBackend, b=theirs, c=SharedBackend)
    ticket = there.engine.offer("later", [5], 16)
    assert isinstance(here.fetch_from(there), Fetched)
    assert here.read_through() == ["c"]
    way = here.engine.way(ticket)
    assert way is not None
    assert way.missed["a"] == "another host"
    assert why in way.missed["b"]
    assert "b" not in (here if mine is Missing else there).engine.planes


@pytest.mark.parametrize(("mine", "theirs"), [(Slow, SharedBackend), (SharedBackend, Slow)])
def test_a_backend_whose_opening_hangs_is_given_up_and_may_end_later(
    make, monkeypatch, mine, theirs
) -> None:
    may = threading.Event()
    monkeypatch.setattr(Slow, "may", may)
    monkeypatch.setattr(kvrelay.kv_transfer.backends, "OPEN_S", 0.5)
    here, there = (
        make(a=Refusing, b=mine, c=SharedBackend),
        make(a=SharedBackend, b=theirs, c=SharedBackend),
    )
    slow = here if mine is Slow else there
    assert isinstance(here.fetch_from(there), Fetched)
    assert here.read_through() == ["c"]
    assert "not opened on all ranks within 0.5 s" in slow.engine._backends.missing["b"]
    may.set()
    slow.engine._backends.close(1.0)  # waits for the end of the opening
    slow.engine.events()  # no thread has broken
    assert "b" not in slow.engine.planes


@pytest.mark.parametrize(
    ("wanted", "cards"), [(None, ["a", "b"]), ([], ["a"]), (["b"], ["a", "b"]), (["x"], ["a"])]
)
def test_a_welcome_has_the_backends_that_the_hello_wants_and_for_the_release_before_all(
    make, wanted, cards
) -> None:
    there = make(a=SharedBackend, b=SharedBackend)
    host, port = there.engine.address
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{host}:{port}")
        dealer.send(encode(HandshakeRequest("reader", FINGERPRINT, wanted)))
        assert dealer.poll(5000)
        welcome = decode(dealer.recv())
    assert isinstance(welcome, HandshakeReply)
    assert list(welcome.ranks[0].planes) == cards
    assert welcome.on_request == [kind for kind in ("a", "b") if kind not in cards]


def test_a_source_that_has_opened_all_at_start_as_the_release_before_does_is_read_from(
    make,
) -> None:
    here, there = (
        make(a=Refusing, b=SharedBackend, c=SharedBackend),
        make(a=SharedBackend, b=SharedBackend, c=SharedBackend),
    )
    for kind in there.backends:
        there.engine._backends.open(kind)
        assert there.backends[kind].opened.wait(5)
    assert isinstance(here.fetch_from(there), Fetched)
    assert opened(here) == [["a", "b"]]


def test_who_asks_again_and_again_has_a_backend_opened_once(make, monkeypatch) -> None:
    may = threading.Event()
    monkeypatch.setattr(Slow, "may", may)
    there = make(a=SharedBackend, b=Slow)
    host, port = there.engine.address
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{host}:{port}")
        for _ in range(100):
            dealer.send(encode(HandshakeRequest("reader", FINGERPRINT, ["b"])))
        dealer.send(encode(HandshakeRequest("reader", FINGERPRINT, [])))
        assert dealer.poll(5000)  # all before it were heard
        assert "b" not in decode(dealer.recv()).ranks[0].planes  # type: ignore[union-attr]
        may.set()
        assert dealer.poll(5000)
        assert "b" in decode(dealer.recv()).ranks[0].planes  # type: ignore[union-attr]
        assert not dealer.poll(100)
