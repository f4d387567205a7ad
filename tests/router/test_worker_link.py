"""What a worker and its parent say to each other: messages cut anywhere, and answers that do not come."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import until

from openai_api.response_store import Stored
from router.admission.rate_limits import Exceeded, Quota
from router.membership.members import NodeSpec, Source
from router.metrics import Metrics
from router.nodes.doors import Doors
from router.nodes.pool import Pool
from router.workers import parent as parent_module
from router.workers.link import Link
from router.workers.messages import (
    MAX_BYTES,
    Added,
    Begin,
    Done,
    Frames,
    FromParent,
    FromWorker,
    GiveBack,
    Keep,
    LinkBroken,
    Listening,
    Names,
    Recall,
    Recalled,
    Scrape,
    Sync,
    Take,
    packed,
)
from router.workers.parent import Parent, share_of
from router.workers.worker import Worker
from wire.config import Role
from wire.errors import Unavailable
from wire.key_config import KeyConfig
from wire.outputs import Load
from wire.router_config import RouterConfig

SPEC = NodeSpec("http://p:1", Role.PREFILL)
CONFIG = RouterConfig(("http://p:1",), ("http://d:1",), workers=2, keys=(KeyConfig("a", "0" * 64, max_queue=5),))
MESSAGES = [
    (1, Take("a", Quota(1, 2, 3), 9)),
    (0, GiveBack(1, None)),
    (0, Keep("o", "r", Stored(b"b", b"i", (b"t" * 99,)))),
    (2, Added(SPEC)),
    (-1, Done()),
]


@given(st.lists(st.integers(1, 40)))
def test_messages_come_whole_however_they_are_cut(cuts: list[int]) -> None:
    data, frames, seen = b"".join(packed(*each) for each in MESSAGES), Frames(FromWorker), []
    for cut in cuts:
        seen += frames.take(data[:cut])
        data = data[cut:]
    assert [*seen, *frames.take(data)] == MESSAGES


def test_what_a_worker_begins_with_comes_as_it_was() -> None:
    begin = Begin(share_of(CONFIG, 7), 1, 2, [Names(Source.ADMIN, [SPEC])], [], {"http://p:1": "a:1"})
    assert list(Frames(FromParent).take(packed(0, begin))) == [(0, begin)]
    assert (begin.config.max_queue, begin.config.keys[0].max_queue, begin.config.port) == (500, 3, 7)


@pytest.mark.parametrize(
    "data", [(MAX_BYTES + 1).to_bytes(4, "big"), b"\0\0\0\2\x93\x93", packed(0, MESSAGES[4][1])[:-1] + b"x"]
)
def test_what_is_no_message_ends_the_link(data: bytes) -> None:
    with pytest.raises(LinkBroken):
        list(Frames(FromWorker).take(data))


class Pair:
    """A parent, and workers that are in this process: each has a link and a pool, and serves nobody."""

    def __init__(self) -> None:
        self.parent = Parent(CONFIG, 1)
        self.pools: list[Pool] = []
        self.killed: list[int] = []

    async def worker(self, index: int) -> tuple[Worker, Link]:
        """One that has begun."""
        ours, its = socket.socketpair()
        heard: list[Any] = []
        worker: list[Worker] = []

        def hear(message: Any, number: int) -> Any:
            heard.append(message)
            return worker[0].hear(message, number) if worker else None

        await self.parent.join(index, ours, lambda: self.killed.append(index))
        link = await Link.over(its, FromParent, hear, lambda: None)
        await until(lambda: bool(heard))
        rng = random.Random(1)
        pool = Pool([], [])
        doors = Doors(pool, rng)
        worker.append(Worker(link, heard[0], pool, doors, Metrics(pool, [])))
        self.pools.append(pool)
        link.tell(Listening())
        await until(lambda: self.parent.serves(index))
        return worker[0], link


async def test_what_nodes_died_of_reaches_all_workers_and_so_does_what_they_did_not() -> None:
    pair = Pair()
    workers = [(await pair.worker(index))[0] for index in (0, 1)]
    for fingerprint, process in ((b"a", "p1"), (b"b", "p1"), (b"b", "p2")):
        workers[0].died(fingerprint, process)
    workers[1].spared(b"a")
    await until(lambda: all(worker.poison.processes(b"b", 0.0) == {"p1", "p2"} for worker in workers))
    await until(lambda: not any(worker.poison.processes(b"a", 0.0) for worker in workers))


async def test_what_is_said_of_nodes_reaches_all_workers_and_those_that_begin_later() -> None:
    pair, beat = Pair(), NodeSpec("http://h:1", Role.DECODE, generation="g")
    (one, link), (_, other) = await pair.worker(0), await pair.worker(1)
    pair.parent.tell(Source.HEARTBEATS, [beat], 0.0)
    pair.parent.heard("http://h:1", Load(running=3), 0.0, draining=False)
    pair.parent.note_p2p_address("http://h:1", "h:2")
    await one.add(NodeSpec("http://a:1", Role.DECODE))
    for pool in pair.pools:
        node = pool.find("http://h:1")
        assert node is not None
        assert (node.load.running, node.p2p_address) == (3, "h:2")
        assert pool.members.sources("http://a:1") == [Source.ADMIN]
    node = pair.pools[0].find("http://d:1")
    assert node is not None
    node.generation = "g1"
    await one.drain(node, begin=True)
    await one.remove("http://p:1")
    _, third = await pair.worker(2)
    for pool in pair.pools:
        assert {node.url for node in pool.nodes} == {"http://h:1", "http://a:1", "http://d:1"}
        drained = pool.find("http://d:1")
        assert drained is not None
        assert drained.drain_asked
    assert drained.generation == "g1"
    await one.drain(node, begin=False)
    assert not drained.drain_asked
    pair.parent.tell(Source.HEARTBEATS, [], 0.0)
    await until(lambda: all(pool.find("http://h:1") is None for pool in pair.pools))
    for each in (link, other, third):
        each.close()
    await until(lambda: pair.parent.listening() == 0)


async def test_an_adapter_is_known_to_all_workers_when_the_first_one_has_been_told() -> None:
    pair = Pair()
    (one, link), (_, other) = await pair.worker(0), await pair.worker(1)
    nodes = [pool.find("http://d:1") for pool in pair.pools]
    assert nodes[0] is not None
    await one.adapter(nodes[0], "lora", loaded=True)
    assert [node.adapters for node in nodes if node] == [{"lora"}, {"lora"}]
    await one.adapter(nodes[0], "lora", loaded=False)
    assert [node.adapters for node in nodes if node] == [set(), set()]
    # The node has loaded it, whoever can be told.
    link.close()
    await until(lambda: not pair.parent.serves(0))
    await one.adapter(nodes[0], "lora", loaded=True)
    assert [node.adapters for node in nodes if node] == [{"lora"}, set()]
    other.close()
    await until(lambda: pair.parent.listening() == 0)


async def test_a_worker_that_answers_no_more_is_ended_and_one_that_was_late_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent_module, "BEAT_S", 0.01)
    monkeypatch.setattr(parent_module, "BEAT_DEADLINE_S", 0.1)
    monkeypatch.setattr(parent_module, "MISSED_BEATS", 3)
    pair = Pair()
    (one, link), (two, other) = await pair.worker(0), await pair.worker(1)
    beats, hear = [0, 0], [one.hear, two.hear]

    def slow(index: int, answers: Callable[[int], bool]) -> Callable[[Any, int], Any]:
        def heard(message: Any, number: int) -> Any:
            if not isinstance(message, Sync):
                return hear[index](message, number)
            beats[index] += 1
            return Done() if answers(beats[index]) else None

        return heard

    monkeypatch.setattr(one, "hear", slow(0, lambda count: count % 3 == 0))
    monkeypatch.setattr(two, "hear", slow(1, lambda count: count < 3))
    async with pair.parent.running():
        await until(lambda: bool(pair.killed))
        await until(lambda: beats[0] > 6)
    assert pair.killed == [1]
    assert beats[1] >= 5
    for each in (link, other):
        each.close()
    await until(lambda: pair.parent.listening() == 0)


async def test_a_limit_holds_over_workers_and_a_lost_one_gives_back_what_it_held() -> None:
    pair = Pair()
    (one, link), (two, other) = await pair.worker(0), await pair.worker(1)
    quota = Quota(at_once=2)
    first = await one.limits.take("a", quota, 5, 0.0)
    second = await two.limits.take("a", quota, 5, 0.0)
    assert not isinstance(first, Exceeded)
    third = await two.limits.take("a", quota, 5, 0.0)
    assert isinstance(third, Exceeded)
    assert third.what == "concurrency"
    two.limits.give_back(second, 5, 0.0)  # type: ignore[arg-type]
    assert not isinstance(await one.limits.take("a", quota, 5, 0.0), Exceeded)
    # One that asks and is cancelled has nothing.
    link.close()
    await until(lambda: not pair.parent.serves(0))
    asking = asyncio.ensure_future(two.limits.take("a", quota, 5, 0.0))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    taken = [await two.limits.take("a", quota, 5, 0.0) for _ in range(3)]
    assert [isinstance(each, Exceeded) for each in taken] == [False, False, True]
    other.close()
    await until(lambda: not pair.parent.serves(1))


async def test_a_response_is_found_that_another_worker_has_just_sent_away() -> None:
    pair = Pair()
    (one, link), (two, other) = await pair.worker(0), await pair.worker(1)
    long = Stored(b"x" * (8 << 20), b"", ())
    one.responses.put("o", "r", long)  # takes many reads
    assert (await two.responses.get("o", "r")).body == long.body
    assert await link.ask(Recall("o", "other"), Recalled) == Recalled(None)
    assert await link.ask(Recall("other", "r"), Recalled) == Recalled(None)
    for each in (link, other):
        each.close()
    await until(lambda: pair.parent.listening() == 0)


async def test_nobody_waits_for_ever_for_the_other_end() -> None:
    ours, its = socket.socketpair()
    link = await Link.over(ours, FromParent, lambda *_: None, lambda: None)
    with pytest.raises(Unavailable, match="did not answer"):
        await link.ask(Scrape(), Done, deadline_s=0.05)
    asking = asyncio.ensure_future(link.ask(Scrape(), Done))
    await asyncio.sleep(0)
    its.close()
    with pytest.raises(Unavailable, match="lost"):
        await asking
    with pytest.raises(Unavailable, match="lost"):
        await link.ask(Scrape(), Done)
