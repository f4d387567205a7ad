"""What is learnt of the speed of vLLM nodes, from when their bytes come alone."""

from __future__ import annotations

import asyncio
import random

import pytest
from aiohttp import web

from router.nodes.node import Lease, Node
from router.nodes.rates import NodeRates
from router.policies.cost import cost
from router.policies.policy import Ask
from router.vllm.measured import DecodeTimes, prefilled
from tests.router.router_doubles import cluster
from tests.router.vllm_doubles import Call, Store, VllmNode, ok, pair
from wire.config import Role
from wire.outputs import Load


def node(role: Role, fleet: NodeRates | None = None) -> Node:
    return Node(f"http://{role}", role=role, rates=NodeRates(fleet))


@pytest.fixture
def p() -> Node:
    return node(Role.PREFILL)


@pytest.fixture
def d() -> Node:
    return node(Role.DECODE)


def test_prompts_teach_how_long_each_length_takes_without_what_was_cached(p: Node) -> None:
    rng = random.Random(1)
    for _ in range(200):
        tokens, cached = rng.choice((200, 1_000, 4_000, 9_000)), rng.choice((0, 150))
        prefilled(Lease(p, tokens), tokens, cached, 0.030 + 0.0002 * (tokens - cached))
    for tokens in (200, 1_000, 4_000, 9_000):
        assert p.rates.prefill_ms(tokens) == pytest.approx(30 + 0.2 * tokens, rel=0.3)


def test_a_prompt_that_has_waited_for_others_is_not_taken_for_a_slow_one(p: Node) -> None:
    """A node that computes one prompt of 1,000 tokens after the other in 100 ms each, behind a queue of four, the first
    of which is half computed."""
    for _ in range(100):
        queue_ms = p.rates.queue_ms(4_000, 4)
        prefilled(Lease(p, 1_000, company=4, expected_queue_ms=queue_ms), 1_000, 0, 0.45)
    assert p.rates.prefill_ms(1_000) == pytest.approx(100, rel=0.25)
    assert p.rates.queue_ms(4_000, 4) == pytest.approx(350, rel=0.25)


def test_a_prompt_of_no_known_length_says_nothing(p: Node, d: Node) -> None:
    prefilled(Lease(p, 0), 0, 0, 1.0)
    DecodeTimes(Lease(d, 0), p, 0, 0.0).come(1, 1.0)
    assert not p.rates._prefill.measured
    assert not d.rates._transfer.measured


def streamed(
    d: Node, p: Node | None, *, first_s: float, step_s: float, tokens: int = 33, held_up: bool = False
) -> None:
    """A chat of so many tokens, its role and its usage beside them."""
    times = DecodeTimes(Lease(d, 0), p, 2_000, 5.0)
    at = 5.0 + first_s
    times.come(1, at)
    times.come(1, at)
    for each in range(1, tokens):
        if held_up and each == 2:
            times.held_up()
        times.come(1, at + each * step_s)
    times.come(1, at + (tokens - 1) * step_s)
    times.come(0, at + 9.0)
    times.streamed(others=2)


def test_streams_teach_steps_transfers_and_lengths(p: Node, d: Node) -> None:
    d.requests = 1
    for _ in range(30):
        streamed(d, p, first_s=0.060, step_s=0.020)
    assert d.rates.step_ms(1) == pytest.approx(20, rel=0.1)
    assert d.rates.transfer_ms(p.url, 2_000) == pytest.approx(40, rel=0.2)
    assert p.rates.transfer_ms("", 2_000) == pytest.approx(40, rel=0.2)
    assert d.rates.output_tokens() < 120
    assert p.rates.fleet is None
    assert d.rates.measured is False  # it has computed no prompt


def test_what_says_nothing_of_steps_or_transfers_is_not_learnt_from(p: Node, d: Node) -> None:
    streamed(d, p, first_s=0.1, step_s=1.0, held_up=True)
    streamed(d, p, first_s=0.1, step_s=1.0, tokens=3)
    assert not d.rates._step.measured
    seen = d.rates.transfer_ms(p.url, 2_000)
    d.load = Load(waiting=1)
    streamed(d, p, first_s=30.0, step_s=0.02, tokens=2)
    assert d.rates.transfer_ms(p.url, 2_000) == seen


def test_whole_answers_teach_steps_too(p: Node, d: Node) -> None:
    for _ in range(60):
        times = DecodeTimes(Lease(d, 0), p, 500, 0.0)
        times.whole(500, 100, 0.005 + 100 * 0.030)
    assert d.rates.step_ms(1) == pytest.approx(30, rel=0.1)


def slow(delay_s: float) -> object:
    async def script(call: Call) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return await ok(call)

    return script


async def test_cost_leaves_a_slow_prefill_node_of_vllm_alone() -> None:
    store = Store()
    fast, decode = pair(store)
    lame = VllmNode("prefill", slow(0.25), store)  # type: ignore[arg-type]
    async with cluster(fast, lame, decode, health_deadline_s=2.0) as c:
        for at in range(12):
            await c.text({"messages": [{"role": "user", "content": f"{at} is new"}], "stream": bool(at % 2)})
        rates = {each.url: c.node(each).rates for each in (fast, lame)}
        assert rates[lame.url].prefill_ms(3) > 3 * rates[fast.url].prefill_ms(3)
        nodes = [c.node(lame), c.node(fast)]
        chosen = [cost(Ask(Role.PREFILL, tokens=900), nodes, random.Random(at)).url for at in range(9)]
        assert set(chosen) == {fast.url}
        assert len(lame.calls) < len(fast.calls)
        assert c.node(decode).rates.output_tokens() < 200
        assert c.node(decode).rates._transfer.measured
