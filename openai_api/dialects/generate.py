"""POST /inference/v1/generate, vLLM's tokens in, tokens out, as a text completion. Pure.

Shapes are of vllm/entrypoints/serve/disagg/protocol.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from kvrelay.openai_api import sse
from kvrelay.openai_api.dialects.base import Dialect, Events, decoded, openai_error
from kvrelay.openai_api.json_body import read_json, refuser
from kvrelay.openai_api.types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    Priority,
    Salt,
    StreamOptions,
    TopLogprob,
    Usage,
)
from kvrelay.wire.errors import ErrorBody, NodeFailed, RequestError

__all__ = ["GENERATE_PATH", "GenerateRequest", "Generated", "translate_generate"]

GENERATE_PATH = "/inference/v1/generate"

_encode = msgspec.json.Encoder().encode
_NULL, _TRUE = Raw(b"null"), Raw(b"true")
# Fields that a completion has, too.
_BESIDE = (
    "model",
    "stream",
    "stream_options",
    "request_id",
    "cache_salt",
    "priority",
    "kv_transfer_params",
)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A body of POST /inference/v1/generate."""

    token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)]
    sampling_params: dict[str, Any]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None


class GeneratedChoice(msgspec.Struct, frozen=True):
    """A choice, or an addition; log-probabilities name tokens by id."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int]


class Generated(msgspec.Struct, frozen=True):
    """A whole answer, or an event of a stream."""

    request_id: str
    choices: list[GeneratedChoice]
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET


class _Choice(msgspec.Struct, frozen=True):
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: Raw | UnsetType = UNSET


class _Completion(msgspec.Struct, frozen=True):
    id: str = ""
    choices: list[_Choice] = []
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    error: ErrorBody | None = None


_refuse = refuser({"features": (({},), "text is all that models served here read")})
_request_decoder = msgspec.json.Decoder(GenerateRequest)
_raw_decoder = msgspec.json.Decoder(dict[str, Raw])
_completion_decoder = msgspec.json.Decoder(_Completion)


def translate_generate(body: bytes) -> tuple[bytes, Dialect]:
    """Translate a body. Raises RequestError."""
    request = read_json(body, _request_decoder)
    _refuse(body)
    given = _raw_decoder.decode(body)
    sampling = _raw_decoder.decode(given["sampling_params"])
    if request.sampling_params.get("detokenize") is False:
        if request.sampling_params.get("stop"):
            raise RequestError(
                "stop looks for texts, and detokenize is false; send stop_token_ids", param="stop"
            )
        del sampling["detokenize"]
    completion = {
        "max_tokens": _NULL,  # vLLM's nodes read it as fit_max_tokens
        **sampling,
        **{name: given.get(name, _NULL) for name in _BESIDE},
        "prompt": given["token_ids"],
        "echo": _NULL,
        "fit_max_tokens": _TRUE,
        "return_token_ids": _TRUE,
        "return_tokens_as_token_ids": _TRUE,
    }
    return _encode(completion), _GenerateAnswer(request.request_id)


class _GenerateAnswer(Dialect):
    chat: ClassVar[bool] = False

    def __init__(self, request_id: str | None) -> None:
        self._request_id = request_id
        self._chunks = Events(_completion_decoder)
        self._over = False

    def events(self, payload: bytes) -> bytes:
        if self._over:
            return b""
        try:
            sent = [self._event(chunk) for chunk in self._chunks.feed(payload)]
        except NodeFailed as why:
            self._over = True
            return sse.error_event(why)
        self._over = self._chunks.done
        return b"".join(sent) + (sse.DONE if self._over else b"")

    def whole(self, body: bytes) -> bytes:
        answer = decoded(_completion_decoder, body)
        if not answer.choices:
            raise NodeFailed("a node sent an answer without a choice; send the request again")
        scored = answer.choices[0].prompt_logprobs
        choices = [_generated(choice) for choice in answer.choices]
        generated = Generated(
            self._id(answer), choices, answer.usage or UNSET, scored, answer.kv_transfer_params
        )
        return _encode(generated)

    def error(self, status: int, error: ErrorBody) -> bytes:
        param = "token_ids" if error.param == "prompt" else error.param
        return openai_error(status, msgspec.structs.replace(error, param=param))

    def _event(self, chunk: _Completion) -> bytes:
        if chunk.error is not None:
            return sse.event(self.error(0, chunk.error))
        choices = [
            _generated(each) for each in chunk.choices if each.token_ids or each.finish_reason
        ]
        if chunk.choices and not choices:
            return b""
        return sse.event(_encode(Generated(self._id(chunk), choices, chunk.usage or UNSET)))

    def _id(self, answer: _Completion) -> str:
        return self._request_id or answer.id.removeprefix("cmpl-")


def _generated(choice: _Choice) -> GeneratedChoice:
    listed = choice.logprobs
    logprobs = None
    if listed is not None:
        each = zip(listed.tokens, listed.token_logprobs, listed.top_logprobs, strict=True)
        logprobs = ChatLogprobs([_scored(token, value, top or {}) for token, value, top in each])
    return GeneratedChoice(choice.index, logprobs, choice.finish_reason, choice.token_ids or [])


def _scored(token: str, logprob: float | None, top: dict[str, float]) -> ChatTokenLogprob:
    likeliest = [TopLogprob(name, value, None) for name, value in top.items()]
    return ChatTokenLogprob(token, logprob or 0.0, None, likeliest)
