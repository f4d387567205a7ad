"""A simulated node: steps of decodes and chunks of prompts, KV that grows, and who waits.

It follows paged_engine/scheduler.py. Between two changes of a batch without chunks all steps are
alike but for the KV that grows, so an event is a change, not a step.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvrelay.planner.engine_state import EngineState, Entry
from kvrelay.planner.pulls import Pulls
from kvrelay.planner.rate_card import Piece, RateCard
from kvrelay.planner.seat import Leg, PlacementHints, Planned, Seat
from kvrelay.planner.setting import Stream

__all__ = ["OVERTAKEN", "Engine"]

OVERTAKEN = 2
"""The same as in paged_engine/waiting.py, which would bring numpy along."""


_NOTHING = PlacementHints()
_PACE_STEPS = 16
"""More steps that are alike are not looked at: a pace moves by 3 % with each."""
_NO_LIMIT = 1 << 30


class Engine(EngineState):
    """A simulated node; `later(ms, call)` makes a call at a time.

    `hears` is told what happens, as planner/world.py is.
    """

    def __init__(
        self,
        card: RateCard,
        block_size: int,
        later: Callable[[float, Callable[[float], None]], None],
        hears: Any,
        below: Mapping[str, int] | None = None,
        *,
        pulls: bool = False,
    ) -> None:
        super().__init__(card, block_size)
        self.later, self._hears = later, hears
        self.pulls = Pulls(self, below or {}, peers=pulls)

    def submit(
        self,
        stream: Stream,
        leg: Leg,
        now: float,
        told: PlacementHints = _NOTHING,
    ) -> None:
        if told.spill_tokens:
            self.load(now)  # until now its limit grows by the targets of those before
        self.legs += 1
        seat = self._seats[stream] = Seat(stream, leg, int(leg is Leg.DECODE), came=now)
        if leg is not Leg.PREFILL:
            wanted = told.tpot_ms, told.expected_output
            seat.tpot_ms, seat.expected = self._announced.came(*wanted, _NO_LIMIT, self.costs)
        if leg is Leg.DECODE:
            work, arrives = 0, stream.prompt + 1
        else:
            seat.known = stream.prompt
            work = arrives = seat.known - self.cached(seat)
            ms = self.costs.prompts_ms(work, _pairs(seat.known, work))
            seat.spills = told.spill_tokens > 0
            self._announced.prompt(ms, spills=seat.spills)
        self._arrivals += 1
        self._arrived_tokens += arrives
        seat.turn = (self._arrived_tokens + OVERTAKEN * work, self._arrivals)
        self._wait(seat, work)
        if leg is not Leg.DECODE:
            self.pulls.begin(seat, [*told.sources], now)
        if self._planned.count and not self._changing and leg is Leg.DECODE and self.waiting == 1:
            self._begin_beside(seat, now)
        else:
            self.wake(now)

    def computed(self, stream: Stream, last_chunk: int, now: float) -> None:
        """Note that a decode leg's KV is computed; all but its last chunk may be here already."""
        seat = self._seats[stream]
        seat.computed_at = now
        if seat.begun:
            self._await_fetch(seat, min(seat.missing, last_chunk), now)

    def release(self, stream: Stream, now: float) -> None:
        seat = self._seats.pop(stream)
        self.cache.give_back(seat.blocks, seat.private)
        if self.waiting:
            self.wake(now)

    def _wait(self, seat: Seat, work: int) -> None:
        seat.begun = False
        self.have_left(seat, work)
        self.waiting += 1
        bisect.insort(self._line, (*seat.turn, seat))

    def have_left(self, seat: Seat, left: int) -> None:
        self.tokens += left - seat.left
        self._pairs += _pairs(seat.known, left) - _pairs(seat.known, seat.left)
        seat.left = left

    def note_pulled(self, seat: Seat, tokens: int, start: int) -> None:
        self._announced.prompt(-self.costs.chunk_ms(tokens, start), spills=seat.spills)

    def _leave(self, seat: Seat) -> None:
        del self._line[bisect.bisect_left(self._line, seat.turn, key=lambda each: each[:2])]

    def wake(self, now: float) -> None:
        if self._changing:
            self._again = True
        elif not self._planned.count:
            self._change(now)
        else:
            self._cut_short(self._planned.done_by(now) + 1 + self.card.ahead)

    def _begin(self, seat: Seat, now: float, taken: int) -> bool:
        stream, cache = seat.stream, self.cache
        holds = stream.prompt + seat.generated + (seat.leg is Leg.WHOLE)
        private = holds - len(stream.blocks) * cache.block_size
        if self.running >= self.card.max_num_seqs or not cache.room_for(
            stream.blocks, private + taken
        ):
            return False
        found = cache.cached(stream.blocks) if seat.leg is Leg.DECODE else self.cached(seat)
        seat.blocks = cache.take(stream.blocks, private)
        seat.private = holds - len(seat.blocks) * cache.block_size
        seat.begun = True
        self.running += 1
        self.waiting -= 1
        if seat.leg is Leg.DECODE:
            seat.missing = max(0, stream.prompt + seat.generated - 1 - found)
            if seat.computed_at >= 0:
                self._await_fetch(seat, seat.missing, now)
            return True
        self.have_left(seat, seat.known - found)
        self.pulls.used(stream.blocks[: found // cache.block_size])
        if stream.begun < 0:
            stream.begun = now
        if stream.first < 0:
            stream.cached, stream.read = found, {}
        if seat.leg is Leg.PREFILL:
            self._hears.begins(stream, now)
        return True

    def cached(self, seat: Seat) -> int:
        return self.cache.cached(seat.stream.blocks[: (seat.known - 1) // self.cache.block_size])

    def _begin_beside(self, seat: Seat, now: float) -> None:
        running, steps = len(self._batch), self._planned.done_by(now)
        if self._begin(seat, now, running * (steps + 1)):
            self._leave(seat)
            if running:  # which have less room to grow now
                self._cut_short(max(steps + 1, self.cache.free // running))

    def _await_fetch(self, seat: Seat, tokens: int, now: float) -> None:
        took = self.card.fetch_ms(tokens) if tokens else 0.0
        self.later(now + took, lambda then: self._arrived(seat, then))

    def _arrived(self, seat: Seat, now: float) -> None:
        self.cache.ready(seat.blocks)
        # Preempted, it is computed here.
        seat.leg = Leg.WHOLE
        seat.told = True
        seat.came = now
        self._hears.fetched(seat.stream, now)
        self._ready.append(seat)
        self.wake(now)

    def _cut_short(self, steps: int) -> None:
        if steps < self._planned.count:
            self._planned.count = steps
            self._schedule()

    def _schedule(self) -> None:
        self._plan += 1
        plan = self._plan
        self.later(self._planned.ends, lambda then: self._planned_end(plan, then))

    def _planned_end(self, plan: int, now: float) -> None:
        if plan == self._plan:
            self._change(now)

    def _change(self, now: float) -> None:
        self._changing, self._again = True, True
        self._launching = now
        if self._planned.count:
            if self.card.ahead:
                self._launching = min(now, max(self._launched, now - self._planned.last_ms))
            self._settle(now)
        while self._again and not self._planned.count:
            self._again = False
            self._next(now)
        self._changing = False

    def _next(self, now: float) -> None:
        pieces = self._made_up(now)
        running = len(self._batch)
        if self._launching < now and not running and not pieces:
            # It had nothing to launch until the first of them came.
            self._launching = min((came for came in self._came_late() if came <= now), default=now)
            pieces = self._made_up(now)
            running = len(self._batch)
        if not running and not pieces:
            return
        card = self.card
        if pieces:
            before = now - self._launching
            self._launched = self._launching + card.launch_ms(running, pieces)
            ms = (
                card.mixed_ms(running, self._context, pieces, before)
                if running
                else card.chunk_ms(pieces, before)
            )
            self._planned = Planned(1, now, ms)
            self._computed = (
                sum(count for count, _ in pieces),
                sum(count * (at + count / 2) for count, at in pieces),
            )
        else:
            steps = self._batch[0][0] - self._steps
            if self.card.ahead and next(self._came_late(), None) is not None:
                steps = 1
            steps = max(1, min(steps, self.cache.free // running)) if running > 1 else steps
            first = card.step_ms(running, self._context)
            last = card.step_ms(running, self._context + running * steps)
            self._planned = Planned(steps, now, first, (last - first) / steps)
        self._schedule()

    def _made_up(self, now: float) -> list[Piece]:
        ready, self._ready = self._ready, []
        for seat in ready:
            if seat.came <= self._launching:
                self._join(seat, now)
            else:
                self._ready.append(seat)
        return [] if self._preempted(now) else self._chunks(now)

    def _came_late(self) -> Iterator[float]:
        came = (seat.came for seat in (*self._ready, *(entry[2] for entry in self._line)))
        return (at for at in came if self._launching < at < math.inf)

    def _settle(self, now: float) -> None:
        steps, running = self._planned.count, len(self._batch)
        self._planned.count = 0
        self._keep_pace(steps, (now - self._planned.began) / steps)
        if running:
            self._steps += steps
            self._context += running * steps
            self.cache.private += running * steps
            self.cache.shrink()
            gap = (now - self._planned.began) / steps
            first_ms = self._planned.took(1)
            for _, waited in self._joined:
                self._waited(waited + first_ms)
            self._hears.gap(gap, running * steps - len(self._joined))
            self._joined.clear()
        while self._batch and self._batch[0][0] <= self._steps:
            seat = heapq.heappop(self._batch)[2]
            self._context -= seat.stream.prompt + seat.stream.output - 1
            self._end(seat, seat.private + seat.stream.output - seat.generated, now)
        computing, self._computing = self._computing, []
        for seat in computing:
            self._prompt_computed(seat, now)

    def _keep_pace(self, steps: int, took_ms: float) -> None:
        costs, rows = self.card.costs, len(self._batch)
        decoding_ms = (
            costs.decode_ms(rows, self._context + rows * steps / 2) if rows else costs.step
        )
        for _ in range(min(steps, _PACE_STEPS)):
            self._pace.saw(took_ms, decoding_ms + costs.prompts_ms(*self._computed))
        self._computed, pace = (0, 0.0), self._pace.factor
        self._budget = replace(self._budget, costs=costs.scaled(pace), pace=pace)

    def _end(self, seat: Seat, private: int, now: float) -> None:
        stream = seat.stream
        self.cache.give_back(seat.blocks, private, stream.answer)
        self.running -= 1
        del self._seats[stream]
        if seat.tpot_ms:
            self._announced.left(seat.tpot_ms, seat.expected, stream.output, complete=True)
        self._hears.ended(stream, now)

    def _prompt_computed(self, seat: Seat, now: float) -> None:
        stream = seat.stream
        if seat.leg is Leg.PREFILL:
            self.running -= 1
        else:
            seat.generated += 1
        if seat.told:
            self._waited(now - seat.stopped)
            seat.stopped = now
        else:
            seat.told = True
            last_chunk = (seat.known - stream.cached - 1) % self.card.step_tokens + 1
            self._hears.computed(stream, now, last_chunk)
        if seat.leg is Leg.PREFILL:
            return
        if seat.generated >= stream.output:
            self._end(seat, seat.private, now)
        else:
            self._ready.append(seat)

    def _join(self, seat: Seat, now: float) -> None:
        stream = seat.stream
        seat.ends_at = self._steps + stream.output - seat.generated
        seat.due = seat.ends_at - stream.output + seat.expected
        seat.running = True
        self._context += stream.prompt + seat.generated - 1
        waited = now - (seat.stopped if seat.stopped >= 0 else stream.first)
        if waited > 0:
            self._joined.append((seat, waited))
        heapq.heappush(self._batch, (seat.ends_at, seat.turn[1], seat))

    def _waited(self, ms: float) -> None:
        if ms > 0:
            self._hears.gap(ms, 1)

    def _chunks(self, now: float) -> list[Piece]:
        reserved = len(self._batch)
        room = self._budget.room(reserved, self.context(now) if reserved else 0)
        pieces: list[Piece] = []
        ready: list[int] = []
        kept: list[Entry] = []
        admits, at = True, 0
        for at, entry in enumerate(self._line):  # noqa: B007
            seat = entry[2]
            if not room.is_open:
                break
            if seat.came > self._launching:
                kept.append(entry)
                continue
            if not seat.begun:
                admits = admits and self._begin(seat, now, reserved)
                if not admits:
                    kept.append(entry)
                    continue
                if seat.leg is Leg.DECODE:
                    continue
                if seat.lease is not None and self.pulls.reads(seat, now):
                    kept.append(entry)
                    continue
            start = seat.known - seat.left
            count = room.take(seat.left, start)
            pieces.append((count, start))
            block_size = self.cache.block_size
            ready += seat.stream.blocks[start // block_size : (start + count) // block_size]
            self.have_left(seat, seat.left - count)
            if seat.left:
                kept.append(entry)
            else:
                self._computing.append(seat)
        else:
            at = len(self._line)
        self._line[:at] = kept
        self.cache.ready(ready)
        return pieces

    def _preempted(self, now: float) -> bool:
        any_was = False
        while len(self._batch) > 1 and self.cache.free < len(self._batch):
            self._preempt(max((each[2] for each in self._batch), key=lambda seat: seat.turn), now)
            any_was = True
        return any_was

    def _preempt(self, seat: Seat, now: float) -> None:
        self._batch = [each for each in self._batch if each[2] is not seat]
        self._joined = [each for each in self._joined if each[0] is not seat]
        heapq.heapify(self._batch)
        stream = seat.stream
        generated = stream.output - (seat.ends_at - self._steps)
        self._context -= stream.prompt + generated - 1
        self.cache.give_back(seat.blocks, seat.private + generated - seat.generated)
        seat.generated, seat.private, seat.stopped, seat.running = generated, 0, now, False
        seat.known = stream.prompt + generated  # with nothing left: all of it was computed
        stream.preempted += 1
        self.running -= 1
        self._wait(seat, seat.known - self.cached(seat))


def _pairs(known: int, left: int) -> float:
    return left * (known - left / 2)
