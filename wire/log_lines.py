"""Log lines as text or JSON objects. Pure.

`name=%s` in a template is a member of the object. Values of any names are one `%s`: Fields.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from functools import lru_cache

from kvrelay.wire.errors import KvrelayError, shortened

__all__ = ["Fields", "JsonLines", "Seldom", "formatter", "shown_error"]

_CONVERSION = re.compile(r"(?:\b(\w+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?([sdrfgiexX]))")
_TEXT = "%(asctime)s %(levelname)s %(name)s{} %(message)s"
_LONGER = {"id": "request_id", "trace": "trace_id"}  # as log stores know them
_MAX_CHARS = 16 << 10
"""Limit of a message and of each value, which may be a stranger's."""
_SHOWN_CHARS = 200
_OWN_WORDS = (401, 403, 404, 429)  # their messages have names and numbers, never a prompt
_OWN = ("time", "level", "logger", "process", "worker", "message", "exception")


class Fields(dict[str, object]):
    """A set of named values in the place of one `%s`: `a=1 b=2.00 c='three words'`."""

    def __str__(self) -> str:
        return " ".join([f"{name}={_shown(value)}" for name, value in self.items()])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    text = f"{value}"
    return text if " " not in text and text.isprintable() else repr(text)


class Seldom:
    """A counter of what strangers can cause, to be logged once a minute."""

    def __init__(self, period_s: float = 60.0) -> None:
        self._period_s = period_s
        self._next = float("-inf")
        self._times = 0

    def times(self, now: float) -> int:
        """Count one; return the number since the last log line, 0 if it is too early."""
        self._times += 1
        if now < self._next:
            return 0
        self._next, times, self._times = now + self._period_s, self._times, 0
        return times


def formatter(log_format: str, process: str, worker: int | None = None) -> logging.Formatter:
    if log_format == "json":
        return JsonLines(process, worker)
    return _TextLines(_TEXT.format("" if worker is None else f"[{worker}]"))


class _TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        return shortened(super().formatMessage(record), _MAX_CHARS)


class JsonLines(logging.Formatter):
    def __init__(self, process: str, worker: int | None = None) -> None:
        super().__init__()
        self._of: dict[str, object] = {"process": process} | (
            {} if worker is None else {"worker": worker}
        )

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **self._of,
            "message": record.getMessage(),
        }
        for name, value in _fields(record):
            if name not in _OWN:
                told.setdefault(
                    _LONGER.get(name, name), round(value, 3) if isinstance(value, float) else value
                )
        told = {
            name: shortened(value, _MAX_CHARS) if isinstance(value, str) else value
            for name, value in told.items()
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> list[tuple[str, object]]:
    if isinstance(record.args, Fields):  # the only value: logging unwraps it
        return list(record.args.items())
    if not isinstance(record.msg, str) or not isinstance(record.args, tuple):
        return []
    found: list[tuple[str, object]] = []
    for name, value in zip(_names(record.msg), record.args, strict=False):
        if isinstance(value, Fields):
            found += value.items()
        elif name:
            found.append((name, value))
    return found


@lru_cache(maxsize=256)
def _names(template: str) -> tuple[str, ...]:
    return tuple(found[1] or "" for found in _CONVERSION.finditer(template) if found[2])


def shown_error(why: KvrelayError) -> str:
    """Return an error for a log line; a client's mistake may quote its prompt, so only its kind."""
    if 400 <= why.status < 500 and why.status not in _OWN_WORDS:
        body = why.body()
        return (
            f"{body.type} param={(body.param or '-')[:_SHOWN_CHARS]!r} "
            f"code={str(body.code or '-')[:_SHOWN_CHARS]!r}"
        )
    return why.message[:_SHOWN_CHARS]
