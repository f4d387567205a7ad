"""The nodes and the router of a simulation on one clock: what it hears, and changes of role.

KV events reach the router 5 ms later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvrelay.planner.engine import Engine
from kvrelay.planner.router import Router, url_of
from kvrelay.planner.setting import Setting
from kvrelay.router.nodes.node import Lease
from kvrelay.wire.config import Role

__all__ = ["Clock", "Cluster"]

_POLL_MS = 500.0
_SWITCH_MS = 1_000.0
"""Time of a change of role, from the last request's end to the first poll."""
_KV_EVENT_MS = 5.0

Call = Callable[[float], None]


class Clock:
    """A clock in milliseconds; calls for one time are made in the order in which they were given."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Call]] = []
        self._scheduled = 0

    def later(self, at: float, call: Call) -> None:
        self._scheduled += 1
        heapq.heappush(self._heap, (at, self._scheduled, call))

    def run(self, goes_on: Callable[[], bool], before: Call) -> None:
        """Make calls while `goes_on`, `before` ahead of each."""
        heap = self._heap
        while heap and goes_on():
            now, _, call = heapq.heappop(heap)
            self.now = now
            before(now)
            call(now)


class Cluster:
    """A cluster's nodes and router."""

    def __init__(self, setting: Setting, clock: Clock, hears: Any) -> None:
        self.roles = [Role.PREFILL] * setting.prefill + [Role.DECODE] * setting.decode
        self.nodes = [
            Engine(
                setting.card,
                setting.block_size,
                clock.later,
                hears,
                setting.below if setting.prefixes else {},
                pulls=setting.pulls and setting.prefixes,
            )
            for _ in self.roles
        ]
        self.router = Router(setting, self.roles, self.nodes)
        self._setting, self._clock = setting, clock
        self._becoming: dict[int, Role] = {}
        self._kv_news: deque[tuple[float, Callable[[], None]]] = deque()
        for at in range(len(self.nodes)):
            clock.later(at * _POLL_MS / len(self.nodes), partial(self._poll, at))

    def tell_news(self, now: float) -> None:
        news = self._kv_news
        while news and news[0][0] <= now:
            news.popleft()[1]()

    def report(self, at: int, lease: Lease, now: float, *, taken: bool = False) -> None:
        """Report a node's load with a leg, and the leg's number when it was `taken`."""
        node = self.nodes[at]
        load = msgspec.structs.replace(node.load(now), leg=node.legs if taken else 0)
        lease.note_load(load)

    def tell_kv(self, at: int, now: float) -> None:
        if not self._setting.prefixes:
            return
        changed = partial(self.router.pool.prefixes.changed, url_of(at), at=now)
        for medium, stored, removed in self.nodes[at].pulls.news():
            if stored or removed:
                call = partial(changed, stored, removed, medium=medium)
                self._kv_news.append((now + _KV_EVENT_MS, call))

    def _poll(self, at: int, now: float) -> None:
        if at not in self._becoming:
            self._polled(at, now)
        self._clock.later(now + _POLL_MS, partial(self._poll, at))

    def _polled(self, at: int, now: float) -> None:
        self.router.polled(at, self.roles[at], self.nodes[at].load(now), now)

    @property
    def switching(self) -> bool:
        return bool(self._becoming)

    def change_role(self, at: int, role: Role, now: float) -> None:
        """Have a node take another role as soon as all requests placed on it have ended."""
        self._becoming[at] = role
        self.router.pool.note_role_change(self.router.node(at), role, now / 1e3)
        self.emptied(at, now)

    def emptied(self, at: int, now: float) -> None:
        """Note that a request has left a node; a draining one may change its role now."""
        if at in self._becoming and self.nodes[at].idle and not self.router.node(at).leases:
            self._clock.later(now + _SWITCH_MS, partial(self._switched, at))

    def _switched(self, at: int, now: float) -> None:
        self.roles[at] = self._becoming.pop(at)
        self._polled(at, now)
