"""What follows when a request's node breaks, refuses, or dies, over fake nodes."""

from __future__ import annotations

import asyncio
import json
import math
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from router_doubles import (
    ANSWERS,
    DONE,
    KV,
    NO_PROMPTS,
    STREAM,
    STREAMED,
    STREAMS,
    Call,
    FakeNode,
    broken,
    cluster,
    cut,
    cut_after_token,
    decode,
    decode_ok,
    event,
    hold,
    other_kind,
    params_of,
    prefill,
    prefill_ok,
    refuse,
    until,
)

import kvrelay.router.request.run
from kvrelay.router.nodes.node import FAILURES_IN_A_ROW, Node, State
from kvrelay.router.request.failures import Attempts, RunContext
from kvrelay.router.transport.node_stream import AttemptFailed
from kvrelay.wire.config import Role
from kvrelay.wire.errors import EngineDead, ErrorBody, KvNotLoaded, NodeFailed
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load
from kvrelay.wire.router_config import RouterConfig

NOT_LOADED = KvNotLoaded.because("PeerLost")
BROKE = refuse(500, "this node failed on the request; its log says why", code="request_broke")
FULL = refuse(429, "full", {"retry-after": "30"})
LOADED = {"prefill": Load(waiting=9, waiting_tokens=5_000), "decode": Load(running=9)}
"""So that the other node is asked first."""
WELL = {"prefill": prefill_ok, "decode": decode_ok}


def nodes_of(role: str, script: Any) -> tuple[FakeNode, FakeNode, FakeNode]:
    """Nodes with this script, one of the role that is asked next, and one of the other role."""
    other = prefill() if role == "decode" else decode()
    return FakeNode(role, script), FakeNode(role, WELL[role], load=LOADED[role]), other


async def not_loaded(call: Call) -> None:
    why = NOT_LOADED
    await call.send(
        Frame(FrameKind.ERROR, status=why.status, error=why.body(), kv_error="PeerLost")
    )


@STREAMS
@pytest.mark.parametrize(
    ("role", "script", "says"),
    [
        ("prefill", refuse(500), ""),
        ("prefill", refuse(503), ""),
        ("prefill", broken(502), ""),
        ("prefill", BROKE, ""),
        ("prefill", FULL, ""),
        ("prefill", cut, ""),
        ("prefill", refuse(400, "top_p is wrong"), "top_p is wrong"),
        ("prefill", broken(400), "it broke"),
        ("prefill", refuse(401), "the router's key"),
        ("decode", refuse(500), ""),
        ("decode", refuse(503), ""),
        ("decode", broken(500), ""),
        ("decode", FULL, ""),
        ("decode", cut, ""),
        ("decode", cut_after_token, ""),
        ("decode", refuse(400, "top_p is wrong"), "top_p is wrong"),
        ("decode", broken(400), "it broke"),
        ("decode", not_loaded, NOT_LOADED.message),
    ],
)
async def test_a_request_goes_on_elsewhere_or_ends_with_the_nodes_error(
    role: str,
    script: Any,
    says: str,
    stream: bool,
) -> None:
    bad, next_one, other = nodes_of(role, script)
    async with cluster(bad, next_one, other, health_interval_s=5.0) as c:
        answer = await c.asked({"stream": stream})
        text = answer.text
        calls = 1, not says, role == "decode" or not says
        assert (len(bad.calls), len(next_one.calls), len(other.calls)) == calls
        assert c.node(bad).up == (script not in (cut, cut_after_token))
        assert c.node(next_one).up
        assert c.node(other).up
        failed_over = c.metric("kvrelay_failovers_total", leg=role)
        assert failed_over == (not says and script is not FULL)
        assert c.metric("kvrelay_router_full_nodes_total", leg=role) == (script is FULL)
        if not says:
            assert text == ANSWERS[stream]
        elif stream and role == "decode":  # behind the prefill node's first token
            begin, error, done, _ = text.split("\n\n")
            assert (begin, done) == (event("a").decode().strip(), "data: [DONE]")
            assert says in json.loads(error.removeprefix("data: "))["error"]["message"]
        else:
            assert says in json.loads(text)["error"]["message"]
            own = script not in (not_loaded,) and "router's key" not in says
            assert answer.status == (400 if own else 502)
        if role == "decode" and not says and script is not cut_after_token:
            assert next_one.calls[0].params == bad.calls[0].params  # with the same ticket


@STREAMS
async def test_a_prefill_node_that_dies_behind_its_token_is_replaced_while_nobody_has_seen_it(
    stream: bool,
) -> None:
    p, other, d = prefill(cut_after_token), prefill(load=LOADED["prefill"]), decode()
    async with cluster(p, other, d) as c:
        assert await c.text({"stream": stream}) == ANSWERS[stream]
        params = params_of(d.calls[0])
        if stream:
            assert (params.generated, params.sent_text, params.prompt_token_ids) == ([11], 1, None)
            assert d.calls[0].body["messages"] == [{"role": "user", "content": "hi"}]
        assert (len(other.calls), params.remote_request_id) == (
            (0, None) if stream else (1, "held-1")
        )


async def test_a_node_without_a_connection_is_down_and_its_address_is_not_told() -> None:
    p = prefill()
    async with cluster(p, decode(kv=NO_PROMPTS), health_interval_s=5) as c:
        c.router.node_client.forget(c.node(p))
        answer = await c.asked()
        assert answer.status == 502
        assert "127.0.0.1" not in answer.error["message"]
        assert not c.node(p).up


# --- an answer that has begun


def by_turns(first: Any) -> FakeNode:
    """A decode node whose first request breaks, and that answers the others."""

    async def script(call: Call) -> Any:
        return await (first(call, node) if len(node.calls) == 1 else decode_ok(call))

    node = decode(script)
    return node


async def dies(call: Call, node: FakeNode) -> None:
    node.health_status = 503
    await cut_after_token(call)


async def engine_dies(call: Call, node: FakeNode) -> None:
    node.health_status = 503
    await call.tokens(12, "b", 2)
    why = EngineDead("the engine process ended (killed, probably out of memory)")
    error = ErrorBody(why.message, why.type, None, why.code)
    await call.send(Frame(FrameKind.ERROR, status=why.status, error=error))


async def engine_hangs(call: Call, node: FakeNode) -> None:
    await call.tokens(12, "b", 2)
    node.engine_dead = "the engine process has said nothing for 21 s"
    await hold(call)


async def node_hangs(call: Call, node: FakeNode) -> None:
    await call.tokens(12, "b", 2)
    node.health_hangs = True
    await hold(call)


@STREAMS
@pytest.mark.parametrize("how", [dies, engine_dies, engine_hangs, node_hangs])
async def test_an_answer_that_has_begun_waits_for_a_decode_node_longer_than_for_room(
    how: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvrelay.router.request.run, "ROOM_DEADLINE_S", 0.05)
    d = by_turns(how)
    async with cluster(prefill(), d, health_deadline_s=0.5) as c:
        asked = asyncio.create_task(c.text({"stream": stream}))
        await until(lambda: c.metric("kvrelay_router_waiting_for_room") == 1)
        assert not c.node(d).leases
        assert (await c.asked()).status == 503  # whoever has nothing yet may go elsewhere
        _, late = await asyncio.wait((asked,), timeout=0.3)
        assert late
        d.health_status, d.health_hangs, d.engine_dead, d.generation = 200, False, "", "g2"
        assert await asked == ANSWERS[stream]
        assert c.metric("kvrelay_router_waiting_for_room") == 0


async def test_an_answer_that_has_begun_goes_on_at_a_node_without_room() -> None:
    full = decode(load=Load(legs=1, block_size=16, total_blocks=999, free_blocks=0, running=1))
    async with cluster(prefill(), decode(cut_after_token), full) as c:
        assert await c.text(STREAM) == STREAMED
        assert len(full.calls) == 1


async def test_a_stream_outlives_more_nodes_than_a_request_may_try_as_long_as_it_gets_on() -> None:
    letters = "abcdefghij"

    async def one_letter(call: Call) -> None:
        at = len(call.params["generated"])
        await call.tokens(11 + at, letters[at], 1 + at)
        await (call.end() if at == len(letters) - 1 else cut(call))

    d = decode(one_letter)
    async with cluster(prefill(), d, attempts=2, health_interval_s=0.02) as c:
        wanted = b"".join(map(event, letters)) + event("", "stop") + DONE
        assert await c.text(STREAM) == wanted.decode()
        # More if the router wrote to a stream that was cut before it read the letter.
        assert len(letters) - 1 <= len(d.calls) <= 2 * len(letters)


@pytest.mark.parametrize("gets_on", [False, True])
async def test_what_is_tried_in_vain_too_often_ends(gets_on: bool) -> None:
    """An attempt that told something new before it broke was not in vain."""

    async def breaks(call: Call) -> None:
        first = gets_on and len(call.params["generated"]) == 1
        await (cut_after_token if first else cut)(call)

    d = decode(breaks)
    async with cluster(prefill(), d, attempts=3, health_interval_s=0.02) as c:
        text = await c.text(STREAM)
        assert "no decode node could serve the request (3 tried)" in text
        assert len(d.calls) == 3 + gets_on


# --- room, and KV that does not come


@pytest.mark.parametrize("status", [429, 500])
@pytest.mark.parametrize("mixed", [False, True])
async def test_what_a_decode_node_does_not_take_goes_to_one_that_can_fetch_it_too(
    mixed: bool, status: int
) -> None:
    """Where decode nodes compute no prompts, and where one of them could not take the KV."""
    bad = decode(refuse(status), kv=NO_PROMPTS)
    good = decode(load=LOADED["decode"], kv=NO_PROMPTS)
    other = [decode(load=Load(running=2), kv=other_kind())] if mixed else []
    async with cluster(prefill(kv=KV), bad, good, *other) as c:
        assert await c.text(STREAM) == STREAMED
        assert [len(node.calls) for node in (bad, good, *other)] == [1, 1, 0][: 2 + mixed]
        assert good.calls[0].params["remote_engine_id"] is not None


async def test_full_prefill_nodes_that_are_slow_to_say_so_do_not_hold_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvrelay.router.request.run, "ROOM_DEADLINE_S", 2.0)

    async def slowly(call: Call) -> Any:
        await asyncio.sleep(1.1)  # longer than it rests
        return await refuse(429, "full", {"retry-after": "1"})(call)

    one, other = prefill(slowly), prefill(slowly)
    async with cluster(one, other, decode()) as c, c.post() as answer:
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert len(one.calls) + len(other.calls) <= 5


@pytest.mark.parametrize(
    ("script", "role"),
    [
        (FULL, "prefill"),
        (FULL, "decode"),
        (refuse(503, "loading", {"retry-after": "20"}), "prefill"),
    ],
)
async def test_a_node_that_names_a_time_rests_for_as_long(script: Any, role: str) -> None:
    busy, free, other = nodes_of(role, script)
    async with cluster(busy, free, other) as c:
        for _ in range(3):
            await c.text()
        assert (len(busy.calls), len(free.calls)) == (1, 3)
        free.script = busy.script
        if script is FULL and role == "prefill":
            answer = await c.asked()
            assert (answer.status, answer.headers["retry-after"]) == (429, "30")


async def test_a_request_waits_until_a_node_has_rested() -> None:
    p, d = prefill(), by_turns(lambda call, _: refuse(429, "full", {"retry-after": "1"})(call))
    async with cluster(p, d) as c:
        assert await c.text(STREAM) == STREAMED
        assert len(d.calls) == 2


@pytest.mark.parametrize("ends", [False, True])
async def test_a_pair_between_which_kv_did_not_come_is_avoided_for_a_while(ends: bool) -> None:
    async def computed_here(call: Call) -> None:
        payload = event("b") if call.streams else b""
        await call.send(Frame(FrameKind.TOKENS, payload, [12], 2, kv_error="PeerLost"))
        await call.tokens(13, "c", 3)
        await call.end()

    p, bad = prefill(), decode(not_loaded if ends else computed_here, generation="d1")
    good = decode(generation="d2", load=Load(running=5))
    async with cluster(p, bad, good) as c:
        for at in range(3):
            assert (await c.asked()).status == (502 if ends and not at else 200)
        assert (len(bad.calls), len(good.calls)) == (1, 2)
        assert c.metric("kvrelay_router_kv_failures_total", cause="PeerLost") == 1
        assert c.node(bad).up
        # A prefill node that is started again is another peer.
        p.generation, bad.script = "g2", decode_ok
        await until(lambda: c.node(p).generation == "g2")
        await c.text()
        assert len(bad.calls) == 2


async def test_an_answer_that_has_begun_does_not_wait_for_a_node_that_failed_on_it_and_is_up() -> (
    None
):
    async def breaks(call: Call, _: FakeNode) -> None:
        await call.tokens(12, "b", 2)
        await broken(500)(call)

    d = by_turns(breaks)
    async with cluster(prefill(), d) as c:
        text = await c.text(STREAM)
        assert text.startswith((event("a") + event("b")).decode())
        assert "no decode node could serve the request" in text
        assert len(d.calls) == 1


async def test_a_decode_node_that_hands_over_has_failed() -> None:
    bad, good = decode(lambda call: call.hand_over()), decode(load=Load(running=9))
    async with cluster(prefill(), bad, good) as c:
        assert await c.text(STREAM) == STREAMED
        assert (len(bad.calls), len(good.calls)) == (1, 1)


async def test_a_decode_node_is_told_what_each_choice_may_still_take() -> None:
    async def goes_on(call: Call) -> None:
        (lease,) = c.node(good).leases
        assert lease.share.context == 2 * 4 + 256 / 2  # each of them has one token
        await decode_ok(call)

    bad, good = decode(cut_after_token), decode(goes_on, load=Load(running=9))
    async with cluster(prefill(), bad, good) as c:
        await c.text({"n": 2})
        told = [node.calls[0].params["expected_output"] for node in (bad, good)]
        assert told == [128, 127]  # half of 256 but for one, and for two tokens


def test_drains_are_no_attempts_and_a_restarted_node_may_be_tried_again() -> None:
    metrics: Any = SimpleNamespace(
        failovers=SimpleNamespace(labels=lambda _: SimpleNamespace(inc=lambda: None))
    )
    nothing: Any = None
    config = RouterConfig(attempts=1)
    attempts = Attempts(RunContext(nothing, nothing, nothing, metrics, config), Role.DECODE)
    node, drains = Node("http://d", Role.DECODE), AttemptFailed("drains")
    drains.draining = True
    for _ in range(3):
        attempts.failed(node, drains)
        attempts.require_another(drains)
    assert attempts.nodes() == []
    broke = AttemptFailed("broke", 503, 7)
    attempts.failed(node, broke)
    assert attempts.nodes() == [node]
    with pytest.raises(NodeFailed, match="no decode node could serve the request") as told:
        attempts.require_another(broke)
    assert (told.value.status, told.value.retry_after_s) == (503, 7)
    node.generation = "g2"
    assert attempts.nodes() == []


# --- breakers, lost processes, the retry budget


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_that_answers_500_stays_up_until_its_breaker_opens(role: str) -> None:
    bad, good, other = nodes_of(role, refuse(500))
    good.load = msgspec.structs.replace(good.load, running=20)
    async with cluster(bad, good, other, health_interval_s=0.02) as c:

        def state(node: FakeNode) -> float:
            return c.metric("kvrelay_router_breaker_state", node=node.url)

        for _ in range(FAILURES_IN_A_ROW):
            await c.text()
        c.node(bad).breaker._open_until += 1e3
        await c.text()
        assert (len(bad.calls), len(good.calls)) == (FAILURES_IN_A_ROW, FAILURES_IN_A_ROW + 1)
        assert c.node(bad).up
        assert (state(bad), state(good), state(other)) == (2, 0, 0)
        nodes = {
            node["url"]: node["breaker"] for node in (await c.ask("GET", "/health")).json["nodes"]
        }
        assert nodes[bad.url]["state"] == "open"
        bad.script = WELL[role]
        c.node(bad).breaker._open_until = 0.0
        assert state(bad) == 1
        for _ in range(3):
            await c.text()
        assert state(bad) == 0
        assert len(bad.calls) > FAILURES_IN_A_ROW


async def test_a_clusters_last_node_is_tried_one_request_at_a_time_though_its_breaker_is_open() -> (
    None
):
    p = prefill(refuse(500))
    async with cluster(p, decode(kv=NO_PROMPTS)) as c:
        for _ in range(8):
            assert (await c.asked()).status == 500
        assert len(p.calls) == 8
        p.script = hold
        slow = asyncio.create_task(c.text())
        await until(lambda: len(p.calls) == 9)
        answer = await c.asked()
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        slow.cancel()
        await until(lambda: c.metric("kvrelay_router_requests_running") == 0)
        p.script = prefill_ok
        await c.text()


@pytest.mark.parametrize(("script", "status"), [(BROKE, 500), (refuse(400), 400)])
async def test_a_request_that_no_node_can_read_is_no_fault_of_any(script: Any, status: int) -> None:
    p, d = prefill(script), decode(script)
    async with cluster(p, d) as c:
        for _ in range(2 * FAILURES_IN_A_ROW):
            assert (await c.asked()).status == status
        assert (bool(p.calls), bool(d.calls)) == (True, status == 500)
        assert c.metric("kvrelay_router_breaker_state") == 0


async def test_a_node_that_cannot_read_what_others_can_gets_no_more() -> None:
    broken, good = prefill(BROKE), prefill()
    async with cluster(broken, good, decode()) as c:

        def is_open() -> bool:
            return c.metric("kvrelay_router_breaker_state", node=broken.url) == 2

        for at in range(10 * FAILURES_IN_A_ROW):
            assert await c.text({"stream": True, "cache_salt": f"{at}"})
            if is_open():
                break
        assert (len(broken.calls), is_open()) == (FAILURES_IN_A_ROW, True)


async def test_a_process_that_is_lost_with_many_requests_has_failed_once_and_costs_no_retries() -> (
    None
):
    async def die_together(call: Call) -> None:
        if len(dying.calls) == 14:
            all_there.set()
        await until(all_there.is_set)
        call.cut()

    all_there = asyncio.Event()
    dying, other = prefill(die_together), prefill(load=Load(waiting=50, waiting_tokens=5_000))
    async with cluster(dying, other, decode(), health_interval_s=60) as c:
        await asyncio.gather(*(c.text() for _ in range(14)))
        assert len(other.calls) == 14
        assert not c.node(dying).up
        assert c.node(dying).breaker.state(time.monotonic()) is State.CLOSED
        assert c.metric("kvrelay_router_retries_refused_total") == 0


async def test_retries_do_not_multiply_the_load_of_a_cluster_in_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.router.request.failures.WINDOW_S", math.inf)
    nodes = [prefill(refuse(500)) for _ in range(4)]
    async with cluster(*nodes, decode(kv=NO_PROMPTS), attempts=3) as c:
        assert (await c.asked()).status == 500
        assert sum(len(node.calls) for node in nodes) == 3
        for _ in range(39):
            assert (await c.asked()).status in (500, 503)
        asked = sum(len(node.calls) for node in nodes)
        assert asked <= 40 + 10 + 0.2 * 40 + 1  # three times as many without a budget
        assert c.metric("kvrelay_router_retries_refused_total") > 0
