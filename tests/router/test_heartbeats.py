"""Nodes that announce themselves: who is believed, who is there, and the way from a node's socket to a pool."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from router_doubles import cluster, decode, prefill, until

from benchmarks.local_cluster import free_ports
from node.heartbeat import Announcer
from router.membership.heartbeats import Announced, hearing
from router.nodes.pool import Pool
from wire.config import EngineConfig, NodeConfig, Role, TransferConfig
from wire.errors import ConfigError, KvrelayError, RequestError, Unauthorized
from wire.heartbeat import LOST_AFTER_S, MAX_BYTES, MAX_SKEW_S, Heartbeat, NodeState, opened, sealed
from wire.outputs import Load
from wire.router_config import RouterConfig

KEY = "the nodes' key"
NOW = 1_700_000_000.0


def beat(sent_at: float = NOW, url: str = "http://p", generation: str = "g1", **fields: object) -> Heartbeat:
    facts = Heartbeat(url, Role.PREFILL, "m", generation, Load(running=2), sent_at)
    return msgspec.structs.replace(facts, **fields)


def urls(announced: Announced) -> list[str]:
    return [spec.url for spec in announced.specs()]


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


@pytest.mark.parametrize("sent_at", [NOW - MAX_SKEW_S - 1, NOW + MAX_SKEW_S + 1, float("nan"), float("inf")])
def test_a_message_of_another_time_is_refused(sent_at: float) -> None:
    with pytest.raises(RequestError):
        opened(sealed(beat(sent_at), KEY), KEY, NOW)


def test_one_that_is_longer_than_any_heartbeat_is_refused() -> None:
    with pytest.raises(RequestError, match=str(MAX_BYTES)):
        opened(sealed(beat(model="m" * MAX_BYTES), KEY), KEY, NOW)


def test_a_message_that_is_played_again_changes_nothing() -> None:
    announced = Announced(KEY)
    first, last = sealed(beat(), KEY), sealed(beat(NOW + 1, state=NodeState.LEAVING), KEY)
    assert announced.take(first, NOW, 0.0)
    assert announced.take(last, NOW + 1, 1.0)
    assert announced.take(first, NOW + 2, 2.0) is None
    assert urls(announced) == []
    announced.expire(2 + MAX_SKEW_S)
    assert announced.take(first, NOW + MAX_SKEW_S, MAX_SKEW_S) is None


def test_a_node_that_is_not_heard_is_there_until_three_beats_were_missed() -> None:
    announced = Announced(KEY)
    announced.take(sealed(beat(), KEY), NOW, 10.0)
    announced.expire(10.0 + LOST_AFTER_S)
    assert urls(announced) == ["http://p"]
    announced.changed = False
    announced.expire(10.1 + LOST_AFTER_S)
    assert (urls(announced), announced.changed) == ([], True)
    announced.take(sealed(beat(NOW + 20), KEY), NOW + 20, 30.0)
    assert urls(announced) == ["http://p"]


def test_only_what_is_new_is_told() -> None:
    announced, told = Announced(KEY), []
    for at, generation in enumerate(["g1", "g1", "g2", "g2"]):
        announced.take(sealed(beat(NOW + at, generation=generation), KEY), NOW + at, float(at))
        told.append(announced.changed)
        announced.changed = False
    assert told == [True, False, True, False]
    assert [spec.generation for spec in announced.specs()] == ["g2"]


@pytest.mark.parametrize("facts", [beat(url="ftp://p"), beat(role=Role.AGGREGATED)])
def test_what_cannot_be_a_node_is_refused(facts: Heartbeat) -> None:
    with pytest.raises(KvrelayError):
        Announced(KEY).take(sealed(facts, KEY), NOW, 0.0)


async def test_a_node_announces_itself_drains_leaves_and_a_stranger_is_not_heard() -> None:
    port, state, pool = free_ports(1)[0], NodeState.OK, Pool([], [], random.Random(1))

    def facts() -> Heartbeat:
        return beat(0.0, state=state)

    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        async with hearing(pool, "127.0.0.1", port, KEY):
            stranger.connect(f"tcp://127.0.0.1:{port}")
            stranger.send(sealed(beat(time.time(), "http://evil"), "guessed"))
            stranger.send(b"x" * 100)
            announcer = Announcer([f"tcp://127.0.0.1:{port}"], KEY, facts, every_s=0.05)
            task = asyncio.create_task(announcer.run())
            await until(lambda: pool.find("http://p") is not None)
            node = pool.find("http://p")
            assert node is not None
            await until(lambda: node.load.running == 2)
            state = NodeState.DRAINING
            announcer.changed()
            await until(lambda: node.reason == "it is draining")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: pool.nodes == [])


async def test_a_router_that_hears_nodes_serves_with_them() -> None:
    p, d, port = prefill(), decode(), free_ports(1)[0]
    async with p.running(), d.running(), cluster(heartbeat_port=port, ready=False) as c:
        tasks = []
        for node in (p, d):
            facts = Heartbeat(node.url, Role(node.role), "", node.generation, Load(), 0.0)
            announcer = Announcer([f"tcp://127.0.0.1:{port}"], "", lambda facts=facts: facts, every_s=0.05)  # type: ignore[misc]
            tasks.append(asyncio.create_task(announcer.run()))
        await until(lambda: len(c.router.pool.nodes) == 2 and all(node.up for node in c.router.pool.nodes))
        await c.text()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not c.router.pool.nodes)


def test_heartbeats_from_elsewhere_need_a_key() -> None:
    with pytest.raises(ConfigError, match="node_api_key"):
        RouterConfig(host="0.0.0.0", heartbeat_port=9)
    RouterConfig(host="0.0.0.0", heartbeat_port=9, node_api_key="k")
    engine = EngineConfig("m")
    with pytest.raises(ConfigError, match="node_api_key"):
        NodeConfig(engine, Role.PREFILL, router=("tcp://10.0.0.1:9",))
    NodeConfig(engine, Role.PREFILL, router=("tcp://10.0.0.1:9", "tcp://[::1]:9"), api_key="k")
    for wrong in ("http://h:9", "tcp://h", "tcp://:9", "tcp://h:x"):
        with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
            NodeConfig(engine, Role.PREFILL, router=(wrong,), api_key="k")


def test_a_node_that_listens_everywhere_is_reached_where_its_kv_is() -> None:
    transfer = TransferConfig(kv_host="10.0.0.7", cluster_secret="s" * 16)
    assert NodeConfig(EngineConfig("m"), transfer=transfer, host="0.0.0.0", port=81).url == "http://10.0.0.7:81"
    assert NodeConfig(EngineConfig("m"), host="::1", port=81).url == "http://[::1]:81"
