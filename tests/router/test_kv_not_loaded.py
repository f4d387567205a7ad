"""A decode node that may not recompute says so, and the router tells the client instead of asking
another node.
"""

from __future__ import annotations

import json

import pytest
from router_doubles import Call, cluster, decode, event, prefill, prefill_ok, until

from kvrelay.wire.errors import KvNotLoaded
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.transfer import KvTransferParams

WHY = KvNotLoaded.because("PeerLost")


async def not_loaded(call: Call) -> None:
    await call.send(Frame(FrameKind.ERROR, status=WHY.status, error=WHY.body()))


def test_the_error_names_cause_and_remedy_and_no_address() -> None:
    assert "its prefill node is gone or was restarted (PeerLost)" in WHY.message
    assert "--kv-load-failure-policy recompute" in WHY.message
    assert "the transfer broke (TransferError)" in KvNotLoaded.because("TransferError").message


@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_byte_it_is_an_http_error(stream: bool) -> None:
    async def ticket_only(call: Call) -> None:
        params = KvTransferParams(
            do_remote_prefill=True, remote_engine_id="p", remote_request_id="held-1", growing=True
        )
        await call.send(Frame(FrameKind.TICKET, params=params))
        await released.wait()

    p, first, second = prefill(ticket_only), decode(not_loaded), decode(not_loaded)
    released = p.released_event
    async with cluster(p, first, second) as c, c.post({"stream": stream}) as answer:
        error = (await answer.json())["error"]
        assert answer.status == 502
        assert (error["type"], error["code"], error["message"]) == (
            "kv_not_loaded",
            "kv_not_loaded",
            WHY.message,
        )
        assert len(first.calls) + len(second.calls) == 1
        assert c.metric("kvrelay_failovers_total", leg="decode") == 0
        counted = {"path": "/v1/chat/completions", "status": "502"}
        await until(lambda: c.metric("kvrelay_router_requests_total", **counted) == 1)
        assert c.node(first).up
        assert c.node(second).up
        await released.wait()
    assert p.released == [["held-1"]]


async def test_after_the_first_byte_it_is_an_error_event() -> None:
    p, first, second = prefill(prefill_ok), decode(not_loaded), decode(not_loaded)
    async with cluster(p, first, second) as c:
        text = await c.text({"stream": True})
        begin, error, done, _ = text.split("\n\n")
        assert begin == event("a").decode().strip()
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "kv_not_loaded"
        assert done == "data: [DONE]"
        assert len(first.calls) + len(second.calls) == 1
