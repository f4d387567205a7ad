"""Lets roles follow the load: a role that is short of nodes gets one of the other role.

Work is reckoned in nodes, from what they announce: prompts may take all of a prefill node's time,
tokens `1 - A / TPOT` of a decode node's, whose empty step takes A (router/placement.py), and
requests all of its seats. All routers see the same and ask the same node, which changes once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, inf

from kvrelay.router.metrics import Metrics
from kvrelay.router.node_load import LEAST_LEFT, UNKNOWN, NodeLoad
from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.nodes.pool import DRAINS, Pool
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_stream import parse_message
from kvrelay.wire.config import Role
from kvrelay.wire.router_config import RouterConfig

__all__ = ["EVERY_S", "OTHER", "RoleChanger", "RolePlanner", "ask_role", "work_of"]

EVERY_S, LOOKS, MEMORY = 5.0, 6, 12  # between looks; that a decision takes, and a mean is of
LIMIT, MARGIN, BACK = 0.85, 0.1, 0.65
BEGUN = 202  # a node's status when it begins to change its role
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
Work = Mapping[Role, float]
_log = logging.getLogger("kvrelay.router")


def work_of(loads: Mapping[Role, Sequence[NodeLoad]], tpot_ms: float = 0) -> tuple[Work, float]:
    """Return how many nodes each role's work takes, and the share of a decode node it may take."""
    decode = loads[Role.DECODE]
    # Prompts that decode nodes compute spare prefill nodes some.
    prompts = fsum(load.prompt_share for of in loads.values() for load in of)
    tokens = fsum(load.token_rate * load.per_token_ms for load in decode)
    tpots = [load.strictest_tpot_ms or tpot_ms or load.costs.usual_tpot_ms for load in decode]
    taken = fsum(load.step_ms / tpot for load, tpot in zip(decode, tpots, strict=True))
    left = max(LEAST_LEFT, 1 - taken / max(1, len(decode)))
    seats = fsum(load.rows / load.max_num_seqs for load in decode if load.max_num_seqs)
    return {Role.PREFILL: prompts, Role.DECODE: max(seats, tokens / left)}, left


def use_of(work: Work, prefill: int, decode: int, left: float) -> Work:
    """Return the share of so many nodes that work takes; decode nodes alone do all."""
    prompts, answers = work[Role.PREFILL], work[Role.DECODE]
    if prefill:
        return {Role.PREFILL: prompts / prefill, Role.DECODE: answers / max(1, decode)}
    return {Role.PREFILL: 0.0, Role.DECODE: (answers + prompts / left) / max(1, decode)}


class RolePlanner:
    """A planner of one model's roles: step by step to the split whose busier role does least."""

    def __init__(self, least_prefill: int = 0, least_decode: int = 1) -> None:
        self._least_prefill, self._least_decode = least_prefill, least_decode
        self._work: Work = dict.fromkeys(OTHER, 0.0)
        self._up: Mapping[Role, int] = dict.fromkeys(OTHER, 0)
        self._last: Role | None = None  # that got a node of the other
        self._looks = 0  # since then: what had piled up before says nothing of what is needed
        self.use: Work = self._work
        self.why = ""
        """The share of each role's nodes lately used; why nothing changes, or what."""

    def look(self, up: Mapping[Role, int], work: Work, left: float, bar: str = "") -> Role | None:
        """Return the role that one more node should take; `bar` says why none can now."""
        for role, other in OTHER.items():
            if not bar and up[role] > self._up[role] and up[other] < self._up[other]:
                self._last, self._looks = role, 0
        self._up = self._up if bar else up
        self._looks += 1
        seen = min(self._looks, MEMORY)
        self._work = {role: was + (work[role] - was) / seen for role, was in self._work.items()}
        now, nodes = up[Role.PREFILL], up[Role.PREFILL] + up[Role.DECODE]
        self.use = use = use_of(self._work, now, nodes - now, left)
        short = max(use, key=use.__getitem__) if now else Role.PREFILL
        splits = range(now + 1, nodes - self._least_decode + 1)
        if short is Role.DECODE:  # to decode nodes alone only from 1P
            splits = range(max(self._least_prefill, min(1, now - 1)), now)
        others = (use_of(self._work, split, nodes - split, left) for split in splits)
        most, best = max(use.values()), min((max(each.values()) for each in others), default=inf)
        back = not now and self._last is Role.DECODE and best <= BACK
        margin = MARGIN * (2 if self._last is OTHER[short] else 1)
        decided, why = False, bar or f"{short} is short of nodes, for too short a time yet"
        if most <= LIMIT and not back:
            why = bar or "no role is short of nodes"
        elif best > most * (1 - margin) and not back:
            why = bar or "no other split has much less to do"
        elif self._looks >= LOOKS and not bar:
            decided, why = True, f"one {OTHER[short]} node becomes a {short} node"
            self._looks = 0  # a node that refuses is asked again after as many
        told = (f"{up[role]} {role} nodes with {use:.0%} to do" for role, use in self.use.items())
        self.why = f"{why}: {', '.join(told)}"
        return short if decided else None


async def ask_role(pool: Pool, legs: NodeClient, node: Node, role: Role) -> tuple[int, str]:
    status, said = await legs.post(node, "/admin/role", b'{"role":"%b"}' % role.encode(), EVERY_S)
    if status == BEGUN:
        pool.note_role_change(node, role, time.monotonic())
    return status, parse_message(said)


@dataclass(slots=True)
class RoleChanger:
    """A background task that asks nodes to change roles, unless `ending` returns true."""

    config: Callable[[], RouterConfig]
    pool: Pool
    node_client: NodeClient
    metrics: Metrics
    ending: Callable[[], bool]
    models: dict[str, RolePlanner] = field(default_factory=dict)

    async def look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if self.ending():
                return
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - a mistake of ours must not end it
                _log.exception("roles were not looked at; they will be again in %g s", EVERY_S)

    async def look(self) -> None:
        config, pool, metrics = self.config(), self.pool, self.metrics
        ours = [node for node in pool.nodes if node.kind is NodeKind.KVRELAY and node.model]
        bar = "this router ends" if self.ending() else ""
        bar = "roles are strict" if config.strict_roles else bar
        least, names = (config.least_prefill, config.least_decode), {node.model for node in ours}
        self.models = {name: self.models.get(name) or RolePlanner(*least) for name in names}
        metrics.role_use.clear()
        for model, planner in self.models.items():
            nodes = {role: pool.up(role, model=model, kind=NodeKind.KVRELAY) for role in OTHER}
            loads = {role: [node.state for node in nodes[role]] for role in OTHER}
            up = {role: len(nodes[role]) for role in OTHER}
            work, left = work_of(loads, config.tpot_target_ms)
            role = planner.look(up, work, left, bar or _bar(ours, model))
            for each, use in planner.use.items():
                metrics.role_use.labels(model, each).set(use)
            if role is not None:
                node = max(nodes[OTHER[role]], key=lambda node: node.url)
                status, said = await ask_role(pool, self.node_client, node, role)
                outcome = "begun" if status == BEGUN else "refused"
                metrics.role_changes.labels(model, role, outcome).inc()
                _log.info("roles: %s; %s: %s (%d %s)", planner.why, node.url, outcome, status, said)


def _bar(nodes: Sequence[Node], model: str) -> str:
    """Return why no node of a model can be asked now; empty if one can."""
    for node in nodes:
        if node.model != model:
            continue
        # One that drains may change its role, as its next health check says.
        if node.flips_to or (node.reason == DRAINS and node.reported_at < node.since):
            return f"{node.url} changes its role"
        if node.up and node.state.costs is UNKNOWN:
            return f"{node.url} has not said what its steps cost"
    return ""
