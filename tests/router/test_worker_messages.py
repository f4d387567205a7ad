"""What a router's parent process and its workers tell each other, and what the workers make of it."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import until

from kvrelay.router.nodes.node import Lease, Node, NodeSpec, Source
from kvrelay.router.nodes.pool import DRAINS, Pool
from kvrelay.router.router import Router
from kvrelay.router.state import joined_nodes
from kvrelay.router.workers import parent as parent_module
from kvrelay.router.workers.messages import (
    MAX_BYTES,
    ClusterState,
    LinkBroken,
    WorkerReport,
    encode_message,
    read_message,
)
from kvrelay.router.workers.parent import Parent, config_of_worker
from kvrelay.router.workers.worker import Worker
from kvrelay.wire.config import Role
from kvrelay.wire.router_config import KeyConfig, RouterConfig

KEY = KeyConfig(
    "a", "0" * 64, max_queue=5, max_running=2, requests_per_minute=7, tokens_per_minute=0
)
CONFIG = RouterConfig(("http://p:1",), ("http://d:1",), workers=2, keys=(KEY,))
STATE = ClusterState(
    version=3,
    listening=1,
    config=config_of_worker(CONFIG, 7),
    members={Source.STATIC: [NodeSpec("http://p:1", Role.PREFILL)]},
    nodes={"http://d:1": ("g", ["lora"], 1)},
    poison={b"f": (frozenset({"p"}), 5.0)},
    deaths={0: 2},
)


async def read(
    data: bytes, kind: type[ClusterState | WorkerReport], cuts: list[int]
) -> ClusterState | WorkerReport:
    reader = asyncio.StreamReader()
    for cut in cuts:
        reader.feed_data(data[:cut])
        data = data[cut:]
    reader.feed_data(data)
    reader.feed_eof()
    return await read_message(reader, kind)


@given(st.lists(st.integers(1, 90)))
def test_a_snapshot_comes_as_it_was_however_it_is_cut(cuts: list[int]) -> None:
    assert asyncio.run(read(encode_message(STATE), ClusterState, cuts)) == STATE


@pytest.mark.parametrize(
    "data",
    [
        (MAX_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\2\x93\x93",
        encode_message(STATE)[:-1],
        encode_message(WorkerReport(1)),
    ],
)
def test_what_is_no_message_ends_the_connection(data: bytes) -> None:
    with pytest.raises(LinkBroken):
        asyncio.run(read(data, ClusterState, []))


def test_limits_are_divided_and_rounded_up() -> None:
    share, key = config_of_worker(CONFIG, 7), config_of_worker(CONFIG, 7).keys[0]
    assert (share.max_queue, share.port, share.prefill) == (500, 7, ())
    assert (key.max_queue, key.max_running, key.requests_per_minute, key.tokens_per_minute) == (
        3,
        1,
        4,
        0,
    )


class Cluster:
    """A parent, and workers that are in this process: each follows it, and serves nobody."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parent = Parent(CONFIG, 1, folder)
        self.pool = self.parent.router.pool
        self.workers: list[Worker] = []
        self.killed: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def worker(self) -> Worker:
        """One more, which takes connections."""
        index = len(self.workers)
        ours, its = socket.socketpair()
        self.tasks.append(
            asyncio.create_task(self.parent.lead(index, ours, lambda: self.killed.append(index)))
        )
        reader, writer = await asyncio.open_connection(sock=its)
        worker = Worker(index, self.folder, writer)
        begin = await read_message(reader, ClusterState)
        worker.router = Router(begin.config, random.Random(1), worker)
        worker.apply(begin)
        worker.report()
        self.tasks.append(asyncio.create_task(worker.follow(reader)))
        self.workers.append(worker)
        await until(lambda: self.parent.serves_at(index))
        return worker

    def pools(self) -> list[Pool]:
        return [worker.router.pool for worker in self.workers]

    def nodes(self, url: str) -> list[Node]:
        """The node as each worker has it."""
        found = [pool.find(url) for pool in self.pools()]
        assert all(found)
        return [node for node in found if node is not None]


@asynccontextmanager
async def cluster(folder: Path, workers: int = 2) -> AsyncIterator[Cluster]:
    made = Cluster(folder)
    for _ in range(workers):
        await made.worker()
    try:
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        for worker in made.workers:
            worker._writer.close()
        await until(lambda: made.parent.listening() == 0)


async def test_a_snapshot_from_before_a_death_does_not_take_it_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        worker = c.workers[0]
        old = c.parent._state
        assert old is not None
        worker.poison.died(b"a", "p1", 1e9)
        worker.apply(old)
        assert worker.poison.processes(b"a", 0.0) == {"p1"}
        worker.apply(msgspec.structs.replace(old, deaths={0: 1}))
        assert not worker.poison.processes(b"a", 0.0)


async def test_what_is_said_of_nodes_reaches_all_workers_and_those_that_begin_later(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        c.pool.set_members(
            Source.HEARTBEATS, [NodeSpec("http://h:1", Role.DECODE, generation="g")], 0.0
        )
        pods = [NodeSpec("http://a:1", Role.DECODE)]
        c.pool.set_members(Source.KUBERNETES, pods, 0.0)
        await c.parent.settled()
        assert len(c.nodes("http://h:1")) == 2
        assert [pool.sources("http://a:1") for pool in c.pools()] == [[Source.KUBERNETES]] * 2

        drained = c.pool.find("http://d:1")
        assert drained is not None
        drained.generation = c.nodes("http://d:1")[0].generation = "g1"
        c.pool.drain(drained, 0.0)
        c.pool.set_members(Source.STATIC, [NodeSpec("http://d:1", Role.DECODE)], 0.0)
        await c.parent.settled()
        await c.worker()
        for pool in c.pools():
            assert {node.url for node in pool.nodes} == {"http://h:1", "http://a:1", "http://d:1"}
        assert all(node.drain_asked and node.reason == DRAINS for node in c.nodes("http://d:1"))
        assert [node.generation for node in c.nodes("http://d:1")] == ["g1"] * 3
        # Who has seen another process there has seen that it is not the one that was meant.
        c.nodes("http://d:1")[1].generation, c.nodes("http://d:1")[1].drain_asked = "g2", False
        pods.append(NodeSpec("http://b:1", Role.DECODE))
        c.pool.set_members(Source.KUBERNETES, pods, 0.0)
        await c.parent.settled()
        assert [node.drain_asked for node in c.nodes("http://d:1")] == [True, False, True]

        c.pool.undrain(drained, 1.0)
        c.pool.set_members(Source.HEARTBEATS, [], 0.0)
        await c.parent.settled()
        assert not any(node.drain_asked for node in c.nodes("http://d:1"))
        assert not any(pool.find("http://h:1") for pool in c.pools())


async def test_adapters_reach_all_workers_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = c.pool.find("http://d:1")
        assert node is not None
        c.pool.note_adapters(node, {"lora"}, 0.0)
        await c.parent.settled()
        assert [each.adapters for each in c.nodes(node.url)] == [{"lora"}] * 2
        for each in c.nodes(node.url):
            each.adapters = frozenset()  # as its health reports
        await c.worker()  # asks the nodes itself
        c.pool.set_members(Source.KUBERNETES, [NodeSpec("http://a:1", Role.DECODE)], 0.0)
        await c.parent.settled()
        assert not any(each.adapters for each in c.nodes(node.url))
        c.pool.note_adapters(node, (), 0.0)
        await c.parent.settled()
        assert c.parent._state.nodes[node.url][1] == []


async def test_a_reset_prefix_cache_reaches_all_workers_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = c.pool.find("http://d:1")
        assert node is not None
        forgotten: list[str] = []
        for pool in c.pools():
            if pool is not c.pool:
                pool.prefixes.clear = forgotten.append  # type: ignore[method-assign]
        c.pool.note_emptied(node)
        await c.parent.settled()
        c.pool.note_adapters(node, {"lora"}, 0.0)
        await c.parent.settled()
        assert forgotten == [node.url] * 2


async def test_a_parent_that_was_stopped_blames_no_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parent_module, "HANGS_S", 0.3)
    async with cluster(tmp_path) as c, c.parent.running():
        await asyncio.sleep(0.15)
        time.sleep(0.6)
        for worker in c.workers:
            worker.report()
        await asyncio.sleep(0.15)
        assert c.killed == []


async def test_legs_of_all_workers_are_counted_and_what_they_see_is_joined(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for at, node in enumerate(c.nodes("http://d:1")):
            node.leases = {Lease(node) for _ in range(at + 1)}
        c.pool.drain(next(node for node in c.pool.nodes if node.url == "http://d:1"), 0.0)
        await c.parent.settled()  # what they say then was so after the drain
        workers = c.parent.other_workers()
        assert len(workers) == 2
        rows = joined_nodes(c.parent.router.console.status(), workers)
        assert [row.legs for row in rows] == [0, 3]
        assert c.workers[0].workers() == {"index": 0, "listening": 2, "wanted": 2}
