"""A node announces itself: where its beats go while names of routers are unknown, change, or are
not answered.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

import kvrelay.node.lifecycle
from kvrelay.node.lifecycle import Heartbeats
from kvrelay.wire.config import Role
from kvrelay.wire.heartbeat import Heartbeat, NodeState, opened
from kvrelay.wire.outputs import Load

KEY = "the nodes' key"
FACTS = Heartbeat("http://p", Role.PREFILL, "m", "g", Load(), 0.0)
DEADLINE_S = 30.0


@contextmanager
def ear(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """What a router listens with."""
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
    ) as bound:
        bound.bind((host, 0))
        bound.setblocking(False)
        yield bound


async def heard(bound: socket.socket) -> Heartbeat:
    """The next beat."""
    async with asyncio.timeout(DEADLINE_S):
        message = await asyncio.get_running_loop().sock_recv(bound, 1 << 16)
    return opened(message, KEY, msgspec.msgpack.decode(message[32:])["sent_at"])


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_its_last_word_is_that_it_leaves() -> None:
    with ear() as router:
        task = asyncio.create_task(
            Heartbeats(
                [f"udp://127.0.0.1:{router.getsockname()[1]}"],
                KEY,
                lambda: FACTS,
                interval_s=DEADLINE_S,
            ).run()
        )
        first = await heard(router)
        assert first == msgspec.structs.replace(FACTS, sent_at=first.sent_at)
        await ended(task)
        last = await heard(router)
        assert (last.state, last.url) == (NodeState.LEAVING, "http://p")
        assert last.sent_at > first.sent_at


async def test_a_name_is_asked_for_before_each_beat_and_all_its_addresses_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that is not there yet, is there, and has moved to another machine."""
    asked = 0
    with ear() as here, ear() as there:

        async def answers(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
            nonlocal asked
            asked += 1
            assert (host, port) == ("router.test", 7100)
            if asked <= 2:
                raise socket.gaierror(socket.EAI_NONAME, "no such name")
            bound = (here,) if asked == 3 else (here, there)
            return [(each.family, each.type, 17, "", each.getsockname()) for each in bound]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answers)
        task = asyncio.create_task(
            Heartbeats(["udp://router.test:7100"], KEY, lambda: FACTS, interval_s=0.01).run()
        )
        assert (await heard(here)).url == (await heard(there)).url == "http://p"
        assert asked >= 4
        await ended(task)


async def test_a_name_server_that_does_not_answer_holds_up_no_other_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvrelay.node.lifecycle, "LOOK_UP_S", 0.01)
    asked: list[str] = []
    with ear() as router:

        async def answers(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
            asked.append(host)
            if host == "silent.test":
                await asyncio.Event().wait()
            return [(router.family, router.type, 17, "", router.getsockname())]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answers)
        routers = ["udp://silent.test:1", "udp://router.test:2"]
        task = asyncio.create_task(Heartbeats(routers, KEY, lambda: FACTS, interval_s=0.01).run())
        for _ in range(5):
            await heard(router)
        assert asked.count("silent.test") == 1  # each would hold a thread
        await ended(task)
        while (await heard(router)).state is not NodeState.LEAVING:
            pass


async def test_a_name_that_is_not_known_any_more_is_told_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0
    with ear() as router:

        async def answers(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
            nonlocal asked
            asked += 1
            if asked > 1:
                raise socket.gaierror(socket.EAI_AGAIN, "the name server is away")
            return [(router.family, router.type, 17, "", router.getsockname())]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answers)
        task = asyncio.create_task(
            Heartbeats(["udp://router.test:2"], KEY, lambda: FACTS, interval_s=0.01).run()
        )
        for _ in range(3):
            await heard(router)
        await ended(task)


async def test_between_two_beats_it_has_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that had sent once would take datagrams of anybody."""
    opened_ones: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened_ones.append(self)

    with ear() as router:
        monkeypatch.setattr(kvrelay.node.lifecycle.socket, "socket", Noted)
        address = f"udp://127.0.0.1:{router.getsockname()[1]}"
        task = asyncio.create_task(
            Heartbeats([address], KEY, lambda: FACTS, interval_s=DEADLINE_S).run()
        )
        await heard(router)
        assert [each.fileno() for each in opened_ones] == [-1]
        await ended(task)
