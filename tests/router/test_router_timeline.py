"""The break-down of a request, put together from what two nodes tell and what the router sees."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from router_doubles import Call, cluster, decode, event, handover, prefill, until

from kvrelay.router.request.timeline import Timeline
from kvrelay.wire.frames import Frame, FrameKind

PREFILL = {"queue": 2.0, "prefill": 30.0}
DECODE = {
    "transfer": 25.0,
    "exposed": 1.0,
    "decode_queue": 0.5,
    "first_step": 4.0,
    "decode": 200.0,
    "told": 6.0,
}


def rounded(stages_s: dict[str, float]) -> dict[str, float]:
    """Milliseconds."""
    return {name: round(took * 1e3, 6) for name, took in stages_s.items()}


def test_all_stages_of_a_hand_over() -> None:
    timeline = Timeline(10.0)
    first = timeline.begin_attempt(10.001, decoding=False)
    second = timeline.begin_attempt(10.002, decoding=True, fetches=True)
    timeline.note_first_token(first, 1, 10.034)
    timeline.note_report(PREFILL, first)
    timeline.end_attempt(first, 10.035, more=True)
    for place, now in ((1, 10.0395), (2, 10.0405)):
        timeline.note_first_token(second, place, now)
    timeline.note_report(DECODE, second)
    timeline.end_attempt(second, 10.249, more=False)
    assert rounded(timeline.stages_s(10.25)) == {
        "queue": 3.0,
        "prefill": 30.0,
        "announce": 0.5,
        "transfer": 25.0,
        "exposed": 1.0,
        "decode_queue": 0.5,
        "first_step": 4.0,
        "decode": 200.0,
        "total": 250.0,
    }


def test_a_decode_node_that_is_faster_than_the_answer_of_the_prefill_node_was_not_waited_for() -> (
    None
):
    timeline = Timeline(10.0, sent=10.0, prefilled=10.034, stepped=10.034, decode_ms=DECODE)
    assert timeline.stages_s(10.2)["announce"] == 0.0


def test_a_prompt_that_a_decode_node_has_computed_counts_as_prefill() -> None:
    timeline = Timeline(10.0, sent=10.0, prefill_ms=PREFILL)
    told = {"queue": 3.0, "prefill": 40.0, "first_step": 4.0, "decode": 9.0}
    timeline.note_report(told, timeline.begin_attempt(10.1, decoding=True))
    stages = timeline.stages_s(10.2)
    assert (stages["prefill"], stages["decode_queue"]) == (
        pytest.approx(0.07),
        pytest.approx(0.003),
    )


def test_a_request_that_was_never_sent_has_waited() -> None:
    assert Timeline(10.0).stages_s(10.5) == {"queue": 0.5, "total": 0.5}


def test_a_decode_leg_that_was_cut_is_decode_from_its_first_token_on() -> None:
    timeline = Timeline(10.0, local=True)
    leg = timeline.begin_attempt(10.0, decoding=True)
    timeline.note_first_token(leg, 1, 11.0)
    timeline.end_attempt(leg, 610.0, more=True)
    assert rounded(timeline.stages_s(610.0)) == {
        "queue": 0.0,
        "prefill": 1000.0,
        "decode": 599_000.0,
        "total": 600_000.0,
    }


@pytest.mark.parametrize("stepped", [None, 13.0])
def test_a_decode_leg_that_was_cut_is_hand_over_until_it_steps(stepped: float | None) -> None:
    timeline = Timeline(10.0)
    first = timeline.begin_attempt(10.0, decoding=False)
    second = timeline.begin_attempt(10.5, decoding=True, fetches=True)
    timeline.note_first_token(first, 1, 12.0)
    timeline.note_report(PREFILL, first)
    timeline.end_attempt(first, 12.0, more=True)
    timeline.note_first_token(second, 1, 12.5)  # the prefill node's
    if stepped is not None:
        timeline.note_first_token(second, 2, stepped)
    timeline.end_attempt(second, 20.0, more=True)
    stages = rounded(timeline.stages_s(20.0))
    spent = {"announce": 1000.0, "decode": 7000.0} if stepped else {"announce": 8000.0}
    assert {name: stages.get(name) for name in ("announce", "decode") if name in stages} == spent
    assert stages["prefill"] == 30.0


def test_what_a_broken_decode_leg_took_and_the_wait_behind_it_are_not_lost() -> None:
    timeline = Timeline(10.0)
    first = timeline.begin_attempt(10.0, decoding=False)
    timeline.note_first_token(first, 1, 10.03)
    timeline.note_report({"prefill": 30.0}, first)
    timeline.end_attempt(first, 10.03, more=True)
    broken = timeline.begin_attempt(10.03, decoding=True, fetches=True)
    timeline.note_first_token(broken, 2, 10.13)
    timeline.end_attempt(broken, 11.13, more=True)
    again = timeline.begin_attempt(13.13, decoding=True)  # no node was up
    timeline.note_first_token(again, 50, 13.63)
    timeline.note_report(
        {"queue": 0.0, "prefill": 500.0, "first_step": 4.0, "decode": 600.0}, again
    )
    timeline.end_attempt(again, 14.23, more=False)
    stages = rounded(timeline.stages_s(14.23))
    assert stages == {
        "queue": 2000.0,
        "prefill": 530.0,
        "announce": 100.0,
        "decode_queue": 0.0,
        "first_step": 4.0,
        "decode": 1600.0,
        "total": 4230.0,
    }


async def test_the_time_of_a_request_that_timed_out_is_where_it_was_spent() -> None:
    async def slow(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await asyncio.Event().wait()

    for nodes in ([prefill(), decode(slow)], [decode(slow)]):
        async with cluster(*nodes, request_deadline_s=1.0) as c, c.post({"stream": True}) as answer:
            assert b"did not finish within" in await answer.read()
            await until(lambda c=c: c.router.console.requests)  # type: ignore[misc]
            stages_s = c.router.console.requests[0].stages_s
            assert stages_s["prefill"] < 0.3
            assert stages_s.get("announce", 0.0) + stages_s.get("decode", 0.0) > 0.6, stages_s


async def prefill_timed(call: Call) -> None:
    await call.tokens(11, "a", 1)
    await call.send(Frame(FrameKind.HANDOVER, params=handover(call), timing=PREFILL))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
async def test_a_client_that_asks_finds_the_stages_at_the_end_of_its_answer(
    stream: bool, asked: bool | None
) -> None:
    ends = {True: event("", "stop") + b"data: [DONE]\n\n", False: b'{"id":"chatcmpl-x"}'}

    async def decode_timed(call: Call) -> None:
        await call.tokens(12, "b", 2)
        await call.send(Frame(FrameKind.END, ends[call.streams], timing=DECODE))

    async with cluster(prefill(prefill_timed), decode(decode_timed)) as c:
        wish = {} if asked is None else {"include_metrics": asked}
        text = await c.text({"stream": stream, **wish})
        plain = (event("a") + event("b") + ends[True] if stream else ends[False]).decode()
        if not asked:
            assert text == plain
            return
        last = text.split("\n\n")[-3].removeprefix("data: ") if stream else text
        kvrelay = msgspec.json.decode(last)["kvrelay"]
        assert kvrelay["prefill_ms"] == 30.0
        assert kvrelay["exposed_ms"] == 1.0
        names = (
            "queue",
            "prefill",
            "announce",
            *[name for name in DECODE if name != "told"],
            "total",
        )
        assert list(kvrelay) == [f"{name}_ms" for name in names]
        assert text.replace(',"kvrelay":' + msgspec.json.encode(kvrelay).decode(), "") == plain


async def test_a_wish_of_a_wrong_type_is_refused() -> None:
    async with cluster(prefill(), decode()) as c, c.post({"include_metrics": "yes"}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "include_metrics"
