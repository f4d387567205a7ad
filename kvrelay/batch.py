"""`kvrelay batch`: answers a file of requests in the format of OpenAI's Batch API.

Wrong input is refused before anything is asked; a second run answers what is left.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvrelay.chat import Endpoint, open_session
from kvrelay.openai_api.dialects.anthropic import translate_messages
from kvrelay.openai_api.dialects.base import Translate, untranslated
from kvrelay.openai_api.dialects.responses import StoredConversation, translate_responses
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import ConfigError, KvrelayError
from kvrelay.wire.frames import MALFORMED

__all__ = ["Answered", "Ask", "BatchLine", "over_http", "read_batch", "run_batch", "with_engine"]

TRIES = 5
"""How often a request is sent that finds no room or gets no answer."""
MAX_PAUSE_S = 60.0
_RETRIED = (408, 429, 502, 503, 504)
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


class BatchLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Done(msgspec.Struct, frozen=True):
    class Response(msgspec.Struct, frozen=True):
        status_code: int = 0

    custom_id: str
    response: Response | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of any status; `retry_after_s` is set if the request may be sent again."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None


Ask = Callable[[BatchLine], Awaitable[Answered]]
"""Raises KvrelayError if there is no answer."""


def run_batch(
    source: Path,
    target: Path,
    asking: Callable[[], AbstractAsyncContextManager[Ask]],
    at_once: int,
    console: Console,
) -> int:
    """Answer what `target` does not answer yet, and return 1 if an answer is an error.

    Raises ConfigError.
    """
    if at_once < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {at_once}")
    lines = read_batch(source)
    done = _keep_done(target, {line.custom_id for line in lines})
    left = [line for line in lines if line.custom_id not in done]
    if done:
        console.print(f"{len(done)} of {len(lines)} requests are answered in {target} already")
    if not left:
        return 0
    with target.open("ab") as out:
        failed = asyncio.run(_answer_all(left, out, asking, at_once, console))
    console.print(f"{len(left)} requests answered into {target}, {failed} of them with an error")
    return int(failed > 0)


def read_batch(source: Path) -> list[BatchLine]:
    """Return the requests of a file. Raises ConfigError that names the first wrong line."""
    decoder = msgspec.json.Decoder(BatchLine)
    lines: list[BatchLine] = []
    seen: set[str] = set()
    for number, raw in enumerate(_read(source).splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{source} line {number}"
        try:
            line = decoder.decode(raw)
        except MALFORMED as why:
            raise ConfigError(f"{where} is no request of a batch: {why}") from why
        if line.method != "POST" or line.url not in URLS:
            raise ConfigError(
                f"{where} asks for {line.method} {line.url}; served are POST and {', '.join(URLS)}"
            )
        if line.body.get("stream"):
            raise ConfigError(f"{where} asks for a stream; an answer in a file is whole")
        if line.custom_id in seen:
            raise ConfigError(f"{where} repeats the custom_id {line.custom_id!r}")
        seen.add(line.custom_id)
        lines.append(line)
    return lines


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as why:
        raise ConfigError(f"cannot read {path}: {why.strerror}") from why


def _keep_done(target: Path, asked: set[str]) -> set[str]:
    if not target.exists():
        return set()
    decoder = msgspec.json.Decoder(_Done)
    done: set[str] = set()
    kept: list[bytes] = []
    every = _read(target).splitlines()
    torn = 0
    for raw in every:
        try:
            line = decoder.decode(raw)
        except MALFORMED:
            torn += 1
            continue
        if line.custom_id not in asked:
            raise ConfigError(
                f"{target} holds an answer to {line.custom_id!r}, which is not asked for; name "
                f"another output file"
            )
        if (
            line.response is not None
            and line.response.status_code == 200
            and line.custom_id not in done
        ):
            done.add(line.custom_id)
            kept.append(raw)
    if torn > 1:  # the last line may be: the run before was killed while it wrote
        raise ConfigError(f"{target} exists and is no output of a batch; name another output file")
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    fresh.write_bytes(b"".join(raw + b"\n" for raw in kept))
    fresh.replace(target)
    return done


async def _answer_all(
    lines: Sequence[BatchLine],
    out: IO[bytes],
    asking: Callable[[], AbstractAsyncContextManager[Ask]],
    at_once: int,
    console: Console,
) -> int:
    waiting = iter(lines)
    failed = 0
    with _progress(console) as bar:
        task = bar.add_task("requests", total=len(lines))

        async def work(ask: Ask) -> None:
            nonlocal failed
            for line in waiting:  # shared by all workers
                ok, written = await _one(ask, line)
                failed += not ok
                out.write(written + b"\n")
                out.flush()
                bar.advance(task)

        async with asking() as ask, asyncio.TaskGroup() as workers:
            for _ in range(min(at_once, len(lines))):
                workers.create_task(work(ask))
    return failed


async def _one(ask: Ask, line: BatchLine) -> tuple[bool, bytes]:
    answered: Answered | None = None
    why = ""
    for at in range(TRIES):
        try:
            answered = await ask(line)
        except KvrelayError as failure:
            answered, why = None, failure.message
        if answered is not None and answered.retry_after_s is None:
            break
        if at + 1 < TRIES:
            await asyncio.sleep(
                min(MAX_PAUSE_S, max(2.0**at, (answered and answered.retry_after_s) or 0))
            )
    response = error = None
    if answered is None:
        error = {"code": "no_answer", "message": why}
    else:
        response = {
            "status_code": answered.status,
            "request_id": answered.request_id,
            "body": msgspec.Raw(answered.body),
        }
    written = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return answered is not None and answered.status == 200, msgspec.json.encode(written)


@asynccontextmanager
async def over_http(endpoint: Endpoint) -> AsyncIterator[Ask]:
    """Yield a function that asks a running server."""
    async with open_session() as session:

        async def ask(line: BatchLine) -> Answered:
            try:
                async with session.post(
                    endpoint.url + line.url, json=line.body, headers=endpoint.headers
                ) as answer:
                    body = _json(await answer.read())
                    after = answer.headers.get("retry-after", "")
                    pause = float(after) if after.isascii() and after.isdigit() else 0.0
                    request_id = answer.headers.get("x-request-id", "")
                    return Answered(
                        answer.status,
                        body,
                        request_id,
                        pause if answer.status in _RETRIED else None,
                    )
            except (aiohttp.ClientError, TimeoutError, OSError) as why:
                raise KvrelayError(
                    f"{endpoint.url} does not answer: {why or type(why).__name__}"
                ) from why

        yield ask


@asynccontextmanager
async def with_engine(config: NodeConfig) -> AsyncIterator[Ask]:
    """Yield a function that asks an engine, which runs during the block."""
    from kvrelay.node.offline import offline

    async with offline(config) as node:

        async def ask(line: BatchLine) -> Answered:
            request_id = uuid.uuid4().hex
            try:
                body, dialect = _translate(line.url, request_id)(msgspec.json.encode(line.body))
                told = await node.answer(line.url != "/v1/completions", body)
                return Answered(200, dialect.whole(told), request_id)
            except KvrelayError as why:
                return Answered(why.status, why.json(), request_id)

        yield ask


def _translate(url: str, request_id: str) -> Translate:
    if url == "/v1/responses":
        return lambda body: translate_responses(
            body, StoredConversation(), f"resp_{request_id}", int(time.time())
        )
    if url == "/v1/messages":
        return lambda body: translate_messages(body, f"msg_{request_id}")
    return untranslated


def _json(body: bytes) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(body))
    except MALFORMED:
        return msgspec.json.encode(body.decode(errors="replace"))


def _progress(console: Console) -> Progress:
    columns: Iterable[Any] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
