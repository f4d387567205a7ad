"""A decode node of a simulation: steps of all that run together, KV that grows with each, and who waits for room.

Between two changes of the batch all steps are alike but for the KV that grows, so their times have a closed form: an
event is a change, not a step. As paged_engine/scheduler.py: a request begins at the end of a step, in the order of
arrival, when the KV of its prompt and one token find room; one that finds no block for its next token preempts the last
in order, whose KV is computed again in chunks between the others' steps.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.block_cache import BlockCache
from benchmarks.simulation.stream import Speeds, Stream
from wire.outputs import Load

__all__ = ["DecodeNode"]


@dataclass(eq=False, slots=True)
class _Seat:
    """A request here. `ends_at` is the number of the step with its last token."""

    stream: Stream
    order: int
    arrived: float
    private: int = 0
    """Tokens of KV here that are in no named block."""
    missing: int = 0
    """Of its prompt's KV, to be fetched."""
    generated: int = 1
    """When it last began to run; the first token comes from the prefill node."""
    recompute: int = 0
    ends_at: int = 0
    placed: bool = False
    computed_at: float = -1.0
    """When its prefill node has computed all; negative until then."""
    computed_in_last: int = 0
    """Tokens of the last chunk there, which alone are fetched after it."""
    exposed: float = 0.0
    fetched: bool = False
    joined: float = 0.0
    stopped: float = 0.0


class DecodeNode:
    """`fetched` is told when a prefill node need not keep its KV any more, `ends` when the last token is there.

    `gap(ms, times)` is told of the time between tokens."""

    def __init__(
        self,
        speeds: Speeds,
        block_tokens: int,
        later: Callable[[float, Callable[[float], None]], None],
        fetched: Callable[[Stream, float, float], None],
        ends: Callable[[Stream, float, float, float], None],
        gap: Callable[[float, int], None],
    ) -> None:
        self.cache = BlockCache(speeds.kv_tokens, block_tokens)
        self.preemptions = 0
        self._speeds = speeds
        self._later, self._fetched, self._ends, self._gap = later, fetched, ends, gap
        self._seats: dict[Stream, _Seat] = {}
        self._line: deque[_Seat] = deque()
        self._arrivals = 0
        self._fetching = 0
        self._ready: list[_Seat] = []
        self._recomputing: deque[_Seat] = deque()
        self._batch: list[tuple[int, int, _Seat]] = []
        self._steps = 0
        self._context = 0
        self._began = 0.0
        self._planned = 0
        """Steps until the next change; 0 while nothing runs."""
        self._chunk_ms = 0.0
        self._plan = 0

    @property
    def requests(self) -> int:
        """All that are here."""
        return len(self._seats)

    def context(self, now: float) -> int:
        """Tokens of KV of all that run."""
        return self._context + len(self._batch) * self._steps_by(now)

    def free(self, now: float) -> int:
        """Tokens of KV that still find room."""
        return max(0, self.cache.free - len(self._batch) * self._steps_by(now))

    def load(self, now: float) -> Load:
        """As an engine reports it."""
        block_tokens, waiting = self.cache.block_tokens, len(self._line)
        return Load(
            running=len(self._seats) - waiting,
            waiting=waiting,
            waiting_tokens=sum(seat.recompute for seat in self._recomputing),
            free_blocks=self.free(now) // block_tokens,
            total_blocks=self.cache.capacity // block_tokens,
            block_tokens=block_tokens,
            context_tokens=self.context(now),
        )

    def submit(self, stream: Stream, now: float) -> None:
        """A request whose prompt begins to be computed elsewhere."""
        self._arrivals += 1
        seat = self._seats[stream] = _Seat(stream, self._arrivals, now)
        self._line.append(seat)
        if not self._planned:
            self._change(now)
        elif len(self._line) == 1:
            self._admit(now)

    def computed(self, stream: Stream, last_chunk: int, now: float) -> None:
        """Its prompt is computed; what was not in the last chunk has been fetched meanwhile, if it had room."""
        seat = self._seats[stream]
        seat.computed_at, seat.computed_in_last = now, last_chunk
        if seat.placed:
            self._await_fetch(seat, min(seat.missing, last_chunk), now)

    # --- who begins ----------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Give those that wait their room, in order."""
        while self._line and self._running < self._speeds.max_running:
            seat = self._line[0]
            stream, cache = seat.stream, self.cache
            private = stream.prompt - len(stream.blocks) * cache.block_tokens + seat.generated
            # Steps that run have taken room that the cache has not been told of.
            taken = len(self._batch) * self._steps_by(now)
            if not cache.room_for(stream.blocks, private + taken):
                return
            self._line.popleft()
            found = cache.cached(stream.blocks)
            cache.take(stream.blocks, private)
            seat.private, seat.placed = private, True
            if seat.fetched:  # preempted since
                seat.recompute = max(1, stream.prompt + seat.generated - 1 - found)
                self._recomputing.append(seat)
                continue
            seat.missing = max(0, stream.prompt - found)
            self._fetching += 1
            if seat.computed_at >= 0:
                self._await_fetch(seat, seat.missing, now)

    @property
    def _running(self) -> int:
        return len(self._seats) - len(self._line)

    def _await_fetch(self, seat: _Seat, tokens: int, now: float) -> None:
        took = self._speeds.fetch_ms(tokens) if tokens else 0.0
        seat.exposed = now + took - seat.computed_at
        self._later(now + took, lambda then: self._arrived(seat, then))

    def _arrived(self, seat: _Seat, now: float) -> None:
        """All of its KV is here: it joins at the end of the step that runs."""
        self._fetching -= 1
        seat.fetched = True
        self._fetched(seat.stream, now, seat.exposed)
        self._ready.append(seat)
        if not self._planned:
            self._change(now)
        else:
            self._cut_short(now)

    # --- steps ---------------------------------------------------------------------------------------------------

    def _elapsed(self, steps: int) -> float:
        speeds, running = self._speeds, len(self._batch)
        each = speeds.step_ms(running, self._context) + self._chunk_ms
        return steps * each + speeds.decode_context * running * steps * (steps - 1) / 2

    def _steps_by(self, now: float) -> int:
        """How many of the planned steps have ended."""
        if not self._planned:
            return 0
        passed, running = now - self._began, len(self._batch)
        each = self._speeds.step_ms(running, self._context) + self._chunk_ms
        growth = self._speeds.decode_context * running
        linear = each - growth / 2
        steps = passed / linear
        if growth * steps > 1e-6 * linear:
            steps = (math.sqrt(linear * linear + 2 * growth * passed) - linear) / growth
        return min(self._planned, int(steps + 1e-6))

    def _cut_short(self, now: float) -> None:
        """Let the plan end with the step that runs now."""
        steps = self._steps_by(now) + 1
        if steps < self._planned:
            self._planned = steps
            self._schedule()

    def _schedule(self) -> None:
        self._plan += 1
        plan = self._plan
        self._later(self._began + self._elapsed(self._planned), lambda then: self._planned_end(plan, then))

    def _planned_end(self, plan: int, now: float) -> None:
        if plan == self._plan:
            self._change(now)

    def _change(self, now: float) -> None:
        """The end of a step, or the beginning of the first: who leaves, who comes, and how many steps follow."""
        if self._planned:
            self._settle(now)
        self._admit(now)
        for seat in self._ready:
            self._join(seat, now)
        self._ready.clear()
        self._recompute(now)
        steps = self._steps_with_room(now)
        self._plan += 1
        if not self._batch and not self._chunk_ms:
            self._planned = 0
            return
        self._began = now
        self._planned = 1 if self._chunk_ms else steps
        self._schedule()

    def _settle(self, now: float) -> None:
        """The planned steps have ended."""
        steps, running = self._planned, len(self._batch)
        self._planned = 0
        self._steps += steps
        self._context += running * steps
        self.cache.private += running * steps
        self.cache.shrink()
        if running:
            self._gap((now - self._began) / steps, running * steps)
        self._chunk_ms = 0.0
        while self._batch and self._batch[0][0] <= self._steps:
            seat = heapq.heappop(self._batch)[2]
            stream = seat.stream
            self._context -= stream.prompt + stream.output - 1
            self.cache.give_back(stream.blocks, seat.private + stream.output - seat.generated)
            del self._seats[stream]
            self._ends(stream, now, now - seat.joined, seat.joined - seat.arrived)

    def _join(self, seat: _Seat, now: float) -> None:
        stream = seat.stream
        seat.ends_at = self._steps + stream.output - seat.generated
        self._context += stream.prompt + seat.generated - 1
        if seat.generated == 1:
            seat.joined = now
            seat.stopped = stream.first
        # The first of its steps counts with all others; this is what it has waited longer.
        if now > seat.stopped:
            self._gap(now - seat.stopped, 1)
        heapq.heappush(self._batch, (seat.ends_at, seat.order, seat))

    def _recompute(self, now: float) -> None:
        """A chunk of what was preempted goes with the next step; who is computed joins behind it."""
        budget = self._speeds.step_tokens - len(self._batch)
        pieces: list[tuple[int, int]] = []
        while self._recomputing and budget > 0:
            seat = self._recomputing[0]
            count = min(budget, seat.recompute)
            pieces.append((count, seat.stream.prompt + seat.generated - 1 - seat.recompute))
            seat.recompute -= count
            budget -= count
            if seat.recompute:
                break
            self._ready.append(self._recomputing.popleft())
        if pieces:
            self._chunk_ms = self._speeds.chunk_ms(pieces) - (self._speeds.decode_fixed if self._batch else 0.0)

    def _steps_with_room(self, now: float) -> int:
        """Until somebody ends or room does, at least one; whoever finds no room for the next token is preempted."""
        while self._batch:
            steps, running = self._batch[0][0] - self._steps, len(self._batch)
            if self.cache.free >= running:
                return min(steps, self.cache.free // running)
            if running == 1:
                return steps
            self._preempt(max((seat for _, _, seat in self._batch), key=lambda seat: seat.order), now)
        return 0

    def _preempt(self, seat: _Seat, now: float) -> None:
        self._batch = [each for each in self._batch if each[2] is not seat]
        heapq.heapify(self._batch)
        generated = seat.stream.output - (seat.ends_at - self._steps)
        self._context -= seat.stream.prompt + generated - 1
        self.cache.give_back(seat.stream.blocks, seat.private + generated - seat.generated)
        seat.generated, seat.private, seat.placed, seat.stopped = generated, 0, False, now
        seat.stream.preempted += 1
        self.preemptions += 1
        # Back to its place: before all that came after it.
        at = sum(each.order < seat.order for each in self._line)
        self._line.insert(at, seat)
