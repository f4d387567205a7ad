"""The admin routes, and nodes that drain."""

from __future__ import annotations

from typing import Any

import pytest
from router_doubles import OPERATOR, Cluster, cluster, decode, prefill, until


async def admin(
    c: Cluster, method: str, path: str, body: Any = None, headers: dict[str, str] = OPERATOR
) -> tuple[int, Any]:
    async with c.http.request(method, c.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_nodes_are_added_and_removed_while_requests_run() -> None:
    p, d, d2 = prefill(), decode(), decode()
    async with cluster(p, d) as c, d2.running():
        body = {"url": d2.url + "/", "role": "decode"}
        status, told = await admin(c, "POST", "/admin/nodes", body)
        assert (status, told["added"], told["node"]["sources"]) == (200, True, ["admin"])
        assert (await admin(c, "POST", "/admin/nodes", body))[1]["added"] is False
        await until(lambda: c.node(d2).up)
        _, told = await admin(c, "DELETE", f"/admin/nodes?url={d.url}")
        assert told == {"removed": True, "sources": []}
        assert (await admin(c, "DELETE", f"/admin/nodes?url={d.url}"))[1]["removed"] is False
        await c.text()
        assert (len(d.calls), len(d2.calls)) == (0, 1)
        _, told = await admin(c, "GET", "/admin/nodes")
        assert [(node["url"], node["up"], node["sources"]) for node in told["nodes"]] == [
            (p.url, True, ["static"]),
            (d2.url, True, ["admin"]),
        ]
        async with c.http.get(f"{c.url}/metrics") as answer:
            text = await answer.text()
        assert f'node="{d2.url}"' in text
        assert d.url not in text


@pytest.mark.parametrize("url", ["p:80", "http://", 7])
async def test_what_is_no_node_is_refused_in_the_openai_shape(url: Any) -> None:
    async with cluster() as c:
        for body in (
            {"url": url, "role": "decode"},
            {"url": "http://p", "role": "aggregated"},
            {"role": "decode"},
        ):
            status, told = await admin(c, "POST", "/admin/nodes", body)
            assert (status, told["error"]["type"]) == (400, "invalid_request_error")
        assert (await admin(c, "POST", "/admin/drain", {"url": "http://p"}))[0] == 404
        assert (await admin(c, "DELETE", "/admin/nodes"))[0] == 400


async def test_a_node_is_not_added_under_another_role() -> None:
    d = decode()
    async with cluster(prefill(), d) as c:
        status, told = await admin(c, "POST", "/admin/nodes", {"url": d.url, "role": "prefill"})
        assert (status, told["error"]["param"]) == (400, "role")


async def test_a_node_that_nobody_allowed_gets_neither_the_nodes_key_nor_a_connection() -> None:
    p, d, stranger = prefill(), decode(), decode()
    async with (
        cluster(p, d, node_api_key="nodes", node_allow=("::1", "10.0.0.0/8")) as c,
        stranger.running(),
    ):
        elsewhere = stranger.url.replace("127.0.0.1", "localhost")
        for url in (
            elsewhere,
            elsewhere.upper().replace("HTTP", "http"),
            elsewhere.replace("localhost", "127.1"),
        ):
            status, told = await admin(c, "POST", "/admin/nodes", {"url": url, "role": "decode"})
            assert (status, told["error"]["type"], told["error"]["param"]) == (
                403,
                "permission_error",
                "url",
            )
            assert "--node-allow" in told["error"]["message"]
        assert len(c.router.pool.nodes) == 2
        # One that is listed stays allowed, removed or not, and others of its host are.
        await admin(c, "DELETE", f"/admin/nodes?url={d.url}")
        for node in (d, stranger):
            assert (await admin(c, "POST", "/admin/nodes", {"url": node.url, "role": "decode"}))[
                0
            ] == 200
            await until(lambda node=node: c.node(node).up)


async def test_a_node_that_is_drained_takes_no_new_legs_and_comes_back() -> None:
    nodes = [prefill(), decode(), decode()]
    async with cluster(*nodes) as c:
        status, told = await admin(c, "POST", "/admin/drain", {"url": nodes[1].url})
        assert (status, told["node_told"], told["node"]["reason"]) == (200, True, "it is draining")
        assert nodes[1].draining
        for _ in range(4):
            await c.text()
        assert [len(node.calls) for node in nodes] == [4, 0, 4]
        await admin(c, "POST", "/admin/undrain", {"url": nodes[1].url})
        await until(lambda: c.node(nodes[1]).up)


async def test_a_node_that_is_drained_here_comes_back_when_it_is_asked_itself() -> None:
    nodes = [prefill(), decode()]
    async with cluster(*nodes) as c:
        await admin(c, "POST", "/admin/drain", {"url": nodes[1].url})
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
        _, told = await admin(c, "POST", "/admin/drain", {"url": nodes[2].url})
        assert told["node_told"] is False
        node = c.node(nodes[2])
        checked = node.load
        await until(lambda: node.load is not checked)  # a check later
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
