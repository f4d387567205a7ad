"""Loading and unloading LoRA adapters on all nodes of a model: the same body to each, and one answer of what each says.

Decides nothing about adapters; a node checks whether it may, and reads its own files. Keeps the pool's knowledge of who
has what up to date, so that nobody waits for the next health check.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from openai_api.adapters import AdapterAnswer, NodeSaid, UnloadAdapterRequest
from router.legs.legs import Legs
from router.nodes.node import Node
from router.nodes.pool import Pool
from wire.errors import KvrelayError, NodeFailed, NotFound, RequestError
from wire.frames import MALFORMED

__all__ = ["LOAD_PATH", "UNLOAD_PATH", "failure_of", "tell_all"]

LOAD_PATH = "/v1/load_lora_adapter"
UNLOAD_PATH = "/v1/unload_lora_adapter"


class _Asked(UnloadAdapterRequest, frozen=True):
    """What both requests have in common; which model an adapter is for must be said where several are served."""

    base_model_name: str = ""


async def tell_all(pool: Pool, legs: Legs, path: str, body: bytes, deadline_s: float) -> bytes:
    """Post `body` to every node of the model; what all have said, as JSON.

    Raises KvrelayError, with it, unless all have done it.
    """
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except MALFORMED as why:
        raise RequestError(f"the body must be a JSON object with lora_name: {why}", param="lora_name") from why

    name = asked.lora_name
    nodes = _nodes_for(pool, asked, loads=path == LOAD_PATH)

    async def tell(node: Node) -> NodeSaid:
        status, message = await legs.tell(node, path, body, deadline_s)
        if status == 200:
            pool.note_adapter(node, name, loaded=path == LOAD_PATH, now=time.monotonic())
        return NodeSaid(node.url, node.role, status, message)

    said = await asyncio.gather(*map(tell, nodes))
    if all(each.status == 200 for each in said):
        return msgspec.json.encode(AdapterAnswer(name, "done on all nodes", said))
    raise failure_of(said, "lora_name")


def _nodes_for(pool: Pool, asked: _Asked, *, loads: bool) -> list[Node]:
    """Where the adapter belongs. Raises RequestError, NotFound."""
    models = pool.models()
    base = asked.base_model_name or ("" if loads else pool.base_of(asked.lora_name))
    if not base and len(models) > 1 and loads:
        names = ", ".join(map(repr, sorted(models)))
        raise RequestError(f"base_model_name is missing: name one of {names}", param="base_model_name")
    if base and base not in models:
        raise NotFound(f"model {base!r} is not served here", param="base_model_name", code="model_not_found")
    return [node for node in pool.nodes if not base or node.model == base]


def failure_of(said: list[NodeSaid], param: str | None = None) -> KvrelayError:
    """One error of all: their own status if they agree, else that of a cluster whose nodes differ now."""
    statuses = {each.status for each in said}
    done = sum(each.status == 200 for each in said)
    words = "; ".join(f"{each.role} node {each.url} ({each.status}): {each.message}" for each in said)
    failure: KvrelayError
    if len(statuses) == 1 and 400 <= min(statuses) < 500:
        failure = RequestError(words, param=param)
        failure.status = min(statuses)
    else:
        failure = NodeFailed(f"{done} of {len(said)} nodes did it: {words}", param=param)
    return failure
