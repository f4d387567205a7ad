"""How a router ends: what is under way goes on, for as long as its configuration says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest
from router_doubles import Call, decode, prefill, until

from kvrelay.router.server import make_server
from kvrelay.wire.errors import ConfigError, Draining
from kvrelay.wire.router_config import RouterConfig

BODY = {
    "model": "tiny",
    "stream": True,
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}


async def asked(
    http: aiohttp.ClientSession, port: int, body: dict[str, object], said: bytearray
) -> None:
    """Ask, and add what comes to `said`."""
    with contextlib.suppress(aiohttp.ClientError):
        async with http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            while some := await answer.content.readany():
                said += some


async def ends(drain_deadline_s: float, *, goes_on: bool, stream: bool = True) -> bytes:
    """What a client has of an answer in whose middle the router is told to end; the node goes on,
    or never.
    """

    async def slow(call: Call) -> None:
        await call.tokens(12, "b", 2)
        await d.resume.wait()
        await call.tokens(13, "c", 3)
        await call.end()

    p, d = prefill(), decode(slow)
    async with p.running(), d.running(), aiohttp.ClientSession() as http:
        config = RouterConfig(prefill=(p.url,), decode=(d.url,), drain_deadline_s=drain_deadline_s)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            server = make_server(config)
            serving = asyncio.create_task(server.serve([listening]))
            await until(lambda: server.started)
            router = server.config.app.state.router  # type: ignore[union-attr]
            await until(lambda: all(node.up for node in router.pool.nodes))
            said = bytearray()
            asking = asyncio.create_task(asked(http, port, {**BODY, "stream": stream}, said))
            await until(lambda: b'"content":"b"' in said if stream else bool(d.calls))
            assert not router.ending
            server.should_exit = True
            await until(lambda: router.ending)
            if goes_on:
                d.resume.set()
            await asyncio.wait_for(asking, 20)
            await asyncio.wait_for(serving, 20)
            d.resume.set()
    return bytes(said)


async def test_a_stream_ends_before_its_router_does() -> None:
    said = await ends(600.0, goes_on=True)
    assert b'"content":"c"' in said
    assert said.rstrip().endswith(b"data: [DONE]")


async def test_a_stream_that_takes_longer_ends_with_an_error() -> None:
    said = await ends(0.5, goes_on=False)
    assert b'"content":"b"' in said
    assert b"the router is shutting down" in said
    assert b'"finish_reason":"stop"' not in said


async def test_an_answer_in_one_piece_that_takes_longer_is_an_error_too() -> None:
    assert (
        json.loads(await ends(0.5, goes_on=False, stream=False))["error"]["type"] == Draining.type
    )


@pytest.mark.parametrize("drain_deadline_s", [0.0, -1.0, 3601.0])
def test_a_drain_has_an_end(drain_deadline_s: float) -> None:
    with pytest.raises(ConfigError, match=r"drain_deadline_s must be (above 0|at most 3600)\.0"):
        RouterConfig(drain_deadline_s=drain_deadline_s)
