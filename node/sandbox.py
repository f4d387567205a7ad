"""Work that a request could make endless, done in child processes with limits
(node/sandbox_process.py).

That is every prompt that is long or has a template of its own, and every grammar that was not seen
before. A child that reaches a limit means that its request asks for too much: a 400. A child for
which nobody waits any more is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import msgspec

from kvrelay.node.collector import command_of
from kvrelay.node.sandbox_messages import (
    GRAMMAR,
    LENGTH_BYTES,
    PROMPT,
    Answer,
    Broke,
    Compile,
    Compiled,
    Limits,
    Refused,
    Setup,
    Tokenize,
    Tokenized,
    Work,
    framed,
)
from kvrelay.openai_api.json_body import LONG_BYTES
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.errors import Overloaded, RequestBroke, RequestError, Unavailable
from kvrelay.wire.sampling import Constraint

__all__ = ["Sandbox"]

log = logging.getLogger("kvrelay.node")

# Of each kind. More would only share the same cores.
_CHILDREN = 2
_TURN_DEADLINE_S = 10.0
"""Nobody waits longer for a child to begin."""
_WORK_DEADLINE_S = 60.0
"""Only on a machine that has no time left: limits of CPU time come first."""
_END_S = 0.2
_KEPT = 256
"""Outcomes of grammars, so that each is compiled here once."""
_MAX_ANSWER_BYTES = 1 << 27
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

# Not an error itself: each time that one is raised it holds on to the frames, and so to the
# request's body.
Outcome = Constraint | Refused


class _Killed(Exception):
    """A child ended without an answer."""


@dataclass(slots=True)
class _Compiling:
    """A grammar that a child compiles, and how many requests wait for it."""

    outcome: asyncio.Task[Outcome]
    waiting: int = 0


class Sandbox:
    """The children of one node, and the process that forks them. `open` it before anything else,
    `close` it last.
    """

    def __init__(self, turn_deadline_s: float | None = _TURN_DEADLINE_S) -> None:
        """`turn_deadline_s`: how long work may wait for a child to begin; None is for ever."""
        self._turn_deadline_s = turn_deadline_s
        self._setup = b""
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._turns = {
            Tokenize: asyncio.Semaphore(_CHILDREN),
            Compile: asyncio.Semaphore(_CHILDREN),
        }
        self._long_body = asyncio.Semaphore(1)
        self._grammars: OrderedDict[Constraint, Outcome] = OrderedDict()
        self._compiling: dict[Constraint, _Compiling] = {}

    @contextlib.asynccontextmanager
    async def turn_of(self, size: int) -> AsyncIterator[None]:
        """Read one body of more than LONG_BYTES at a time, with what is made of it. Raises
        Overloaded.
        """
        if size <= LONG_BYTES:
            yield
            return
        await self._acquire(self._long_body)
        try:
            yield
        finally:
            self._long_body.release()

    def open(self, setup: Setup) -> None:
        """Set what the process begins with. It is started with the first work, which waits until it
        has loaded.
        """
        self._setup = framed(msgspec.msgpack.encode(setup))

    async def close(self) -> None:
        """End the process."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def token_ids(self, chat: bool, body: bytes, *, fits: bool = True) -> list[list[int]]:
        """The prompts of a chat's or completion's body. `fits`: the context. Raises RequestError,
        Unavailable.
        """
        field = "messages" if chat else "prompt"
        try:
            answer = await self._done(Tokenize(chat, body, fits))
        except _Killed as why:
            raise _too_much(field, "be rendered and tokenized", PROMPT, None) from why
        assert isinstance(answer, Tokenized)
        return answer.prompts

    async def as_lark(self, constraint: Constraint) -> Constraint:
        """The same constraint as a Lark grammar that compiles. Raises RequestError with the reason,
        Unavailable.
        """
        known = self._grammars.get(constraint)
        if known is None:
            known = self._grammars[constraint] = await self._shared(constraint)
            while len(self._grammars) > _KEPT:
                self._grammars.popitem(last=False)
        else:
            self._grammars.move_to_end(constraint)
        if isinstance(known, Refused):
            raise RequestError(known.message, param=known.param, code=known.code)
        return known

    async def _shared(self, constraint: Constraint) -> Outcome:
        """One child for all requests that wait for the same grammar; it ends when the last of them
        leaves.
        """
        compiling = self._compiling.get(constraint)
        if compiling is None:
            compiling = self._compiling[constraint] = _Compiling(
                asyncio.create_task(self._compiled(constraint))
            )
            compiling.outcome.add_done_callback(partial(self._ended, constraint))
        compiling.waiting += 1
        try:
            return await asyncio.shield(compiling.outcome)
        finally:
            compiling.waiting -= 1
            if not compiling.waiting and not compiling.outcome.done():
                del self._compiling[constraint]  # who comes next begins anew
                compiling.outcome.cancel()

    def _ended(self, constraint: Constraint, outcome: asyncio.Task[Outcome]) -> None:
        if (
            compiling := self._compiling.get(constraint)
        ) is not None and compiling.outcome is outcome:
            del self._compiling[constraint]

    async def _compiled(self, constraint: Constraint) -> Outcome:
        try:
            answer = await self._done(Compile(constraint))
        except _Killed:
            why = _too_much(constraint.field, "be compiled", GRAMMAR, "invalid_grammar")
            return Refused(why.message, why.param, why.code)
        except RequestError as why:
            return Refused(why.message, why.param, why.code)
        assert isinstance(answer, Compiled)
        return answer.constraint

    async def _done(self, work: Work) -> Answer:
        """Have a child do it. Raises RequestError, Unavailable, RequestBroke, _Killed."""
        turn = self._turns[type(work)]
        await self._acquire(turn)
        try:
            async with asyncio.timeout(_WORK_DEADLINE_S):
                answer = await self._asked(msgspec.msgpack.encode(work))
        except TimeoutError as why:
            raise Unavailable(
                f"this node could not read the request within {_WORK_DEADLINE_S:g} s"
            ) from why
        finally:
            turn.release()
        if isinstance(answer, Refused):
            raise RequestError(answer.message, param=answer.param, code=answer.code)
        if isinstance(answer, Broke):
            log.error("a child that read a request broke:\n%s", answer.traceback)
            raise RequestBroke
        return answer

    async def _acquire(self, turn: asyncio.Semaphore) -> None:
        try:
            await asyncio.wait_for(turn.acquire(), self._turn_deadline_s)
        except TimeoutError as why:
            raise Overloaded(
                "this node has too many long requests or new grammars to read; try again later"
            ) from why

    async def _asked(self, work: bytes) -> Answer:
        process = await self._ready()
        assert self._control is not None
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:  # hanging up ends the child
            ours.setblocking(False)
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
                theirs.close()
                await loop.sock_sendall(ours, framed(work))
                length = int.from_bytes(await _exactly(ours, LENGTH_BYTES), "big")
                if length > _MAX_ANSWER_BYTES:
                    raise ConnectionError(f"an answer of {length} bytes")
                return _answer.decode(await _exactly(ours, length))
            except BlockingIOError as why:
                raise Overloaded(
                    "this node has too many requests to read; try again later"
                ) from why
            except ConnectionError as why:
                # Its end is known a moment after that of its sockets.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _END_S)
                    raise Unavailable(
                        "the process that reads requests on this node has ended; try again"
                    ) from why
                log.warning("a child that read a request was ended at its limits")
                raise _Killed from why

    async def _ready(self) -> asyncio.subprocess.Process:
        """The process that forks; another one if the last has ended."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                if self._process is not None:
                    log.error("the process that reads requests has ended; another one is started")
                if self._control is not None:
                    self._control.close()
                self._control, theirs = socket.socketpair()
                with theirs:
                    # Children are forked from it, so no library may start threads.
                    one = {
                        "TOKENIZERS_PARALLELISM": "false",
                        "OPENBLAS_NUM_THREADS": "1",
                        "OMP_NUM_THREADS": "1",
                    }
                    self._process = await asyncio.create_subprocess_exec(
                        *command_of("kvrelay.node.sandbox_process"),
                        stdin=theirs.fileno(),
                        env={**child_environ(), **one},
                    )
                self._control.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(self._control, self._setup)
            return self._process


async def _exactly(sock: socket.socket, count: int) -> bytes:
    """Read so many bytes. Raises ConnectionError if there are no more."""
    received = bytearray()
    while len(received) < count:
        chunk = await asyncio.get_running_loop().sock_recv(
            sock, min(count - len(received), 1 << 20)
        )
        if not chunk:
            raise ConnectionError("the other side has hung up")
        received += chunk
    return bytes(received)


def _too_much(field: str, what: str, limits: Limits, code: str | None) -> RequestError:
    return RequestError(
        f"{field} could not {what} within {limits}; make it shorter or simpler",
        param=field,
        code=code,
    )
