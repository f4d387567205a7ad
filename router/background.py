"""Background tasks that outlive a request, or run beside a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kvrelay.wire.errors import without_frames

__all__ = ["BackgroundTasks", "cancel_and_wait", "running_task"]


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


class BackgroundTasks:
    """A set of tasks that each have a deadline and raise nothing."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, deadline_s: float) -> None:
        """Wait for the tasks; cancel those that are late."""
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=deadline_s)
            for task in late:
                task.cancel()
