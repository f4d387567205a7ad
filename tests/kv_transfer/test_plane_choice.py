"""Which data plane a pair of nodes takes: the best that both have, the next if that one cannot reach the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from peer_process import CONFIG, FINGERPRINT
from shared_plane import BLOCKS, REGION, SharedPlane, pattern

from kv_transfer.connector import Event, Fetched, FetchFailed
from kv_transfer.desk import Desk
from kv_transfer.planes import Source
from wire.errors import ConfigError, TransferError


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
        self.planes = {kind: make(folder / f"{kind}-{time.monotonic_ns()}") for kind, make in kinds.items()}
        for plane in self.planes.values():
            for index in range(BLOCKS):
                plane.write(index, pattern(index))
        self.woken = threading.Event()
        self.desk = Desk("node", FINGERPRINT, REGION, CONFIG, self.woken.set, self.planes)

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
        ({"a": SharedPlane, "b": SharedPlane}, {"a": Missing, "b": SharedPlane}, "the node that reads: a-"),
        ({"a": Missing, "b": SharedPlane}, {"a": SharedPlane, "b": SharedPlane}, "the node that is read does not have"),
    ],
)
def test_the_reader_can_say_by_which_plane_it_reads_and_why_not_by_a_better_one(make, source, reader, missed) -> None:
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
        Desk("node", FINGERPRINT, REGION, CONFIG, lambda: None, {"a": Missing(tmp_path / "x")})
    both = {"a": Missing(tmp_path / "x"), "b": Missing(tmp_path / "y")}
    with pytest.raises(ConfigError, match="no KV can be handed over: x is not installed; y is not installed"):
        Desk("node", FINGERPRINT, REGION, CONFIG, lambda: None, both)
