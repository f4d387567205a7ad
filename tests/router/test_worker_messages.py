"""What a router's parent process and its workers tell each other, and what the workers make of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from router_doubles import until

from kvrelay.router.nodes.node import DRAINS, Lease, Node, NodeSpec, Source
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.router import Router
from kvrelay.router.state import joined_nodes
from kvrelay.router.workers import parent as parent_module
from kvrelay.router.workers.parent import Parent, config_of_worker
from kvrelay.router.workers.worker import Worker
from kvrelay.wire.config import Role
from kvrelay.wire.router_config import KeyConfig, RouterConfig

KEY = KeyConfig(
    "a", "0" * 64, max_queue=5, max_running=2, requests_per_minute=7, tokens_per_minute=0
)
D = "http://127.0.0.1:2"
CONFIG = RouterConfig(
    ("http://127.0.0.1:1",),
    (D,),
    workers=2,
    keys=(KEY,),
    health_interval_s=60,
    max_connections=1,  # of clients: workers ask their parent nevertheless
)


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
        self.parent.begin(index, lambda: self.killed.append(index))
        worker = Worker(index, self.folder)
        self.workers.append(worker)
        begin = await worker.report()
        assert begin is not None
        worker.router = Router(begin.config, random.Random(1), worker)
        worker.apply(begin)
        await self.hear(worker)
        self.tasks.append(asyncio.create_task(worker.follow()))
        return worker

    async def hear(self, worker: Worker) -> None:
        """Have a worker ask once, and take over what it is told."""
        if (state := await worker.report()) is not None:
            worker.apply(state)

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
    async with made.parent.running():
        try:
            for _ in range(workers):
                await made.worker()
            yield made
        finally:
            for task in made.tasks:
                task.cancel()
            await asyncio.gather(*made.tasks, return_exceptions=True)
            for worker in made.workers:
                await worker.close()


async def test_a_snapshot_from_before_a_death_does_not_take_it_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        (worker,) = c.workers
        c.tasks.pop().cancel()
        worker.poison.died(b"a", "p1", time.monotonic())
        worker.apply(c.parent._state)
        assert worker.poison.known(b"a", 0.0)[0] == {"p1"}
        await c.hear(worker)
        worker.poison.take_over({})
        other = await c.worker()
        assert other.poison.known(b"a", 0.0)[0] == {"p1"}
        other.poison.spared(b"a")
        await c.parent.settled()
        await until(lambda: not c.parent.poison)


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

        drained = c.pool.find(D)
        assert drained is not None
        c.pool.drain(drained, 0.0)
        c.pool.set_members(Source.STATIC, [NodeSpec(D, Role.DECODE)], 0.0)
        await c.parent.settled()
        await c.worker()
        for pool in c.pools():
            assert {node.url for node in pool.nodes} == {"http://h:1", "http://a:1", D}
        assert all(node.drain_asked and node.reason == DRAINS for node in c.nodes(D))
        c.pool.undrain(drained, 1.0)
        c.pool.set_members(Source.HEARTBEATS, [], 0.0)
        await c.parent.settled()
        assert not any(node.drain_asked for node in c.nodes(D))
        assert not any(pool.find("http://h:1") for pool in c.pools())


async def test_adapters_reach_all_workers_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = c.pool.find(D)
        assert node is not None
        c.pool.note_adapters(node, {"lora"}, 0.0)
        await c.parent.settled()
        assert [each.adapters for each in c.nodes(node.url)] == [{"lora"}] * 2
        for each in c.nodes(node.url):
            each.adapters = frozenset()  # as its health reports
        c.pool.set_members(Source.KUBERNETES, [NodeSpec("http://a:1", Role.DECODE)], 0.0)
        await c.parent.settled()
        assert not any(each.adapters for each in c.nodes(node.url))
        c.pool.note_adapters(node, (), 0.0)
        await c.parent.settled()
        assert c.parent._state.nodes[node.url][1] == []


async def test_a_parent_that_was_stopped_blames_no_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parent_module, "HANGS_S", 0.3)
    monkeypatch.setattr(parent_module, "POLL_S", 0.01)  # a slow turn of the loop is one look of 30
    async with cluster(tmp_path) as c:
        await asyncio.sleep(0.15)
        time.sleep(0.6)
        await asyncio.sleep(0.15)
        assert c.killed == []


async def test_legs_of_all_workers_are_counted_and_what_they_see_is_joined(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for at, node in enumerate(c.nodes(D)):
            node.leases = {Lease(node) for _ in range(at + 1)}
        told = {"m": (0.1, 2.0)}, {"m": (0.2, 1.0), "n": (1.0, 1.0)}
        for worker, each in zip(c.workers, told, strict=True):
            worker.router.placer.refused_work = lambda _now, each=each: each  # type: ignore
        c.pool.drain(next(node for node in c.pool.nodes if node.url == D), 0.0)
        await c.parent.settled()  # what they say then was so after the drain
        workers = c.parent.other_workers()
        assert len(workers) == 2
        rows = joined_nodes(c.parent.router.status(), workers)
        assert [row.legs for row in rows] == [0, 3]
        assert c.parent.router.refused_work("m") == pytest.approx((0.3, 3.0))
        assert c.parent.router.refused_work("other") == (0, 0)
        assert c.workers[0].router.refused_work("m") == (0.1, 2.0), "alone, it counts its own"
        assert c.workers[0].workers() == {"index": 0, "listening": 2, "wanted": 2}
