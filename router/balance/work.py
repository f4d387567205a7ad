"""What one router process counts of requests for the balance of roles, by model: work that came, and promises kept.

Pure, and a few additions for a request. What a prompt costs is known when it is over, so what has come is what was
asked, each at the price of those that have ended. Times are milliseconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from router.nodes.pool import Pool
from router.timeline import Timeline
from router.walk.job import Job
from wire.config import Role
from wire.errors import DeadlineExceeded, KvrelayError, Overloaded

__all__ = ["Counted", "Work"]

_GONE = 499
_LATE = (429, 503, 504)
"""A request that ended like this, without a token, was late."""
_HOPELESS = ("ttft_never", "tpot_never")


class Work(msgspec.Struct, array_like=True):
    """Of one model's requests since they were last asked for; `waiting` is of now."""

    asked: int = 0
    asked_tokens: int = 0
    """Of their prompts, as the router guesses them."""
    computed: int = 0
    """Requests of which `prefill_ms` tells."""
    guessed_tokens: int = 0
    """Of their prompts, by the same guess."""
    prefill_ms: float = 0.0
    """What their prompts took, or would have taken, a prefill node, without what was cached."""
    answered: int = 0
    output_tokens: int = 0
    context_tokens: float = 0.0
    """Of KV, on average over each answer; a sum over the answers."""
    first: int = 0
    """Requests whose first token came, or would have come too late and was refused."""
    first_met: int = 0
    last: int = 0
    """Answers of several tokens."""
    last_met: int = 0
    waiting: int = 0
    """In the router's queue."""
    waiting_tokens: int = 0
    """Of their prompts."""

    def add(self, other: Work) -> None:
        """And these."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Walked(Protocol):
    """A walk that is over."""

    @property
    def job(self) -> Job: ...
    @property
    def timeline(self) -> Timeline: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class Counted:
    """Of one process. `waiting` tells of its queues, by model: requests and tokens of their prompts."""

    def __init__(self, pool: Pool, waiting: Callable[[], dict[str, tuple[int, int]]]) -> None:
        self._pool, self._waiting = pool, waiting
        self._work: dict[str, Work] = {}

    def asked(self, job: Job) -> None:
        """A request came, which begins or waits."""
        work = self._of(job)
        work.asked += 1
        work.asked_tokens += job.prompt_tokens

    def refused(self, job: Job, why: KvrelayError) -> None:
        """It came, and never began. A limit of its key, or a target that no number of nodes could keep, is no work."""
        if isinstance(why, Overloaded | DeadlineExceeded) and why.code not in _HOPELESS:
            self.asked(job)
            self._of(job).first += 1

    def ended(self, walk: Walked, status: int) -> None:
        """It began, and is over."""
        job, timeline, work = walk.job, walk.timeline, self._of(walk.job)
        if timeline.first_token is None:
            work.first += status in _LATE
            return
        targets, output = job.targets, walk.output_tokens
        work.first += 1
        work.first_met += targets.ttft_s is None or timeline.first_token - timeline.arrived <= targets.ttft_s
        prompt = walk.prompt_tokens or job.prompt_tokens
        work.computed += 1
        work.guessed_tokens += job.prompt_tokens
        rates = self._pool.fleet(Role.PREFILL, self._pool.base_of(job.model))
        work.prefill_ms += rates.prefill_ms(max(1, prompt - walk.cached_tokens))
        if status == _GONE:
            return  # it says nothing of how long answers are
        work.answered += 1
        work.output_tokens += output
        work.context_tokens += prompt + output / 2
        each_s = timeline.inter_token_s(output // max(1, job.choices))
        if each_s is not None:
            work.last += 1
            work.last_met += targets.tpot_s is None or each_s <= targets.tpot_s

    def take(self) -> dict[str, Work]:
        """What was counted since the last time, by model."""
        work, self._work = self._work, {}
        for name, (requests, tokens) in self._waiting().items():
            of = work.setdefault(name, Work())
            of.waiting, of.waiting_tokens = requests, tokens
        return work

    def _of(self, job: Job) -> Work:
        model = self._pool.base_of(job.model)
        work = self._work.get(model)
        if work is None:
            work = self._work[model] = Work()
        return work
