"""Answers whose decode leg is ahead of the prefill leg: which of both ends the answer, and what no
longer matters.
"""

from __future__ import annotations

import asyncio

import pytest
from router_doubles import DONE, Call, broken, cluster, decode, event, handover, prefill

from kvrelay.router.request.run import RequestRun
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Finish

STREAMED = (event("a") + event("", "stop") + DONE).decode()


async def ticket(call: Call) -> None:
    await call.send(
        Frame(FrameKind.TICKET, params=handover(call, generated=[], sent_text=None, growing=True))
    )


async def test_an_end_behind_a_first_token_that_the_decode_leg_has_told_leaves_the_end_to_that_leg() -> (
    None
):
    async def prefill_leg(call: Call) -> None:
        await ticket(call)
        await asyncio.wait_for(told.wait(), 5)
        await call.send(
            Frame(FrameKind.END, event("a") + event("", "stop") + DONE, [11], 1, finish=Finish.STOP)
        )
        ended.set()

    async def decode_leg(call: Call) -> None:
        await call.tokens(11, "a", 1)
        told.set()
        await asyncio.wait_for(ended.wait(), 5)
        await asyncio.sleep(0.2)
        await call.end()

    told, ended = asyncio.Event(), asyncio.Event()
    d = decode(decode_leg)
    async with cluster(prefill(prefill_leg), d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert len(d.calls) == 1


async def test_a_prefill_leg_that_is_refused_behind_the_end_adds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded = RequestRun._decode

    async def slowly(run: RequestRun) -> bool:
        done = await decoded(run)
        told.set()
        await asyncio.sleep(0.2)
        return done

    async def prefill_leg(call: Call) -> None:
        await ticket(call)
        await asyncio.wait_for(told.wait(), 5)
        await broken(400)(call)

    async def decode_leg(call: Call) -> None:
        await call.tokens(11, "a", 1)
        await call.end()

    monkeypatch.setattr(RequestRun, "_decode", slowly)
    told = asyncio.Event()
    async with cluster(prefill(prefill_leg), decode(decode_leg)) as c:
        assert await c.text({"stream": True}) == STREAMED
