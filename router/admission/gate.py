"""The asyncio shell of admission: one request takes its turn here, and gives it back however it ends.

Limits of its key first (router/admission/rate_limits.py), then the queue of its model's nodes
(router/admission/admission.py). Owns clock, waiting and metrics of that; decides nothing itself.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.admission.admission import Admission, Refusal
from router.admission.fair_queue import Entrant
from router.admission.keys import Caller
from router.admission.metrics import AdmissionMetrics
from router.admission.rate_limits import Exceeded, Limits, Taken
from router.admission.saturation import Nodes
from router.nodes.node import NodeKind
from router.nodes.pool import Pool
from router.walk.job import Job, Targets, prefix_of
from wire.config import Role
from wire.errors import DeadlineExceeded, KvrelayError, Overloaded, RateLimited
from wire.router_config import RouterConfig

__all__ = ["Gate", "Turn"]

_LOOK_S = 0.01
"""How often the queue is looked at while somebody waits; and it is whenever a request ends."""
_LONGEST_S = 60.0
"""The longest Retry-After for a queue. OpenAI's clients take more for a mistake, and return at once."""


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
    entrant: Entrant
    line: _Line
    taken: Taken
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
    """All turns of one router. `limits` may have its state elsewhere. `close` at the end."""

    def __init__(self, config: RouterConfig, pool: Pool, limits: Limits, metrics: AdmissionMetrics) -> None:
        self._config = config
        self._pool = pool
        self._limits = limits
        self._metrics = metrics
        self._lines: dict[str, _Line] = {}
        self._looking: asyncio.Task[None] | None = None
        metrics.waiting.read = lambda: {model: requests for model, (requests, _) in self.waiting_by_model().items()}

    def take_over(self, config: RouterConfig) -> None:
        """Its limits and targets are for those who come from now on."""
        self._config = config
        for line in self._lines.values():
            line.admission.take_over(config.max_queue)

    def waiting(self) -> int:
        """Requests in all queues."""
        return sum(len(line.admission.queue) for line in self._lines.values())

    def waiting_by_model(self) -> dict[str, tuple[int, int]]:
        """By model, the requests in its queue, and tokens of their prompts."""
        return {
            model: (len(queue), sum(each.uncached for each in queue))
            for model, queue in ((model, line.admission.queue) for model, line in self._lines.items())
            if queue
        }

    def targets(self, ttft_s: float | None, tpot_s: float | None) -> Targets:
        """What holds for a request that asks for these."""
        # The router's time per token is a promise to all who are served: a laxer one is no reason to break it.
        tpots = [each for each in (tpot_s, self._config.tpot_target_ms / 1e3) if each]
        return Targets(ttft_s or self._config.ttft_target_ms / 1e3 or None, min(tpots, default=None))

    async def enter(self, caller: Caller, job: Job, arrived: float) -> Turn:
        """A request that begins now, or waits. Raises Overloaded, RateLimited, with the time after which to return."""
        now = time.monotonic()
        base = self._pool.base_of(job.model)
        line = self._lines.get(base)
        if line is None:
            line = self._lines[base] = _Line(Admission(self._config.max_queue))
        nodes = self._nodes(job.model)
        entrant = self._entrant(caller, job, arrived, nodes)
        tokens = entrant.tokens
        if caller.quota.tokens_per_minute:
            # A long answer may be thought of that never comes: alone it is no reason to refuse.
            tokens = max(entrant.prompt_tokens, min(tokens, caller.quota.tokens_per_minute))
        taken = await self._take(caller, tokens, now)
        now = time.monotonic()
        turn = Turn(caller, entrant, line, taken)
        try:
            arrival = line.admission.arrive(entrant, nodes, now, caller.max_queue)
            if arrival.refusal is not None:
                raise self._refused(caller, arrival.refusal, taken.headers)
        except BaseException:
            self._limits.give_back(taken, None, now)
            raise
        if arrival.displaced is not None and arrival.displacement is not None:
            self._end_waiting(line, arrival.displaced, arrival.displacement)
        if arrival.begins:
            self._metrics.admitted(caller.name, "at_once")
            return turn
        turn.state, turn.news = _State.WAITING, asyncio.get_running_loop().create_future()
        line.waiting[entrant] = turn
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return turn

    @staticmethod
    def placed(turn: Turn, role: Role) -> None:
        """A node of this role counts the request itself from now on."""
        prefilling = role is Role.PREFILL
        turn.line.admission.placed(turn.entrant, prefilling=prefilling, decoding=not prefilling)

    def leave(self, turn: Turn, prompt_tokens: int, output_tokens: int) -> None:
        """It is over, however it ended, after so many tokens."""
        now = time.monotonic()
        line = turn.line
        if turn.state is _State.BEGUN:
            line.admission.ended(turn.entrant, prompt_tokens, output_tokens, now)
            self._limits.give_back(turn.taken, prompt_tokens + output_tokens, now)
            self._metrics.ended(turn.caller.name, prompt_tokens)
        else:
            if turn.state is _State.WAITING:
                del line.waiting[turn.entrant]
                line.admission.leave(turn.entrant)
                self._metrics.refused(turn.caller.name, "client_gone")
            self._limits.give_back(turn.taken, None, now)
        self._pump(line, now)

    @asynccontextmanager
    async def question(self, caller: Caller) -> AsyncIterator[None]:
        """A short question, which runs no leg and waits in no queue, for the length of the block.

        To its key's limits it is a request of no tokens. Raises RateLimited, Unavailable."""
        taken = await self._take(caller, 0, time.monotonic())
        try:
            yield
        finally:
            self._limits.give_back(taken, 0, time.monotonic())

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))

    def _entrant(self, caller: Caller, job: Job, arrived: float, nodes: Nodes) -> Entrant:
        each = nodes.decode[0].rates.output_tokens(job.max_tokens) if nodes.decode else 0.0
        targets = job.targets
        # Without a target nothing is estimated that it would change.
        prompt, cached = (job.prompt_tokens, 0) if targets.ttft_s is None else self._known(job, nodes)
        return Entrant(
            key=caller.name,
            arrived=arrived,
            weight=caller.weight,
            priority=job.priority,
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=math.ceil(each) * max(job.choices, job.best_of),
            model=job.model,
            ttft_s=targets.ttft_s,
            tpot_s=targets.tpot_s,
            deadline=arrived + self._config.request_deadline_s,
        )

    def _known(self, job: Job, nodes: Nodes) -> tuple[int, int]:
        """Tokens of its prompt, and those that the luckiest prefill node is believed to have."""
        prefix = prefix_of(job)
        if any(node.kind is not NodeKind.KVRELAY for node in self._pool.up(Role.PREFILL, model=job.model)):
            prefix = prefix.for_contents()
        cached = self._pool.prefixes.lookup(prefix)
        return cached.prompt_tokens, max((cached.get(node.url) for node in nodes.prefill), default=0)

    async def _take(self, caller: Caller, tokens: int, now: float) -> Taken:
        taken = await self._limits.take(caller.name, caller.quota, tokens, now)
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

    def _nodes(self, model: str) -> Nodes:
        prefill, decode = (self._pool.up(role, model=model) for role in (Role.PREFILL, Role.DECODE))
        return Nodes(prefill, decode, self._config.conditional_disaggregation)

    async def _look(self) -> None:
        try:
            while self.waiting():
                await asyncio.sleep(_LOOK_S)
                now = time.monotonic()
                for line in self._lines.values():
                    self._pump(line, now)
        finally:
            self._looking = None

    def _pump(self, line: _Line, now: float) -> None:
        """Begin what may begin, and end what has waited for too long."""
        first = line.admission.queue.first()
        if first is None:
            return
        for entrant, refusal in line.admission.late(self._nodes(first.model), now):
            self._end_waiting(line, entrant, refusal)
        while (first := line.admission.queue.first()) is not None:
            if line.admission.next(self._nodes(first.model)) is None:
                return
            turn = line.waiting.pop(first)
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
