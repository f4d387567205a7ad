"""From a call to checked legs: here if it is quick, on a thread if it is long, in the sandbox if it
could be endless.

A function here that is cancelled, because its client has left, ends the child that works for it.
"""

from __future__ import annotations

import itertools

import msgspec

from kvrelay.node.sandbox import Sandbox
from kvrelay.node.serving import Call, Serving
from kvrelay.openai_api.body import prompts_of
from kvrelay.openai_api.chat_template import with_object
from kvrelay.openai_api.json_body import off_loop
from kvrelay.openai_api.node_request import NodeRequest
from kvrelay.openai_api.structured import constraint_of
from kvrelay.openai_api.types import ChatRequest, CompletionRequest

__all__ = ["detokenized", "legs_of", "tokenized"]

# A child costs 6 ms more than a thread (17 KB in 40 and in 20 ms on two busy cores), but it can be
# ended.
_THREAD_BYTES = 256 << 10
# What is left runs the operator's own template on the event loop: for 11 ms at most, tokenizing
# included, with the templates of some 60 models (Llama 3.2 Vision, Gemma 4, Command A), whatever a
# client fills these limits with.
_THREAD_TURNS = 64
"""Messages, their calls, tools and documents. Some templates look at each of them for each of them:
Command A's takes 20 ms for 128.
"""
_INDENT = 4
"""Spaces that Llama's template writes before each value of a tool, for each level that it is deep."""


async def legs_of(
    serving: Serving, sandbox: Sandbox, call: Call
) -> tuple[list[NodeRequest], ChatRequest | CompletionRequest]:
    """Make a checked leg for each prompt of a call, and return its request, too.

    Raises RequestError, Draining, Unavailable."""
    size = len(call.body)
    async with sandbox.turn_of(size):
        request = await off_loop(size, serving.read, call)
        if (
            size > _THREAD_BYTES
        ):  # a grammar that is too large is refused before a child reads all of it
            await off_loop(size, constraint_of, request)
        prompts = await _token_ids(serving, sandbox, request, call.body, fits=True)
        legs = await off_loop(size, serving.legs, call, request, prompts)
    constraint = legs[0].submits[0].params.constraint if legs[0].submits else None
    if constraint is not None:
        lark = await sandbox.as_lark(constraint)
        for leg in legs:
            leg.constrain(lark)
    return legs, request


async def tokenized(serving: Serving, sandbox: Sandbox, body: bytes) -> bytes:
    """The answer to POST /tokenize. Raises RequestError, Unavailable."""
    async with sandbox.turn_of(len(body)):
        asked, request = await off_loop(len(body), serving.to_tokenize, body)
        (tokens,) = await _token_ids(serving, sandbox, request, body, fits=False)
    return await off_loop(len(body), lambda: msgspec.json.encode(serving.tokenized(asked, tokens)))


async def detokenized(serving: Serving, body: bytes) -> bytes:
    """The answer to POST /detokenize. Raises RequestError."""
    return await off_loop(len(body), lambda: msgspec.json.encode(serving.detokenized(body)))


async def _token_ids(
    serving: Serving,
    sandbox: Sandbox,
    request: ChatRequest | CompletionRequest,
    body: bytes,
    *,
    fits: bool,
) -> list[list[int]]:
    """The prompts of a request, whose `body` the sandbox reads again. Raises RequestError,
    Unavailable.
    """
    size = len(body)
    if serving.handed_over(request) is None:
        size = _rendered_bytes(request, size)
        if _could_be_endless(request, size):
            return await sandbox.token_ids(isinstance(request, ChatRequest), body, fits=fits)
    # Twice: a template may look at each character (Llama 3.2 Vision's does, at 1 us), and then the
    # text is tokenized.
    return await off_loop(2 * size, serving.token_ids, request, fits=fits)


def _rendered_bytes(request: ChatRequest | CompletionRequest, size: int) -> int:
    """Estimate the bytes of the prompt that a body of `size` bytes asks for.

    Lists of 16 KiB, 118 levels deep in a tool, are 4 MB of white space then, which take 2 s to
    tokenize.
    """
    if not isinstance(request, ChatRequest) or size > _THREAD_BYTES:
        return size
    calls = [with_object(call) for message in request.messages for call in message.tool_calls or ()]
    level: list[object] = [*(request.tools or ()), *(request.documents or ()), *calls]
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


def _could_be_endless(request: ChatRequest | CompletionRequest, size: int) -> bool:
    """Say of a request whose prompt may have `size` bytes if a child with limits must read it."""
    if isinstance(request, CompletionRequest):
        return size > _THREAD_BYTES and any(
            isinstance(prompt, str) for prompt in prompts_of(request)
        )
    turns = sum(1 + len(message.tool_calls or ()) for message in request.messages)
    turns += len(request.tools or ()) + len(request.documents or ())
    loops = any(
        isinstance(value, list | dict) for value in (request.chat_template_kwargs or {}).values()
    )
    return (
        size > _THREAD_BYTES or turns > _THREAD_TURNS or request.chat_template is not None or loops
    )
