"""Has simulated nodes change their roles as router/roles.py decides, by what the first router knows
of them.
"""

from __future__ import annotations

from kvrelay.router.roles import EVERY_S, OTHER, RolePlanner, work_of
from kvrelay.simulator.cluster import Clock, Cluster
from kvrelay.simulator.setting import Flipped, Result, Setting

__all__ = ["Watch"]


class Watch:
    """Looks every few seconds."""

    def __init__(self, setting: Setting, cluster: Cluster, clock: Clock, result: Result) -> None:
        self._tpot_ms = 0.0 if setting.targets is None else setting.targets.tpot_ms
        self._cluster, self._clock, self._result = cluster, clock, result
        self._roles, self._becoming = RolePlanner(), False
        clock.later(EVERY_S * 1e3, self._look)

    def _look(self, now: float) -> None:
        cluster, roles, router = self._cluster, self._roles, self._cluster.routers[0]
        nodes = {role: router.pool.up(role) for role in OTHER}
        work = work_of(
            {role: [node.state for node in of] for role, of in nodes.items()}, self._tpot_ms
        )
        hindered = "a node is changing its role" if cluster.switching else ""
        if self._becoming and not cluster.switching:
            roles.changed(self._result.flips[-1].role, now / 1e3)
        self._becoming = cluster.switching
        role = roles.look({role: len(of) for role, of in nodes.items()}, work, now / 1e3, hindered)
        if role is not None:
            at = router.number(max(nodes[OTHER[role]], key=lambda node: node.url))
            self._result.flips.append(Flipped(now, at, role, roles.why))
            cluster.change_role(at, role, now)
            self._becoming = True
        self._clock.later(now + EVERY_S * 1e3, self._look)
