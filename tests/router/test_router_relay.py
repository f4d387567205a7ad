"""What the client sees and when: held headers, keep-alive comments, a bounded buffer."""

import asyncio

import pytest
from router_doubles import (
    NO_PROMPTS,
    STREAM,
    Call,
    cluster,
    decode,
    event,
    prefill,
    prefill_ok,
    until,
)

import kvrelay.router.relay
from kvrelay.wire.frames import Frame, FrameKind


async def test_headers_are_held_until_the_first_payload() -> None:
    async def wait_then_answer(call: Call) -> None:
        await call.send(Frame(FrameKind.TOKENS))
        await p.resume.wait()
        await prefill_ok(call)

    p = prefill(wait_then_answer)
    async with cluster(p, decode()) as c:
        request = asyncio.create_task(c.text(STREAM))
        headers = asyncio.create_task(c.post(STREAM).__aenter__())
        await until(lambda: len(p.calls) == 2 and all(call.begun for call in p.calls))
        done, _ = await asyncio.wait((headers,), timeout=0.05)
        assert not done
        p.resume.set()
        async with await headers as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
        assert (await request).startswith(event("a").decode())


async def test_after_the_hold_time_comments_keep_the_connection_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wait_then_fail(call: Call) -> None:
        await p.resume.wait()
        call.cut()

    monkeypatch.setattr(kvrelay.router.relay, "HOLD_S", 0.05)
    p = prefill(wait_then_fail)
    async with cluster(p, decode(kv=NO_PROMPTS)) as c, c.post(STREAM) as answer:
        assert answer.status == 200
        assert await answer.content.readexactly(28) == b": keep-alive\n\n" * 2
        p.resume.set()
        rest = (await answer.text()).replace(": keep-alive\n\n", "")
        assert rest.startswith('data: {"error":{')
        assert rest.endswith("}\n\ndata: [DONE]\n\n")
