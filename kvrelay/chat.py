"""A client of the OpenAI endpoint for the terminal: `kvrelay chat`, and the proof of `kvrelay up`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from kvrelay.wire.errors import KvrelayError

__all__ = ["Answer", "ChatFailed", "Endpoint", "chat", "open_session", "proof", "stream_answer"]

_DEADLINE = aiohttp.ClientTimeout(total=600.0, sock_connect=5.0)
_MODELS_DEADLINE = aiohttp.ClientTimeout(total=10.0, sock_connect=5.0)
_PROOF = "In one or two sentences: what is a key-value cache?"
_PROOF_SAMPLING = {"max_tokens": 64, "temperature": 0}

Message = dict[str, str]


class ChatFailed(KvrelayError):
    """An endpoint could not be reached, refused the request, or broke the answer off."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer and how fast it came."""

    text: str
    tokens: int
    ttft_s: float
    """From the request to the first text or reasoning."""
    total_s: float

    @property
    def summary(self) -> str:
        """Return the figures in one line; the rate leaves out the first token."""
        stream_s = self.total_s - self.ttft_s
        rate = (
            f", {(self.tokens - 1) / stream_s:.1f} tokens/s"
            if self.tokens > 1 and stream_s > 0
            else ""
        )
        return f"{self.tokens} tokens, TTFT {self.ttft_s * 1e3:.0f} ms{rate}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address (without /v1), and the key that it wants, if any."""

    url: str
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def model(self, session: aiohttp.ClientSession, wanted: str = "") -> str:
        """Return the wanted model, else the first one that is served. Raises ChatFailed."""
        url = f"{self.url}/v1/models"
        try:
            async with session.get(url, headers=self.headers, timeout=_MODELS_DEADLINE) as response:
                if response.status != 200:
                    raise ChatFailed(_refusal(response.status, await response.text()))
                models = [str(card["id"]) for card in json.loads(await response.text())["data"]]
        except TimeoutError as why:
            raise ChatFailed(f"{url} did not answer within {_MODELS_DEADLINE.total:g} s") from why
        except aiohttp.ClientError as why:
            raise ChatFailed(_unreachable(self.url, why)) from why
        except (ValueError, LookupError, TypeError) as why:
            raise ChatFailed(f"{url} does not answer like an OpenAI server") from why
        if not models:
            raise ChatFailed(
                f"no node is up yet behind {self.url}; {self.url}/health says what is missing"
            )
        if wanted and wanted not in models:
            raise ChatFailed(f"{self.url} does not serve {wanted!r}; it serves {', '.join(models)}")
        return wanted or models[0]


def open_session(*, verify: bool = True) -> aiohttp.ClientSession:
    """Open a session with our deadlines; `verify=False` trusts any certificate (a child's own)."""
    connector = aiohttp.TCPConnector(ssl=verify)
    return aiohttp.ClientSession(timeout=_DEADLINE, read_bufsize=1 << 20, connector=connector)


async def stream_answer(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    model: str,
    messages: list[Message],
    on_text: Callable[[str], None],
    on_thought: Callable[[str], None],
    **sampling: float,
) -> Answer:
    """Ask, pass on text and reasoning as they come, and return the answer. Raises ChatFailed."""
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }
    began, ttft_s, tokens = time.monotonic(), 0.0, 0
    pieces: list[str] = []
    try:
        url = f"{endpoint.url}/v1/chat/completions"
        async with session.post(url, json=body, headers=endpoint.headers) as response:
            if response.status != 200:
                raise ChatFailed(_refusal(response.status, await response.text()))
            async for event in _events(response):
                if thought := _delta(event, "reasoning") or _delta(event, "reasoning_content"):
                    ttft_s = ttft_s or time.monotonic() - began
                    on_thought(thought)
                if piece := _delta(event, "content"):
                    ttft_s = ttft_s or time.monotonic() - began
                    pieces.append(piece)
                    on_text(piece)
                if usage := event.get("usage"):
                    tokens = usage["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as why:
        raise ChatFailed(_unreachable(endpoint.url, why)) from why
    return Answer("".join(pieces), tokens or len(pieces), ttft_s, time.monotonic() - began)


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


def _delta(event: dict[str, Any], field: str) -> str:
    choices = event.get("choices")
    return (choices[0].get("delta", {}).get(field) or "") if choices else ""


def _refusal(status: int, body: str) -> str:
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = body[:200] or "no reason given"
    hint = "; pass the key with --api-key or KVRELAY_API_KEY" if status == 401 else ""
    if "context of this model" in said:
        hint = "; /reset forgets the conversation"
    return f"the server refused with {status}: {said}{hint}"


def _unreachable(url: str, why: Exception) -> str:
    if isinstance(why, aiohttp.InvalidURL):
        return f"{url!r} is no address; give one like http://127.0.0.1:8000"
    if isinstance(why, aiohttp.ClientConnectorError):
        return (
            f"no server answers at {url} ({why.strerror or why}); start one with `kvrelay up` "
            f"or pass --url"
        )
    return f"the exchange with {url} failed: {why or type(why).__name__}"


async def proof(session: aiohttp.ClientSession, endpoint: Endpoint, console: Console) -> Answer:
    """Ask one question and show the answer and its speed. Raises ChatFailed."""
    console.print(f"[bold]>[/] {_PROOF}")
    model = await endpoint.model(session)
    messages = [{"role": "user", "content": _PROOF}]
    show, think = _printer(console), _printer(console, "dim")
    answer = await stream_answer(session, endpoint, model, messages, show, think, **_PROOF_SAMPLING)
    console.print(f"\n[dim]{answer.summary}[/]")
    return answer


@dataclass(frozen=True, slots=True)
class _Talk:
    endpoint: Endpoint
    model: str
    beginning: list[Message]
    sampling: Mapping[str, float]

    def ask(self, history: list[Message], console: Console, aside: Console) -> Answer:
        show, think, thinking = _printer(console), _printer(aside, "dim"), False

        def on_thought(piece: str) -> None:
            nonlocal thinking
            thinking = True
            think(piece)

        def on_text(piece: str) -> None:
            nonlocal thinking
            if thinking:
                think("\n\n")
                thinking = False
            show(piece)

        async def answer() -> Answer:
            async with open_session() as session:
                messages = self.beginning + history
                return await stream_answer(
                    session,
                    self.endpoint,
                    self.model,
                    messages,
                    on_text,
                    on_thought,
                    **self.sampling,
                )

        return asyncio.run(answer())


def chat(
    endpoint: Endpoint, console: Console, model: str, system: str, sampling: Mapping[str, float]
) -> int:
    """Talk until /exit, Ctrl-D or Ctrl-C; from a pipe, answer one question per line.

    Returns 1 if a piped question failed. An empty `model` is the first that is served. Raises
    ChatFailed.
    """
    beginning = [{"role": "system", "content": system}] if system else []
    talk = _Talk(endpoint, asyncio.run(_greet(endpoint, model)), beginning, sampling)
    if not sys.stdin.isatty():
        return _piped(talk, console)
    import readline  # noqa: F401 - arrow keys and history at the prompt

    console.print(
        f"{talk.model} at {endpoint.url}. /reset forgets the conversation, /exit leaves, Ctrl-C "
        f"stops an answer."
    )
    history: list[Message] = []
    while (line := _typed(console)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            history = []
            console.print("[dim]forgotten[/]")
        elif line:
            history = _turn(talk, history, line, console)
    return 0


async def _greet(endpoint: Endpoint, model: str) -> str:
    async with open_session() as session:
        return await endpoint.model(session, model)


def _typed(console: Console) -> str | None:
    try:
        return console.input("[bold]>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _turn(talk: _Talk, history: list[Message], line: str, console: Console) -> list[Message]:
    asked = [*history, {"role": "user", "content": line}]
    try:
        answer = talk.ask(asked, console, console)
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/]")
        return history
    except ChatFailed as why:
        console.print(Text(f"\n{why.message}", style="red"))
        return history
    console.print(f"\n[dim]{answer.summary}[/]")
    return [*asked, {"role": "assistant", "content": answer.text}]


def _piped(talk: _Talk, console: Console) -> int:
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    history: list[Message] = []
    failed = False
    for line in map(str.strip, sys.stdin):
        if line == "/exit":
            break
        if not line or line == "/reset":
            history = [] if line else history
            continue
        history.append({"role": "user", "content": line})
        try:
            answer = talk.ask(history, console, notes)
        except ChatFailed as why:
            failed = True
            history.pop()
            notes.print(Text(why.message, style="red"))
            continue
        history.append({"role": "assistant", "content": answer.text})
        console.print()
        notes.print(Text(answer.summary, style="dim"))
    return int(failed)


def _printer(console: Console, style: str = "") -> Callable[[str], None]:
    def show(piece: str) -> None:
        console.print(Text(piece, style=style), end="", soft_wrap=True)
        console.file.flush()

    return show
