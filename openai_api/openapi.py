"""The OpenAPI document of the router's and the nodes' routes. Pure.

Made of the types that requests are decoded with. FastAPI cannot see these, because it does not read
the bodies. What the cluster says to itself (/kv) is left out. A test compares the paths here with
those that are served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.openai_api.body import MAX_CHOICES
from kvrelay.openai_api.dialects.anthropic import CountRequest, MessagesRequest
from kvrelay.openai_api.dialects.base import PASSED_ON
from kvrelay.openai_api.dialects.generate import GENERATE_PATH, Generated, GenerateRequest
from kvrelay.openai_api.dialects.responses_request import ResponsesRequest
from kvrelay.openai_api.types import (
    AdapterAnswer,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    LoadAdapterRequest,
    Message,
    ModelCard,
    ModelList,
    TokenizeResponse,
    UnloadAdapterRequest,
)
from kvrelay.wire.errors import ErrorBody
from kvrelay.wire.sampling import MAX_LOGPROBS

__all__ = ["document"]

Schema = dict[str, Any]

_SEED = 2**63
_SAMPLING: dict[str, Schema] = {
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "seed": {"minimum": -_SEED, "maximum": _SEED - 1},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "best_of": {"minimum": 1, "maximum": MAX_CHOICES},
    "min_tokens": {"minimum": 0},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "cache_salt": {"minLength": 1},
    "messages": {"minItems": 1},
}
_LIMITS: dict[str, dict[str, Schema]] = {
    "ChatRequest": _SAMPLING,
    "CompletionRequest": _SAMPLING
    | {"max_tokens": {"minimum": 0, "description": "0 with echo only."}},
    "Message": {"role": {"minLength": 1}},
    "LoadAdapterRequest": {
        "lora_name": {"minLength": 1, "maxLength": 256},
        "lora_path": {"minLength": 1},
    },
    "Turn": {"role": {"enum": ["user", "assistant", "system"]}},
    "ResponsesRequest": {
        **{name: _SAMPLING[name] for name in ("temperature", "top_p", "top_logprobs")},
        "max_output_tokens": {"minimum": 1},
        "input": {"minLength": 1, "minItems": 1},
        "metadata": {"maxProperties": 16},
        "truncation": {"enum": ["disabled", None]},
        "background": {"enum": [False, None]},
        "conversation": {"type": "null"},
        "prompt": {"type": "null"},
    },
    "MessagesRequest": {
        **{name: _SAMPLING[name] for name in ("temperature", "top_p", "max_tokens", "messages")},
        "container": {"type": "null"},
    },
    "CountRequest": {"messages": {"minItems": 1}},
    "Thinking": {"type": {"enum": ["enabled", "adaptive", "disabled"]}},
    "ContentPart": {"type": {"enum": ["text"]}},
    "DetokenizeRequest": {"tokens": {"items": {"type": "integer", "minimum": 0}}},
}
"""What is checked beyond the types, where a schema can say it."""


class ErrorAnswer(msgspec.Struct):
    """Any error, in OpenAI's shape."""

    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct):
    """Any error on /v1/messages."""

    error: AnthropicErrorBody
    type: str = "error"


class ResponseObject(msgspec.Struct):
    """A response of the Responses API. It also repeats what the request has set."""

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


class InputTokens(msgspec.Struct):
    """How long a prompt is."""

    input_tokens: int


class Deleted(msgspec.Struct):
    """A response that is kept no more."""

    id: str
    object: str
    deleted: bool


class ItemPage(msgspec.Struct):
    """Some of a response's input items."""

    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokenizePrompt(msgspec.Struct):
    """The tokens of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(msgspec.Struct):
    """The tokens of a chat, behind its template."""

    messages: list[Message]
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class Version(msgspec.Struct):
    """Of the server."""

    version: str


@dataclass(frozen=True, slots=True)
class _Operation:
    """`asks`: types of the JSON body, one of them. `answers`: of the JSON answer, or else a media
    type.
    """

    method: str
    path: str
    about: str
    asks: tuple[Any, ...] = ()
    answers: Any = None
    streams: bool = False
    parameters: tuple[Schema, ...] = ()
    guarded: bool = True
    error: Any = field(default=ErrorAnswer)


def _parameter(name: str, where: str, schema: Schema, about: str = "") -> Schema:
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "schema": schema,
        "description": about,
    }


_TEXT = {"type": "string"}
# Of each event of a stream.
_EVENT: Schema = {
    "type": "object",
    "properties": {"event": _TEXT, "data": _TEXT},
    "required": ["data"],
}
_MODEL = (_parameter("model", "path", _TEXT),)
_RESPONSE_ID = (_parameter("response_id", "path", _TEXT),)
_PAGE = (
    _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    _parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}),
    _parameter("after", "query", _TEXT, "The id of the last item of the page before."),
)
_NO_SUCH_FIELD = (
    "Fields without a name of their own here mean what they mean in a chat completion: "
)
_OPERATIONS = (
    _Operation(
        "post",
        "/v1/chat/completions",
        "Answer a chat.",
        (ChatRequest,),
        ChatCompletion,
        streams=True,
    ),
    _Operation(
        "post",
        "/v1/completions",
        "Continue a text.",
        (CompletionRequest,),
        Completion,
        streams=True,
    ),
    _Operation(
        "post",
        "/v1/responses",
        f"Answer in the Responses API. {_NO_SUCH_FIELD}{', '.join(PASSED_ON)}.",
        (ResponsesRequest,),
        ResponseObject,
        streams=True,
    ),
    _Operation(
        "get",
        "/v1/responses/{response_id}",
        "A kept response.",
        (),
        ResponseObject,
        parameters=_RESPONSE_ID,
    ),
    _Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Forget a response.",
        (),
        Deleted,
        parameters=_RESPONSE_ID,
    ),
    _Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "What a kept response answers.",
        (),
        ItemPage,
        parameters=_RESPONSE_ID + _PAGE,
    ),
    _Operation(
        "post",
        "/v1/messages",
        f"Answer in the Anthropic API. {_NO_SUCH_FIELD}{', '.join(PASSED_ON)}.",
        (MessagesRequest,),
        AnthropicMessage,
        streams=True,
        error=AnthropicErrorAnswer,
    ),
    _Operation(
        "post",
        "/v1/messages/count_tokens",
        "Tokens of a prompt in the Anthropic API.",
        (CountRequest,),
        InputTokens,
        error=AnthropicErrorAnswer,
    ),
    _Operation(
        "post",
        GENERATE_PATH,
        "Continue token ids with token ids, as vLLM's route does.",
        (GenerateRequest,),
        Generated,
        streams=True,
    ),
    _Operation("get", "/v1/models", "The served models.", (), ModelList),
    _Operation("get", "/v1/models/{model}", "One of them.", (), ModelCard, parameters=_MODEL),
    _Operation(
        "post",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter, which is a model's name from then on; where nodes allow it.",
        (LoadAdapterRequest,),
        AdapterAnswer,
    ),
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
    _Operation(
        "get", "/health", "200 when requests can be served.", (), dict[str, Any], guarded=False
    ),
    _Operation("get", "/ping", "The same without a body.", guarded=False),
    _Operation("post", "/ping", "The same without a body.", guarded=False),
    _Operation(
        "get",
        "/live",
        "200 unless only a new process can help: also while it loads or drains.",
        guarded=False,
    ),
    _Operation("get", "/version", "Of the server.", (), Version, guarded=False),
    _Operation("get", "/metrics", "Prometheus metrics.", (), "text/plain", guarded=False),
    _Operation("get", "/openapi.json", "This document.", (), dict[str, Any], guarded=False),
    _Operation("get", "/docs", "This document as a page.", (), "text/html", guarded=False),
)


def document(title: str, version: str, models: Sequence[str] = (), root_path: str = "") -> Schema:
    """The OpenAPI 3.1 document. `models`: the names that requests may have; none if they are not
    known yet.

    `root_path`: what stands before the paths.
    """
    types = list(dict.fromkeys(kind for each in _OPERATIONS for kind in _types_of(each)))
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(types, schemas, strict=True))
    for name, limits in _LIMITS.items():
        _limit(components[name]["properties"], limits)
    for request in (
        "ChatRequest",
        "CompletionRequest",
        "ResponsesRequest",
        "MessagesRequest",
        "CountRequest",
        "GenerateRequest",
    ):
        named: Schema = {"enum": list(models)} if models else {"type": "string"}
        components[request]["properties"]["model"] = named
        components[request]["required"] = sorted({*components[request]["required"], "model"})
    for request in ("ChatRequest", "CompletionRequest"):
        # Between the router and its nodes only; from a client the router refuses it.
        del components[request]["properties"]["kv_transfer_params"]
    used = _reachable(schemas, components)
    paths: dict[str, Schema] = {}
    for each in _OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, schema_of)
    key = (
        {"type": "http", "scheme": "bearer"},
        {"type": "apiKey", "in": "header", "name": "x-api-key"},
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": {name: components[name] for name in sorted(used)},
            "securitySchemes": {"bearer": key[0], "x-api-key": key[1]},
        },
    }


def _types_of(each: _Operation) -> Iterable[Any]:
    yield from each.asks
    if each.answers is not None and not isinstance(each.answers, str):
        yield each.answers
    yield each.error


def _limit(properties: dict[str, Schema], limits: dict[str, Schema]) -> None:
    for name, limit in limits.items():
        if name in properties:
            properties[name] |= limit


def _reachable(schema: Any, components: dict[str, Schema]) -> set[str]:
    """Names of the components that a schema refers to, directly or through others."""
    found: set[str] = set()
    ways = [schema]
    while ways:
        value = ways.pop()
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            if name and name not in found:
                found.add(name)
                ways.append(components[name])
            ways += value.values()
        elif isinstance(value, (list, tuple)):
            ways += value
    return found


def _operation(each: _Operation, schema_of: dict[Any, Schema]) -> Schema:
    errors = {"application/json": {"schema": schema_of[each.error]}}
    if isinstance(each.answers, str):
        content: Schema = {each.answers: {"schema": _TEXT}}
    else:
        content = (
            {}
            if each.answers is None
            else {"application/json": {"schema": schema_of[each.answers]}}
        )
    if each.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    said: Schema = {
        "summary": each.about.partition(". ")[0].rstrip("."),
        "description": each.about,
        "operationId": f"{each.method}{each.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "parameters": list(each.parameters),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "Something is wrong with the request.", "content": errors},
            "default": {"description": "It could not be served.", "content": errors},
        },
    }
    if each.asks:
        schemas = [schema_of[kind] for kind in each.asks]
        body = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if each.guarded:
        said["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return said
