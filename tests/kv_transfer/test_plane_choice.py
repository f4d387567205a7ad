"""Which data plane a pair of nodes takes: the best that both have, the next if that one cannot
reach the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from peer_process import CONFIG, FINGERPRINT
from shared_plane import BLOCKS, REGION, SharedPlane, pattern

from kvrelay.kv_transfer import backends
from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import Event, Fetched, FetchFailed
from kvrelay.kv_transfer.messages import HandshakeReply, HandshakeRequest, decode, encode
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.wire.errors import ConfigError, TransferError


class Refusing(SharedPlane):
    """Cannot reach anybody."""

    def add_peer(self, source: Source) -> None:
        raise TransferError("another host")


class Missing(SharedPlane):
    """Cannot be had on this machine."""

    def open(self) -> bytes:
        raise ConfigError(f"{self.path.name} is not installed")


class Node:
    """A desk over several planes with one pool each."""

    def __init__(self, folder: Path, **kinds: Callable[[Path], SharedPlane]) -> None:
        self.planes = {
            kind: make(folder / f"{kind}-{time.monotonic_ns()}") for kind, make in kinds.items()
        }
        for plane in self.planes.values():
            for index in range(BLOCKS):
                plane.write(index, pattern(index))
        self.woken = threading.Event()
        self.desk = TransferEngine("node", FINGERPRINT, REGION, CONFIG, self.woken.set, self.planes)

    def fetch_from(self, source: Node) -> Event:
        self.desk.watch("r", source.desk.offer("r", [5], 16))
        self.desk.fetch("r", [5], [1])
        until = time.monotonic() + 5
        while time.monotonic() < until:
            for event in self.desk.events():
                return event
            self.woken.wait(0.05)
        raise AssertionError("no event within 5 s")

    def read_through(self) -> list[str]:
        return [kind for kind, plane in self.planes.items() if plane.posted.is_set()]


@pytest.fixture
def make(tmp_path: Path):
    nodes: list[Node] = []

    def made(**kinds: Callable[[Path], SharedPlane]) -> Node:
        nodes.append(Node(tmp_path, **kinds))
        return nodes[-1]

    yield made
    for node in nodes:
        node.desk.close()


@pytest.mark.parametrize(
    ("source", "reader", "taken"),
    [
        ({"a": SharedPlane, "b": SharedPlane}, {"a": SharedPlane, "b": SharedPlane}, "a"),
        ({"b": SharedPlane}, {"a": SharedPlane, "b": SharedPlane}, "b"),
        ({"b": SharedPlane, "a": SharedPlane}, {"a": SharedPlane, "b": SharedPlane}, "a"),
        ({"a": SharedPlane, "b": SharedPlane}, {"a": Refusing, "b": SharedPlane}, "b"),
        ({"a": SharedPlane, "b": SharedPlane}, {"a": Missing, "b": SharedPlane}, "b"),
        ({"a": Missing, "b": SharedPlane}, {"a": SharedPlane, "b": SharedPlane}, "b"),
    ],
)
def test_the_readers_first_plane_that_both_have_and_that_works(make, source, reader, taken) -> None:
    here, there = make(**reader), make(**source)
    event = here.fetch_from(there)
    assert isinstance(event, Fetched), event
    assert here.read_through() == [taken]


@pytest.mark.parametrize(
    ("source", "reader", "missed"),
    [
        ({"a": SharedPlane, "b": SharedPlane}, {"a": Refusing, "b": SharedPlane}, "another host"),
        (
            {"a": SharedPlane, "b": SharedPlane},
            {"a": Missing, "b": SharedPlane},
            "the node that reads: a-",
        ),
        (
            {"a": Missing, "b": SharedPlane},
            {"a": SharedPlane, "b": SharedPlane},
            "the node that is read does not have",
        ),
    ],
)
def test_the_reader_can_say_by_which_plane_it_reads_and_why_not_by_a_better_one(
    make, source, reader, missed
) -> None:
    here, there = make(**reader, c=Missing), make(**source)
    ticket = there.desk.offer("later", [5], 16)
    assert here.desk.way(ticket) is None
    assert isinstance(here.fetch_from(there), Fetched)
    way = here.desk.way(ticket)
    assert way is not None
    assert (way.plane, list(way.missed)) == ("b", ["a"])
    assert missed in way.missed["a"]


def test_without_a_common_plane_the_two_lists_are_named(make) -> None:
    event = make(a=SharedPlane, b=SharedPlane).fetch_from(make(c=SharedPlane))
    assert isinstance(event, FetchFailed)
    assert event.reason.startswith("Incompatible: 127.0.0.1:")
    assert event.reason.endswith("there is no common KV connector, a, b here and c there")


def test_a_plane_that_reaches_nobody_says_why(make) -> None:
    event = make(a=Refusing).fetch_from(make(a=SharedPlane))
    assert isinstance(event, FetchFailed)
    assert event.reason == "TransferError: another host"


def test_without_any_plane_a_node_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x is not installed"):
        TransferEngine(
            "node", FINGERPRINT, REGION, CONFIG, lambda: None, {"a": Missing(tmp_path / "x")}
        )
    both = {"a": Missing(tmp_path / "x"), "b": Missing(tmp_path / "y")}
    with pytest.raises(
        ConfigError, match="no KV can be handed over: x is not installed; y is not installed"
    ):
        TransferEngine("node", FINGERPRINT, REGION, CONFIG, lambda: None, both)


# When planes are opened.


def opened(*nodes: Node) -> list[list[str]]:
    return [
        [kind for kind, plane in node.planes.items() if plane.opened.is_set()] for node in nodes
    ]


def test_only_the_first_plane_is_opened_while_it_reaches_all_peers(make) -> None:
    here, there = (make(a=SharedPlane, b=SharedPlane, c=SharedPlane) for _ in range(2))
    assert isinstance(here.fetch_from(there), Fetched)
    assert opened(here, there) == [["a"], ["a"]]
    assert here.desk.planes == there.desk.planes == ("a", "b", "c")


def test_a_plane_is_opened_at_both_ends_when_those_before_it_do_not_reach_the_peer(make) -> None:
    here, there = (
        make(a=Refusing, b=SharedPlane, c=SharedPlane),
        make(a=SharedPlane, b=SharedPlane, c=SharedPlane),
    )
    assert isinstance(here.fetch_from(there), Fetched)
    assert opened(here, there) == [["a", "b"], ["a", "b"]]


def test_a_reader_of_a_plane_that_the_source_need_not_open_itself(make) -> None:
    here, there = make(b=SharedPlane), make(a=SharedPlane, b=SharedPlane)
    assert isinstance(here.fetch_from(there), Fetched)
    assert opened(here, there) == [["b"], ["a", "b"]]


class Slow(SharedPlane):
    """Is opened when `may` is set."""

    may = threading.Event()

    def open(self) -> bytes:
        assert self.may.wait(10)
        return super().open()


@pytest.mark.parametrize(("mine", "theirs"), [(Slow, SharedPlane), (SharedPlane, Slow)])
def test_a_fetch_waits_for_a_plane_that_is_being_opened_and_keeps_its_lease(
    make, monkeypatch, mine, theirs
) -> None:
    may = threading.Event()
    monkeypatch.setattr(Slow, "may", may)
    threading.Timer(1.1 * CONFIG.lease_s, may.set).start()
    here, there = make(a=Refusing, b=mine), make(a=SharedPlane, b=theirs)
    assert isinstance(here.fetch_from(there), Fetched)


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (Missing, SharedPlane, "is not installed"),
        (SharedPlane, Missing, "could not open its KV connector b; its log"),
    ],
)
def test_the_next_plane_is_taken_if_one_end_cannot_open_it(make, mine, theirs, why) -> None:
    here = make(a=Refusing, b=mine, c=SharedPlane)
    there = make(a=SharedPlane, b=theirs, c=SharedPlane)
    ticket = there.desk.offer("later", [5], 16)
    assert isinstance(here.fetch_from(there), Fetched)
    assert here.read_through() == ["c"]
    way = here.desk.way(ticket)
    assert way is not None
    assert way.missed["a"] == "another host"
    assert why in way.missed["b"]
    assert "b" not in (here if mine is Missing else there).desk.planes


@pytest.mark.parametrize(("mine", "theirs"), [(Slow, SharedPlane), (SharedPlane, Slow)])
def test_a_plane_whose_opening_hangs_is_given_up_and_may_end_later(
    make, monkeypatch, mine, theirs
) -> None:
    may = threading.Event()
    monkeypatch.setattr(Slow, "may", may)
    monkeypatch.setattr(backends, "OPEN_S", 0.5)
    here, there = (
        make(a=Refusing, b=mine, c=SharedPlane),
        make(a=SharedPlane, b=theirs, c=SharedPlane),
    )
    slow = here if mine is Slow else there
    assert isinstance(here.fetch_from(there), Fetched)
    assert here.read_through() == ["c"]
    assert "not opened on all ranks within 0.5 s" in slow.desk._backends.missing["b"]
    may.set()
    slow.desk._backends.close(1.0)  # waits for the end of the opening
    slow.desk.events()  # no thread has broken
    assert "b" not in slow.desk.planes


def test_without_a_plane_that_can_be_opened_the_fetch_says_which_end_could_not(make) -> None:
    event = make(a=Refusing, b=SharedPlane).fetch_from(make(a=SharedPlane, b=Missing))
    assert isinstance(event, FetchFailed)
    assert "could not open its KV connector b; its log says why" in event.reason


class Unprepared(SharedPlane):
    """Lacks what it needs to be opened."""

    def prepare(self) -> None:
        raise ConfigError(f"{self.path.name} is not installed")


def test_what_this_machine_lacks_is_told_at_start(make, tmp_path: Path) -> None:
    assert make(a=SharedPlane, b=Unprepared).desk.planes == ("a",)
    with pytest.raises(ConfigError, match="x is not installed"):
        TransferEngine(
            "node", FINGERPRINT, REGION, CONFIG, lambda: None, {"a": Unprepared(tmp_path / "x")}
        )


@pytest.mark.parametrize(
    ("wanted", "cards"), [(None, ["a", "b"]), ([], ["a"]), (["b"], ["a", "b"]), (["x"], ["a"])]
)
def test_a_welcome_has_the_planes_that_the_hello_wants_and_for_the_release_before_all(
    make, wanted, cards
) -> None:
    there = make(a=SharedPlane, b=SharedPlane)
    host, port = there.desk.address
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
        make(a=Refusing, b=SharedPlane, c=SharedPlane),
        make(a=SharedPlane, b=SharedPlane, c=SharedPlane),
    )
    for kind in there.planes:
        there.desk._backends.open(kind)
        assert there.planes[kind].opened.wait(5)
    assert isinstance(here.fetch_from(there), Fetched)
    assert opened(here) == [["a", "b"]]


def test_who_asks_again_and_again_has_a_plane_opened_once(make, monkeypatch) -> None:
    may = threading.Event()
    monkeypatch.setattr(Slow, "may", may)
    there = make(a=SharedPlane, b=Slow)
    host, port = there.desk.address
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
