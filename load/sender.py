"""One process of the client (`python -m kvrelay.load.sender`): sends its share of a load on time.

load/conductor.py talks to it by its standard input and output; when that input ends, it ends.
Bodies are written ahead of their time, so that sending one is a single write.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import uvloop

from kvrelay.load.client import Answer, Connections
from kvrelay.load.records import (
    Failure,
    ProcessReport,
    Progress,
    Record,
    Share,
    pack,
    size_of,
)
from kvrelay.load.sessions import Prompts, Session, Turn, body, sessions

_AHEAD = 64
"""Bodies that are ready before they are due."""
_TELL_S, _TICK_S = 0.5, 0.02


class Sender:
    """The share of one process."""

    def __init__(self, share: Share) -> None:
        self._asking, self._load, self._share = share.asking, share.load, share
        asking = share.asking
        servers = (asking.url, *asking.others)
        self._servers = [
            Connections(url, asking.api_key, asking.chat, asking.headers) for url in servers
        ]
        self._prompts = Prompts(share.load.seed, asking.vocab_size, asking.spelling)
        self._ready: deque[tuple[Session, bytes]] = deque()
        self._left = self._own()
        self._records: list[Record] = []
        self._sent = self._done = self._failed = self._tokens = 0
        self._begin = self._cpu_share = 0.0
        self._lags: list[float] = []
        stream_options: dict[str, Any] = {"include_usage": True}
        if asking.usage_per_chunk:
            stream_options["continuous_usage_stats"] = True
        self._asks: dict[str, Any] = {
            "temperature": 0,
            "stream": True,
            "stream_options": stream_options,
        }
        if asking.ignore_eos:
            self._asks["ignore_eos"] = True

    def _own(self) -> Iterator[Session]:
        load = self._load
        every = sessions(load.work, load.arrival, load.seed)
        if load.requests and not load.clients:
            number = itertools.count()
            every = itertools.takewhile(
                lambda each: each.at < load.warm_up_s or next(number) < load.requests, every
            )
        mine = itertools.islice(every, self._share.index, None, self._share.of)
        if load.clients:
            return mine  # a closed loop knows no times but its own
        return itertools.takewhile(lambda session: session.at < load.sending_s, mine)

    @property
    def progress(self) -> Progress:
        return Progress(self._sent, self._done, self._failed, self._tokens)

    def prepare(self) -> None:
        """Write bodies ahead."""
        for _ in range(_AHEAD):
            self._write_one()

    def _next(self) -> tuple[Session, bytes] | None:
        if not self._ready:
            self._write_one()
        return self._ready.popleft() if self._ready else None

    def _write_one(self) -> None:
        if len(self._ready) < _AHEAD and (session := next(self._left, None)) is not None:
            self._ready.append((session, self._body(session.turns[0], [])))

    def _body(self, turn: Turn, before: list[dict[str, Any]]) -> bytes:
        asking = self._asking
        if asking.chat:
            messages = [*before, {"role": "user", "content": self._prompts.text(turn)}]
            return body(messages, asking.model, turn.output, self._asks)
        prompt = self._prompts.text(turn) if turn.text else self._prompts.ids(turn)
        return body(prompt, asking.model, turn.output, self._asks)

    async def run(self, begin: float) -> ProcessReport:
        """Send all of it from `begin` on (monotonic seconds)."""
        self._begin = begin
        while (left := begin - time.monotonic()) > 0:  # uvloop's timers fire up to 1 ms early
            await asyncio.sleep(left)
        watch = asyncio.create_task(self._watch())
        await (self._closed() if self._load.clients else self._open())
        watch.cancel()
        await asyncio.wait({watch})
        for connections in self._servers:
            connections.close()
        return ProcessReport(self._records, self._cpu_share, self._lags)

    async def _open(self) -> None:
        judged: set[asyncio.Task[None]] = set()
        others: set[asyncio.Task[None]] = set()
        while (following := self._next()) is not None:
            session, first = following
            if (left := self._begin + session.at - time.monotonic()) > 0:
                await asyncio.sleep(left)
            task = asyncio.create_task(self._session(session, first, session.at))
            kept = judged if session.at < self._load.judged_s else others
            kept.add(task)
            task.add_done_callback(partial(_forget, kept))
            await asyncio.sleep(0)  # it is sent now
            if not self._ready or self._begin + self._ready[0][0].at > time.monotonic():
                self._write_one()  # never while another one is due
        await asyncio.gather(*judged)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _closed(self) -> None:
        own, counted = map(self._part, (self._load.clients, self._load.requests))
        ends, loop = self._begin + self._load.sending_s, asyncio.get_running_loop()
        counts_from = self._load.warm_up_s if self._load.requests else math.inf

        async def client() -> None:
            nonlocal counted
            while time.monotonic() < ends and (following := self._next()) is not None:
                due = time.monotonic() - self._begin
                if due >= counts_from:
                    counted -= 1
                    if counted < 0:
                        return
                loop.call_soon(self._write_one)  # once this one is sent
                await self._session(*following, due)

        await asyncio.gather(*(client() for _ in range(own)))

    def _part(self, count: int) -> int:
        return count // self._share.of + (self._share.index < count % self._share.of)

    async def _session(self, session: Session, first: bytes, due: float) -> None:
        said: list[dict[str, Any]] = []
        for number, turn in enumerate(session.turns):
            if number:
                due = time.monotonic() - self._begin + turn.think_s
                if due > self._load.sending_s:
                    return
                await asyncio.sleep(turn.think_s)
            request = self._body(turn, said) if number else first
            record = Record(session.number, number, due, 0.0, asked_tokens=turn.output)
            more = number + 1 < len(session.turns)
            answer = Answer(keep=more)
            await self._ask(request, record, answer)
            if record.failure:
                self._unsent(session, number + 1)
                return
            if more:
                said += [
                    {"role": "user", "content": self._prompts.text(turn)},
                    {"role": "assistant", "content": answer.text},
                ]

    def _unsent(self, session: Session, begin: int) -> None:
        due = time.monotonic() - self._begin
        for number in range(begin, len(session.turns)):
            due += session.turns[number].think_s
            if due > self._load.sending_s:
                return
            record = Record(
                session.number, number, due, due, asked_tokens=session.turns[number].output
            )
            record.failure, record.why = (
                str(Failure.UNSENT),
                f"turn {number + 1} of {len(session.turns)} was not sent",
            )
            self._sent += 1
            self._over(record)

    async def _ask(self, request: bytes, record: Record, answer: Answer) -> None:
        self._sent += 1
        sent = time.monotonic()
        record.sent_s = sent - self._begin
        load = self._load
        has_s = load.first_s + load.token_s * record.asked_tokens
        cut = max(self._begin + load.sending_s - sent, has_s) + load.drain_s
        try:
            async with asyncio.timeout(max(0.0, min(self._asking.deadline_s, cut))):
                server = self._servers[record.session % len(self._servers)]
                await server.ask(
                    request, answer, record.asked_tokens, exact=self._asking.ignore_eos
                )
        except TimeoutError:
            if cut < self._asking.deadline_s:
                answer.fail(
                    Failure.CUT,
                    f"not answered {cut:.3g} s after it was sent, when the run was over",
                )
            else:
                answer.fail(Failure.DEADLINE, f"not answered within {self._asking.deadline_s:g} s")
        answer.into(record, self._begin)
        self._over(record)

    def _over(self, record: Record) -> None:
        self._records.append(record)
        self._done += 1
        self._failed += bool(record.failure) and record.failure != Failure.CUT
        self._tokens += record.output_tokens

    async def _watch(self) -> None:
        wall, cpu = time.monotonic(), time.process_time()
        due, ends = wall, self._begin + self._load.sending_s
        try:
            while (due := due + _TICK_S) < ends:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._lags.append(time.monotonic() - due)
        finally:
            self._cpu_share = (time.process_time() - cpu) / max(1e-9, time.monotonic() - wall)


def _forget(kept: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    if task.cancelled() or task.exception() is None:
        kept.discard(task)


async def _serve() -> None:
    reader, stdout = await _pipes()

    async def hear() -> bytes:
        return await reader.readexactly(size_of(await reader.readexactly(4)))

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # 1,024 are usual, and each answer is a connection
    sender = Sender(msgspec.msgpack.decode(await hear(), type=Share))
    sender.prepare()
    stdout.write(pack(sender.progress))
    begin = msgspec.msgpack.decode(await hear(), type=float)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    running = asyncio.create_task(sender.run(begin))
    gone = asyncio.create_task(reader.read(1))
    while not running.done():
        await asyncio.wait({running, gone}, timeout=_TELL_S, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            return
        stdout.write(pack(sender.progress))
    stdout.transport.set_write_buffer_limits(
        0
    )  # or drain() returns with 64 KiB left, which end with the process
    stdout.write(pack(await running))
    await stdout.drain()
    stdout.close()
    gone.cancel()


async def _pipes() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", buffering=0)
    )
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, output)
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


if __name__ == "__main__":
    with contextlib.suppress(asyncio.IncompleteReadError, BrokenPipeError, KeyboardInterrupt):
        uvloop.run(_serve())
    sys.stderr.flush()
    os._exit(0)
