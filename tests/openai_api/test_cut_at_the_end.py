"""A server that ends cuts off what it could not answer in time: it says so by status, and logs no
traceback.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
import uvicorn

from kvrelay.openai_api.connections import connection_class

HEAD = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"


async def never_done(scope: Any, receive: Any, send: Any) -> None:
    """/begun gets a head and a part of a body; neither gets an end."""
    if scope["path"] == "/begun":
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]}
        )
        await send({"type": "http.response.body", "body": b"a part", "more_body": True})
    await asyncio.Event().wait()


async def test_what_is_cut_at_the_end_is_told_so_and_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = uvicorn.Config(
        never_done,
        port=0,
        lifespan="off",
        log_config=None,
        http=connection_class(10),
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    with caplog.at_level(logging.INFO), server.capture_signals():
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        asked = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for (_, writer), path in zip(asked, (b"begun", b"silent"), strict=True):
            writer.write(HEAD % path)
        (begun, _), (silent, _) = asked
        async with asyncio.timeout(10):
            await begun.readuntil(b"a part")
            server.should_exit = True
            head, _, body = (await silent.read()).partition(b"\r\n\r\n")
            assert await begun.read() == b""  # the length that it was promised does not come
            await serving
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after" in head
    assert json.loads(body)["error"]["type"] == "service_unavailable"
    assert [record.message for record in caplog.records if record.exc_info] == []
    assert "timeout graceful shutdown exceeded" in caplog.text
    for _, writer in asked:
        writer.close()
