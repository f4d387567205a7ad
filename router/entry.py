"""What may enter the router: checks of a request's headers, before anything of it is understood. Pure.

Owns what holds for every dialect. What fields mean is checked in router/walk/job.py and on the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from wire.errors import KvrelayError, RequestError

__all__ = ["shown_error", "targets_of"]

_TTFT, _TPOT = "x-slo-ttft-ms", "x-slo-tpot-ms"  # as llm-d's gateway has them
_MAX_TARGET_MS = 1e9
_SHOWN_CHARS = 200
_OWN_WORDS = (401, 403, 404, 429)  # said of names and numbers, never of a prompt


def targets_of(header: Callable[[str], str | None]) -> tuple[float | None, float | None]:
    """Targets in a request's headers: for its first token and for each further one, in seconds. Raises RequestError."""
    return _target_s(_TTFT, header(_TTFT)), _target_s(_TPOT, header(_TPOT))


def _target_s(name: str, value: str | None) -> float | None:
    """The seconds that a header gives in milliseconds. Raises RequestError."""
    if value is None:
        return None
    try:
        target = float(value) if len(value) <= 20 else math.nan
    except ValueError:
        target = math.nan
    if not 0 < target <= _MAX_TARGET_MS:  # also if it is no number
        raise RequestError(f"{name} must be a number of milliseconds above 0, got {value[:40]!r}", param=name)
    return target / 1e3


def shown_error(why: KvrelayError) -> str:
    """An error for a log line. What is said of a client's mistake may repeat its words, so its kind alone is told."""
    if 400 <= why.status < 500 and why.status not in _OWN_WORDS:
        told = why.body()
        return f"{told.type} param={(told.param or '-')[:_SHOWN_CHARS]!r} code={str(told.code or '-')[:_SHOWN_CHARS]!r}"
    return repr(why.message[:_SHOWN_CHARS])
