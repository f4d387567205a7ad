"""Requests that are wrong: in a field, in their framing, in their key, in time.

Owns no judgement but of one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrelay.wire.frames import FrameKind, Kind, MessageReader, frame_of, message
from kvrelay.wire.kv_events import KV_EVENTS_PATH
from tests.soak.chaos.processes import Node
from tests.soak.fuzz.examples import LEADS_AWAY, ROUTER, Example, asks, of_node
from tests.soak.fuzz.mutations import as_json, as_msgpack, garbled, mutated, noise
from tests.soak.fuzz.stand import Stand

__all__ = [
    "AT_ONCE",
    "MOST_HEARD",
    "Half",
    "exchange",
    "fields",
    "framing",
    "half_open",
    "judged",
    "leg_streams",
    "still_open",
    "warmed",
    "written",
]

AT_ONCE = 8
ANSWER_S = 60.0
"""A request is answered, or its connection is closed, within this; on a machine that does other
things beside it.
"""
_MOST_BYTES = 4 << 20
MOST_HEARD = 1 << 16
"""Beyond so many bytes no answer need be heard."""
_SLOW_S = 0.05
_ODD_HEADERS = [
    "x-request-id",
    "traceparent",
    "tracestate",
    "accept",
    "x-session-id",
    "x-kvrelay-ttft-ms",
    "expect",
]
_TRACE = "00-" + "f" * 32 + "-0000000000000001-01"
_ODD_VALUES = ("\xff\xfe", "a" * 3000, "-1", "nan", "1e999", _TRACE, "{}", "")
_NOWHERE = b"127.0.0.1:9 "
"""A node that an operator's request has named, and that is none: an answer may say that it could
not be reached.
"""


@dataclass(slots=True)
class Half:
    """A connection whose request never comes to its end, and the monotonic second by which it must
    be closed.
    """

    what: str
    until: float
    writer: asyncio.StreamWriter
    ended: asyncio.Task[float]
    """The monotonic second in which it was closed."""


async def exchange(
    port: int, pieces: Sequence[bytes], *, half_close: bool = False, leaves_s: float | None = None
) -> bytes | None:
    """Send the pieces, one after the other, and read to the end; None if that does not come in
    time.

    `half_close`: nothing more can come from us, which a server sees behind what it can answer.
    `leaves_s`: the connection is closed so long after the last piece, whatever has come.
    """
    said = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    if len(pieces) > 1 and not half_close:
                        await asyncio.sleep(_SLOW_S / len(pieces))
                if leaves_s is not None:
                    await asyncio.sleep(leaves_s)
                    return said
                if half_close:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_SLOW_S):
                            said += await reader.read(1 << 16)
                    writer.write_eof()
                while half_close or len(said) < _MOST_BYTES:
                    heard = await reader.read(1 << 16)
                    if not heard:
                        break
                    said += heard
            finally:
                writer.close()
    except TimeoutError:
        return None
    except OSError:
        return said
    return said


async def warmed(stand: Stand) -> None:
    """Ask every process for one of everything, so that it has what it will always have."""
    for process in stand.processes:
        key = "user" if process is stand.router else "node"
        for example in asks(key):
            body = b"" if example.body is None else as_json(example.body)
            await exchange(
                process.ports[0], [written(example.method, example.path, stand.keys[key], body)]
            )


async def fields(
    stand: Stand, rng: random.Random, process: Node, held: str, cases: int
) -> list[str]:
    """Requests of every route with changed fields, with the right key, another one or none. Returns
    what is wrong.
    """
    examples = ROUTER if process is stand.router else of_node(held)
    asked = []
    for _ in range(cases):
        example = rng.choice([one for one in examples if one.path != "/kv/legs"])
        key = rng.choice(
            (example.key, example.key, "", "wrong", rng.choice(("user", "admin", "node")))
        )
        # Who may drain a node may have requests refused; that is asked for by strangers alone.
        if example.path == "/drain" and key == "node":
            key = "user"
        # With its id a member may give this KV back: only strangers try.
        if example.path in ("/kv/release", "/kv/renew") and key == "node":
            example = Example(example.method, example.path, "node", {"request_ids": ["unknown"]})
        what = f"{example.method} {example.path} (key: {key or 'none'})"
        asked.append((what, [_request(stand, rng, example, key)], _opens(example, key)))
    return await _wrong(process, asked)


async def framing(rng: random.Random, process: Node, cases: int, key: str) -> list[str]:
    # An ended half shows that nothing follows: what is incomplete is closed without an answer.
    asked = [("raw bytes", _raw(rng, key), True) for _ in range(cases)]
    return await _wrong(process, asked, half_close=True)


async def _wrong(
    process: Node, asked: Sequence[tuple[str, list[bytes], bool]], *, half_close: bool = False
) -> list[str]:
    """Send requests, each with its name, pieces, and whether its key opens; name wrong answers."""
    found: list[str] = []
    for at in range(0, len(asked), AT_ONCE):
        some = asked[at : at + AT_ONCE]
        answers = await asyncio.gather(
            *(exchange(process.ports[0], pieces, half_close=half_close) for _, pieces, _ in some)
        )
        for (what, pieces, opens), answer in zip(some, answers, strict=True):
            sent = b"".join(pieces)
            # A refused body may still be coming when the connection is closed.
            silent = half_close or len(sent) > MOST_HEARD
            if wrong := judged(answer, strange=not opens, may_be_silent=silent):
                found.append(f"{process.role} {what}: {wrong}; sent {_shown(sent)}")
    return found


async def half_open(process: Node, key: str, head_s: float, body_s: float) -> list[Half]:
    """Requests that never end: nothing, half a head, half a body, half a chunk."""
    head = _head(key)
    ways = {
        "nothing": (b"", head_s),
        "half a line": (b"GET /hea", head_s),
        "half a head": (head, head_s),
        "half a body": (head + b"content-length: 100\r\n\r\n{", body_s),
        "half a chunk": (head + b"transfer-encoding: chunked\r\n\r\n50\r\n{", body_s),
    }
    begun = []
    for what, (data, within_s) in ways.items():
        reader, writer = await asyncio.open_connection("127.0.0.1", process.ports[0])
        writer.write(data)
        ended = asyncio.create_task(_end_of(reader))
        begun.append(Half(f"{process.role}: {what}", time.monotonic() + within_s, writer, ended))
    return begun


async def _end_of(reader: asyncio.StreamReader) -> float:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass
    return time.monotonic()


async def still_open(halves: Sequence[Half], margin_s: float) -> list[str]:
    """Wait for those whose time comes within the margin; name who was closed later, or is open."""
    wrong = []
    for half in halves:
        left_s = half.until + margin_s - time.monotonic()
        await asyncio.wait([half.ended], timeout=max(0.0, left_s))
        if not half.ended.done():
            wrong.append(f"{half.what} is still open {margin_s:g} s after its deadline")
        elif (late_s := half.ended.result() - half.until) > margin_s:
            wrong.append(f"{half.what} was closed {late_s:.0f} s after its deadline")
    return wrong


async def leg_streams(
    stand: Stand, rng: random.Random, process: Node, held: str, cases: int
) -> list[str]:
    """Leg streams of a router that has lost its mind: changed legs, messages out of order, bytes."""
    found: list[str] = []
    for _ in range(cases):
        version = rng.choice(("1", "2", "2", "2", "3", "-1", "9" * 30, "x"))
        key = rng.choice(("node", "node", "node", "", "user"))
        head = (
            f"POST /kv/legs HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer "
            f"{stand.keys[key]}\r\nx-kvrelay-legs: {version}\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        said = [_leg_message(rng, held) for _ in range(rng.randrange(1, 12))]
        body = b"".join(said)
        if rng.random() < 0.3:
            body = garbled(rng, body)
        pieces = [head.encode(), *_chunks(rng, body), _chunk(message(Kind.PING)), b"0\r\n\r\n"]
        answer = await exchange(process.ports[0], pieces)
        # What refuses the whole stream closes while more comes, and the answer may be lost with the
        # connection.
        wrong = judged(answer, strange=key != "node", may_be_silent=True) or (
            "" if answer is None else _wrong_in_legs(answer)
        )
        if wrong:
            found.append(
                f"{process.role} leg stream ({key or 'no'} key): {wrong}; sent {_shown(body)}"
            )
    return found


def _request(stand: Stand, rng: random.Random, example: Example, key: str) -> bytes:
    body = b""
    if example.body is not None:
        value = mutated(rng, example.body, LEADS_AWAY) if rng.random() < 0.9 else example.body
        body = as_json(value)
        if rng.random() < 0.15:
            body = garbled(rng, body)
    method, path = example.method, example.path
    if rng.random() < 0.1:
        ways = ("{}/", "{}?%ff=%00", "{}%00", "/{}", "{}" * 9)
        path = rng.choice([*(way.replace("{}", path) for way in ways), path.replace("/", "%2f")])
    if rng.random() < 0.05:
        method = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "BREW"))
    token = stand.keys.get(key, "f" * 64)
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    if token or rng.random() < 0.5:
        lines.append(rng.choice((f"authorization: Bearer {token}", f"x-api-key: {token}")))
    lines += [f"{name}: {value}" for name, value in example.headers]
    if rng.random() < 0.2:
        lines.append(f"{rng.choice(_ODD_HEADERS)}: {rng.choice(_ODD_VALUES)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _raw(rng: random.Random, key: str) -> list[bytes]:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()
    head = _head(key)
    sized = head + b"content-length: %d\r\n\r\n" % len(body) + body
    in_chunks = b"transfer-encoding: chunked\r\n\r\n"
    chunked = head + in_chunks + _chunk(body) + b"0\r\n\r\n"
    simple = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    length = rng.choice((b"-1", b"0x10", b"1e3", b"9" * 40, b"", b"+5", b" 5 6"))
    size = rng.choice((b"ffffffffffffffffff", b"-5", b"g", b"", b"5;x=" + b"y" * 70_000))
    header = b"x: " + b"a" * rng.choice((60_000, 70_000, 900_000)) + b"\r\n"
    headers = b"".join(b"h%d: 1\r\n" % at for at in range(rng.choice((100, 200, 5000))))
    path = b"a" * rng.choice((5000, 9000, 200_000))
    other = rng.choice(
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /health\r\n")
    )
    ways = (
        [noise(rng, 400)],
        [garbled(rng, sized)],
        [garbled(rng, chunked)],
        [simple * rng.choice((2, 30))],
        [sized + chunked + simple + sized],
        [head + b"content-length: 3\r\ncontent-length: %d\r\n\r\n" % len(body) + body],
        [head + b"content-length: 4\r\n" + chunked[len(head) :]],
        [head + b"content-length: " + length + b"\r\n\r\n" + body],
        [head + in_chunks + size + b"\r\n" + body + b"\r\n0\r\n\r\n"],
        [sized[at : at + 1] for at in range(len(sized))],
        [head + header + b"\r\n"],
        [head + headers + b"\r\n"],
        [b"GET /" + path + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        [other, b"\x16\x03\x01\x02\x00", b"\r\n" * 50],
    )
    return rng.choice(ways)


def _head(key: str) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n".encode()


def _leg_message(rng: random.Random, held: str) -> bytes:
    legs = [one for one in of_node(held) if "kv_transfer_params" in (one.body or {})]
    example = rng.choice(legs)
    body: Any = mutated(rng, example.body, LEADS_AWAY)
    path = KV_EVENTS_PATH if rng.random() < 0.1 else example.path
    opened: Any = [path, {"x-request-id": f"f{rng.randrange(5)}"}, as_json(body)]
    if rng.random() < 0.4:
        opened = mutated(rng, opened)
    kind = rng.choice((0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 200))
    number = rng.choice((0, 1, 1, 2, 2**32 - 1))
    match kind:
        case 0:
            return message(Kind.OPEN, number, as_msgpack(opened))
        case 2:
            return message(
                Kind.CREDIT,
                number,
                rng.choice((b"", b"\xff" * 4, b"\0" * 4, b"\1", noise(rng, 30))),
            )
    content = noise(rng, 20)
    size = len(content) if rng.random() < 0.9 else rng.choice((0, 2**32 - 1, 2**31))
    return struct.pack("<IIB", size, number, kind) + content


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunks(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted({rng.randrange(len(data) + 1) for _ in range(3)} | {0, len(data)})
    return [_chunk(data[a:b]) for a, b in itertools.pairwise(cuts) if a < b]


def written(method: str, path: str, key: str, body: bytes) -> bytes:
    lines = (
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        "connection: close",
        f"content-length: {len(body)}",
    )
    return "\r\n".join((*lines, f"authorization: Bearer {key}", "", "")).encode() + body


def _opens(example: Example, key: str) -> bool:
    return example.key in ("", key)


def judged(answer: bytes | None, *, strange: bool = False, may_be_silent: bool = False) -> str:
    """Say what is wrong with an answer, or nothing. `strange`: the client had no right to ask."""
    if answer is None:
        return f"neither an answer nor an end within {ANSWER_S:g} s"
    if not answer:
        return "" if may_be_silent else "closed without an answer"
    if not answer.startswith(b"HTTP/1.1 "):
        return f"it is no answer: {answer[:60]!r}"
    status = int(answer[9:12])
    if status >= 500 and _NOWHERE not in answer:
        return f"answered {status}: {_shown(answer)}"
    if strange and status < 300:  # a redirect is no effect
        return f"answered {status} without the key"
    if b'"type":"internal_error"' in answer:
        return f"an error within the answer: {_shown(answer)}"
    return ""


def _wrong_in_legs(answer: bytes) -> str:
    _, _, body = answer.partition(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200"):
        return ""
    whole, at = bytearray(), 0
    with contextlib.suppress(ValueError):
        while (end := body.find(b"\r\n", at)) > 0 and (size := int(body[at:end], 16)):
            whole += body[end + 2 : end + 2 + size]
            at = end + 4 + size
    for _, kind, said in MessageReader().feed(bytes(whole)):
        if kind == Kind.ANSWER and (told := msgspec.msgpack.decode(said))[0] >= 500:
            return f"a leg is answered {told}"
        if (
            kind == Kind.FRAME
            and (frame := frame_of(said)).kind is FrameKind.ERROR
            and frame.status >= 500
        ):
            return f"a leg ends with {frame.status}: {frame.error}"
    return ""


def _shown(data: bytes) -> str:
    return repr(data[:1500]) + (f"... ({len(data)} bytes)" if len(data) > 1500 else "")
