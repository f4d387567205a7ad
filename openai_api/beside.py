"""Work on a request: beside the event loop if its body is long, and only while its client is there."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from starlette.requests import Request

__all__ = ["LONG_BYTES", "beside", "give_large_blocks_back", "unless_gone"]

# Tokenizing takes about 1 us per byte: a longer prompt would stall the other streams of this
# process for that time.
_INLINE_BYTES = 16 << 10
# Read as JSON a body takes up to ten times its bytes of memory, and holds the interpreter's lock
# for 10 ms per MiB.
LONG_BYTES = 1 << 20
_LARGE_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_alone = ThreadPoolExecutor(1, "long-bodies")

P = ParamSpec("P")
T = TypeVar("T")


def give_large_blocks_back() -> None:
    """Have this process give the memory of long bodies back to the system as soon as it is freed.

    glibc does so from 128 KiB on, but raises that to the size of each block that is freed, up to 32
    MiB (mallopt(3)). What is smaller then stays: four bodies of 16 MiB at once left 300 MiB behind
    in a process of 80.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


async def beside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work on a body of `size` bytes: at once, on a thread, or on the thread of the very long
    ones.
    """
    if size <= _INLINE_BYTES:
        return work(*args, **kwargs)
    thread = _alone if size > LONG_BYTES else None
    return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *args, **kwargs))


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None if the client left first; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        del (
            each,
            task,
            gone,
        )  # or an error that leaves here holds a frame that holds the task that holds the error


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
