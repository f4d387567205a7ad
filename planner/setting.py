"""What a simulation is given and what it gives back: requests, the setting and the result.

Times are milliseconds.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from kvrelay.load.workloads import Asked, Workload
from kvrelay.planner.speeds import H200, Speeds
from kvrelay.wire.config import Role
from kvrelay.wire.router_config import PRICE

__all__ = [
    "Flipped",
    "NodeEvent",
    "Result",
    "Setting",
    "Stream",
    "Targets",
    "What",
    "at_load",
    "streams_at",
    "streams_of",
]


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


_PERCENT = math.log(1.01)


class What(enum.StrEnum):
    """What may happen to a node."""

    DOWN = "down"
    """Its process ends, with all that it has."""
    UP = "up"
    """A new process, with an empty cache; or the same one, if it was away."""
    AWAY = "away"
    """It takes nothing new, and ends what it has."""
    SLOW = "slow"
    """All its steps take `pace` times as long from now on."""
    ROLE = "role"
    """It drains, changes its role and announces itself again."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """Of the node of this number: prefill nodes first, then decode nodes, as they begin."""

    at: float
    node: int
    what: What
    role: Role | None = None
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Of one run. `policy` is that of both roles: the price, or one of router/policies.py.

    Without prefill nodes the others are colocated servers: each computes the prompts of what it
    generates.
    """

    policy: str = PRICE
    prefill: int = 8
    decode: int = 8
    routers: int = 1
    stale_ms: float = 0.0
    seed: int = 0
    block_size: int = 128
    prefixes: bool = True
    """Whether routers know of prefixes at all."""
    shortest_first: bool = True
    strict_roles: bool = False
    """Decode nodes compute no prompt that a prefill node can."""
    max_queue: int = 1_000
    """How many requests may wait at a router."""
    speeds: Speeds = field(default_factory=lambda: Speeds(H200))
    decode_speeds: Speeds | None = None
    """Of decode nodes, if theirs are others."""
    events: Sequence[NodeEvent] = ()
    switch_ms: float = 1_000.0
    """What a change of role takes, from the last leg's end to the first poll."""
    targets: Targets | None = None
    """What the router is told that all want who do not say; None: nothing. It refuses who would
    miss them.
    """
    changes_roles: bool = False
    """Nodes change their roles as router/roles.py decides."""

    def speeds_of(self, role: Role) -> Speeds:
        """Of the nodes that begin with this role."""
        return self.decode_speeds or self.speeds if role is Role.DECODE else self.speeds


@dataclass(frozen=True, slots=True)
class Flipped:
    """A decision to change a node's role, and why."""

    at: float
    node: int
    role: Role
    why: str


@dataclass(slots=True)
class Result:
    """All streams with their fate, and the times between tokens: how often each, in steps of one
    percent.
    """

    setting: Setting
    streams: Sequence[Stream]
    gaps: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    events: int = 0
    flips: list[Flipped] = field(default_factory=list)
    local: Counter[str] = field(default_factory=Counter)
    """Prompts that decode nodes have computed, by reason."""

    def add_gap(self, ms: float, times: int) -> None:
        """So long between two tokens, so often."""
        step = int(math.log(max(ms, 1e-3)) / _PERCENT)
        self.gaps[step] = self.gaps.get(step, 0) + times

    def gap_ms(self, share: float) -> float:
        """This share of the times between tokens is at most so long."""
        left = share * sum(self.gaps.values())
        for step in sorted(self.gaps):
            left -= self.gaps[step]
            if left <= 0:
                break
        return math.exp((step + 0.5) * _PERCENT) if self.gaps else 0.0
