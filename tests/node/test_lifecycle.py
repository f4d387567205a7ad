"""A node's life: when it is ready and alive, drains, changes its role, and announces itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import kvrelay.node.lifecycle
from kvrelay.node.lifecycle import SILENCE_LIMIT_S, Heartbeats, Node
from kvrelay.wire.config import EngineConfig, NodeConfig, Role
from kvrelay.wire.engine_messages import EngineStats, TransferStats
from kvrelay.wire.errors import Conflict, DeadlineExceeded, Draining, EngineDead
from kvrelay.wire.heartbeat import Heartbeat, NodeState, opened
from kvrelay.wire.outputs import Load

P, D = Role.PREFILL, Role.DECODE
KEY = "the nodes' key"
FACTS = Heartbeat("http://p", P, "m", "g", Load(), 0.0)
DEADLINE_S = 30.0


class FakeEngine:
    """An engine client that reports these held blocks in turn, the last of them for ever."""

    def __init__(self, requests: int = 0, held: tuple[int, ...] = (0,), **fields: Any) -> None:
        self.requests, self.held, self.lent = requests, list(held), fields.get("lent", 0)
        self.info: Any = fields.get("info", "ready")
        self.dies = fields.get("dies", False)
        self.ended = asyncio.Event()
        self.stats = EngineStats(
            Load(), transfers=TransferStats(silent_s=fields.get("kv_silent_s", 0.0))
        )
        self.silent_s = lambda: fields.get("silent_s", 0.0)
        if fields.get("ended"):
            self.ended.set()

    def queue_depth(self) -> int:
        return self.requests

    async def fresh_stats(self, deadline_s: float) -> EngineStats:
        if self.dies:
            self.ended.set()
            raise EngineDead("gone")
        held = self.held.pop(0) if len(self.held) > 1 else self.held[0]
        if held < 0:
            raise DeadlineExceeded("a long step")
        return EngineStats(Load(), held_blocks=held, lent_blocks=self.lent)


def node_of(
    *, role: Role = P, loaded: bool = True, deadline_s: float = DEADLINE_S, **fields: Any
) -> tuple[Node, FakeEngine]:
    engine = FakeEngine(**fields)
    serving = SimpleNamespace(set_role=lambda role: None) if loaded else None
    config = NodeConfig(EngineConfig("m"), role)
    node = Node(
        config, cast(Any, engine), 0, serving=cast(Any, serving), flip_deadline_s=deadline_s
    )
    return node, engine


async def changed(node: Node) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while node.flips_to is not None:
            await asyncio.sleep(0.005)


def test_it_is_ready_while_its_engine_and_its_kv_link_are_seen_at_work() -> None:
    node, _ = node_of(silent_s=SILENCE_LIMIT_S, kv_silent_s=SILENCE_LIMIT_S)
    assert node.ready() is node.serving
    assert node.alive()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"silent_s": 21.0}, "the engine process has said nothing for 21 s"),
        ({"kv_silent_s": 30.0}, "no KV over: a thread of its KV link has stood still for 30 s"),
        ({"ended": True}, "has ended"),
    ],
)
def test_one_that_stands_still_is_neither_ready_nor_alive(fields: dict[str, Any], why: str) -> None:
    node, _ = node_of(**fields)
    with pytest.raises(EngineDead, match=why):
        node.ready()
    assert not node.alive()


def test_one_that_loads_or_drains_is_alive_unless_its_load_failed() -> None:
    loading, _ = node_of(loaded=False, silent_s=300.0)
    with pytest.raises(EngineDead, match="still being loaded"):
        loading.ready()
    assert loading.alive()
    loading.failure = "no such model"
    assert not loading.alive()
    draining, _ = node_of()
    draining.drain()
    assert draining.alive()


async def test_a_drain_is_over_when_kv_was_fetched_and_not_before() -> None:
    node, engine = node_of(held=(4, -1, 4, 0))
    assert await node.wait_idle(5.0)
    assert engine.held == [0]


async def test_a_drain_waits_for_a_request_that_the_engine_does_not_have_yet() -> None:
    (node, _), running = node_of(), [0, 1, 1]
    node.streams = cast(Any, SimpleNamespace(running=running.pop))
    assert await node.wait_idle(5.0)
    assert not running


async def test_a_drain_does_not_wait_for_routers_that_follow_its_cache() -> None:
    node, _ = node_of()
    assert node.kv_events is not None
    stream = node.streams.open(cast(Any, None), 0)
    stream._requests[1] = cast(Any, None)
    node.streams._streams.add(stream)
    following = node.kv_events.frames()
    await anext(following)
    assert await node.wait_idle(5.0)
    await following.aclose()
    assert not await node.wait_idle(0.1)


def test_new_requests_are_refused_while_it_drains_and_each_change_is_told_once() -> None:
    (node, _), told = node_of(), list[bool]()
    node.on_change = lambda: told.append(node.draining)
    node.check_open()
    node.drain()
    node.drain()
    with pytest.raises(Draining) as refused:
        node.check_open()
    assert (refused.value.status, refused.value.body().code) == (503, "draining")
    node.drain(draining=False)
    node.drain(draining=False)
    node.check_open()
    assert told == [True, False]


def outcomes_of(node: Node) -> list[str]:
    told = list[str]()
    metrics = SimpleNamespace(
        count=lambda _, outcome: told.append(outcome), set_role=lambda role: None
    )
    node.metrics = cast(Any, metrics)
    return told


@pytest.mark.parametrize("busy", [{"requests": 1}, {"held": (4,)}])
async def test_it_ends_what_it_has_and_is_then_the_other_role(busy: dict[str, Any]) -> None:
    node, engine = node_of(**busy)
    told = list[tuple[Role, Role | None]]()
    outcomes = outcomes_of(node)
    node.on_change = lambda: told.append((node.role, node.flips_to))
    node.check_open()
    node.change_role(D)
    with pytest.raises(Draining, match="from prefill to decode") as refused:
        node.check_open()
    assert (refused.value.status, refused.value.body().code) == (503, "draining")
    with pytest.raises(Conflict, match="already; wait") as second:
        node.change_role(D)
    assert (second.value.status, second.value.code) == (409, "flipping")
    engine.requests, engine.held = 0, [0]
    await changed(node)
    node.check_open()
    assert (node.role, node.flips, told, outcomes) == (D, 1, [(P, D), (D, None)], ["done"])
    node.change_role(P)
    await changed(node)
    assert (node.role, node.flips) == (P, 2)


async def test_a_role_change_does_not_wait_for_cached_kv_that_others_read_and_a_drain_does() -> (
    None
):
    node, _ = node_of(held=(4,), lent=4)
    node.change_role(D)
    await changed(node)
    assert node.role is D
    assert not await node.wait_idle(0.1)


async def test_asking_for_the_present_role_cancels_a_change() -> None:
    node, _ = node_of(requests=1)
    outcomes = outcomes_of(node)
    node.change_role(D)
    node.change_role(P)
    node.check_open()
    assert (node.role, node.flips, node.flips_to, outcomes) == (P, 0, None, ["cancelled"])


async def test_what_is_left_by_the_deadline_goes_on_beside_the_new_role() -> None:
    node, engine = node_of(role=D, deadline_s=0.12, requests=1, held=(2,))
    node.change_role(P)
    await changed(node)
    assert (node.role, engine.requests) == (P, 1)


async def test_a_node_that_ends_or_drains_keeps_its_role() -> None:
    node, engine = node_of(requests=1)
    node.change_role(D)
    node.drain()
    assert node.flips_to is None  # routers name no source that will soon be gone
    engine.requests = 0
    assert await node.wait_idle(5.0)
    assert (node.role, node.flips) == (P, 0)
    with pytest.raises(Conflict, match="undrain"):
        node.change_role(D)
    node.drain(draining=False)
    engine.requests = 1
    node.change_role(D)
    engine.ended.set()
    engine.requests = 0
    await changed(node)
    assert node.role is P


@contextmanager
def listener() -> Iterator[tuple[socket.socket, str]]:
    """A router's socket and its address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        bound.setblocking(False)
        yield bound, f"udp://127.0.0.1:{bound.getsockname()[1]}"


async def received(bound: socket.socket) -> Heartbeat:
    async with asyncio.timeout(DEADLINE_S):
        message = await asyncio.get_running_loop().sock_recv(bound, 1 << 16)
    return opened(message, KEY, msgspec.msgpack.decode(message[32:])["sent_at"])


def beating(routers: list[str], interval_s: float = 0.01) -> asyncio.Task[None]:
    return asyncio.create_task(Heartbeats(routers, KEY, lambda: FACTS, interval_s).run())


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_its_last_beat_says_that_it_leaves() -> None:
    with listener() as (router, url):
        task = beating([url])
        first = await received(router)
        assert first == msgspec.structs.replace(FACTS, sent_at=first.sent_at)
        await stop(task)
        while (last := await received(router)).state is not NodeState.LEAVING:
            pass
        assert last.url == "http://p"
        assert last.sent_at > first.sent_at


def resolve(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, int]]:
    """Have names resolved by `answer`, given how often and for what; return what was asked."""
    asked: list[tuple[str, int]] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        asked.append((host, port))
        found = await answer(len(asked), host)
        return [(each.family, each.type, 17, "", each.getsockname()) for each in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return asked


async def test_a_name_is_resolved_before_each_beat_and_all_its_addresses_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that is not there yet, is there, and has moved to another machine."""
    with listener() as (here, _), listener() as (there, _):

        async def answer(times: int, host: str) -> list[socket.socket]:
            if times <= 2:
                raise socket.gaierror(socket.EAI_NONAME, "no such name")
            if times == 5:
                raise socket.gaierror(socket.EAI_AGAIN, "the name server is away")
            return [here] if times == 3 else [here, there]

        asked = resolve(monkeypatch, answer)
        task = beating(["udp://router.test:7100"])
        assert (await received(here)).url == (await received(there)).url == "http://p"
        while len(asked) < 6:  # the last addresses stay while the name is not known
            await received(there)
        assert set(asked) == {("router.test", 7100)}
        await stop(task)


async def test_between_two_beats_it_has_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that had sent once would take datagrams of anybody."""
    sockets: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sockets.append(self)

    with listener() as (router, url):
        fake = SimpleNamespace(**vars(socket) | {"socket": Noted})
        monkeypatch.setattr(kvrelay.node.lifecycle, "socket", fake)
        task = beating([url], DEADLINE_S)
        await received(router)
        assert [each.fileno() for each in sockets] == [-1]
        await stop(task)
