"""The frames of several prompts' legs as those of one answer. Owns no leg: whoever runs one gives
back what it took.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from kvrelay.openai_api.sse import joined_body
from kvrelay.wire.frames import Frame, FrameKind

__all__ = ["joined_frames"]

_Queue = asyncio.Queue[tuple[int, Frame | None]]


async def joined_frames(
    parts: Sequence[AsyncGenerator[Frame, None]],
    *,
    streams: bool,
    end: Callable[[Sequence[tuple[int, int, int]]], bytes],
) -> AsyncGenerator[Frame, None]:
    """All parts at the same time, their frames as they come; the last END ends all, and so does the
    first ERROR.

    `end` makes the end of a stream of the parts' token counts. Leaving early ends every part.
    """
    queue: _Queue = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(at, part, queue)) for at, part in enumerate(parts)]
    ends: dict[int, Frame] = {}
    try:
        while len(ends) < len(parts):
            at, frame = await queue.get()
            if frame is None:
                await tasks[at]  # it ended without an end: here is why
                continue
            if frame.kind is FrameKind.END:
                ends[at] = frame
                if len(ends) == len(parts):
                    yield _last(frame, [ends[each] for each in range(len(parts))], streams, end)
                    return
                frame = msgspec.structs.replace(
                    frame, kind=FrameKind.TOKENS, payload=frame.payload if streams else b""
                )
            yield frame
            if frame.kind is FrameKind.ERROR:
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _last(
    frame: Frame,
    ends: Sequence[Frame],
    streams: bool,
    end: Callable[[Sequence[tuple[int, int, int]]], bytes],
) -> Frame:
    if not streams:
        return msgspec.structs.replace(frame, payload=joined_body([each.payload for each in ends]))
    return msgspec.structs.replace(
        frame, payload=frame.payload + end([each.usage or (0, 0, 0) for each in ends])
    )


async def _pump(at: int, part: AsyncGenerator[Frame, None], queue: _Queue) -> None:
    """Iterates and closes in one task: a part may hold a deadline that belongs to its task."""
    try:
        async with contextlib.aclosing(part):
            async for frame in part:
                queue.put_nowait((at, frame))
    finally:
        queue.put_nowait((at, None))
