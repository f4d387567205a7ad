"""Requests and answers of the HTTP API as typed values.

Unknown fields are ignored, except those in body.REFUSED. None means the default.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvrelay.openai_api.json_body import one_of
from kvrelay.wire.config_checks import Count, Priority
from kvrelay.wire.json_object import JsonObject
from kvrelay.wire.sampling import (
    MAX_LISTED_TOKENS,
    Bias,
    LogprobCount,
    MinP,
    Penalty,
    Positive,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from kvrelay.wire.transfer import KvTransferParams

__all__ = [
    "Answer",
    "AnyRequest",
    "CacheControl",
    "ChatRequest",
    "Choice",
    "CompletionLogprobs",
    "CompletionRequest",
    "ContentPart",
    "Delta",
    "FunctionDelta",
    "JsonSchemaFormat",
    "Message",
    "NamedTool",
    "ResponseFormat",
    "SamplingFields",
    "ShortText",
    "StreamOptions",
    "StructuredOutputs",
    "TokenLogprob",
    "ToolCallDelta",
    "Usage",
]


MAX_CHOICES = 128
"""Choices of a request over all prompts: each is a request of the engine."""
MAX_MESSAGES = 16384
"""Messages of a chat, each rendered by a template."""
MAX_TOOLS = 1024
_MAX_STOP_CHARS = 1024
PIN_S = {"session": 60, "5m": 300, "in_memory": 300, "in-memory": 300, "1h": 3600, "24h": 86400}
"""Seconds for which a request wishes to keep its KV, by the value of a field."""

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
# Every token is compared with every stop string: below a microsecond with these limits.
Stops = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=_MAX_STOP_CHARS)]], Meta(max_length=64)
]
ShortText = Annotated[str, Meta(min_length=1, max_length=256)]
NotEmpty = Annotated[str, Meta(min_length=1)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
Session = Annotated[str, Meta(max_length=256)]
Listed = Meta(max_length=MAX_LISTED_TOKENS)
# Untyped, because templates want each tool as the client wrote it.
Tools = Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheControl(Struct, frozen=True):
    """A wish to keep the KV of a prompt and its answer."""

    type: Annotated[str, one_of("ephemeral")]
    ttl: Annotated[str, one_of("5m", "1h")] = "5m"


class JsonSchemaFormat(Struct, frozen=True):
    """A JSON schema, followed even without `strict`."""

    name: str | None = None
    schema_: JsonObject | bool | None = msgspec.field(name="schema", default=None)
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: Annotated[str, one_of("text", "json_object", "json_schema")]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """A constraint by vLLM's names: one of the first five fields; the next two are for JSON.

    The two after them change nothing here, and `structural_tag` is refused.
    """

    json: str | JsonObject | bool | None = None
    regex: NotEmpty | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: NotEmpty | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    structural_tag: str | None = None


class SamplingFields(Struct, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: Annotated[str, Meta(max_length=_MAX_STOP_CHARS)] | Stops | None = None
    stop_token_ids: Annotated[list[int], Listed] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    # Lowers max_tokens to the context's room.
    fit_max_tokens: bool | None = None
    logit_bias: Annotated[dict[int, Bias], Listed] | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None
    # For the router; x-request-id comes first.
    request_id: str | None = None
    session_id: Session | None = None
    cache_salt: Salt | None = None
    cache_control: CacheControl | None = None
    prompt_cache_key: Session | None = None
    prompt_cache_retention: Annotated[str, one_of("in_memory", "in-memory", "24h")] | None = None
    kv_transfer_params: KvTransferParams | None = None
    # Asks for a member `kvrelay` at the answer's end.
    include_metrics: bool | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[ShortText], Listed] | None = None

    @property
    def echoed_logprobs(self) -> int | None:
        return None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def pin_s(self) -> int:
        """Return for how long after each use the request wishes to keep its KV."""
        session = (self.session_id or self.prompt_cache_key) and "session"
        ttl = self.cache_control and self.cache_control.ttl
        return max(PIN_S.get(each or "", 0) for each in (session, ttl, self.prompt_cache_retention))


class ContentPart(Struct, frozen=True):
    """A part of a message's content; models here read text only."""

    type: Annotated[str, one_of("text")]
    text: str


class Message(Struct, frozen=True, omit_defaults=True):
    """A message of a chat. Templates get all its fields."""

    role: NotEmpty
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def thought(self) -> str | None:
        return self.reasoning or self.reasoning_content

    @property
    def text(self) -> str:
        content = self.content or ""
        if isinstance(content, str):
            return content
        return "\n".join(part.text for part in content)


class FunctionName(Struct, frozen=True):
    name: ShortText


class NamedTool(Struct, frozen=True):
    """A choice of one tool, which the model must call."""

    type: Annotated[str, one_of("function")]
    function: FunctionName


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """A body of POST /v1/chat/completions."""

    # Empty beside a hand-over, which has the prompt.
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: Tools | None = None
    tool_choice: Annotated[str, one_of("none", "auto", "required")] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """Return how many likeliest tokens the client wants beside each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def generates_reply(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """A body of POST /v1/completions. `prompt` is a text, token ids, or a list of either."""

    prompt: str | list[int | str | list[int]]
    logprobs: LogprobCount | None = None
    echo: bool | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoed_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


AnyRequest = ChatRequest | CompletionRequest


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def from_counts(cls, prompt: int, generated: int, cached: int, written: int = 0) -> Usage:
        details = {"cached_tokens": cached} | ({"cache_write_tokens": written} if written else {})
        return cls(prompt, generated, prompt + generated, details)


class TokenLogprob(Struct, frozen=True):
    """A token, whose `bytes` may be a part of a character; a chosen one has the likeliest."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET


class CompletionLogprobs(Struct, frozen=True):
    """A set of lists with an entry per token; offsets count characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionDelta(Struct, frozen=True, omit_defaults=True):
    """A called function, or an addition to it; `arguments` may be cut off or broken."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Struct, frozen=True, omit_defaults=True):
    """A call, or an addition to one, whose first chunk has `id` and `type`."""

    index: int | None = None
    function: FunctionDelta = FunctionDelta()
    id: str | None = None
    type: str | None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    """An addition to the message, with both names of reasoning."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None

    @property
    def thought(self) -> str | None:
        return self.reasoning or self.reasoning_content


class Choice(Struct, frozen=True):
    """A choice of an answer or a chunk: a chat's message or an addition to it, or text.

    In chunks `stop_reason` is in the last.
    """

    index: int
    message: JsonObject | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: dict[str, list[TokenLogprob]] | CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(Struct, frozen=True):
    """A whole answer, or a chunk of a stream; the usage chunk has no choices."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType = UNSET
    kv_transfer_params: KvTransferParams | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
