"""A leg on a simulated node, and the steps that a node has planned. Values only; milliseconds."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.planner.block_cache import BlockCache
from kvrelay.planner.setting import Stream

__all__ = ["Lease", "Leg", "PlacementHints", "Planned", "Seat", "Source"]


class Leg(enum.Enum):
    PREFILL = "prefill"
    """Compute the prompt's KV, and a token; the KV is kept until it is released."""
    DECODE = "decode"
    """Generate tokens from KV that is fetched."""
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Source:
    """A place of cached KV; what the first of its caches lacks may be in the next, for `more_ms`."""

    caches: tuple[BlockCache, ...]
    once_ms: float
    token_ms: float
    more_ms: float = 0.0
    rung: str = "host"
    told: int = 0
    """Tokens of the prompt that a peer is thought to have; 0: of the node's own."""

    def ms(self, tokens: int, stored: int) -> float:
        return tokens * self.token_ms + stored * self.more_ms

    def found(self, names: Sequence[int]) -> list[tuple[BlockCache, Sequence[int]]]:
        """Return which of these blocks each cache has, in order."""
        found = []
        for cache in self.caches:
            count = cache.cached(names) // cache.block_size
            found.append((cache, names[:count]))
            names = names[count:]
        return found


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease of cached blocks, with which `reached` blocks of a prompt are there."""

    source: Source
    held: Sequence[tuple[BlockCache, Sequence[int]]]
    reached: int


@dataclass(frozen=True, slots=True)
class PlacementHints:
    """A router's hints to a decode node, which announces them to all routers."""

    tpot_ms: float = 0.0
    expected_output: int = 0
    """0: what is usual on the node."""
    spill_tokens: int = 0
    """Prompt tokens to compute that a prefill node could."""
    sources: tuple[Source, ...] = ()
    """Where else a part of the prompt's KV is thought to be."""


@dataclass(eq=False, slots=True)
class Seat:
    """A leg on a node; `ends_at` is the number of the step with its last token."""

    stream: Stream
    leg: Leg
    generated: int
    """Tokens that are there; a decode leg counts the one of its prefill node."""
    tpot_ms: float = 0.0
    """Target time per token; 0: it does not decode here."""
    expected: int = 0
    """Expected tokens of its answer."""
    came: float = float("-inf")
    """When it was ready for a step to be launched with it."""
    turn: tuple[int, int] = (0, 0)
    known: int = 0
    """Tokens whose KV is to be computed here."""
    left: int = 0
    begun: bool = False
    told: bool = False
    blocks: tuple[int, ...] = ()
    """Named blocks here; one that two requests compute at once is named for one alone."""
    private: int = 0
    """Tokens of KV in no named block, when it began to run."""
    missing: int = 0
    computed_at: float = -1.0
    ends_at: int = 0
    due: int = 0
    stopped: float = -1.0
    running: bool = False
    sources: list[Source] = field(default_factory=list)
    """Sources to ask yet, the best last."""
    lease: Lease | None = None
    """Blocks that the request reads, or will read."""
    spills: bool = False

    def let_go(self) -> None:
        lease, self.lease = self.lease, None
        for cache, names in () if lease is None else lease.held:
            cache.give_back(names, 0)


@dataclass(slots=True)
class Planned:
    """A plan of steps from `began` on: the first takes `each`, every further one `growth` longer."""

    count: int = 0
    began: float = 0.0
    each: float = 0.0
    growth: float = 0.0

    def took(self, steps: int) -> float:
        return steps * self.each + self.growth * steps * (steps - 1) / 2

    @property
    def ends(self) -> float:
        return self.began + self.took(self.count)

    @property
    def last_ms(self) -> float:
        return self.took(self.count) - self.took(self.count - 1)

    def done_by(self, now: float) -> int:
        if self.count <= 1:
            return 0
        passed, growth = now - self.began, self.growth
        linear = self.each - growth / 2
        steps = passed / linear
        if growth * steps > 1e-6 * linear:
            steps = (math.sqrt(linear * linear + 2 * growth * passed) - linear) / growth
        return min(self.count, int(steps + 1e-6))
