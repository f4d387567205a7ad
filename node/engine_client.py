"""Client of the engine process: starts it, sends requests, and queues their updates."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from kvrelay.node.child import REPORT_S, STOP_DEADLINE_S, Child
from kvrelay.node.process import describe_exit
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.engine_messages import (
    AdapterAnswer,
    AskStats,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    LoadAdapter,
    Order,
    RequestUpdate,
    StepOutputs,
    Submit,
    ToEngine,
)
from kvrelay.wire.errors import DeadlineExceeded, EngineDead, Overloaded
from kvrelay.wire.kv_events import CacheChanges
from kvrelay.wire.outputs import Load
from kvrelay.wire.transfer import Source

__all__ = ["EngineClient"]

log = logging.getLogger("kvrelay.node")


@dataclass(slots=True)
class Updates:
    _engine: EngineClient
    _queue: asyncio.Queue[RequestUpdate | None]
    _live: set[str]
    """Ids of requests that have not ended."""
    _overdue: asyncio.TimerHandle

    async def next(self) -> tuple[RequestUpdate, Load]:
        """Return the next update of any request. Raises EngineDead, TimeoutError."""
        while True:
            update = await self._queue.get()
            if update is None:
                raise self._engine.dead() if self._engine.ended.is_set() else TimeoutError
            if update.request_id not in self._live:
                continue  # it was aborted meanwhile
            if update.finish is not None:
                self._live.remove(update.request_id)
                self._engine.forget(update.request_id)
            return update, self._engine.load

    def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._live.remove(request_id)
            self._engine.abort(request_id)

    def close(self) -> None:
        self._overdue.cancel()
        for request_id in list(self._live):
            self.abort(request_id)


class EngineClient:
    """A client of one engine process. If that ends, each waiting request gets EngineDead once."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._queues: dict[str, asyncio.Queue[RequestUpdate | None]] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        """Answers that are due, by the number of their question."""
        self._loads: dict[int, float] = {}
        """Adapter loads that are due, with their deadlines: the engine is silent while it reads."""
        self._asked = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._child: Child | None = None
        self.failure: str | None = None
        self.info: EngineReady | None = None
        self.stats = EngineStats(Load())
        self.load = Load()
        self.submitted = 1
        """The number of the last request submitted; the first is 2."""
        self._spilled: deque[tuple[int, float]] = deque()
        """Prompts that a prefill node could compute: number of the request, milliseconds."""
        self._heard_at = time.monotonic()
        self.on_cache_changes: Callable[[CacheChanges], None] | None = None
        self.tier: Callable[[], Source | None] = lambda: None
        """Returns where to ask for KV that other sources have not."""
        self.ended = asyncio.Event()
        self._ready_or_ended = asyncio.Event()

    async def start(self) -> None:
        environment = {
            # Huge pages: a step takes 53 ms instead of 57, with fewer TLB misses. Freed buffers are
            # kept: mapping them anew in every layer costs another 2 %.
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1073741824"
            ":glibc.malloc.mmap_threshold=33554432",
            "OMP_NUM_THREADS": str(self._config.engine.threads_on(len(os.sched_getaffinity(0)))),
            # Threads that fill masks recurse as compilers do.
            "RUST_MIN_STACK": str(16 << 20),
        }
        name = "kvrelay.node.engine_process"
        self._child = child = await Child.start(name, self._config, environment)
        child.run(self._read(child), self._watch(child))

    async def ready(self, deadline_s: float) -> EngineReady:
        """Return the engine's facts. Raises EngineDead."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._ready_or_ended.wait()
        except TimeoutError as why:
            raise EngineDead(f"the engine was not ready within {deadline_s:g} s") from why
        if self.info is None:
            raise self.dead()
        return self.info

    def start_requests(self, submits: Sequence[Submit], deadline_s: float) -> Updates:
        """Run requests of one prompt. Raises EngineDead, Overloaded."""
        if self.ended.is_set():
            raise self.dead()
        spilled_ms = self._spilled_ms(submits[0]) if submits else 0.0
        queue: asyncio.Queue[RequestUpdate | None] = asyncio.Queue()
        for submit in submits:
            self._queues[submit.request_id] = queue
            self._submit(submit)
        if spilled_ms:
            self._spilled.append((self.submitted, spilled_ms))
        # One timer for all updates; one for each would be a tenth of what a token costs here.
        overdue = asyncio.get_running_loop().call_later(deadline_s, queue.put_nowait, None)
        return Updates(self, queue, {submit.request_id for submit in submits}, overdue)

    def abort(self, request_id: str) -> None:
        self.forget(request_id)
        self.send(Order("abort", request_id))

    def forget(self, request_id: str) -> None:
        del self._queues[request_id]

    def dead(self) -> EngineDead:
        return EngineDead(self.failure or "the engine process of this node has ended")

    def give_up(self, submit: Submit) -> None:
        """Release what a request's ticket holds elsewhere, without running it."""
        self._submit(submit)
        self.send(Order("abort", submit.request_id))

    async def ask(
        self, question: Callable[[int], ToEngine], deadline_s: float, *, failed: str
    ) -> Any:
        """Return the answer to a numbered question.

        Raises EngineDead, and DeadlineExceeded with what has `failed`.
        """
        if self.ended.is_set():
            raise self.dead()
        self._asked += 1
        number = self._asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            message = question(number)
            if isinstance(message, LoadAdapter):
                self._loads[number] = time.monotonic() + deadline_s
            self.send(message)
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as why:
            raise DeadlineExceeded(f"{failed} within {deadline_s:g} s") from why
        finally:
            del self._answers[number]

    async def fresh_stats(self, deadline_s: float) -> EngineStats:
        """Return statistics after all that was sent. Raises EngineDead, DeadlineExceeded."""
        failed = "the engine process did not tell its numbers"
        stats: EngineStats = await self.ask(AskStats, deadline_s, failed=failed)
        return stats

    def pid(self) -> int:
        return -1 if self._child is None else self._child.process.pid

    def silent_s(self) -> float:
        """Return the seconds without a message, or since a due adapter load's deadline."""
        return max(0.0, time.monotonic() - max([self._heard_at, *self._loads.values()]))

    def queue_depth(self) -> int:
        return len(self._queues)

    async def stop(self) -> None:
        if self._child is None:
            return
        if self._child.alive:
            await self._tell_end(self._child.process)
        await self._child.close()

    async def _tell_end(self, process: asyncio.subprocess.Process) -> None:
        if self.info is None:
            process.terminate()  # still loading: it reads no messages
        self.send(Order("shutdown"))
        try:
            await asyncio.wait_for(process.wait(), STOP_DEADLINE_S)
        except TimeoutError:
            log.warning("the engine process did not end within %g s, killing it", STOP_DEADLINE_S)
            self.failure = (
                self.failure or "the engine process did not end when it was told to, and was killed"
            )

    def _submit(self, submit: Submit) -> None:
        self.submitted += 1
        if submit.fetch is None and submit.fork_of is None and (tier := self.tier()) is not None:
            submit = replace(submit, sources=[*submit.sources, tier])
        self.send(submit)

    def _spilled_ms(self, submit: Submit) -> float:
        """Return the milliseconds of a prompt that a prefill node could compute, else 0.

        Raises Overloaded if the engine has less time for such prompts.
        """
        costs = None if self.info is None else self.info.costs
        if not submit.spill_tokens or costs is None:
            return 0.0
        start = len(submit.prompt_token_ids) + len(submit.generated) - submit.spill_tokens
        pairs = submit.spill_tokens * (start + submit.spill_tokens / 2)
        ms = costs.prompts_ms(submit.spill_tokens, pairs) * self.load.pace
        while self._spilled and self._spilled[0][0] <= self.load.legs:
            self._spilled.popleft()
        left_ms = self.load.spill_ms - sum(each for _, each in self._spilled)
        if ms > left_ms:
            raise Overloaded(
                f"the prompt takes {ms:.0f} ms, and this node now has {max(0.0, left_ms):.0f} ms "
                f"for prompts that a prefill node can compute; send it to one",
                code="spill_refused",
            )
        return ms

    def send(self, message: ToEngine) -> None:
        if self._child is not None and not self.ended.is_set():
            self._child.send(self._encoder.encode(message))

    async def _read(self, child: Child) -> None:
        while True:
            raw = await child.socket.recv()
            self._heard_at = time.monotonic()
            match self._decoder.decode(raw):
                case StepOutputs(updates, load):
                    self.load = load
                    for update in updates:
                        self._queue_update(update)
                case EngineStats() as stats:
                    self.stats, self.load = stats, stats.load
                    self._answer(stats.asked, stats)
                case CacheChanges() as changes:
                    if self.on_cache_changes is not None:
                        self.on_cache_changes(changes)
                case AdapterAnswer() as answer:
                    self._loads.pop(answer.asked, None)
                    self._answer(answer.asked, answer)
                case EngineReady() as info:
                    self.info = info
                    child.remove_folder()  # they are connected, and a kill leaves nothing
                    self._ready_or_ended.set()
                case EngineFailed(message):
                    # The process may end slowly or never after a GPU failure.
                    self._end(message)

    def _queue_update(self, update: RequestUpdate) -> None:
        if (queue := self._queues.get(update.request_id)) is not None:  # else it was aborted
            queue.put_nowait(update)

    def _answer(self, number: int, message: FromEngine) -> None:
        asked = self._answers.get(number)
        if asked is not None and not asked.done():
            asked.set_result(message)

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        await asyncio.sleep(REPORT_S)
        self._end(f"the engine process ended ({describe_exit(code)})")

    def _end(self, failure: str) -> None:
        if self.ended.is_set():
            return
        self.failure = self.failure or failure
        self.ended.set()
        self._ready_or_ended.set()
        for queue in self._queues.values():
            queue.put_nowait(None)
        for asked in self._answers.values():
            if not asked.done():
                asked.set_exception(self.dead())
