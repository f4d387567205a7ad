"""The prompt of a request as token ids: rendered and tokenized once.

Chat templates are Jinja in a sandbox, with what Hugging Face's expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import UNSET, UnsetType

from kvrelay.openai_api.body import prompts_of
from kvrelay.openai_api.constraints import tool_use
from kvrelay.openai_api.logprobs import ScoredPrompt
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.types import AnyRequest, ChatRequest, Message
from kvrelay.wire.errors import ConfigError, RequestError
from kvrelay.wire.json_object import JsonObject

__all__ = ["Beginning", "Prompts", "check_template", "render", "with_object"]

# Text has 2 to 5 bytes per token. A text with more per context token is counted first.
_LIKELY_BYTES_PER_TOKEN = 6
_SLICE_CHARS = 256 << 10
# A cut through a word adds fewer tokens than this.
_CUT_TOKENS = 16
# The longest text that is counted even if it does not fit.
_MAX_COUNTED_BYTES = 1 << 20
_ASSISTANT = "assistant"


@dataclass(slots=True)
class Beginning:
    """A beginning for each choice of an answer; its prompt is scored before the first token."""

    role: str = _ASSISTANT
    echo: str = ""
    prompt_token_ids: list[int] | UnsetType = UNSET
    scored_prompt: ScoredPrompt | None = None


class Prompts:
    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        *,
        chat_template: str | None,
        trusts_request_templates: bool,
    ) -> None:
        """Templates of requests are refused unless they are trusted.

        `chat_template` replaces the model's.
        """
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._chat_template = chat_template or tokenizer.chat_template
        self._tool_template = chat_template or tokenizer.tool_template
        self._trusts_request_templates = trusts_request_templates

    def token_ids(self, request: AnyRequest, *, fits: bool = True) -> list[list[int]]:
        """Return each prompt; `fits`: it must fit the context. Raises RequestError."""
        prompts: list[str | list[int]]
        if isinstance(request, ChatRequest):
            prompts, field, special = [self._chat(request)], "messages", False
        else:
            prompts, field, special = prompts_of(request), "prompt", True
        if request.add_special_tokens is not None:
            special = request.add_special_tokens
        for text in prompts:
            if isinstance(text, str) and len(text) > self._max_model_len:
                self._check_length(text, field, fits=fits)
        return [
            self._tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    def beginning(self, request: AnyRequest, token_ids: list[int]) -> Beginning:
        ids = token_ids if request.return_token_ids else UNSET
        if isinstance(request, ChatRequest):
            last = request.messages[-1] if request.messages else None
            role = _ASSISTANT if request.generates_reply or last is None else last.role
            return Beginning(role, prompt_token_ids=ids)
        echo = ""
        if request.echo:
            given = request.prompt
            echo = given if isinstance(given, str) else self._tokenizer.decode(token_ids)
        return Beginning(echo=echo, prompt_token_ids=ids)

    def _chat(self, request: ChatRequest) -> str:
        if request.chat_template is not None and not self._trusts_request_templates:
            raise RequestError(
                "chat_template of a request is refused here: a template is a program; start the "
                "nodes with --trust-request-chat-template to allow it, or with --chat-template "
                "FILE",
                param="chat_template",
            )
        tools = tool_use(request).tools
        effort = request.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort}
        return render(
            request.chat_template or (self._tool_template if tools else self._chat_template),
            request.messages,
            bos_token=self._tokenizer.bos_token,
            eos_token=self._tokenizer.eos_token,
            tools=list(tools) or None,
            add_generation_prompt=request.generates_reply,
            continue_final_message=bool(request.continue_final_message),
            **variables | (request.chat_template_kwargs or {}),
        )

    def _check_length(self, text: str, field: str, *, fits: bool) -> None:
        context, size = self._max_model_len, len(text.encode("utf-8", "surrogatepass"))
        likely = context * _LIKELY_BYTES_PER_TOKEN
        if not fits:
            if size > max(likely, _MAX_COUNTED_BYTES):
                self._refuse(
                    f"{size} bytes; the limit here is {max(likely, _MAX_COUNTED_BYTES)}", field
                )
            return
        longest = self._tokenizer.longest_token_bytes
        if size > context * longest:
            self._refuse(
                f"{size} bytes, and no token of this model stands for more than {longest}", field
            )
        if size <= likely or len(text) <= _SLICE_CHARS:
            return
        tokens = 0
        for start in range(0, len(text), _SLICE_CHARS):
            tokens += (
                len(self._tokenizer.encode(text[start : start + _SLICE_CHARS], False)) - _CUT_TOKENS
            )
            if tokens > context:
                self._refuse(
                    f"{size} bytes, the first {start + _SLICE_CHARS} characters are {tokens} tokens",
                    field,
                )

    def _refuse(self, size: str, field: str) -> NoReturn:
        raise RequestError(
            f"the prompt has {size}; the context of this model is {self._max_model_len} tokens: "
            "shorten the prompt",
            param=field,
            code="context_length_exceeded",
        )


def check_template(template: str) -> None:
    try:
        _compiled(template)
    except (TemplateError, SyntaxError, RecursionError) as why:
        raise ConfigError(f"the chat template is not valid Jinja: {why}") from why


def render(
    template: str | None,
    messages: Sequence[Message],
    /,
    *,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Return the prompt of these messages; `variables` are the template's.

    With `continue_final_message` the prompt ends with the last message's content. Raises
    RequestError.
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
    try:
        text = _compiled(template).render(variables, messages=plain)
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


def _plain(message: Message) -> JsonObject:
    plain: JsonObject = {**msgspec.to_builtins(message), "content": message.text}
    if message.thought:
        plain |= {"reasoning": message.thought, "reasoning_content": message.thought}
    if message.tool_calls is not None:
        plain["tool_calls"] = [with_object(call) for call in message.tool_calls]
    return plain


def with_object(call: JsonObject) -> JsonObject:
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
_environment.globals |= {
    "raise_exception": _raise_exception,
    "strftime_now": lambda form: datetime.now().strftime(form),
}
