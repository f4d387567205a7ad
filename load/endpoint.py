"""What a server says of itself before it is measured: its model, its version, and what it makes of
words.

Owns no load; a handful of requests, each with a deadline.
"""

from __future__ import annotations

from typing import Any

import aiohttp

from kvrelay.load.prompts import Prompts, Spelling
from kvrelay.wire.errors import KvrelayError

__all__ = ["ServerUnusable", "Server", "ask_server"]

_DEADLINE = aiohttp.ClientTimeout(total=120.0, sock_connect=10.0)
_FEW, _MANY = 64, 320


class ServerUnusable(KvrelayError):
    """It cannot be reached, or refuses what it is asked before the measurement."""


class Server:
    """Its model, what it says of its version, and how its tokenizer spells words."""

    def __init__(self, model: str, version: str, spelling: Spelling) -> None:
        self.model, self.version, self.spelling = model, version, spelling


async def ask_server(url: str, api_key: str, model: str, *, chat: bool) -> Server:
    """`chat`: texts will be sent, so their tokens are counted on two of them. Raises
    ServerUnusable.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=_DEADLINE) as session:
            if not model:
                model = (await _json(session, "GET", f"{url}/v1/models"))["data"][0]["id"]
            version = await _version(session, url)
            spelling = await _spelling(session, url, model) if chat else Spelling()
    except (aiohttp.ClientError, TimeoutError, OSError) as why:
        raise ServerUnusable(f"{url} cannot be reached: {why or type(why).__name__}") from why
    except (KeyError, IndexError, TypeError, ValueError) as why:
        raise ServerUnusable(f"{url} does not answer as an OpenAI server does: {why!r}") from why
    return Server(model, version, spelling)


async def _json(
    session: aiohttp.ClientSession, method: str, url: str, said: dict[str, Any] | None = None
) -> Any:
    async with session.request(method, url, json=said) as answer:
        if answer.status != 200:
            raise ServerUnusable(f"{url} answers {answer.status}: {(await answer.text())[:300]}")
        return await answer.json(content_type=None)


async def _version(session: aiohttp.ClientSession, url: str) -> str:
    try:
        return str((await _json(session, "GET", f"{url}/version"))["version"])
    except (ServerUnusable, KeyError, TypeError, ValueError):
        return ""


async def _spelling(session: aiohttp.ClientSession, url: str, model: str) -> Spelling:
    prompts = Prompts("spelling", 1 << 15, Spelling())
    counts = []
    for words in (_FEW, _MANY):
        messages = [{"role": "user", "content": prompts.words(words)}]
        said = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = await _json(session, "POST", f"{url}/v1/chat/completions", said)
        counts.append(int(answer["usage"]["prompt_tokens"]))
    per_word = (counts[1] - counts[0]) / (_MANY - _FEW)
    if per_word <= 0:
        raise ServerUnusable(
            f"{url} says that {_FEW} words are {counts[0]} tokens and {_MANY} words {counts[1]}"
        )
    return Spelling(1 / per_word, max(0, round(counts[0] - per_word * _FEW)))
