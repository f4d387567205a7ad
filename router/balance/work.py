"""What one router process counts of requests for the balance of roles, by model: work that came, and promises kept.

A few additions for a request, no I/O, and the clock is an argument. A request of several prompts counts as so many.
What a prompt costs is known when it is over, so what has come is what was asked, each at the price of those that have
ended. A promise is counted when its time is over, or as soon as it is kept: not when the answer ends, or those that are
late would be seen last, and those that nobody waits for never. Times are milliseconds unless a name says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
    """Of one model's requests since they were last asked for; what waits is of now."""

    asked: int = 0
    asked_tokens: int = 0
    """Of their prompts, as the router guesses them."""
    computed: int = 0
    """Prompts of which `prefill_ms` tells."""
    guessed_tokens: int = 0
    """Of these, by the same guess."""
    prefill_ms: float = 0.0
    """What they took, or would have taken, a prefill node, without what was cached."""
    answered: int = 0
    output_tokens: int = 0
    context_tokens: float = 0.0
    """Of KV, on average over each answer; a sum over the answers."""
    first: int = 0
    """Requests whose first token came, or cannot come in time any more."""
    first_met: int = 0
    last: int = 0
    """Answers of several tokens."""
    last_met: int = 0
    waiting: int = 0
    """In the router's queues: for their turn, or for room on a decode node."""
    waiting_tokens: int = 0
    """To be computed, of the prompts of those that wait for their turn."""
    running: int = 0
    """Answers that have begun and are not over, now."""
    uncached_tokens: int = 0
    """Of the `computed` prompts, those that were not cached."""

    def add(self, other: Work) -> None:
        """And these."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Part(Protocol):
    """The walk of one prompt."""

    @property
    def job(self) -> Job: ...
    @property
    def timeline(self) -> Timeline: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int | None: ...


class Walked(Protocol):
    """The walk of a request, by its identity."""

    @property
    def job(self) -> Job: ...
    @property
    def parts(self) -> Sequence[Part]: ...


class Counted:
    """Of one process. `waiting` tells of those who wait for their turn, by model: requests, and tokens of their prompts
    to be computed; `for_room` how many wait for room. `clock` has the seconds of timelines."""

    def __init__(
        self,
        pool: Pool,
        waiting: Callable[[], Mapping[str, tuple[int, int]]] = dict,
        for_room: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._waiting, self._for_room, self._clock = pool, waiting, for_room, clock
        self._work: dict[str, Work] = {}
        self._due: dict[Walked, list[Part]] = {}
        """Of each walk that is not over the parts whose first token can come in time still."""

    def asked(self, walk: Walked) -> None:
        """A request came, which begins or waits; `ended` must follow."""
        self._asked(walk)
        self._due[walk] = list(walk.parts)

    def refused(self, walk: Walked, why: KvrelayError) -> None:
        """It came, and never began. A limit of its key, or a target that no number of nodes could keep, is no work."""
        if isinstance(why, Overloaded | DeadlineExceeded) and why.code not in _HOPELESS:
            self._asked(walk).first += len(walk.parts)

    def ended(self, walk: Walked, status: int) -> None:
        """It began, and is over."""
        work = self._of(walk.job)
        due = self._still_due(self._due.pop(walk), work)
        work.first += len(due) if status in _LATE else 0
        for part in walk.parts:
            if part.timeline.first_token is not None:
                self._ended(part, status, work)

    def take(self) -> dict[str, Work]:
        """What was counted since the last time, by model."""
        for walk, due in self._due.items():
            work = self._of(walk.job)
            self._due[walk] = self._still_due(due, work)
            work.running += sum(part.timeline.first_token is not None for part in walk.parts)
        work_of, self._work = self._work, {}
        for name, (requests, tokens) in self._waiting().items():
            of = work_of.setdefault(name, Work())
            of.waiting, of.waiting_tokens = requests, tokens
        for name, legs in self._for_room().items():
            work_of.setdefault(name, Work()).waiting += legs
        return work_of

    def _asked(self, walk: Walked) -> Work:
        work = self._of(walk.job)
        work.asked += len(walk.parts)
        work.asked_tokens += sum(part.job.prompt_tokens for part in walk.parts)
        return work

    def _still_due(self, parts: list[Part], work: Work) -> list[Part]:
        """Count what is decided of these; the others."""
        due, now = [], self._clock()
        for part in parts:
            target, times = part.job.targets.ttft_s, part.timeline
            came = times.first_token
            in_time = target is None or (now if came is None else came) - times.arrived <= target
            if came is None and (in_time or part.job.prompt_only):
                due.append(part)
            else:
                work.first += 1
                work.first_met += in_time
        return due

    def _ended(self, part: Part, status: int, work: Work) -> None:
        job, output = part.job, part.output_tokens
        prompt = part.prompt_tokens or job.prompt_tokens
        if part.cached_tokens is not None:
            uncached = max(1, prompt - part.cached_tokens)
            work.computed += 1
            work.guessed_tokens += job.prompt_tokens
            work.uncached_tokens += uncached
            work.prefill_ms += self._pool.fleet(Role.PREFILL, self._pool.base_of(job.model)).prefill_ms(uncached)
        if status == _GONE:
            return  # it says nothing of how long answers are
        work.answered += 1
        work.output_tokens += output
        work.context_tokens += prompt + output / 2
        each_s = part.timeline.inter_token_s(output, job.choices)
        if each_s is not None:
            target = job.targets.tpot_s
            work.last += 1
            work.last_met += target is None or each_s <= target

    def _of(self, job: Job) -> Work:
        model = self._pool.base_of(job.model)
        work = self._work.get(model)
        if work is None:
            work = self._work[model] = Work()
        return work
