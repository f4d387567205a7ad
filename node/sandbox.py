"""A sandbox for work that a request could make endless: child processes with limits.

Long prompts, templates of requests and new grammars go to children (sandbox_process.py). One at a
limit is a 400; one that nobody awaits is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from kvrelay.node.process import python_command
from kvrelay.openai_api.json_body import LONG_BYTES
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.errors import Overloaded, RequestBroke, RequestError, Unavailable
from kvrelay.wire.sampling import Constraint

__all__ = [
    "GRAMMAR",
    "LENGTH_BYTES",
    "PROMPT",
    "Answer",
    "Limits",
    "Sandbox",
    "Setup",
    "Work",
    "framed",
]

log = logging.getLogger("kvrelay.node")

LENGTH_BYTES = 8
_CHILDREN = 2  # of each kind; more would only share the same cores
_START_DEADLINE_S = 10.0
_WORK_DEADLINE_S = 60.0
_EXIT_DEADLINE_S = 0.2
_MAX_COMPILED = 256
_MAX_ANSWER_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class Limits:
    """A child's limits; `memory_bytes` come on top of what it starts with."""

    cpu_s: int
    memory_bytes: int
    stack_bytes: int

    def __str__(self) -> str:
        memory, stack = self.memory_bytes >> 20, self.stack_bytes >> 20
        return f"{self.cpu_s} s of CPU time, {memory} MiB of memory and {stack} MiB of stack"


# A schema of 1,000 properties takes 0.2 s and 14 MiB to try out. The engine compiles with 8 times
# the stack.
GRAMMAR = Limits(cpu_s=2, memory_bytes=256 << 20, stack_bytes=2 << 20)
# Tokenizing takes about 1 us and 60 bytes of memory per byte of text.
PROMPT = Limits(cpu_s=10, memory_bytes=1 << 30, stack_bytes=8 << 20)


class Setup(msgspec.Struct, frozen=True):
    model: str
    chat_template: str | None
    trusts_request_templates: bool
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]


class Work(msgspec.Struct, frozen=True):
    body: bytes = b""
    chat: bool = False
    fits: bool = True
    constraint: Constraint | None = None


class Answer(msgspec.Struct, frozen=True):
    """An answer of a child: what was asked for, a refusal, or the traceback with which it broke."""

    prompts: list[list[int]] = []
    constraint: Constraint | None = None
    refusal: tuple[str, str | None, str | None] | None = None
    """Message, field and code."""
    traceback: str = ""


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


class Sandbox:
    """A sandbox. Work waits `start_deadline_s` for a child to begin, or forever."""

    def __init__(self, start_deadline_s: float | None = _START_DEADLINE_S) -> None:
        self._start_deadline_s = start_deadline_s
        self._setup = b""
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._tokenizing = asyncio.Semaphore(_CHILDREN)
        self._compiling = asyncio.Semaphore(_CHILDREN)
        self._long_body = asyncio.Semaphore(1)
        # Not exceptions: each raise adds frames, which hold the request's body.
        self._compiled: dict[Constraint, Answer] = {}

    def open(self, setup: Setup) -> None:
        self._setup = framed(msgspec.msgpack.encode(setup))

    async def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def body_slot(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Let one long body be read at a time. Entering it raises Overloaded."""
        return self._turn(self._long_body) if size > LONG_BYTES else contextlib.nullcontext()

    async def token_ids(self, chat: bool, body: bytes, *, fits: bool = True) -> list[list[int]]:
        """Return the prompts of a body. Raises RequestError, Unavailable."""
        async with self._turn(self._tokenizing):
            return _accepted(await self._run(Work(body, chat, fits))).prompts

    async def as_lark(self, constraint: Constraint) -> Constraint:
        """Return a constraint as a Lark grammar that compiles. Raises RequestError, Unavailable."""
        answer = self._compiled.pop(constraint, None)
        if answer is None:
            async with self._turn(self._compiling):
                # Another request may have waited for the same grammar before.
                answer = self._compiled.pop(constraint, None) or await self._run(
                    Work(constraint=constraint)
                )
        self._compiled[constraint] = answer
        if len(self._compiled) > _MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        lark = _accepted(answer).constraint
        assert lark is not None
        return lark

    async def _run(self, work: Work) -> Answer:
        try:
            async with asyncio.timeout(_WORK_DEADLINE_S):
                answer = await self._ask_child(msgspec.msgpack.encode(work))
        except TimeoutError as why:
            raise Unavailable(
                f"this node could not read the request within {_WORK_DEADLINE_S:g} s"
            ) from why
        if answer is None:
            return _too_much(work)
        if answer.traceback:
            log.error("a child that read a request broke:\n%s", answer.traceback)
            raise RequestBroke
        return answer

    @contextlib.asynccontextmanager
    async def _turn(self, slot: asyncio.Semaphore) -> AsyncIterator[None]:
        try:
            await asyncio.wait_for(slot.acquire(), self._start_deadline_s)
        except TimeoutError as why:
            raise Overloaded(
                "this node has too many long requests or new grammars to read; try again later"
            ) from why
        try:
            yield
        finally:
            slot.release()

    async def _ask_child(self, work: bytes) -> Answer | None:
        """Return the answer of a child, or None if it was ended at its limits."""
        process = await self._running()
        assert self._control is not None
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:  # closing our end kills the child
            ours.setblocking(False)
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
                theirs.close()
                await loop.sock_sendall(ours, framed(work))
                length = int.from_bytes(await _receive(ours, LENGTH_BYTES), "big")
                if length > _MAX_ANSWER_BYTES:
                    raise ConnectionError(f"an answer of {length} bytes")
                return msgspec.msgpack.decode(await _receive(ours, length), type=Answer)
            except BlockingIOError as why:
                raise Overloaded(
                    "this node has too many requests to read; try again later"
                ) from why
            except ConnectionError as why:
                # The end of the process is known a moment after that of its sockets.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _EXIT_DEADLINE_S)
                    raise Unavailable(
                        "the process that reads requests on this node has ended; try again"
                    ) from why
                log.warning("a child that read a request was ended at its limits")
                return None

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                if self._process is not None:
                    log.error("the process that reads requests has ended; another one is started")
                if self._control is not None:
                    self._control.close()
                self._control, theirs = socket.socketpair()
                with theirs:
                    # Children are forked from it, so no library may start threads.
                    no_threads = {
                        "TOKENIZERS_PARALLELISM": "false",
                        "OPENBLAS_NUM_THREADS": "1",
                        "OMP_NUM_THREADS": "1",
                    }
                    process = await asyncio.create_subprocess_exec(
                        *python_command("kvrelay.node.sandbox_process"),
                        stdin=theirs.fileno(),
                        env={**child_environ(), **no_threads},
                    )
                self._control.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(self._control, self._setup)
                self._process = process  # a caller that leaves before that leaves half a setup
            return self._process


async def _receive(sock: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        chunk = await asyncio.get_running_loop().sock_recv(
            sock, min(count - len(received), 1 << 20)
        )
        if not chunk:
            raise ConnectionError("the other side has hung up")
        received += chunk
    return bytes(received)


def _too_much(work: Work) -> Answer:
    if work.constraint is not None:
        field, what, limits, code = work.constraint.field, "compiled", GRAMMAR, "invalid_grammar"
    else:
        field, code = "messages" if work.chat else "prompt", None
        what, limits = "rendered and tokenized", PROMPT
    why = f"{field} could not be {what} within {limits}; make it shorter or simpler"
    return Answer(refusal=(why, field, code))


def _accepted(answer: Answer) -> Answer:
    if answer.refusal is not None:
        message, field, code = answer.refusal
        raise RequestError(message, param=field, code=code)
    return answer
