"""What is learnt of the speed of vLLM nodes, from when their bytes come alone."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from router.nodes.node import Node
from router.vllm.measured import DecodeTimes, prefilled
from tests.router.router_doubles import cluster
from tests.router.vllm_doubles import Call, Store, VllmNode, ok, pair
from wire.config import Role


def test_prompts_teach_what_a_token_takes_also_behind_a_queue() -> None:
    node = Node("http://p", Role.PREFILL)
    for _ in range(300):
        expected_ms = node.state.costs.step + 4_000 * node.state.costs.prompt_token
        prefilled(node, expected_ms, (20 + 4_000 * 0.05) / 1e3)
    assert node.state.costs.prompt_token == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("held_up", [False, True])
def test_a_stream_teaches_what_a_step_takes_unless_its_client_was_slow(held_up: bool) -> None:
    node = Node("http://d", Role.DECODE)
    before = node.state.costs
    for _ in range(200):
        times = DecodeTimes(node)
        for at in range(10):
            times.come(1, at * 0.03)
        times.come(0, 99.0)
        if held_up:
            times.held_up()
        times.streamed(1)
    assert node.state.costs.prompt_token == before.prompt_token
    assert node.state.costs.step == (before.step if held_up else pytest.approx(9 * 30 / 8, rel=0.01))


def test_one_outlier_moves_little() -> None:
    node = Node("http://p", Role.PREFILL)
    before = node.state.costs.prompt_token
    prefilled(node, 100.0, 1_000.0)
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
            await c.text({"messages": [{"role": "user", "content": f"{at} is new"}], "stream": bool(at % 2)})
        costs = {each.url: c.node(each).state.costs for each in (fast, lame)}
        assert costs[lame.url].prompt_token > costs[fast.url].prompt_token
        assert len(lame.calls) < len(fast.calls)
