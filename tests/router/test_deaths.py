"""A request on which nodes die, over fake nodes: how far it comes, and what that costs the others."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from router_doubles import (
    STREAMED,
    Call,
    Cluster,
    FakeNode,
    cluster,
    decode,
    event,
    hold,
    prefill,
    prefill_ok,
    until,
)

from kvrelay.router.request import failures as poison_module
from kvrelay.router.request.failures import _VERDICT_S, MAX_LOST, REFUSED_S, Poison, fingerprint_of
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import RouterConfig
from kvrelay.wire.transfer import KvTransferParams

POISON = {"messages": [{"role": "user", "content": "poison"}]}


def die(node: FakeNode, call: Call) -> None:
    """As a process that crashes and is started again."""
    node.generation = f"{node.generation}+"
    call.cut()


def fragile(node: FakeNode) -> FakeNode:
    """A node that dies of poison, before it answers anything."""
    well = node.script

    async def script(call: Call) -> Any:
        if "poison" in str(call.body):
            die(node, call)
            return None
        return await well(call)

    node.script = script
    return node


async def asked(c: Cluster, body: Any = None) -> tuple[int, Any, Any]:
    answer = await c.asked(body)
    return answer.status, answer.json, answer.headers


def refused(c: Cluster) -> float:
    return c.metric("kvrelay_router_poison_requests_total", outcome="refused")


def calls(*nodes: FakeNode) -> int:
    return sum(len(node.calls) for node in nodes)


async def test_what_kills_every_node_that_it_reaches_reaches_two_and_is_refused_for_a_while() -> (
    None
):
    nodes = [fragile(prefill()) for _ in range(3)] + [fragile(decode()) for _ in range(3)]
    async with cluster(*nodes) as c:
        status, body, headers = await asked(c, POISON)
        assert (status, body["error"]["code"]) == (503, "poison_request")
        assert "2 nodes were lost while they had this request" in body["error"]["message"]
        assert (headers["x-should-retry"], int(headers["retry-after"]) > 0) == ("false", True)
        assert calls(*nodes) == 2
        status, body, headers = await asked(c, POISON)
        assert (status, body["error"]["code"]) == (503, "poison_request")
        assert "2 nodes died while they had this request" in body["error"]["message"]
        assert REFUSED_S / 2 < int(headers["retry-after"]) <= REFUSED_S
        assert (calls(*nodes), refused(c)) == (2, 1)
        assert (await asked(c))[0] == 200  # another body of the same key
        at = calls(*nodes)
        assert not c.router.shared.poison.suspects(time.monotonic() + REFUSED_S)
        await c.all_up()
        assert (await asked(c, POISON))[0] == 503
        assert (calls(*nodes), refused(c)) == (at + 2, 1)


async def test_a_client_that_sends_it_again_gets_one_more_node_not_two() -> None:
    first, others = fragile(prefill()), [prefill(hold), prefill(hold)]
    async with cluster(first, *others, decode(), prefill_policy="round_robin") as c:
        asking = asyncio.create_task(c.text(POISON))
        await until(lambda: bool(first.calls) and calls(*others) == 1)
        asking.cancel()  # its client gave up
        for node in others:
            node.script = prefill_ok
            fragile(node)
        before = calls(first, *others)
        await c.all_up()
        assert (await asked(c, POISON))[1]["error"]["code"] == "poison_request"
        assert calls(first, *others) == before + 1


async def test_it_does_not_go_on_in_the_other_role_nor_with_its_first_prompt_computed_there() -> (
    None
):
    """The decode leg that has begun with the ticket computes the prompt when the prefill node has
    died.
    """

    async def dies_behind_its_ticket(call: Call) -> None:
        ticket = KvTransferParams(
            do_remote_prefill=True,
            remote_engine_id="e",
            remote_request_id="held-1",
            num_tokens=3,
            growing=True,
        )
        await call.send(Frame(FrameKind.TICKET, params=ticket))
        await until(lambda: calls(*decodes) == 1)
        die(p, call)

    async def dies_later(call: Call) -> None:
        await until(lambda: p.generation != "g1")
        die(next(node for node in decodes if call in node.calls), call)

    p, other = prefill(dies_behind_its_ticket), prefill()
    decodes = [decode(dies_later), decode(dies_later)]
    async with cluster(p, other, *decodes, prefill_policy="round_robin") as c:
        assert (await asked(c, POISON))[1]["error"]["code"] == "poison_request"
        assert calls(p, other, *decodes) == 2


async def test_a_decode_node_that_dies_before_it_has_told_anything_counts_though_the_first_token_is_out() -> (
    None
):
    async def dies(call: Call) -> None:
        die(next(each for each in nodes if call in each.calls), call)

    nodes = [decode(dies) for _ in range(3)]
    async with cluster(prefill(), *nodes) as c:
        text = await c.text({"stream": True})
        assert text.startswith(event("a").decode())
        assert "poison_request" in text
        assert calls(*nodes) == 2


@pytest.mark.parametrize("ends", [False, True])
async def test_broken_connections_and_processes_that_were_told_to_end_count_nothing(
    ends: bool,
) -> None:
    async def breaks(call: Call) -> None:
        node = next(each for each in broken if call in each.calls)
        if not ends:
            call.cut()
            return
        node.draining = True
        await until(lambda: c.node(node).reason == "it is draining")
        node.draining = False
        die(node, call)

    broken = [prefill(breaks), prefill(breaks)]
    async with cluster(*broken, prefill(), decode(), prefill_policy="round_robin") as c:
        for _ in range(3):
            await c.all_up()
            await c.text(POISON)
        assert calls(*broken) > 2
        assert not c.router.shared.poison


async def test_those_that_were_there_too_go_on_and_are_forgotten() -> None:
    async def dies_with_all(call: Call) -> None:
        await until(lambda: calls(p) == 5)
        if "poison" in str(call.body):
            p.script, p.health_status = prefill_ok, 503
            die(p, call)
        await asyncio.sleep(30)

    p, other = prefill(dies_with_all), prefill(load=Load(waiting=9, waiting_tokens=9000))
    async with cluster(p, other, decode()) as c:
        asking = [asyncio.create_task(c.text({"stream": True, "seed": seed})) for seed in range(4)]
        await until(lambda: calls(p) == 4)
        assert await c.text({**POISON, "stream": True}) == STREAMED
        assert await asyncio.gather(*asking) == [STREAMED] * 4
        await until(lambda: not c.router.log.running)
        p.health_status = 200  # that it died is told behind the answers
        await c.all_up()
        assert not c.router.shared.poison


async def test_a_node_that_stays_silent_is_no_way_to_a_third_one_and_not_held_against_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.router.request.failures._VERDICT_S", 0.2)

    async def hang(call: Call) -> None:
        next(each for each in silent if call in each.calls).health_hangs = True
        await asyncio.sleep(30)

    silent = [prefill(hang), prefill(hang)]
    async with cluster(*silent, decode(), health_deadline_s=0.5) as c:
        assert (await asked(c, POISON))[1]["error"]["code"] == "poison_request"
        assert not c.router.shared.poison
        for node in silent:
            node.health_hangs, node.script = False, prefill_ok
        await c.all_up()
        await c.text(POISON)
        assert not c.router.shared.poison


async def test_prompts_of_one_request_are_one_request() -> None:
    nodes = [fragile(prefill()) for _ in range(8)]
    async with cluster(*nodes, decode(), prefill_policy="round_robin") as c:
        body = {"model": "tiny", "prompt": [f"poison {at}" for at in range(16)]}
        assert (await c.asked(body, path="/v1/completions")).error["code"] == "poison_request"
        assert calls(*nodes) <= 3  # two at once, and the other one that whoever was first goes to


def test_health_checks_have_told_by_then() -> None:
    assert RouterConfig().health_interval_s + RouterConfig().health_deadline_s < _VERDICT_S


A, B = fingerprint_of("key", b"a"), fingerprint_of("key", b"b")


def test_a_request_is_known_by_its_key_and_its_whole_body() -> None:
    assert fingerprint_of("key", b"a") == A
    assert len({A, B, fingerprint_of("other", b"a"), fingerprint_of("", b"keya")}) == 4


def test_so_many_are_known_and_the_one_with_the_oldest_death_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poison_module, "_MAX_SUSPECTS", 2)
    poison = Poison()
    poison.died(A, "p1", 0.0)
    poison.died(B, "p1", 0.0)
    poison.died(A, "p2", 1.0)
    poison.died(fingerprint_of("key", b"c"), "p1", 2.0)
    assert not poison.known(B, 2.0)[0]
    assert len(poison.known(A, 2.0)[0]) == MAX_LOST
    poison.spared(A)  # one of its copies may be answered
    assert len(poison.known(A, 2.0)[0]) == MAX_LOST
