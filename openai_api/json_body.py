"""JSON bodies: limits on their size, errors that name a field, and long ones off the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import re
from array import array
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.wire.errors import BodyTooLarge, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "LONG_BYTES",
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_STRINGS",
    "MAX_VALUES",
    "off_loop",
    "check_node_body",
    "check_shape",
    "return_large_blocks",
    "json_response",
    "json_errors",
    "unless_disconnected",
]

MAX_DEPTH = 128
"""Levels of objects and lists in a body."""
MAX_CONTAINERS = 1 << 16
"""Objects and lists in a body: four times the messages of a chat. A million take seconds to read.
"""
MAX_STRINGS = 1 << 18
"""Keys and texts in a body."""
MAX_VALUES = 1 << 20
"""Values in a body: token ids of the longest contexts, up to 36 bytes of memory each."""
_HANDED_OVER, _HANDED_OVER_TIMES = "kv_transfer_params", 16
"""The field in which nodes hand over, and how many times the limits it may hold."""
_CODE = "invalid_json"
# A string without escaped quotes; one that does not end is one, too.
_STRINGS = re.compile(rb'"[^"]*+"?')
# A match holds the GIL, for 2 ms with so many strings.
_PIECE = re.compile(rb'(?:[^"]*+"[^"]*+"?){1,4096}+')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")  # up and down, as signed bytes


def check_node_body(body: bytes, limit: int) -> None:
    """Raise RequestError if a body on its way to a node is too long, too deep or holds too much.

    `limit` is in bytes. What a node has handed over counts apart: it may have log-probabilities of
    each token of the prompt.
    """
    if len(body) <= limit:
        with suppress(RequestError):
            check_shape(body)
            return
    with json_errors():
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    handed_over = bytes(fields.pop(_HANDED_OVER, b""))
    own = b",".join(map(bytes, fields.values()))
    if len(own) > limit:
        raise BodyTooLarge(
            f"the request body has {len(own)} bytes beside {_HANDED_OVER}; the limit is {limit}"
        )
    check_shape(own)
    check_shape(handed_over, _HANDED_OVER_TIMES)


def check_shape(body: bytes, times: int = 1) -> None:
    """Raise RequestError if JSON nests too deep or holds more than `times` the limits in number.

    Malformed JSON passes: its decoder says so.
    """
    most_strings, most_values, most_containers = (
        times * MAX_STRINGS,
        times * MAX_VALUES,
        times * MAX_CONTAINERS,
    )
    # Nearly all bodies pass here, after four scans at memory speed.
    opened, quotes, commas = body.count(b"{") + body.count(b"["), body.count(b'"'), body.count(b",")
    if opened <= MAX_DEPTH and quotes <= 2 * most_strings and commas < most_values:
        return
    strings = values = opened = closed = depth = 0
    for piece in _pieces(body.replace(rb"\\", b"").replace(rb"\"", b"")):
        bare, found = _STRINGS.subn(b"", piece)
        strings += found
        if strings > most_strings:
            raise RequestError(
                f"the body holds more than {most_strings} keys and texts; send fewer", code=_CODE
            )
        values += bare.count(b",")
        if values >= most_values:
            raise RequestError(
                f"the body holds more than {most_values} values; send fewer", code=_CODE
            )
        steps = bare.translate(_STEPS, _NOT_BRACKETS)
        opened, closed = opened + steps.count(1), closed + steps.count(255)
        if max(opened, closed) > most_containers:
            raise RequestError(
                f"the body holds more than {most_containers} objects and lists; send fewer",
                code=_CODE,
            )
        depths = list(accumulate(array("b", steps), initial=depth))
        if max(depths) > MAX_DEPTH:
            raise RequestError(
                f"the body nests deeper than {MAX_DEPTH} levels; send fewer", code=_CODE
            )
        depth = depths[-1]


def _pieces(body: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(body):
        found = _PIECE.match(body, at)
        end = len(body) if found is None else found.end()
        yield body[at:end]
        at = end


@contextmanager
def json_errors() -> Iterator[None]:
    """Turn msgspec's errors in the block into RequestErrors that name the field."""
    try:
        yield
    except msgspec.ValidationError as why:
        raise _named(str(why)) from why
    except RecursionError as why:
        raise RequestError(
            "the body nests too deeply to be read; send fewer levels", code=_CODE
        ) from why
    except MALFORMED as why:
        raise RequestError(f"the body is not valid JSON: {why}", code=_CODE) from why


def json_response(value: object, status: int = 200) -> Response:
    """Return any value as a JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _named(message: str) -> RequestError:
    # msgspec's message ends with the place (`$.stop[0]`), or names the missing field.
    if message.startswith("Object missing required field "):
        field, _, where = message.removeprefix("Object missing required field ").partition(" - at ")
        name = f"{where.strip('`')}.{field.strip('`')}".removeprefix(".").removeprefix("$.")
        return RequestError(f"{name} is missing", param=name)
    what, _, where = message.partition(" - at ")
    name = where.rpartition("$")[2].strip("`.")
    if not name:
        return RequestError(f"the body must be a JSON object of request fields: {what}")
    return RequestError(f"{name} is of a wrong type: {what}", param=name)


# Tokenizing takes 1 us per byte, for which the other streams of this process wait.
_INLINE_BYTES = 16 << 10
# Decoding takes up to ten times a body's bytes of memory, and holds the GIL 10 ms per MiB.
LONG_BYTES = 1 << 20
_LARGE_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_alone = ThreadPoolExecutor(1, "long-bodies")

P = ParamSpec("P")
T = TypeVar("T")


def return_large_blocks() -> None:
    """Have this process return the memory of long bodies to the system once it is freed.

    glibc raises its limit for that, 128 KiB, to the size of each freed block, up to 32 MiB
    (mallopt(3)): four bodies of 16 MiB at once left 300 MiB behind in a process of 80.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work on a body of `size` bytes: at once, on a thread, or on the one of very long bodies."""
    if size <= _INLINE_BYTES:
        return work(*args, **kwargs)
    thread = _alone if size > LONG_BYTES else None
    return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *args, **kwargs))


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None if the client left first, which cancels it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        del (
            each,
            task,
            gone,
        )  # or an error that leaves here holds a frame that holds the task that holds the error


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
