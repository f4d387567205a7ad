"""JSON bodies: limits, errors that name a field, and long ones off the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import re
from array import array
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.wire.errors import BodyTooLarge, RequestError, limit_of
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
    "one_of",
    "read_json",
    "refuser",
    "unless_disconnected",
    "wrong_value",
]

P = ParamSpec("P")
T = TypeVar("T")

MAX_DEPTH = 128
MAX_CONTAINERS = 1 << 16
"""Objects and lists in a body; a million take seconds to read."""
MAX_STRINGS = 1 << 18
MAX_VALUES = 1 << 20
"""Values in a body, up to 36 bytes of memory each."""
_HANDED_OVER, _HANDED_OVER_TIMES = "kv_transfer_params", 16
"""The field of a hand-over may hold 16 times the limits."""
_CODE = "invalid_json"
# A string without escaped quotes; one that does not end is one, too.
_STRINGS = re.compile(rb'"[^"]*+"?')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")  # up and down, as signed bytes


_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_node_body(body: bytes, limit: int) -> None:
    """Raise RequestError if a body for a node is too long, deep or large; `limit` is in bytes.

    A hand-over counts apart: it may have log-probabilities of each prompt token.
    """
    if len(body) <= limit:
        with suppress(RequestError):
            check_shape(body)
            return
    fields = read_json(body, _raw_fields)
    handed_over = bytes(fields.pop(_HANDED_OVER, b""))
    own = b",".join(map(bytes, fields.values()))
    if len(own) > limit:
        raise BodyTooLarge(
            f"the request body has {len(own)} bytes beside {_HANDED_OVER}; the limit is {limit}"
        )
    check_shape(own)
    check_shape(handed_over, _HANDED_OVER_TIMES)


def check_shape(body: bytes, times: int = 1) -> None:
    """Raise RequestError if JSON nests too deep or exceeds `times` the limits in number.

    Malformed JSON passes.
    """
    # Nearly all bodies pass here, after four scans at memory speed.
    opened, quotes, commas = body.count(b"{") + body.count(b"["), body.count(b'"'), body.count(b",")
    most = times * MAX_STRINGS
    if opened <= MAX_DEPTH and quotes <= 2 * most and commas < times * MAX_VALUES:
        return
    bare, strings = _STRINGS.subn(b"", body.replace(rb"\\", b"").replace(rb"\"", b""))
    steps = bare.translate(_STEPS, _NOT_BRACKETS)
    for count, limit, what in (
        (strings, times * MAX_STRINGS, "keys and texts"),
        (bare.count(b",") + 1, times * MAX_VALUES, "values"),
        (max(steps.count(1), steps.count(255)), times * MAX_CONTAINERS, "objects and lists"),
    ):
        if count > limit:
            raise RequestError(f"the body holds more than {limit} {what}; send fewer", code=_CODE)
    if max(accumulate(array("b", steps)), default=0) > MAX_DEPTH:
        raise RequestError(f"the body nests deeper than {MAX_DEPTH} levels; send fewer", code=_CODE)


def read_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a body. Raises RequestError with the field, value and limit."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as why:
        with suppress(*MALFORMED):  # what follows the wrong value may be no JSON
            raise wrong_value(str(why), msgspec.json.decode(body)) from why
        raise RequestError("the body is not valid JSON", code=_CODE) from why
    except RecursionError as why:
        raise RequestError(
            "the body nests too deeply to be read; send fewer levels", code=_CODE
        ) from why
    except MALFORMED as why:
        raise RequestError(f"the body is not valid JSON: {why}", code=_CODE) from why


Harmless = tuple[Any, ...]


def refuser(refused: Mapping[str, tuple[Harmless, str]]) -> Callable[[bytes], None]:
    """Return a check that raises RequestError for JSON that asks for a refused field.

    A row has the values that ask for nothing, and the remedy.
    """
    decoder = msgspec.json.Decoder(
        msgspec.defstruct("_Asked", [(name, Any, None) for name in refused])
    )

    def refuse(body: bytes) -> None:
        asked = read_json(body, decoder)
        for name, (harmless, instead) in refused.items():
            value = getattr(asked, name)
            same = (type(value) is type(each) and value == each for each in harmless)
            if value is not None and not any(same):
                raise RequestError(
                    f"{name} is not supported; {instead}", param=name, code="unsupported_parameter"
                )

    return refuse


def one_of(*choices: str) -> msgspec.Meta:
    """Return the limit of a text to these choices, which errors name."""
    return msgspec.Meta(
        pattern=f"^({'|'.join(choices)})$(?!\\n)", extra_json_schema={"enum": list(choices)}
    )


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def wrong_value(message: str, value: Any, root: str = "") -> RequestError:
    """Return the error for msgspec's message about a part of `value`, which is called `root`."""
    # The message ends with the place (`$.stop[0]`), or names the missing field.
    what, _, where = message.partition(" - at ")
    place = where.rpartition("$")[2].strip("`").removesuffix("[...]")
    name = f"{root}{place}".removeprefix(".")
    if what.startswith("Object missing required field "):
        field = what.removeprefix("Object missing required field ").strip("`")
        name = f"{name}.{field}".removeprefix(".")
        return RequestError(f"{name} is missing", param=name)
    if not name:
        return RequestError(f"the body must be a JSON object of request fields: {what}")
    limit = limit_of(what)
    if limit is None:
        return RequestError(f"{name} is of a wrong type: {what}", param=name)
    for key in re.findall(r"\w+", place):
        value = value[int(key) if isinstance(value, list) else key]
    if isinstance(value, list | dict):
        shown = f"{len(value)}"
    else:
        shown = msgspec.json.encode(value).decode()
        shown = shown if len(shown) <= 80 else f"{shown[:80]}... of length {len(shown)}"
    return RequestError(f"{name} must {limit}, got {shown}", param=name)


# Tokenizing takes 1 us per byte.
_INLINE_BYTES = 16 << 10
# Decoding takes ten times the memory, and holds the GIL 10 ms per MiB.
LONG_BYTES = 1 << 20
_LARGE_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_alone = ThreadPoolExecutor(1, "long-bodies")


def return_large_blocks() -> None:
    """Return the memory of freed long bodies to the system.

    glibc raises its limit for that, 128 KiB, to the size of freed blocks, up to 32 MiB
    (mallopt(3)): four bodies of 16 MiB left 300 MiB behind.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work on a body of `size` bytes: at once, on a thread, or on the one of very long bodies."""
    if size <= _INLINE_BYTES:
        return work(*args, **kwargs)
    thread = _alone if size > LONG_BYTES else None
    return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *args, **kwargs))


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None if the client left first."""
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
