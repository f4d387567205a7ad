"""Looks at the work of each role every few seconds, and has one node more take the role that is short of them.

Owns the clock of that, each model's state, and what is told of it: a log line for each decision and each end of one, a
metric, the console's part. One process of a router does it, with the counts of all. Decides nothing itself:
planning/balance.py does, and a Way does it. A change that is under way blocks the next one of its model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from prometheus_client import Counter

from planning.balance import Balance, Balancing, Seen
from router.balance.deployments import Deployments
from router.balance.flips import Flips
from router.balance.seen import Aims, Typical
from router.balance.way import UnderWay, Way
from router.balance.work import Counted, Work
from router.chores import ended
from router.console.lookout import Lookout
from router.console.picture import BalanceSeen, RoleChange, RoleSeen
from router.legs.legs import Legs
from router.metrics import Metrics
from router.nodes.node import Node, NodeKind
from router.nodes.pool import Pool
from router.shared import Shared
from wire.config import Role
from wire.errors import KvrelayError, Unavailable
from wire.log_lines import Fields
from wire.router_config import RouterConfig

__all__ = ["Balancer", "balancing"]

_ROLES = (Role.PREFILL, Role.DECODE)
_KEPT_CHANGES = 10

_log = logging.getLogger("kvrelay.router")


@dataclass(slots=True)
class _Model:
    """What is known of one model's nodes and requests."""

    balance: Balance
    typical: Typical = field(default_factory=Typical)
    roles: dict[str, tuple[Role, str]] = field(default_factory=dict)
    """Of its nodes by address, and the generation of each, at the last look."""
    seen: dict[Role, Seen] = field(default_factory=dict)
    under_way: UnderWay | None = None
    until: float = 0.0
    """The monotonic second at which it is late."""
    changes: deque[RoleChange] = field(default_factory=lambda: deque(maxlen=_KEPT_CHANGES))
    why: str = "nothing was looked at yet"
    looked: float = 0.0
    """Unix time."""


class Balancer:
    """See the module. `aims` are those of the configuration as it is now; `ending`: nothing begins any more."""

    def __init__(
        self,
        pool: Pool,
        shared: Shared,
        counted: Counted,
        way: Way,
        how: Balancing,
        aims: Callable[[], Aims],
        changes: Counter,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pool, self._shared, self._counted, self._way = pool, shared, counted, way
        self._how, self._aims, self._changes, self._ending = how, aims, changes, ending
        self._models: dict[str, _Model] = {}
        self._looked_at: float | None = None

    def told(self) -> list[BalanceSeen]:
        """For the console."""
        return [
            BalanceSeen(
                name,
                model.why,
                model.looked,
                {role.value: _role_seen(model, role) for role in model.seen},
                list(reversed(model.changes)),
            )
            for name, model in sorted(self._models.items())
        ]

    async def look_for_ever(self) -> None:
        """Until it is cancelled."""
        self._looked_at = time.monotonic()
        while True:
            await asyncio.sleep(self._how.every_s)
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - a mistake of ours must not end it
                _log.exception("the balance of roles was not looked at; it will be again in %g s", self._how.every_s)

    async def look(self) -> None:
        """Look once at every model."""
        counts = [self._counted.take()]
        try:
            counts += await self._shared.work_elsewhere()
        except Unavailable as why:
            _log.warning("the balance of roles is looked at without the other processes: %s", why.message)
        work: dict[str, Work] = {}
        for each in counts:
            for name, of in each.items():
                work.setdefault(name, Work()).add(of)
        now = time.monotonic()
        passed_s = self._how.every_s if self._looked_at is None else max(1e-3, now - self._looked_at)
        self._looked_at = now
        models = {node.model for node in self._pool.nodes if node.kind is NodeKind.KVRELAY and node.model}
        self._models = {name: self._models.get(name) or _Model(Balance(self._how)) for name in models}
        for name, model in self._models.items():
            await self._look_at(name, model, work.get(name, Work()), passed_s, now)

    async def _look_at(self, name: str, model: _Model, work: Work, passed_s: float, now: float) -> None:
        nodes: dict[Role, Sequence[Node]] = {
            role: self._pool.up(role, model=name, kind=NodeKind.KVRELAY) for role in _ROLES
        }
        model.seen = model.typical.look(work, passed_s, nodes, self._aims())
        model.looked = time.time()
        ours = "" if model.under_way is None else model.under_way.where
        if model.under_way is not None:
            await self._follow(name, model, model.under_way, now)
        self._note_changes_of_others(name, model, ours, now)
        if model.under_way is not None:
            hindered = model.changes[-1].outcome
        elif self._ending():
            hindered = "this router ends"  # and would leave half done what it begins
        else:
            hindered = await self._way.hindered(name)
        seen = model.seen
        decision = model.balance.look(seen[Role.PREFILL], seen[Role.DECODE], now, switching=bool(hindered))
        model.why = hindered or decision.why
        if decision.role is not None:
            await self._begin(name, model, decision.role, now)

    def _note_changes_of_others(self, name: str, model: _Model, ours: str, now: float) -> None:
        """An operator or another router has had a node change: that counts as a change of our own."""
        before = model.roles
        model.roles = {node.url: (node.role, node.generation) for node in self._pool.nodes if node.model == name}
        for url, (role, generation) in model.roles.items():
            had, of = before.get(url, (role, generation))
            # A process that was started again has its first role: nobody has decided that.
            if had is not role and of == generation and url != ours:
                model.balance.changed(role, now)

    async def _begin(self, name: str, model: _Model, role: Role, now: float) -> None:
        why = model.why
        try:
            model.under_way = under_way = await self._way.begin(name, role)
        except KvrelayError as refused:
            model.balance.refused()
            self._changes.labels(name, role, "refused").inc()
            model.changes.append(RoleChange(time.time(), role, "", why, f"refused: {refused.message}"))
            model.why = f"{why}; but {refused.message}"
            _log.warning("roles: %s; but %s %s", why, refused.message, self._fields(name, model, role, ""))
            return
        model.until = now + under_way.deadline_s
        outcome = f"under way: {under_way.where}"
        model.changes.append(RoleChange(time.time(), role, under_way.where, why, outcome))
        _log.info("roles: %s %s", why, self._fields(name, model, role, under_way.where))

    async def _follow(self, name: str, model: _Model, under_way: UnderWay, now: float) -> None:
        failed = await under_way.over()
        if failed is None and now >= model.until:
            await under_way.give_up()
            failed = f"it was not over within {under_way.deadline_s:g} s"
        if failed is None:
            return
        change, model.under_way = model.changes[-1], None
        took_s = now - (model.until - under_way.deadline_s)
        model.changes[-1] = msgspec.structs.replace(
            change, outcome=f"failed: {failed}" if failed else f"done in {took_s:.0f} s"
        )
        self._changes.labels(name, change.role, "failed" if failed else "done").inc()
        facts = Fields(model=name, role=change.role, where=under_way.where, took_s=took_s)
        if failed:
            model.balance.refused()
            _log.warning("roles: the change failed: %s; it is weighed again %s", failed, facts)
        else:
            _log.info("roles: the change is done %s", facts)

    def _fields(self, name: str, model: _Model, role: Role, where: str) -> Fields:
        told = Fields(model=name, role=role, where=where or "-")
        for each, seen in model.seen.items():
            figures = model.balance.figures(each)
            told |= {
                f"{each}_nodes": seen.nodes,
                f"{each}_use": figures.work / max(1, seen.nodes),
                f"{each}_in_time": figures.attained,
                f"{each}_backlog_s": seen.backlog_s,
            }
        return Fields(told)


def _role_seen(model: _Model, role: Role) -> RoleSeen:
    seen, figures = model.seen[role], model.balance.figures(role)
    use = figures.work / max(1, seen.nodes)
    return RoleSeen(seen.nodes, round(use, 4), round(figures.attained, 4), round(seen.backlog_s, 3))


@asynccontextmanager
async def balancing(
    config: Callable[[], RouterConfig],
    pool: Pool,
    shared: Shared,
    counted: Counted | None,
    legs: Callable[[], Legs],
    metrics: Metrics,
    lookout: Lookout,
    ending: Callable[[], bool],
) -> AsyncIterator[None]:
    """Balance roles for the length of the block, if `counted` counts for it and this process leads. Raises ConfigError.

    `config` is what it is now: targets may change. Nothing begins any more once `ending` says so."""
    if counted is None:
        yield
        return
    shared.counts(counted.take)
    if not shared.leads:
        yield
        return
    begun = config()
    way: Way = Flips(pool, legs)
    if begun.prefill_deployment:
        names = {Role.PREFILL: begun.prefill_deployment, Role.DECODE: begun.decode_deployment}
        way = await asyncio.to_thread(Deployments, pool, names, begun.kubernetes_namespace)

    def aims() -> Aims:
        return Aims(config().ttft_target_ms, config().tpot_target_ms)

    how = Balancing(least_prefill=begun.least_prefill, least_decode=begun.least_decode)
    balancer = Balancer(pool, shared, counted, way, how, aims, metrics.role_changes, ending)
    lookout.balance = balancer.told
    task = asyncio.create_task(balancer.look_for_ever())
    try:
        yield
    finally:
        await ended([task])
