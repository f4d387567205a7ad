"""Judges which nodes may take a request now, by how requests on them have ended. Pure.

A node that is up takes requests unless its breaker is open, or it rests for want of room. Where
only open breakers are left, one request at a time may try.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection

from kvrelay.router.nodes.breaker import Breaker, State, Verdict
from kvrelay.router.nodes.node import Node, NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode, Overloaded

__all__ = ["AVOID_S", "NodeHealth"]

_REST_CAP_S = 30.0
_MOST_FAILED_PAIRS = 10_000
AVOID_S = 30.0
"""Seconds for which two nodes are avoided between which KV did not come."""

_log = logging.getLogger("kvrelay.router")


class NodeHealth:
    def __init__(self, pool: Pool) -> None:
        self._failed_pairs: dict[tuple[str, str], float] = {}
        """Until when pairs of processes are avoided."""
        self._pool = pool
        self._troubled: set[Node] = set()
        """Nodes that rest or whose breaker is not closed: others need no look."""

    def available(
        self, role: Role, model: str, exclude: Collection[Node], now: float
    ) -> list[Node]:
        """Return the nodes that may take a request. Raises NoNode, or Overloaded if they rest."""
        nodes = self._pool.up(role, exclude, model, NodeKind.KVRELAY)
        if not nodes:
            raise self._pool.no_node(role, model)
        if not self._troubled:
            return nodes
        self._troubled = {node for node in self._troubled if _is_troubled(node.breaker, now)}
        verdicts = [node.breaker.verdict(now) for node in nodes]
        best = min(verdicts)
        if best in (Verdict.TAKES, Verdict.LAST):
            return [node for node, verdict in zip(nodes, verdicts, strict=True) if verdict is best]
        after_s = max(1, math.ceil(min(node.breaker.opens_in(now) for node in nodes)))
        # No name for the error: its traceback would keep this frame, and the frame the error.
        raise _to_be_retried(role, after_s, rest=best is Verdict.RESTS)

    def avoids(self, now: float) -> Callable[[str, str], bool] | None:
        """Return whether KV failed lately between two addresses; None: between no two."""
        if not self._failed_pairs:
            return None

        def avoids(prefill: str, decode: str) -> bool:
            p, d = self._pool.find(prefill), self._pool.find(decode)
            if p is None or d is None:
                return False
            return now < self._failed_pairs.get(_pair(p, d), now)

        return avoids

    def rest(self, node: Node, seconds: float | None, now: float) -> None:
        rest_s = min(_REST_CAP_S, 1.0 if seconds is None else max(0.1, seconds))
        node.breaker.rest(rest_s, now)
        self._troubled.add(node)

    def failed(self, call: object, node: Node, why: str, now: float) -> None:
        if node.breaker.failed(call, why, now):
            _log.warning("%s gets no requests for a while, the last one failed: %s", node.url, why)
            self._troubled.add(node)

    def could_not_read(self, node: Node, now: float) -> None:
        call = object()
        node.breaker.begin(call)
        self.failed(call, node, "it fails on requests that others can read", now)

    def kv_came(self, prefill: Node, decode: Node) -> None:
        self._failed_pairs.pop(_pair(prefill, decode), None)

    def kv_failed(self, prefill: Node, decode: Node, cause: str, now: float) -> None:
        _log.warning("%s says that the KV of %s did not come: %s", decode.url, prefill.url, cause)
        if cause != "LeaseLost":  # it says nothing of the way between them
            pairs = self._failed_pairs
            pairs[_pair(prefill, decode)] = now + AVOID_S
            if len(pairs) > _MOST_FAILED_PAIRS:
                self._failed_pairs = {pair: until for pair, until in pairs.items() if until > now}


def _to_be_retried(role: Role, after_s: int, *, rest: bool) -> NoNode | Overloaded:
    error: NoNode | Overloaded
    if rest:
        error = Overloaded(f"no {role} node has room now; try again in {after_s} s")
    else:
        error = NoNode(f"all {role} nodes fail now, and the router is trying them; try again")
    error.retry_after_s = after_s
    return error


def _is_troubled(breaker: Breaker, now: float) -> bool:
    return breaker.state(now) is not State.CLOSED or breaker.opens_in(now) > 0


def _pair(prefill: Node, decode: Node) -> tuple[str, str]:
    # A node that is restarted is another one to its peers.
    return prefill.generation or prefill.url, decode.generation or decode.url
