"""JSON bodies: their depth and size, what is wrong with one as an error of its field, and answers
of routes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate

import msgspec
from starlette.responses import Response

from kvrelay.wire.errors import BodyTooLarge, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_STRINGS",
    "MAX_VALUES",
    "check_leg",
    "check_shape",
    "json_response",
    "reading",
]

MAX_DEPTH = 128
"""Levels of objects and lists in a body."""
MAX_CONTAINERS = 1 << 16
"""Objects and lists in a body: four times the messages that a chat may have. A million take seconds
to read.
"""
MAX_STRINGS = 1 << 18
"""Keys and texts in a body."""
MAX_VALUES = 1 << 20
"""Values of lists and objects in a body: token ids of the longest contexts. Each takes up to 36
bytes of memory.
"""
_HANDED_OVER, _HANDED_OVER_TIMES = "kv_transfer_params", 16
"""The field in which nodes hand over what they have, and how many times as much it may hold."""
_CODE = "invalid_json"
# A string without escaped quotes; one that does not end is one, too.
_STRINGS = re.compile(rb'"[^"]*+"?')
# A match holds the interpreter's lock, for some 2 ms with so many strings.
_PIECE = re.compile(rb'(?:[^"]*+"[^"]*+"?){1,4096}+')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")  # up and down, as signed bytes


def check_leg(body: bytes, limit: int) -> None:
    """Raise RequestError if the body of a leg is too long, nests too deep or holds too much in
    number.

    `limit` is in bytes. What a node has handed over counts apart, and may be more: a prompt with
    log-probabilities of each of its tokens.
    """
    if len(body) <= limit:
        with suppress(RequestError):
            check_shape(body)
            return
    with reading():
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
    """Raise RequestError if a JSON body nests too deep or holds more than `times` the limits in
    number.

    What is no JSON passes: its reader says so.
    """
    most_strings, most_values, most_containers = (
        times * MAX_STRINGS,
        times * MAX_VALUES,
        times * MAX_CONTAINERS,
    )
    # Nearly all bodies have fewer brackets, quotes and commas than that: four scans at memory
    # speed, and nothing more.
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
    """Cut a body between its strings."""
    at = 0
    while at < len(body):
        found = _PIECE.match(body, at)
        end = len(body) if found is None else found.end()
        yield body[at:end]
        at = end


@contextmanager
def reading() -> Iterator[None]:
    """Around the decoding of a body: msgspec's errors leave it as RequestErrors."""
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
    """Any value of msgspec's as the answer of a route."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _named(message: str) -> RequestError:
    """msgspec's message ends with the place (`$.stop[0]`) or names the missing field; either is the
    param.
    """
    if message.startswith("Object missing required field "):
        field, _, where = message.removeprefix("Object missing required field ").partition(" - at ")
        name = f"{where.strip('`')}.{field.strip('`')}".removeprefix(".").removeprefix("$.")
        return RequestError(f"{name} is missing", param=name)
    what, _, where = message.partition(" - at ")
    name = where.rpartition("$")[2].strip("`.")
    if not name:
        return RequestError(f"the body must be a JSON object of request fields: {what}")
    return RequestError(f"{name} is of a wrong type: {what}", param=name)
