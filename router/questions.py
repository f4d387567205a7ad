"""Short questions that any node can answer, such as which tokens a text has: no walk, no lease, nothing is kept."""

from __future__ import annotations

import logging

from router.legs import LegFailed, Legs
from router.pool import Node, Pool
from wire.config import Role

__all__ = ["ask_any"]

_log = logging.getLogger("kvrelay.router")


async def ask_any(pool: Pool, legs: Legs, path: str, body: bytes, attempts: int) -> bytes:
    """The answer of the first node that gives one: prefill nodes first, because they tokenize anyway.

    Raises Refused with a node's 4xx, NoNode if no node is up, LegFailed if `attempts` nodes broke, DeadlineExceeded. No
    node is blamed: that would take it from all others for the sake of one large text.
    """
    nodes: list[Node] = [*pool.up(Role.PREFILL), *pool.up(Role.DECODE)][:attempts]
    if not nodes:
        pool.require_ready()
    failure: LegFailed | None = None
    for node in nodes:
        try:
            return await legs.ask(node, path, body)
        except LegFailed as why:
            _log.warning("a question was not answered: %s", why.detail)
            failure = why
    assert failure is not None
    raise failure
