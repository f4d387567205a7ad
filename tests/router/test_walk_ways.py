"""The walk over fake nodes: which way a request goes, where it waits, and what each end of a leg means.

How a leg may end, and where that is tested:

| end | what follows | test |
|---|---|---|
| 4xx | to the client, nobody is blamed | test_router_walk: a_4xx_of_a_node |
| 429 | the node rests, another takes the leg, from the same ticket | here: full |
| 401, 403 | 502: the operator's mistake | test_router_walk: refuses_the_routers_key |
| kv_not_loaded | to the client; the pair is avoided | test_kv_not_loaded, here: pair |
| 5xx, ERROR frame, no frames | another node; the breaker | test_router_walk, here: breaker |
| 503 with Retry-After | another node; it rests | here: rests |
| cut, refused, lost | another node at once, down until a health check | test_router_walk, here: lost |
| silence, health checks answered | another node, within the retry budget | here: silent |
| other tokens than the client has | begun again | test_router_walk: another_first_token |
| client gone, deadline | both legs end, KV given back | test_router_walk |
"""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import pytest
from router_doubles import (
    DONE,
    KV,
    NO_PROMPTS,
    WHOLE,
    Call,
    FakeNode,
    cluster,
    decode,
    decode_ok,
    event,
    handover,
    prefill,
    prefill_ok,
    refuse,
    until,
)

import kvrelay.router.nodes.health
import kvrelay.router.request.retries
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KvNotLoaded
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import SPILL_REFUSED, KvFacts, KvTransferParams

STREAMED = (event("a") + event("b") + event("c") + event("", "stop") + DONE).decode()


async def all_of_it(call: Call) -> None:
    """A decode node that computes the prompt, too."""
    await call.tokens(11, "a", 1)
    await decode_ok(call)


async def whichever(call: Call) -> None:
    """A decode node's answer to a leg with KV, or without."""
    await (decode_ok if call.params.get("remote_engine_id") else all_of_it)(call)


async def hold(call: Call) -> None:
    await asyncio.sleep(30)


def params_of(call: Call) -> KvTransferParams:
    """What a leg was told, but for what its node is to announce of it."""
    params = msgspec.convert(call.params, KvTransferParams)
    return msgspec.structs.replace(params, tpot_ms=0.0, expected_output=0, spill=False)


def other_kind(**changes: object) -> KvFacts:
    return msgspec.structs.replace(
        KV, fingerprint=msgspec.structs.replace(KV.fingerprint, kv_dtype="bfloat16"), **changes
    )


# --- one decode node alone
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_prefill_node_a_decode_node_answers_alone(stream: bool) -> None:
    p, d = prefill(health_status=503), decode(all_of_it, kv=KV)
    async with cluster(p, d, ready=False) as c:
        await until(lambda: c.node(d).up)
        assert await c.text({"stream": stream, "max_tokens": 9}) == (
            STREAMED if stream else WHOLE.decode()
        )
        (call,) = d.calls
        assert call.body["messages"] == [{"role": "user", "content": "hi"}]
        assert call.body["max_tokens"] == 9
        params = params_of(call)
        assert (params.do_remote_prefill, params.remote_engine_id, params.generated) == (
            True,
            None,
            [],
        )
        assert (params.client_max_tokens, params.seed) == (9, call.body["seed"])
        assert c.metric("kvrelay_router_local_prefills_total", reason="no_prefill_node") == 1
        assert c.metric("kvrelay_router_disaggregated_total") == 0
        assert p.calls == []


async def test_the_usual_way_is_counted_too() -> None:
    async with cluster(prefill(), decode()) as c:
        await c.text()
        assert c.metric("kvrelay_router_disaggregated_total") == 1


async def test_a_decode_node_whose_operator_wants_no_prompts_on_it_gets_none() -> None:
    p, d = prefill(health_status=503), decode(all_of_it, kv=NO_PROMPTS)
    async with cluster(p, d, ready=False) as c:
        await until(lambda: c.node(d).up)
        async with c.post() as answer:
            assert answer.status == 503
            assert "no prefill node is up" in (await answer.json())["error"]["message"]
        assert d.calls == []


async def test_when_the_only_prefill_node_is_lost_before_the_first_byte_a_decode_node_answers_alone() -> (
    None
):
    async def die(call: Call) -> None:
        call.cut()

    p, d = prefill(die), decode(all_of_it, kv=KV)
    async with cluster(p, d, health_interval_s=5) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert not c.node(p).up
        assert c.metric("kvrelay_router_local_prefills_total", reason="no_prefill_node") == 1


async def test_an_answer_of_one_node_that_dies_midway_goes_on_on_another() -> None:
    async def half(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await call.tokens(12, "b", 2)
        call.cut()

    async def rest(call: Call) -> None:
        await call.tokens(13, "c", 3)
        await call.end()

    first, second = decode(half, kv=KV), decode(rest, kv=KV, load=Load(running=5))
    async with cluster(prefill(health_status=503), first, second, ready=False) as c:
        await until(lambda: c.node(first).up and c.node(second).up)
        assert await c.text({"stream": True}) == STREAMED
        assert params_of(second.calls[0]).generated == [11, 12]
        assert second.calls[0].body["messages"] == [{"role": "user", "content": "hi"}]


async def test_the_stages_of_an_answer_of_one_node_have_no_hand_over() -> None:
    async def timed(call: Call) -> None:
        await call.tokens(11, "a", 1)
        timing = {"queue": 1.0, "prefill": 3.0, "decode": 2.0}
        await call.send(Frame(FrameKind.END, WHOLE, timing=timing))

    async with cluster(prefill(health_status=503), decode(timed, kv=KV), ready=False) as c:
        await until(lambda: any(node.up for node in c.router.pool.nodes))
        stages = json.loads(await c.text({"include_metrics": True}))["kvrelay"]
        assert set(stages) == {"queue_ms", "prefill_ms", "decode_ms", "total_ms"}
        assert (stages["prefill_ms"], stages["decode_ms"]) == (3.0, 2.0)
        assert 1.0 <= stages["queue_ms"] <= stages["total_ms"] + 1.0


COSTS = StepCosts(5.0, 0.01, 0.0, 0.0, 0.02, 0.0)
IDLE = Load(legs=1, spill_ms=250.0)
BUSY = Load(waiting=9, waiting_tokens=20_000, legs=1, backlog_ms=400.0)


async def priced(p: FakeNode, d: FakeNode, **config: object) -> tuple[int, int, float]:
    """One request to nodes that have said what they cost: the legs of both, and the prompts that
    have spilled.
    """
    async with cluster(p, d, **{"strict_roles": False} | config) as c:
        for node in (p, d):
            c.node(node).state.set_costs(COSTS, 50.0)
        assert await c.text({"stream": True}) == STREAMED
        return (
            len(p.calls),
            len(d.calls),
            c.metric("kvrelay_router_local_prefills_total", reason="price"),
        )


async def test_an_idle_cluster_keeps_its_roles_and_a_busy_prefill_node_is_relieved() -> None:
    assert await priced(prefill(kv=KV, load=IDLE), decode(whichever, kv=KV, load=IDLE)) == (1, 1, 0)
    assert await priced(prefill(kv=KV, load=BUSY), decode(whichever, kv=KV, load=IDLE)) == (0, 1, 1)


@pytest.mark.parametrize("why", ["strict", "policy", "not wanted", "no time"])
async def test_no_prompt_spills_where_it_is_not_wanted(why: str) -> None:
    kv, load = NO_PROMPTS if why == "not wanted" else KV, Load(legs=1) if why == "no time" else IDLE
    config = {"strict": {"strict_roles": True}, "policy": {"decode_policy": "round_robin"}}.get(
        why, {}
    )
    assert await priced(
        prefill(kv=KV, load=BUSY), decode(whichever, kv=kv, load=load), **config
    ) == (1, 1, 0)


async def test_a_prompt_that_its_decode_node_refuses_goes_the_other_way() -> None:
    async def full_of_prompts(call: Call) -> object:
        if call.params.get("spill"):
            return await refuse(429, "no", code=SPILL_REFUSED)(call)
        return await whichever(call)

    p, d = prefill(kv=KV, load=BUSY), decode(full_of_prompts, kv=KV, load=IDLE)  # type: ignore[arg-type]
    assert await priced(p, d) == (1, 2, 1)
    assert [bool(call.params.get("spill")) for call in d.calls] == [True, False]


# --- pairs
# -------------------------------------------------------------------------------------------------------


async def test_a_decode_node_that_cannot_take_the_kv_is_not_chosen_while_another_can() -> None:
    p, other, fits = (
        prefill(kv=KV),
        decode(whichever, kv=other_kind()),
        decode(whichever, kv=KV, load=Load(running=9)),
    )
    async with cluster(p, other, fits) as c:
        for _ in range(4):
            assert await c.text({"stream": True}) == STREAMED
        assert (len(other.calls), len(fits.calls)) == (0, 4)


async def test_where_no_pair_can_talk_a_decode_node_answers_alone() -> None:
    p, d = prefill(kv=KV), decode(whichever, kv=other_kind())
    async with cluster(p, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert p.calls == []
        assert c.metric("kvrelay_router_local_prefills_total", reason="incompatible") == 1


async def test_where_no_pair_can_talk_and_no_prompts_are_wanted_the_error_names_both_values() -> (
    None
):
    p, d = prefill(kv=KV), decode(kv=other_kind(computes_prompts=False))
    async with cluster(p, d) as c, c.post() as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (502, "kv_not_loaded")
        assert (
            "kv_dtype is 'float32' on the prefill node and 'bfloat16' on the decode node"
            in error["message"]
        )
        assert p.calls == d.calls == []


async def test_kv_whose_only_taker_went_away_is_computed_on_the_other_kind_and_given_back() -> None:
    async def wait_then_hand_over(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await asyncio.wait_for(gone.wait(), 5)
        await call.hand_over()

    gone = asyncio.Event()
    p, fits, other = (
        prefill(wait_then_hand_over, kv=KV),
        decode(kv=KV),
        decode(decode_ok, kv=other_kind()),
    )
    async with cluster(p, fits, other) as c:
        answer = asyncio.create_task(c.text({"stream": True}))
        await p.called.wait()
        fits.health_status = 503
        await until(lambda: not c.node(fits).up)
        gone.set()
        assert await answer == STREAMED
        assert params_of(other.calls[0]).remote_engine_id is None
        assert params_of(other.calls[0]).generated == [11]
        await until(lambda: p.released == [["held-1"]])
        assert c.metric("kvrelay_router_local_prefills_total", reason="incompatible") == 1


async def test_a_pair_between_which_kv_did_not_come_is_avoided_for_a_while() -> None:
    async def computed_here(call: Call) -> None:
        payload = event("b") if call.streams else b""
        await call.send(Frame(FrameKind.TOKENS, payload, [12], 2, kv_error="PeerLost"))
        await call.tokens(13, "c", 3)
        await call.end()

    p, bad, good = (
        prefill(),
        decode(computed_here, generation="d1"),
        decode(generation="d2", load=Load(running=5)),
    )
    async with cluster(p, bad, good) as c:
        for _ in range(3):
            assert await c.text({"stream": True}) == STREAMED
        assert (len(bad.calls), len(good.calls)) == (1, 2)
        assert c.metric("kvrelay_router_kv_failures_total", cause="PeerLost") == 1
        assert c.node(bad).up
        # A prefill node that is started again is another peer.
        p.generation = "g2"
        await until(lambda: c.node(p).generation == "g2")
        await c.text()
        assert len(bad.calls) == 2


async def test_a_request_that_ended_for_want_of_its_kv_spares_the_next_one() -> None:
    why = KvNotLoaded.because("PeerLost")

    async def not_loaded(call: Call) -> None:
        await call.send(
            Frame(FrameKind.ERROR, status=why.status, error=why.body(), kv_error="PeerLost")
        )

    p, bad, good = (
        prefill(),
        decode(not_loaded, generation="d1"),
        decode(generation="d2", load=Load(running=5)),
    )
    async with cluster(p, bad, good) as c:
        async with c.post() as answer:
            assert answer.status == 502
        await c.text()
        assert (len(bad.calls), len(good.calls)) == (1, 1)


# --- room
# --------------------------------------------------------------------------------------------------------


def full(retry_after: str = "30") -> object:
    return refuse(429, "full", {"retry-after": retry_after})


async def test_a_full_decode_node_is_passed_over_from_the_same_ticket_and_rests() -> None:
    p, busy, free = prefill(), decode(full()), decode(load=Load(running=5))
    async with cluster(p, busy, free) as c:
        for _ in range(3):
            assert await c.text({"stream": True}) == STREAMED
        assert (len(p.calls), len(busy.calls), len(free.calls)) == (3, 1, 3)
        assert free.calls[0].params == busy.calls[0].params
        assert c.metric("kvrelay_router_full_nodes_total", leg="decode") == 1
        assert c.metric("kvrelay_failovers_total", leg="decode") == 0
        assert c.node(busy).up
        assert (
            c.router.node_health.breaker(c.node(busy), Role.DECODE).shown(time.monotonic()).state
            == "closed"
        )
        assert p.released == []


@pytest.mark.parametrize("status", [429, 500])
async def test_what_a_decode_node_does_not_take_goes_to_one_that_can_fetch_it_too(
    status: int,
) -> None:
    """Where decode nodes compute no prompts, and where one of them could not take the KV."""
    for other in (None, decode(load=Load(running=2), kv=other_kind())):
        p, bad = prefill(kv=KV), decode(refuse(status), kv=NO_PROMPTS)
        good = decode(load=Load(running=9), kv=NO_PROMPTS)
        nodes = [p, bad, good, *([] if other is None else [other])]
        async with cluster(*nodes) as c:
            assert await c.text({"stream": True}) == STREAMED
            assert [len(node.calls) for node in nodes] == [1, 1, 1, 0][: len(nodes)]
            assert good.calls[0].params["remote_engine_id"] is not None


async def test_full_prefill_nodes_that_are_slow_to_say_so_do_not_hold_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.router.request.run.ROOM_DEADLINE_S", 2.0)

    async def slowly(call: Call) -> object:
        await asyncio.sleep(1.1)  # longer than it rests
        return await refuse(429, "full", {"retry-after": "1"})(call)

    one, other = prefill(slowly), prefill(slowly)  # type: ignore[arg-type]
    async with cluster(one, other, decode()) as c, c.post() as answer:
        assert answer.status == 429
        assert len(one.calls) + len(other.calls) <= 5


async def test_a_full_prefill_node_is_passed_over_and_rests() -> None:
    busy, free = prefill(full()), prefill(load=Load(waiting=5, waiting_tokens=5000))
    async with cluster(busy, free, decode()) as c:
        for _ in range(3):
            await c.text()
        assert (len(busy.calls), len(free.calls)) == (1, 3)


async def test_when_all_prefill_nodes_rest_the_client_is_told_for_how_long() -> None:
    async with cluster(prefill(full("7")), decode()) as c:
        for _ in range(2):
            async with c.post() as answer:
                assert (answer.status, answer.headers["retry-after"]) == (429, "7")


async def test_a_leg_waits_until_a_node_has_rested_and_its_kv_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.router.request.run._RENEW_S", 0.05)

    async def full_once(call: Call) -> object:
        if len(d.calls) == 1:
            return await refuse(429, "full", {"retry-after": "1"})(call)
        return await decode_ok(call)

    p, d = prefill(), decode(full_once)  # type: ignore[arg-type]
    async with cluster(p, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert len(d.calls) == 2
        assert p.renewed[:2] == [["held-1"], ["held-1"]]
        assert c.metric("kvrelay_router_waiting_for_room") == 0


# --- breakers, lost nodes, silence
# ---------------------------------------------------------------------------------


async def test_a_node_that_answers_500_stays_up_until_its_breaker_opens() -> None:
    bad, good = prefill(refuse(500)), prefill(load=Load(waiting=20, waiting_tokens=5_000))
    async with cluster(bad, good, decode(), health_interval_s=0.02) as c:
        for _ in range(8):
            await c.text()
        assert (len(bad.calls), len(good.calls)) == (5, 8)
        assert c.node(bad).up
        labels = {"node": bad.url, "leg": "prefill"}
        assert c.metric("kvrelay_router_breaker_state", **labels) == 2
        async with c.http.get(f"{c.url}/health") as answer:
            body = await answer.json()
        facts = {node["url"]: node["breakers"] for node in body["nodes"]}
        assert facts[bad.url]["prefill"]["state"] == "open"
        assert facts[good.url]["prefill"]["state"] == "closed"
        bad.script = prefill_ok
        await until(lambda: c.metric("kvrelay_router_breaker_state", **labels) == 1)
        for _ in range(3):
            await c.text()
        assert c.metric("kvrelay_router_breaker_state", **labels) == 0
        assert len(bad.calls) > 5


async def test_a_breaking_decode_node_is_blamed_alone_and_only_for_its_own_leg() -> None:
    p, bad, good = prefill(), decode(refuse(500)), decode(load=Load(running=20))
    async with cluster(p, bad, good) as c:
        for _ in range(7):
            await c.text()
        assert len(bad.calls) == 5
        assert c.metric("kvrelay_router_breaker_state", node=p.url, leg="prefill") == 0
        assert c.metric("kvrelay_router_breaker_state", node=bad.url, leg="decode") == 2


async def test_a_400_never_opens_a_breaker() -> None:
    p = prefill(refuse(400))
    async with cluster(p, decode()) as c:
        for _ in range(12):
            async with c.post() as answer:
                assert answer.status == 400
        assert len(p.calls) == 12
        assert c.metric("kvrelay_router_breaker_state", node=p.url, leg="prefill") == 0


async def test_a_clusters_last_node_is_tried_one_leg_at_a_time_though_its_breaker_is_open() -> None:
    p = prefill(refuse(500))
    async with cluster(p, decode(kv=NO_PROMPTS)) as c:
        for _ in range(8):
            async with c.post() as answer:
                assert answer.status == 500
        assert len(p.calls) == 8
        p.script = hold
        slow = asyncio.create_task(c.text())
        await until(lambda: len(p.calls) == 9)
        async with c.post() as answer:
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
        slow.cancel()
        await until(lambda: c.metric("kvrelay_router_requests_running") == 0)
        p.script = prefill_ok
        await c.text()


async def test_a_node_that_says_503_rests_for_as_long_as_it_says() -> None:
    bad, good = (
        prefill(refuse(503, "loading", {"retry-after": "20"})),
        prefill(load=Load(waiting=9, waiting_tokens=5_000)),
    )
    async with cluster(bad, good, decode(), health_interval_s=0.02) as c:
        for _ in range(3):
            await c.text()
        assert (len(bad.calls), len(good.calls)) == (1, 3)


async def test_a_lost_node_is_down_at_once_and_its_legs_cost_no_retry_budget() -> None:
    async def die(call: Call) -> None:
        await asyncio.wait_for(all_there.wait(), 10)
        call.cut()

    async def come(call: Call) -> None:
        if len(dying.calls) == 14:
            all_there.set()
        await die(call)

    all_there = asyncio.Event()
    dying, other = prefill(come), prefill(load=Load(waiting=50, waiting_tokens=5_000))
    async with cluster(dying, other, decode(), health_interval_s=5) as c:
        answers = [asyncio.create_task(c.text()) for _ in range(14)]
        await asyncio.gather(*answers)
        assert len(other.calls) == 14
        assert not c.node(dying).up
        assert c.metric("kvrelay_router_retries_refused_total") == 0


async def test_retries_do_not_multiply_the_load_of_a_cluster_in_trouble() -> None:
    nodes: list[FakeNode] = [prefill(refuse(500)) for _ in range(3)]
    async with cluster(*nodes, decode(kv=NO_PROMPTS)) as c:

        async def ask() -> int:
            async with c.post() as answer:
                return int(answer.status)

        statuses = [await ask() for _ in range(40)]
        assert set(statuses) <= {500, 503}
        asked = sum(len(node.calls) for node in nodes)
        assert asked <= 40 + 10 + 0.2 * 40 + 1  # three times as many without a budget
        assert c.metric("kvrelay_router_retries_refused_total") > 0


async def test_a_leg_that_is_silent_for_too_long_is_done_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvrelay.router.nodes.health, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(kvrelay.router.request.retries, "_CHECK_SILENCE_S", 0.02)
    hung, good = prefill(hold), prefill(load=Load(waiting=9, waiting_tokens=5_000))
    async with cluster(hung, good, decode(), health_interval_s=0.05) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert (len(hung.calls), len(good.calls)) == (1, 1)
        assert c.node(hung).up  # it answers its health checks; its breaker counts
        await asyncio.wait_for(hung.aborted.wait(), 2)
        assert sum(c.router.run_context.retries._retries) == 1


async def test_a_silent_decode_leg_is_waited_for_as_long_as_the_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvrelay.router.nodes.health, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(kvrelay.router.request.retries, "_CHECK_SILENCE_S", 0.02)

    async def slow_prompt(call: Call) -> None:
        early = handover(call, generated=[], generated_logprobs=[], sent_text=None, growing=True)
        await call.send(Frame(FrameKind.TICKET, params=early))
        for _ in range(8):
            await asyncio.sleep(0.05)
            await call.send(Frame(FrameKind.TICKET, params=early))  # a sign of life
        computed.set()
        await prefill_ok(call)

    async def wait_for_it(call: Call) -> None:
        await call.send()
        await asyncio.wait_for(computed.wait(), 5)
        await all_of_it(call)

    computed = asyncio.Event()
    p, d = prefill(slow_prompt), decode(wait_for_it)
    async with cluster(p, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert (len(p.calls), len(d.calls)) == (1, 1)
