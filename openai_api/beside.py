"""Work on a request's body: beside the event loop if it is long, one by one if it is very long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

__all__ = ["beside"]

# Tokenizing takes about 1 us per byte: a longer prompt would stall the other streams of this process for that time.
_INLINE_BYTES = 16 << 10
# Read as JSON a body takes up to ten times its bytes of memory, and holds the interpreter's lock for 10 ms per MiB.
_ALONE_BYTES = 1 << 20
_alone = ThreadPoolExecutor(1, "long-bodies")

P = ParamSpec("P")
T = TypeVar("T")


async def beside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work on a body of `size` bytes: at once, on a thread, or on the thread of the very long ones."""
    if size <= _INLINE_BYTES:
        return work(*args, **kwargs)
    thread = _alone if size > _ALONE_BYTES else None
    return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *args, **kwargs))
