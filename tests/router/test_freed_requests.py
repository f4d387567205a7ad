"""Requests free what they took by their counts, however they end: a process may have hundreds of
large bodies.
"""

import asyncio
from functools import partial
from typing import Any

import pytest
from router_doubles import (
    STREAMS,
    Cluster,
    Script,
    cluster,
    cut,
    cut_after_token,
    decode,
    decode_ok,
    hold,
    prefill,
    prefill_ok,
    refuse,
    until,
)
from starlette.requests import Request

from kvrelay.router.relay import Relay
from kvrelay.router.request.job import Job
from kvrelay.router.request.run import RequestRun
from kvrelay.wire.errors import KvrelayError
from tests.collector import left_by

_left_by = partial(left_by, (Request, Relay, RequestRun, Job, KvrelayError))


@pytest.mark.parametrize(
    ("p", "d"),
    [
        pytest.param(prefill_ok, decode_ok, id="answered"),
        pytest.param(refuse(400), decode_ok, id="refused by a prefill node"),
        pytest.param(prefill_ok, refuse(400), id="refused by a decode node"),
        pytest.param(refuse(429), refuse(429), id="no room"),
        pytest.param(cut, decode_ok, id="prefill nodes lost"),
        pytest.param(prefill_ok, cut_after_token, id="decode nodes lost"),
        pytest.param(prefill_ok, cut, id="decode nodes lost at once"),
    ],
)
@STREAMS
async def test_a_request_leaves_nothing_for_the_collector(
    p: Script, d: Script, stream: bool
) -> None:
    async with cluster(prefill(p), prefill(p), decode(d), decode(d), request_deadline_s=0.5) as c:
        assert not await _left_by(lambda: _ask(c, stream))


async def test_a_deadline_that_ends_the_wait_for_a_verdict_leaves_nothing_for_the_collector() -> (
    None
):
    lost = [prefill(cut) for _ in range(8)]  # each request loses two
    async with cluster(*lost, decode(), health_interval_s=60, request_deadline_s=1.0) as c:
        assert not await _left_by(lambda: _ask(c, stream=True))
        assert [len(each.calls) for each in lost] == [1] * 8


async def test_a_request_of_several_prompts_leaves_nothing_for_the_collector() -> None:
    async with cluster(prefill(), decode(refuse(400))) as c:
        body = {"prompt": ["a", "b"], "messages": None}
        assert not await _left_by(lambda: _ask(c, stream=True, path="/v1/completions", body=body))


async def test_what_the_router_refuses_itself_leaves_nothing_for_the_collector() -> None:
    async with cluster(prefill(), decode()) as c:
        for body in ({"model": "unknown"}, {"n": "two"}, {"max_tokens": -1}):
            assert not await _left_by(lambda body=body: _ask(c, stream=False, body=body))


async def test_a_client_that_goes_leaves_nothing_for_the_collector() -> None:
    async with cluster(prefill(), d := decode(hold)) as c:

        async def goes() -> None:
            d.calls.clear()
            asking = asyncio.create_task(_ask(c, stream=True))
            await until(lambda: bool(d.calls))
            asking.cancel()
            await until(lambda: not c.router.log.running)

        assert not await _left_by(goes)


async def _ask(c: Cluster, stream: bool, body: Any = None, **kwargs: Any) -> None:
    await c.asked({"stream": stream, "max_tokens": 9, **(body or {})}, **kwargs)
