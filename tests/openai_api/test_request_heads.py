"""Connections of the router and of a node: which heads are taken, how a key may be written, and
what is said of requests that are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from kvrelay.openai_api.connections import HttpConnection, connection_class
from kvrelay.openai_api.headers import key_of_headers
from kvrelay.router.relay import ClientConnection
from kvrelay.router.serve import RouterApp
from kvrelay.wire.router_config import RouterConfig
from tests.openai_api.answers import node


def router_app() -> tuple[FastAPI, type[HttpConnection]]:
    return RouterApp(RouterConfig(api_key="Key", admin_key="Key")), ClientConnection


def node_app() -> tuple[FastAPI, type[HttpConnection]]:
    return node(api_key="Key"), HttpConnection


both = pytest.mark.parametrize("made", [router_app, node_app], ids=["router", "node"])


@contextlib.asynccontextmanager
async def running(app: Any, of: type[HttpConnection]) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """The app's server and its port, until the end of the block."""
    config = uvicorn.Config(
        app,
        port=0,
        lifespan="off",
        log_config=None,
        http=connection_class(10, of=of),
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    with server.capture_signals():
        task = asyncio.create_task(server._serve())
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield server, server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def serving(made: Callable[[], tuple[FastAPI, type[HttpConnection]]]) -> AsyncIterator[int]:
    async with running(*made()) as (_, port):
        yield port


async def said(port: int, head: bytes) -> tuple[int, bytes]:
    """The status and body of the only answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head)
        async with asyncio.timeout(10):
            answer = await reader.read()
    finally:
        writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    told, _, body = answer.partition(b"\r\n\r\n")
    return int(told.split(b" ", 2)[1]), body


GOOD = [
    b"x",
    b"",
    b"127.0.0.1:8000",
    b"[::1]",
    b"[fe80::1%25eth0]:8000",
    b"kvrelay_router-0.my-ns.svc:80",
    b"x:",
]
BAD = [
    b"a b",
    b"a, b",
    b"x:y",
    b"::1",
    b"[::1",
    b"[]",
    b"a/b",
    b"a@b",
    b"\xc3\xa9",
    b"a:1:2",
    b"http://a",
]


@both
@pytest.mark.parametrize("method", [b"GET /version", b"GET /nowhere", b"POST /v1/chat/completions"])
async def test_a_request_has_one_valid_host_before_any_route_is_looked_for(
    made: Callable[[], tuple[FastAPI, type[HttpConnection]]], method: bytes
) -> None:
    close = b"connection: close\r\n\r\n"
    async with serving(made) as port:
        for host in GOOD:
            status, _ = await said(port, method + b" HTTP/1.1\r\nhost: " + host + b"\r\n" + close)
            assert status == {b"GET /version": 200, b"GET /nowhere": 404}.get(method, 401), host
        wrong = [b"host: " + host + b"\r\n" for host in BAD]
        for hosts in (
            *wrong,
            b"",
            b"host: x\r\nhost: x\r\n",
            b"host: x\r\nHOST: y\r\n",
            b"host: x\r\nhost:\r\n",
        ):
            status, body = await said(port, method + b" HTTP/1.1\r\n" + hosts + close)
            assert status == 400, hosts
            error = json.loads(body)["error"]
            assert (error["type"], "Host" in error["message"]) == ("invalid_request_error", True)
        assert (await said(port, b"GET /version HTTP/1.0\r\n\r\n"))[0] == 200
        assert (await said(port, b"GET /version HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n"))[0] == 400


async def test_trailers_are_no_headers_and_have_a_limit() -> None:
    chunked = b"host: x\r\ntransfer-encoding: chunked\r\n"
    key = b"authorization: bearer Key\r\n"
    async with serving(router_app) as port:
        keyless = (
            b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n"
            + chunked
            + b"\r\n0\r\n"
            + key
            + b"\r\n"
        )
        assert (await said(port, keyless))[0] == 401
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + chunked + key + b"\r\n0\r\nx: ")
        answer = asyncio.create_task(reader.readexactly(13))
        for _ in range(64):
            writer.write(b"y" * (16 << 10))
            await asyncio.wait({answer}, timeout=0.05)
            if answer.done():
                break
        assert await asyncio.wait_for(answer, 10) == b"HTTP/1.1 431 "
        writer.close()


async def never_done(scope: Any, receive: Any, send: Any) -> None:
    """/begun gets a head and a part of a body; neither gets an end."""
    if scope["path"] == "/begun":
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]}
        )
        await send({"type": "http.response.body", "body": b"a part", "more_body": True})
    await receive()
    await receive()


async def test_an_answer_that_has_begun_gets_no_second_one_in_its_middle() -> None:
    async with running(never_done, HttpConnection) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10):
            writer.write(b"GET /begun HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"a part")
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await reader.read() == b""
        writer.close()


async def test_what_is_cut_at_the_end_is_told_so_and_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with running(never_done, HttpConnection) as (server, port), asyncio.timeout(10):
            asked = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for (_, writer), path in zip(asked, (b"begun", b"silent"), strict=True):
                writer.write(b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            (begun, _), (silent, _) = asked
            await begun.readuntil(b"a part")
            server.should_exit = True
            head, _, body = (await silent.read()).partition(b"\r\n\r\n")
            assert await begun.read() == b""  # the length that it was promised does not come
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after" in head
    assert json.loads(body)["error"]["type"] == "service_unavailable"
    assert [record.message for record in caplog.records if record.exc_info] == []
    assert "timeout graceful shutdown exceeded" in caplog.text
    for _, writer in asked:
        writer.close()


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer Key", "Key"),
        ("bearer Key", "Key"),
        ("BEARER   Key", "Key"),
        ("Bearer", ""),
        ("BearerKey", ""),
        ("Bearer\tKey", ""),
        ("Basic Key", ""),
        ("Key", ""),
        (" Key", ""),
        ("Bearer key", "key"),
    ],
)
def test_the_scheme_of_a_key_may_have_any_case(header: str, key: str) -> None:
    assert key_of_headers({"authorization": header}.get) == key
