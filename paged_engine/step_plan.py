"""What one step does: chunks of requests to compute, blocks to fetch, KV to offer. Values, made by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from paged_engine.request import Request

__all__ = ["Chunk", "Fetch", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `count` tokens of a request from position `start` on."""

    request: Request
    start: int
    count: int
    samples: bool
    """Whether the chunk ends at the newest token, so that its logits decide the next."""

    @classmethod
    def next_of(cls, request: Request, budget: int) -> Chunk:
        """The tokens of a request that are not computed yet, at most `budget` of them."""
        count = min(request.uncomputed, budget)
        return cls(request, request.num_computed, count, samples=count == request.uncomputed)


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
    """Requests that hold their KV for a reader and have just begun: all blocks of their prompt are known."""
