"""vLLM's routes for operators at the router: every node is asked, and what each says is the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from router_doubles import OPERATOR, Cluster, cluster, decode, prefill


async def said(c: Cluster, method: str, path: str) -> tuple[int, dict[str, Any]]:
    async with c.http.request(method, c.url + path, headers=OPERATOR) as answer:
        return answer.status, await answer.json()


def answering(asked: list[str], body: Any, status: int = 200) -> Any:
    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.path_qs} {request.headers.get('authorization')}")
        return web.Response() if body is None else web.json_response(body, status=status)

    return answer


async def test_an_order_goes_to_all_nodes_with_the_nodes_key() -> None:
    asked: list[str] = []
    path = "/reset_prefix_cache"
    nodes = [
        prefill(posts={path: answering(asked, {"success": True})}),
        decode(posts={path: answering(asked, None)}),
    ]
    async with cluster(*nodes, node_api_key="k") as c:
        status, told = await said(c, "POST", f"{path}?reset_external=true")
        assert (status, told["success"]) == (200, True)
        assert [(each["url"], each["status"]) for each in told["nodes"]] == [
            (node.url, 200) for node in nodes
        ]
    assert asked == [f"{path}?reset_external=true Bearer k"] * 2


async def test_an_order_that_a_node_refuses_or_does_not_know_is_an_error_with_all_that_was_said() -> (
    None
):
    refusal = {"error": {"message": "not now", "type": "node_failed"}}
    p = prefill(posts={"/reset_prefix_cache": answering([], refusal, 502)})
    d = decode(posts={"/reset_prefix_cache": answering([], {"success": True})})
    async with cluster(p, d) as c:
        status, told = await said(c, "POST", "/reset_prefix_cache")
        assert status == 502
        assert (
            f"1 of 2 nodes did it: prefill node {p.url} (502): not now" in told["error"]["message"]
        )


@pytest.mark.parametrize("said_too", [{}, {"message": None}, {"message": [1]}])
async def test_a_vllm_node_that_keeps_blocks_has_not_done_it(said_too: dict[str, Any]) -> None:
    busy = prefill(posts={"/reset_prefix_cache": answering([], {"success": False} | said_too)})
    async with cluster(
        busy, decode(posts={"/reset_prefix_cache": answering([], {"success": True})})
    ) as c:
        status, told = await said(c, "POST", "/reset_prefix_cache")
        assert status == 502
        assert "some of its blocks are in use" in told["error"]["message"]


async def test_a_router_expects_nothing_of_a_cache_that_was_reset() -> None:
    """Its nodes tell no KV events: it goes by what it has sent there."""
    nodes = [prefill(), prefill()]
    for node in nodes:
        node.posts["/reset_prefix_cache"] = answering([], {"success": True})
    d = decode(posts={"/reset_prefix_cache": answering([], {"success": True})})
    async with cluster(*nodes, d, prefill_policy="prefix") as c:
        long = {"messages": [{"role": "user", "content": "once upon a time " * 400}]}
        for _ in range(4):
            await c.text(long)
        calls = [len(node.calls) for node in nodes]
        assert sorted(calls) == [0, 4]
        known = nodes[calls.index(4)]
        index = c.router.pool.prefixes
        assert known.url in index._marks
        assert (await said(c, "POST", "/reset_prefix_cache"))[0] == 200
        assert known.url not in index._marks


async def test_questions_are_asked_of_all_nodes() -> None:
    asked: list[str] = []
    answers = {"/load": {"server_load": 3}, "/server_info": {"vllm_config": "p"}}
    p = prefill(gets={path: answering(asked, body) for path, body in answers.items()})
    d = decode()
    async with cluster(p, d, api_key="secret-1", node_api_key="secret-2") as c:
        status, told = await said(c, "GET", "/load")
        assert (status, told["server_load"]) == (200, 0)
        assert told["nodes"][0] == {
            "url": p.url,
            "role": "prefill",
            "status": 200,
            "server_load": 3,
        }
        assert (told["nodes"][1]["status"], "server_load" in told["nodes"][1]) == (404, False)

        for config_format in ("text", "json"):
            status, told = await said(c, "GET", f"/server_info?config_format={config_format}")
            assert status == 200
            assert {"vllm_config", "vllm_env", "system_env", "nodes"} == told.keys()
            assert told["nodes"][0]["vllm_config"] == "p"
            assert "secret" not in json.dumps(told)
            assert p.url in json.dumps(told["vllm_config"])
            assert isinstance(told["vllm_config"], str) is (config_format == "text")
        assert (await said(c, "GET", "/server_info?config_format=yaml"))[0] == 400
    assert asked[1] == "/server_info?config_format=text Bearer secret-2"


async def test_the_load_counts_requests_that_run() -> None:
    waits = asyncio.Event()

    async def script(call: Any) -> None:
        await waits.wait()
        await call.tokens(12, "b", 2)
        await call.end()

    d = decode(script)
    async with cluster(prefill(), d) as c:
        asking = asyncio.create_task(c.text())
        await asyncio.wait_for(d.called.wait(), 5)
        assert (await said(c, "GET", "/load"))[1]["server_load"] == 1
        waits.set()
        await asking
