"""The walk over fake nodes that come and go: what a part of an answer is worth, and what one lost
process is.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from router_doubles import (
    DONE,
    WHOLE,
    Call,
    cluster,
    decode,
    event,
    prefill,
    prefill_ok,
    refuse,
    until,
)

import kvrelay.router.request.run
from kvrelay.router.nodes.breaker import FAILURES_IN_A_ROW, State
from kvrelay.wire.config import Role
from kvrelay.wire.errors import EngineDead, ErrorBody
from kvrelay.wire.frames import Frame, FrameKind

STREAMED = (event("a") + event("b") + event("c") + event("", "stop") + DONE).decode()
LETTERS = "bcdefghij"


async def cut_after_token(call: Call) -> None:
    await call.tokens(12, "b", 2)
    call.cut()


async def rest(call: Call) -> None:
    await call.tokens(13, "c", 3)
    await call.end()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_has_begun_waits_for_a_decode_node_while_none_is_up(
    stream: bool,
) -> None:
    async def first(call: Call) -> None:
        d.health_status = 503
        await cut_after_token(call)

    async def by_turns(call: Call) -> None:
        await (first if len(d.calls) == 1 else rest)(call)

    d = decode(by_turns)
    async with cluster(prefill(), d) as c:
        asked = asyncio.create_task(c.text({"stream": stream}))
        await until(lambda: c.metric("kvrelay_router_waiting_for_room") == 1)
        async with c.post() as new:
            assert new.status == 503  # whoever has nothing yet may go elsewhere
        assert not asked.done()
        d.health_status, d.generation = 200, "g2"
        assert await asked == (STREAMED if stream else WHOLE.decode())
        assert c.metric("kvrelay_router_waiting_for_room") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_has_begun_waits_for_a_node_longer_than_for_room(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def by_turns(call: Call) -> None:
        if len(d.calls) == 1:
            d.health_status = 503
        await (cut_after_token if len(d.calls) == 1 else rest)(call)

    monkeypatch.setattr(kvrelay.router.request.run, "ROOM_DEADLINE_S", 0.05)
    d = decode(by_turns)
    async with cluster(prefill(), d) as c:
        asked = asyncio.create_task(c.text({"stream": stream}))
        await until(lambda: c.metric("kvrelay_router_waiting_for_room") == 1)
        _, late = await asyncio.wait((asked,), timeout=0.3)  # of looks each 0.1 s
        assert late
        d.health_status, d.generation = 200, "g2"
        assert await asked == (STREAMED if stream else WHOLE.decode())


async def test_an_answer_waits_for_a_node_until_the_deadline_of_its_request() -> None:
    async def die(call: Call) -> None:
        d.health_status = 503
        await cut_after_token(call)

    d = decode(die)
    async with cluster(prefill(), d, request_deadline_s=0.5) as c:
        text = await c.text({"stream": True})
        assert text.startswith((event("a") + event("b")).decode())
        assert "the request did not finish within 0.5 s" in text
        assert len(d.calls) == 1


async def test_a_stream_outlives_more_nodes_than_a_leg_may_try_as_long_as_it_gets_on() -> None:
    async def one_letter(call: Call) -> None:
        at = len(call.params["generated"])
        await call.tokens(12 + at, LETTERS[at - 1], 1 + at)
        if at == len(LETTERS):
            await call.end()
        else:
            call.cut()

    d = decode(one_letter)
    async with cluster(prefill(), d, attempts=2, health_interval_s=0.02) as c:
        wanted = b"".join(map(event, "a" + LETTERS)) + event("", "stop") + DONE
        assert await c.text({"stream": True}) == wanted.decode()
        assert len(d.calls) == len(LETTERS)


@pytest.mark.parametrize("gets_on", [False, True])
async def test_what_is_tried_in_vain_too_often_ends(gets_on: bool) -> None:
    """A leg that told something new before it broke was not in vain."""

    async def cut(call: Call) -> None:
        if gets_on and len(call.params["generated"]) == 1:
            await call.tokens(13, LETTERS[0], 2)
        call.cut()

    d = decode(cut)
    async with cluster(prefill(), d, attempts=3, health_interval_s=0.02) as c:
        text = await c.text({"stream": True})
        assert "no decode node could serve the request (3 tried)" in text
        assert len(d.calls) == 3 + gets_on


async def test_a_node_whose_engine_has_died_is_lost_and_its_successor_goes_on() -> None:
    async def engine_dies(call: Call) -> None:
        d.health_status = 503
        await call.tokens(12, "b", 2)
        why = EngineDead("the engine process ended (killed, probably out of memory)")
        error = ErrorBody(why.message, why.type, None, why.code)
        await call.send(Frame(FrameKind.ERROR, status=why.status, error=error))

    async def by_turns(call: Call) -> None:
        await (engine_dies if len(d.calls) == 1 else rest)(call)

    d = decode(by_turns)
    async with cluster(prefill(), d) as c:
        asked = asyncio.create_task(c.text({"stream": True}))
        await until(lambda: c.metric("kvrelay_router_waiting_for_room") == 1)
        d.health_status, d.generation = 200, "g2"
        assert await asked == STREAMED


async def test_the_legs_of_an_engine_that_hangs_go_on_elsewhere_when_its_node_says_so() -> None:
    async def hang(call: Call) -> None:
        await call.tokens(12, "b", 2)
        d.engine_dead = "the engine process has said nothing for 21 s"
        await asyncio.sleep(30)

    async def by_turns(call: Call) -> None:
        await (hang if len(d.calls) == 1 else rest)(call)

    d = decode(by_turns)
    async with cluster(prefill(), d) as c:
        asked = asyncio.create_task(c.text({"stream": True}))
        await until(lambda: c.metric("kvrelay_router_waiting_for_room") == 1)
        assert not c.node(d).leases
        d.engine_dead = ""  # the same process goes on
        assert await asked == STREAMED


async def test_a_process_that_is_lost_with_many_legs_has_failed_once() -> None:
    there = asyncio.Event()

    async def die_together(call: Call) -> None:
        if len(d.calls) == 8:
            there.set()
        await asyncio.wait_for(there.wait(), 10)
        await cut_after_token(call)

    async def by_turns(call: Call) -> None:
        await (rest if call.params["generated"] == [11, 12] else die_together)(call)

    d = decode(by_turns)
    async with cluster(prefill(), d) as c:
        answers = await asyncio.gather(*(c.text({"stream": True}) for _ in range(8)))
        assert set(answers) == {STREAMED}
        breaker = c.node(d).breakers[Role.DECODE]
        assert breaker.state(time.monotonic()) is State.CLOSED


async def test_a_node_that_is_down_is_asked_again_while_the_last_question_is_not_answered() -> None:
    d = decode(rest)
    async with cluster(prefill(), d, health_deadline_s=60.0, health_interval_s=0.02) as c:
        d.health_status = 503
        await until(lambda: not c.router.pool.up(Role.DECODE))
        d.health_hangs = True
        await asyncio.sleep(0.1)  # a question is lost now
        d.health_status, d.health_hangs = 200, False
        await until(lambda: bool(c.router.pool.up(Role.DECODE)))


BROKE = refuse(500, "this node failed on the request; its log says why", code="request_broke")


async def test_a_request_that_no_node_can_read_is_no_fault_of_any() -> None:
    nodes = [prefill(BROKE), prefill(BROKE), decode(BROKE)]
    async with cluster(*nodes) as c:
        for _ in range(2 * FAILURES_IN_A_ROW):
            async with c.post() as answer:
                assert answer.status == 500
        for node in nodes:
            assert node.calls
            assert all(
                each.state(time.monotonic()) is State.CLOSED
                for each in c.node(node).breakers.values()
            )


async def test_a_node_that_cannot_read_what_others_can_gets_no_more() -> None:
    broken, good = prefill(BROKE), prefill(prefill_ok)
    async with cluster(broken, good, decode()) as c:

        def state() -> State:
            breakers = c.node(broken).breakers
            return breakers[Role.PREFILL].state(time.monotonic()) if breakers else State.CLOSED

        for at in range(10 * FAILURES_IN_A_ROW):
            assert await c.text({"stream": True, "cache_salt": f"{at}"})
            if state() is State.OPEN:
                break
        assert (len(broken.calls), state()) == (FAILURES_IN_A_ROW, State.OPEN)
