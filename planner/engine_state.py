"""The state of a simulated node, and the load that it announces."""

from __future__ import annotations

from msgspec.structs import replace

from kvrelay.planner.block_cache import BlockCache
from kvrelay.planner.pulls import Pulls
from kvrelay.planner.rate_card import RateCard
from kvrelay.planner.seat import Leg, Planned, Seat
from kvrelay.planner.setting import Stream
from kvrelay.wire.announced import Announced
from kvrelay.wire.outputs import Load
from kvrelay.wire.step_costs import Pace, StepBudget, StepCosts

__all__ = ["EngineState", "Entry"]

Entry = tuple[int, int, Seat]
"""A request behind the two numbers that order it."""


class EngineState:
    """A simulated node's requests, memory and steps."""

    pulls: Pulls

    def __init__(self, card: RateCard, block_size: int) -> None:
        self.card, self._block_size = card, block_size
        self._pace = Pace()
        """The pace that the node learns from its steps."""
        self._budget = StepBudget(
            card.step_tokens, block_size, card.costs, card.max_gap_ms, card.shapes, pace=1.0
        )
        self._computed = 0, 0.0
        """Prompt tokens of the running step, and each times those before it."""
        self._plan = 0
        self.cache = BlockCache(card.kv_tokens, block_size)
        self.tokens = 0
        """Not computed, and in no step yet."""
        self.running = self.waiting = 0
        self.legs = 1
        """Requests that came, and one."""
        self._announced = Announced()
        self._pairs = 0.0
        """Each of `tokens` times those before it in its request, summed up."""
        self._seats: dict[Stream, Seat] = {}
        self._line: list[Entry] = []
        self._arrivals = self._arrived_tokens = 0
        self._ready: list[Seat] = []
        self._batch: list[Entry] = []
        self._computing: list[Seat] = []
        """Requests with their last chunk in the running step."""
        self._joined: list[tuple[Seat, float]] = []
        """Requests whose first step ends next, and how long they waited for it."""
        self._steps = self._context = 0
        self._planned = Planned()
        self._launched = self._launching = float("-inf")
        """When the running step's launch had ended; and when the next one's began."""
        self._changing = self._again = False

    @property
    def costs(self) -> StepCosts:
        assert self._budget.costs is not None
        return self._budget.costs

    @property
    def idle(self) -> bool:
        return not self._seats

    def context(self, now: float) -> int:
        return self._context + len(self._batch) * self._planned.done_by(now)

    def free(self, now: float) -> int:
        return max(0, self.cache.free - len(self._batch) * self._planned.done_by(now))

    def load(self, now: float) -> Load:
        block_size, steps = self._block_size, self._steps + self._planned.done_by(now)
        context, promised = self.context(now), 0
        for seat in self._seats.values():
            if seat.running:  # most do
                if seat.due > steps:
                    promised += seat.due - steps
                continue
            in_the_end = seat.stream.prompt + seat.expected
            if not seat.begun:
                has, in_the_end = seat.known - seat.left, max(in_the_end, seat.known)
            elif seat.leg is Leg.PREFILL and seat.told:  # it has ended, and its KV is kept
                continue
            else:
                has = seat.private + len(seat.blocks) * block_size
                if seat.leg is not Leg.DECODE:
                    context += seat.known - seat.left
            promised += max(0, in_the_end - has)
        tokens, pairs = self.tokens + self._computed[0], self._pairs + self._computed[1]
        done_ms = min(now - self._planned.began, self.costs.prompts_ms(*self._computed))
        sums = self._announced
        sums.go_on(now, self.costs, self.running, context)
        load = Load(
            running=self.running,
            waiting=self.waiting,
            waiting_tokens=tokens,
            free_blocks=self.free(now) // block_size,
            total_blocks=self.cache.capacity // block_size,
            block_size=block_size,
            context_tokens=context,
            legs=self.legs,
            pace=self._budget.pace,
            backlog_ms=self.costs.prompts_ms(tokens, pairs) - done_ms,
            token_rate=sums.token_rate,
            prompt_share=sums.prompt_share,
            row_weight=sums.row_weight,
            strictest_tpot_ms=sums.strictest_tpot_ms,
            spill_ms=max(0.0, sums.spill_ms),
            promised_tokens=promised,
            max_num_seqs=self.card.max_num_seqs,
        )
        return replace(load, **self.pulls.announced)
