"""The asyncio shell of admission: one request takes its turn here, and gives it back however it
ends.

Limits of its key first (router/admission/rate_limits.py), then the queue of its model's nodes
(router/admission/admission.py). Owns clock, waiting and metrics of that; decides nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from kvrelay.router.admission.admission import Admission
from kvrelay.router.admission.fair_queue import Entrant
from kvrelay.router.admission.keys import Caller
from kvrelay.router.admission.metrics import AdmissionMetrics
from kvrelay.router.admission.rate_limits import KeyLimits, Refusal
from kvrelay.router.background import cancel_and_wait
from kvrelay.router.nodes.node import NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.placement import Refuse, Wait
from kvrelay.router.request.job import Job, Slo
from kvrelay.router.request.placer import ChosenNodes, PlacementLeases, PlacementQuery, Placer
from kvrelay.wire.errors import DeadlineExceeded, KvrelayError, Overloaded, RateLimited
from kvrelay.wire.router_config import RouterConfig

__all__ = ["Gate", "Turn"]

_LOOK_S = 0.01
"""How often the queue is looked at while somebody waits; and it is whenever a request ends."""
_LONGEST_S = 60.0
"""The longest Retry-After for a queue. OpenAI's clients take more for a mistake, and return at
once.
"""

_log = logging.getLogger("kvrelay.router")


@dataclass(eq=False, slots=True, kw_only=True)
class Turn(Entrant):
    """A request at the gate. `begun` before anything of it is sent to a node, `Gate.leave` once, at
    its end.
    """

    wanted: PlacementQuery
    line: Line
    taken: int
    """Tokens, of its key's limits."""
    headers: dict[str, str]
    """For its answer."""
    placed: PlacementLeases | None = None
    """Since its turn has come; None for what is placed otherwise (nodes of another project)."""
    has_begun: bool = False
    news: asyncio.Future[KvrelayError | None] = field(default_factory=asyncio.Future)
    """Whether it has begun, or why it will not."""

    async def begun(self) -> None:
        """Wait for it. Raises KvrelayError if it leaves the queue without."""
        if (why := await self.news) is not None:
            raise why

    def tell(self, why: KvrelayError | None = None) -> None:
        """Let it wait no more."""
        if not self.news.done():  # cancelled: its client is just leaving
            self.news.set_result(why)


Line = Admission[Turn, ChosenNodes | None]
"""The queue for the nodes of one model."""


class Gate:
    """All turns of one router. `close` at the end."""

    def __init__(
        self, config: RouterConfig, pool: Pool, placer: Placer, metrics: AdmissionMetrics
    ) -> None:
        self._config = config
        self._pool = pool
        self._placer = placer
        self._limits = KeyLimits()
        self._metrics = metrics
        self._lines: dict[str, Line] = {}
        self._looking: asyncio.Task[None] | None = None
        metrics.waiting.read = self.waiting

    def take_over(self, config: RouterConfig) -> None:
        """Have its limits and targets hold for those who come from now on."""
        self._config = config
        for line in self._lines.values():
            line.max_queue = config.max_queue

    def waiting(self) -> dict[str, int]:
        """Count the requests in each model's queue."""
        return {model: len(line.queue) for model, line in self._lines.items() if line.queue}

    def targets(self, ttft_s: float | None, tpot_s: float | None) -> Slo:
        """Return what holds for a request that asks for these."""
        # The router's time per token is a promise to all who are served: a laxer one is no reason
        # to break it.
        tpots = [each for each in (tpot_s, self._config.tpot_target_ms / 1e3) if each]
        return Slo(ttft_s or self._config.ttft_target_ms / 1e3 or None, min(tpots, default=None))

    async def enter(self, caller: Caller, job: Job, wanted: PlacementQuery, arrived: float) -> Turn:
        """Let a request begin now, or wait.

        Raises Overloaded, RateLimited, with the time after which to return; NoNode, KvNotLoaded.
        """
        base = self._pool.base_of(job.model)
        line = self._lines.get(base)
        if line is None:
            line = self._lines[base] = Admission(self._config.max_queue, self._look)
        wanted = self._placer.limited(wanted, job.targets)
        tokens = job.prompt_tokens + math.ceil(
            min(wanted.request.output, wanted.request.most_output)
        )
        taken = tokens
        if caller.tokens_per_minute:
            # A long answer may be thought of that never comes: alone it is no reason to refuse.
            taken = max(job.prompt_tokens, min(tokens, caller.tokens_per_minute))
        turn = Turn(
            key=caller.name,
            arrived=arrived,
            weight=caller.weight,
            priority=job.priority,
            tokens=tokens,
            ttft_s=job.targets.ttft_s,
            deadline=arrived + self._config.request_deadline_s,
            wanted=wanted,
            line=line,
            taken=taken,
            headers=self._take(caller, taken),
        )
        try:
            found = line.arrive(turn, caller.max_queue)
            if isinstance(found, Refusal):
                raise self._refused(turn, found)
        except BaseException:
            self._limits.give_back(turn.key, taken, None, time.monotonic())
            raise
        if not isinstance(found, Wait):
            self._begin(turn, found)
            self._metrics.admitted(turn.key)
        elif self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        return turn

    def leave(self, turn: Turn, prompt_tokens: int, output_tokens: int) -> None:
        """Note that it is over, however it ended, after so many tokens."""
        now, tokens = time.monotonic(), prompt_tokens + output_tokens
        if turn.placed is not None:
            self._placer.give_back(turn.placed)
        if turn.has_begun:
            turn.line.queue.correct(turn, tokens)
            self._metrics.tokens.add(prompt_tokens, turn.key, "prompt")
        elif turn in turn.line.queue:
            turn.line.queue.remove(turn)
            self._metrics.refused(turn.key, "client_gone")
        self._limits.give_back(turn.key, turn.taken, tokens if turn.has_begun else None, now)
        self._pump(turn.line, now)

    @asynccontextmanager
    async def question(self, caller: Caller) -> AsyncIterator[None]:
        """Let a short question pass, which runs no leg and waits in no queue, for the length of the
        block.

        To its key's limits it is a request of no tokens. Raises RateLimited.
        """
        self._take(caller, 0)
        try:
            yield
        finally:
            self._limits.give_back(caller.name, 0, 0, time.monotonic())

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            await cancel_and_wait([self._looking])

    def _look(self, turn: Turn) -> ChosenNodes | Wait | Refuse | None:
        """Say where a request would be placed now; None: its walk chooses its nodes by itself."""
        wanted, limit_ms = turn.wanted, turn.wanted.request.ttft_limit_ms
        if self._pool.kind_for(wanted.model) is not NodeKind.KVRELAY:
            return None
        left_ms = limit_ms - (time.monotonic() - turn.arrived) * 1e3
        try:
            found = self._placer.find(
                replace(wanted, request=replace(wanted.request, ttft_limit_ms=left_ms))
            )
        except Overloaded as why:
            return Wait(why.message)
        if isinstance(found, Refuse) and found.what == "ttft":
            return replace(
                found, limit_ms=limit_ms, never=found.never and found.expected_ms > limit_ms
            )
        return found

    def _begin(self, turn: Turn, found: ChosenNodes | None) -> None:
        turn.placed = None if found is None else self._placer.take(found)
        turn.has_begun = True
        turn.tell()

    def _take(self, caller: Caller, tokens: int) -> dict[str, str]:
        """Take so much of a key's limits, and return the headers that tell of them. Raises
        RateLimited.
        """
        refusal = self._limits.take(caller, tokens, time.monotonic())
        headers = self._limits.headers(caller.name)
        if refusal is None:
            return headers
        self._metrics.refused(caller.name, refusal.reason)
        raise _told_when(RateLimited(refusal.message), refusal.retry_after_s, headers)

    def _refused(self, turn: Turn, refusal: Refusal) -> KvrelayError:
        self._metrics.refused(turn.key, refusal.reason)
        if refusal.reason == "deadline":
            return DeadlineExceeded(refusal.message)
        again_s = refusal.retry_after_s
        error = Overloaded(refusal.message, code=refusal.reason)
        return _told_when(
            error, None if again_s is None else min(again_s, _LONGEST_S), turn.headers
        )

    async def _look_on(self) -> None:
        try:
            while self.waiting():
                await asyncio.sleep(_LOOK_S)
                for line in self._lines.values():
                    self._pump(line, time.monotonic())
        finally:
            self._looking = None

    def _pump(self, line: Line, now: float) -> None:
        """Begin what may begin, and end what has waited for too long.

        A mistake of ours must end neither the looking nor the request that has just ended.
        """
        try:
            for turn, found in line.turns(now):
                if isinstance(found, Refusal):
                    turn.tell(self._refused(turn, found))
                elif isinstance(found, KvrelayError):
                    turn.tell(found)
                else:
                    self._begin(turn, found)
                    self._metrics.admitted(turn.key, now - turn.arrived)
        except Exception:  # noqa: BLE001
            _log.exception("a queue could not be looked at")


def _told_when(
    error: KvrelayError, retry_after_s: float | None, headers: dict[str, str]
) -> KvrelayError:
    """Return an error with Retry-After in whole seconds; without a time OpenAI's clients are not to
    try again.
    """
    never = {"x-should-retry": "false"}
    error.headers = headers if retry_after_s is not None else headers | never
    error.retry_after_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))
    return error
