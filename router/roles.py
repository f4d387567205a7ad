"""Lets roles follow the load: a role that is short of nodes gets one of the other role.

Work is reckoned in nodes, from what they announce and what this router refused: prompts may take
all of a prefill node's time, tokens `1 - A / TPOT` of a decode node's, whose empty step takes A
(router/placement.py), and requests all of its seats. All routers see the same of nodes, and ask
the same one, which changes once; each knows only what it refused itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from kvrelay.router.node_load import NodeLoad
from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.request.failures import RunContext
from kvrelay.router.transport.node_stream import parse_message
from kvrelay.wire.config import Role

__all__ = ["EVERY_S", "OTHER", "RoleChanger", "RolePlanner", "ask_role", "work_of"]

EVERY_S, LOOKS, MEMORY = 5.0, 6, 12  # between looks; that a decision takes, and a mean is of
LIMIT, MARGIN, BACK = 0.85, 0.1, 0.65
BEGUN = 202  # a node's status when it begins to change its role
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
Work = Mapping[Role, float]
_log = logging.getLogger("kvrelay.router")


def work_of(
    loads: Mapping[Role, Sequence[NodeLoad]],
    tpot_ms: float = 0,
    refused: tuple[float, float] = (0.0, 0.0),
) -> tuple[Work, float]:
    """Return how many nodes each role's work takes, and the share of a decode node it may take.

    `refused`: prompts' milliseconds, and tokens, per millisecond, of requests that ended for want
    of nodes. They count at most as much as served work, so asking in vain moves no nodes.
    """
    decode = loads[Role.DECODE]
    count = max(1, len(decode))
    # Prompts that decode nodes compute spare prefill nodes some.
    prompts = fsum(load.prompt_share for of in loads.values() for load in of)
    tokens = fsum(load.token_rate * load.per_token_ms for load in decode)
    token_ms = fsum(load.per_token_ms for load in decode) / count
    prompts += min(prompts, refused[0])
    tokens += min(tokens, refused[1] * token_ms)
    left = 1 - fsum(load.empty_steps(tpot_ms) for load in decode) / count
    seats = fsum(load.rows / load.max_num_seqs for load in decode if load.max_num_seqs)
    return {Role.PREFILL: prompts, Role.DECODE: max(seats, tokens / left)}, left


def use_of(work: Work, up: Mapping[Role, int], left: float) -> Work:
    """Return the share of each role's nodes that work takes; decode nodes alone do both roles'."""
    prompts, answers = work[Role.PREFILL], work[Role.DECODE]
    prefill, decode = up[Role.PREFILL], max(1, up[Role.DECODE])
    if prefill:
        return {Role.PREFILL: prompts / prefill, Role.DECODE: answers / decode}
    return dict.fromkeys(OTHER, (answers + prompts / left) / decode)


class RolePlanner:
    """A planner of one model's roles: the busier one gets a node if the other one can spare it."""

    def __init__(self, least_prefill: int = 0, least_decode: int = 1) -> None:
        self._least = {Role.PREFILL: least_prefill, Role.DECODE: least_decode}
        self._work: Work = dict.fromkeys(OTHER, 0.0)
        self._up: Mapping[Role, int] = {}
        self._last: Role | None = None  # that should take a node
        self._looks = 0  # since a change: what piled up before says nothing of what is needed
        self.use: Work = self._work
        self.why = ""
        """The share of each role's nodes lately used; why nothing changes, or what."""

    def look(self, up: Mapping[Role, int], work: Work, left: float, bar: str = "") -> Role | None:
        """Return the role that one more node should take; `bar` says why none can now."""
        self._looks = 1 if bar or up != self._up else self._looks + 1
        self._up, seen = up, min(self._looks, MEMORY)
        self._work = {role: was + (work[role] - was) / seen for role, was in self._work.items()}
        self.use = use = use_of(self._work, up, left)
        short = max(use, key=use.__getitem__)  # of two alike prefill
        giver = OTHER[short]
        then = use_of(self._work, {short: up[short] + 1, giver: up[giver] - 1}, left)
        back = not up[Role.PREFILL] and self._last is Role.DECODE and max(then.values()) <= BACK
        most = use[short] * (1 - MARGIN * (2 if self._last is giver else 1))
        decided = False
        if bar:
            why = bar
        elif use[short] <= LIMIT and not back:
            why = "no role is short of nodes"
        elif up[giver] <= self._least[giver] or (then[giver] > most and not back):
            why = "no other split has much less to do"
        elif self._looks < LOOKS:
            why = f"{short} is short of nodes, for too short a time yet"
        else:
            decided, why = True, f"one {giver} node becomes a {short} node"
            self._last, self._looks = short, 0  # a node that refuses is asked again after as many
        told = (f"{up[role]} {role} nodes with {use[role]:.0%} to do" for role in OTHER)
        self.why = f"{why}: {', '.join(told)}"
        return short if decided else None


async def ask_role(context: RunContext, node: Node, role: Role) -> tuple[int, str]:
    order = b'{"role":"%b"}' % role.encode()
    status, said = await context.node_client.post(node, "/admin/role", order, EVERY_S)
    if status == BEGUN:
        context.pool.note_role_change(node, role, time.monotonic())
    return status, parse_message(said)


@dataclass(slots=True)
class RoleChanger:
    """A background task that asks nodes to change roles until `ending` returns true."""

    context: RunContext
    ending: Callable[[], bool]
    refused: Callable[[str], tuple[float, float]]
    """Returns a model's refused work, as `work_of` wants it."""
    models: dict[str, RolePlanner] = field(default_factory=dict)

    async def look(self) -> None:
        if self.ending():
            return
        context, config, metrics = self.context, self.context.config, self.context.metrics
        pool, least = context.pool, (config.least_prefill, config.least_decode)
        nodes = [node for node in pool.nodes if node.kind is NodeKind.KVRELAY and node.model]
        names = dict.fromkeys(node.model for node in nodes)
        self.models = {name: self.models.get(name) or RolePlanner(*least) for name in names}
        metrics.role_use.clear()
        for model, planner in self.models.items():
            up = {role: pool.up(role, model=model, kind=NodeKind.KVRELAY) for role in OTHER}
            loads = {role: [node.state for node in each] for role, each in up.items()}
            counts = {role: len(each) for role, each in up.items()}
            bars = (node.unsettled for node in nodes if node.model == model)
            bar = "roles are strict" if config.strict_roles else next(filter(None, bars), "")
            work = work_of(loads, config.tpot_target_ms, self.refused(model))
            role = planner.look(counts, *work, bar)
            for each, use in planner.use.items():
                metrics.role_use.labels(model, each).set(use)
            if role is not None:
                node = max(up[OTHER[role]], key=lambda node: node.url)
                status, said = await ask_role(context, node, role)
                outcome = "begun" if status == BEGUN else "refused"
                metrics.role_changes.labels(model, role, outcome).inc()
                _log.info("roles: %s; %s: %s (%d %s)", planner.why, node.url, outcome, status, said)
