"""Connections of clients: what is no HTTP that could be read one way only, too large, too slow, or
too many.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from router_doubles import WHOLE, Call, Cluster, cluster, decode, decode_ok, prefill, refuse, until

import kvrelay.router.server as server_module
from kvrelay.openai_api.connections import connection_class
from kvrelay.wire.frames import Frame, FrameKind

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
LENGTH = b"content-length: %d\r\n" % len(BODY)


@asynccontextmanager
async def connection(
    c: Cluster,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def said(c: Cluster, *pieces: bytes) -> bytes:
    """Everything that the router answers to these bytes until it closes."""
    async with connection(c) as (reader, writer):
        answer = b""
        try:
            async with asyncio.timeout(30):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                while more := await reader.read(1 << 16):
                    answer += more
        except (TimeoutError, ConnectionError):
            pass
        return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


ONE_LENGTH_TOO_MANY = {
    "length and chunks": LENGTH + b"transfer-encoding: chunked\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\n" + LENGTH,
    "two lengths": LENGTH + b"content-length: 5\r\n",
    "two equal lengths in one": b"content-length: 5, 5\r\n",
    "a length with a sign": b"content-length: +5\r\n",
    "a length in hex": b"content-length: 0x10\r\n",
    "chunks twice over": b"transfer-encoding: chunked, identity\r\n",
    "a space before the colon": b"transfer-encoding : chunked\r\n",
    "a folded header": b"x: a\r\n b\r\n" + LENGTH,
    "a naked newline": b"x: a\ny: b\r\n" + LENGTH,
    "a null": b"x: a\x00b\r\n" + LENGTH,
    "no name": b": a\r\n" + LENGTH,
    "a name with a space": b"a b: c\r\n" + LENGTH,
}


@pytest.mark.parametrize("headers", ONE_LENGTH_TOO_MANY.values(), ids=ONE_LENGTH_TOO_MANY.keys())
async def test_what_two_servers_could_read_differently_is_refused_and_the_connection_closed(
    headers: bytes,
) -> None:
    p = prefill()
    async with cluster(p, decode()) as c:
        answer = await said(
            c, CHAT + headers + b"\r\n" + BODY + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        assert status(answer) == 400
        assert answer.count(b"HTTP/1.1") == 1
        assert (
            json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        )
        assert p.calls == []


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (CHAT + b"x: y\r\n" * 200 + b"\r\n", 431),
        (CHAT + b"x: " + b"y" * (70 << 10) + b"\r\n\r\n", 431),
        (CHAT + b"x: " + b"y" * (300 << 10), 431),
        (CHAT + (b"x: " + b"y" * 1000 + b"\r\n") * 100, 431),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"NONSENSE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS on a port without
    ],
)
async def test_heads_that_are_too_large_or_none_are_refused(head: bytes, wanted: int) -> None:
    async with cluster() as c:
        assert status(await said(c, head)) == wanted
        assert status(await said(c, b"GET /ping HTTP/1.0\r\n\r\n")) == 503  # there are no nodes


async def test_no_words_of_a_client_get_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "the secret word"
    bodies: list[Any] = [
        {"stop": [secret], "min_tokens": -1},
        {"messages": [{"role": "user", "content": secret}], "max_tokens": secret},
        {"model": secret * 1000},
        {secret: 1, "remote_" + "host": secret},
        {"messages": [{"role": "user", "content": secret}]},
    ]
    script = refuse(400, f"a node repeats {secret}")
    async with cluster(prefill(script), decode()) as c:
        for body in bodies:
            assert (await c.asked(body)).status == 400
        assert (await c.ask("POST", "/v1/chat/completions", data=f'{{"a": "{secret}')).status == 400
        await until(lambda: caplog.text.count("status=400") == len(bodies) + 1)
    assert secret not in caplog.text


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads must be there within 0.3 s."""
    monkeypatch.setattr(
        server_module, "connection_class", lambda at_most, of: connection_class(at_most, 0.3, of)
    )


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [(b"", b""), (b"\r\n", b""), (b"GET /ping HTTP/1.1\r\nx:", b"HTTP/1.1 408 ")],
)
async def test_slow_heads_are_cut_off(sent: bytes, wanted: bytes, hurried: None) -> None:
    async with cluster() as c, connection(c) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(30):
            assert (await reader.read()).startswith(wanted)
            assert reader.at_eof()


async def test_a_kept_connection_that_trickles_is_cut_off_and_one_that_works_is_not(
    hurried: None,
) -> None:
    async with cluster() as c, connection(c) as (reader, writer):
        for _ in range(3):
            writer.write(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(30):
                assert b"503" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")  # resets uvicorn's own timer for kept connections
        async with asyncio.timeout(30):
            assert await reader.read() == b""


async def test_a_long_answer_is_no_slow_head(hurried: None) -> None:
    async def slow(call: Call) -> None:
        await asyncio.sleep(0.6)
        await decode_ok(call)

    async with cluster(prefill(), decode(slow)) as c:
        assert await c.text()


async def test_more_connections_than_the_limit_are_refused() -> None:
    async with cluster(max_connections=2) as c, connection(c), connection(c):
        answer = await said(c)
        assert status(answer) == 503
        assert b"retry-after: 1" in answer


async def test_a_client_that_leaves_with_a_second_request_behind_the_first_ends_both() -> None:
    never = asyncio.Event()

    async def hang(call: Call) -> None:
        await never.wait()

    p, d = prefill(), decode(hang)
    async with cluster(p, d) as c:
        async with connection(c) as (_, writer):
            writer.write(2 * (CHAT + LENGTH + b"\r\n" + BODY))
            await until(lambda: len(d.calls) == 1)
        await until(d.aborted.is_set)
        await until(lambda: not c.router.log.running)


async def test_a_client_that_leaves_while_a_node_tokenizes_for_it_ends_that() -> None:
    never = asyncio.Event()

    async def hang() -> None:
        await never.wait()

    p = prefill(tokenizes=hang)
    async with cluster(p, decode()) as c:
        async with connection(c) as (_, writer):
            body = b'{"model": "tiny", "prompt": "hi"}'
            head = (
                b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: "
                b"application/json\r\ncontent-length: %d\r\n\r\n"
            )
            writer.write(head % len(body) + body)
            await until(lambda: len(p.asked) == 1)
        await until(p.aborted.is_set)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("last", [b"connection: close\r\n", b""])
async def test_a_client_that_does_not_read_holds_nothing_for_ever(
    last: bytes, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.openai_api.connections._FLUSH_S", 0.3)
    large = msgspec.json.encode({**msgspec.json.decode(WHOLE), "padding": "x" * (12 << 20)})

    async def answer(call: Call) -> None:
        await call.send(
            Frame(FrameKind.END, b"data: " + large + b"\n\n" if call.streams else large)
        )

    d = decode(answer)
    async with cluster(prefill(), d, max_connections=1) as c:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(c.url.rpartition(":")[2])))
            body = BODY.replace(b"{", b'{"stream":true,', 1) if streamed else BODY
            length = b"content-length: %d\r\n" % len(body)
            client.sendall(CHAT + length + b"\r\n" + body + CHAT + LENGTH + last + b"\r\n" + BODY)
            await until(lambda: len(d.calls) == 2)
            await until(lambda: not c.router.log.running)
            assert not c.router.admission.waiting()
            async with asyncio.timeout(30):
                while status(await said(c, b"GET /ping HTTP/1.0\r\n\r\n")) != 200:
                    await asyncio.sleep(0.02)


async def test_a_client_that_reads_slowly_gets_all_of_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.openai_api.connections._FLUSH_S", 1.0)
    padding = 12 << 20
    large = msgspec.json.encode({**msgspec.json.decode(WHOLE), "padding": "x" * padding})

    async def answer(call: Call) -> None:
        await call.send(Frame(FrameKind.END, large))

    async with cluster(prefill(), decode(answer)) as c, connection(c) as (reader, writer):
        writer.write(CHAT + LENGTH + b"connection: close\r\n\r\n" + BODY)
        read = 0
        async with asyncio.timeout(60):
            while some := await reader.read(1 << 20):
                read += len(some)
                await asyncio.sleep(0.04)
        assert read > padding
