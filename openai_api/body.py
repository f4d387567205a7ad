"""Request bodies as checked requests, and these as sampling parameters. Pure and light."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from kvrelay.openai_api.constraints import constraint_of, tool_use
from kvrelay.openai_api.json_body import read_json, refuser
from kvrelay.openai_api.types import (
    MAX_CHOICES,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
)
from kvrelay.wire.errors import RequestError
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.sampling import PLAIN_SAMPLING, SamplingDefaults, SamplingParams

__all__ = [
    "REFUSED",
    "body_request_id",
    "check_choices",
    "decode_chat",
    "decode_completion",
    "prompt_only",
    "prompts_of",
    "sampling_params",
    "is_valid_id",
    "token_limit",
]

_DEFAULT_COMPLETION_TOKENS = 16
_TEMPLATE_VARIABLES = {
    *("messages", "tools", "bos_token", "eos_token"),
    *("add_generation_prompt", "continue_final_message"),
}
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_GREEDY_BELOW = 1e-5  # logits divided by less leave float32


class _Named(msgspec.Struct):
    request_id: str | None = None


_T = TypeVar("_T", bound=SamplingFields)
_named_decoder = msgspec.json.Decoder(_Named)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def body_request_id(body: bytes) -> str | None:
    try:
        return _named_decoder.decode(body).request_id
    except MALFORMED:
        return None


def is_valid_id(value: str) -> bool:
    return _ID.fullmatch(value) is not None


def decode_chat(body: bytes) -> ChatRequest:
    """Return a checked chat request. Raises RequestError."""
    request = _decode(body, _chat_decoder)
    for i, message in enumerate(request.messages):
        for j, call in enumerate(message.tool_calls or ()):
            match call:
                case {"function": {"name": str()}}:
                    continue
            where = f"messages[{i}].tool_calls[{j}].function"
            raise RequestError(f"{where} must be an object with name and arguments", param=where)
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: the answer goes "
            "on with the last message or begins a new one",
            param="continue_final_message",
        )
    tool_use(request)
    if own := _TEMPLATE_VARIABLES & (request.chat_template_kwargs or {}).keys():
        raise RequestError(
            f"chat_template_kwargs must not set {min(own)!r}; it has its own field or is the model's",
            param="chat_template_kwargs",
        )
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """Return a checked completion request. Raises RequestError."""
    request = _decode(body, _completion_decoder)
    for prompt in prompts_of(request):
        ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not (ids or isinstance(prompt, str)):
            raise RequestError("prompt mixes token ids with something else", param="prompt")
    check_choices(len(prompts_of(request)), request.n or 1)
    return request


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def check_choices(prompts: int, choices: int) -> None:
    if prompts * choices > MAX_CHOICES:
        raise RequestError(
            f"the request asks for {prompts * choices} choices, n for each prompt; the limit is "
            f"{MAX_CHOICES}: send several requests",
            param="prompt" if prompts > 1 else "n",
        )


def prompt_only(request: AnyRequest) -> bool:
    echo = isinstance(request, CompletionRequest) and request.echo
    return bool(echo) and _asked_limit(request)[1] == 0


def token_limit(
    request: AnyRequest,
    prompt_tokens: int,
    max_model_len: int,
    defaults: SamplingDefaults = PLAIN_SAMPLING,
) -> int:
    """Return the answer's token limit. Raises RequestError if the context is too small.

    On a prefill node the client's own limit is in the hand-over, as `max_tokens` is 1 there.
    """
    prompt_field = "messages" if isinstance(request, ChatRequest) else "prompt"
    if prompt_tokens < 1:
        raise RequestError("the prompt holds no token; send at least one", param=prompt_field)
    room = max_model_len - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and the context of this model is "
            f"{max_model_len}; shorten the prompt so that at least one token can be generated",
            param=prompt_field,
            code="context_length_exceeded",
        )
    name, limit = _asked_limit(request)
    most = min(room, room if defaults.limit is None else defaults.limit)
    if limit is None:
        every = isinstance(request, ChatRequest) or request.fit_max_tokens
        default = defaults.max_tokens if every else _DEFAULT_COMPLETION_TOKENS
        return most if default is None else min(most, default)
    if limit < 1 and not prompt_only(request):
        raise RequestError(f"{name} must be at least 1, got {limit}", param=name)
    if limit > room and request.fit_max_tokens:
        return most
    if limit > room:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and {name} is {limit}, together "
            f"{prompt_tokens + limit}; the context of this model is {max_model_len}: shorten the "
            f"prompt or ask for at most {room} tokens",
            param=name,
            code="context_length_exceeded",
        )
    return min(most, limit)


def sampling_params(
    request: AnyRequest,
    *,
    limit: int,
    vocab_size: int,
    default_seed: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    defaults: SamplingDefaults = PLAIN_SAMPLING,
) -> SamplingParams:
    """Return the request's sampling, checked. Raises RequestError.

    `limit` is that of `token_limit`, `default_seed` is for requests without one, `defaults` are the
    model's. On a prefill node max_tokens is 1.
    """
    min_tokens = request.min_tokens or 0
    if request.kv_transfer_params and request.kv_transfer_params.do_remote_decode:
        # Min tokens stay in force: token 1 must not end an answer that needs more.
        limit, min_tokens = 1, min(min_tokens, 1)
    own: dict[str, Any] = {
        name: getattr(defaults, name) if getattr(request, name) is None else getattr(request, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }
    if 0 <= own["temperature"] < _GREEDY_BELOW:
        own["temperature"] = 0.0
    own["top_k"] = 0 if own["top_k"] == -1 else min(own["top_k"], vocab_size)
    allowed = request.allowed_token_ids
    params = SamplingParams(
        max_tokens=max(1, limit),
        seed=default_seed if request.seed is None else request.seed,
        **own,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        logit_bias=tuple((request.logit_bias or {}).items()),
        logprobs=request.wanted_logprobs,
        prompt_logprobs=request.echoed_logprobs,
        constraint=constraint_of(request),
        allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
        bad_words=bad_words,
    )
    return params.check(vocab_size)


def _decode(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    request = read_json(body, decoder)
    refuse_not_built(body, best_of=request.n)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if request.request_id is not None and not is_valid_id(request.request_id):
        raise RequestError(
            "request_id must be 1 to 128 letters, digits or any of . _ : -; "
            f"got {request.request_id[:40]!r}",
            param="request_id",
        )
    return request


def _asked_limit(request: SamplingFields) -> tuple[str, int | None]:
    params = request.kv_transfer_params
    if params is not None and params.do_remote_decode and request.max_tokens != 0:
        return "max_tokens", params.client_max_tokens or None
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


_LEAVE_OUT = "leave it out"
_STRUCTURED = "send it in structured_outputs"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (
        ("",),
        "models here only continue from the end of a text; put all of it into the prompt",
    ),
    "best_of": ((1,), "send n, and choose by logprobs"),
    "functions": (([],), "send tools, which replaced it"),
    "function_call": (("none",), "send tool_choice, which replaced it"),
    "audio": ((), _LEAVE_OUT),
    "modalities": ((["text"],), _LEAVE_OUT),
    "use_beam_search": ((False,), "n with a temperature finds likely answers too"),
    "prompt_embeds": ((), "send the prompt as text or token ids"),
    "prompt_logprobs": ((), "send echo with logprobs to /v1/completions"),
    "truncate_prompt_tokens": ((), "shorten the prompt; POST /tokenize counts its tokens"),
    "return_tokens_as_token_ids": ((False,), "return_token_ids is served"),
    "logits_processors": (([],), "logit_bias is served"),
    "structural_tag": ((), "send a schema, regex, choice or grammar in structured_outputs"),
    "lora_request": ((), "name the adapter as the model"),
    "documents": (([],), "send them in chat_template_kwargs"),
    "guided_choice": (([],), _STRUCTURED),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar"), ((), _STRUCTURED)),
}

refuse_not_built = refuser(REFUSED)
