"""The HTTP side of the engine process: starts it, sends it requests, hands its updates to whoever
waits for them.

One asyncio task reads the zmq pair; each live request has a queue. When the engine process ends, or
says that it does, every waiting request gets EngineDead, once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from kvrelay.node.collector import command_of
from kvrelay.node.last_words import fate_of
from kvrelay.node.parent import PARENT_PID
from kvrelay.node.private_files import ProcessFolder
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.engine_messages import (
    Abort,
    AdapterLoaded,
    AdapterRefused,
    AskStats,
    CacheChanges,
    EngineFailed,
    EngineReady,
    EngineStats,
    FetchProbe,
    FromEngine,
    LoadAdapter,
    OfferProbe,
    ProbeFetched,
    ProbeOffered,
    ProbeRefused,
    Profile,
    Profiled,
    Release,
    Renew,
    RequestUpdate,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from kvrelay.wire.errors import DeadlineExceeded, EngineDead, NodeFailed, Overloaded
from kvrelay.wire.outputs import Load

__all__ = ["EngineClient"]

log = logging.getLogger("kvrelay.node")

T = TypeVar("T")
K = TypeVar("K", str, int)

STOP_DEADLINE_S = 5.0


class Updates:
    """What the engine says of some requests, as it comes. `close` in any case: it aborts those that
    have not ended.
    """

    def __init__(
        self,
        engine: EngineClient,
        queue: asyncio.Queue[RequestUpdate | None],
        request_ids: set[str],
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._live = request_ids

    async def next(self) -> tuple[RequestUpdate, Load]:
        """The next update of any of them. Raises EngineDead if the engine process ends before they
        have.
        """
        while True:
            update = await self._queue.get()
            if update is None:
                raise EngineDead(self._engine.why_ended())
            if update.request_id not in self._live:
                continue  # it was stopped meanwhile
            if update.finish is not None:
                self._live.remove(update.request_id)
                self._engine.forget(update.request_id)
            return update, self._engine.load

    def stop(self, request_id: str) -> None:
        """Abort one of them, if it has not ended."""
        if request_id in self._live:
            self._live.remove(request_id)
            self._engine.abort(request_id)

    def close(self) -> None:
        """Abort all that have not ended."""
        for request_id in list(self._live):
            self.stop(request_id)


class EngineClient:
    """Life: `start`, `ready` (an awaitable EngineReady), any number of `start_requests`, `stop`."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._queues: dict[str, asyncio.Queue[RequestUpdate | None]] = {}
        self._probes: dict[str, asyncio.Future[ProbeOffered | ProbeFetched | ProbeRefused]] = {}
        self._loads: dict[str, asyncio.Future[AdapterLoaded | AdapterRefused]] = {}
        self._stats_asked: dict[int, asyncio.Future[EngineStats]] = {}
        self._profiles: dict[int, asyncio.Future[Profiled]] = {}
        self._asked = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._folder: ProcessFolder | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: str | None = None
        self.info: EngineReady | None = None
        self.stats = EngineStats(Load())
        self.load = Load()
        self.legs = 1
        """Requests that the engine process was sent, and one: each has its number in this count."""
        self._spilled: deque[tuple[int, float]] = deque()
        """Numbers of those whose prompts a prefill node could compute, and their milliseconds."""
        self.heard_at = time.monotonic()
        self.on_changes: Callable[[CacheChanges], None] | None = None
        """Told what the prefix cache holds. To be set before the first request."""
        self.ended = asyncio.Event()
        self._ready = asyncio.Event()
        self._failed = asyncio.Event()

    async def start(self) -> None:
        """Start the engine process; returns before it is ready. Raises ConfigError."""
        self._folder = ProcessFolder()
        try:
            await self._start(f"ipc://{self._folder.path / 'engine'}")
        except BaseException:
            self._folder.close()
            raise
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def _start(self, endpoint: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        threads = str(self._config.engine.threads_on(os.cpu_count() or 1))
        environment = {
            # Huge pages: the same step takes 53 ms instead of 57, weights are streamed through
            # fewer TLB entries. And freed buffers are kept: mapping the same megabytes anew in
            # every layer costs another 2 %.
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1073741824"
            ":glibc.malloc.mmap_threshold=33554432",
            "OMP_NUM_THREADS": threads,
            # Of the threads that fill masks, which recurse into grammars as the compiler does.
            "RUST_MIN_STACK": str(16 << 20),
            **child_environ(),
            PARENT_PID: str(os.getpid()),
        }
        self._process = await asyncio.create_subprocess_exec(
            *command_of("kvrelay.node.engine_process"),
            endpoint,
            stdin=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._config))
        self._process.stdin.close()

    async def ready(self, deadline_s: float) -> EngineReady:
        """What the engine says of itself. Raises EngineDead if it ended, or did not come up in
        time.
        """
        deadline = asyncio.create_task(self._ready.wait())
        ended = asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait(
                {deadline, ended}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            deadline.cancel()
            ended.cancel()
        if self.info is None:
            raise EngineDead(self.failure or f"the engine was not ready within {deadline_s:g} s")
        return self.info

    def start_requests(self, submits: Sequence[Submit]) -> Updates:
        """Run these requests, which have one prompt, each to its end. Raises EngineDead,
        Overloaded.
        """
        if self.ended.is_set():
            raise EngineDead(self.why_ended())
        spilled_ms = self._spilled_ms(submits[0]) if submits else 0.0
        queue: asyncio.Queue[RequestUpdate | None] = asyncio.Queue()
        for submit in submits:
            self._queues[submit.request_id] = queue
            self._submit(submit)
        if spilled_ms:
            self._spilled.append((self.legs, spilled_ms))
        return Updates(self, queue, {submit.request_id for submit in submits})

    def abort(self, request_id: str) -> None:
        """Nobody hears of this request any more."""
        self.forget(request_id)
        self._send(Abort(request_id))

    def forget(self, request_id: str) -> None:
        """It has ended."""
        del self._queues[request_id]

    def why_ended(self) -> str:
        """For those who wait for it."""
        return self.failure or "the engine process of this node has ended"

    def release(self, request_id: str) -> None:
        """Nobody will fetch what is held for this request."""
        self._send(Release(request_id))

    def renew(self, request_id: str) -> None:
        """Somebody waits for room elsewhere and will fetch what is held for this request."""
        self._send(Renew(request_id))

    def give_up(self, submit: Submit) -> None:
        """End a request that is over before it began, so that what its ticket holds elsewhere is
        released.
        """
        self._submit(submit)
        self._send(Abort(submit.request_id))

    async def ask(
        self, probe: OfferProbe | FetchProbe, deadline_s: float
    ) -> ProbeOffered | ProbeFetched | ProbeRefused:
        """What the engine process says to a probe. Raises EngineDead, DeadlineExceeded."""
        late = f"the engine process did not answer a probe within {deadline_s:g} s"
        return await self._answered(self._probes, probe.probe_id, probe, deadline_s, late)

    async def load_adapter(
        self, load: LoadAdapter, deadline_s: float
    ) -> AdapterLoaded | AdapterRefused:
        """What the engine process says to it. Raises EngineDead, DeadlineExceeded."""
        late = f"adapter {load.name!r} was not read within {deadline_s:g} s"
        return await self._answered(self._loads, load.load_id, load, deadline_s, late)

    async def fresh_stats(self, deadline_s: float) -> EngineStats:
        """Its numbers after all that was sent to it until now. Raises EngineDead, DeadlineExceeded."""
        self._asked += 1
        late = f"the engine process did not tell its numbers within {deadline_s:g} s"
        return await self._answered(
            self._stats_asked, self._asked, AskStats(self._asked), deadline_s, late
        )

    async def profile(self, *, begin: bool, deadline_s: float) -> None:
        """Profile its steps from now on, or end that. Raises EngineDead, DeadlineExceeded,
        NodeFailed.
        """
        self._asked += 1
        late = (
            f"the engine process did not {'begin' if begin else 'write'} a profile within "
            f"{deadline_s:g} s"
        )
        told = await self._answered(
            self._profiles, self._asked, Profile(self._asked, begin), deadline_s, late
        )
        if told.refused:
            raise NodeFailed(told.refused)

    async def _answered(
        self,
        waiting: dict[K, asyncio.Future[T]],
        key: K,
        asked: ToEngine,
        deadline_s: float,
        late: str,
    ) -> T:
        """Send what the engine process answers once; `waiting` is where its answer is looked for,
        by `key`.
        """
        if self.ended.is_set():
            raise EngineDead(self.why_ended())
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting[key] = answer
        try:
            self._send(asked)
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as why:
            raise DeadlineExceeded(late) from why
        finally:
            del waiting[key]

    async def reset_prefix_cache(self, deadline_s: float) -> None:
        """Return when it is empty. Raises EngineDead, DeadlineExceeded."""
        self._send(ResetPrefixCache())
        await self.fresh_stats(deadline_s)

    def unload_adapter(self, unload: UnloadAdapter) -> None:
        """No request that is submitted from now on has this adapter."""
        self._send(unload)

    def pid(self) -> int:
        """Of the engine process; -1 before it was started."""
        return -1 if self._process is None else self._process.pid

    def silent_s(self) -> float:
        """Seconds since the engine process said anything."""
        return time.monotonic() - self.heard_at

    def queue_depth(self) -> int:
        """Requests that this process has submitted and that have not ended."""
        return len(self._queues)

    async def stop(self) -> None:
        """End the engine process: ask, wait, kill."""
        if self._process is None:
            return
        if self._process.returncode is None:
            if self.info is None:
                self._process.terminate()  # still loading: it listens to nobody
            self._send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), STOP_DEADLINE_S)
            except TimeoutError:
                log.warning(
                    "the engine process did not end within %g s, killing it", STOP_DEADLINE_S
                )
                self.failure = (
                    self.failure
                    or "the engine process did not end when it was told to, and was killed"
                )
                self._process.kill()
                try:
                    await asyncio.wait_for(self._process.wait(), STOP_DEADLINE_S)
                except TimeoutError:
                    log.error(
                        "the engine process %d cannot be killed: its driver holds it",
                        self._process.pid,
                    )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        if self._folder is not None:
            self._folder.close()

    def _submit(self, submit: Submit) -> None:
        self.legs += 1
        self._send(submit)

    def _spilled_ms(self, submit: Submit) -> float:
        """Return what a prompt takes that a prefill node could compute.

        Raises Overloaded if that is more than the engine takes now; what it was sent since it said
        so counts.
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
                f"for prompts that a "
                "prefill node can compute; send it to one",
                code="spill_refused",
            )
        return ms

    def _send(self, message: ToEngine) -> None:
        if self.ended.is_set():
            return
        # Never waits: there is no high-water mark. It fails when the engine process is not there,
        # which `ended` tells.
        sent = cast(
            "asyncio.Future[object]", self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        )
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _read(self) -> None:
        while True:
            raw = await self._socket.recv()
            self.heard_at = time.monotonic()
            match self._decoder.decode(raw):
                case StepOutputs(updates, load):
                    self.load = load
                    for update in updates:
                        queue = self._queues.get(update.request_id)
                        if queue is not None:
                            queue.put_nowait(update)
                        elif update.held is not None:
                            self._send(
                                Release(update.request_id)
                            )  # its client left while the last step ran
                case EngineStats() as stats:
                    self.stats, self.load = stats, stats.load
                    for number, wanted in self._stats_asked.items():
                        if number <= stats.asked and not wanted.done():
                            wanted.set_result(stats)
                case CacheChanges() as changes:
                    if self.on_changes is not None:
                        self.on_changes(changes)
                case ProbeOffered() | ProbeFetched() | ProbeRefused() as answer:
                    asked = self._probes.get(answer.probe_id)
                    if asked is not None and not asked.done():
                        asked.set_result(answer)
                case AdapterLoaded() | AdapterRefused() as news:
                    waiting = self._loads.get(news.load_id)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(news)
                case Profiled() as done:
                    profiled = self._profiles.get(done.profile_id)
                    if profiled is not None and not profiled.done():
                        profiled.set_result(done)
                case EngineReady() as info:
                    self.info = info
                    self._ready.set()
                case EngineFailed(message):
                    self.failure = message
                    self._failed.set()

    async def _watch(self) -> None:
        assert self._process is not None
        ended, failed = (
            asyncio.create_task(self._process.wait()),
            asyncio.create_task(self._failed.wait()),
        )
        try:
            # Whichever is first: a process whose GPU has failed may be slow to end, or never do.
            await asyncio.wait({ended, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            failed.cancel()
        if self.failure is None:
            await asyncio.sleep(0.05)  # its last words may still be in the socket
        self.failure = (
            self.failure or f"the engine process ended ({fate_of(self._process.returncode or 0)})"
        )
        self.ended.set()
        for queue in self._queues.values():
            queue.put_nowait(None)
        waiting: list[asyncio.Future[Any]] = [
            *self._probes.values(),
            *self._loads.values(),
            *self._stats_asked.values(),
            *self._profiles.values(),
        ]
        for asked in waiting:
            if not asked.done():
                asked.set_exception(EngineDead(self.failure))
