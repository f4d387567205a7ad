"""The asyncio shell of admission: the clock, waiting and metrics, but no decisions."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvrelay.router.admission.keys import Caller, KeyLimits, Refusal
from kvrelay.router.admission.queue import AdmissionQueue, QueuedRequest
from kvrelay.router.background import cancel_and_wait
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.placement import Placement, Refuse, Wait
from kvrelay.router.request.job import Job, Slo
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery, Placer
from kvrelay.wire.errors import DeadlineExceeded, KvrelayError, Overloaded
from kvrelay.wire.router_config import RouterConfig

__all__ = ["AdmissionController"]

_LOOK_S = 0.01
"""Between two looks at the queue while a request waits and none ends."""
_LONGEST_S = 60
"""The longest Retry-After that OpenAI's clients obey; they return at once for more."""
_TARGETS = "ttft_target_ms", "ttft_target_ms_per_token", "tpot_target_ms"

_log = logging.getLogger("kvrelay.router")


@dataclass(eq=False, slots=True, kw_only=True)
class AdmissionSlot(QueuedRequest):
    """A request's slot, or its place in the queue; `AdmissionController.release` ends it."""

    caller: Caller
    wanted: PlacementQuery
    queue: ModelQueue
    limit_tokens: int
    headers: dict[str, str]
    placed: PlacementLeases | None = None
    """The places on nodes; None before the request begins."""
    result: asyncio.Future[KvrelayError | None] = field(default_factory=asyncio.Future)
    """None once the request has begun, or why it will not begin."""

    async def begun(self) -> None:
        if (why := await self.result) is not None:
            raise why

    def settle(self, why: KvrelayError | None = None) -> None:
        if not self.result.done():  # its client is leaving
            self.result.set_result(why)


ModelQueue = AdmissionQueue[AdmissionSlot, Placement]


class AdmissionController:
    def __init__(self, config: RouterConfig, pool: Pool, placer: Placer, metrics: Metrics) -> None:
        self.config = config
        self._pool = pool
        self._placer = placer
        self._limits = KeyLimits()
        self._metrics = metrics
        self._queues: dict[str, ModelQueue] = {}
        self._looking: asyncio.Task[None] | None = None
        metrics.waiting = self.waiting

    def waiting(self) -> dict[str, int]:
        return {model: len(each) for model, each in self._queues.items() if each}

    def slo(
        self, caller: Caller, ttft_s: float | None, tpot_s: float | None, prompt_tokens: int
    ) -> Slo:
        """Return a request's targets: its headers', else its key's, else the router's.

        A header's time per token counts only if it is stricter.
        """
        ttft_ms, per_token_ms, tpot_ms = (
            getattr(caller, name) or getattr(self.config, name) for name in _TARGETS
        )
        # An operator's time per token is a promise: no client's laxer one breaks it.
        tpots = [each for each in (tpot_s, tpot_ms / 1e3) if each]
        own_s = (ttft_ms + per_token_ms * prompt_tokens) / 1e3
        return Slo(ttft_s or own_s or None, min(tpots, default=None))

    async def admit(
        self, caller: Caller, job: Job, wanted: PlacementQuery, arrived: float
    ) -> AdmissionSlot:
        """Let a request begin now, or queue it.

        Raises Overloaded, RateLimited, with the time after which to return; NoNode, KvNotLoaded.
        """
        base = self._pool.base_of(job.model)
        queue = self._queues.get(base)
        if queue is None:
            queue = self._queues[base] = AdmissionQueue(self.config.max_queue, self._find)
        queue.max_queue = self.config.max_queue
        wanted = self._placer.limited(wanted, job.targets)
        output = min(wanted.output, wanted.most_output)
        tokens = job.prompt_tokens + math.ceil(output)
        # A long answer may be expected that never comes: alone no reason to refuse.
        limit_tokens = max(job.prompt_tokens, min(tokens, caller.tokens_per_minute or tokens))
        slot = AdmissionSlot(
            key=caller.name,
            caller=caller,
            arrived=arrived,
            weight=caller.weight,
            priority=job.priority,
            tokens=tokens,
            ttft_s=job.targets.ttft_s,
            deadline=arrived + self.config.request_deadline_s,
            wanted=wanted,
            queue=queue,
            limit_tokens=limit_tokens,
            headers=self._take_limits(caller, limit_tokens),
        )
        try:
            found = queue.arrive(slot, caller.max_queue)
            if isinstance(found, Refusal):
                raise self._ended(slot, found)
        except BaseException:
            self._limits.give_back(caller, limit_tokens, None, time.monotonic())
            raise
        if not isinstance(found, Wait):
            self._begin(slot, found)
            self._metrics.admitted(slot.key)
        elif self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        return slot

    def release(self, slot: AdmissionSlot, prompt_tokens: int, output_tokens: int) -> None:
        now, used, queue = time.monotonic(), None, slot.queue
        if slot.placed is not None:
            self._placer.give_back(slot.placed)
            used = prompt_tokens + output_tokens
            queue.correct(slot, used)
            self._metrics.key_tokens.labels(slot.key, "prompt").inc(prompt_tokens)
        elif queue.remove(slot):
            self._metrics.not_admitted(slot.key, "client_gone")
        self._limits.give_back(slot.caller, slot.limit_tokens, used, now)
        self._pump(queue, now)

    @asynccontextmanager
    async def question(self, caller: Caller) -> AsyncIterator[None]:
        """Admit a short question for the block, without a queue. Raises RateLimited.

        It counts as a request of no tokens for its key's limits.
        """
        self._take_limits(caller, 0)
        try:
            yield
        finally:
            self._limits.give_back(caller, 0, 0, time.monotonic())

    async def close(self) -> None:
        if self._looking is not None:
            await cancel_and_wait([self._looking])

    def _find(self, slot: AdmissionSlot) -> Placement | Wait | Refuse:
        try:
            return self._placer.find_after((time.monotonic() - slot.arrived) * 1e3, slot.wanted)
        except Overloaded as why:
            return Wait(why.message)

    def _begin(self, slot: AdmissionSlot, found: Placement) -> None:
        slot.placed = self._placer.take(slot.wanted, found)
        slot.settle()

    def _ended(self, slot: AdmissionSlot, why: Refusal) -> KvrelayError:
        if why.for_want_of_nodes:
            self._placer.note_refused(slot.wanted, time.monotonic())
        return self._refused(slot.key, why, slot.headers)

    def _take_limits(self, caller: Caller, tokens: int) -> dict[str, str]:
        now = time.monotonic()
        refusal = self._limits.take(caller, tokens, now)
        headers = self._limits.headers(caller, now)
        if refusal is not None:
            raise self._refused(caller.name, refusal, headers)
        return headers

    def _refused(self, key: str, refusal: Refusal, headers: dict[str, str]) -> KvrelayError:
        self._metrics.not_admitted(key, refusal.reason)
        if refusal.reason == "deadline":
            return DeadlineExceeded(refusal.message)
        error = refusal.error(refusal.message)
        error.headers, error.code = headers, error.code or refusal.reason
        if (after_s := refusal.retry_after_s) is None:  # OpenAI's clients must not try again
            error.headers, error.retry_after_s = headers | {"x-should-retry": "false"}, None
        else:
            error.retry_after_s = max(1, min(_LONGEST_S, math.ceil(after_s)))
        return error

    async def _look_on(self) -> None:
        try:
            while self.waiting():
                await asyncio.sleep(_LOOK_S)
                for queue in self._queues.values():
                    self._pump(queue, time.monotonic())
        finally:
            self._looking = None

    def _pump(self, queue: ModelQueue, now: float) -> None:
        try:
            for slot, found in queue.leaving(now):
                if isinstance(found, Refusal):
                    slot.settle(self._ended(slot, found))
                elif isinstance(found, KvrelayError):
                    slot.settle(found)
                else:
                    self._begin(slot, found)
                    self._metrics.admitted(slot.key, now - slot.arrived)
        except Exception:  # noqa: BLE001 - must end neither the looking nor the request just ended
            _log.exception("a queue could not be looked at")
