"""Output tokens are counted while an answer comes, once each, by model and API key, and in the
console.
"""

from __future__ import annotations

import asyncio

from router_doubles import MODEL, Call, cluster, decode, event, prefill, until

from kvrelay.router.admission.keys import hash_of
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.router_config import KeyConfig

TOKENS = "kvrelay_router_output_tokens_total"
OF_ALICE = "kvrelay_router_key_tokens_total"


async def test_tokens_are_counted_before_the_answer_ends() -> None:
    last = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.send(Frame(FrameKind.TOKENS, event("bcde"), [12, 13, 14, 15], 3))
        await last.wait()
        await call.send(Frame(FrameKind.END, b"", [16], 3, usage=(3, 6, 0)))

    keys = (KeyConfig("alice", hash_of("a")),)
    async with cluster(prefill(), decode(slow), keys=keys) as c:

        def counted() -> tuple[float, float, float]:
            return (
                c.metric(TOKENS, model_name=MODEL),
                c.metric(OF_ALICE, key="alice", kind="output"),
                c.router.status().counts.get("output_tokens", 0),
            )

        async with c.post({"stream": True}, headers={"authorization": "Bearer a"}) as answer:
            await until(lambda: counted() == (5, 5, 5))
            assert c.metric("kvrelay_router_requests_running", model_name=MODEL) == 1
            last.set()
            await answer.read()
        await until(lambda: c.metric("kvrelay_router_requests_running", model_name=MODEL) == 0)
        assert counted() == (6, 6, 6)
