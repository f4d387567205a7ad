"""The asyncio shell of admission: one request takes its turn here, and gives it back however it ends.

Limits of its key first (router/admission/rate_limits.py), then the queue of its model's nodes
(router/admission/admission.py). Owns clock, waiting and metrics of that; decides nothing itself.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from router.admission.admission import Admission, Refusal
from router.admission.fair_queue import Entrant
from router.admission.keys import Caller
from router.admission.metrics import AdmissionMetrics
from router.admission.rate_limits import Exceeded, KeyLimits, Taken
from router.nodes.node import NodeKind
from router.nodes.pool import Pool
from router.placement import Refuse, Wait
from router.walk.job import Job, Targets
from router.walk.placer import Found, Placed, Placer, Wanted
from wire.errors import DeadlineExceeded, KvrelayError, Overloaded, RateLimited
from wire.router_config import RouterConfig

__all__ = ["Gate", "Turn"]

_LOOK_S = 0.01
"""How often the queue is looked at while somebody waits; and it is whenever a request ends."""
_LONGEST_S = 60.0
"""The longest Retry-After for a queue. OpenAI's clients take more for a mistake, and return at once."""

_log = logging.getLogger("kvrelay.router")


class _State(enum.Enum):
    WAITING = enum.auto()
    BEGUN = enum.auto()
    REFUSED = enum.auto()


@dataclass(eq=False, slots=True)
class _Line:
    """The queue for the nodes of one model."""

    admission: Admission
    waiting: dict[Entrant, Turn] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Turn:
    """One request's. `begun` before anything of it is sent to a node, `Gate.leave` once, at its end."""

    caller: Caller
    job: Job
    wanted: Wanted
    entrant: Entrant
    line: _Line
    taken: Taken
    placed: Placed | None = None
    """Since its turn has come; None for what is placed otherwise (nodes of another project)."""
    state: _State = _State.BEGUN
    news: asyncio.Future[KvrelayError | None] | None = None
    """Only of one that waits."""

    @property
    def headers(self) -> dict[str, str]:
        """For its answer."""
        return self.taken.headers

    async def begun(self) -> None:
        """Wait for it. Raises KvrelayError if it leaves the queue without."""
        if self.news is not None and (why := await self.news) is not None:
            raise why

    def tell(self, state: _State, why: KvrelayError | None = None) -> None:
        """It waits no more."""
        self.state = state
        if self.news is not None and not self.news.done():  # cancelled: its client is just leaving
            self.news.set_result(why)


class Gate:
    """All turns of one router. `close` at the end."""

    def __init__(self, config: RouterConfig, pool: Pool, placer: Placer, metrics: AdmissionMetrics) -> None:
        self._config = config
        self._pool = pool
        self._placer = placer
        self._limits = KeyLimits()
        self._metrics = metrics
        self._lines: dict[str, _Line] = {}
        self._looking: asyncio.Task[None] | None = None
        metrics.waiting.read = self.waiting_by_model

    def take_over(self, config: RouterConfig) -> None:
        """Its limits and targets are for those who come from now on."""
        self._config = config
        for line in self._lines.values():
            line.admission.take_over(config.max_queue)

    def waiting(self) -> int:
        """Requests in all queues."""
        return sum(len(line.admission.queue) for line in self._lines.values())

    def waiting_by_model(self) -> dict[str, int]:
        """By model, the requests in its queue."""
        return {model: len(line.admission.queue) for model, line in self._lines.items() if line.admission.queue}

    def targets(self, ttft_s: float | None, tpot_s: float | None) -> Targets:
        """What holds for a request that asks for these."""
        # The router's time per token is a promise to all who are served: a laxer one is no reason to break it.
        tpots = [each for each in (tpot_s, self._config.tpot_target_ms / 1e3) if each]
        return Targets(ttft_s or self._config.ttft_target_ms / 1e3 or None, min(tpots, default=None))

    async def enter(self, caller: Caller, job: Job, wanted: Wanted, arrived: float) -> Turn:
        """Let a request begin now, or wait.

        Raises Overloaded, RateLimited, with the time after which to return; NoNode, KvNotLoaded.
        """
        base = self._pool.base_of(job.model)
        line = self._lines.get(base)
        if line is None:
            line = self._lines[base] = _Line(Admission(self._config.max_queue))
        wanted = self._placer.limited(wanted, job.targets)
        output = math.ceil(min(wanted.request.output, wanted.request.most_output))
        entrant = Entrant(
            key=caller.name,
            arrived=arrived,
            weight=caller.weight,
            priority=job.priority,
            tokens=job.prompt_tokens + output,
            ttft_s=job.targets.ttft_s,
            deadline=arrived + self._config.request_deadline_s,
        )
        tokens = entrant.tokens
        if caller.quota.tokens_per_minute:
            # A long answer may be thought of that never comes: alone it is no reason to refuse.
            tokens = max(job.prompt_tokens, min(tokens, caller.quota.tokens_per_minute))
        taken = self._take(caller, tokens, time.monotonic())
        turn = Turn(caller, job, wanted, entrant, line, taken)
        try:
            arrival = line.admission.arrive(entrant, lambda _: self._look(turn), caller.max_queue)
            if arrival.refusal is not None:
                raise self._refused(caller, arrival.refusal, taken.headers)
        except BaseException:
            self._limits.give_back(taken, None, time.monotonic())
            raise
        if arrival.displaced is not None and arrival.displacement is not None:
            self._end_waiting(line, arrival.displaced, arrival.displacement)
        if arrival.begins:
            self._begin(turn, arrival.place)
            self._metrics.admitted(caller.name, "at_once")
            return turn
        turn.state, turn.news = _State.WAITING, asyncio.get_running_loop().create_future()
        line.waiting[entrant] = turn
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        return turn

    def leave(self, turn: Turn, prompt_tokens: int, output_tokens: int) -> None:
        """It is over, however it ended, after so many tokens."""
        now = time.monotonic()
        line = turn.line
        if turn.placed is not None:
            self._placer.give_back(turn.placed)
        if turn.state is _State.BEGUN:
            line.admission.ended(turn.entrant, prompt_tokens + output_tokens)
            self._limits.give_back(turn.taken, prompt_tokens + output_tokens, now)
            self._metrics.ended(turn.caller.name, prompt_tokens)
        else:
            if turn.state is _State.WAITING:
                del line.waiting[turn.entrant]
                line.admission.leave(turn.entrant)
                self._metrics.refused(turn.caller.name, "client_gone")
            self._limits.give_back(turn.taken, None, now)
        self._pump_safely(line, now)

    @asynccontextmanager
    async def question(self, caller: Caller) -> AsyncIterator[None]:
        """A short question, which runs no leg and waits in no queue, for the length of the block.

        To its key's limits it is a request of no tokens. Raises RateLimited."""
        taken = self._take(caller, 0, time.monotonic())
        try:
            yield
        finally:
            self._limits.give_back(taken, 0, time.monotonic())

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))

    def _look(self, turn: Turn) -> Found | Wait | Refuse | None:
        """Say where a request would be placed now; None: its walk chooses its nodes by itself."""
        if self._pool.kind_for(turn.job.model) is not NodeKind.KVRELAY:
            return None
        wanted, limit_ms = turn.wanted, turn.wanted.request.ttft_limit_ms
        left_ms = limit_ms - (time.monotonic() - turn.entrant.arrived) * 1e3
        try:
            found = self._placer.find(replace(wanted, request=replace(wanted.request, ttft_limit_ms=left_ms)))
        except Overloaded as why:
            return Wait(why.message)
        if isinstance(found, Refuse) and found.what == "ttft":
            return replace(found, limit_ms=limit_ms, never=found.never and found.expected_ms > limit_ms)
        return found

    def _begin(self, turn: Turn, found: Found | None) -> None:
        turn.placed = None if found is None else self._placer.take(found)

    def _take(self, caller: Caller, tokens: int, now: float) -> Taken:
        taken = self._limits.take(caller.name, caller.quota, tokens, now)
        if not isinstance(taken, Exceeded):
            return taken
        self._metrics.refused(caller.name, f"key_{taken.what}")
        error = RateLimited(taken.message)
        _tell_when(error, taken.retry_after_s, taken.headers)
        raise error

    def _refused(self, caller: Caller, refusal: Refusal, headers: dict[str, str]) -> KvrelayError:
        self._metrics.refused(caller.name, refusal.reason)
        if refusal.reason == "deadline":
            return DeadlineExceeded(refusal.message)
        error = Overloaded(refusal.message, code=refusal.reason)
        again_s = refusal.retry_after_s
        _tell_when(error, None if again_s is None else min(again_s, _LONGEST_S), headers)
        return error

    async def _look_on(self) -> None:
        try:
            while self.waiting():
                await asyncio.sleep(_LOOK_S)
                now = time.monotonic()
                for line in self._lines.values():
                    self._pump_safely(line, now)
        finally:
            self._looking = None

    def _pump_safely(self, line: _Line, now: float) -> None:
        """Look at a queue; a mistake of ours must end neither the looking nor the request that has just ended."""
        try:
            self._pump(line, now)
        except Exception:  # noqa: BLE001
            _log.exception("a queue could not be looked at")

    def _pump(self, line: _Line, now: float) -> None:
        """Begin what may begin, and end what has waited for too long."""
        for entrant, refusal in line.admission.late(now):
            self._end_waiting(line, entrant, refusal)
        while (first := line.admission.queue.first()) is not None:
            try:
                begun = line.admission.next(lambda entrant: self._look(line.waiting[entrant]), now)
            except KvrelayError as why:  # there are no nodes any more
                line.admission.leave(first)
                line.waiting.pop(first).tell(_State.REFUSED, why)
                continue
            if begun is None:
                return
            entrant, place = begun
            if isinstance(place, Refusal):
                self._end_waiting(line, entrant, place)
                continue
            turn = line.waiting.pop(entrant)
            self._begin(turn, place)
            self._metrics.admitted(turn.caller.name, "queued", now - first.arrived)
            turn.tell(_State.BEGUN)

    def _end_waiting(self, line: _Line, entrant: Entrant, refusal: Refusal) -> None:
        turn = line.waiting.pop(entrant)
        turn.tell(_State.REFUSED, self._refused(turn.caller, refusal, turn.headers))


def _tell_when(error: KvrelayError, retry_after_s: float | None, headers: dict[str, str]) -> None:
    """Retry-After in whole seconds; without a time OpenAI's clients are told not to try again by themselves."""
    never = {"x-should-retry": "false"}
    error.headers = headers if retry_after_s is not None else headers | never
    error.retry_after_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))
