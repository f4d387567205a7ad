"""Preparation of requests: on the event loop, long ones on a thread or in the sandbox."""

from __future__ import annotations

import itertools

import msgspec

from kvrelay.node.sandbox import Sandbox
from kvrelay.node.serving import Call, Serving
from kvrelay.openai_api.body import prompts_of
from kvrelay.openai_api.constraints import constraint_of
from kvrelay.openai_api.json_body import off_loop
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.prompt import with_object
from kvrelay.openai_api.types import AnyRequest, ChatRequest, CompletionRequest

__all__ = ["detokenize", "prepare", "tokenize"]

# A child costs 6 ms more than a thread (17 KB in 40 and in 20 ms on two busy cores), but it can be
# ended.
_THREAD_BYTES = 256 << 10
# Messages, their calls, tools and documents. Below both limits the operator's template runs on the
# event loop: for 11 ms at most with some 60 models' templates. Some are quadratic: Command A's
# takes 20 ms for 128.
_THREAD_ITEMS = 64
# Spaces that Llama's template writes before each value of a tool, for each level of depth.
_INDENT = 4


async def prepare(
    serving: Serving, sandbox: Sandbox, call: Call
) -> tuple[list[NodeRequest], AnyRequest]:
    """Return a NodeRequest for each prompt of a call, and the call's request.

    Raises RequestError, Draining, Unavailable.
    """
    size = len(call.body)
    async with sandbox.body_slot(size):
        request = await off_loop(size, serving.parse, call)
        if size > _THREAD_BYTES:  # refuse too large a grammar before a child reads it
            await off_loop(size, constraint_of, request)
        prompts = await _token_ids(serving, sandbox, request, call.body, fits=True)
        prepared = await off_loop(size, serving.requests, call, request, prompts)
    submits = prepared[0].submits
    if submits and (constraint := submits[0].params.constraint) is not None:
        lark = await sandbox.as_lark(constraint)
        for each in prepared:
            each.constrain(lark)
    return prepared, request


async def tokenize(serving: Serving, sandbox: Sandbox, body: bytes) -> bytes:
    size = len(body)
    async with sandbox.body_slot(size):
        asked, request = await off_loop(size, serving.parse_tokenize, body)
        (tokens,) = await _token_ids(serving, sandbox, request, body, fits=False)
    return await off_loop(
        size, lambda: msgspec.json.encode(serving.tokenize_response(asked, tokens))
    )


async def detokenize(serving: Serving, body: bytes) -> bytes:
    return await off_loop(len(body), lambda: msgspec.json.encode(serving.detokenize(body)))


async def _token_ids(
    serving: Serving,
    sandbox: Sandbox,
    request: AnyRequest,
    body: bytes,
    *,
    fits: bool,
) -> list[list[int]]:
    size = len(body)
    if serving.handed_over_prompt(request) is None:
        size = _rendered_bytes(request, size)
        if _could_be_endless(request, size):
            return await sandbox.token_ids(isinstance(request, ChatRequest), body, fits=fits)
    # Twice: a template may look at each character (Llama 3.2 Vision's does, at 1 us) before
    # tokenizing.
    return await off_loop(2 * size, serving.token_ids, request, fits=fits)


def _rendered_bytes(request: AnyRequest, size: int) -> int:
    """Estimate the bytes of the prompt that a body of `size` bytes asks for.

    Lists of 16 KiB, 118 levels deep in a tool, are 4 MB of white space then.
    """
    if not isinstance(request, ChatRequest) or size > _THREAD_BYTES:
        return size
    calls = [with_object(call) for message in request.messages for call in message.tool_calls or ()]
    level: list[object] = [*(request.tools or ()), *calls]
    depth = 0
    while level and size <= _THREAD_BYTES:
        size, depth = size + _INDENT * depth * len(level), depth + 1
        inner = (
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        )
        level = list(itertools.chain.from_iterable(inner))
    return size


def _could_be_endless(request: AnyRequest, size: int) -> bool:
    if isinstance(request, CompletionRequest):
        has_text = any(isinstance(prompt, str) for prompt in prompts_of(request))
        return size > _THREAD_BYTES and has_text
    items = sum(1 + len(message.tool_calls or ()) for message in request.messages)
    items += len(request.tools or ())
    arguments = (request.chat_template_kwargs or {}).values()
    return (
        size > _THREAD_BYTES
        or items > _THREAD_ITEMS
        or request.chat_template is not None
        or any(isinstance(value, list | dict) for value in arguments)
    )
