"""Third parties' proxies, as they behave towards nodes: what each sends on its two legs, and what
it does with answers.

They are vLLM's toy_proxy_server.py and the NIXL connector of llm-d's sidecar. The third,
vllm-router, is there itself.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Proxy = Callable[[aiohttp.ClientSession, str, str], Handler]


def toy_proxy(session: aiohttp.ClientSession, prefill: str, decode: str) -> Handler:
    """toy_proxy_server.py: the decode leg is the client's body, with the hand-over if there is one."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"authorization": "Bearer None", "x-request-id": str(uuid.uuid4())}
        first = body | {"kv_transfer_params": HOLD, "stream": False, "max_tokens": 1}
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        for name in ("stream_options", "min_tokens", "min_completion_tokens"):
            first.pop(name, None)
        async with session.post(prefill + request.path, json=first, headers=headers) as answer:
            answer.raise_for_status()
            given = (await answer.json()).get("kv_transfer_params", {})
        if given:
            body["kv_transfer_params"] = given
        return await _passed_on(request, session, decode, json.dumps(body), headers)

    return handle


def llm_d_sidecar(session: aiohttp.ClientSession, prefill: str, decode: str) -> Handler:
    """The sidecar's runNIXLProtocolV2. It reads and writes JSON as Go does: each number becomes a
    64-bit float.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        body = go_read(await request.read())
        chat = request.path.endswith("/chat/completions")
        limits = ("max_tokens", "max_completion_tokens") if chat else ("max_tokens",)
        kept = {name: body[name] for name in ("stream", "stream_options", *limits) if name in body}
        # The client's own headers go along, and the id is added beside one that is there already.
        headers = [
            (name, value)
            for name, value in request.headers.items()
            if name.lower() == "x-request-id"
        ]
        headers += [("content-type", "application/json"), ("x-request-id", str(uuid.uuid1()))]
        first = body | {"kv_transfer_params": HOLD, "stream": False} | dict.fromkeys(limits, 1)
        first.pop("stream_options", None)
        async with session.post(
            prefill + request.path, data=go_write(first), headers=headers
        ) as answer:
            if not 200 <= answer.status < 300:
                return web.Response(status=answer.status)
            given = go_read(await answer.read()).get("kv_transfer_params")
        rest = {
            name: value for name, value in body.items() if name not in limits and name != "stream"
        }
        rest |= kept | {"kv_transfer_params": given}
        return await _passed_on(request, session, decode, go_write(rest), headers)

    return handle


def go_read(body: bytes) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(body, parse_int=float)
    return read


def go_write(value: dict[str, Any]) -> str:
    """Keys in order, `<`, `>` and `&` escaped, and a float without a fraction as an integer."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(each) for name, each in part.items()}
        if isinstance(part, list):
            return [plain(each) for each in part]
        return (
            int(part)
            if isinstance(part, float) and part.is_integer() and abs(part) < 1e21
            else part
        )

    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


async def _passed_on(
    request: web.Request,
    session: aiohttp.ClientSession,
    decode: str,
    body: str,
    headers: Any,
) -> web.StreamResponse:
    typed = [*(headers.items() if isinstance(headers, dict) else headers)]
    typed = [(name, value) for name, value in typed if name != "content-type"] + [
        ("content-type", "application/json")
    ]
    async with session.post(decode + request.path, data=body.encode(), headers=typed) as answer:
        kind = answer.headers["content-type"]
        response = web.StreamResponse(status=answer.status, headers={"content-type": kind})
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    return response


@asynccontextmanager
async def serving(proxy: Proxy, prefill: str, decode: str) -> AsyncIterator[str]:
    """The URL of a proxy in front of these two nodes."""
    async with aiohttp.ClientSession() as session:
        app = web.Application()
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, proxy(session, prefill, decode))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
