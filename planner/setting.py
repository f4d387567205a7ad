"""The input and the result of a simulation: requests, the setting and the result.

Times are milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.load.measures import Targets
from kvrelay.planner.rate_card import RateCard
from kvrelay.wire.ladder import RUNGS
from kvrelay.wire.router_config import PRICE

__all__ = [
    "NETWORK_MS",
    "Result",
    "Setting",
    "Stream",
    "Streams",
    "streams_at",
]


NETWORK_MS = 0.3
"""From the client through the router to a node, and back."""


@dataclass(eq=False, slots=True)
class Stream:
    """A request of `output` tokens after `prompt` tokens with named full blocks, and its fate."""

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    session: str = ""
    targets: Targets | None = None
    answer: tuple[int, ...] = ()
    """Names of the further blocks that its answer fills."""
    gap: float = 0.0
    """Milliseconds from the end of the last request that it waits for, until it comes."""
    waits: int = 0
    then: list[Stream] = field(default_factory=list)
    """Requests that wait for its end."""

    number: int = 0
    cached: int = 0
    """Tokens of the prompt that its node had cached, or has read from elsewhere."""
    read: dict[str, int] = field(default_factory=dict)
    """Tokens that it has read: from a `peer`, from `host` memory, from the `store`."""
    rungs: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the prompt by where they were found, or lost (wire/ladder.py)."""
    begun: float = -1.0
    """When its prompt began to be computed; then its first and its last token."""
    first: float = -1.0
    last: float = -1.0
    preempted: int = 0
    local: bool = False
    refused: bool = False

    @property
    def answered(self) -> bool:
        return self.last >= 0

    @property
    def ttft(self) -> float:
        return self.first - self.at

    @property
    def tpot(self) -> float:
        """Milliseconds for each token after the first."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


Streams = Sequence[Stream]


def streams_at(asks: Streams, rate_s: float) -> list[Stream]:
    """Return the same requests at so many a second on average, in order."""
    last = max(each.at for each in asks)
    stretched = len(asks) / rate_s * 1e3 / last if last else 0.0
    return [
        Stream(each.at * stretched, each.prompt, each.output, each.blocks, each.session)
        for each in sorted(asks, key=lambda each: each.at)
    ]


_PERCENT = math.log(1.01)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of one run; `policy` chooses nodes of both roles."""

    policy: str = PRICE
    prefill: int = 8
    decode: int = 8
    seed: int = 0
    block_size: int = 128
    prefixes: bool = True
    pulls: bool = True
    """Nodes read KV from others' prefix caches where that is quicker than computing."""
    below: Mapping[str, int] = field(default_factory=dict)
    """Tokens of KV of each tier below a node's pool, by its name on the rate card."""
    strict_roles: bool = False
    """Decode nodes compute no prompt that a prefill node can."""
    card: RateCard = field(kw_only=True)
    targets: Targets | None = None
    """Targets that the router takes for everybody's: it refuses who would miss them."""

    @property
    def name(self) -> str:
        """Return its nodes as 2P2D; without prefill nodes the others are colocated servers."""
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} colocated"


@dataclass(slots=True)
class Result:
    """A result: all streams, and a histogram of the times between tokens."""

    setting: Setting
    streams: Streams
    gaps: dict[int, int] = field(default_factory=dict)

    @property
    def rungs(self) -> Counter[str]:
        """Return the tokens of all prompts by rung."""
        found = Counter[str]()
        for stream in self.streams:
            found.update(stream.rungs)
        return found

    @property
    def found(self) -> float:
        """Return the share of the tokens that any cache could have had."""
        rungs = self.rungs
        possible = rungs.total() - rungs["new"]
        return sum(rungs[rung] for rung in RUNGS[:4]) / possible if possible else math.nan

    def add_gap(self, ms: float, times: int) -> None:
        step = int(math.log(max(ms, 1e-3)) / _PERCENT)
        self.gaps[step] = self.gaps.get(step, 0) + times

    def gap_ms(self, share: float) -> float:
        """Return the time that this share of the times between tokens does not exceed."""
        left = share * sum(self.gaps.values())
        for step in sorted(self.gaps):
            left -= self.gaps[step]
            if left <= 0:
                break
        return math.exp((step + 0.5) * _PERCENT) if self.gaps else math.nan
