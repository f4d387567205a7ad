"""The walk over fake nodes: both legs, fail-over, release, and the client going away."""

import asyncio
import logging
import re

import msgspec
import openai
import pytest
from router_doubles import (
    DONE,
    MODEL,
    NO_PROMPTS,
    PROMPT_IDS,
    WHOLE,
    Call,
    FakeNode,
    broken,
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

from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Finish, Load, TokenLogprobs
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import ChoiceSoFar, KvTransferParams

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
STREAMED = (event("a") + event("b") + event("c") + event("", "stop") + DONE).decode()


def params_of(call: Call) -> KvTransferParams:
    """What a leg was told, but for what its node is to announce of it."""
    params = msgspec.convert(call.params, KvTransferParams)
    return msgspec.structs.replace(params, tpot_ms=0.0, expected_output=0, spill=False)


async def hold(call: Call) -> None:
    """Never answer."""
    await asyncio.sleep(30)


async def prefill_cut_after_token(call: Call) -> None:
    await call.tokens(11, "a", 1)
    call.cut()


async def decode_cut_after_token(call: Call) -> None:
    await call.tokens(12, "b", 2)
    call.cut()


async def decode_rest(call: Call) -> None:
    """The leg that takes over from decode_cut_after_token."""
    await call.tokens(13, "c", 3)
    await call.end()


async def cut_at_once(call: Call) -> None:
    call.cut()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_walks_through_both_legs(stream: bool) -> None:
    p, d = prefill(), decode()
    async with cluster(p, d, node_api_key="nodes") as c:
        headers = {"x-request-id": "my.id-1", "traceparent": TRACE, "tracestate": "a=1"}
        text = await c.text({"stream": stream, "max_tokens": 9}, headers=headers)
        assert text == (STREAMED if stream else WHOLE.decode())
        (first,), (second,) = p.calls, d.calls
        for call in (first, second):
            assert call.headers["x-request-id"] == first.headers["x-request-id"]
            assert re.fullmatch(r"my\.id-1\.[0-9a-f]{8}", call.headers["x-request-id"])
            assert (call.headers["traceparent"], call.headers["tracestate"]) == (TRACE, "a=1")
            assert call.headers["authorization"] == "Bearer nodes"
        assert first.params["client_max_tokens"] == 9
        assert (first.body["max_tokens"], second.body["max_tokens"]) == (1, 9)
        assert params_of(second) == handover(first)
        assert (second.body["messages"], second.body["seed"]) == ([], first.body["seed"])
        assert p.released == []


async def test_the_openai_client_streams_and_asks_for_a_whole_answer() -> None:
    async with cluster(prefill(), decode(), api_key="key") as c:
        base_url = f"{c.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="key", max_retries=0) as client:
            whole = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}]
            )
            assert whole.choices[0].message.content == "abc"
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            assert (
                "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "abc"
            )
            assert [model.id async for model in client.models.list()] == ["tiny"]
            with pytest.raises(openai.NotFoundError, match="'tiny'"):
                await client.chat.completions.create(model="x", messages=[])
            with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
                await client.chat.completions.create(
                    model="tiny", messages=[], extra_body={"kv_transfer_params": {}}
                )


@pytest.mark.parametrize("stream", [True, False])
async def test_no_decode_leg_is_opened_when_the_first_token_ends_the_request(stream: bool) -> None:
    async def only_token(call: Call) -> None:
        await call.end()

    p, d = prefill(only_token), decode()
    async with cluster(p, d) as c:
        text = await c.text({"stream": stream})
        assert text == ((event("", "stop") + DONE) if stream else WHOLE).decode()
        assert d.calls == []
        assert p.released == []


async def test_concurrent_requests_spread_over_nodes_by_depth() -> None:
    async def wait_then_answer(call: Call) -> None:
        await asyncio.wait_for(go.wait(), 5)
        await prefill_ok(call)

    go = asyncio.Event()
    ps, ds = [prefill(wait_then_answer) for _ in range(2)], [decode() for _ in range(2)]
    async with cluster(*ps, *ds) as c:
        answers = [asyncio.create_task(c.text()) for _ in range(8)]
        await until(lambda: sum(len(p.calls) for p in ps) == 8)
        assert [len(p.calls) for p in ps] == [4, 4]
        go.set()
        await asyncio.gather(*answers)


async def test_a_node_that_reports_a_queue_is_avoided() -> None:
    async def loaded(call: Call) -> None:
        await call.send(load=Load(running=1))
        await prefill_ok(call)

    busy, idle, d = prefill(loaded, load=Load(waiting=9, waiting_tokens=4000)), prefill(), decode()
    async with cluster(busy, idle, d) as c:
        for _ in range(4):
            await c.text()
        assert (len(busy.calls), len(idle.calls)) == (0, 4)


@pytest.mark.parametrize("script", [refuse(500), refuse(503), broken(502), cut_at_once])
async def test_a_broken_prefill_leg_is_tried_on_another_node(script: object) -> None:
    bad, good, d = prefill(script), prefill(load=Load(waiting=5, waiting_tokens=5000)), decode()
    async with cluster(bad, good, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert (len(bad.calls), len(good.calls), len(d.calls)) == (1, 1, 1)
        assert c.metric("kvrelay_failovers_total", leg="prefill") == 1


@pytest.mark.parametrize("script", [refuse(500), refuse(503), broken(500), cut_at_once])
async def test_a_refused_decode_leg_is_bound_again_from_the_same_lease(script: object) -> None:
    p, bad, good = prefill(), decode(script), decode(load=Load(running=5))
    async with cluster(p, bad, good) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert len(p.calls) == 1
        assert good.calls[0].params == bad.calls[0].params
        assert params_of(good.calls[0]).remote_request_id == "held-1"
        assert p.released == []
        assert c.metric("kvrelay_failovers_total", leg="decode") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_leg_that_dies_midway_is_resumed_without_losing_a_token(
    stream: bool,
) -> None:
    async def dies(call: Call) -> None:
        p.load = Load(
            waiting=9, waiting_tokens=20_000
        )  # so that its prompt is better computed by the next one
        await until(lambda: c.node(p).state.backlog_ms > 1_000)
        await decode_cut_after_token(call)

    p, bad, good = (
        prefill(),
        decode(dies),
        decode(decode_rest, load=Load(5, legs=9, spill_ms=100.0)),
    )
    async with cluster(p, bad, good, strict_roles=False) as c:
        assert await c.text({"stream": stream}) == (STREAMED if stream else WHOLE.decode())
        params = params_of(good.calls[0])
        assert (params.prompt_token_ids, params.generated, params.sent_text) == (
            PROMPT_IDS,
            [11, 12],
            2,
        )
        assert (params.do_remote_prefill, params.remote_engine_id, params.remote_request_id) == (
            True,
            None,
            None,
        )
        assert good.calls[0].body["messages"] == []
        assert good.calls[0].body["seed"] == p.calls[0].body["seed"]
        assert p.released == []


async def test_a_prefill_leg_that_dies_after_its_token_was_sent_on_continues_on_a_decode_node() -> (
    None
):
    p, other, d = (
        prefill(prefill_cut_after_token),
        prefill(load=Load(waiting=5, waiting_tokens=5000)),
        decode(),
    )
    async with cluster(p, other, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert other.calls == []
        params = params_of(d.calls[0])
        assert (params.generated, params.sent_text, params.prompt_token_ids) == ([11], 1, None)
        assert d.calls[0].body["messages"] == [{"role": "user", "content": "hi"}]


async def test_a_prefill_leg_that_dies_unseen_is_done_again_elsewhere() -> None:
    p, other, d = (
        prefill(prefill_cut_after_token),
        prefill(load=Load(waiting=5, waiting_tokens=5000)),
        decode(),
    )
    async with cluster(p, other, d) as c:
        assert await c.text({"stream": False}) == WHOLE.decode()
        assert len(other.calls) == 1
        assert params_of(d.calls[0]).remote_request_id == "held-1"


async def test_three_choices_with_logprobs_go_on_elsewhere_where_the_client_has_them() -> None:
    def told(choice: int, token: int, sent: int, finish: Finish | None = None) -> Frame:
        logprobs = [TokenLogprobs(token, -token / 10)]
        return Frame(
            FrameKind.TOKENS,
            event(f"<{token}>"),
            [token],
            sent,
            choice=choice,
            logprobs=logprobs,
            finish=finish,
        )

    async def dies(call: Call) -> None:
        await call.send(told(1, 21, 4), told(0, 12, 5), told(2, 31, 4, Finish.STOP))
        call.cut()

    async def goes_on(call: Call) -> None:
        last = Frame(FrameKind.END, event("<22>") + DONE, [22], 8, choice=1, finish=Finish.STOP)
        await call.send(told(0, 13, 9, Finish.LENGTH), last)

    async def first(call: Call) -> None:
        await call.send(told(0, 11, 1))
        await call.hand_over(generated_logprobs=[TokenLogprobs(11, -1.1)])

    p, bad, good = prefill(first), decode(dies), decode(goes_on, load=Load(running=5))
    async with cluster(p, bad, good) as c:
        text = await c.text({"stream": True, "logprobs": True, "n": 3})
    assert (
        text
        == "".join(event(f"<{token}>").decode() for token in (11, 21, 12, 31, 13, 22))
        + DONE.decode()
    )
    assert params_of(good.calls[0]).answer().so_far(3) == [
        ChoiceSoFar(
            generated=[11, 12],
            logprobs=[TokenLogprobs(11, -1.1), TokenLogprobs(12, -1.2)],
            sent_text=5,
        ),
        ChoiceSoFar(generated=[21], logprobs=[TokenLogprobs(21, -2.1)], sent_text=4),
        ChoiceSoFar(
            generated=[31], logprobs=[TokenLogprobs(31, -3.1)], sent_text=4, finish=Finish.STOP
        ),
    ]


async def test_when_every_node_breaks_the_client_is_told_and_the_kv_released() -> None:
    p, d = prefill(), decode(refuse(500, "out of luck"))
    async with cluster(p, d) as c:
        async with c.post() as answer:
            assert answer.status == 500
            assert "out of luck" in (await answer.json())["error"]["message"]
        await asyncio.wait_for(p.released_event.wait(), 2)
        assert p.released == [["held-1"]]
        async with openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="-", max_retries=0) as client:
            await until(lambda: c.node(d).up)
            stream = await client.chat.completions.create(model="tiny", messages=[], stream=True)
            with pytest.raises(openai.APIError, match="out of luck"):
                async for _ in stream:
                    pass


async def test_a_leg_is_tried_on_no_more_nodes_than_configured() -> None:
    ps = [prefill(refuse(500)) for _ in range(4)]
    async with cluster(*ps, decode(), attempts=2, health_interval_s=5) as c:
        async with c.post() as answer:
            assert answer.status == 500
        assert sum(len(p.calls) for p in ps) == 2


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("by_frame", [True, False])
async def test_a_4xx_of_a_node_goes_to_the_client_and_blames_nobody(
    at: str, by_frame: bool
) -> None:
    script = broken(400) if by_frame else refuse(400, "top_p is wrong")
    p, d = (prefill(script), decode()) if at == "prefill" else (prefill(), decode(script))
    async with cluster(p, d) as c:
        async with c.post() as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
            assert error["message"] == ("it broke" if by_frame else "top_p is wrong")
            assert by_frame or (error["param"], error["type"]) == ("top_p", "some_error")
        assert c.node(p).up
        assert c.node(d).up
        assert len(p.calls) + len(d.calls) == (1 if at == "prefill" else 2)
        if at == "decode":
            await asyncio.wait_for(p.released_event.wait(), 2)


async def test_a_nodes_429_keeps_its_retry_after() -> None:
    async with (
        cluster(prefill(refuse(429, "full", {"retry-after": "7"})), decode()) as c,
        c.post() as answer,
    ):
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")


async def test_a_node_that_refuses_the_routers_key_is_not_the_clients_401() -> None:
    p = prefill(refuse(401))
    async with cluster(p, decode()) as c, c.post() as answer:
        assert answer.status == 502
        assert "router's key" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", ["prefill", "decode", "decoding"])
async def test_a_client_that_goes_away_stops_its_leg_and_frees_the_kv(
    stream: bool, at: str
) -> None:
    async def one_token_then_hold(call: Call) -> None:
        await call.tokens(12, "b", 2)
        await hold(call)

    p = prefill(hold if at == "prefill" else prefill_ok)
    d = decode(one_token_then_hold if at == "decoding" else hold)
    node: FakeNode = p if at == "prefill" else d
    async with cluster(p, d) as c:
        request = asyncio.create_task(c.text({"stream": stream}, headers={"x-request-id": "gone"}))
        await asyncio.wait_for(node.called.wait(), 2)
        if at == "decoding":
            await until(lambda: d.calls[0].begun)
        request.cancel()
        async with asyncio.timeout(1):
            await node.aborted.wait()
            if at == "decode":
                await p.released_event.wait()
        assert p.released == ([["held-1"]] if at == "decode" else [])
        await until(lambda: c.metric("kvrelay_router_requests_running") == 0)
        path = "/v1/chat/completions"
        assert c.metric("kvrelay_router_requests_total", path=path, status="499") == 1
        assert all(not known.leases for known in c.router.pool.nodes)
        assert c.node(node).up


async def test_a_leg_on_a_node_that_falls_silent_is_continued_elsewhere() -> None:
    async def token_then_silence(call: Call) -> None:
        await call.tokens(12, "b", 2)
        bad.health_hangs = True
        await hold(call)

    p, bad, good = prefill(), decode(token_then_silence), decode(decode_rest, load=Load(running=5))
    async with cluster(p, bad, good, health_deadline_s=0.1, health_interval_s=0.02) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert not c.node(bad).up


async def test_a_request_ends_at_its_deadline_on_all_nodes() -> None:
    p, d = prefill(), decode(hold)
    async with cluster(p, d, request_deadline_s=0.3) as c:
        async with c.post() as answer:
            assert answer.status == 504
            assert (await answer.json())["error"]["type"] == "deadline_exceeded"
        text = await c.text({"stream": True})
        assert '"deadline_exceeded"' in text
        assert text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(d.aborted.wait(), 1)
        await until(lambda: p.released == [["held-1"], ["held-1"]])


async def test_the_line_of_a_refused_request_tells_its_model_and_about_how_long_its_prompt_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    d = decode()
    async with cluster(prefill(), d) as c:
        c.node(d).state.set_costs(StepCosts(8.0, 0.1, 0.0, 0.0, 0.1, 0.0), 50.0)
        async with c.post(headers={"x-slo-tpot-ms": "1"}) as answer:
            assert answer.status == 429
        (line,) = [message for message in caplog.messages if "status=429" in message]
    assert f" model={MODEL} prompt_tokens=" in line


async def test_one_line_tells_of_each_finished_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    p, d = prefill(), decode(decode_ok)
    async with cluster(p, d) as c:
        await c.text(headers={"x-request-id": "line"})
        await until(lambda: any(message.startswith("id=line ") for message in caplog.messages))
        (line,) = [message for message in caplog.messages if message.startswith("id=line ")]
        for part in (
            "status=200",
            "prompt_tokens=3",
            "output_tokens=3",
            f"model={MODEL}",
            f"prefill={p.url}",
            f"decode={d.url}",
        ):
            assert part in line
        for stage in (
            "queue_ms=",
            "prefill_ms=3.00",
            "decode_ms=",
            "total_ms=",
            "client_gone=no",
        ):
            assert stage in line
        assert c.metric("kvrelay_router_time_to_first_token_seconds_count") == 1
        assert c.metric("kvrelay_router_stage_seconds_count", stage="prefill") == 1
        assert c.metric("kvrelay_router_stage_seconds_sum", stage="prefill") == 0.003


async def test_a_node_that_cannot_be_reached_is_blamed_and_its_address_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    p = prefill()
    async with cluster(p, decode(kv=NO_PROMPTS), health_interval_s=5) as c:
        node = c.node(p)
        c.router.node_client.forget(node)
        async with c.post() as answer:
            assert answer.status == 502
            message = (await answer.json())["error"]["message"]
        assert "127.0.0.1" not in message
        assert not node.up
        assert any(node.url in line for line in caplog.messages)


def ticket(call: Call) -> KvTransferParams:
    """What the prefill node says before it computes."""
    return handover(call, generated=[], generated_logprobs=[], sent_text=None, growing=True)


async def test_a_decode_leg_begins_with_the_ticket_and_the_first_token_comes_once() -> None:
    async def prefill_leg(call: Call) -> None:
        assert call.params["pipelined"] is True
        await call.send(Frame(FrameKind.TICKET, params=ticket(call)))
        await asyncio.wait_for(begun.wait(), 5)  # beside this leg, not after it
        await call.tokens(11, "a", 1)
        await call.hand_over()

    async def decode_leg(call: Call) -> None:
        assert params_of(call).growing
        begun.set()
        await call.tokens(11, "a", 1)
        await call.tokens(12, "b", 2)
        await call.tokens(13, "c", 3)
        await call.end()

    begun = asyncio.Event()
    p, d = prefill(prefill_leg), decode(decode_leg)
    async with cluster(p, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert len(d.calls) == 1
        assert p.released == []


async def test_a_decode_leg_that_tells_of_another_first_token_is_begun_again_behind_the_clients() -> (
    None
):
    async def prefill_leg(call: Call) -> None:
        await call.send(Frame(FrameKind.TICKET, params=ticket(call)))
        await call.tokens(11, "a", 1)
        seen.set()
        await asyncio.wait_for(told.wait(), 5)
        await call.hand_over()

    async def decode_leg(call: Call) -> None:
        if not params_of(call).generated:
            await asyncio.wait_for(seen.wait(), 5)
            await asyncio.sleep(0.1)
            await call.tokens(99, "Z", 1)
            told.set()
            await asyncio.sleep(5)
        told.set()
        assert params_of(call).generated == [11]
        await call.tokens(12, "b", 2)
        await call.tokens(13, "c", 3)
        await call.end()

    seen, told = asyncio.Event(), asyncio.Event()
    p, d = prefill(prefill_leg), decode(decode_leg)
    async with cluster(p, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert len(d.calls) == 2


async def test_a_decode_node_that_refuses_ends_the_prefill_at_once() -> None:
    async def prefill_leg(call: Call) -> None:
        await call.send(Frame(FrameKind.TICKET, params=ticket(call)))
        await asyncio.sleep(30)

    p, d = prefill(prefill_leg), decode(refuse(400))
    async with cluster(p, d) as c:
        async with c.post({"stream": True}) as answer:
            assert answer.status == 400
        await until(lambda: p.released == [["held-1"]])


async def test_a_hand_over_without_kv_is_computed_by_the_decode_node() -> None:
    """Its lease was ended while the prompt was computed."""

    async def prefill_leg(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await call.send(
            Frame(
                FrameKind.HANDOVER,
                params=KvTransferParams(
                    do_remote_prefill=True,
                    prompt_token_ids=PROMPT_IDS,
                    generated=[11],
                    sent_text=1,
                    seed=1,
                ),
            )
        )

    p, d = prefill(prefill_leg), decode()
    async with cluster(p, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert params_of(d.calls[0]).remote_request_id is None
        assert p.released == []
