"""The admin routes, and nodes that drain."""

from __future__ import annotations

import pytest
from router_doubles import cluster, decode, prefill, until


async def test_what_is_no_node_is_refused_in_the_openai_shape() -> None:
    async with cluster() as c:
        for body, status in (({"url": 7}, 400), ({}, 400), ({"url": "http://p"}, 404)):
            for path in ("/admin/drain", "/admin/undrain", "/admin/nodes/role"):
                code, told = await c.operate(path, body | {"role": "decode"})
                assert (code, told["error"]["type"].endswith("_error")) == (status, True)


async def test_a_node_that_is_drained_takes_no_new_legs_and_comes_back() -> None:
    nodes = [prefill(), decode(), decode()]
    async with cluster(*nodes) as c:
        status, told = await c.operate("/admin/drain", {"url": nodes[1].url})
        assert (status, told["node_told"], told["node"]["reason"]) == (200, True, "it is draining")
        assert nodes[1].draining
        for _ in range(4):
            await c.text()
        assert [len(node.calls) for node in nodes] == [4, 0, 4]
        await c.operate("/admin/undrain", {"url": nodes[1].url})
        await until(lambda: c.node(nodes[1]).up)


async def test_a_node_that_is_drained_here_comes_back_when_it_is_asked_itself() -> None:
    nodes = [prefill(), decode()]
    async with cluster(*nodes) as c:
        await c.operate("/admin/drain", {"url": nodes[1].url})
        node = c.node(nodes[1])
        await until(lambda: node.reason != "it is draining" or not node.drain_asked)
        assert (node.up, node.reason) == (False, "it is draining")
        async with c.http.post(f"{nodes[1].url}/undrain") as answer:
            assert answer.status == 200
        await until(lambda: node.up)


async def test_a_node_that_knows_no_drain_is_drained_by_the_router_until_another_process_stands_there() -> (
    None
):
    nodes = [prefill(), decode(), decode(drain_status=404)]
    async with cluster(*nodes) as c:
        _, told = await c.operate("/admin/drain", {"url": nodes[2].url})
        assert told["node_told"] is False
        node = c.node(nodes[2])
        checked = node.state.load
        await until(lambda: node.state.load is not checked)  # a check later
        assert (node.up, node.reason) == (False, "it is draining")
        nodes[2].generation = "g2"
        await until(lambda: node.up)


async def test_a_leg_that_a_draining_node_refuses_goes_to_another_one_and_nobody_is_blamed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, p2, d = prefill(), prefill(), decode()
    async with cluster(p, p2, d, health_interval_s=30.0, prefill_policy="round_robin") as c:
        p.draining = True  # and the router does not know it yet
        for _ in range(4):
            await c.text()
        assert [len(node.calls) for node in (p, p2)] == [0, 4]
        assert c.node(p).reason == "it is draining"
    assert "broke" not in caplog.text
