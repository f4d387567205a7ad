"""JSON bodies: limits, errors that name a field, and long ones off the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import re
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.wire.errors import BodyTooLarge, RequestError, RequestTimeout, limit_of
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
    "read_body",
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
# A match holds the GIL, for 2 ms with so many strings.
_PIECE = re.compile(rb'(?:[^"]*+"[^"]*+"?){1,4096}+')
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


def refuser(refused: Mapping[str, tuple[Harmless, str]]) -> Callable[..., None]:
    """Return a check that raises RequestError for JSON that asks for a refused field.

    A row has the values that ask for nothing, and the remedy. The check may get further such values.
    """
    decoder = msgspec.json.Decoder(
        msgspec.defstruct("_Asked", [(name, Any, None) for name in refused])
    )

    def refuse(body: bytes, **further: Any) -> None:
        asked = read_json(body, decoder)
        for name, (harmless, instead) in refused.items():
            value = getattr(asked, name)
            nothing = (*harmless, further.get(name))
            same = (type(value) is type(each) and value == each for each in nothing)
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


async def read_body(
    request: Request, limit: int, deadline_s: float = 60.0, arrived: bytes | None = None
) -> bytes:
    """Return a body of at most `limit` bytes, of which all may have `arrived`.

    Raises BodyTooLarge before it is held in memory, RequestTimeout.
    """
    body = arrived or b""
    size = int(request.headers.get("content-length") or 0) if arrived is None else len(body)
    if arrived is None and size <= limit:
        coming = bytearray()
        try:
            async with asyncio.timeout(deadline_s):
                async for chunk in request.stream():
                    coming += chunk
                    if (size := max(size, len(coming))) > limit:
                        break
        except TimeoutError as why:
            raise RequestTimeout(
                f"the request body did not arrive within {deadline_s:g} s; send it faster"
            ) from why
        body = bytes(coming)
    if size > limit:
        raise BodyTooLarge(
            f"the request body has {size} bytes or more; the limit is {limit}; send less"
        )
    return body


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def wrong_value(message: str, value: Any, root: str = "") -> RequestError:
    """Return the error for msgspec's message about a part of `value`, which is called `root`."""
    # The message ends with the place (`$.stop[0]`), or the missing field.
    what, _, where = message.partition(" - at ")
    place = where.rpartition("$")[2].strip("`")
    name = f"{root}{place.removesuffix('[...]')}".removeprefix(".")
    for begins, said in (
        ("missing required", "is missing"),
        ("contains unknown", "is unknown; leave it out"),
    ):
        if what.startswith(f"Object {begins} field "):
            name = f"{name}.{what.split('`')[1][:80]}".removeprefix(".")
            return RequestError(f"{name} {said}", param=name)
    if not name:
        return RequestError(f"the body must be a JSON object of request fields: {what}")
    limit = limit_of(what)
    if limit is None:
        return RequestError(f"{name} is of a wrong type: {what}", param=name)
    return RequestError(f"{name} must {limit}{_got(value, place)}", param=name)


def _got(value: Any, place: str) -> str:
    """Return the value at msgspec's place in words, if it is certain.

    `[...]` is any value of an object, and what comes later under the same key hides the wrong one.
    """
    if "[...]" in place:
        return ""
    try:
        for key in re.findall(r"\w+", place):
            value = value[int(key) if isinstance(value, list) else key]
    except (LookupError, TypeError, ValueError):
        return ""
    if isinstance(value, list | dict):
        return f", got {len(value)}"
    shown, length = msgspec.json.encode(value).decode(), len(str(value))
    return f", got {shown if len(shown) <= 80 else f'{shown[:80]}... of length {length}'}"


# Tokenizing takes 1 us per byte.
_INLINE_BYTES = 16 << 10
# Decoding takes ten times the memory, and holds the GIL 10 ms per MiB.
LONG_BYTES = 1 << 20
_LARGE_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_alone = ThreadPoolExecutor(1, "long-bodies")


def return_large_blocks() -> None:
    """Return the memory of freed long bodies to the system.

    glibc raises its limit for that, 128 KiB, up to 32 MiB (mallopt(3)): four bodies of 16 MiB left
    300 MiB behind.
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
        )  # or an error that leaves here holds its own frame and task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
