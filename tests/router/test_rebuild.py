"""An answer whose decode node is gone gets its prompt's KV from a prefill node again, where that is
better.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_doubles import (
    DONE,
    KV,
    PROMPT_IDS,
    WHOLE,
    Call,
    cluster,
    decode,
    event,
    prefill,
    refuse,
)

from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load
from kvrelay.wire.transfer import KvTransferParams

STREAMED = (event("a") + event("b") + event("c") + event("", "stop") + DONE).decode()


async def cut_after_token(call: Call) -> None:
    await call.tokens(12, "b", 2)
    call.cut()


async def rest(call: Call) -> None:
    await call.tokens(13, "c", 3)
    await call.end()


def ticket(call: Call, held: str) -> KvTransferParams:
    return KvTransferParams(
        do_remote_prefill=True,
        remote_engine_id="engine-p",
        remote_block_ids=[[9]],
        remote_request_id=held,
        remote_host="127.0.0.1",
        remote_port=7,
        generation="g1",
        num_tokens=3,
        growing=True,
        prompt_token_ids=PROMPT_IDS,
        seed=call.params["seed"],
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pipelined", [True, False])
async def test_the_next_decode_leg_fetches_the_prompt_and_goes_on_from_all_tokens(
    pipelined: bool, stream: bool
) -> None:
    async def prefills(call: Call) -> None:
        if pipelined:
            await call.send(Frame(FrameKind.TICKET, params=ticket(call, f"held-{len(p.calls)}")))
        await call.tokens(11, "a", 1)
        await call.hand_over(remote_request_id=f"held-{len(p.calls)}")

    async def by_turns(call: Call) -> None:
        if len(d.calls) > 1:
            await rest(call)
            return
        if pipelined:
            await call.tokens(11, "a", 1)  # what a leg that begins with the ticket tells of too
        await cut_after_token(call)

    p, d = prefill(prefills), decode(by_turns)
    async with cluster(p, d) as c:
        assert await c.text({"stream": stream}) == (STREAMED if stream else WHOLE.decode())
        assert c.metric("kvrelay_router_rebuilt_kv_total") == 1
        first, last = (call.params for call in d.calls)
        assert first["remote_request_id"] == "held-1"
        assert last["remote_request_id"] == "held-2"
        assert (last["num_tokens"], last["generated"], last["sent_text"]) == (3, [11, 12], 2)
        assert last["prompt_token_ids"] == PROMPT_IDS
        assert len(p.calls) == 2
        assert not p.released


async def test_what_was_made_again_and_not_fetched_is_given_back() -> None:
    async def by_turns(call: Call) -> Any:
        if len(d.calls) == 1:
            await cut_after_token(call)
            return None
        return await refuse(400, "not like this")(call)

    p, d = prefill(), decode(by_turns)
    async with cluster(p, d) as c:
        assert "not like this" in await c.text({"stream": True})
        await asyncio.wait_for(p.released_event.wait(), 5)
        assert p.released == [["held-1"]]


async def test_a_prefill_node_that_breaks_at_it_leaves_it_to_the_decode_node() -> None:
    async def once(call: Call) -> None:
        if len(p.calls) == 1:
            await call.tokens(11, "a", 1)
            await call.hand_over()
        else:
            call.cut()

    async def by_turns(call: Call) -> None:
        await (cut_after_token if len(d.calls) == 1 else rest)(call)

    p, d = prefill(once), decode(by_turns)
    async with cluster(p, d) as c:
        assert await c.text({"stream": True}) == STREAMED
        assert len(p.calls) == 2
        assert d.calls[-1].params.get("remote_engine_id") is None
        assert d.calls[-1].params["generated"] == [11, 12]


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    async def slow(call: Call) -> None:
        if len(p.calls) == 1:
            await call.tokens(11, "a", 1)
            await call.hand_over()
        else:
            again.set()
            await call.send()
            await p.resume.wait()

    again = asyncio.Event()
    p, d = prefill(slow), decode(cut_after_token)
    async with cluster(p, d) as c:
        async with c.post({"stream": True}):
            await asyncio.wait_for(again.wait(), 5)
        await asyncio.wait_for(p.released_event.wait(), 5)
        await asyncio.wait_for(p.aborted.wait(), 5)
        assert not c.node(p).leases


async def test_it_stays_with_the_decode_node_where_that_is_cheaper() -> None:
    async def by_turns(call: Call) -> None:
        await (cut_after_token if len(d.calls) == 1 else rest)(call)

    p = prefill(kv=KV)
    d = decode(by_turns, kv=KV, load=Load(legs=1, spill_ms=250.0))
    async with cluster(p, d, strict_roles=False) as c:
        asked = asyncio.create_task(c.text({"stream": True}))
        await d.called.wait()
        p.load = Load(waiting=9, waiting_tokens=20_000)
        assert await asked == STREAMED
        assert len(p.calls) == 1
        assert c.metric("kvrelay_router_rebuilt_kv_total") == 0
