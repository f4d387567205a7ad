"""Work on a request's body, beside the event loop if the body is large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["beside"]

# Tokenizing takes about 1 us per byte: a longer prompt would stall the other streams of this process for that time.
_INLINE_BYTES = 16 << 10

P = ParamSpec("P")
T = TypeVar("T")


async def beside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work on a body of `size` bytes: at once if it is small, else on a thread."""
    return work(*args, **kwargs) if size <= _INLINE_BYTES else await asyncio.to_thread(work, *args, **kwargs)
