"""A node's load as placement sees it: as announced, and what was placed there since. Pure.

A node numbers the requests that it takes, and says up to which number an announcement goes; a
router adds only what it placed since. All times are milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrelay.wire.announced import FIRST_SPILL_MS
from kvrelay.wire.outputs import Load
from kvrelay.wire.step_costs import MEMORY_MS, TARGET_USED, TPOT_STEPS, StepCosts

__all__ = ["LEAST_TARGET", "UNKNOWN", "NodeLoad", "Share"]

LEAST_LEFT = 0.08
"""The least share of its time that a decode node's steps are thought to leave."""
LEAST_TARGET = 0.5
"""The least share of a usual time that a target counts as."""
MOST_SHARE = 0.97
MOST_KV = 0.5
"""Whoever needs more than this share of a node's KV need not wait until there is more."""
UNKNOWN = StepCosts(20.0, 0.2, 0.0, 0.0, 0.1, 0.0)
"""The step costs of a node of which none are known yet."""
_REQUEST_TOKENS = 512
_ANY = 1e9  # of a node that does not say how many prompts it has


@dataclass(eq=False, slots=True)
class Share:
    prompt_ms: float = 0.0
    kv_tokens: float = 0.0
    context: float = 0.0
    """Tokens that each decode step reads there."""
    rows: int = 1
    output: float = 0.0
    row_weight: float = 0.0
    spill_ms: float = 0.0
    number: int = 0
    """The node's own number of the request; 0: it has not said."""
    held: bool = False


class NodeLoad:
    """A node's load. `_settle` keeps what prices are made of, so a look at 100 nodes is cheap."""

    def __init__(self, name: str, costs: StepCosts = UNKNOWN, gap_ms: float = 50.0) -> None:
        self.name, self.costs, self.gap_ms = name, costs, gap_ms
        self.computes = True
        """A decode node computes prompts if asked."""
        self.own = 0  # requests placed here that have not ended
        self._pending: dict[Share, None] = {}
        self.announced(Load())

    def set_costs(self, costs: StepCosts, gap_ms: float) -> None:
        self.costs, self.gap_ms = costs, gap_ms
        self._settle()

    def restarted(self) -> None:
        """Forget what the process before has announced; its requests end by themselves."""
        for share in self._pending:
            share.number = 0
        self.announced(Load())

    def announced(self, load: Load) -> None:
        """Take over what the node says: all requests numbered up to `load.legs` are in it.

        A node that numbers none (another project's) is believed as far as it says more than was
        placed there.
        """
        self.load = load
        if load.legs:
            self._pending = {
                share: None for share in self._pending if not 0 < share.number <= load.legs
            }
        rows = load.running + load.waiting
        self.rows = float(
            rows if load.legs else max(0, rows - sum(share.rows for share in self._pending))
        )
        self.context, self._row_weight = float(load.context_tokens), load.row_weight
        self.max_num_seqs = load.max_num_seqs
        self.backlog_ms, self.spill_ms = load.backlog_ms, load.spill_ms
        if not load.legs:
            tokens = load.waiting_tokens or _REQUEST_TOKENS * load.waiting
            placed_ms = sum(share.prompt_ms for share in self._pending)
            self.backlog_ms = max(0.0, tokens * self.costs.prompt_token - placed_ms)
        self.prompt_share, self.token_rate = load.prompt_share, load.token_rate
        self.strictest_tpot_ms = load.strictest_tpot_ms
        counts = load.legs and load.block_size
        self.kv_free = (
            float(load.free_blocks * load.block_size - load.promised_tokens) if counts else math.inf
        )
        self.kv_most = MOST_KV * load.total_blocks * load.block_size if counts else math.inf
        for share in self._pending:
            self._count(share, 1)
        self._settle()

    def add(self, share: Share) -> None:
        share.held = True
        self.own += 1
        self._pending[share] = None
        self._count(share, 1)
        self._settle()

    def first_token(self, share: Share) -> None:
        """Note that a request's prompt is computed; a second time changes nothing."""
        if share in self._pending and share.prompt_ms:
            self.backlog_ms = max(0.0, self.backlog_ms - share.prompt_ms)
            self._settle()
        share.prompt_ms = share.spill_ms = 0.0

    def remove(self, share: Share) -> None:
        if share.held:
            share.held = False
            self.own -= 1
            if share in self._pending:
                self._count(share, -1)
                del self._pending[share]
            self._settle()

    def _count(self, share: Share, sign: int) -> None:
        self.backlog_ms = max(0.0, self.backlog_ms + sign * share.prompt_ms)
        self.kv_free -= sign * share.kv_tokens
        self.rows = max(0.0, self.rows + sign * share.rows)
        self.context = max(0.0, self.context + sign * share.context)
        self._row_weight = max(0.0, self._row_weight + sign * share.row_weight)
        self.token_rate = max(0.0, self.token_rate + sign * share.output / MEMORY_MS)
        self.prompt_share = max(0.0, self.prompt_share + sign * share.prompt_ms / MEMORY_MS)
        if share.spill_ms:
            most = max(share.spill_ms, FIRST_SPILL_MS) if sign > 0 else math.inf
            self.spill_ms = min(self.spill_ms, most) - sign * share.spill_ms

    def _settle(self) -> None:
        costs, pace = self.costs, self.pace
        share = min(MOST_SHARE, self.prompt_share)
        self.linear_ms, self.square_ms = pace * costs.prompt_token, pace * costs.prompt_context / 2
        self.base_ms = pace * max(0.0, costs.step + costs.prompts)
        self.wait_ms = self.backlog_ms + self.base_ms
        self.prompts = self.rows if self.load.legs else _ANY
        self.behind = stretched = 1 / (1 - share)
        self.context_ms = pace * costs.row_context * stretched
        self.row_ms = pace * costs.decode_ms(self.rows + 1, self.context) * stretched
        self.next_row_ms = pace * costs.row * stretched
        self.stretch = 1 + (
            pace * costs.decode_ms(self.rows, self.context) / self.gap_ms if self.rows else 0.0
        )
        left = max(LEAST_LEFT, 1 - share - self.token_rate * self.per_token_ms)
        usual_ms = costs.usual_tpot_ms  # a fitted card may have no fixed part of a step
        token_ms = pace * usual_ms / TPOT_STEPS / left
        limit_ms = self.strictest_tpot_ms or usual_ms
        self.lost = self._row_weight / left * (token_ms / limit_ms)
        # Whoever needs no more KV finds room; an idle node has what it has.
        self.room = math.inf if self.kv_most <= self.kv_free or self.is_idle else self.kv_free

    @property
    def pace(self) -> float:
        return self.load.pace or 1.0

    @property
    def step_ms(self) -> float:
        return self.pace * self.costs.step

    @property
    def per_token_ms(self) -> float:
        each = self.costs.row + self.costs.row_context * self.context / max(1.0, self.rows)
        return self.pace * each

    @property
    def depth(self) -> float:
        """Return the queue in requests; so many tokens of prompts that wait are one more."""
        each_ms = _REQUEST_TOKENS * (self.linear_ms + self.square_ms * _REQUEST_TOKENS)
        return self.rows + (self.backlog_ms / each_ms if each_ms else 0.0)

    @property
    def usual_tpot_ms(self) -> float:
        return self.pace * self.costs.usual_tpot_ms

    @property
    def limit_left(self) -> float:
        """Return the share of time left for prompts until tokens take too long; may be negative.

        By the strictest request there, as the node itself limits prompts (wire/announced.py).
        """
        planned_ms = TARGET_USED * (self.strictest_tpot_ms or self.usual_tpot_ms)
        taken = self.prompt_share + self.token_rate * self.per_token_ms
        return 1 - taken - self.step_ms / planned_ms

    def empty_steps(self, tpot_ms: float) -> float:
        """Return the share of time that empty steps take; `tpot_ms`: where no request names one.

        No other split of roles makes steps quicker: a target that they alone exceed, because the
        node's machine is busy, counts as the least that may be told.
        """
        wanted_ms = self.strictest_tpot_ms or tpot_ms or self.usual_tpot_ms
        return self.step_ms / max(LEAST_TARGET * self.usual_tpot_ms, wanted_ms)

    def has_seats(self, rows: int) -> bool:
        """Return whether so many more rows would decode at once, or half of all seats are free."""
        seats = self.max_num_seqs
        return not seats or self.rows + min(rows, (seats + 1) // 2) <= seats

    @property
    def is_idle(self) -> bool:
        return not (self.rows or self.own or self.backlog_ms)

    def prompt_ms(self, tokens: float, cached: float) -> float:
        left = tokens - min(cached, tokens - 1)
        return left * (self.linear_ms + self.square_ms * (2 * tokens - left))

    def idle_ms(self, tokens: float, rows: int = 1) -> tuple[float, float]:
        """Return the TTFT and the time per token of a request that is alone here."""
        decode_ms = self.costs.decode_ms(rows, rows * tokens)
        return self.pace * self.costs.prompt_ms(tokens), self.pace * decode_ms
