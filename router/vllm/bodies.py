"""The bodies of both legs as vLLM nodes want them, and what is read in their answers. Pure.

The contract is that of vLLM's NixlConnector. The prefill leg asks for one token with `do_remote_decode`; its answer has
`kv_transfer_params`, whose fields differ from version to version, so the object goes to the decode node as it came. The
token is thrown away: the decode node draws it again.

P2pNcclConnector, the older one, has no such object. Both legs carry a request id that names both nodes' addresses.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from router.walk.job import CHAT_PATH, Job
from wire.errors import ErrorBody, NodeFailed, RequestError
from wire.frames import MALFORMED

__all__ = [
    "Ending",
    "Handover",
    "check_fields",
    "decode_body",
    "error_in",
    "forces_tools",
    "handover_of",
    "p2p_request_id",
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
_EVENT = b"data: "
# Both forms in which versions begin an error event.
_ERROR_EVENTS = (b'data: {"error"', b'data: {"object":"error"', b'data: {"object": "error"')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None
    """If the node was started with --enable-prompt-tokens-details."""


_Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


class _Choice(msgspec.Struct):
    prompt_token_ids: _Ids | None = None


class _Answer(msgspec.Struct):
    """Of a whole answer what the router reads. Decoding it proves that the rest is JSON."""

    choices: list[msgspec.Raw]
    usage: _Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Prompt(msgspec.Struct):
    """The tokens of a prompt, which a chat's answer tells once and a text's with its choice."""

    choices: list[_Choice]
    prompt_token_ids: _Ids | None = None


class _Told(msgspec.Struct):
    """An error as newer versions wrap it, and as older ones do not."""

    error: _Told | None = None
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class Handover(msgspec.Struct, frozen=True):
    """What a prefill node gives away. `params` None: it holds nothing, and the decode node computes the prompt."""

    params: msgspec.Raw | None
    prompt_tokens: int
    cached_tokens: int | None = None
    """Of the prompt, in the node's prefix cache; None: it does not say."""
    token_ids: list[int] | None = None
    """Of the prompt, if they were asked for; None: it does not say."""


class Ending(msgspec.Struct, frozen=True):
    """A whole answer for the client, and how many tokens it says that it has."""

    body: bytes
    prompt_tokens: int
    output_tokens: int


def check_fields(job: Job) -> None:
    """Raise RequestError for what would reach a node's KV transfer past the router's own check."""
    # vLLM merges this object with kv_transfer_params; a client could point a node at an address with it.
    if b"kv_transfer_params" in bytes(job.fields.get("vllm_xargs", b"")):
        raise RequestError("kv_transfer_params is set by the router; leave it out of vllm_xargs", param="vllm_xargs")


def undivided_because(job: Job) -> str | None:
    """Why the decode node is to do this request alone, in one word for the metric; None if the two legs can share it.

    One hand-over is for one sequence: the prefill node frees its blocks after the first read, and names those of one
    prompt. And KV that is fetched has no logits, which log-probabilities of a prompt are made of.
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
    """Whether the answer must be a call. Some versions fail on one of a single token (vllm#38911)."""
    return bytes(job.fields.get("tool_choice", b"")).strip()[:1] == b"{" or (
        bytes(job.fields.get("tool_choice", b"")).strip() == b'"required"'
    )


def prefill_body(job: Job, *, named_by_id: bool = False, with_ids: bool = False) -> bytes:
    """The body of the prefill leg. `named_by_id`: for P2pNcclConnector, whose KV is found by the request's id alone.
    `with_ids`: the answer is to tell the prompt's token ids, as it does from 0.10.2 on.

    The client's fields are all there, so that a request which the decode node would refuse is refused while nothing is
    held; but for those that do not go with one token (min_tokens), and those that make older versions hold
    nothing: KV of a request that was stopped by a token is freed at once.
    """
    fields: dict[str, Any] = dict(job.fields)
    fields["max_tokens"] = 1
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    fields["stream"] = False
    for name in ("stream_options", "min_tokens", "stop_token_ids"):
        fields.pop(name, None)
    fields["ignore_eos"] = True
    fields.pop("return_token_ids", None)
    if with_ids:
        fields["return_token_ids"] = True
    if not named_by_id:
        fields["kv_transfer_params"] = _ASK_TO_HOLD
    return msgspec.json.encode(fields)


def decode_body(job: Job, params: msgspec.Raw | None) -> bytes:
    """The body of the decode leg: the client's own, and the hand-over."""
    fields: dict[str, Any] = dict(job.fields)
    fields.pop("kv_transfer_params", None)
    if params is not None:
        fields["kv_transfer_params"] = params
    return msgspec.json.encode(fields)


def p2p_request_id(prefill_address: str, decode_address: str, unique: str) -> str:
    """The id that P2pNcclConnector reads both ends' addresses from. `unique` must have no colon."""
    return f"___prefill_addr_{prefill_address}___decode_addr_{decode_address}_{unique}"


def handover_of(body: bytes, *, with_ids: bool = False) -> Handover:
    """What the answer of a prefill leg gives away. Raises NodeFailed for one that is no answer."""
    answer = _decoded(body)
    params = answer.kv_transfer_params
    held = bytes(params).strip()[:1] == b"{" and _holds(params)
    usage = answer.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    ids = _prompt_ids(body) if with_ids else None
    return Handover(params if held else None, usage.prompt_tokens, details.cached_tokens, ids)


def _prompt_ids(body: bytes) -> list[int] | None:
    try:
        told = msgspec.json.decode(body, type=_Prompt)
    except MALFORMED:
        return None
    return told.prompt_token_ids or told.choices[0].prompt_token_ids


def _holds(params: msgspec.Raw) -> bool:
    try:
        told = msgspec.json.decode(params, type=dict[str, msgspec.Raw])
    except MALFORMED:
        return False
    return bytes(told.get("do_remote_prefill", b"")).strip() == b"true"


def plain_answer(body: bytes) -> Ending:
    """A decode node's whole answer, without what it says of KV. Raises NodeFailed for one that is no answer."""
    answer = _decoded(body)
    if bytes(answer.kv_transfer_params).strip() != b"null":
        # Of a node that offers its KV back to prefill nodes: addresses, which are no business of a client.
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        del fields["kv_transfer_params"]
        body = msgspec.json.encode(fields)
    usage = answer.usage or _Usage()
    return Ending(body, usage.prompt_tokens, usage.completion_tokens or 0)


def _decoded(body: bytes) -> _Answer:
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except MALFORMED as why:
        raise NodeFailed(f"the node's answer is malformed: {why}") from why
    if not answer.choices:
        raise NodeFailed("the node's answer has no choices")
    return answer


def error_in(events: bytes) -> tuple[int, ErrorBody, int] | None:
    """Where whole events hold an error: its place in the bytes, what it says, and its status. None if they do not."""
    for sign in _ERROR_EVENTS:
        at = 0 if events.startswith(sign) else events.find(b"\n\n" + sign) + 2
        if at == 1:
            continue
        line = events[at + len(_EVENT) :].partition(b"\n")[0]
        error, status = told_error(line)
        return at, error, status
    return None


def told_error(body: bytes, status: int = 500) -> tuple[ErrorBody, int]:
    """What an error of a node says, in either form, and its status; `status` unless it names one itself."""
    try:
        told = msgspec.json.decode(body, type=_Told)
    except MALFORMED:
        return ErrorBody(f"a node answered {status} without a reason", NodeFailed.type), status
    told = told.error or told
    own = told.code if isinstance(told.code, int) and 400 <= told.code < 600 else status
    return ErrorBody(
        told.message or "the node gave no reason", told.type or NodeFailed.type, told.param, told.code
    ), own
