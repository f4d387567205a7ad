"""KV events: what a node tells of its prefix cache, and routers that follow it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import msgspec
import pytest
from router_doubles import (
    MODEL,
    Call,
    Cluster,
    FakeNode,
    Script,
    cluster,
    decode,
    handover,
    parse_job,
    prefill,
    prefill_ok,
    until,
)

from kvrelay.node import request_stream
from kvrelay.node.request_stream import KvEvents
from kvrelay.router.prefix.index import Prefix
from kvrelay.router.request.job import prefix_of
from kvrelay.wire import kv_events
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.kv_events import CacheChanges, read_changes
from kvrelay.wire.outputs import PromptBlocks


def chain(count: int, name: int = 0) -> list[bytes]:
    return [bytes([name, at >> 8, at & 255]).ljust(16, b"\1") for at in range(count)]


def has(c: Cluster, node: FakeNode, hashes: list[bytes]) -> int:
    """How many of these blocks, from the first on, the router believes the node to hold."""
    prefix = Prefix.of(0, b"x").known(PromptBlocks(1, b"".join(hashes)), len(hashes))
    return c.router.pool.prefixes.lookup(prefix)[1].get(node.url, 0)


async def test_a_router_follows_what_a_node_holds() -> None:
    node = prefill(kv_events=(told := KvEvents()))
    before, live = chain(10_000), chain(5, 1)
    told.publish(CacheChanges(before, []))
    async with cluster(node, prefill()) as c:
        await until(lambda: c.metric("kvrelay_router_prefix_blocks") == 10_000)
        assert has(c, node, before) == 10_000
        told.publish(CacheChanges(live, []))
        await until(lambda: has(c, node, live) == 5)
        told.publish(CacheChanges([], live[2:]))
        await until(lambda: has(c, node, live) == 2)
        told.publish(CacheChanges(chain(1, 4), live[:2], cleared=True))
        await until(lambda: has(c, node, chain(1, 4)) == 1)
        assert has(c, node, before) == has(c, node, live) == 0
        assert [c.router.pool.prefixes.follows(each.url) for each in c.router.pool.nodes] == [
            True,
            False,
        ]


async def test_a_node_that_tells_nothing_takes_no_place_from_one_that_does() -> None:
    """A node of the release before names the same blocks otherwise."""

    def naming(names: list[bytes]) -> Script:
        async def script(call: Call) -> None:
            blocks = PromptBlocks(16, b"".join(names))
            params = handover(call, generated=[], num_tokens=16 * len(names))
            await call.send(Frame(FrameKind.TICKET, params=params, blocks=blocks))
            await prefill_ok(call)

        return script

    new, old = prefill(naming(chain(8)), kv_events=KvEvents()), prefill(naming(chain(8, 1)))
    new.kv_events.publish(CacheChanges(chain(8), []))  # type: ignore[union-attr]
    async with cluster(new, old, decode(), prefill_policy="round_robin") as c:
        index = c.router.pool.prefixes
        await until(lambda: index.follows(new.url))
        for _ in range(2):
            await c.text(
                body := {"model": MODEL, "prompt": "y" * 512, "stream": True},
                path="/v1/completions",
            )
        cached = index.lookup(prefix_of(parse_job(json.dumps(body).encode(), "/v1/completions")))[1]
        assert (len(new.calls), len(old.calls)) == (1, 1)
        assert cached[new.url] == 128
        assert cached[old.url] > 0


@pytest.mark.parametrize("restarts", [True, False])
async def test_with_a_stream_what_it_told_is_lost_and_told_again_by_the_next(
    *, restarts: bool
) -> None:
    node = prefill(kv_events=KvEvents())
    node.kv_events.publish(CacheChanges(chain(3), []))  # type: ignore[union-attr]
    async with cluster(node) as c:
        await until(lambda: has(c, node, chain(3)) == 3)
        index, opened = c.router.pool.prefixes, node.streams
        node.kv_events = KvEvents()
        node.kv_events.publish(CacheChanges(chain(2, 1), []))
        if restarts:
            node.generation = "g2"
        else:
            c.router.node_client._streams[c.node(node)].give_up("the connection failed")
        await until(lambda: not index.follows(node.url) or node.streams > opened)
        await until(lambda: has(c, node, chain(2, 1)) == 2)
        assert has(c, node, chain(3)) == 0


async def test_a_node_of_malformed_events_is_chosen_by_what_is_sent_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(KvEvents):
        good = True

        async def frames(self) -> AsyncGenerator[Frame, None]:
            if self.good:
                self.good = False
                news = CacheChanges(chain(3), [], cleared=True)
                yield Frame(FrameKind.TOKENS, msgspec.msgpack.encode(news))
            yield Frame(FrameKind.TOKENS, b"\xc1")

    node = prefill(kv_events=Odd())
    async with cluster(node) as c:
        await until(lambda: caplog.text.count(f"{node.url} are malformed") > 1)
        index, prefix = c.router.pool.prefixes, Prefix.of(0, b"y" * 4_000)
        assert not index.follows(node.url)
        assert has(c, node, chain(3)) == 0
        index.end(index.send(prefix, node.url))
        assert index.lookup(prefix)[1][node.url] > 900


async def test_a_router_that_reads_too_slowly_is_told_all_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_stream, "_QUEUED", 4)
    monkeypatch.setattr(kv_events, "_HASHES", 2)
    node = KvEvents()
    held = chain(3)
    node.publish(CacheChanges(held, []))
    slow, fast = node.frames(), node.frames()

    async def heard(frames: AsyncGenerator[Frame, None]) -> CacheChanges:
        return read_changes((await anext(frames)).payload)

    for frames in (slow, fast):
        first, second = await heard(frames), await heard(frames)
        assert (first.cleared, second.cleared) == (True, False)
        assert sorted(first.stored + second.stored) == held
    for at in range(9):
        held.append(*chain(1, 9 + at))
        node.publish(CacheChanges(held[-1:], []))
        assert await heard(fast) == CacheChanges(held[-1:], [])
    assert all(queue.qsize() <= 4 for queue in node.followers)
    known: set[bytes] = set()
    while len(known) < len(held):
        news = await heard(slow)
        known = (set() if news.cleared else known) | set(news.stored)
    node.publish(CacheChanges([], held[:1]))
    assert await heard(slow) == await heard(fast) == CacheChanges([], held[:1])
    await slow.aclose()
    await fast.aclose()
    assert not node.followers
