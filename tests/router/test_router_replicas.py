"""Several routers over the same nodes share nothing but what the nodes report."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from router_doubles import Call, cluster, decode, decode_ok, prefill, router_over, until

from kvrelay.wire.outputs import Load


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_requests_of_one_id_do_not_meet_on_a_node_that_routers_share(count: int) -> None:
    permits = asyncio.Semaphore(0)

    async def held(call: Call) -> None:
        await permits.acquire()
        await decode_ok(call)

    p, d = prefill(), decode(held)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(cluster(p, d))
        others = [router_over(first.router.config) for _ in range(count - 1)]
        routers = [first, *[await stack.enter_async_context(other) for other in others]]
        for each in routers:
            await each.all_up()
        asked = [
            asyncio.create_task(each.text(headers={"x-request-id": "mine"})) for each in routers * 2
        ]
        await until(lambda: len(d.calls) == 2 * count)
        ids = {call.headers["x-request-id"] for call in d.calls}
        assert len(ids) == 2 * count
        assert all(each.startswith("mine.") for each in ids)
        assert {call.headers["x-request-id"] for call in p.calls} == ids
        # Each sees the others' requests in what the node reports, and its own at once.
        d.load = Load(running=2 * count)
        await until(lambda: all(each.node(d).state.rows == 2 * count for each in routers))
        for _ in asked:
            permits.release()
        await asyncio.gather(*asked)
