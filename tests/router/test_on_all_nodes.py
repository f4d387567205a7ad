"""A reset of all prefix caches: every node is asked, and what each says is the answer."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from router_doubles import cluster, decode, prefill


def answering(asked: list[str], body: Any) -> Any:
    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.path_qs} {request.headers.get('authorization')}")
        return web.Response() if body is None else web.json_response(body)

    return answer


async def test_a_reset_goes_to_all_nodes_with_the_nodes_key() -> None:
    path, asked = "/reset_prefix_cache", list[str]()
    nodes = [
        prefill(posts={path: answering(asked, {"success": True})}),
        decode(posts={path: answering(asked, None)}),
    ]
    async with cluster(*nodes, node_api_key="k") as c:
        status, told = await c.operate(f"{path}?reset_external=true")
        assert (status, told["success"]) == (200, True)
        assert [(each["url"], each["status"]) for each in told["nodes"]] == [
            (node.url, 200) for node in nodes
        ]
    assert asked == [f"{path}?reset_external=true&nodes=all Bearer k"] * 2


@pytest.mark.parametrize("said_too", [{}, {"message": None}, {"message": [1]}])
async def test_a_vllm_node_that_keeps_blocks_has_not_done_it(said_too: dict[str, Any]) -> None:
    busy = prefill(posts={"/reset_prefix_cache": answering([], {"success": False} | said_too)})
    async with cluster(
        busy, decode(posts={"/reset_prefix_cache": answering([], {"success": True})})
    ) as c:
        status, told = await c.operate("/reset_prefix_cache")
        assert status == 502
        assert "some of its blocks are in use" in told["error"]["message"]
