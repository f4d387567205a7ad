"""What is learnt of the speed of vLLM nodes, from when their bytes come alone."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from kvrelay.router.client_connection import Reply
from kvrelay.router.nodes.node import Node
from kvrelay.router.request.vllm_run import learn_prefill_cost, learn_step_cost
from kvrelay.wire.config import Role
from tests.router.router_doubles import cluster
from tests.router.vllm_doubles import DONE, Call, Store, VllmNode, ok, pair


def test_prompts_teach_what_a_token_takes_also_behind_a_queue() -> None:
    node = Node("http://p", Role.PREFILL)
    for _ in range(300):
        expected_ms = node.state.costs.step + 4_000 * node.state.costs.prompt_token
        learn_prefill_cost(node, expected_ms, (20 + 4_000 * 0.05) / 1e3)
    assert node.state.costs.prompt_token == pytest.approx(0.05, rel=0.1)


def test_a_stream_teaches_what_a_step_takes() -> None:
    node = Node("http://d", Role.DECODE)
    before = node.state.costs
    for _ in range(200):
        learn_step_cost(node, 8, 0.27)
    assert node.state.costs.prompt_token == before.prompt_token
    assert node.state.costs.step == pytest.approx(9 * 30 / 8, rel=0.01)


@pytest.mark.parametrize("held_up", [False, True])
async def test_a_stream_that_its_client_held_up_teaches_nothing(
    held_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def paced(call: Call) -> web.StreamResponse:
        response = await call.stream()
        for event in [call.event("x")] * 9 + [DONE]:
            await response.write(event.encode())
            await asyncio.sleep(0.005)
        return response

    if held_up:
        monkeypatch.setattr(Reply, "room", lambda self: asyncio.sleep(0))
    p, d = pair()
    d.script = paced
    async with cluster(p, d, health_deadline_s=2.0) as c:
        before = c.node(d).state.costs.step
        await c.text({"stream": True})
        assert (c.node(d).state.costs.step == before) == held_up


def test_one_outlier_moves_little() -> None:
    node = Node("http://p", Role.PREFILL)
    before = node.state.costs.prompt_token
    learn_prefill_cost(node, 100.0, 1_000.0)
    assert node.state.costs.prompt_token < 1.2 * before


def slow(delay_s: float) -> object:
    async def script(call: Call) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return await ok(call)

    return script


async def test_a_slow_prefill_node_of_vllm_is_left_alone() -> None:
    store = Store()
    fast, decode = pair(store)
    lame = VllmNode("prefill", slow(0.25), store)  # type: ignore[arg-type]
    async with cluster(fast, lame, decode, health_deadline_s=2.0) as c:
        for at in range(24):
            await c.text(
                {"messages": [{"role": "user", "content": f"{at} is new"}], "stream": bool(at % 2)}
            )
        costs = {each.url: c.node(each).state.costs for each in (fast, lame)}
        assert costs[lame.url].prompt_token > costs[fast.url].prompt_token
        assert len(lame.calls) < len(fast.calls)
