"""An engine whose backends are on several ranks: their threads and sockets are real, their processes are
this one.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from engine_node import AT_ONCE_S, CONFIG, EngineNode, wait_until
from shared_backend import BLOCK_BYTES, BLOCKS, REGION, Missing, Refusing, SharedBackend, pattern

from kvrelay.kv_transfer import rank_backends
from kvrelay.kv_transfer.connector import FetchFailed, PoolRegion, Released
from kvrelay.kv_transfer.rank_backends import LedBackends, terms_of
from kvrelay.kv_transfer.ranks import RankLink, Stop
from kvrelay.kv_transfer.shares import Heads

KINDS = ("a", "b")


def heads_of(size: int) -> list[Heads]:
    """Two KV heads; four ranks hold each of them twice."""
    return {1: [(0, 2)], 2: [(0, 1), (1, 2)], 4: [(0, 1), (0, 1), (1, 2), (1, 2)]}[size]


class Node(EngineNode):
    """An engine of `size` ranks, whose backends of both kinds are over pools of their own."""

    def __init__(
        self,
        name: str,
        folder: Path,
        size: int = 1,
        checksums: bool = False,
        **kinds: type[SharedBackend],
    ) -> None:
        """`kinds`: classes of backends on the last rank; `checksums`: all of a's blocks are checked."""
        self.heads = heads_of(size)
        self.ranks: list[dict[str, SharedBackend]] = []
        self.lost: list[str] = []
        regions = []
        for rank, (first, end) in enumerate(self.heads):
            block_bytes = BLOCK_BYTES // 2 * (end - first)
            last = rank == size - 1
            self.ranks.append(
                {
                    kind: (kinds.get(kind, SharedBackend) if last else SharedBackend)(
                        folder / f"{name}-{rank}-{kind}-{time.monotonic_ns()}", block_bytes
                    )
                    for kind in KINDS
                }
            )
            pool = ctypes.addressof(ctypes.c_char.from_buffer(self.ranks[-1]["a"].pool))
            regions.append(PoolRegion(pool, BLOCKS, block_bytes, "cpu"))
        config = replace(CONFIG, kv_checksums=1.0) if checksums else CONFIG
        heads = self.heads[0][1]
        self.link = (
            RankLink("127.0.0.1", self.heads, name, terms_of(config, heads)) if size > 1 else None
        )
        self.led = [
            LedBackends(rank, regions[rank], self.ranks[rank], self.link.address, self.lost.append)
            for rank in range(1, size)
            if self.link is not None
        ]
        super().__init__(name, regions[0], self.ranks[0], config, link=self.link)

    def fill(self) -> None:
        """Every block of every backend with its pattern."""
        for kind in KINDS:
            for backends, (first, end) in zip(self.ranks, self.heads, strict=True):
                for block in range(BLOCKS):
                    backends[kind].write(block, part(block, first, end))

    def read(self, kind: str, block: int) -> list[bytes]:
        """A block, of each rank."""
        return [backends[kind].read(block) for backends in self.ranks]

    def close(self) -> None:
        super().close()
        for led in self.led:
            led.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[object]:
    nodes: list[Node] = []

    def made(name: str, size: int, checksums: bool = False, **kinds: type[SharedBackend]) -> Node:
        nodes.append(Node(name, tmp_path, size, checksums, **kinds))
        return nodes[-1]

    yield made
    for node in nodes:
        node.close()
        assert node.lost == []


def part(block: int, first: int, end: int) -> bytes:
    """These KV heads of a block."""
    return pattern(block)[first * BLOCK_BYTES // 2 : end * BLOCK_BYTES // 2]


def halves(node: Node, block: int) -> list[bytes]:
    return [part(block, *heads) for heads in node.heads]


class FaultyBackend(SharedBackend):
    """A bit of the first block of each part of a READ arrives wrong."""

    def poll(self, handle: object) -> bool:
        done = super().poll(handle)
        if done:
            assert isinstance(handle, tuple)
            generation, ((_, block), *_) = handle
            source, _ = self.peers[generation]
            self.pool[block * self.block_bytes + source.part.local_start + 100] ^= 1
        return done


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("source_size", [1, 2, 4])
def test_every_rank_gets_its_part_of_every_block_and_checks_it(make, size, source_size):
    source, reader = make("source", source_size, True), make("reader", size, True)
    source.fill()
    reader.fetch("r", source.engine.offer("p", [3, 4, 9], 40), [4, 9], [1, 7])
    fetched = reader.fetched()
    assert fetched.num_bytes == 2 * sum(map(len, halves(reader, 4)))
    assert reader.engine.stats().checked_blocks == 2
    assert [reader.read("a", block) for block in (1, 7)] == [
        halves(reader, block) for block in (4, 9)
    ]
    assert not any(any(part) for part in reader.read("a", 2))
    assert source.wait(1) == [Released("p", expired=False)]
    reader = make("reader", size, True, a=FaultyBackend)
    reader.fetch("r", source.engine.offer("q", [3], 16), [3], [1])
    failed, _ = reader.wait(2)
    assert failed.cause == "KvCorrupted"


@pytest.mark.parametrize(("mine", "theirs"), [({"a": Missing}, {}), ({}, {"a": Missing})])
def test_what_one_rank_does_not_have_the_engine_does_not_have(make, mine, theirs):
    source, reader = make("source", 2, **theirs), make("reader", 2, **mine)
    source.fill()
    reader.fetch("r", source.engine.offer("p", [3], 16), [3], [1])
    reader.fetched()
    assert reader.read("b", 1) == halves(reader, 3)


def test_a_backend_that_one_rank_cannot_open_is_closed_on_the_others(make):
    source, reader = make("source", 4, b=Missing), make("reader", 2, a=Refusing)
    assert source.engine.planes == ("a", "b")
    assert not any(ranks["b"].opened.is_set() for ranks in source.ranks)
    reader.fetch("r", source.engine.offer("p", [3], 16), [3], [1])
    (failed, _) = reader.wait(2)
    assert isinstance(failed, FetchFailed)
    assert "could not open its KV connector b" in failed.reason
    assert source.engine.planes == ("a",)
    for backends in source.ranks[:-1]:
        assert backends["b"].has_closed.wait(AT_ONCE_S)


def test_a_backend_that_ends_on_another_rank_ends_the_engine(make, monkeypatch):
    reader = make("reader", 2)

    def broken() -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(reader.ranks[1]["a"], "progress", broken)
    assert reader.woken.wait(AT_ONCE_S)
    with pytest.raises(RuntimeError, match="rank 1: RuntimeError: a fault of ours"):
        reader.engine.events()


def test_a_rank_without_the_key_is_not_heard_and_ends(tmp_path):
    link = RankLink("127.0.0.1", heads_of(2), "e", terms_of(CONFIG))
    lost: queue.Queue[str] = queue.Queue()
    stranger = msgspec.structs.replace(link.address, key=zmq.curve_keypair()[0])
    led = LedBackends(1, REGION, {"a": SharedBackend(tmp_path / "a")}, stranger, lost.put)
    assert "the connection to rank 0 has ended or was refused" in lost.get(timeout=AT_ONCE_S)
    led.close()
    link.close(1)


@pytest.fixture
def rank(tmp_path) -> tuple[RankLink, LedBackends, list[str]]:
    """Rank 1, the link that leads it, and why it is lost."""
    link, lost = RankLink("127.0.0.1", heads_of(2), "e", terms_of(CONFIG)), list[str]()
    led = LedBackends(1, REGION, {"a": SharedBackend(tmp_path / "a")}, link.address, lost.append)
    link.prepared(lambda *_: None, lost.append)
    return link, led, lost


def test_a_rank_hears_that_the_engine_ends_before_it_sees_the_connection_end(rank, monkeypatch):
    link, led, lost = rank
    monitor = led._connection.monitor

    def poll(_: object) -> list[object]:  # one by one, as zmq_poll
        found: list[object] = []
        for sock, flags in led.poller.sockets:
            if sock is monitor:
                link.close(1)
            one = zmq.Poller()
            one.register(sock, flags)
            found += one.poll(1000 * AT_ONCE_S if sock is monitor else 0)
        return found

    monkeypatch.setattr(led.poller, "poll", poll)
    led.wake()
    led._thread.join(AT_ONCE_S)
    led.close()
    assert lost == []


def test_a_rank_that_is_closed_while_it_takes_a_message_ends(rank, monkeypatch):
    link, led, _ = rank

    def close_meanwhile(message: object, kind: type) -> bool:
        threading.Thread(target=led.close).start()
        wait_until(lambda: led._closing)
        return type(message) is kind

    monkeypatch.setattr(rank_backends, "isinstance", close_meanwhile, raising=False)
    link.send(1, Stop("b"))
    led._thread.join(AT_ONCE_S)
    assert not led._thread.is_alive()
    link.close(1)
