"""The online planner: whether one node of a cluster should change its role now. Pure: what is seen is an argument.

Each role has so much work: node-seconds that come each second. What a node of a role has to do, as a share of its time,
is the role's *use*. A flip is worth it if it makes the greater use less by a margin, and if somebody suffers: the busy
role misses its target, has a backlog, or nearly all of its time is taken. Nothing flaps: use is smoothed, a flip must
look right several times in a row, the way back costs twice the margin for a while, and what has piled up never says
where to: prompts that have waited come to the decode nodes all at once, and nodes that followed them would go to and
fro.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from wire.config import Role
from wire.errors import ConfigError

__all__ = ["OTHER", "Balance", "Balancing", "Decision", "Figures", "Seen", "enough", "token_ms"]

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
"""A node that changes its role leaves the one for the other."""
_LEAST_USE = 0.05
"""A role that has less of its nodes' time taken may miss its target, but not for want of nodes."""
_LEAST_ANSWERS = 5


class Balancing(msgspec.Struct, frozen=True):
    """How eager the balance is. Raises ConfigError for values that cannot be."""

    every_s: float = 5.0
    """Between two looks."""
    attainment: float = 0.9
    """The share of requests that should meet each target."""
    least_prefill: int = 1
    least_decode: int = 1
    patience: int = 3
    """A flip must look right so often in a row."""
    cool_down_s: float = 30.0
    """From the end of a flip to the next one."""
    remembers_s: float = 3600.0
    """For so long after a flip the way back costs twice the margin."""
    margin: float = 0.1
    """Of the role that gives a node away so much less time must be taken then than of the busier one now."""
    busy: float = 0.8
    """A role whose nodes have this share of their time taken is about to miss its target."""
    backlog_s: float = 1.0
    """A role is short of nodes if so much work waits for each of them."""
    half_life_s: float = 40.0
    """Of what was seen."""

    def __post_init__(self) -> None:
        for name in ("every_s", "backlog_s", "half_life_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        for name in ("attainment", "margin", "busy"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be a share above 0 and at most 1, got {getattr(self, name)}")
        if self.least_prefill < 1 or self.least_decode < 1:
            raise ConfigError("each role needs one node at least: raise least_prefill and least_decode to 1")


class Seen(msgspec.Struct, frozen=True):
    """Of one role, since the last look."""

    nodes: int
    """That take legs."""
    work: float
    """Node-seconds of work that came each second, at the speed at which the target is just kept."""
    backlog_s: float = 0.0
    """Node-seconds of work that waits for a node."""
    ended: int = 0
    """Requests that had their first token (prefill) or their last (decode)."""
    met: int = 0
    """Of these, in time."""
    known: bool = True
    """No: too little has ended to tell, and `work` may be a part of what it is."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`role`: one node of the other role should take it. None: all stay what they are. `why`: a sentence."""

    role: Role | None
    why: str


@dataclass(frozen=True, slots=True)
class Figures:
    """What was seen of one role of late, smoothed. `work` in node-seconds each second; `attained` a share."""

    work: float
    attained: float


@dataclass(slots=True)
class _Role:
    """What was seen of one role of late."""

    work: float = 0.0
    ended: float = 0.0
    met: float = 0.0
    known: bool = False

    def take(self, seen: Seen, kept: float) -> None:
        counts = kept if self.known else 0.0
        self.work = self.work * counts + seen.work * (1 - counts)
        self.known = self.known or seen.known
        self.ended = self.ended * kept + seen.ended
        self.met = self.met * kept + seen.met

    @property
    def attained(self) -> float:
        return self.met / self.ended if self.ended >= 1 else 1.0


class Balance:
    """Of one cluster, or of one model's nodes in it. Times are seconds of one monotonic clock."""

    def __init__(self, balancing: Balancing) -> None:
        self._how = balancing
        self._roles = {Role.PREFILL: _Role(), Role.DECODE: _Role()}
        self._looked_at: float | None = None
        self._last: tuple[float, Role] | None = None
        """When a node was last told to take a role, and which."""
        self._before: tuple[float, Role] | None = None
        """The same before the last decision."""
        self._rests_until = float("-inf")
        self._wanted: tuple[Role | None, int] = (None, 0)
        """Which flip has looked right, and how often in a row."""

    def figures(self, role: Role) -> Figures:
        """By which the last look has decided."""
        return Figures(self._roles[role].work, self._roles[role].attained)

    def changed(self, role: Role, now: float) -> None:
        """Somebody else has had a node take this role: it counts as a flip of our own."""
        self._wanted = None, 0
        self._before = self._last = now, role
        self._rests_until = now + self._how.cool_down_s

    def refused(self) -> None:
        """What was decided last has not come about: there is no way back from it."""
        self._last = self._before

    def look(self, prefill: Seen, decode: Seen, now: float, *, switching: bool = False) -> Decision:
        """What to do now. `switching`: a node changes its role already."""
        how, seen = self._how, {Role.PREFILL: prefill, Role.DECODE: decode}
        passed = how.every_s if self._looked_at is None else now - self._looked_at
        kept = 0.0 if self._looked_at is None else 0.5 ** (passed / how.half_life_s)
        self._looked_at = now
        for role, of in self._roles.items():
            of.take(seen[role], kept)
        if switching:
            self._rests_until = now + how.cool_down_s
            return self._stay("a node is changing its role")
        if not (prefill.work or decode.work):
            return self._stay("nothing was asked since the last look")
        need = {role: of.work for role, of in self._roles.items()}
        busy = max(seen, key=lambda role: need[role] / max(1, seen[role].nodes))
        return self._weighed(busy, seen, need, now)

    def _weighed(self, busy: Role, seen: dict[Role, Seen], need: dict[Role, float], now: float) -> Decision:
        how, idle = self._how, OTHER[busy]
        use = {role: need[role] / max(1, each.nodes) for role, each in seen.items()}
        attained = self._roles[busy].attained
        told = (
            f"{busy} has work for {use[busy]:.0%} of its {_nodes(seen[busy].nodes)} and {attained:.0%} of its requests "
            f"in time, {idle} for {use[idle]:.0%} of {_nodes(seen[idle].nodes)} and {self._roles[idle].attained:.0%}"
        )
        least = how.least_prefill if idle is Role.PREFILL else how.least_decode
        late = seen[busy].backlog_s > how.backlog_s * seen[busy].nodes
        misses = attained < how.attainment and use[busy] >= _LEAST_USE
        if not (misses or late or use[busy] >= how.busy):
            return self._stay(f"{told}: nobody is short of nodes")
        if seen[idle].nodes <= least:
            return self._stay(f"{told}: {idle} keeps {_nodes(least)} at least")
        if not self._roles[idle].known:
            return self._stay(f"{told}: too few requests have ended to tell what {idle} has to do")
        after = max(need[busy] / (seen[busy].nodes + 1), need[idle] / (seen[idle].nodes - 1))
        margin = how.margin
        back = self._last is not None and self._last[1] is idle and now - self._last[0] < how.remembers_s
        if back:
            margin *= 2
        # Of the role that gives a node away. What one more node is for the other one is less than any margin if it has
        # many already.
        if need[idle] / (seen[idle].nodes - 1) > use[busy] * (1 - margin):
            why = f"one more {busy} node would leave {after:.0%}, which is not {margin:.0%} less"
            return self._stay(f"{told}: {why}{', as the way back must be' if back else ''}")
        if now < self._rests_until:
            return self._stay(f"{told}: the last change is less than {how.cool_down_s:g} s ago")
        times = self._wanted[1] + 1 if self._wanted[0] is busy else 1
        self._wanted = busy, times
        if times < how.patience:
            return Decision(
                None, f"{told}: one more {busy} node would leave {after:.0%}, seen {times} of {how.patience} times"
            )
        self._wanted = None, 0
        self._before, self._last = self._last, (now, busy)
        self._rests_until = now + how.cool_down_s
        return Decision(busy, f"{told}: one {idle} node becomes a {busy} node, which leaves {after:.0%}")

    def _stay(self, why: str) -> Decision:
        self._wanted = None, 0
        return Decision(None, why)


def enough(ended: int, running: int) -> bool:
    """Whether answers that have ended tell how long answers are: the short ones end first, so as many must have ended
    as are under way."""
    return ended >= max(_LEAST_ANSWERS, running)


def token_ms(step_ms: Callable[[int], float], most: int, tpot_ms: float) -> float:
    """A token's share of a step of the largest batch, of at most `most` requests, whose steps keep a target: what a
    node spends for a token when it is full. `step_ms` must never fall."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if step_ms(middle) <= tpot_ms else (low, middle - 1)
    return step_ms(low) / low


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"
