"""The break-down of a request, put together from what two nodes tell and what the router sees."""

from __future__ import annotations

import msgspec
import pytest
from router_doubles import STREAMS, Call, cluster, decode, event, handover, prefill

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


LOCAL = {"queue": 3.0, "prefill": 40.0, "decode": 9.0}


@pytest.mark.parametrize(
    ("timeline", "told", "stages_ms"),
    [
        (
            Timeline(10.0, sent=10.001, prefilled=10.034, stepped=10.0405),
            (PREFILL, DECODE),
            {name: took for name, took in DECODE.items() if name != "told"}
            | {"queue": 3.0, "prefill": 30.0, "announce": 0.5},
        ),
        # A decode node that is faster than the prefill node's answer was not waited for.
        (
            Timeline(10.0, sent=10.0, prefilled=10.034, stepped=10.034),
            ({}, LOCAL | {"told": 6.0}),
            {"queue": 0.0, "decode_queue": 3.0, "prefill": 40.0, "decode": 9.0, "announce": 0.0},
        ),
        # A prompt that a decode node has computed again counts as prefill.
        (
            Timeline(10.0, sent=10.0),
            (PREFILL, LOCAL),
            {"queue": 2.0, "prefill": 70.0, "decode_queue": 3.0, "decode": 9.0},
        ),
        (
            Timeline(10.0, sent=10.001, local=True, stepped=10.1),
            ({}, LOCAL | {"told": 1.0}),
            LOCAL | {"queue": 4.0},
        ),
        (Timeline(10.0), ({}, {}), {"queue": 250.0}),  # it was never sent, and has waited
    ],
)
def test_stages_are_those_of_both_nodes_and_of_the_way_between_them(
    timeline: Timeline, told: tuple[dict[str, float], dict[str, float]], stages_ms: dict[str, float]
) -> None:
    timeline.note_report(told[0], decoding=False)
    timeline.note_report(told[1], decoding=True)
    stages_s = timeline.stages_s(10.25)
    wanted = stages_ms | {"total": 250.0}
    assert {name: took * 1e3 for name, took in stages_s.items()} == pytest.approx(wanted, abs=1e-6)


async def prefill_timed(call: Call) -> None:
    await call.tokens(11, "a", 1)
    await call.send(
        Frame(FrameKind.HANDOVER, params=handover(call), timing=PREFILL, found=Found(1))
    )


@STREAMS
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
