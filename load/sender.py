"""Sends a load to a server on time, and records what it answers.

Bodies are made ahead of their time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvrelay.load.client import AnswerReader, http_session, stream
from kvrelay.load.config import BenchConfig
from kvrelay.load.measures import Failure, Record
from kvrelay.load.workloads import Arrival, Prompts, Session, Spelling, Turn, Work, sessions
from kvrelay.wire.json_object import JsonObject

__all__ = ["Load", "Outcome", "Progress", "Sender", "Server", "send_load"]

Turns = Sequence[tuple[int, Turn]]
"""Turns with their numbers."""
Said = list[dict[str, str]]
_START_S = 0.1
_AHEAD = 64
"""Bodies that are ready before they are due."""
_PROGRESS_S, _TICK_S = 0.5, 0.02


@dataclass(frozen=True, slots=True)
class Server:
    """A server's model, its version, and how its tokenizer spells words."""

    model: str
    version: str
    spelling: Spelling


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked: an open loop, or `clients` in a closed one.

    A load ends after `sending_s`, or after `requests` sessions that follow `warm_up_s`. Sessions
    that begin within `judged_s` are waited for. A request is cut `drain_s` after both `sending_s`
    and the time that its targets allow: `first_s`, and `token_s` for each token.
    """

    work: Work
    arrival: Arrival
    seed: str
    clients: int = 0
    requests: int = 0
    sending_s: float = math.inf
    judged_s: float = math.inf
    drain_s: float = math.inf
    first_s: float = 0.0
    token_s: float = 0.0
    warm_up_s: float = 0.0


class Progress(NamedTuple):
    """How many requests were sent, and how many of them have ended or failed."""

    sent: int
    done: int
    failed: int


class Outcome(NamedTuple):
    """All requests of a load in the order in which they were due, and how its client did."""

    records: list[Record]
    lags_s: list[float]


async def send_load(
    config: BenchConfig,
    server: Server,
    load: Load,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Put a load on the servers of a setting, session by session in turn."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # 1,024 are usual, one a request
    sender = Sender(config, server, load)
    with _rare_collections():
        running = asyncio.create_task(sender.run())
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=_PROGRESS_S)
                on_progress(sender.progress)
        finally:
            running.cancel()
            await asyncio.wait({running})
    return running.result()


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


class Sender:
    def __init__(self, config: BenchConfig, server: Server, load: Load) -> None:
        self._config, self._load = config, load
        self._chat = config.endpoint == "chat"
        path = f"/v1/{'chat/completions' if self._chat else 'completions'}"
        self._urls = [url + path for url in config.base_urls]
        self._prompts = Prompts(load.seed, config.vocab_size, server.spelling)
        self._ready: deque[tuple[Session, bytes]] = deque()
        self._left = _limited_sessions(load)
        self._records: list[Record] = []
        self._sent = self._failed = 0
        self._begin = 0.0
        self._lags: list[float] = []
        self._fields: JsonObject = {
            "model": server.model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            self._fields["ignore_eos"] = True

    @property
    def progress(self) -> Progress:
        return Progress(self._sent, len(self._records), self._failed)

    async def run(self) -> Outcome:
        for _ in range(_AHEAD):
            self._prepare_one()
        self._begin = time.monotonic() + _START_S
        async with http_session(self._config.api_key, self._config.headers) as self._http:
            await self._sleep_until(0.0)
            watch = asyncio.create_task(self._watch())
            try:
                await (self._run_closed() if self._load.clients else self._run_open())
            finally:
                watch.cancel()
                await asyncio.wait({watch})
        records = sorted(self._records, key=lambda record: record.due_s)
        return Outcome(records, self._lags)

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._begin

    async def _sleep_until(self, at_s: float) -> None:
        while (left := at_s - self._now_s) > 0:  # uvloop's timers fire up to 1 ms early
            await asyncio.sleep(left)

    def _next(self) -> tuple[Session, bytes] | None:
        if not self._ready:
            self._prepare_one()
        return self._ready.popleft() if self._ready else None

    def _prepare_one(self) -> None:
        if len(self._ready) < _AHEAD and (session := next(self._left, None)) is not None:
            self._ready.append((session, self._body(session.turns[0], self._system(session))))

    def _body(self, turn: Turn, before: Said) -> bytes:
        prompt: JsonObject = (
            {"messages": [*before, {"role": "user", "content": self._prompts.text(turn)}]}
            if self._chat
            else {"prompt": self._prompts.ids(turn)}
        )
        return msgspec.json.encode(prompt | self._fields | {"max_tokens": turn.output})

    def _system(self, session: Session) -> Said:
        system = session.system
        return [{"role": "system", "content": self._prompts.text(system)}] if system else []

    async def _run_open(self) -> None:
        judged: set[asyncio.Task[None]] = set()
        others: set[asyncio.Task[None]] = set()
        try:
            while (following := self._next()) is not None:
                session, body = following
                await self._sleep_until(session.at)
                kept = judged if session.at < self._load.judged_s else others
                kept.add(asyncio.create_task(self._run_session(session, body, session.at)))
                await asyncio.sleep(0)  # it is sent now
                if not self._ready or self._ready[0][0].at > self._now_s:
                    self._prepare_one()  # never while another one is due
            await asyncio.gather(*judged)
        finally:
            for task in (*judged, *others):
                task.cancel()
            await asyncio.gather(*judged, *others, return_exceptions=True)

    async def _run_closed(self) -> None:
        load, loop = self._load, asyncio.get_running_loop()
        counts_from_s = load.warm_up_s if load.requests else math.inf
        left = load.requests

        async def client() -> None:
            nonlocal left
            while self._now_s < load.sending_s and (following := self._next()) is not None:
                due_s = self._now_s
                if due_s >= counts_from_s:
                    left -= 1
                    if left < 0:
                        return
                loop.call_soon(self._prepare_one)  # once this one is sent
                await self._run_session(*following, due_s)

        await asyncio.gather(*(client() for _ in range(load.clients)))

    async def _run_session(self, session: Session, body: bytes, due_s: float) -> None:
        turns = list(enumerate(session.turns))
        await self._run_turns(session, turns, self._system(session), due_s, body)

    async def _run_turns(
        self, session: Session, turns: Turns, said: Said, due_s: float, body: bytes = b""
    ) -> None:
        """Ask turns after what was said; a turn also follows sub-agents that have failed."""
        system = len(said) % 2
        for at, (number, turn) in enumerate(turns):
            if number:
                due_s = self._now_s + turn.think_s
                if due_s > self._load.sending_s:
                    return
                await asyncio.sleep(turn.think_s)
                inner = [
                    self._run_turns(
                        session,
                        list(enumerate(branch.turns, number)),
                        said[: system + 2 * branch.keeps],
                        due_s,
                    )
                    for branch in turn.branches
                ]
                await asyncio.gather(*inner)
                due_s = self._now_s if inner else due_s
                body = self._body(turn, said)
            record = Record(session.number, number, due_s, 0.0, asked_tokens=turn.output)
            more = at + 1 < len(turns)
            answer = AnswerReader(record, keep_text=more)
            await self._send(body, answer)
            if record.failure:
                self._record_unsent(session, turns[at + 1 :])
                return
            if more:
                said += [
                    {"role": "user", "content": self._prompts.text(turn)},
                    {"role": "assistant", "content": answer.text},
                ]

    def _record_unsent(self, session: Session, turns: Turns) -> None:
        due_s = self._now_s
        for number, turn in turns:
            due_s += turn.think_s
            if due_s > self._load.sending_s:
                return
            record = Record(session.number, number, due_s, due_s, asked_tokens=turn.output)
            record.failure = str(Failure.UNSENT)
            record.why = f"turn {number + 1} of {len(session.turns)} was not sent"
            self._sent += 1
            self._keep(record)

    async def _send(self, body: bytes, answer: AnswerReader) -> None:
        record, load, deadline_s = answer.record, self._load, self._config.deadline_s
        self._sent += 1
        record.sent_s = self._now_s
        allowed_s = load.first_s + load.token_s * record.asked_tokens
        cut_s = max(load.sending_s - record.sent_s, allowed_s) + load.drain_s
        url = self._urls[record.session % len(self._urls)]
        try:
            async with asyncio.timeout(max(0.0, min(deadline_s, cut_s))):
                await stream(self._http, url, body, answer, self._begin)
        except TimeoutError:
            if cut_s < deadline_s:
                why = f"not answered {cut_s:.3g} s after it was sent, when the run was over"
                answer.fail(Failure.CUT, why)
            else:
                answer.fail(Failure.DEADLINE, f"not answered within {deadline_s:g} s")
        answer.finish(exact=self._config.ignore_eos)
        self._keep(record)

    def _keep(self, record: Record) -> None:
        self._records.append(record)
        self._failed += bool(record.failure) and record.failure != Failure.CUT

    async def _watch(self) -> None:
        due_s = self._now_s
        while (due_s := due_s + _TICK_S) < self._load.sending_s:
            await asyncio.sleep(max(0.0, due_s - self._now_s))
            self._lags.append(self._now_s - due_s)


def _limited_sessions(load: Load) -> Iterator[Session]:
    drawn = sessions(load.work, load.arrival, load.seed)
    if load.clients:
        return drawn  # a closed loop knows no times but its own
    if load.requests:
        counted = itertools.count()
        return itertools.takewhile(
            lambda each: each.at < load.warm_up_s or next(counted) < load.requests, drawn
        )
    return itertools.takewhile(lambda each: each.at < load.sending_s, drawn)
