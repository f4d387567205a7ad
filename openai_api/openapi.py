"""The OpenAPI document of the clients' routes, with msgspec's schemas of bodies. Pure.

FastAPI does not read the bodies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.openai_api.dialects.anthropic import CountRequest, MessagesRequest
from kvrelay.openai_api.dialects.base import PASSED_ON
from kvrelay.openai_api.dialects.responses_request import ResponsesRequest
from kvrelay.openai_api.model_types import (
    AdapterAnswer,
    DetokenizeRequest,
    DetokenizeResponse,
    LoadAdapterRequest,
    ModelCard,
    ModelList,
    TokenizeResponse,
    UnloadAdapterRequest,
)
from kvrelay.openai_api.routes import ANTHROPIC_PATH, GUARDED, RESPONSES_PATH
from kvrelay.openai_api.types import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Message,
)
from kvrelay.wire.errors import ErrorBody

__all__ = ["OPERATIONS", "document"]

Schema = dict[str, Any]


class ErrorAnswer(msgspec.Struct):
    """An error in OpenAI's shape."""

    error: ErrorBody


class AnthropicErrorAnswer(msgspec.Struct):
    """An error on /v1/messages."""

    error: dict[str, str]
    type: str = "error"


class ResponseObject(msgspec.Struct):
    """A response of the Responses API, beside the request's settings."""

    id: str
    object: str
    created_at: int
    status: str
    model: str | None
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class AnthropicMessage(msgspec.Struct):
    """An answer of the Anthropic API."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, int]


class TokenizePrompt(msgspec.Struct):
    """A body that asks for the tokens of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(msgspec.Struct):
    """A body that asks for the tokens of a rendered chat."""

    messages: list[Message]
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    path: str
    about: str
    asks: tuple[Any, ...] = ()  # types of the JSON body, one of which a request has
    answers: Any = None  # the type of the JSON answer, or a media type
    streams: bool = False
    query: Mapping[str, Schema] = field(default_factory=dict)

    @property
    def error(self) -> Any:
        return AnthropicErrorAnswer if self.path.startswith(ANTHROPIC_PATH) else ErrorAnswer


_OBJECT = dict[str, Any]
_TEXT = {"type": "string"}
_EVENT: Schema = {
    "type": "object",
    "properties": {"event": _TEXT, "data": _TEXT},
    "required": ["data"],
}
_RESPONSE = f"{RESPONSES_PATH}/{{response_id}}"
_PAGE: Mapping[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": _TEXT | {"description": "The id of the last item of the page before."},
}
_FIELDS = f"Fields not listed here mean what they mean in a chat completion: {', '.join(PASSED_ON)}"
_LOAD = "Load a LoRA adapter, which is a model's name from then on; where nodes allow it."
OPERATIONS = (
    _Operation(
        "post", "/v1/chat/completions", "Answer a chat.", (ChatRequest,), ChatCompletion, True
    ),
    _Operation(
        "post", "/v1/completions", "Continue a text.", (CompletionRequest,), Completion, True
    ),
    _Operation(
        "post",
        RESPONSES_PATH,
        f"Answer in the Responses API. {_FIELDS}.",
        (ResponsesRequest,),
        ResponseObject,
        True,
    ),
    _Operation("get", _RESPONSE, "A stored response.", (), ResponseObject),
    _Operation("delete", _RESPONSE, "Delete a response.", (), dict[str, str | bool]),
    _Operation("get", f"{_RESPONSE}/input_items", "A response's input.", (), _OBJECT, query=_PAGE),
    _Operation(
        "post",
        ANTHROPIC_PATH,
        f"Answer in the Anthropic API. {_FIELDS}.",
        (MessagesRequest,),
        AnthropicMessage,
        True,
    ),
    _Operation(
        "post",
        f"{ANTHROPIC_PATH}/count_tokens",
        "Count the tokens of a prompt in the Anthropic API.",
        (CountRequest,),
        dict[str, int],
    ),
    _Operation("get", "/v1/models", "The served models.", (), ModelList),
    _Operation("get", "/v1/models/{model}", "One of them.", (), ModelCard),
    _Operation("post", "/v1/load_lora_adapter", _LOAD, (LoadAdapterRequest,), AdapterAnswer),
    _Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Unload a LoRA adapter.",
        (UnloadAdapterRequest,),
        AdapterAnswer,
    ),
    _Operation(
        "post",
        "/tokenize",
        "A prompt as token ids.",
        (TokenizePrompt, TokenizeChat),
        TokenizeResponse,
    ),
    _Operation(
        "post", "/detokenize", "Token ids as a text.", (DetokenizeRequest,), DetokenizeResponse
    ),
    _Operation("get", "/health", "200 when requests can be served.", (), _OBJECT),
    _Operation("get", "/ping", "The same without a body."),
    _Operation("post", "/ping", "The same without a body."),
    _Operation(
        "get", "/live", "200 unless only a new process can help: also while it loads or drains."
    ),
    _Operation("get", "/version", "Version of the server.", (), dict[str, str]),
    _Operation("get", "/metrics", "Prometheus metrics.", (), "text/plain"),
    _Operation("get", "/openapi.json", "This document.", (), _OBJECT),
    _Operation("get", "/docs", "This document as a page.", (), "text/html"),
)


def document(title: str, version: str, models: Sequence[str] = (), root_path: str = "") -> Schema:
    """Return the OpenAPI 3.1 document, with the models that requests may name."""
    types = list(dict.fromkeys(kind for each in OPERATIONS for kind in _types_of(each)))
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(types, schemas, strict=True))
    for request in (
        *("ChatRequest", "CompletionRequest", "ResponsesRequest"),
        *("MessagesRequest", "CountRequest"),
    ):
        component = components[request]
        component["properties"]["model"] = {"enum": list(models)} if models else _TEXT
        component["required"] = sorted({*component["required"], "model"})
        # Only the router may send it to its nodes; from a client the router refuses it.
        component["properties"].pop("kv_transfer_params", None)
    paths: dict[str, Schema] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, schema_of)
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


def _types_of(each: _Operation) -> Iterator[Any]:
    yield from each.asks
    if each.answers is not None and not isinstance(each.answers, str):
        yield each.answers
    yield each.error


def _used(schema: Any, components: Mapping[str, Schema]) -> set[str]:
    found: set[str] = set()
    pending = [msgspec.json.encode(schema).decode()]
    while pending:
        for name in re.findall(r'"#/components/schemas/(\w+)"', pending.pop()):
            if name not in found:
                found.add(name)
                pending.append(msgspec.json.encode(components[name]).decode())
    return found


def _operation(each: _Operation, schema_of: Mapping[Any, Schema]) -> Schema:
    content: Schema = {}
    if isinstance(each.answers, str):
        content = {each.answers: {"schema": _TEXT}}
    elif each.answers is not None:
        content = {"application/json": {"schema": schema_of[each.answers]}}
    if each.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    errors = {"application/json": {"schema": schema_of[each.error]}}
    schema: Schema = {
        "summary": each.about.partition(". ")[0].rstrip("."),
        "description": each.about,
        "operationId": each.method + re.sub("[{}]", "", each.path).replace("/", "_"),
        "parameters": [
            *(_parameter("path", name, _TEXT) for name in re.findall(r"{(\w+)}", each.path)),
            *(_parameter("query", name, kind) for name, kind in each.query.items()),
        ],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "Something is wrong with the request.", "content": errors},
            "default": {"description": "It could not be served.", "content": errors},
        },
    }
    if each.asks:
        bodies = [schema_of[kind] for kind in each.asks]
        body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        schema["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    if each.path.startswith(GUARDED):
        schema["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return schema


def _parameter(where: str, name: str, schema: Schema) -> Schema:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}
