"""The break-down of a request, put together from what two nodes tell and what the router sees."""

from __future__ import annotations

import msgspec
import pytest
from router_doubles import Call, cluster, decode, event, handover, prefill

from kvrelay.router.timeline import Timeline
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.ladder import RUNGS, Found

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
    timeline = Timeline(10.0, sent=10.001, prefilled=10.034, stepped=10.0405)
    timeline.note_report(PREFILL, decoding=False)
    timeline.note_report(DECODE, decoding=True)
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
    timeline = Timeline(10.0, sent=10.0)
    timeline.note_report(PREFILL, decoding=False)
    told = {"queue": 3.0, "prefill": 40.0, "first_step": 4.0, "decode": 9.0}
    timeline.note_report(told, decoding=True)
    stages = timeline.stages_s(10.2)
    assert (stages["prefill"], stages["decode_queue"]) == (
        pytest.approx(0.07),
        pytest.approx(0.003),
    )


def test_an_answer_of_one_node_has_no_hand_over() -> None:
    timeline = Timeline(10.0, sent=10.001, local=True, stepped=10.1)
    timeline.note_report({"queue": 3.0, "prefill": 40.0, "decode": 9.0, "told": 1.0}, decoding=True)
    told = {"queue": 4.0, "prefill": 40.0, "decode": 9.0, "total": 200.0}
    assert rounded(timeline.stages_s(10.2)) == told


def test_a_request_that_was_never_sent_has_waited() -> None:
    assert Timeline(10.0).stages_s(10.5) == {"queue": 0.5, "total": 0.5}


async def prefill_timed(call: Call) -> None:
    await call.tokens(11, "a", 1)
    await call.send(
        Frame(FrameKind.HANDOVER, params=handover(call), timing=PREFILL, found=Found(1))
    )


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
        assert list(kvrelay) == [*[f"{name}_ms" for name in names], "prompt"]
        assert list(kvrelay["prompt"]) == list(RUNGS)
        assert sum(kvrelay["prompt"].values()) == 3
        assert text.replace(',"kvrelay":' + msgspec.json.encode(kvrelay).decode(), "") == plain


async def test_a_wish_of_a_wrong_type_is_refused() -> None:
    async with cluster(prefill(), decode()) as c, c.post({"include_metrics": "yes"}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == "include_metrics"
