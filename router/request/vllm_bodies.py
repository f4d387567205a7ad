"""Bodies of requests to vLLM nodes, and what is read in their answers. Pure.

The contract is that of vLLM's NixlConnector: the prefill request asks for one token with
`do_remote_decode`; the answer's `kv_transfer_params`, which differ between versions, go to the
decode node unchanged, which draws the token again.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from kvrelay.router.request.job import CHAT_PATH, Job
from kvrelay.router.transport.node_errors import AttemptFailed, parse_error
from kvrelay.wire.errors import ErrorBody, RequestError
from kvrelay.wire.frames import MALFORMED

__all__ = [
    "Ending",
    "Handover",
    "check_fields",
    "decode_body",
    "error_in",
    "forces_tools",
    "handover_of",
    "plain_answer",
    "prefill_body",
    "undivided_because",
]

_ASK_TO_HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Both forms in which versions begin an error event. Inside a string of another event its quotes are
# escaped.
_ERROR_EVENT = re.compile(rb'data: (\{"(?:error"|object": ?"error")[^\n]*)')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None
    """If the node was started with --enable-prompt-tokens-details."""


class _Answer(msgspec.Struct):
    """A whole answer as far as the router reads it. Decoding it proves that the rest is JSON."""

    choices: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Held(msgspec.Struct):
    do_remote_prefill: bool


class Handover(msgspec.Struct, frozen=True):
    """A prefill node's offer; without `params` it holds nothing, and the decode node computes."""

    params: msgspec.Raw | None
    prompt_tokens: int
    cached_tokens: int | None = None
    """Tokens of the prompt in the node's prefix cache; None: it does not say."""


class Ending(msgspec.Struct, frozen=True):
    body: bytes
    prompt_tokens: int
    output_tokens: int


def check_fields(job: Job) -> None:
    """Raise RequestError for fields that reach a node's KV transfer past the router's check."""
    # vLLM merges this object with kv_transfer_params; a client could point a node at an address
    # with it.
    if b"kv_transfer_params" in bytes(job.fields.get("vllm_xargs", b"")):
        raise RequestError(
            "kv_transfer_params is set by the router; leave it out of vllm_xargs",
            param="vllm_xargs",
        )


def undivided_because(job: Job) -> str | None:
    """Return why the decode node must do the request alone, as a metric's label; None if not.

    One hand-over is for one sequence. And fetched KV has no logits, which log-probabilities of a
    prompt are made of.
    """

    def given(name: str) -> bool:
        return bytes(job.fields.get(name, b"null")).strip() not in (b"null", b"false")

    if job.choices > 1 or job.best_of > 1:
        return "choices"
    if given("use_beam_search"):
        return "beam_search"
    prompt = bytes(job.fields.get("prompt", b"")).strip()
    if job.path != CHAT_PATH and prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"["):
        return "prompts"
    if given("prompt_embeds"):
        return "prompt_embeds"
    if given("prompt_logprobs") or job.prompt_only or (given("echo") and given("logprobs")):
        return "prompt_logprobs"
    return None


def forces_tools(job: Job) -> bool:
    """Return whether the answer must be a tool call, on which some versions fail (vllm#38911)."""
    choice = bytes(job.fields.get("tool_choice", b"")).strip()
    return choice[:1] == b"{" or choice == b'"required"'


def prefill_body(job: Job) -> bytes:
    """Return the body of the prefill request.

    Fields that do not go with one token are left out, and those by which older versions hold
    nothing: KV of a request that a token has stopped is freed at once.
    """
    fields: dict[str, Any] = dict(job.fields)
    fields["max_tokens"] = 1
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    fields["stream"] = False
    for name in ("stream_options", "min_tokens", "stop_token_ids", "return_token_ids"):
        fields.pop(name, None)
    fields["ignore_eos"] = True
    fields["kv_transfer_params"] = _ASK_TO_HOLD
    return msgspec.json.encode(fields)


def decode_body(job: Job, params: msgspec.Raw | None) -> bytes:
    fields: dict[str, Any] = dict(job.fields)
    fields.pop("kv_transfer_params", None)
    if params is not None:
        fields["kv_transfer_params"] = params
    return msgspec.json.encode(fields)


def handover_of(body: bytes) -> Handover:
    """Return the hand-over in a prefill node's answer. Raises AttemptFailed."""
    answer = _decoded(body)
    try:
        held = msgspec.json.decode(answer.kv_transfer_params, type=_Held).do_remote_prefill
    except MALFORMED:
        held = False
    usage = answer.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    params = answer.kv_transfer_params if held else None
    return Handover(params, usage.prompt_tokens, details.cached_tokens)


def plain_answer(body: bytes) -> Ending:
    """Return a decode node's whole answer without its KV fields. Raises AttemptFailed."""
    answer = _decoded(body)
    if bytes(answer.kv_transfer_params).strip() != b"null":
        # Of a node that offers its KV back to prefill nodes: addresses, which are no business of a
        # client.
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        del fields["kv_transfer_params"]
        body = msgspec.json.encode(fields)
    usage = answer.usage or _Usage()
    return Ending(body, usage.prompt_tokens, usage.completion_tokens or 0)


def _decoded(body: bytes) -> _Answer:
    try:
        return msgspec.json.decode(body, type=_Answer)
    except MALFORMED as why:
        raise AttemptFailed(f"the node's answer is malformed: {why}") from why


def error_in(events: bytes) -> tuple[int, ErrorBody, int] | None:
    """Return place, body and status of an error in whole events; None if there is none."""
    found = _ERROR_EVENT.search(events)
    return None if found is None else (found.start(), *parse_error(found[1]))
