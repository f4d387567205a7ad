"""Messages, changed: field by field where they are values, byte by byte where they are bytes.

Pure; owns no socket.
"""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import msgspec

__all__ = ["as_json", "as_msgpack", "garbled", "mutated", "noise"]

_DEPTHS = (3, 90, 200, 2000, 60_000)
_MARK, _QUOTED = re.compile(rb"@deep(\d{5})@"), re.compile(rb'"@deep(\d{5})@"')
_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    127,
    2**31,
    2**32,
    2**63,
    2**64 - 1,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "0",
    "a",
    "null",
    "\x00",
    "\u202e\ufeff",
    "é" * 40,
    "\U0001d518",
    "\ud800",
    "%s%n{}",
    "../../../etc/passwd",
    "a" * 300,
    "a" * 40_000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0] * 3000,
    {"a": {"b": []}},
    ["a", 1, None, {}],
)
_KEYS = (
    "",
    "type",
    "id",
    "n",
    "stream",
    "__class__",
    "kv_transfer_params",
    "\x00",
    "é",
    "a" * 2000,
)


def mutated(rng: random.Random, value: Any, never: frozenset[str] = frozenset()) -> Any:
    """A copy with one to three changes. What stands under the keys `never` stays: it would lead off
    this machine.
    """
    tree = {"": copy.deepcopy(value)}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if places := _places(tree, never):
            _change(rng, *rng.choice(places))
    return tree.get("")


def as_json(value: Any) -> bytes:
    """JSON, with NaN and what else Python writes; nests what is marked."""
    written = json.dumps(value, default=repr).encode("utf-8", "surrogatepass")
    return _QUOTED.sub(lambda mark: b"[" * int(mark[1]) + b"]" * int(mark[1]), written)


def as_msgpack(value: Any) -> bytes:
    packed = msgspec.msgpack.encode(_fitting(value))
    return _MARK.sub(
        lambda mark: b"\x91" * int(mark[1]) + b"\xc0", packed.replace(b"\xab@deep", b"@deep")
    )


def garbled(rng: random.Random, message: bytes) -> bytes:
    """The same bytes with a few flipped, lost, doubled or put in; or cut off."""
    out = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        length = rng.choice((1, 2, 4, 9, 64))
        match rng.randrange(6):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del out[at : at + length]
            case 2:
                out[at:at] = out[at : at + length] * rng.choice((1, 2, 50))
            case 3:
                out[at:at] = noise(rng, length)
            case 4:
                del out[at:]
            case _:
                out[at : at + length] = b"\xff" * length
    return bytes(out)


def noise(rng: random.Random, most: int) -> bytes:
    return rng.randbytes(rng.randrange(most + 1))


def _places(tree: Any, never: frozenset[str]) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        container = waiting.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            if key in never:
                continue
            found.append((container, key))
            if isinstance(container[key], (dict, list)):
                waiting.append(container[key])
    return found


def _change(rng: random.Random, container: Any, key: Any) -> None:
    old = container[key]
    match rng.randrange(9):
        case 0:
            del container[key]
        case 1 | 2 | 3:
            container[key] = copy.deepcopy(rng.choice(_ODD))
        case 4:
            container[key] = f"@deep{rng.choice(_DEPTHS):05d}@"
        case 5 if isinstance(old, dict):
            old[rng.choice(_KEYS)] = copy.deepcopy(rng.choice(_ODD))
        case 5 if isinstance(old, list):
            old.extend(
                copy.deepcopy(old) * rng.choice((1, 3, 200)) or [copy.deepcopy(rng.choice(_ODD))]
            )
        case 6 if isinstance(old, int):
            container[key] = old + rng.choice((-1, 1, 2**31, -(2**31), 2**62))
        case 6 if isinstance(old, str):
            container[key] = old[: rng.randrange(len(old) + 1)] + old * rng.choice((0, 1, 100))
        case 7:
            container[key] = [old]
        case _:
            container[key] = {"a": old}


def _fitting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fitting(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fitting(one) for one in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    return value
