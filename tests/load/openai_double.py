"""An OpenAI server for tests, which answers as a test says and remembers when it did."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email import message_from_string
from typing import Any

MODEL = "double"


@dataclass
class Told:
    """A request, and the monotonic times at which its tokens were written."""

    body: dict[str, Any]
    path: str
    came: float
    headers: dict[str, str] = field(default_factory=dict)
    wrote: list[float] = field(default_factory=list)


Say = Callable[["Double", Told, asyncio.StreamWriter], Awaitable[None]]


class Double:
    """A server whose `say` answers each request."""

    def __init__(self, say: Say) -> None:
        self.say, self.told, self.url = say, list[Told](), ""
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, _, rest = head.decode().partition("\r\n")
                path = line.split()[1]
                headers = {name.lower(): value for name, value in message_from_string(rest).items()}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if head.startswith(b"GET"):
                    known = path == "/v1/models"
                    whole(writer, {"data": [{"id": MODEL}]} if known else {}, 200 if known else 404)
                    continue
                told = Told(json.loads(body), path, time.monotonic(), headers)
                if not told.body.get("stream"):
                    said = told.body["messages"][-1]["content"]
                    usage = {"prompt_tokens": 7 + 2 * len(said.split()), "completion_tokens": 1}
                    whole(writer, {"choices": [], "usage": usage})
                    continue
                self.told.append(told)
                await self.say(self, told, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def whole(writer: asyncio.StreamWriter, said: object, status: int = 200) -> None:
    body = json.dumps(said).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


def begin(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )


def event(writer: asyncio.StreamWriter, said: object) -> None:
    line = said if isinstance(said, bytes) else json.dumps(said).encode()
    text = b"data: " + line + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(text), text))


def say_choice(told: Told, writer: asyncio.StreamWriter, text: str, finish: str | None) -> None:
    chat = told.path.endswith("chat/completions")
    choice: dict[str, Any] = (
        {"delta": {"content": text} if text else {}} if chat else {"text": text}
    )
    event(writer, {"choices": [{"index": 0, **choice, "finish_reason": finish}]})


def token(told: Told, writer: asyncio.StreamWriter, text: str = " word") -> None:
    say_choice(told, writer, text, None)
    told.wrote.append(time.monotonic())


def end(told: Told, writer: asyncio.StreamWriter, tokens: int) -> None:
    say_choice(told, writer, "", "length")
    usage = {"prompt_tokens": len(told.body.get("prompt", [1])), "completion_tokens": tokens}
    event(writer, {"choices": [], "usage": usage})
    event(writer, b"[DONE]")
    over(writer)


def over(writer: asyncio.StreamWriter) -> None:
    writer.write(b"0\r\n\r\n")


def paced(ttft_s: float, gap_s: float) -> Say:
    async def say(double: Double, told: Told, writer: asyncio.StreamWriter) -> None:
        begin(writer)
        tokens = told.body["max_tokens"]
        for at in range(tokens):
            await asyncio.sleep(gap_s if at else ttft_s)
            token(told, writer)
            await writer.drain()
        end(told, writer, tokens)

    return say


@asynccontextmanager
async def serving(say: Say) -> AsyncIterator[Double]:
    double = Double(say)
    server = await asyncio.start_server(double.serve, "127.0.0.1", 0)
    double.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield double
    finally:
        server.close()
