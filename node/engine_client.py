"""Client of the engine process: starts it, sends requests, and queues their updates.

When the engine process ends or reports a crash, every waiting request gets EngineDead, once.
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

from kvrelay.node.private_files import ProcessFolder
from kvrelay.node.process import PARENT_PID, describe_exit, python_command
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

STOP_DEADLINE_S = 5.0
# Time for the crash report to come through the socket after the process has ended.
_REPORT_S = 0.05


class Updates:
    """An iterator of some requests' updates. `close` aborts those that have not ended."""

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
        """Return the next update of any request. Raises EngineDead if the engine process ends."""
        while True:
            update = await self._queue.get()
            if update is None:
                raise EngineDead(self._engine.why_ended())
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
        for request_id in list(self._live):
            self.abort(request_id)


class EngineClient:
    """A client of one engine process: `start`, `ready`, any number of `start_requests`, `stop`."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._queues: dict[str, asyncio.Queue[RequestUpdate | None]] = {}
        self._answers: dict[str | int, asyncio.Future[Any]] = {}
        """By the id of a probe, an adapter load or a profile."""
        self._stats_asked: dict[int, asyncio.Future[EngineStats]] = {}
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
        self.submitted = 1
        """One more than the requests submitted; after a submit, the number of that request."""
        self._spilled: deque[tuple[int, float]] = deque()
        """By number, requests whose prompts a prefill node could compute, and milliseconds."""
        self._heard_at = time.monotonic()
        self.on_cache_changes: Callable[[CacheChanges], None] | None = None
        self.ended = asyncio.Event()
        self._ready = asyncio.Event()
        self._failed = asyncio.Event()

    async def start(self) -> None:
        """Start the engine process; return before it is ready. Raises ConfigError."""
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
        environment = {
            # Huge pages: a step takes 53 ms instead of 57, as weights need fewer TLB entries. Freed
            # buffers are kept: mapping the same megabytes in every layer costs another 2 %.
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1073741824"
            ":glibc.malloc.mmap_threshold=33554432",
            "OMP_NUM_THREADS": str(self._config.engine.threads_on(os.cpu_count() or 1)),
            # Threads that fill masks recurse into grammars as the compiler does.
            "RUST_MIN_STACK": str(16 << 20),
            **child_environ(),
            PARENT_PID: str(os.getpid()),
        }
        self._process = await asyncio.create_subprocess_exec(
            *python_command("kvrelay.node.engine_process"),
            endpoint,
            stdin=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._config))
        self._process.stdin.close()

    async def ready(self, deadline_s: float) -> EngineReady:
        """Return the engine's facts. Raises EngineDead if it has ended or is late."""
        await _first_of(self._ready.wait(), self.ended.wait(), timeout_s=deadline_s)
        if self.info is None:
            raise EngineDead(self.failure or f"the engine was not ready within {deadline_s:g} s")
        return self.info

    def start_requests(self, submits: Sequence[Submit]) -> Updates:
        """Run requests of one prompt, each to its end. Raises EngineDead, Overloaded."""
        if self.ended.is_set():
            raise EngineDead(self.why_ended())
        spilled_ms = self._spilled_ms(submits[0]) if submits else 0.0
        queue: asyncio.Queue[RequestUpdate | None] = asyncio.Queue()
        for submit in submits:
            self._queues[submit.request_id] = queue
            self._submit(submit)
        if spilled_ms:
            self._spilled.append((self.submitted, spilled_ms))
        return Updates(self, queue, {submit.request_id for submit in submits})

    def abort(self, request_id: str) -> None:
        """Stop a request; it gets no more updates."""
        self.forget(request_id)
        self._send(Abort(request_id))

    def forget(self, request_id: str) -> None:
        del self._queues[request_id]

    def why_ended(self) -> str:
        return self.failure or "the engine process of this node has ended"

    def release(self, request_id: str) -> None:
        """Release the KV held for a request: nobody will fetch it."""
        self._send(Release(request_id))

    def renew(self, request_id: str) -> None:
        """Renew the lease of the KV held for a request: its reader waits for room elsewhere."""
        self._send(Renew(request_id))

    def give_up(self, submit: Submit) -> None:
        """Release what a request's ticket holds elsewhere, without running it."""
        self._submit(submit)
        self._send(Abort(submit.request_id))

    async def probe(
        self, probe: OfferProbe | FetchProbe, deadline_s: float
    ) -> ProbeOffered | ProbeFetched | ProbeRefused:
        """Run a probe of the hand-over. Raises EngineDead, DeadlineExceeded."""
        late = f"the engine process did not answer a probe within {deadline_s:g} s"
        answer: ProbeOffered | ProbeFetched | ProbeRefused = await self._ask(
            self._answers, probe.probe_id, probe, deadline_s, late
        )
        return answer

    async def load_adapter(
        self, load: LoadAdapter, deadline_s: float
    ) -> AdapterLoaded | AdapterRefused:
        """Load an adapter. Raises EngineDead, DeadlineExceeded."""
        late = f"adapter {load.name!r} was not read within {deadline_s:g} s"
        answer: AdapterLoaded | AdapterRefused = await self._ask(
            self._answers, load.load_id, load, deadline_s, late
        )
        return answer

    def unload_adapter(self, unload: UnloadAdapter) -> None:
        """Let no request that is submitted from now on use this adapter."""
        self._send(unload)

    async def fresh_stats(self, deadline_s: float) -> EngineStats:
        """Return the engine's numbers after all that was sent by now.

        Raises EngineDead, DeadlineExceeded.
        """
        self._asked += 1
        late = f"the engine process did not tell its numbers within {deadline_s:g} s"
        return await self._ask(
            self._stats_asked, self._asked, AskStats(self._asked), deadline_s, late
        )

    async def profile(self, *, begin: bool, deadline_s: float) -> None:
        """Begin or end a profile of the steps. Raises EngineDead, DeadlineExceeded, NodeFailed."""
        self._asked += 1
        what = "begin" if begin else "write"
        late = f"the engine process did not {what} a profile within {deadline_s:g} s"
        done: Profiled = await self._ask(
            self._answers, self._asked, Profile(self._asked, begin), deadline_s, late
        )
        if done.refused:
            raise NodeFailed(done.refused)

    async def reset_prefix_cache(self, deadline_s: float) -> None:
        """Empty the prefix cache. Raises EngineDead, DeadlineExceeded."""
        self._send(ResetPrefixCache())
        await self.fresh_stats(deadline_s)

    def pid(self) -> int:
        """Return the engine process's id, -1 before it was started."""
        return -1 if self._process is None else self._process.pid

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def queue_depth(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._queues)

    async def stop(self) -> None:
        """End the engine process: ask, wait, kill."""
        if self._process is None:
            return
        if self._process.returncode is None:
            await self._stop(self._process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        if self._folder is not None:
            self._folder.close()

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if self.info is None:
            process.terminate()  # still loading: it reads no messages
        self._send(Shutdown())
        try:
            await asyncio.wait_for(process.wait(), STOP_DEADLINE_S)
        except TimeoutError:
            log.warning("the engine process did not end within %g s, killing it", STOP_DEADLINE_S)
            self.failure = (
                self.failure or "the engine process did not end when it was told to, and was killed"
            )
            process.kill()
            try:
                await asyncio.wait_for(process.wait(), STOP_DEADLINE_S)
            except TimeoutError:
                log.error(
                    "the engine process %d cannot be killed: its driver holds it", process.pid
                )

    def _submit(self, submit: Submit) -> None:
        self.submitted += 1
        self._send(submit)

    def _spilled_ms(self, submit: Submit) -> float:
        """Return the milliseconds of a prompt that a prefill node could compute, else 0.

        Raises Overloaded if the engine has less time for such prompts, less those sent meanwhile.
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

    async def _ask(
        self,
        answers: dict[Any, asyncio.Future[T]],
        key: str | int,
        message: ToEngine,
        deadline_s: float,
        late: str,
    ) -> T:
        if self.ended.is_set():
            raise EngineDead(self.why_ended())
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answers[key] = answer
        try:
            self._send(message)
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as why:
            raise DeadlineExceeded(late) from why
        finally:
            del answers[key]

    def _send(self, message: ToEngine) -> None:
        if self.ended.is_set():
            return
        # Never waits, as there is no high-water mark, and fails only if the engine process is gone,
        # which `ended` says.
        sent = cast(
            "asyncio.Future[object]", self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        )
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _read(self) -> None:
        while True:
            raw = await self._socket.recv()
            self._heard_at = time.monotonic()
            match self._decoder.decode(raw):
                case StepOutputs(updates, load):
                    self.load = load
                    for update in updates:
                        self._queue_update(update)
                case EngineStats() as stats:
                    self.stats, self.load = stats, stats.load
                    for number, asked in self._stats_asked.items():
                        if number <= stats.asked and not asked.done():
                            asked.set_result(stats)
                case CacheChanges() as changes:
                    if self.on_cache_changes is not None:
                        self.on_cache_changes(changes)
                case ProbeOffered() | ProbeFetched() | ProbeRefused() as probe:
                    self._answer(probe.probe_id, probe)
                case AdapterLoaded() | AdapterRefused() as load:
                    self._answer(load.load_id, load)
                case Profiled() as profiled:
                    self._answer(profiled.profile_id, profiled)
                case EngineReady() as info:
                    self.info = info
                    self._ready.set()
                case EngineFailed(message):
                    self.failure = message
                    self._failed.set()

    def _queue_update(self, update: RequestUpdate) -> None:
        queue = self._queues.get(update.request_id)
        if queue is not None:
            queue.put_nowait(update)
        elif update.held is not None:  # its client left during the last step
            self._send(Release(update.request_id))

    def _answer(self, key: str | int, message: FromEngine) -> None:
        asked = self._answers.get(key)
        if asked is not None and not asked.done():
            asked.set_result(message)

    async def _watch(self) -> None:
        assert self._process is not None
        # Whichever is first: a process whose GPU has failed may be slow to end, or never do.
        await _first_of(self._process.wait(), self._failed.wait())
        if self.failure is None:
            await asyncio.sleep(_REPORT_S)
        fate = describe_exit(self._process.returncode or 0)
        self.failure = self.failure or f"the engine process ended ({fate})"
        self.ended.set()
        for queue in self._queues.values():
            queue.put_nowait(None)
        for asked in [*self._answers.values(), *self._stats_asked.values()]:
            if not asked.done():
                asked.set_exception(EngineDead(self.failure))


async def _first_of(*waits: Any, timeout_s: float | None = None) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
