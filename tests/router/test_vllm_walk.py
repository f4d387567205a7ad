"""The walk over doubles of vLLM nodes: versions, both legs, what breaks, and the client going away."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from aiohttp import web

from kvrelay.router.nodes.node import NodeKind
from tests.router.router_doubles import MODEL, STREAMS, Cluster, cluster, decode, prefill, until
from tests.router.vllm_doubles import (
    ASKED,
    DONE,
    Call,
    Store,
    VllmNode,
    cut,
    deltas,
    error,
    given,
    hang,
    middle,
    ok,
    old,
    pair,
    refuse,
)


async def said(
    started: Cluster, body: dict[str, Any] | None = None, path: str = "/v1/chat/completions"
) -> str:
    """The text of an answer that must be 200, streamed or whole."""
    text = await started.text(body, path=path)
    if (body or {}).get("stream"):
        assert text.endswith(DONE)
        return deltas(text) if "chat" in path else text
    answer = json.loads(text)
    assert not answer.get("kv_transfer_params")
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "chat" in path else choice["text"])


def cut_after(*pieces: str) -> Any:
    """A decode leg that tells of some and breaks."""

    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream(*(call.event(piece) for piece in pieces))
        await asyncio.sleep(0.02)
        call.cut()
        return response

    return script


@STREAMS
@pytest.mark.parametrize("gives", [old, middle, given])
async def test_a_request_walks_through_both_legs_of_every_version(gives: Any, stream: bool) -> None:
    p, d = pair(gives=gives)
    async with cluster(p, d, node_api_key="nodes") as c:
        body = {
            "stream": stream,
            "max_tokens": 9,
            "max_completion_tokens": 9,
            "min_tokens": 5,
            "stop_token_ids": [7],
            "temperature": 0.5,
        }
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        text = await c.text(body, headers={"traceparent": trace})
        if stream:
            assert text == "".join(d.calls[0].events())
        else:
            assert json.loads(text)["choices"][0]["message"]["content"] == "abc"
        (first,), (second,) = p.calls, d.calls
        assert first.body["kv_transfer_params"] == ASKED
        assert second.body["kv_transfer_params"]["remote_engine_id"] == "engine-1"
        for call in (first, second):
            assert call.headers["traceparent"] == trace
            assert call.headers["authorization"] == "Bearer nodes"
        own = {
            k: v
            for k, v in second.body.items()
            if k not in ("kv_transfer_params", "model", "messages")
        }
        assert own == body
        node = c.node(d)
        assert (node.kind, node.model, node.max_model_len) == (NodeKind.VLLM, MODEL, 128)
        await until(lambda: c.metric("kvrelay_router_time_to_first_token_seconds_count") == 1)
        assert c.metric("kvrelay_router_disaggregated_total", model_name=MODEL) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 0},
        {"echo": True, "max_tokens": 0},
        {"use_beam_search": True},
    ],
)
async def test_what_one_hand_over_cannot_serve_is_done_by_the_decode_node_alone(
    fields: dict[str, Any],
) -> None:
    p, d = pair()
    async with cluster(p, d) as c:
        await c.text({"prompt": "hi", **fields}, path="/v1/completions")
        assert p.calls == []
        assert "kv_transfer_params" not in d.calls[0].body
        assert c.metric("kvrelay_router_local_prefills_total", reason="undivided") == 1


async def test_a_prefill_node_without_a_connector_is_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, d = pair(hands_over=False)
    async with cluster(p, d) as c:
        with caplog.at_level(logging.WARNING, "kvrelay.router"):
            assert await said(c) == "abc"
        assert c.metric("kvrelay_router_local_prefills_total", reason="no_kv") == 1
        assert "NixlConnector" in caplog.text


async def test_kv_offered_back_by_a_decode_node_is_kept_from_clients() -> None:
    async def offers(call: Call) -> web.Response:
        return web.json_response(
            call.answer(kv_transfer_params={"remote_host": "10.0.0.1", "do_remote_decode": True})
        )

    p, d = pair()
    d.script = offers
    async with cluster(p, d) as c:
        text = await c.text()
        assert "10.0.0.1" not in text
        assert json.loads(text)["choices"][0]["message"]["content"] == "abc"


async def in_band_error(call: Call) -> web.StreamResponse:
    return await call.stream(f"data: {json.dumps(error(500, 'engine broke'))}\n\n", DONE)


async def empty(call: Call) -> web.StreamResponse:
    return (
        await call.stream()
        if call.body.get("stream")
        else web.Response(content_type="application/json")
    )


async def half_an_event(call: Call) -> web.StreamResponse:
    return await call.stream('data: {"choices": [{"del')


@STREAMS
@pytest.mark.parametrize("broken", [cut, refuse(500), in_band_error, empty, half_an_event])
async def test_a_decode_leg_that_breaks_before_its_first_byte_is_computed_by_another_node(
    broken: Any, stream: bool
) -> None:
    """The store asserts that no KV is read twice; a real node would answer with another request's."""
    store = Store()

    async def fetches_and_breaks(call: Call) -> web.StreamResponse | None:
        assert store.fetch(call.body["kv_transfer_params"], call.request_id) is None
        result: web.StreamResponse | None = await broken(call)
        return result

    p, bad = VllmNode("prefill", ok, store), VllmNode("decode", fetches_and_breaks, store)
    good = VllmNode("decode", ok, store, running_requests=9)
    async with cluster(p, bad, good) as c:
        assert await said(c, {"stream": stream}) == "abc"
        assert (len(p.calls), len(bad.calls), len(good.calls)) == (1, 1, 1)
        assert "kv_transfer_params" not in good.calls[0].body
        assert c.metric("kvrelay_failovers_total", leg="decode") == 1
        assert c.metric("kvrelay_failovers_total", leg="prefill") == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_kills_every_node_that_it_reaches_reaches_two_and_is_refused_then(
    role: str,
) -> None:
    async def dies(call: Call) -> None:
        call.node.started += 10.0
        call.cut()

    store = Store()
    nodes = [
        VllmNode(each, dies if each == role else ok, store) for each in ("prefill", "decode") * 3
    ]
    async with cluster(*nodes) as c:
        for _ in range(2):
            answer = await c.asked()
            assert answer.status == 503
            assert answer.error["code"] == "poison_request"
            assert sum(len(node.calls) for node in nodes if node.role == role) == 2


async def test_kv_that_no_decode_node_has_heard_of_goes_to_another_one_as_it_is() -> None:
    store = Store()
    p, good = VllmNode("prefill", ok, store), VllmNode("decode", ok, store, running_requests=9)
    gone = VllmNode("decode", ok, store)
    async with cluster(p, gone, good, health_interval_s=30.0, ready=False) as c:
        await c.all_up()
        c.node(gone).url = "http://127.0.0.1:1"
        assert await said(c) == "abc"
        assert len(p.calls) == 1
        assert good.calls[0].body["kv_transfer_params"]["do_remote_prefill"]


@STREAMS
async def test_an_answer_without_end_and_one_that_is_no_stream_are_given_up(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def long(call: Call) -> web.StreamResponse:
        return await call.stream("data: " + "x" * 9_000)

    async def whole(call: Call) -> web.StreamResponse:
        return web.json_response({"choices": []})

    monkeypatch.setattr("kvrelay.router.transport.vllm._MAX_ANSWER_BYTES", 5_000)
    p, d = pair()
    async with cluster(p, d, attempts=1) as c:
        d.script = long
        message = (await c.asked({"stream": stream})).error["message"]
        assert f"{'more' if stream else 'longer'} than 5000 bytes" in message
        d.script = whole
        message = (await c.asked({"stream": stream})).error["message"]
        assert ("a stream with application/json" if stream else "no decode node") in message


@pytest.mark.parametrize("wrapped", [True, False])
async def test_a_refusal_is_passed_on_and_blames_nobody(wrapped: bool) -> None:
    p, d = pair()
    p.script = refuse(400, "too long", wrapped=wrapped)
    async with cluster(p, d) as c:
        answer = await c.asked({"stream": True})
        assert answer.status == 400
        assert answer.error["message"] == "too long"
        assert d.calls == []
        p.script, d.script = ok, refuse(422, "not so", wrapped=wrapped)
        assert (await c.asked()).status == 422
        assert c.node(p).up
        assert c.node(d).up
        p.script = refuse(401, "Unauthorized")
        answer = await c.asked()
        assert answer.status == 502
        assert "router's key" in answer.error["message"]


async def test_after_the_first_byte_an_answer_ends_with_an_error_that_says_why() -> None:
    store = Store()
    p, bad = VllmNode("prefill", ok, store), VllmNode("decode", cut_after("a", "b"), store)
    other = VllmNode("decode", ok, store, running_requests=9)
    async with cluster(p, bad, other) as c:
        text = await c.text({"stream": True})
        *events, last = text.removesuffix(DONE).split("\n\n")[:-1]
        assert text.endswith(DONE)
        assert deltas("\n\n".join(events)) == "ab"
        assert "cannot be continued" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert other.calls == []
        assert not c.node(bad).up or c.node(bad).since


async def test_an_error_event_in_the_middle_is_told_once() -> None:
    async def breaks(call: Call) -> web.StreamResponse:
        both = call.event("b") + f"data: {json.dumps(error(500, 'engine broke'))}\n\n" + DONE
        return await call.stream(call.event("a"), both)

    p, d = pair()
    d.script = breaks
    async with cluster(p, d) as c:
        text = await c.text({"stream": True})
        assert (text.count('"error"'), text.count("engine broke"), text.count(DONE)) == (1, 1, 1)
        assert '"b"' in text


async def test_events_are_passed_on_whole_wherever_the_network_cuts_them() -> None:
    async def slow(call: Call) -> web.StreamResponse:
        data = "".join(call.events()).encode()
        response = await call.stream()
        for at in range(0, len(data), 97):
            await response.write(data[at : at + 97])
            await asyncio.sleep(0)
        return response

    p, d = pair()
    d.script = slow
    async with cluster(p, d) as c:
        assert await said(c, {"stream": True}) == "abc"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_leg_of_a_client_that_left_is_aborted(role: str) -> None:
    p, d = pair()
    waits = p if role == "prefill" else d
    waits.script = hang
    async with cluster(p, d) as c:
        asking = asyncio.create_task(c.text({"stream": True}))
        await until(waits.called.is_set)
        asking.cancel()
        await until(waits.aborted.is_set)
        await until(lambda: not any(node.leases for node in c.router.pool.nodes))


async def test_kinds_do_not_mix_and_each_answers_its_own() -> None:
    p, d = pair()
    ours = prefill(), decode()
    async with cluster(p, d, *ours) as c:
        for _ in range(6):
            await c.text()
        assert len(p.calls) + len(ours[0].calls) == 6
        assert (len(p.calls), len(ours[0].calls)) == (len(d.calls), len(ours[1].calls))
        c.router.pool.note_unready(c.node(d), "for this test", 1e12)
        assert c.router.pool.node_kinds() == [NodeKind.KVRELAY]


async def test_nodes_of_two_kinds_are_no_cluster() -> None:
    p, d = pair()
    ours = prefill()
    async with cluster(ours, d) as c:
        answer = await c.asked()
        assert answer.status == 503
        assert "kind" in answer.error["message"]
        health = await c.ask("GET", "/health")
        assert health.status == 503
        assert {node["kind"] for node in health.json["nodes"]} == {"kvrelay", "vllm"}
        assert ours.calls == d.calls == []
    alone = decode()
    async with cluster(p, alone) as c:
        assert (await c.asked()).status == 200
        assert c.metric("kvrelay_router_local_prefills_total", reason="no_prefill_node") == 1
        assert p.calls == []


async def test_a_draining_node_and_one_that_is_no_vllm_node_are_kept_out() -> None:
    p, d = pair()
    d.health_status = 503
    async with cluster(p, d, ready=False) as c:
        await until(lambda: c.node(p).up and "503" in c.node(d).reason)

        async def not_there(request: web.Request) -> web.Response:
            return web.Response(status=404)

        stranger = VllmNode("decode", ok, Store())
        stranger.say_version = not_there  # type: ignore[method-assign]
    async with cluster(p, stranger, ready=False) as c:
        await until(lambda: "neither" in c.node(stranger).reason)
