"""Admin routes that ask all nodes at once: vLLM's own, and LoRA adapters.

An answer has what each node said. Nodes of vLLM are asked, too, although some routes exist only in
their development mode. Nodes check adapters, and read their own files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from kvrelay.openai_api.json_body import json_response
from kvrelay.openai_api.model_types import AdapterAnswer, NodeAnswer, UnloadAdapterRequest
from kvrelay.openai_api.routes import server_info
from kvrelay.router.guard import caller_of, peer_of
from kvrelay.router.nodes.node import Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.router import Router
from kvrelay.router.serve import checked_body
from kvrelay.router.transport.node_errors import parse_message
from kvrelay.wire.errors import NodeFailed, NotFound, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = ["ADAPTER_PATHS", "add_node_routes"]

ADAPTER_PATHS = _LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_RESET = "/reset_prefix_cache"
_RESET_S = 35.0  # a little more than a node allows its engine
_QUESTION_S = 5.0

_log = logging.getLogger("kvrelay.router")


class _Done(msgspec.Struct):
    success: bool = True
    message: Any = ""


class _Adapter(UnloadAdapterRequest, frozen=True):
    base_model_name: str = ""


def add_node_routes(app: FastAPI, router: Router) -> None:
    pool = router.pool

    async def tell(
        nodes: Sequence[Node], path: str, body: bytes, deadline_s: float
    ) -> list[NodeAnswer]:
        async def one(node: Node) -> NodeAnswer:
            status, said = await router.node_client.call("POST", node, path, body, deadline_s)
            return _answer_of(node, status, said)

        return await asyncio.gather(*map(one, nodes))

    @app.post(_RESET, response_model=None)
    async def reset(request: Request) -> Response:
        query = request.url.query
        said = await tell(pool.nodes, f"{_RESET}?{query}" if query else _RESET, b"", _RESET_S)
        failed = ", ".join(each.url for each in said if each.status != 200) or "none"
        _log.info("admin: %s asks all nodes for %s, not done: %s", peer_of(request), _RESET, failed)
        for node in _done(pool, said):
            pool.note_emptied(node)
        _check_all_done(said)
        return json_response({"success": True, "nodes": said})

    async def adapters(request: Request) -> Response:
        caller_of(request).check_admin()
        path, body = request.url.path, await checked_body(request, router.config)
        try:
            asked = msgspec.json.decode(body, type=_Adapter)
        except MALFORMED as why:
            raise RequestError(
                f"the body must be a JSON object with lora_name: {why}", param="lora_name"
            ) from why
        nodes, name = _nodes_for(pool, asked, loads=path == _LOAD), {asked.lora_name}
        said = await tell(nodes, path, body, router.config.request_deadline_s)
        for node in _done(pool, said):  # so that nobody waits for the next health check
            names = node.adapters | name if path == _LOAD else node.adapters - name
            pool.note_adapters(node, names, time.monotonic())
        _check_all_done(said, "lora_name")
        return json_response(AdapterAnswer(asked.lora_name, "done on all nodes", said))

    for path in ADAPTER_PATHS:
        app.post(path, response_model=None)(adapters)

    async def told(ask: str) -> list[dict[str, Any]]:
        async def one(node: Node) -> dict[str, Any]:
            status, said = await router.node_client.call("GET", node, ask, b"", _QUESTION_S)
            row: dict[str, Any] = {"url": node.url, "role": node.role, "status": status}
            if isinstance(said, bytes) and status == 200:
                with contextlib.suppress(*MALFORMED):
                    return row | msgspec.json.decode(said, type=dict[str, Any])
            return row | {"message": said if isinstance(said, str) else parse_message(said)}

        return await asyncio.gather(*map(one, pool.nodes))

    @app.get("/server_info", response_model=None)
    async def info(request: Request) -> Response:
        as_format = request.query_params.get("config_format", "text")
        own = server_info(router.config, as_format)
        return json_response(own | {"nodes": await told(f"/server_info?config_format={as_format}")})

    @app.get("/load", response_model=None)
    async def tell_load() -> Response:
        load = len(router.live) + sum(worker.running for worker in router.shared.other_workers())
        return json_response({"server_load": load, "nodes": await told("/load")})


def _answer_of(node: Node, status: int, said: bytes | str) -> NodeAnswer:
    if isinstance(said, str):
        return NodeAnswer(node.url, node.role, status, said)
    if status != 200:
        return NodeAnswer(node.url, node.role, status, parse_message(said))
    answer = _Done()
    with contextlib.suppress(*MALFORMED):
        answer = msgspec.json.decode(said, type=_Done)
    if answer.success:
        return NodeAnswer(node.url, node.role, 200, str(answer.message or ""))
    why = "it did not succeed: some of its blocks are in use; try again"
    return NodeAnswer(node.url, node.role, 409, why)


def _done(pool: Pool, said: Sequence[NodeAnswer]) -> list[Node]:
    found = [pool.find(each.url) for each in said if each.status == 200]
    return [node for node in found if node is not None]


def _nodes_for(pool: Pool, asked: _Adapter, *, loads: bool) -> list[Node]:
    models = pool.models()
    base = asked.base_model_name or ("" if loads else pool.base_of(asked.lora_name))
    if not base and len(models) > 1 and loads:
        names = ", ".join(map(repr, sorted(models)))
        raise RequestError(
            f"base_model_name is missing: name one of {names}", param="base_model_name"
        )
    if base and base not in models:
        raise NotFound(
            f"model {base!r} is not served here", param="base_model_name", code="model_not_found"
        )
    return [node for node in pool.nodes if not base or node.model == base]


def _check_all_done(said: Sequence[NodeAnswer], param: str | None = None) -> None:
    statuses = {each.status for each in said}
    if not statuses - {200}:
        return
    words = "; ".join(
        f"{each.role} node {each.url} ({each.status}): {each.message}" for each in said
    )
    if len(statuses) == 1 and 400 <= min(statuses) < 500:
        failure = RequestError(words, param=param)
        failure.status = min(statuses)
        raise failure
    done = sum(each.status == 200 for each in said)
    raise NodeFailed(f"{done} of {len(said)} nodes did it: {words}", param=param)
