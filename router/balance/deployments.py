"""A role gets one more node because its Deployment gets a pod more, and that of the other role one less.

Kubernetes chooses the pods, starts and drains them. Owns the numbers, through the `scale` subresource alone: it reads
both, and writes only what nobody has changed since (by resourceVersion), so of two routers that decide at the same time
one is refused. Nothing begins while a Deployment wants another number of pods than there are nodes that take legs; so
one that cannot have its pods (no GPU is free, an image is missing) blocks all that would come after. What is not over
in time is taken back, however often that must be tried, and nothing is scaled for a while: each try ends a pod that has
work. Numbers that somebody else has changed meanwhile are left alone. All of that is forgotten with the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from planning.balance import OTHER
from router.balance.way import UnderWay
from router.membership.kubernetes_watch import server_of
from router.nodes.node import NodeKind
from router.nodes.pool import Pool
from wire.config import Role
from wire.errors import Conflict, KvrelayError, Unavailable

__all__ = ["SCALE_DEADLINE_S", "Deployments"]

SCALE_DEADLINE_S = 900.0
"""Until a new pod has its model and is ready, and the old one is gone: after that all is put back."""
_RESTS_S = 3600.0
"""Nothing is scaled for so long after what was not over in time; and for twice as long each time that this follows."""
_MOST_RESTS_S = 24 * 3600.0
_ROLES = (Role.PREFILL, Role.DECODE)
_TIMEOUTS_S = (2.0, 5.0)
_FORBIDDEN = (401, 403)
_CHANGED = 409

_log = logging.getLogger("kvrelay.router")


class Deployments:
    """The Way of pods that are started and ended. `names` are those of the Deployments."""

    def __init__(self, pool: Pool, names: dict[Role, str], namespace: str) -> None:
        """Raises ConfigError if nothing says where the API server is."""
        settings, self.namespace = server_of(namespace)
        import kubernetes.client

        self._pool, self.names = pool, names
        self._owed: tuple[dict[Role, int], dict[Role, int]] | None = None
        """What must still be put back: numbers of ours, and those of before."""
        self._rest_s = _RESTS_S
        self._rests_until = float("-inf")
        self._apps = kubernetes.client.AppsV1Api(kubernetes.client.ApiClient(settings))
        both = " and ".join(names[role] for role in _ROLES)
        _log.info("roles are balanced by scaling the Deployments %s of namespace %s", both, self.namespace)

    async def hindered(self, model: str) -> str:
        """See Way."""
        if self._owed is not None and not await self.put_back(*self._owed):
            return f"Deployments are still to be put back to {_said(self._owed[1])}"
        models = sorted({node.model for node in self._pool.nodes if node.model})
        if len(models) > 1:
            return f"Deployments are scaled for one model, and there are nodes of {', '.join(models)}"
        left_s = self._rests_until - time.monotonic()
        if left_s > 0:
            return f"Deployments were scaled in vain: nothing is scaled for another {left_s / 60:.0f} min"
        try:
            return self._unsettled(await self.scales(), model)
        except Unavailable as why:
            return why.message

    async def begin(self, model: str, role: Role) -> UnderWay:
        """See Way."""
        scales = await self.scales()
        if unsettled := self._unsettled(scales, model):
            raise Conflict(unsettled)
        before = {each: _wanted(scales[each]) for each in _ROLES}
        after = {role: before[role] + 1, OTHER[role]: before[OTHER[role]] - 1}
        # First the one that grows: what breaks between the two leaves a pod too many, and not one too few.
        ours: dict[Role, int] = {}
        for each in (role, OTHER[role]):
            try:
                await self.write(scales[each], after[each])
            except KvrelayError as why:
                if not isinstance(why, Conflict):  # else it may be written though no answer came
                    ours[each] = after[each]
                await self.put_back(ours, before)
                raise
            ours[each] = after[each]
        return _Scaling(self, before, after, lambda: self.ready(model))

    def ready(self, model: str) -> dict[Role, int]:
        """By role, the nodes that take legs."""
        return {role: len(self._pool.up(role, model=model, kind=NodeKind.KVRELAY)) for role in _ROLES}

    def _unsettled(self, scales: dict[Role, Any], model: str) -> str:
        for role, ready in self.ready(model).items():
            wanted = _wanted(scales[role])
            if wanted != ready:
                return f"Deployment {self.names[role]} wants {wanted} pods, and {ready} {role} nodes take requests"
        return ""

    async def scales(self) -> dict[Role, Any]:
        """Both, as the API server has them. Raises Unavailable."""
        return {role: await self._ask(self._apps.read_namespaced_deployment_scale, self.names[role]) for role in _ROLES}

    async def write(self, scale: Any, replicas: int) -> None:
        """So many pods from now on. Raises Unavailable; Conflict if anything of it has changed since it was read."""
        scale.spec.replicas = replicas
        await self._ask(self._apps.replace_namespaced_deployment_scale, scale.metadata.name, scale)

    async def put_back(self, ours: dict[Role, int], before: dict[Role, int]) -> bool:
        """The numbers of before, of those Deployments that still have ours. Whether it is done; else it is owed."""
        if not ours:
            return True
        self._owed = ours, before
        try:
            scales = await self.scales()
            for role in sorted(ours, key=lambda each: ours[each] - before[each]):  # first the one that grows
                if _wanted(scales[role]) == ours[role]:
                    await self.write(scales[role], before[role])
        except KvrelayError as why:
            said = "Deployments are not put back to %s yet, which is tried again with every look: %s"
            _log.error(said, _said(before), why.message)
            return False
        self._owed = None
        return True

    async def failed(self, ours: dict[Role, int], before: dict[Role, int]) -> None:
        """A scaling was not over in time."""
        self._rests_until = time.monotonic() + self._rest_s
        self._rest_s = min(_MOST_RESTS_S, 2 * self._rest_s)
        await self.put_back(ours, before)

    def succeeded(self) -> None:
        """A scaling is over."""
        self._rest_s = _RESTS_S

    async def _ask(self, call: Callable[..., Any], name: str, *body: Any) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError  # what the client is made of

        try:
            return await asyncio.to_thread(call, name, self.namespace, *body, _request_timeout=_TIMEOUTS_S)
        except ApiException as why:
            if why.status in _FORBIDDEN:
                remedy = "the service account must be allowed to get and update deployments/scale of both Deployments"
                raise Unavailable(f"the Kubernetes API server answers {why.status}; {remedy}") from why
            if why.status == _CHANGED:
                raise Conflict(f"somebody else has just changed Deployment {name}") from why
            raise Unavailable(f"the Kubernetes API server answers {why.status} about Deployment {name}") from why
        except (HTTPError, OSError) as why:
            raise Unavailable(f"the Kubernetes API server does not answer: {type(why).__name__}") from why


class _Scaling:
    """Two Deployments that get new numbers."""

    deadline_s = SCALE_DEADLINE_S

    def __init__(
        self,
        deployments: Deployments,
        before: dict[Role, int],
        after: dict[Role, int],
        ready: Callable[[], dict[Role, int]],
    ) -> None:
        self._deployments, self._before, self._after, self._ready = deployments, before, after, ready
        self.where = ", ".join(f"{deployments.names[role]} {before[role]} -> {after[role]}" for role in _ROLES)

    async def over(self) -> str | None:
        """See UnderWay."""
        try:
            scales = await self._deployments.scales()
        except Unavailable:
            return None
        for role, wanted in self._after.items():
            if (found := _wanted(scales[role])) != wanted:
                return f"somebody else has scaled Deployment {self._deployments.names[role]} to {found}"
        if self._ready() != self._after:
            return None
        self._deployments.succeeded()
        return ""

    async def give_up(self) -> None:
        """See UnderWay."""
        await self._deployments.failed(self._after, self._before)


def _wanted(scale: Any) -> int:
    """How many pods its Deployment is to have; on the wire 0 is left out."""
    return int(scale.spec.replicas or 0)


def _said(counts: dict[Role, int]) -> str:
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))
