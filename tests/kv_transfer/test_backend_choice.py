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
from shared_backend import BLOCKS, REGION, SharedBackend, pattern

import kvrelay.kv_transfer.backends
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import Event, Fetched, FetchFailed
from kvrelay.kv_transfer.messages import HandshakeReply, HandshakeRequest, decode, encode
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.wire.errors import ConfigError, TransferError


class Refusing(SharedBackend):
    """Cannot reach anybody."""

    def add_peer(self, source: Source) -> None:
        raise TransferError("another host")


class Missing(SharedBackend):
    """Cannot be had on this machine."""

    def open(self) -> bytes:
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


@pytest.mark.parametrize(
    ("source", "reader", "taken"),
    [
        ({"a": SharedBackend, "b": SharedBackend}, {"a": SharedBackend, "b": SharedBackend}, "a"),
        ({"b": SharedBackend}, {"a": SharedBackend, "b": SharedBackend}, "b"),
        ({"b": SharedBackend, "a": SharedBackend}, {"a": SharedBackend, "b": SharedBackend}, "a"),
        ({"a": SharedBackend, "b": SharedBackend}, {"a": Refusing, "b": SharedBackend}, "b"),
        ({"a": SharedBackend, "b": SharedBackend}, {"a": Missing, "b": SharedBackend}, "b"),
        ({"a": Missing, "b": SharedBackend}, {"a": SharedBackend, "b": SharedBackend}, "b"),
    ],
)
def test_the_readers_first_backend_that_both_have_and_that_works(
    make, source, reader, taken
) -> None:
    here, there = make(**reader), make(**source)
    event = here.fetch_from(there)
    assert isinstance(event, Fetched), event
    assert here.read_through() == [taken]


@pytest.mark.parametrize(
    ("source", "reader", "missed"),
    [
        (
            {"a": SharedBackend, "b": SharedBackend},
            {"a": Refusing, "b": SharedBackend},
            "another host",
        ),
        (
            {"a": SharedBackend, "b": SharedBackend},
            {"a": Missing, "b": SharedBackend},
            "the node that reads: a-",
        ),
        (
            {"a": Missing, "b": SharedBackend},
            {"a": SharedBackend, "b": SharedBackend},
            "the node that is read does not have",
        ),
    ],
)
def test_the_reader_can_say_by_which_backend_it_reads_and_why_not_by_a_better_one(
    make, source, reader, missed
) -> None:
    here, there = make(**reader, c=Missing), make(**source)
    ticket = there.engine.offer("later", [5], 16)
    assert here.engine.way(ticket) is None
    assert isinstance(here.fetch_from(there), Fetched)
    way = here.engine.way(ticket)
    assert way is not None
    assert (way.plane, list(way.missed)) == ("b", ["a"])
    assert missed in way.missed["a"]


def test_without_a_common_backend_the_two_lists_are_named(make) -> None:
    event = make(a=SharedBackend, b=SharedBackend).fetch_from(make(c=SharedBackend))
    assert isinstance(event, FetchFailed)
    assert event.reason.startswith("Incompatible: 127.0.0.1:")
    assert event.reason.endswith("there is no common KV connector, a, b here and c there")


def test_a_backend_that_reaches_nobody_says_why(make) -> None:
    event = make(a=Refusing).fetch_from(make(a=SharedBackend))
    assert isinstance(event, FetchFailed)
    assert event.reason == "TransferError: another host"


def test_without_any_backend_a_node_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x is not installed"):
        TransferEngine(
            "node", FINGERPRINT, REGION, CONFIG, lambda: None, {"a": Missing(tmp_path / "x")}
        )
    both = {"a": Missing(tmp_path / "x"), "b": Missing(tmp_path / "y")}
    with pytest.raises(
        ConfigError, match="no KV can be handed over: x is not installed; y is not installed"
    ):
        TransferEngine("node", FINGERPRINT, REGION, CONFIG, lambda: None, both)


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


class Unprepared(SharedBackend):
    """Lacks what it needs to be opened."""

    def prepare(self) -> None:
        raise ConfigError(f"{self.path.name} is not installed")


def test_what_this_machine_lacks_is_told_at_start(make, tmp_path: Path) -> None:
    assert make(a=SharedBackend, b=Unprepared).engine.planes == ("a",)
    with pytest.raises(ConfigError, match="x is not installed"):
        TransferEngine(
            "node", FINGERPRINT, REGION, CONFIG, lambda: None, {"a": Unprepared(tmp_path / "x")}
        )


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
