"""A node without a model, for benchmarks/router.py: it says what a node says, as cheaply as Python
can.

    python -m benchmarks.mock_nodes prefill|decode

Prints its port. Speaks the leg stream of our nodes and, to be asked directly, the OpenAI API. An
answer has `max_tokens` events, each written on its own, as fast as they are read; with `"stop":
["paced-N"]` one comes every N ms, for all streams at once, as the steps of an engine do. Checks
nothing.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from typing import cast

import httptools
import msgspec
import uvloop

from kvrelay.wire.frames import (
    LEGS_MEDIA_TYPE,
    LEGS_PATH,
    Answer,
    Frame,
    FrameKind,
    Kind,
    MessageReader,
    message,
)
from kvrelay.wire.outputs import Finish, Load
from kvrelay.wire.transfer import KvTransferParams, packed
from kvrelay.wire.versions import LEGS

__all__ = ["MODEL", "MOST_TOKENS", "PROMPT_BYTES"]

MODEL, PROMPT_BYTES, MOST_TOKENS = "mock", 4096, 4096
_PROMPT_TOKENS, _BLOCK_TOKENS = PROMPT_BYTES // 4, 16
_MAX_TOKENS, _PACE = (
    re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)'),
    re.compile(rb'"paced-(\d+)"'),
)
_LENGTH = re.compile(rb"\r\ncontent-length: ?(\d+)", re.IGNORECASE)
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
_LOAD = Load(running=1, free_blocks=1000, total_blocks=1000)
_LEGS = b"POST %b HTTP/1.1" % LEGS_PATH.encode()
_TAKEN = msgspec.msgpack.encode(Answer(200, _LOAD))


def _event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    chunk = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1,
    }
    return b"data: " + msgspec.json.encode({**chunk, "model": MODEL, "choices": [choice]}) + b"\n\n"


_EVENT, _LAST = _event(" word"), _event("", "length") + b"data: [DONE]\n\n"
_TOKENS = [
    msgspec.msgpack.encode(Frame(FrameKind.TOKENS, _EVENT, [1000 + at], 5 * at))
    for at in range(MOST_TOKENS)
]
_END = msgspec.msgpack.encode(
    Frame(
        FrameKind.END,
        _LAST,
        load=_LOAD,
        finish=Finish.LENGTH,
        usage=(_PROMPT_TOKENS, 16, 0),
        timing={"transfer": 1.0, "decode_queue": 1.0, "decode": 1.0},
    )
)
_PARAMS = KvTransferParams(
    do_remote_prefill=True,
    remote_engine_id="engine-p",
    remote_block_ids=[list(range(1, 1 + _PROMPT_TOKENS // _BLOCK_TOKENS))],
    remote_request_id="held",
    remote_host="127.0.0.1",
    remote_port=7,
    generation="g",
    num_tokens=_PROMPT_TOKENS,
    growing=True,
    packed_prompt=packed(range(1000, 1000 + _PROMPT_TOKENS)),
    seed=1,
    created=1,
)
_TICKET = msgspec.msgpack.encode(Frame(FrameKind.TICKET, params=_PARAMS, load=_LOAD))
_HANDED = msgspec.structs.replace(
    _PARAMS, growing=False, packed_prompt=None, generated=[1000], sent_text=5
)
_HANDOVER = msgspec.msgpack.encode(
    Frame(FrameKind.HANDOVER, params=_HANDED, load=_LOAD, timing={"queue": 1.0, "prefill": 1.0})
)


class _Steps:
    def __init__(self) -> None:
        self._waiting: dict[int, list[Callable[[], bool]]] = {}

    def tell(self, events: list[bytes], body: bytes, told: Callable[[bytes, bytes], bool]) -> None:
        """All of them, at the pace that the body asks for; the last comes with the one before it.
        `told` goes on?
        """
        at, pace = 0, _PACE.search(body)

        def step() -> bool:
            nonlocal at
            at += 1
            return (
                told(events[at - 1], events[at] if at == len(events) - 1 else b"")
                and at < len(events) - 1
            )

        def at_once() -> None:
            if step():
                asyncio.get_running_loop().call_soon(at_once)

        if pace is None:
            at_once()
        elif step():
            self._join(int(pace[1]), step)

    def _join(self, gap_ms: int, step: Callable[[], bool]) -> None:
        if gap_ms not in self._waiting:
            self._waiting[gap_ms] = []
            loop = asyncio.get_running_loop()
            loop.call_later(gap_ms / 1e3, self._step, gap_ms, loop.time() + gap_ms / 1e3)
        self._waiting[gap_ms].append(step)

    def _step(self, gap_ms: int, due: float) -> None:
        self._waiting[gap_ms] = [step for step in self._waiting[gap_ms] if step()]
        loop = asyncio.get_running_loop()
        due = max(due + gap_ms / 1e3, loop.time())
        loop.call_later(due - loop.time(), self._step, gap_ms, due)


class _Stream:
    def __init__(self, transport: asyncio.Transport, role: str, steps: _Steps) -> None:
        self._transport, self._role, self._steps = transport, role, steps
        self._parser, self._reader = httptools.HttpRequestParser(self), MessageReader()
        self._out: list[bytes] = []
        transport.write(_OK % LEGS_MEDIA_TYPE.encode() + b"transfer-encoding: chunked\r\n\r\n")
        self._say(message(Kind.PONG))

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        for leg, kind, said in self._reader.feed(body):
            if kind == Kind.PING:
                self._say(message(Kind.PONG))
            elif kind == Kind.OPEN:
                self._say(message(Kind.ANSWER, leg, _TAKEN))
                self._leg(leg, bytes(said))

    def _leg(self, leg: int, body: bytes) -> None:
        def step(payload: bytes, last: bytes) -> bool:
            self._say(message(Kind.FRAME, leg, payload))
            if last:
                self._say(message(Kind.FRAME, leg, last))
            return not self._transport.is_closing()

        if self._role == "prefill":
            self._say(message(Kind.FRAME, leg, _TICKET))
            asyncio.get_running_loop().call_soon(step, _TOKENS[0], _HANDOVER)
        else:
            self._steps.tell([*_TOKENS[: _max_tokens(body)], _END], body, step)

    def _say(self, said: bytes) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(said)

    def _flush(self) -> None:
        said = b"".join(self._out)
        self._out.clear()
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(said), said))


class _Node(asyncio.Protocol):
    def __init__(self, role: str, steps: _Steps) -> None:
        self._role, self._steps = role, steps
        self._buffer = b""
        self._stream: _Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._transport.set_write_buffer_limits(high=1 << 30)

    def data_received(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.feed(data)
            return
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            if head.startswith(_LEGS):
                self._stream = _Stream(self._transport, self._role, self._steps)
                self._stream.feed(self._buffer)
                return
            found = _LENGTH.search(head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                if b"100-continue" in head.lower():
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body, self._buffer = self._buffer[end + 4 : size], self._buffer[size:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST") or b"/v1/c" not in head[:12]:
            self._whole(self._said())
        else:
            self._transport.write(
                _OK % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"
            )
            self._steps.tell([_EVENT] * _max_tokens(body) + [_LAST], body, self._event)

    def _event(self, payload: bytes, last: bytes) -> bool:
        payload, end = payload + last, b"0\r\n\r\n" if last else b""
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(payload), payload, end))
        return not self._transport.is_closing()

    def _whole(self, body: bytes) -> None:
        self._transport.write(
            _OK % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body
        )

    def _said(self) -> bytes:
        return msgspec.json.encode(
            {
                "status": "ok",
                "role": self._role,
                "model": MODEL,
                "model_path": MODEL,
                "max_model_len": 1 << 20,
                "engine_id": f"engine-{self._role}",
                "generation": "g",
                "load": _LOAD,
                "leg_stream": LEGS.oldest,
                "leg_stream_newest": LEGS.newest,
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "mock"}],
            }
        )


def _max_tokens(body: bytes) -> int:
    found = _MAX_TOKENS.search(body)
    return min(int(found[1]), MOST_TOKENS) if found else 16


async def _serve(role: str) -> None:
    steps = _Steps()
    server = await asyncio.get_running_loop().create_server(
        lambda: _Node(role, steps), "127.0.0.1", 0, backlog=2048
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1]))
