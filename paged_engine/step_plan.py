"""A step as the scheduler plans it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.paged_engine.request import Request

__all__ = ["Chunk", "Fetch", "ScoredRows", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a request to compute: `count` tokens from position `start` on."""

    request: Request
    start: int
    count: int
    samples: bool
    """The chunk ends at the newest token, so its logits decide the next."""
    proposals: tuple[int, ...] = ()
    """Tokens that may follow the newest one; the last ones of `count`."""
    scored: range = range(0)
    """Positions whose next prompt token's log-probability is asked for."""

    @property
    def sampled_rows(self) -> int:
        return 1 + len(self.proposals) if self.samples else 0

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens to compute; pending ones are missing at the end."""
        return self.request.token_ids[self.start : self.start + self.count] + list(self.proposals)

    @classmethod
    def next_for(cls, request: Request, budget: int) -> Chunk:
        """Return a chunk of the tokens not computed yet, at most `budget`."""
        count = min(request.uncomputed, budget)
        start = request.num_computed
        scored = request.to_score(start, start + count)
        return cls(request, start, count, samples=count == request.uncomputed, scored=scored)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """A step's scored positions, in the order of its chunks."""

    targets: list[int]
    parts: list[tuple[Request, int]]
    most: int
    """The most likeliest tokens that one of them asks for."""

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk]) -> ScoredRows | None:
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
    """A read of remote block i into local block i; empty if the prefix cache held all."""

    request: Request
    remote_blocks: list[int]
    local_blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: list[Chunk]
    fetches: list[Fetch]
    offers: list[Request]
    """Requests that hold KV for a reader and have just begun, with all blocks known."""
