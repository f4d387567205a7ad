"""One request of a simulation, and what became of it. Times are milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvrelay.load.workloads import Asked, Workload
from kvrelay.simulator.speeds import H200, Speeds

__all__ = ["Stream", "Targets", "at_load", "streams_at", "streams_of"]


@dataclass(frozen=True, slots=True)
class Targets:
    """What a good request keeps: its first token and the mean of the others in time, as its client
    sees them.
    """

    ttft_ms: float
    tpot_ms: float


@dataclass(eq=False, slots=True)
class Stream:
    """A request: `output` tokens after `prompt` tokens whose full blocks are named by `blocks`;
    then its fate.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    session: str = ""
    priority: int = 0
    targets: Targets | None = None
    """As it tells the router."""

    number: int = 0
    cached: int = 0
    """Tokens of the prompt that the node had which computed it."""
    begun: float = -1.0
    """When its prompt began to be computed; then, when its first and its last token were there."""
    first: float = -1.0
    last: float = -1.0
    told: float = -1.0
    """When its newest token was there, as of its last hand-over or loss."""
    done: int = 0
    """Tokens that its client has, as of then."""
    longest: float = 0.0
    """Of all times between two tokens."""
    preempted: int = 0
    moved: int = 0
    """How often a node was lost that had it."""
    local: bool = False
    """The node that generates has computed the prompt."""
    refused: bool = False
    """No node could take it."""
    failed: bool = False
    """It began, and did not end in time."""

    @property
    def answered(self) -> bool:
        """Whether its client has all of its tokens."""
        return self.last >= 0

    @property
    def ttft(self) -> float:
        """From its arrival to its first token."""
        return self.first - self.at

    @property
    def tpot(self) -> float:
        """Milliseconds for each token after the first."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


def at_load(asks: Sequence[Asked], duration_ms: float) -> list[Stream]:
    """Requests that are stretched to this duration, in order. One alone comes at once."""
    last = max(each.at for each in asks)
    return _streams(asks, duration_ms / last if last else 0.0)


def streams_at(asks: Sequence[Asked], rate_s: float) -> list[Stream]:
    """Requests at so many a second on average, in order."""
    return at_load(asks, len(asks) / rate_s * 1e3)


def _streams(asks: Sequence[Asked], stretched: float) -> list[Stream]:
    return [
        Stream(
            each.at * stretched, each.prompt, each.output, each.blocks, each.session, each.priority
        )
        for each in sorted(asks, key=lambda each: each.at)
    ]


def streams_of(
    workload: Workload, count: int, prefill_nodes: int, seed: int, speeds: Speeds | None = None
) -> list[Stream]:
    """So many requests, at the rate that gives the workload's load."""
    speeds = speeds or Speeds(H200)
    asks = workload.make(Random(f"{workload.name} {seed}"), count)
    return at_load(
        asks, sum(speeds.prompt_ms(each.prompt) for each in asks) / prefill_nodes / workload.load
    )
