"""A role gets one more node because a node of the other one changes: over the node's own route, without a restart.

Owns which node that is. Of all that may, it is the last by address: two routers that decide at the same time, for the
same role, choose the same one, and the node changes once. Only nodes of kvrelay that take legs may, so none that drains
or is down; and nothing begins while a node is, or may be, changing already.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from planning.balance import OTHER
from router.balance.way import UnderWay
from router.legs.legs import Legs
from router.nodes.node import Node, NodeKind
from router.nodes.pool import DRAINS, Pool
from wire.config import Role
from wire.errors import Conflict

__all__ = ["BEGUN", "TELL_DEADLINE_S", "Flips", "ask_role"]

BEGUN = 202
TELL_DEADLINE_S = 5.0
"""For a node to answer what it is told."""
_DEADLINE_S = 60.0
"""A node ends what it has within 30 s, and changes then whatever is left."""
_RESTS_S = 300.0
"""A node that has refused, or did not change in time, is not asked again for so long."""


async def ask_role(pool: Pool, legs: Legs, node: Node, role: Role) -> tuple[int, str]:
    """Have a node change its role: what it answers. From BEGUN on it takes no legs of the old one."""
    body = msgspec.json.encode({"role": role})
    status, message = await legs.tell(node, "/admin/role", body, TELL_DEADLINE_S)
    if status == BEGUN:
        pool.flips(node, role, time.monotonic())
    return status, message


class Flips:
    """The Way of nodes that change themselves."""

    def __init__(self, pool: Pool, legs: Callable[[], Legs]) -> None:
        self._pool, self._legs = pool, legs
        self._rests_until: dict[str, float] = {}

    async def hindered(self, model: str) -> str:
        """See Way."""
        for node in self._pool.nodes:
            if node.model == model and node.flips_to is not None:
                return f"{node.url} is changing its role from {node.role} to {node.flips_to}"
            drains = node.reason == DRAINS and not node.drain_asked
            if node.model == model and drains and node.reported_at < node.since:
                # A node that changes, whoever has asked it to, refuses legs with the same word as one that drains.
                return f"{node.url} takes no new legs, and its next health check must say whether it changes its role"
        return ""

    async def begin(self, model: str, role: Role) -> UnderWay:
        """See Way."""
        now = time.monotonic()
        self._rests_until = {url: until for url, until in self._rests_until.items() if until > now}
        may = self._pool.up(OTHER[role], model=model, kind=NodeKind.KVRELAY)
        willing = [node for node in may if node.url not in self._rests_until]
        if not willing:
            raise Conflict(f"no {OTHER[role]} node is asked: each has failed to change within the last {_RESTS_S:g} s")
        node = max(willing, key=lambda each: each.url)
        status, message = await ask_role(self._pool, self._legs(), node, role)
        if status != BEGUN:
            if status not in (200, Conflict.status):  # else somebody else has asked it, too
                self._rest(node)
            said = f"it is a {role} node already" if status == 200 else f"it answers {status}: {message}"
            raise Conflict(f"{node.url} does not change its role: {said}")
        return _Flip(self._pool, node, role, self._rest)

    def _rest(self, node: Node) -> None:
        self._rests_until[node.url] = time.monotonic() + _RESTS_S


class _Flip:
    """One node that changes."""

    deadline_s = _DEADLINE_S

    def __init__(self, pool: Pool, node: Node, role: Role, failed: Callable[[Node], None]) -> None:
        self.where = node.url
        self._pool, self._node, self._role, self._failed = pool, node, role, failed
        self._generation = node.generation

    async def over(self) -> str | None:
        """See UnderWay."""
        node, why = self._node, ""
        if node.role is self._role:
            return ""
        if not node.wanted:
            why = "it was removed"
        elif node.generation != self._generation:
            why = "its process was replaced"
        elif node.up:  # in the old role, as a health check has found that began after the change
            why = f"it has called that off, and is a {node.role} node still"
        if not why:
            return None
        self._failed(node)
        return why

    async def give_up(self) -> None:
        """See UnderWay."""
        self._failed(self._node)
