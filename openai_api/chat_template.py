"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.openai_api.types import Message
from kvrelay.wire.errors import ConfigError, RequestError

__all__ = ["check_template", "render", "with_object"]


def check_template(template: str) -> None:
    """Raise ConfigError for invalid Jinja."""
    try:
        _compiled(template)
    except (TemplateError, SyntaxError, RecursionError) as why:
        raise ConfigError(f"the chat template is not valid Jinja: {why}") from why


def render(
    template: str | None,
    messages: Sequence[Message],
    /,
    *,
    bos_token: str,
    eos_token: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **kwargs: Any,
) -> str:
    """Return the prompt of these messages; `kwargs` are variables of the template.

    With `continue_final_message` the prompt ends with the last message's content. Raises
    RequestError if there is no template or no message, or if it refuses them.
    """
    if not template:
        raise RequestError(
            "this model has no chat template; start the node with --chat-template FILE, or use "
            "/v1/completions",
            param="messages",
        )
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    plain = [_plain(message) for message in messages]
    variables = {
        **kwargs,
        "messages": plain,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        text = _compiled(template).render(variables)
    # Template code can raise any of these on messages of an unexpected shape.
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        SyntaxError,
    ) as why:
        raise RequestError(
            f"the chat template refuses these messages: {why}", param="messages"
        ) from why
    return _up_to(messages[-1].text, text) if continue_final_message else text


def _up_to(content: str, text: str) -> str:
    trimmed = content.strip()
    behind = text[::-1].find(trimmed[::-1])  # rfind() is quadratic: 0.2 s for 250 KB
    if not trimmed or behind < 0:
        raise RequestError(
            "continue_final_message needs a last message with text, which the chat template "
            "renders as it is",
            param="continue_final_message",
        )
    end = len(text) - behind
    trailing = content[len(content.rstrip()) :]
    return text[: end + len(trailing)] if text.startswith(trailing, end) else text[:end]


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {**msgspec.to_builtins(message), "content": message.text}
    if message.thought:
        plain |= {"reasoning": message.thought, "reasoning_content": message.thought}
    if message.tool_calls is not None:
        plain["tool_calls"] = [with_object(call) for call in message.tool_calls]
    return plain


def with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, if they are one."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            found = None
        arguments = found if isinstance(found, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _environment.from_string(template)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own tojson escapes HTML, which would change the prompt.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Generation(Extension):
    """`{% generation %}`, with which templates mark answers for training; it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own type

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
)
_environment.filters["tojson"] = _to_json
_environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
