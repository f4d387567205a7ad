"""JSON bodies: what is wrong with one, said as a RequestError that names the field, and answers of routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.responses import Response

from wire.errors import RequestError
from wire.frames import MALFORMED

__all__ = ["json_response", "reading"]


@contextmanager
def reading() -> Iterator[None]:
    """Around the decoding of a body: msgspec's errors leave it as RequestErrors."""
    try:
        yield
    except msgspec.ValidationError as why:
        raise _named(str(why)) from why
    except RecursionError as why:
        raise RequestError("the body nests too deeply to be read; send fewer levels", code="invalid_json") from why
    except MALFORMED as why:
        raise RequestError(f"the body is not valid JSON: {why}", code="invalid_json") from why


def json_response(value: object, status: int = 200) -> Response:
    """Any value of msgspec's as the answer of a route."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _named(message: str) -> RequestError:
    """msgspec's message ends with the place (`$.stop[0]`) or names the missing field; either is the param."""
    if message.startswith("Object missing required field "):
        field, _, where = message.removeprefix("Object missing required field ").partition(" - at ")
        name = f"{where.strip('`')}.{field.strip('`')}".removeprefix(".").removeprefix("$.")
        return RequestError(f"{name} is missing", param=name)
    what, _, where = message.partition(" - at ")
    name = where.rpartition("$")[2].strip("`.")
    if not name:
        return RequestError(f"the body must be a JSON object of request fields: {what}")
    return RequestError(f"{name} is of a wrong type: {what}", param=name)
