"""A node's sockets and a router that listens to them: batches are lost, the node is
restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio
from prometheus_client import Counter as Metric

from kvrelay.node import kv_events
from kvrelay.node.kv_events import KvEvents as Told
from kvrelay.router.prefix.index import Prefix, PrefixIndex
from kvrelay.router.prefix.kv_events import KvEvents, _Listener
from kvrelay.wire.engine_messages import CacheChanges
from kvrelay.wire.kv_events import (
    KvEventsConfig,
    KvEventsReport,
    packed_number,
)
from kvrelay.wire.outputs import PromptBlocks

URL = "http://127.0.0.1:9"
DEADLINE_S = 20.0


def chain(count: int, name: int = 0) -> list[bytes]:
    return [bytes([name, at >> 8, at & 255]).ljust(16, b"\1") for at in range(count)]


def stored(hashes: list[bytes]) -> CacheChanges:
    return CacheChanges(hashes, [])


def run(coroutine: Callable[[], Any]) -> None:
    """On uvloop, as both processes do."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(coroutine(), 3 * DEADLINE_S))


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


@asynccontextmanager
async def telling() -> AsyncIterator[Told]:
    node = Told(KvEventsConfig(True, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"))
    try:
        yield node
    finally:
        await node.close()


class Listening:
    """A router's end. `has` are the first blocks of chain(…, name) that it believes the node to
    have.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.blocks = Metric("blocks", "", registry=None)
        self.events = KvEvents(self.index, self.blocks)

    def heard(self, node: Told, generation: str = "g1") -> None:
        self.events.note_report(URL, generation, node.report())

    def has(self, hashes: list[bytes]) -> int:
        prefix = Prefix.of(0, b"x").known(PromptBlocks(1, b"".join(hashes)), len(hashes))
        return self.index.lookup(prefix)[1].get(URL, 0)

    async def trusted(self) -> None:
        await until(lambda: self.index.trusts(URL), "trusted")


@asynccontextmanager
async def listening() -> AsyncIterator[Listening]:
    router = Listening()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(router.events.close)
        yield router


def test_a_router_follows_what_a_node_holds() -> None:
    async def test() -> None:
        async with telling() as node, listening() as router:
            before, live = chain(3), chain(5, 1)
            node.publish(stored(before))
            router.heard(node)
            await router.trusted()
            assert router.has(before) == 3, "what was held before it listened"
            node.publish(stored(live))
            # A batch that is told before the subscription is there is lost, and missed at a health
            # report.
            await until(lambda: router.heard(node) or router.has(live) == 5, "what is stored now")
            node.publish(CacheChanges([], live[2:]))
            await until(lambda: router.has(live) == 2, "what is removed")
            assert router.blocks.collect()[0].samples[0].value == 11
            node.publish(CacheChanges(chain(1, 4), live[:2], cleared=True))
            await until(lambda: router.has(chain(1, 4)) == 1, "what is there since a reset")
            assert router.has(before) == router.has(live) == 0
            assert router.events.doubted() == 0
            router.events.leave(URL)
            assert router.has(before) == 0
            router.events.note_report(URL, "g1", None)  # it tells no events: nothing happens
            node.publish(stored(chain(2, 2)))

    run(test)


def test_lost_batches_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost on the way, in the middle and at the end; at the end only the health report shows it."""
    losing, lost, take = True, 0, _Listener._take

    def lossy(self: _Listener, frames: list[bytes]) -> bool:
        nonlocal lost
        if not losing or not self._caught_up:
            return take(self, frames)
        lost += 1
        return True

    async def test() -> None:
        nonlocal losing, lost
        async with telling() as node, listening() as router:
            router.heard(node)
            await router.trusted()
            monkeypatch.setattr(_Listener, "_take", lossy)
            node.publish(stored(chain(3)))
            router.heard(node)  # it may still be on its way
            router.heard(node)
            await until(lambda: router.has(chain(3)) == 3, "a replay of the end")
            await until(lambda: router.events._listeners[URL]._caught_up, "the replay has ended")
            lost = 0
            while not lost:  # those of the end may come as late as now, and are known by now
                node.publish(stored(chain(3, 2)))
                await asyncio.sleep(0.02)
            losing = False
            await asyncio.sleep(0.05)
            node.publish(stored(chain(3, 3)))
            await until(
                lambda: router.has(chain(3, 2)) == router.has(chain(3, 3)) == 3,
                "a replay of the middle",
            )

    run(test)


def test_a_restarted_node_has_nothing_of_the_old_one() -> None:
    async def test() -> None:
        async with listening() as router:
            async with telling() as node:
                node.publish(stored(chain(3)))
                router.heard(node)
                await router.trusted()
                assert router.has(chain(3)) == 3
                port = node.report().port
            async with telling() as fresh:
                for _ in range(3):
                    fresh.publish(stored(chain(1, 1)))
                # At another port, so the old one's listener hears nothing of it.
                for _ in range(3):
                    fresh.publish(stored(chain(2, 1)))
                assert port != fresh.report().port
                assert router.has(chain(2, 1)) == 0
                router.heard(fresh, "g2")
                await router.trusted()
                assert router.has(chain(3)) == 0
                assert router.has(chain(2, 1)) == 2

    run(test)


def test_a_listener_begins_again_only_where_it_stands_and_not_at_each_report() -> None:
    async def test() -> None:
        async with telling() as node, listening() as router:
            router.heard(node)
            await router.trusted()
            listener = router.events._listeners[URL]
            tasks = [listener.task]
            for at in range(1, 8):
                listener._caught_up = True
                listener._next += at < 3  # then nothing waits
                listener.should_have(100)
                tasks.append(listener.task)
            assert tasks[2] is tasks[0], "it gets on"
            assert len(set(tasks)) == 2

    run(test)


def test_a_node_that_answers_no_replay_is_doubted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.router.prefix.kv_events.REPLAY_DEADLINE_S", 0.1)
    monkeypatch.setattr("kvrelay.router.prefix.kv_events.RETRY_S", 0.0)

    async def test() -> None:
        async with telling() as node, listening() as router:
            with zmq.Context.instance().socket(zmq.ROUTER) as deaf:
                port = deaf.bind_to_random_port("tcp://127.0.0.1")
                router.events.note_report(URL, "g1", KvEventsReport(node.report().port, port, 1))
                await until(lambda: "no replay" in caplog.text, "told")
                assert router.events.doubted() == 1
                prefix = Prefix.of(0, b"y" * 4_000)
                router.index.end(router.index.send(prefix, URL))
                assert router.index.lookup(prefix)[1][URL] > 900, "what was sent there counts"
            router.heard(node)
            await router.trusted()
            assert URL not in router.index.lookup(prefix)[1]

    run(test)


_FLOOD = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.set_hwm(0)
socket.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
for at in range(100_000):
    socket.send_multipart([b"odd"] if at % 10 else [b"", bytes(8)])
socket.send_multipart([b"", b"\\xff" * 7 + b"\\x00"])
print("sent", flush=True)
sys.stdin.read()
"""


def test_strangers_cannot_keep_the_event_loop_busy(caplog: pytest.LogCaptureFixture) -> None:
    """100,000 questions, nine of ten in odd frames; a router beside them is answered."""

    async def test() -> None:
        async with telling() as node, listening() as router:
            for at in range(200):
                node.publish(stored(chain(200, at)))
            flood = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _FLOOD, str(node.report().replay_port)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                await until(lambda: "malformed asks" in caplog.text, "the flood has begun")
                # CPU time of this thread, which other processes of a busy machine take nothing of.
                longest, busy_s, now = 0.0, 0.0, time.thread_time()
                end = time.monotonic() + 1.0
                while time.monotonic() < end:
                    await asyncio.sleep(0)
                    before, now = now, time.thread_time()
                    longest = max(longest, now - before)
                    busy_s += max(0.0, now - before - 0.001)
                assert longest < 0.25
                assert busy_s < 0.5
                router.heard(node)
                await router.trusted()
                assert router.has(chain(200, 199)) == 200
            finally:
                flood.kill()
                await flood.wait()
            assert sum("malformed asks" in line for line in caplog.messages) == 1
            assert "times=1 " in caplog.text

    run(test)


def test_who_does_not_read_what_he_asked_for_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_NOT_READ_MS", 500)

    async def test() -> None:
        async with telling() as node:
            for at in range(20):
                node.publish(stored(chain(10_000, at)))  # 160 KB each
            with zmq.asyncio.Context.instance().socket(zmq.DEALER) as lazy:
                lazy.setsockopt(zmq.RCVHWM, 1)
                lazy.setsockopt(zmq.RCVBUF, 4096)
                lazy.setsockopt(zmq.LINGER, 0)
                events = node._replays.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                lazy.connect(f"tcp://127.0.0.1:{node.report().replay_port}")
                for _ in range(20):
                    await lazy.send_multipart((b"", packed_number(0)))
                await asyncio.wait_for(events.recv_multipart(), DEADLINE_S)
                node._replays.disable_monitor()

    run(test)


def test_a_node_that_cannot_be_listened_to_is_doubted_and_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.router.prefix.kv_events.RETRY_S", 0.0)

    async def test() -> None:
        async with telling() as node, listening() as router:
            report = node.report()
            for _ in range(3):
                router.events.note_report(
                    URL, "g1", KvEventsReport(-1, report.replay_port, report.next_number)
                )
                await asyncio.sleep(0.02)
            assert sum("cannot listen" in line for line in caplog.messages) == 1
            assert router.events.doubted() == 1
            router.heard(node)
            await router.trusted()
            assert router.events.doubted() == 0

    run(test)
