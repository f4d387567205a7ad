"""A look at what requests leave for the garbage collector.

Owns its switch while it looks; refuses to know whose requests they are.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable

__all__ = ["left_by"]

_WITHIN_S = 20.0


async def left_by(kinds: tuple[type, ...], ask: Callable[[], Awaitable[object]]) -> Counter[str]:
    """Objects of these types that are there after some requests, and were not before."""

    def kept() -> Counter[str]:
        types = Counter(map(type, gc.get_objects()))  # few: to ask each took ten times as long
        return Counter({each.__name__: n for each, n in types.items() if issubclass(each, kinds)})

    await ask()  # what is made once
    gc.collect()
    gc.freeze()  # else each of these tests looks through all that is left of others
    gc.disable()
    try:
        before, end = kept(), time.monotonic() + _WITHIN_S
        for _ in range(3):
            await ask()
        while (left := kept() - before) and time.monotonic() < end:  # some ends behind its answer
            await asyncio.sleep(0.01)
        return left
    finally:
        gc.enable()
