"""A vocabulary of bytes, a schema, and a matcher that takes its time."""

from __future__ import annotations

import json
import time

from kvrelay.wire.sampling import Constraint

EOS = 2
VOCAB = 256
# Each id is a byte, but for the end.
TOKENS = [b"<end>" if token == EOS else bytes([token]) for token in range(VOCAB)]
SCHEMA = {
    "type": "object",
    "properties": {
        "näme": {"type": "string", "maxLength": 6},
        "state": {"enum": ["an", "aus", "ünbekannt", 7, None]},
        "place": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": -9, "maximum": 99},
                "y": {"type": "boolean"},
            },
            "required": ["x", "y"],
            "additionalProperties": False,
        },
        "marks": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["näme", "state", "place", "marks"],
    "additionalProperties": False,
}
JSON = Constraint("json", json.dumps(SCHEMA))


def regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern)


class Slow:
    """A matcher whose masks take CPU time."""

    def __init__(self, inner, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def unsafe_compute_mask_ptr(self, *where) -> None:
        until = time.thread_time() + self._seconds
        while time.thread_time() < until:
            pass
        self._inner.unsafe_compute_mask_ptr(*where)
