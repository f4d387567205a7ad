"""What one step does: chunks of requests to compute, blocks to fetch, KV to offer. Values, made by
the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.paged_engine.request import Request

__all__ = ["Chunk", "Fetch", "ScoredRows", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `count` tokens of a request from position `start` on."""

    request: Request
    start: int
    count: int
    samples: bool
    """Whether the chunk ends at the newest token, so that its logits decide the next."""
    proposals: tuple[int, ...] = ()
    """Tokens that may come behind the newest one; the last ones of `count`."""
    scored: range = range(0)
    """Positions at which the log-probability of the prompt's next token is asked for."""

    @property
    def sampled_rows(self) -> int:
        """How many of its last rows are sampled."""
        return 1 + len(self.proposals) if self.samples else 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute, as far as they are known; pending ones are missing at the end."""
        return self.request.token_ids[self.start : self.start + self.count] + list(self.proposals)

    @classmethod
    def next_for(cls, request: Request, budget: int) -> Chunk:
        """The tokens of a request that are not computed yet, at most `budget` of them."""
        count = min(request.uncomputed, budget)
        start = request.num_computed
        scored = request.to_score(start, start + count)
        return cls(request, start, count, samples=count == request.uncomputed, scored=scored)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The scored positions of a step, in the order of its chunks."""

    targets: list[int]
    """The token after each of them."""
    parts: list[tuple[Request, int]]
    """Whose they are, and how many."""
    most: int
    """The largest number of likeliest tokens that one of them asks for."""

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk]) -> ScoredRows | None:
        """None if no chunk has any."""
        scored = [chunk for chunk in chunks if chunk.scored]
        if not scored:
            return None
        targets = [
            chunk.request.token_ids[position + 1] for chunk in scored for position in chunk.scored
        ]
        most = max(chunk.request.params.prompt_logprobs or 0 for chunk in scored)
        return cls(targets, [(chunk.request, len(chunk.scored)) for chunk in scored], most)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read remote block i into local block i. Empty when the prefix cache held everything."""

    request: Request
    remote_blocks: list[int]
    local_blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does."""

    chunks: list[Chunk]
    fetches: list[Fetch]
    offers: list[Request]
    """Requests that hold their KV for a reader and have just begun: all blocks of their prompt are
    known.
    """
