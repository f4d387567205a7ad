"""Every structured field of every request: derived from the types that bodies are decoded with.

Pure; owns no values.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec import inspect

from kvrelay.node.admin_routes import (
    HeldRequest,
    RoleRequest,
)
from kvrelay.openai_api.dialects.anthropic import MessagesRequest
from kvrelay.openai_api.dialects.base import PASSED_ON
from kvrelay.openai_api.dialects.responses_request import ResponsesRequest
from kvrelay.openai_api.openapi import OPERATIONS
from kvrelay.openai_api.types import ChatRequest, FunctionDelta
from kvrelay.router.admin import _Flip, _Name

__all__ = ["INSIDE", "OPEN", "ROUTES", "Place", "Route", "least", "places"]

Step = str | int


class _Function(msgspec.Struct):
    name: str
    parameters: Any = None
    description: str | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function
    name: str
    parameters: Any = None
    input_schema: Any = None


class _Call(msgspec.Struct):
    function: FunctionDelta
    id: str


class _Choice(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class _Part(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Item(msgspec.Struct):
    role: Literal["user"]
    content: str | list[_Part]
    type: str | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


class _Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: Any
    name: str


class _User(msgspec.Struct):
    user_id: str | None = None


INSIDE: Mapping[str, Any] = {
    "tools": list[_Tool],
    "tool_calls": list[_Call],
    "tool_choice": str | _Choice,
    "input": str | list[_Item],
    "format": _Format,
    "metadata": _User,
    "system": str | list[_Part],
    "messages.content": str | list[_Part],
}
"""Contents of fields whose types do not say it, by the end of their path without numbers."""
OPEN = frozenset(
    {
        "chat_template_kwargs",
        "conversation",
        "prompt",
        "container",
        "mcp_servers",
        "schema",
        "json",
        "parameters",
        "input_schema",
        "messages",
    }
)
"""Fields that may hold any JSON: there is nothing more to say of them. (Raw `messages` are another
type's.)
"""

_SAID = {
    "model": '"tiny"',
    "role": '"user"',
    "type": '"text"',
    "url": '"http://127.0.0.1:9"',
    "lora_path": '"/no"',
}
_SHORT = {"model": b'"tiny"', "max_tokens": b"3", "max_output_tokens": b"3"}
_TOOLS = (
    b'[{"type":"function","name":"f","input_schema":{},"function":{"name":"f","parameters":{}}}]'
)
_BESIDE: Mapping[str, dict[str, bytes]] = {
    "tool_choice": {"tools": _TOOLS},
    "parallel_tool_calls": {"tools": _TOOLS},
    "top_logprobs": {"logprobs": b"true"},
    "stream_options": {"stream": b"true"},
}
"""Fields that are refused at once where these are not beside them."""


@dataclass(frozen=True)
class Route:
    """A route that takes a body of this type, and whose key it wants: "user", "admin" or "node"."""

    path: str
    key: str
    asks: type[msgspec.Struct]

    @property
    def fields(self) -> Mapping[str, inspect.Field]:
        return _fields(self.asks)

    def body(self, given: Mapping[str, bytes]) -> bytes:
        """A valid body with these fields, written as JSON; the answer to it is short."""
        known = self.fields
        beside = {
            name: value
            for field in given
            for name, value in _BESIDE.get(field, {}).items()
            if name in known
        }
        short = {name: value for name, value in _SHORT.items() if name in known}
        needed = {name: least(field.type, name) for name, field in known.items() if field.required}
        return _object({**needed, **short, **beside, **given})


@cache
def _fields(asks: type[msgspec.Struct]) -> Mapping[str, inspect.Field]:
    info = inspect.type_info(asks)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field for field in info.fields}


@dataclass(frozen=True)
class Place:
    """A field of a route's body, at the end of these names and (of lists) numbers; its types
    without null.
    """

    route: Route
    steps: tuple[Step, ...]
    types: tuple[inspect.Type, ...]

    @property
    def name(self) -> str:
        return ".".join(str(step) for step in self.steps)

    def body(self, value: bytes) -> bytes:
        first, *rest = self.steps
        field = self.route.fields[str(first)]
        return self.route.body(
            {str(first): _written(_types(field.type, (first,)), (first,), rest, value)}
        )


def places(route: Route) -> list[Place]:
    return [
        Place(route, steps, types)
        for name, field in route.fields.items()
        for steps, types in _walked((name,), _types(field.type, (name,)))
    ]


def _walked(
    steps: tuple[Step, ...], types: tuple[inspect.Type, ...]
) -> Iterator[tuple[tuple[Step, ...], Any]]:
    yield steps, types
    for kind in types:
        for step, inner in _below(kind):
            yield from _walked((*steps, step), _types(inner, (*steps, step)))


def _below(kind: inspect.Type) -> Iterator[tuple[Step, inspect.Type]]:
    match kind:
        case inspect.StructType(array_like=True):
            yield from enumerate(field.type for field in kind.fields)
        case inspect.StructType():
            yield from ((field.encode_name, field.type) for field in kind.fields)
        case inspect.ListType() | inspect.VarTupleType():
            yield 0, kind.item_type


def _types(kind: inspect.Type, steps: tuple[Step, ...]) -> tuple[inspect.Type, ...]:
    names = [step for step in steps if isinstance(step, str)]
    every = _bare(kind)
    if any(open_type(each) for each in every):
        said = INSIDE.get(
            ".".join(names[-2:]), INSIDE.get(names[-1]) if isinstance(steps[-1], str) else None
        )
        if said is not None:
            every = _bare(inspect.type_info(said))
    return tuple(each for each in every if not isinstance(each, inspect.NoneType))


def _bare(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):
        return _bare(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(each for one in kind.types for each in _bare(one))
    return (kind,)


def open_type(kind: inspect.Type) -> bool:
    match kind:
        case inspect.AnyType() | inspect.RawType():
            return True
        case inspect.DictType():
            return open_type(kind.value_type)
        case inspect.ListType():
            return open_type(kind.item_type)
    return False


def _written(
    types: tuple[inspect.Type, ...], before: tuple[Step, ...], rest: list[Step], value: bytes
) -> bytes:
    if not rest:
        return value
    step, *further = rest
    kind, inner = next(
        (kind, dict(_below(kind))[step]) for kind in types if step in dict(_below(kind))
    )
    steps = (*before, step)
    there = _written(_types(inner, steps), steps, further, value)
    if not isinstance(kind, inspect.StructType):
        return _array([there])
    if kind.array_like:
        return _array(
            [there if at == step else least(each.type, "") for at, each in enumerate(kind.fields)]
        )
    needed = {
        field.encode_name: least(field.type, field.encode_name)
        for field in kind.fields
        if field.required and field.encode_name != step
    }
    if step == "json_schema":  # of a response_format, which is read by its type
        needed["type"] = b'"json_schema"'
    return _object({**needed, str(step): there})


def least(kind: inspect.Type, name: str) -> bytes:
    types = _types(kind, (name,)) or (kind,)
    match types[0]:
        case inspect.StrType():
            return _SAID.get(name, '"a"').encode()
        case inspect.LiteralType(values=values):
            return json.dumps(values[0]).encode()
        case inspect.EnumType(cls=cls):
            return json.dumps(next(iter(cls)).value).encode()
        case inspect.IntType() | inspect.FloatType():
            return b"1"
        case inspect.BoolType():
            return b"true"
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return _array([least(item, name)])
        case inspect.DictType() | inspect.AnyType() | inspect.RawType():
            return b"{}"
        case inspect.StructType(array_like=True, fields=fields):
            return _array([least(field.type, "") for field in fields])
        case inspect.StructType(fields=fields):
            needed = {
                field.encode_name: least(field.type, field.encode_name)
                for field in fields
                if field.required
            }
            return _object(needed)
    raise TypeError(f"the table knows no values of {types[0]}")


def _object(fields: Mapping[str, bytes]) -> bytes:
    return (
        b"{"
        + b",".join(b"%b:%b" % (json.dumps(name).encode(), value) for name, value in fields.items())
        + b"}"
    )


def _array(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _passing_on(asks: type[msgspec.Struct]) -> type[msgspec.Struct]:
    hints = typing.get_type_hints(ChatRequest)
    return msgspec.defstruct(
        asks.__name__,
        [(name, hints[name], None) for name in PASSED_ON],
        bases=(asks,),
        frozen=True,
        kw_only=True,
    )


ROUTES = (
    *(
        Route(
            each.path,
            "user",
            _passing_on(asks) if asks in (ResponsesRequest, MessagesRequest) else asks,
        )
        for each in OPERATIONS
        for asks in each.asks
    ),
    *(
        Route(path, "admin", asks)
        for path, asks in (
            ("/admin/nodes/role", _Flip),
            ("/admin/drain", _Name),
            ("/admin/undrain", _Name),
        )
    ),
    *(
        Route(path, "node", asks)
        for path, asks in (
            ("/kv/release", HeldRequest),
            ("/kv/renew", HeldRequest),
            ("/admin/role", RoleRequest),
        )
    ),
)
"""Every route that takes a body: those of the OpenAPI document, operators' and members'."""
