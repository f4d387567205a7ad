"""Streamed answers in the terminal, for `kvrelay chat` and `kvrelay up --demo`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import typer

from kvrelay.wire.errors import KvrelayError

__all__ = ["answer", "chat", "first_model", "http_session"]

_DEADLINE = aiohttp.ClientTimeout(total=600.0, sock_connect=5.0)


async def _refused(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        said = (await response.text())[:300]
        raise KvrelayError(f"the server refused with {response.status}: {said}")


@contextlib.asynccontextmanager
async def http_session(
    url: str, api_key: str, *, verify: bool = True
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with a server; `verify=False` trusts any certificate (a child's own).

    Raises KvrelayError, also for what ends the block.
    """
    try:
        async with aiohttp.ClientSession(
            url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            connector=aiohttp.TCPConnector(ssl=verify),
            timeout=_DEADLINE,
            read_bufsize=1 << 20,
            raise_for_status=_refused,
        ) as http:
            yield http
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as why:
        raise KvrelayError(
            f"no OpenAI server answers at {url} ({str(why) or repr(why)}); start one with `kvrelay up` or pass "
            "--url"
        ) from why


async def first_model(http: aiohttp.ClientSession) -> str:
    """Return the first model that a server serves. Raises KvrelayError."""
    async with http.get("/v1/models") as response:
        for model in (await response.json())["data"]:
            return str(model["id"])
    raise KvrelayError("no node is up yet; GET /health says what is missing")


async def answer(http: aiohttp.ClientSession, model: str, messages: Sequence[Any]) -> str:
    """Print an answer as it comes, and return its text. Raises KvrelayError."""
    text = ""
    body = {"model": model, "messages": messages, "stream": True}
    async with http.post("/v1/chat/completions", json=body) as response:
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                typer.echo()
                return text
            event = json.loads(data) if data.startswith(b"{") else {}
            if "error" in event:
                raise KvrelayError(f"the answer broke off: {event['error']}")
            for choice in event.get("choices", ()):
                delta = choice["delta"]
                typer.echo(delta.get("reasoning") or delta.get("content") or "", nl=False)
                text += delta.get("content") or ""
    raise KvrelayError("the answer broke off: the stream ended without [DONE]")


def chat(url: str, api_key: str, model: str) -> int:
    """Answer questions, one a line, until /exit, the input's end or Ctrl-C. Raises KvrelayError."""
    said: list[dict[str, str]] = []

    async def ask(question: Callable[[aiohttp.ClientSession], Awaitable[str]]) -> str:
        async with http_session(url, api_key) as http:
            return await question(http)

    with contextlib.suppress(EOFError, KeyboardInterrupt):
        model = model or asyncio.run(ask(first_model))
        # Outside of the event loop, which would swallow the first Ctrl-C.
        while (line := input("> " if sys.stdin.isatty() else "").strip()) != "/exit":
            if line:
                said.append({"role": "user", "content": line})
                text = asyncio.run(ask(lambda http: answer(http, model, said)))
                said.append({"role": "assistant", "content": text})
    return 0
