"""Lets roles follow the load: a role that is short of nodes gets one of the other role.

Work is reckoned in nodes, from what they announce: prompts may take all of a prefill node's time,
tokens `1 - A / TPOT` of a decode node's, whose empty step takes A (router/placement.py), and
requests all of its seats. Where even the last prefill node does more as a decode node, all nodes
compute their own prompts until the load falls. All routers see the same and ask the same node,
which changes once (node/lifecycle.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, inf

import msgspec

from kvrelay.router.metrics import Metrics
from kvrelay.router.node_load import LEAST_LEFT, UNKNOWN, NodeLoad
from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.nodes.pool import DRAINS, Pool
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_stream import parse_message
from kvrelay.wire.config import Role
from kvrelay.wire.router_config import RouterConfig

__all__ = [
    "BEGUN",
    "EVERY_S",
    "LOOKS",
    "OTHER",
    "RoleChanger",
    "RolePlanner",
    "ask_role",
    "use_of",
    "work_of",
]

EVERY_S, HALF_LIFE_S, LOOKS, COOL_DOWN_S, REMEMBERS_S = 5.0, 20.0, 3, 30.0, 3600.0
LIMIT, MARGIN = 0.85, 0.1
BEGUN = 202
"""A node's status when it begins to change its role."""
_ASK_DEADLINE_S = 5.0
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_log = logging.getLogger("kvrelay.router")


def work_of(
    loads: Mapping[Role, Sequence[NodeLoad]], tpot_ms: float = 0.0
) -> tuple[dict[Role, float], float]:
    """Return how many nodes each role's work takes, and the share of a decode node it may take.

    A `tpot_ms` of 0 stands for the default TPOT.
    """
    decode = loads[Role.DECODE]
    # Prompts that decode nodes compute spare prefill nodes some.
    prompts = fsum(load.prompt_share for of in loads.values() for load in of)
    tokens = fsum(load.token_rate * load.per_token_ms for load in decode)
    tpots = [load.strictest_tpot_ms or tpot_ms or load.costs.usual_tpot_ms for load in decode]
    taken = fsum(load.step_ms / tpot for load, tpot in zip(decode, tpots, strict=True))
    left = max(LEAST_LEFT, 1 - taken / max(1, len(decode)))
    seats = fsum(load.rows / load.max_num_seqs for load in decode if load.max_num_seqs)
    return {Role.PREFILL: prompts, Role.DECODE: max(seats, tokens / left)}, left


def use_of(work: Mapping[Role, float], nodes: Mapping[Role, int], left: float) -> dict[Role, float]:
    """Return the share of each role's nodes that work takes; decode nodes alone do all."""
    prefill, decode = nodes[Role.PREFILL], max(1, nodes[Role.DECODE])
    prompts, answers = work[Role.PREFILL], work[Role.DECODE]
    if prefill:
        return {Role.PREFILL: prompts / prefill, Role.DECODE: answers / decode}
    return {Role.PREFILL: 0.0, Role.DECODE: (answers + prompts / left) / decode}


class RolePlanner:
    """A planner of one model's roles. Times are seconds of any one clock."""

    def __init__(self, least_prefill: int = 0, least_decode: int = 1) -> None:
        self._least = {Role.PREFILL: least_prefill, Role.DECODE: least_decode}
        self._work, self._looked = dict.fromkeys(OTHER, 0.0), -inf
        self._up, self._changed, self._last = dict[Role, int](), -inf, Role.PREFILL
        self._busy, self._times = Role.PREFILL, 0
        self.use, self.why = dict(self._work), ""
        """The share of each role's nodes lately used; why nothing changes, or what."""

    def look(
        self,
        up: Mapping[Role, int],
        work: Mapping[Role, float],
        now: float,
        hindered: str = "",
        left: float = 1.0,
    ) -> Role | None:
        """Return the role that one more node should take; `hindered` says why none can now.

        `left` is the share of a decode node that work may take (`work_of`).
        """
        for role, other in OTHER.items():
            gave = up[other] < self._up.get(other, 0)
            if not hindered and gave and up[role] > self._up[role]:
                self._changed, self._last = now, role
        self._up = self._up if hindered else dict(up)
        # Until then what had piled up says nothing of what is needed.
        rests = now - self._changed < COOL_DOWN_S
        kept, self._looked = 0.0 if rests else 0.5 ** ((now - self._looked) / HALF_LIFE_S), now
        self._work = {
            role: kept * before + (1 - kept) * work[role] for role, before in self._work.items()
        }
        self.use = use = use_of(self._work, up, left)
        mixed = not up[Role.PREFILL]
        busy = Role.PREFILL if mixed else max(use, key=lambda role: use[role])
        idle, most = OTHER[busy], max(use.values())
        then = use_of(self._work, {busy: up[busy] + 1, idle: up[idle] - 1}, left)
        # To a role of many nodes one more is less than any margin: what counts is the role that
        # gives it away.
        after = then[idle] if up[Role.PREFILL] and up[idle] > 1 else max(then.values())
        # The last prefill node that became a decode node goes back when it can.
        returns = mixed and self._last is Role.DECODE and after <= LIMIT - 2 * MARGIN
        margin = MARGIN * (2 if self._last is idle and now - self._changed < REMEMBERS_S else 1)
        against = (
            (most <= LIMIT and not returns, "no role is short of nodes"),
            (up[idle] <= self._least[idle], f"{idle} keeps its last {self._least[idle]}"),
            (
                after > most * (1 - margin) and not returns,
                f"one {idle} node less would have too much to do",
            ),
            (rests, "the last change was just now"),
        )
        why = hindered or next((reason for holds, reason in against if holds), "")
        again = self._times % LOOKS + 1 if busy is self._busy else 1
        self._busy, self._times = busy, 0 if why else again
        decided = self._times == LOOKS
        short = f"one {idle} node becomes a {busy} node" if decided else f"{busy} is short of nodes"
        nodes = (f"{up[role]} {role} nodes with {use[role]:.0%} to do" for role in use)
        self.why = f"{why or short}: {', '.join(nodes)}"
        return busy if decided else None


async def ask_role(pool: Pool, legs: NodeClient, node: Node, role: Role) -> tuple[int, str]:
    body = msgspec.json.encode({"role": role})
    status, said = await legs.post(node, "/admin/role", body, _ASK_DEADLINE_S)
    if status == BEGUN:
        pool.note_role_change(node, role, time.monotonic())
    return status, parse_message(said)


@dataclass(slots=True)
class RoleChanger:
    """A background task that asks nodes to change roles, until `ending` returns true."""

    config: Callable[[], RouterConfig]
    pool: Pool
    node_client: NodeClient
    metrics: Metrics
    ending: Callable[[], bool]
    models: dict[str, RolePlanner] = field(default_factory=dict)

    async def look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look(time.monotonic())
            except Exception:  # noqa: BLE001 - a mistake of ours must not end it
                _log.exception("roles were not looked at; they will be again in %g s", EVERY_S)

    async def look(self, now: float) -> None:
        config = self.config()
        ours = [node for node in self.pool.nodes if node.kind is NodeKind.KVRELAY and node.model]
        least = config.least_prefill, config.least_decode
        self.models = {
            node.model: self.models.get(node.model) or RolePlanner(*least) for node in ours
        }
        self.metrics.role_use.clear()
        for model, planner in self.models.items():
            nodes = {role: self.pool.up(role, model=model, kind=NodeKind.KVRELAY) for role in OTHER}
            loads = {role: [node.state for node in each] for role, each in nodes.items()}
            up = {role: len(each) for role, each in nodes.items()}
            hindered = self._hindered(config, [node for node in ours if node.model == model])
            work, left = work_of(loads, config.tpot_target_ms)
            role = planner.look(up, work, now, hindered, left)
            for each, use in planner.use.items():
                self.metrics.role_use.labels(model, each).set(use)
            if role is not None:
                node = max(nodes[OTHER[role]], key=lambda node: node.url)
                status, said = await ask_role(self.pool, self.node_client, node, role)
                begun = status == BEGUN
                self.metrics.role_changes.labels(model, role, "begun" if begun else "refused").inc()
                outcome = "begun" if begun else f"refused: {status} {said}"
                _log.info("roles: %s; %s: %s", planner.why, node.url, outcome)

    def _hindered(self, config: RouterConfig, nodes: Sequence[Node]) -> str:
        if config.strict_roles or self.ending():
            return "roles are strict" if config.strict_roles else "this router ends"
        for node in nodes:
            # One that drains may change its role, as its next health check says.
            if node.flips_to or (node.reason == DRAINS and node.reported_at < node.since):
                return f"{node.url} changes its role"
            if node.up and node.state.costs == UNKNOWN:
                return f"{node.url} has not said what its steps cost"
        return ""
