"""Tasks that run beside a block, and their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kvrelay.wire.errors import without_frames

__all__ = ["cancel_and_wait", "repeat", "running_task"]

_log = logging.getLogger("kvrelay.router")


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


async def repeat(every_s: float, look: Callable[[], Awaitable[None]]) -> None:
    """Look again and again; a mistake of ours in a look does not end that."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await look()
        except Exception:  # noqa: BLE001 - others live by it
            _log.exception("%s failed, and is tried again in %g s", look.__qualname__, every_s)
