"""What is asked of a node, and the key of the nodes, goes to that node and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from kvrelay.router.nodes.node import Lease, Node, NodeKind
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.router_config import RouterConfig

CONFIG = RouterConfig(node_api_key="nodes")


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(status: int) -> None:
    asked, told = list[str](), list[str]()

    async def listens(request: web.Request) -> web.Response:
        told.append(request.path)
        return web.json_response({})

    async def moved(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/empty/health":  # as of vLLM's nodes, whose other routes are asked next
            return web.Response()
        return web.Response(status=status, headers={"location": f"{elsewhere}{request.path}"})

    async with serving(listens) as elsewhere, serving(moved) as url:
        legs = NodeClient(CONFIG)
        node = Node(url, role=Role.PREFILL)
        try:
            assert await legs.health(node) == f"its health check answers {status}"
            assert isinstance(await legs.health(Node(f"{url}/empty", role=Role.PREFILL)), str)
            assert (await legs.post(node, "/told", b"{}", 5.0))[0] == status
            with suppress(KvrelayError):
                await legs.ask(node, "/asked", b"{}")
            node.kind = NodeKind.VLLM
            with suppress(KvrelayError):
                await legs.run(Lease(node), "/whole", b"{}", {}, lambda _: None, stream=False)
        finally:
            await legs.close()
    paths = {
        "/health",
        "/empty/health",
        "/empty/version",
        "/told",
        "/asked",
    }
    assert set(asked) == paths | {"/whole"}
    assert told == []
