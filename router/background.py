"""Tasks that run beside a block, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kvrelay.wire.errors import without_frames

__all__ = ["cancel_and_wait", "running_task"]


async def cancel_and_wait(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that still run and wait for them; drop what they raise."""
    for task in tasks:
        task.cancel()
    # Else the event loop complains of unseen errors, and tasks keep the traceback.
    for why in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(why, BaseException):
            without_frames(why)


@asynccontextmanager
async def running_task(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel_and_wait([task])
