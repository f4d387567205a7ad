"""A request's headers: its key, its id, its trace and its targets. Pure."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, MutableMapping
from typing import Any

from kvrelay.wire.errors import RequestError

__all__ = [
    "headers_of",
    "id_headers",
    "key_of_headers",
    "safe_id",
    "slo_of_headers",
    "trace_headers",
    "trace_id_of",
]

# Printable; a router adds some to the 128 characters that its clients have.
_ID = re.compile(r"[!-~]{1,160}")
_TTFT, _TPOT = "x-slo-ttft-ms", "x-slo-tpot-ms"  # as llm-d's gateway has them
_MAX_TARGET_MS = 1e9
_HEADERS = "kvrelay.headers"
_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")

Lookup = Callable[[str], str | None]
"""Return a header by its name."""


def key_of_headers(headers: Lookup) -> str:
    """Return a request's API key, from `Authorization: Bearer` or x-api-key.

    By RFC 9110, 11, the scheme has any case and one space or more after it.
    """
    scheme, _, token = (headers("authorization") or "").partition(" ")
    return token.lstrip(" ") if scheme.lower() == "bearer" else headers("x-api-key") or ""


def safe_id(given: str | None) -> str:
    """Return the caller's own id if it is printable and short, else a new one."""
    return given if given and _ID.fullmatch(given) else uuid.uuid4().hex


def trace_id_of(traceparent: str) -> str:
    """Return the trace id of a valid traceparent, empty for none."""
    return traceparent[3:35]


def trace_headers(header: Lookup) -> dict[str, str]:
    parent, state = header("traceparent"), header("tracestate")
    if parent is None or not _TRACE.fullmatch(parent):
        return {}
    return {"traceparent": parent} | (
        {"tracestate": state} if state and _STATE.fullmatch(state) else {}
    )


def slo_of_headers(header: Lookup) -> tuple[float | None, float | None]:
    """Return the targets in headers, in seconds: to the first token, and per further token.

    Raises RequestError.
    """
    return _target_s(_TTFT, header(_TTFT)), _target_s(_TPOT, header(_TPOT))


def _target_s(name: str, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        target = float(value) if len(value) <= 20 else math.nan
    except ValueError:
        target = math.nan
    if not 0 < target <= _MAX_TARGET_MS:  # also NaN
        raise RequestError(
            f"{name} must be a number of milliseconds above 0, got {value[:40]!r}", param=name
        )
    return target / 1e3


def headers_of(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """Return a request's headers by lower-case name, the first of several; cached in the scope."""
    known: dict[str, str] | None = scope.get(_HEADERS)
    if known is None:
        pairs = reversed(scope["headers"])
        known = scope[_HEADERS] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in pairs
        }
    return known


def id_headers(job_id: str) -> dict[str, str]:
    return {"x-request-id": job_id, "request-id": job_id}
