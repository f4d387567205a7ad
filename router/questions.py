"""Short questions that any node of a model can answer, such as which tokens a text has: no walk, no
lease.
"""

from __future__ import annotations

import contextlib
import logging

import msgspec

from kvrelay.router.nodes.models import Models
from kvrelay.router.nodes.node import Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.transport.node_client import AttemptFailed, NodeClient
from kvrelay.wire.config import Role
from kvrelay.wire.errors import RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = ["ask_any"]

_log = logging.getLogger("kvrelay.router")


class _Asked(msgspec.Struct):
    model: str | None = None


async def ask_any(
    pool: Pool, models: Models, legs: NodeClient, path: str, body: bytes, attempts: int
) -> bytes:
    """The answer of the first node that gives one: prefill nodes first, because they tokenize
    anyway.

    Raises Refused with a node's 4xx, NotFound for a model that is not served, NoNode if no node of
    it is up, AttemptFailed if `attempts` nodes broke, DeadlineExceeded. No node is blamed: that would
    take it from all others for the sake of one large text.
    """
    model, body = _for_model(body, models)
    nodes: list[Node] = [*pool.up(Role.PREFILL, model=model), *pool.up(Role.DECODE, model=model)][
        :attempts
    ]
    if not nodes:
        pool.require_ready(model)
    failure: AttemptFailed | None = None
    for node in nodes:
        try:
            return await legs.ask(node, path, body)
        except AttemptFailed as why:
            _log.warning("a question was not answered: %s", why.detail)
            failure = why
    assert failure is not None
    raise failure


def _for_model(body: bytes, models: Models) -> tuple[str, bytes]:
    """The model whose nodes are asked (empty: any), and the body with the name that they know."""
    asked = None
    with contextlib.suppress(*MALFORMED):  # a node says what is wrong
        asked = msgspec.json.decode(body, type=_Asked).model
    if asked:
        model = models.named(asked)
        if model != asked:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            body = msgspec.json.encode(fields | {"model": msgspec.Raw(msgspec.json.encode(model))})
        return model, body
    if len(served := list(models.ready())) > 1:
        raise RequestError(
            f"model is missing; served: {', '.join(map(repr, served))}", param="model"
        )
    return "", body
