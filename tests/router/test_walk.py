"""The ways of a request over fake nodes: both requests, the ticket, one node alone, and its end."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection
from typing import Any

import pytest
from msgspec import structs
from router_doubles import (
    ANSWERS,
    DONE,
    KV,
    MODEL,
    NO_PROMPTS,
    PROMPT_IDS,
    STREAM,
    STREAMED,
    STREAMS,
    WHOLE,
    Call,
    FakeNode,
    broken,
    cluster,
    cut,
    decode,
    decode_ok,
    event,
    handover,
    hold,
    other_kind,
    params_of,
    prefill,
    prefill_ok,
    refuse,
    until,
)

from kvrelay.router.background import cancel_and_wait
from kvrelay.router.request.run import RequestRun
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.kv_events import Pin
from kvrelay.wire.outputs import Finish, Load
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import SPILL_REFUSED, KvTransferParams

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


@STREAMS
async def test_a_request_walks_through_both_nodes(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    p, d = prefill(), decode()
    async with cluster(p, d, node_api_key="nodes") as c:
        headers = {"x-request-id": "my.id-1", "traceparent": TRACE, "tracestate": "a=1"}
        headers |= {"cookie": "a=1", "x-kvrelay-load": "1"}
        text = await c.text({"stream": stream, "max_tokens": 9}, headers=headers)
        assert text == ANSWERS[stream]
        (first,), (second,) = p.calls, d.calls
        for call in (first, second):
            assert call.headers["x-request-id"] == first.headers["x-request-id"]
            assert re.fullmatch(r"my\.id-1\.[0-9a-f]{8}", call.headers["x-request-id"])
            assert (call.headers["traceparent"], call.headers["tracestate"]) == (TRACE, "a=1")
            assert call.headers["authorization"] == "Bearer nodes"
            assert not {"cookie", "x-kvrelay-load"} & set(call.headers)
        assert first.params["client_max_tokens"] == 9
        assert (first.body["max_tokens"], second.body["max_tokens"]) == (1, 9)
        budget = Pin("anyone", 0.25)
        assert params_of(second) == structs.replace(handover(first), pin=budget)
        assert (second.body["messages"], second.body["seed"]) == ([], first.body["seed"])
        await until(lambda: any(line.startswith("id=my.id-1 ") for line in caplog.messages))
        (line,) = [each for each in caplog.messages if each.startswith("id=my.id-1 ")]
        wanted = ["status=200", "prompt_tokens=3", "output_tokens=3", f"model={MODEL}"]
        wanted += [f"prefill={p.url}", f"decode={d.url}", "prefill_ms=3.00"]
        assert [each for each in wanted if each not in line] == []
        assert c.metric("kvrelay_router_time_to_first_token_seconds_count") == 1
        assert c.metric("kvrelay_router_stage_seconds_sum", stage="prefill") == 0.003
        assert c.metric("kvrelay_router_disaggregated_total") == 1


@STREAMS
async def test_no_decode_node_is_asked_when_the_first_token_ends_the_request(stream: bool) -> None:
    p, d = prefill(Call.end), decode()
    async with cluster(p, d) as c:
        text = await c.text({"stream": stream})
        assert text == ((event("", "stop") + DONE) if stream else WHOLE).decode()
        assert d.calls == []


@STREAMS
@pytest.mark.parametrize("at", ["prefill", "decode", "decoding"])
async def test_a_client_that_goes_away_stops_its_node_and_frees_the_kv(
    stream: bool, at: str
) -> None:
    async def one_token_then_hold(call: Call) -> None:
        await call.tokens(12, "b", 2)
        await hold(call)

    p = prefill(hold if at == "prefill" else prefill_ok)
    d = decode(one_token_then_hold if at == "decoding" else hold)
    node: FakeNode = p if at == "prefill" else d
    async with cluster(p, d) as c:
        request = asyncio.create_task(c.text({"stream": stream}))
        await until(lambda: bool(node.calls))
        if at == "decoding":
            await until(lambda: d.calls[0].begun)
        request.cancel()
        await until(node.aborted.is_set)
        await until(lambda: c.metric("kvrelay_router_requests_running") == 0)
        path = "/v1/chat/completions"
        assert c.metric("kvrelay_router_requests_total", path=path, status="499") == 1
        assert all(not known.leases for known in c.router.pool.nodes)
        assert c.node(node).up


async def test_a_request_ends_at_its_deadline_on_all_nodes() -> None:
    p, d = prefill(), decode(hold)
    async with cluster(p, d, request_deadline_s=1.0) as c:
        answer = await c.asked()
        assert answer.status == 504
        assert answer.error["type"] == "deadline_exceeded"
        text = await c.text(STREAM)
        assert '"deadline_exceeded"' in text
        assert text.endswith("data: [DONE]\n\n")
        await until(d.aborted.is_set)


async def test_a_client_that_goes_at_its_deadline_leaves_no_place_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def as_it_goes(tasks: Collection[asyncio.Task[Any]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await cancel_and_wait(tasks)

    monkeypatch.setattr("kvrelay.router.request.run.cancel_and_wait", as_it_goes)
    async with cluster(prefill(hold), decode(), request_deadline_s=0.5) as c:
        await c.asked({"prompt": ["a", "b"], "messages": None}, path="/v1/completions")
        assert all(not known.leases for known in c.router.pool.nodes)


# --- the ticket: the decode request begins while the prompt is computed


async def send_ticket(call: Call) -> None:
    early = handover(call, generated=[], generated_logprobs=[], sent_text=None, growing=True)
    await call.send(Frame(FrameKind.TICKET, params=early))


async def test_a_decode_request_begins_with_the_ticket_and_the_first_token_comes_once() -> None:
    async def prefills(call: Call) -> None:
        assert call.params["pipelined"] is True
        await send_ticket(call)
        await until(begun.is_set)  # beside this request, not after it
        await prefill_ok(call)

    async def decodes(call: Call) -> None:
        assert params_of(call).growing
        begun.set()
        await decode_ok(call)

    begun = asyncio.Event()
    p, d = prefill(prefills), decode(decodes)
    async with cluster(p, d) as c:
        assert await c.text(STREAM) == STREAMED
        assert len(d.calls) == 1


async def test_a_decode_node_that_tells_of_another_first_token_begins_again_behind_the_clients() -> (
    None
):
    async def prefills(call: Call) -> None:
        await send_ticket(call)
        await call.tokens(11, "a", 1)
        await until(told.is_set)
        await call.hand_over()

    async def decodes(call: Call) -> None:
        if not call.params.get("generated"):
            await until(lambda: c.router.status().counts.get("output_tokens") == 1)
            await call.tokens(99, "Z", 1)
            await hold(call)
        told.set()
        await decode_ok(call)

    told = asyncio.Event()
    d = decode(decodes)
    async with cluster(prefill(prefills), d) as c:
        assert await c.text(STREAM) == STREAMED
        assert [call.params.get("generated") for call in d.calls] == [None, [11]]


async def test_a_decode_node_that_refuses_ends_the_prefill_at_once() -> None:
    async def prefills(call: Call) -> None:
        await send_ticket(call)
        await hold(call)

    p = prefill(prefills)
    async with cluster(p, decode(refuse(422))) as c, c.post(STREAM) as answer:
        assert answer.status == 422


async def test_an_end_behind_a_first_token_that_the_decode_node_has_told_is_left_to_that_node() -> (
    None
):
    async def prefills(call: Call) -> None:
        await send_ticket(call)
        await until(told.is_set)
        last = event("a") + event("", "stop") + DONE
        await call.send(Frame(FrameKind.END, last, [11], 1, finish=Finish.STOP))
        ended.set()

    async def decodes(call: Call) -> None:
        await call.tokens(11, "a", 1)
        told.set()
        await until(ended.is_set)
        await asyncio.sleep(0.2)
        await call.end()

    told, ended = asyncio.Event(), asyncio.Event()
    d = decode(decodes)
    async with cluster(prefill(prefills), d) as c:
        wanted = event("a") + event("", "stop") + DONE
        assert await c.text(STREAM) == wanted.decode()
        assert len(d.calls) == 1


async def test_a_prefill_request_that_is_refused_behind_the_end_adds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded = RequestRun._decode

    async def slowly(run: RequestRun) -> bool:
        done = await decoded(run)
        told.set()
        await asyncio.sleep(0.2)
        return done

    async def prefills(call: Call) -> None:
        await send_ticket(call)
        await until(told.is_set)
        await broken(400)(call)

    monkeypatch.setattr(RequestRun, "_decode", slowly)
    told = asyncio.Event()
    async with cluster(prefill(prefills), decode()) as c:
        assert await c.text(STREAM) == STREAMED


async def test_a_hand_over_without_kv_is_computed_by_the_decode_node() -> None:
    """Its lease was ended while the prompt was computed."""

    async def prefills(call: Call) -> None:
        await call.tokens(11, "a", 1)
        params = KvTransferParams(
            do_remote_prefill=True, prompt_token_ids=PROMPT_IDS, generated=[11], sent_text=1, seed=1
        )
        await call.send(Frame(FrameKind.HANDOVER, params=params))

    p, d = prefill(prefills), decode()
    async with cluster(p, d) as c:
        assert await c.text(STREAM) == STREAMED
        assert params_of(d.calls[0]).remote_request_id is None


# --- one decode node alone


@STREAMS
async def test_without_a_prefill_node_a_decode_node_answers_alone(stream: bool) -> None:
    p, d = prefill(health_status=503), decode(kv=KV)
    async with cluster(p, d, ready=False) as c:
        await until(lambda: c.node(d).up)
        text = await c.text({"stream": stream, "max_tokens": 9})
        assert text == ANSWERS[stream]
        (call,) = d.calls
        assert call.body["messages"] == [{"role": "user", "content": "hi"}]
        params = params_of(call)
        assert (params.do_remote_prefill, params.remote_engine_id, params.generated) == (
            True,
            None,
            [],
        )
        assert (params.client_max_tokens, call.body["max_tokens"]) == (9, 9)
        assert params.seed == call.body["seed"]
        assert c.metric("kvrelay_router_local_prefills_total", reason="no_prefill_node") == 1
        assert c.metric("kvrelay_router_disaggregated_total") == 0


async def test_when_the_only_prefill_node_is_lost_before_the_first_byte_a_decode_node_answers_alone() -> (
    None
):
    p, d = prefill(cut), decode(kv=KV)
    async with cluster(p, d, health_interval_s=60) as c:
        assert await c.text(STREAM) == STREAMED
        assert not c.node(p).up
        assert c.metric("kvrelay_router_local_prefills_total", reason="no_prefill_node") == 1


COSTS = StepCosts(5.0, 0.01, 0.0, 0.0, 0.02, 0.0)
IDLE = Load(legs=1, spill_ms=250.0)
BUSY = Load(waiting=9, waiting_tokens=20_000, legs=1, backlog_ms=400.0)


async def spilled(p: FakeNode, d: FakeNode, **config: object) -> tuple[int, int, float]:
    """Return each node's requests for one answer, and the prompts that have spilled."""
    async with cluster(p, d, **{"strict_roles": False} | config) as c:
        for node in (p, d):
            c.node(node).state.set_costs(COSTS, 50.0)
        assert await c.text(STREAM) == STREAMED
        spills = c.metric("kvrelay_router_local_prefills_total", reason="price")
        return len(p.calls), len(d.calls), spills


@pytest.mark.parametrize(
    ("load", "decodes", "config", "wanted"),
    [
        (IDLE, {"load": IDLE}, {}, (1, 1, 0)),
        (BUSY, {"load": IDLE}, {}, (0, 1, 1)),
        (BUSY, {"load": IDLE}, {"strict_roles": True}, (1, 1, 0)),
        (BUSY, {"load": IDLE}, {"decode_policy": "round_robin"}, (1, 1, 0)),
        (BUSY, {"load": IDLE, "kv": NO_PROMPTS}, {}, (1, 1, 0)),
        (BUSY, {"load": Load(legs=1)}, {}, (1, 1, 0)),
    ],
    ids=["idle", "busy", "strict", "policy", "not wanted", "no time"],
)
async def test_a_decode_node_relieves_a_busy_prefill_node_where_that_is_wanted(
    load: Load, decodes: Any, config: Any, wanted: tuple[int, int, int]
) -> None:
    p, d = prefill(kv=KV, load=load), decode(**{"kv": KV} | decodes)
    assert await spilled(p, d, **config) == wanted


async def test_a_prompt_that_its_decode_node_refuses_goes_the_other_way() -> None:
    async def full_of_prompts(call: Call) -> Any:
        if call.params.get("spill"):
            return await refuse(429, "no", code=SPILL_REFUSED)(call)
        return await decode_ok(call)

    p, d = prefill(kv=KV, load=BUSY), decode(full_of_prompts, kv=KV, load=IDLE)
    assert await spilled(p, d) == (1, 2, 1)
    assert [bool(call.params.get("spill")) for call in d.calls] == [True, False]
    assert d.calls[1].params["remote_engine_id"]


# --- pairs


async def test_where_no_pair_can_talk_a_decode_node_answers_alone_or_the_error_names_both_values() -> (
    None
):
    p = prefill(kv=KV)
    async with cluster(p, decode(kv=other_kind())) as c:
        assert await c.text(STREAM) == STREAMED
        assert c.metric("kvrelay_router_local_prefills_total", reason="incompatible") == 1
    d = decode(kv=other_kind(computes_prompts=False))
    async with cluster(p, d) as c, c.post() as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (502, "kv_not_loaded")
        both = "kv_dtype is 'float32' on the prefill node and 'bfloat16' on the decode node"
        assert both in error["message"]
    assert p.calls == d.calls == []


async def test_kv_whose_only_taker_went_away_is_computed_on_the_other_kind_and_given_back() -> None:
    async def wait_then_hand_over(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await until(gone.is_set)
        await call.hand_over()

    gone = asyncio.Event()
    p, fits, other = prefill(wait_then_hand_over, kv=KV), decode(kv=KV), decode(kv=other_kind())
    async with cluster(p, fits, other) as c:
        answer = asyncio.create_task(c.text(STREAM))
        await until(lambda: bool(p.calls))
        fits.health_status = 503
        await until(lambda: not c.node(fits).up)
        gone.set()
        assert await answer == STREAMED
        params = params_of(other.calls[0])
        assert (params.remote_engine_id, params.generated) == (None, [11])
        assert c.metric("kvrelay_router_local_prefills_total", reason="incompatible") == 1
