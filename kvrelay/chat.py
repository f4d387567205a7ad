"""`kvrelay chat`, and the proof of `kvrelay up --demo`: streamed answers in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from kvrelay.wire.errors import KvrelayError

__all__ = ["ChatFailed", "Endpoint", "chat", "open_session", "proof"]

_DEADLINE = aiohttp.ClientTimeout(total=600.0, sock_connect=5.0)
_MODELS_DEADLINE = aiohttp.ClientTimeout(total=10.0, sock_connect=5.0)
_PROOF = "In one or two sentences: what is a key-value cache?"

Message = dict[str, str]


class ChatFailed(KvrelayError):
    """An endpoint that cannot be reached, refuses a request, or breaks an answer off."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address (without /v1), and the key that it wants, if any."""

    url: str
    api_key: str = ""

    async def model(self, session: aiohttp.ClientSession, wanted: str = "") -> str:
        """Return the wanted model, else the first one that is served. Raises ChatFailed."""
        async with self.asked(session, "GET", "/v1/models", timeout=_MODELS_DEADLINE) as response:
            models = [card["id"] for card in (await response.json())["data"]]
        if not models:
            raise ChatFailed(
                f"no node is up yet behind {self.url}; {self.url}/health says what is missing"
            )
        if wanted and wanted not in models:
            raise ChatFailed(f"{self.url} does not serve {wanted!r}; it serves {', '.join(models)}")
        return wanted or str(models[0])

    @contextlib.asynccontextmanager
    async def asked(
        self, session: aiohttp.ClientSession, method: str, path: str, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield an answer with status 200. Raises ChatFailed, also for what ends the block."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        url = self.url + path
        try:
            async with session.request(method, url, headers=headers, **more) as response:
                if response.status != 200:
                    raise ChatFailed(_refusal(response.status, await response.text()))
                yield response
        except TimeoutError as why:
            raise ChatFailed(f"{url} did not answer in time") from why
        except aiohttp.ClientConnectorError as why:
            raise ChatFailed(
                f"no server answers at {self.url} ({why.strerror or why}); start one with "
                "`kvrelay up` or pass --url"
            ) from why
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as why:
            raise ChatFailed(f"{url} does not answer like an OpenAI server: {why!r}") from why


def _refusal(status: int, body: str) -> str:
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = body[:200] or "no reason given"
    hint = "; pass the key with --api-key or KVRELAY_API_KEY" if status == 401 else ""
    return f"the server refused with {status}: {said}{hint}"


def open_session(*, verify: bool = True) -> aiohttp.ClientSession:
    """Open a session with our deadlines; `verify=False` trusts any certificate (a child's own)."""
    connector = aiohttp.TCPConnector(ssl=verify)
    return aiohttp.ClientSession(timeout=_DEADLINE, read_bufsize=1 << 20, connector=connector)


async def _answer(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: Mapping[str, Any], console: Console
) -> str:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began, ttft_s, tokens, text = time.monotonic(), 0.0, 0, ""
    async with endpoint.asked(session, "POST", "/v1/chat/completions", json=body) as response:
        async for event in _events(response):
            delta = event["choices"][0]["delta"] if event.get("choices") else {}
            thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
            piece = delta.get("content") or ""
            if thought or piece:
                ttft_s = ttft_s or time.monotonic() - began
                console.print(Text(thought, style="dim"), Text(piece), sep="", end="")
                console.file.flush()
            text += piece
            if usage := event.get("usage"):
                tokens = usage["completion_tokens"]
    rate = max(0, tokens - 1) / max(1e-9, time.monotonic() - began - ttft_s)
    console.print()
    notes = Console(stderr=True, highlight=False)
    notes.print(f"[dim]{tokens} tokens, TTFT {ttft_s * 1e3:.0f} ms, {rate:.1f} tokens/s[/]")
    return text


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        payload = line.removeprefix(b"data:").strip()
        if payload == b"[DONE]":
            return
        event = json.loads(payload)
        if error := event.get("error"):
            raise ChatFailed(f"the answer broke off: {error.get('message', error)}")
        yield event
    raise ChatFailed("the answer broke off: the stream ended without [DONE]")


async def proof(session: aiohttp.ClientSession, endpoint: Endpoint, console: Console) -> None:
    """Ask one question and show the answer and its speed. Raises ChatFailed."""
    console.print(f"[bold]>[/] {_PROOF}")
    messages = [{"role": "user", "content": _PROOF}]
    model = await endpoint.model(session)
    body = {"model": model, "messages": messages, "max_tokens": 64, "temperature": 0}
    await _answer(session, endpoint, body, console)


def chat(
    endpoint: Endpoint, console: Console, model: str, system: str, sampling: Mapping[str, float]
) -> int:
    """Talk until /exit, Ctrl-D or Ctrl-C; from a pipe, answer one question per line.

    Returns 1 if a question failed. An empty `model` is the first that is served. Raises
    ChatFailed.
    """
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    failed = False

    async def greet() -> str:
        async with open_session() as session:
            return await endpoint.model(session, model)

    async def turn(messages: list[Message]) -> str:
        async with open_session() as session:
            body = {"model": model, "messages": messages, **sampling}
            return await _answer(session, endpoint, body, console)

    model = asyncio.run(greet())
    if sys.stdin.isatty():
        import readline  # noqa: F401 - arrow keys and history at the prompt

        console.print(f"{model} at {endpoint.url}; /exit leaves")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (line := input("> " if sys.stdin.isatty() else "").strip()) != "/exit":
            if not line:
                continue
            asked = [*history, {"role": "user", "content": line}]
            try:
                text = asyncio.run(turn(asked))
            except ChatFailed as why:
                failed = True
                Console(stderr=True).print(Text(why.message, style="red"), soft_wrap=True)
                continue
            history = [*asked, {"role": "assistant", "content": text}]
    return int(failed)
