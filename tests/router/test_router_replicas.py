"""Several routers over the same nodes share nothing but what the nodes report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from router_doubles import (
    KV,
    STREAM,
    STREAMED,
    Call,
    Cluster,
    FakeNode,
    cluster,
    decode,
    decode_ok,
    prefill,
    refuse,
    router_over,
    until,
)

from kvrelay.node.engine_client import EngineClient
from kvrelay.wire.announced import FIRST_SPILL_MS, Announced
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.engine_messages import EngineReady, Submit, ToEngine
from kvrelay.wire.errors import Overloaded
from kvrelay.wire.outputs import Load
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.step_costs import StepCosts


@asynccontextmanager
async def routers_over(count: int, *nodes: FakeNode, **config: Any) -> AsyncIterator[list[Cluster]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(cluster(*nodes, **config))
        others = [router_over(first.router.config) for _ in range(count - 1)]
        routers = [first, *[await stack.enter_async_context(other) for other in others]]
        for each in routers:
            await each.all_up()
        yield routers


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_requests_of_one_id_do_not_meet_on_a_node_that_routers_share(count: int) -> None:
    permits = asyncio.Semaphore(0)

    async def held(call: Call) -> None:
        await permits.acquire()
        await decode_ok(call)

    p, d = prefill(), decode(held)
    async with routers_over(count, p, d) as routers:
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


COSTS = StepCosts(5.0, 0.01, 0.0, 0.0, 1.0, 0.0)
TOKENS = 40
"""And milliseconds of each prompt; routers think that it has fewer."""
BUSY = Load(waiting=9, legs=1, backlog_ms=600.0, free_blocks=999, total_blocks=999, block_size=16)


class Spills(EngineClient):
    """A decode node's own client of an engine that announces when told to."""

    def __init__(self) -> None:
        super().__init__(NodeConfig(EngineConfig("m")))
        self.info = EngineReady("e", "g", "m", 9, 99, 16, 99, 1, [], 0.0, costs=COSTS)
        self.permits = asyncio.Semaphore(0)
        self.took: list[tuple[str, int]] = []
        """Requests, and the milliseconds of their prompts that a prefill node could compute."""
        self.refused = set[str]()
        self._sums = Announced()
        self._sums.go_on(0.0, COSTS, 0, 0)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.took.append((message.request_id, message.spill_tokens))
            self._sums.prompt(message.spill_tokens, spills=message.spill_tokens > 0)

    def announce(self, now: float = 0.0) -> Load:
        """Return a load with all that has come."""
        rows = self.queue_depth()
        self._sums.go_on(now, COSTS, rows, TOKENS * rows)
        self.load = replace(
            BUSY,
            running=rows,
            waiting=0,
            free_blocks=999 - 4 * rows,
            legs=self.submitted,
            pace=1.0,
            backlog_ms=float(sum(ms for name, ms in self.took if name in self._queues)),
            spill_ms=self._sums.spill_ms,
        )
        return self.load

    async def answer(self, call: Call) -> Any:
        """Answer once permitted, unless the prompt is refused."""
        spills, name = call.params.get("spill", False), call.headers["x-request-id"]
        left = TOKENS - call.params.get("cached_tokens", 0)
        submit = Submit(name, [0] * TOKENS, SamplingParams(9, seed=0), spill_tokens=spills * left)
        try:
            updates = self.start_requests([submit], 60.0)
        except Overloaded as why:
            self.refused.add(name)
            return await refuse(why.status, why.message, code=why.code)(call)
        await call.send(load=replace(self.load, leg=self.submitted))
        await self.permits.acquire()
        updates.close()
        return await decode_ok(call)


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_routers_together_spill_no_more_than_a_node_has_announced(count: int) -> None:
    engine = Spills()
    p, d = prefill(kv=KV, load=BUSY), decode(engine.answer, kv=KV, load=engine.announce())
    async with routers_over(count, p, d, strict_roles=False) as routers:
        states = [(node, each.node(node).state) for node in (p, d) for each in routers]
        for _, state in states:
            state.set_costs(COSTS, 50.0)

        def agree() -> bool:
            return all(
                (state.backlog_ms, state.kv_free, state.spill_ms)
                == (node.load.backlog_ms, 16 * node.load.free_blocks, node.load.spill_ms)
                for node, state in states
            )

        def ask(router: Cluster, number: float) -> asyncio.Task[str]:
            message = {"role": "user", "content": f"{number} {'hi ' * 25}"}
            return asyncio.create_task(router.text(STREAM | {"messages": [message]}))

        spilled_ms, each_asks = 0, 24 // count
        for now in (0.0, 200.0, 300.0):
            d.load = engine.announce(now)
            await until(agree)
            for before in (engine.took, engine.refused, p.calls):
                before.clear()
            asked = [ask(each, now + at) for at in range(each_asks) for each in routers]
            await until(lambda: engine.queue_depth() == each_asks * count)
            took = dict(engine.took)
            handed_over = [call.headers["x-request-id"] for call in p.calls]
            assert len(took) == len(engine.took) == len(asked)
            assert 0 < sum(took.values()) <= d.load.spill_ms
            spilled_ms += sum(took.values())
            assert spilled_ms <= FIRST_SPILL_MS + now
            assert sorted(handed_over) == sorted(name for name, ms in took.items() if not ms)
            assert set() < engine.refused <= set(handed_over)
            d.load = engine.announce(now)
            await until(agree)
            for _ in asked:
                engine.permits.release()
            assert await asyncio.gather(*asked) == [STREAMED] * len(asked)
