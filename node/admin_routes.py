"""Admin routes of a node: drain, role, LoRA adapters, and held KV."""

from __future__ import annotations

import logging

import msgspec
from fastapi import FastAPI, Request, Response

from kvrelay.node.http_edge import authorize, decode_body
from kvrelay.node.lifecycle import Node
from kvrelay.openai_api.json_body import json_response, read_body
from kvrelay.openai_api.model_types import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest
from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import (
    LoadAdapter,
    Order,
)
from kvrelay.wire.errors import NotFound, RequestError

__all__ = [
    "HeldRequest",
    "RoleRequest",
    "add_admin_routes",
    "load_adapter",
    "read_admin_body",
    "unload_adapter",
]

_RESET_DEADLINE_S = 30.0
_LOAD_DEADLINE_S = 300.0

log = logging.getLogger("kvrelay.node")


class RoleRequest(msgspec.Struct):
    role: Role


class HeldRequest(msgspec.Struct):
    request_ids: list[str]


async def read_admin_body(node: Node, request: Request) -> bytes:
    authorize(node.config.api_key, request)
    return await read_body(request, node.config.max_body_bytes)


def add_admin_routes(app: FastAPI, node: Node) -> None:
    @app.post("/drain")
    @app.post("/undrain")
    async def change_drain(request: Request) -> Response:
        await read_admin_body(node, request)
        node.drain(draining=request.url.path == "/drain")
        requests = node.engine.queue_depth()
        return json_response({"draining": node.draining, "requests": requests})

    @app.post("/admin/role")
    async def change_role(request: Request) -> Response:
        body = await read_admin_body(node, request)
        node.ready()
        node.change_role(decode_body(body, RoleRequest).role)
        state = {
            "role": node.role,
            "flips_to": node.flips_to,
            "requests": node.engine.queue_depth(),
        }
        return json_response(state, 200 if node.flips_to is None else 202)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        await read_admin_body(node, request)
        node.ready()
        node.cache.reset()
        node.engine.send(Order("reset", request.query_params.get("nodes", "")))
        await node.engine.fresh_stats(_RESET_DEADLINE_S)
        log.info("the prefix cache is reset")
        return json_response({"success": True})

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        return json_response(await load_adapter(node, await read_admin_body(node, request)))

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        return json_response(unload_adapter(node, await read_admin_body(node, request)))

    @app.post("/kv/release")
    @app.post("/kv/renew")
    async def end_or_renew(request: Request) -> Response:
        held = decode_body(await read_admin_body(node, request), HeldRequest).request_ids
        renews = request.url.path == "/kv/renew"
        for request_id in held:
            node.engine.send(Order("renew" if renews else "release", request_id))
        return json_response({"renewed" if renews else "released": len(held)})


async def load_adapter(node: Node, body: bytes) -> AdapterAnswer:
    """Load an adapter. Raises RequestError, NotFound, EngineDead, DeadlineExceeded."""
    serving = node.ready()
    _check_adapters_allowed(node, "/v1/load_lora_adapter")
    asked = decode_body(body, LoadAdapterRequest)
    name, path = asked.lora_name, asked.lora_path
    if not name.isprintable():
        raise RequestError(f"lora_name {name!r} is not printable", param="lora_name")
    if name == serving.model_name:
        raise RequestError(
            f"{name!r} is the name of the model itself; choose another", param="lora_name"
        )
    answer = await node.engine.ask(
        lambda number: LoadAdapter(number, name, path, asked.load_inplace),
        _LOAD_DEADLINE_S,
        failed=f"adapter {name!r} was not read",
    )
    if answer.adapter is None:
        if answer.missing:
            raise NotFound(
                f"{answer.reason} (there is no folder {path!r} on this node)", param="lora_path"
            )
        raise RequestError(answer.reason, param="lora_name")
    serving.adapters[name] = answer.adapter
    digest = answer.adapter.digest[:12]
    return AdapterAnswer(name, f"adapter {name!r} is loaded, content {digest}")


def unload_adapter(node: Node, body: bytes) -> AdapterAnswer:
    """Make an adapter unknown at once; its slot is freed after its last request."""
    serving = node.ready()
    _check_adapters_allowed(node, "/v1/unload_lora_adapter")
    name = decode_body(body, UnloadAdapterRequest).lora_name
    if serving.adapters.pop(name, None) is None:
        raise NotFound(
            f"adapter {name!r} is not loaded here", param="lora_name", code="model_not_found"
        )
    node.engine.send(Order("unload", name))
    return AdapterAnswer(
        name, f"adapter {name!r} is unloaded; its slot is free when its last request is done"
    )


def _check_adapters_allowed(node: Node, path: str) -> None:
    if not node.config.engine.allow_runtime_lora:
        raise NotFound(
            f"there is no route {path} here; a node that is started with --enable-lora "
            f"--allow-runtime-lora has it"
        )
