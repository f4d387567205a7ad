"""The OpenAPI document of the clients' routes, with msgspec's schemas of request bodies. Pure.

FastAPI does not read the bodies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvrelay.openai_api.dialects.anthropic import CountRequest, MessagesRequest
from kvrelay.openai_api.dialects.base import PASSED_ON
from kvrelay.openai_api.dialects.responses_request import ResponsesRequest
from kvrelay.openai_api.model_types import (
    DetokenizeRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from kvrelay.openai_api.routes import ANTHROPIC_PATH, GUARDED, RESPONSES_PATH
from kvrelay.openai_api.types import ChatRequest, CompletionRequest, Message
from kvrelay.wire.errors import ErrorBody
from kvrelay.wire.json_object import JsonObject

__all__ = ["OPERATIONS", "document"]

Schema = JsonObject

_JSON = ("application/json",)
_STREAMED = (*_JSON, "text/event-stream")
_TEXT = {"type": "string"}
_RESPONSE = f"{RESPONSES_PATH}/{{response_id}}"
_FIELDS = f"Fields not listed here mean what they mean in a chat completion: {', '.join(PASSED_ON)}"

_EVENT: Schema = {
    "type": "object",
    "properties": {"event": _TEXT, "data": _TEXT},
    "required": ["data"],
}
_SCHEMAS: dict[str, Schema] = {
    "application/json": {"type": "object"},
    "text/event-stream": _EVENT,
}


class TokenizePrompt(msgspec.Struct):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(msgspec.Struct):
    messages: list[Message]
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class _Operation(NamedTuple):
    method: str
    path: str
    about: str
    asks: tuple[type[msgspec.Struct], ...] = ()
    """Types of the body, of which it has one."""
    answers: tuple[str, ...] = _JSON


OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "Answer a chat.", (ChatRequest,), _STREAMED),
    _Operation("post", "/v1/completions", "Continue a text.", (CompletionRequest,), _STREAMED),
    _Operation(
        "post",
        RESPONSES_PATH,
        f"Answer in the Responses API. {_FIELDS}.",
        (ResponsesRequest,),
        _STREAMED,
    ),
    _Operation("get", _RESPONSE, "A stored response."),
    _Operation("delete", _RESPONSE, "Delete a response."),
    _Operation(
        "post",
        ANTHROPIC_PATH,
        f"Answer in the Anthropic API. {_FIELDS}.",
        (MessagesRequest,),
        _STREAMED,
    ),
    _Operation(
        "post",
        f"{ANTHROPIC_PATH}/count_tokens",
        "Count the tokens of a prompt in the Anthropic API.",
        (CountRequest,),
    ),
    _Operation("get", "/v1/models", "The served models."),
    _Operation("get", "/v1/models/{model}", "One of them."),
    _Operation(
        "post",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter, whose name then works as a model, if nodes allow it.",
        (LoadAdapterRequest,),
    ),
    _Operation(
        "post", "/v1/unload_lora_adapter", "Unload a LoRA adapter.", (UnloadAdapterRequest,)
    ),
    _Operation(
        "post",
        "/tokenize",
        "A request's prompt as token ids, with `return_token_strs` also as texts.",
        (TokenizePrompt, TokenizeChat),
    ),
    _Operation("post", "/detokenize", "Token ids as a text.", (DetokenizeRequest,)),
    _Operation("get", "/health", "200 when requests can be served."),
    _Operation("get", "/ping", "The same without a body.", answers=()),
    _Operation("post", "/ping", "The same without a body.", answers=()),
    _Operation(
        "get",
        "/live",
        "200 unless only a new process can help: also while it loads or drains.",
        answers=(),
    ),
    _Operation("get", "/version", "Version of the server."),
    _Operation("get", "/metrics", "Prometheus metrics.", answers=("text/plain",)),
    _Operation("get", "/openapi.json", "This document."),
    _Operation("get", "/docs", "This document as a page.", answers=("text/html",)),
)


def document(title: str, version: str, models: Sequence[str] = (), root_path: str = "") -> Schema:
    """Return the OpenAPI 3.1 document, with the models that requests may name."""
    types = list(dict.fromkeys([ErrorBody, *(kind for each in OPERATIONS for kind in each.asks)]))
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    for request in (
        ChatRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        CountRequest,
    ):
        component = components[request.__name__]
        component["properties"]["model"] = {"enum": list(models)} if models else _TEXT
        component["required"] = sorted({*component["required"], "model"})
        # Only the router may send it to its nodes; from a client the router refuses it.
        component["properties"].pop("kv_transfer_params", None)
    paths: dict[str, Schema] = {}
    for each in OPERATIONS:
        schema = _operation(each, dict(zip(types, schemas, strict=True)))
        paths.setdefault(each.path, {})[each.method] = schema
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": {name: components[name] for name in sorted(_used(paths, components))},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _used(schema: Any, components: Mapping[str, Schema]) -> set[str]:
    text = msgspec.json.encode(schema).decode()
    found = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    return found.union(*(_used(components[name], components) for name in found))


def _operation(each: _Operation, schema_of: Mapping[Any, Schema]) -> Schema:
    error = {"type": "object", "properties": {"error": schema_of[ErrorBody]}}
    errors = {"description": "An error.", "content": {"application/json": {"schema": error}}}
    answers = {kind: {"schema": _SCHEMAS.get(kind, _TEXT)} for kind in each.answers}
    schema: Schema = {
        "summary": each.about.partition(". ")[0].rstrip("."),
        "description": each.about,
        "operationId": each.method + re.sub("[{}]", "", each.path).replace("/", "_"),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _TEXT}
            for name in re.findall(r"{(\w+)}", each.path)
        ],
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "default": errors,
        },
    }
    if each.asks:
        body = {"anyOf": [schema_of[kind] for kind in each.asks]}
        content = {"application/json": {"schema": body if len(each.asks) > 1 else body["anyOf"][0]}}
        schema["requestBody"] = {"required": True, "content": content}
    if each.path.startswith(GUARDED):
        schema["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return schema
