"""Nodes that announce themselves: who is believed, who is there, and the way from a node's datagram
to a pool.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import FakeNode, cluster, decode, prefill, until

from kvrelay.machine import check_port
from kvrelay.node.lifecycle import Heartbeats
from kvrelay.router.membership.heartbeats import AnnouncedNodes, hear_heartbeats
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import EngineConfig, NodeConfig, Role, TransferConfig
from kvrelay.wire.errors import ConfigError, KvrelayError, RequestError, Unauthorized
from kvrelay.wire.heartbeat import (
    LOST_AFTER_S,
    MAX_BYTES,
    MAX_SKEW_S,
    Heartbeat,
    NodeState,
    opened,
    sealed,
)
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import RouterConfig

KEY = "the nodes' key"
NOW = 1_700_000_000.0


def beat(sent_at: float = NOW, url: str = "http://p", **fields: object) -> Heartbeat:
    facts = Heartbeat(url, Role.PREFILL, "m", "g1", Load(running=2), sent_at)
    return msgspec.structs.replace(facts, **fields)


def free_udp_port(host: str = "127.0.0.1") -> int:
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def announcing(node: FakeNode, port: int) -> Heartbeats:
    """Without a key, as on the loopback."""
    facts = Heartbeat(node.url, Role(node.role), "", node.generation, Load(), 0.0)
    return Heartbeats([f"udp://127.0.0.1:{port}"], "", lambda: facts, interval_s=0.05)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def pool() -> Pool:
    return Pool([], [])


def urls(pool: Pool) -> list[str]:
    return [node.url for node in pool.nodes]


def test_what_was_sealed_is_opened_by_who_has_the_key() -> None:
    assert opened(sealed(beat(), KEY), KEY, NOW + 1) == beat()
    for key in ("another", ""):
        with pytest.raises(Unauthorized):
            opened(sealed(beat(), key), KEY, NOW)


@given(st.binary(max_size=300), st.integers(min_value=0))
def test_no_other_bytes_are_taken(noise: bytes, at: int) -> None:
    genuine = sealed(beat(), KEY)
    with pytest.raises((RequestError, Unauthorized)):
        opened(noise, KEY, NOW)
    flipped = bytearray(genuine)
    flipped[at % len(genuine)] ^= 1
    with pytest.raises((RequestError, Unauthorized)):
        opened(bytes(flipped), KEY, NOW)


@pytest.mark.parametrize(
    "sent_at", [NOW - MAX_SKEW_S - 1, NOW + MAX_SKEW_S + 1, float("nan"), float("inf")]
)
def test_a_message_of_another_time_is_refused(sent_at: float) -> None:
    with pytest.raises(RequestError):
        opened(sealed(beat(sent_at), KEY), KEY, NOW)


def test_one_that_is_longer_than_any_heartbeat_is_refused() -> None:
    with pytest.raises(RequestError, match=str(MAX_BYTES)):
        opened(sealed(beat(model="m" * MAX_BYTES), KEY), KEY, NOW)


def test_a_message_that_is_played_again_changes_nothing(pool: Pool) -> None:
    announced = AnnouncedNodes(pool, KEY)
    first, last = sealed(beat(), KEY), sealed(beat(NOW + 1, state=NodeState.LEAVING), KEY)
    announced.add(first, NOW, 0.0)
    assert urls(pool) == ["http://p"]
    announced.add(last, NOW + 1, 1.0)
    announced.add(first, NOW + 2, 2.0)
    announced.expire(2 + MAX_SKEW_S)
    announced.add(first, NOW + MAX_SKEW_S, MAX_SKEW_S)
    assert urls(pool) == []


def test_a_node_that_is_not_heard_is_there_until_three_beats_were_missed(pool: Pool) -> None:
    announced = AnnouncedNodes(pool, KEY)
    announced.add(sealed(beat(), KEY), NOW, 10.0)
    announced.expire(10.0 + LOST_AFTER_S)
    assert urls(pool) == ["http://p"]
    announced.expire(10.1 + LOST_AFTER_S)
    assert urls(pool) == []
    announced.add(sealed(beat(NOW + 20), KEY), NOW + 20, 30.0)
    assert urls(pool) == ["http://p"]


def test_only_what_is_new_is_told(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    announced, told = AnnouncedNodes(pool, KEY), list[str]()
    monkeypatch.setattr(pool, "set_members", lambda _, specs, __: told.append(specs[0].role))
    for at, role in enumerate([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]):
        announced.add(sealed(beat(NOW + at, role=role), KEY), NOW + at, float(at))
    assert told == [Role.PREFILL, Role.DECODE]


@pytest.mark.parametrize("facts", [beat(url="ftp://p"), beat(role=Role.AGGREGATED)])
def test_what_cannot_be_a_node_is_refused(facts: Heartbeat, pool: Pool) -> None:
    with pytest.raises(KvrelayError):
        AnnouncedNodes(pool, KEY).add(sealed(facts, KEY), NOW, 0.0)


@pytest.mark.parametrize("host", ["::", "::1"])
async def test_nodes_are_heard_at_ipv6_addresses(host: str, pool: Pool) -> None:
    try:
        port = free_udp_port("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    async with hear_heartbeats(pool, host, port, KEY):
        task = asyncio.create_task(
            Heartbeats([f"udp://[::1]:{port}"], KEY, lambda: beat(0.0)).run()
        )
        await until(lambda: urls(pool) == ["http://p"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(RequestError, match=f"127.0.0.1:{port}.*give another port"):
            async with hear_heartbeats(Pool([], []), "127.0.0.1", port, KEY):
                pass
        with pytest.raises(ConfigError, match=f"port {port}"):
            check_port("127.0.0.1", port, socket.SOCK_DGRAM)


async def test_a_flood_of_strangers_leaves_the_router_serving_and_its_memory_flat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, d, port = prefill(), decode(), free_udp_port()
    noise = [b"", b"x" * 100, b"x" * MAX_BYTES, b"x" * 60_000, sealed(beat(), "guessed")]
    ended = threading.Event()

    def flood() -> None:
        sent = 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            while sent < 10_000 or not ended.is_set():  # 130 MB
                stranger.sendto(noise[sent % len(noise)], ("127.0.0.1", port))
                sent += 1

    async with p.running(), d.running(), cluster(heartbeat_port=port, ready=False) as c:
        tasks = [
            asyncio.create_task(announcer.run())
            for announcer in (announcing(p, port), announcing(d, port))
        ]
        await until(
            lambda: len(c.router.pool.nodes) == 2 and all(node.up for node in c.router.pool.nodes)
        )
        await c.text()
        before = resident_bytes()
        with caplog.at_level(logging.WARNING, "kvrelay.router"):
            began = time.monotonic()
            flooding = asyncio.create_task(asyncio.to_thread(flood))
            try:
                for _ in range(100):
                    await c.text()
            finally:
                ended.set()
                await flooding
            took_s = time.monotonic() - began
        grown = resident_bytes() - before
        refused = [line for line in caplog.messages if "a heartbeat is refused" in line]
        assert 1 <= len(refused) <= 1 + took_s / 10
        assert grown < 16 << 20
        assert len(c.router.pool.nodes) == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not c.router.pool.nodes)  # heard behind the flood


def test_heartbeats_from_elsewhere_need_a_key() -> None:
    with pytest.raises(ConfigError, match="node_api_key"):
        RouterConfig(host="0.0.0.0", heartbeat_port=9)
    RouterConfig(host="0.0.0.0", heartbeat_port=9, node_api_key="k")
    engine = EngineConfig("m")
    with pytest.raises(ConfigError, match="node_api_key"):
        NodeConfig(engine, Role.PREFILL, router=("udp://10.0.0.1:9",))
    NodeConfig(
        engine, Role.PREFILL, router=("udp://127.0.0.1:9", "udp://[::1]:9", "udp://localhost:9")
    )
    NodeConfig(
        engine, Role.PREFILL, router=("udp://10.0.0.1:9", "udp://router.kvrelay:9"), api_key="k"
    )
    for wrong in ("http://h:9", "h:9", "udp://h", "udp://:9", "udp://h:65536", "udp://::1:9"):
        with pytest.raises(ConfigError, match="udp://HOST:PORT"):
            NodeConfig(engine, Role.PREFILL, router=(wrong,), api_key="k")


def test_a_node_that_listens_everywhere_is_reached_where_its_kv_is() -> None:
    transfer = TransferConfig(kv_host="10.0.0.7", cluster_secret="s" * 16)
    assert (
        NodeConfig(EngineConfig("m"), transfer=transfer, host="0.0.0.0", port=81).url
        == "http://10.0.0.7:81"
    )
    assert NodeConfig(EngineConfig("m"), host="::1", port=81).url == "http://[::1]:81"
