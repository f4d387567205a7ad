"""One end of the connection between a worker process and its parent: a pair of Unix sockets that only they have.

Owns numbers, deadlines and the end of the connection. What is said is router/workers/messages.py's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from router.workers.messages import MAX_BYTES, Answer, Frames, FromParent, FromWorker, LinkBroken, packed
from wire.errors import KvrelayError, Unavailable

__all__ = ["ASK_DEADLINE_S", "Handle", "Link"]

ASK_DEADLINE_S = 5.0

_log = logging.getLogger("kvrelay.router")
_A = TypeVar("_A", bound=Answer)

Handle = Callable[[Any, int], Answer | Awaitable[Answer] | None]
"""What to do with a message and its number; what it returns, or what that comes to, is the answer."""


class Link(asyncio.Protocol):
    """See the module. `kind` is what the other end says; `handle` is called for each in order; `lost` once."""

    def __init__(self, kind: Any, handle: Handle, lost: Callable[[], None]) -> None:
        self._frames = Frames(kind)
        self._handle, self._lost = handle, lost
        self._transport: asyncio.Transport | None = None
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._number = 0
        self._answering: set[asyncio.Future[None]] = set()

    @classmethod
    async def over(cls, end: socket.socket, kind: Any, handle: Handle, lost: Callable[[], None]) -> Link:
        """A link over this end of a pair."""
        _, link = await asyncio.get_running_loop().create_connection(lambda: cls(kind, handle, lost), sock=end)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The pair is connected already."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by type

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        self._transport = None
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Unavailable("the processes of this router have lost each other; try again"))
        for answering in list(self._answering):
            answering.cancel()
        self._lost()

    def data_received(self, data: bytes) -> None:
        """Handle what is complete."""
        try:
            for number, message in self._frames.take(data):
                self._take(number, message)
        except LinkBroken as why:
            _log.error("the link between the router's processes is cut: %s", why.message)
            self.close()

    def tell(self, message: FromWorker | FromParent) -> None:
        """Say something that wants no answer; nothing happens if nobody is there. Raises LinkBroken if too long."""
        self._write(0, message)

    def next_number(self) -> int:
        """For `ask`, if what it asks for is to be named later."""
        self._number += 1
        return self._number

    async def ask(
        self, message: FromWorker | FromParent, kind: type[_A], deadline_s: float = ASK_DEADLINE_S, number: int = 0
    ) -> _A:
        """The answer, which is of this kind. Raises Unavailable if none comes."""
        number = number or self.next_number()
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._write(number, message):
                raise Unavailable("the processes of this router have lost each other; try again")
            async with asyncio.timeout(deadline_s):
                answer = await asked
        except TimeoutError as why:
            raise Unavailable(f"the router's own processes did not answer within {deadline_s:g} s; try again") from why
        finally:
            del self._asked[number]
        if not isinstance(answer, kind):
            self.close()
            raise LinkBroken(f"{type(message).__name__} is answered with {type(answer).__name__}")
        return answer

    def backlog(self) -> int:
        """Bytes that the other end has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """End it; what was said is sent first."""
        if self._transport is not None:
            self._transport.close()

    def _write(self, number: int, message: FromWorker | FromParent) -> bool:
        if self._transport is None or self._transport.is_closing():
            return False
        if self.backlog() > 4 * MAX_BYTES:
            _log.error("a process of this router does not listen to the others")
            self._transport.abort()
            return False
        self._transport.write(packed(number, message))
        return True

    def _take(self, number: int, message: Any) -> None:
        if number < 0:
            asked = self._asked.get(-number)  # nobody waits for it any more: it came too late
            if asked is not None and not asked.done():
                asked.set_result(message)
            return
        answer = self._handle(message, number)
        if number == 0 or answer is None:
            return
        if isinstance(answer, Awaitable):
            task = asyncio.ensure_future(self._answer(number, answer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            self._write(-number, answer)

    async def _answer(self, number: int, coming: Awaitable[Answer]) -> None:
        try:
            self._write(-number, await coming)
        except KvrelayError as why:  # whoever asked has a deadline
            _log.warning("a question of one of the router's processes is not answered: %s", why.message)
