"""Several routers over the same nodes share nothing but what the nodes report."""

from __future__ import annotations

import asyncio

from router_doubles import Call, cluster, decode, decode_ok, prefill, router_over, until

from kvrelay.wire.outputs import Load


async def test_two_routers_with_the_same_request_id_do_not_meet_on_a_node() -> None:
    permits = asyncio.Semaphore(0)

    async def held(call: Call) -> None:
        await permits.acquire()
        await decode_ok(call)

    p, d = prefill(), decode(held)
    async with cluster(p, d) as one, router_over(one.router.config) as two:
        await until(lambda: all(node.up for node in two.router.pool.nodes))
        asked = [
            asyncio.create_task(each.text(headers={"x-request-id": "mine"})) for each in (one, two)
        ]
        await until(lambda: len(d.calls) == 2)
        ids = [call.headers["x-request-id"] for call in d.calls]
        assert len(set(ids)) == 2
        assert all(each.startswith("mine.") for each in ids)
        assert {call.headers["x-request-id"] for call in p.calls} == set(ids)
        # Each sees the other's legs in what the node reports, and its own at once.
        d.load = Load(running=2)
        await until(lambda: one.node(d).state.rows == two.node(d).state.rows == 2)
        permits.release()
        permits.release()
        await asyncio.gather(*asked)
