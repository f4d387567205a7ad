"""vLLM nodes that name themselves by ping, and requests whose id tells both where the other one is."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.membership.vllm_pings import EXPIRY_S, PingBook, hearing_pings
from kvrelay.router.nodes.node import NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import RequestError
from kvrelay.wire.router_config import RouterConfig
from tests.router.router_doubles import MODEL, Cluster, cluster, until
from tests.router.vllm_doubles import Store, VllmNode, cut, deltas, ok

anybody = RouterConfig().may_be_node
"""Nodes want no key."""


def ping(kind: str = "P", http: str = "10.0.0.1:8100", at: str = "10.0.0.1:21001") -> bytes:
    """As P2pNcclEngine packs it."""
    return msgspec.msgpack.encode({"type": kind, "http_address": http, "zmq_address": at})


def test_who_pings_is_a_member_until_it_has_been_silent_for_three_pings() -> None:
    book = PingBook(anybody)
    book.take(ping(), 0.0)
    book.take(ping("D", "10.0.0.2:8200", "10.0.0.2:22001"), 0.0)
    book.take(ping(), 3.0)
    (p, p_at), (d, d_at) = book.members(EXPIRY_S)
    assert (p.url, p.role, p_at) == ("http://10.0.0.1:8100", Role.PREFILL, "10.0.0.1:21001")
    assert (d.url, d.role, d_at) == ("http://10.0.0.2:8200", Role.DECODE, "10.0.0.2:22001")
    assert [spec.url for spec, _ in book.members(EXPIRY_S + 0.1)] == ["http://10.0.0.1:8100"]
    book.take(ping(at="10.0.0.1:21009"), EXPIRY_S)
    assert [at for _, at in book.members(EXPIRY_S)] == ["10.0.0.1:21009"]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x",
        ping("X"),
        ping(at="10.0.0.1"),
        ping(at="a:1___decode_addr_evil:9"),
        ping(at="a b:1"),
        ping(http="u:p@h:1"),
        msgspec.msgpack.encode({"type": "P"}),
        b"\x82\xa4type\xa1P\xa1x" + b"\x91" * 4000 + b"\xc0",
    ],
)
def test_what_is_no_ping_is_refused(message: bytes) -> None:
    book = PingBook(anybody)
    with pytest.raises(RequestError):
        book.take(message, 0.0)
    assert book.members(0.0) == []


def test_where_nodes_want_a_key_only_hosts_that_are_allowed_can_be_named() -> None:
    config = RouterConfig(
        prefill=("http://10.0.0.9:8100",),
        decode=("http://d:1",),
        node_api_key="k",
        node_allow=("10.1.0.0/16",),
    )
    book = PingBook(config.may_be_node)
    with pytest.raises(RequestError, match="--node-allow"):
        book.take(ping(http="10.0.0.1:8100"), 0.0)
    assert book.members(0.0) == []
    for host in ("10.0.0.9:8101", "10.1.2.3:8100"):
        book.take(ping(http=host), 0.0)
    assert len(book.members(0.0)) == 2


@given(st.binary(max_size=100))
def test_any_bytes_are_a_ping_or_a_refusal(message: bytes) -> None:
    with suppress(RequestError):
        PingBook(anybody).take(message, 0.0)


@asynccontextmanager
async def pinged(*nodes: VllmNode) -> AsyncIterator[Cluster]:
    """A router that knows of these nodes by their pings alone."""
    context = zmq.asyncio.Context()
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        async with cluster(ready=False, p2p_nccl_port=port, health_deadline_s=2.0) as c:
            for node in nodes:
                pings = context.socket(zmq.DEALER)
                pings.connect(f"tcp://127.0.0.1:{port}")
                http = node.url.removeprefix("http://")
                await pings.send(b"no ping")
                await pings.send(ping("P" if node.role == "prefill" else "D", http, node.by_id))
            pool = c.router.pool
            await until(
                lambda: len(pool.nodes) == len(nodes) and all(node.up for node in pool.nodes)
            )
            yield c
    finally:
        context.destroy(0)


@pytest.mark.parametrize("host", ["::", "::1"])
async def test_pings_are_heard_at_ipv6_addresses(host: str) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 here")
    context, pool = zmq.asyncio.Context(), Pool([], [])
    try:
        async with hearing_pings(pool, host, port, anybody):
            pings = context.socket(zmq.DEALER)
            pings.setsockopt(zmq.IPV6, 1)
            pings.connect(f"tcp://[::1]:{port}")
            await pings.send(ping("P", "10.0.0.1:8100", "10.0.0.1:9100"))
            await until(lambda: [node.url for node in pool.nodes] == ["http://10.0.0.1:8100"])
    finally:
        context.destroy(0)


async def test_requests_go_to_nodes_that_have_named_themselves_with_both_addresses_in_their_id() -> (
    None
):
    store = Store()
    p, d = (
        VllmNode("prefill", ok, store, by_id="10.0.0.1:21001"),
        VllmNode("decode", ok, store, by_id="10.0.0.2:22001"),
    )
    async with p.running(), d.running(), pinged(p, d) as c:
        assert c.node(d).kind is NodeKind.VLLM_P2P_NCCL
        for fields in ({}, {"n": 2}, {"stream": True, "min_tokens": 3, "max_tokens": 5}):
            text = await c.text({"model": MODEL, **fields}, headers={"x-request-id": "a:1"})
            assert (
                deltas(text)
                if "stream" in fields
                else json.loads(text)["choices"][0]["message"]["content"]
            ) == "abc"
            first, second = p.calls[-1], d.calls[-1]
            assert first.request_id == second.request_id
            assert first.request_id.startswith(
                "___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_"
            )
        assert store.pushed == {}


async def test_kv_that_went_to_a_decode_node_that_broke_is_computed_again_for_another() -> None:
    store = Store()
    p, bad = (
        VllmNode("prefill", ok, store, by_id="p:1"),
        VllmNode("decode", cut, store, by_id="bad:1"),
    )
    good = VllmNode("decode", ok, store, by_id="good:1", running_requests=9)
    async with p.running(), bad.running(), good.running(), pinged(p, bad, good) as c:
        assert deltas(await c.text({"stream": True})) == "abc"
        assert len({call.request_id for call in p.calls}) == 2
        assert c.metric("kvrelay_failovers_total", leg="decode") == 1
