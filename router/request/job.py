"""A client's request as the router needs it, and the bodies of its two requests to nodes. Pure.

All other fields stay the client's bytes; the nodes check everything.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvrelay.openai_api.body import check_choices
from kvrelay.openai_api.json_body import read_json
from kvrelay.openai_api.types import Salt
from kvrelay.router.nodes.node import NodeKind, VllmHandover
from kvrelay.router.prefix.index import Prefix
from kvrelay.wire.errors import RequestError
from kvrelay.wire.kv_events import Pin
from kvrelay.wire.transfer import KvTransferParams, Source

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "SESSION_HEADER",
    "Job",
    "Slo",
    "begun",
    "decode_body",
    "for_nodes",
    "parse_body",
    "parts_of",
    "prefill_body",
    "prefix_of",
    "is_undivided",
]

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
SESSION_HEADER = "x-session-id"

_MAX_COPIED_BYTES = 32 << 20  # each prompt goes to its nodes with all other fields
_BYTES_PER_TOKEN = 4  # English text; matters for placement only
_DEFAULT_COMPLETION_TOKENS = 16  # of the OpenAI API
_MAX_INT = 2**63 - 1
_MAX_SESSION_CHARS = 256
# With these a client could point a node at an address. vLLM takes the first from vllm_xargs, too.
_PARAMS = "kv_transfer_params"
_HANDOVER_FIELDS = (_PARAMS, "remote_", "do_remote_")
_ASK_TO_HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# Fields that decide the prompt's tokens, or the names of their KV blocks, beside the prompt.
_CONTEXT_FIELDS = (
    "model",
    "cache_salt",
    "tools",
    "tool_choice",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "suffix",
)

_Limit = Annotated[int, msgspec.Meta(le=_MAX_INT)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Fields(msgspec.Struct, frozen=True):
    model: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    stream: bool | None = None
    # The prefill request changes these.
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-_MAX_INT - 1, le=_MAX_INT)] | None = None
    fit_max_tokens: bool | None = None
    priority: int | None = None
    include_metrics: bool | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: Salt | None = None
    stream_options: _StreamOptions | None = None
    vllm_xargs: dict[str, msgspec.Raw] | None = None


_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_known_fields = msgspec.json.Decoder(_Fields)


class Slo(msgspec.Struct, frozen=True):
    """A request's targets in seconds; None is no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    id: str = ""
    path: str
    model: str
    stream: bool
    seed: int
    created: int = 0
    max_tokens: int
    """The limit for this path; 0 if the client gave none."""
    prompt_tokens: int
    """An estimate unless `counted`."""
    counted: bool
    wants_stages: bool
    include_usage: bool
    choices: int
    """For each prompt."""
    prompt_only: bool
    """The client wants only its prompt back."""
    fields: dict[str, msgspec.Raw]
    kind: NodeKind = NodeKind.KVRELAY
    """The kind of its nodes."""
    part: bool = False
    first_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    """Keeps the KV apart from other salts'."""
    session_id: str = ""
    """Common to the requests of one conversation or user."""
    targets: Slo = Slo()
    pin: Pin = Pin()
    """Whose budget pays for KV that it wishes to keep."""
    known: _Fields = _Fields()
    mark: str = ""
    """Makes a client's id unique among all routers."""

    @property
    def node_id(self) -> str:
        return f"{self.id}.{self.mark}" if self.mark else self.id

    @property
    def response_id(self) -> str:
        return f"{'chatcmpl' if self.path == CHAT_PATH else 'cmpl'}-{self.node_id}"


def parts_of(job: Job) -> list[Job]:
    """Return a job for each prompt. Raises RequestError if they have too many choices or bytes."""
    if job.kind is NodeKind.VLLM or not _has_prompts(job):
        return [job]
    prompts = msgspec.json.decode(job.fields["prompt"], type=list[msgspec.Raw])
    if len(prompts) == 1:
        return [job]
    check_choices(len(prompts), job.choices)
    others = sum(len(bytes(value)) for name, value in job.fields.items() if name != "prompt")
    if len(prompts) * others > _MAX_COPIED_BYTES:
        raise RequestError(
            f"{len(prompts)} prompts with {others} bytes of other fields are "
            f"{len(prompts) * others} bytes for the nodes; the limit is {_MAX_COPIED_BYTES}: send "
            f"fewer prompts at once, or shorter fields",
            param="prompt",
        )
    parts = []
    for at, prompt in enumerate(prompts):
        tokens, counted = _length(bytes(prompt))
        parts.append(
            msgspec.structs.replace(
                job,
                fields={**job.fields, "prompt": prompt},
                prompt_tokens=tokens,
                counted=counted,
                # Equal prompts have different answers unless the client gave a seed.
                seed=job.seed if job.known.seed is not None else (job.seed + at) & _MAX_INT,
                wants_stages=False,
                part=True,
                first_index=at * job.choices,
            )
        )
    return parts


def _has_prompts(job: Job) -> bool:
    raw = bytes(job.fields.get("prompt", b"")).strip()
    return job.path == COMPLETIONS_PATH and raw[:1] == b"[" and raw[1:].lstrip()[:1] in (b'"', b"[")


def is_undivided(job: Job) -> bool:
    """Return whether one vLLM node must do the request alone.

    One hand-over is for one sequence; and fetched KV has no logits for a prompt's
    log-probabilities.
    """
    if job.kind is NodeKind.KVRELAY:
        return False
    given = {
        name
        for name, value in job.fields.items()
        if bytes(value).strip() not in (b"null", b"false")
    }
    return (
        job.choices > 1
        or job.prompt_only
        or _has_prompts(job)
        or not given.isdisjoint({"use_beam_search", "prompt_embeds", "prompt_logprobs"})
        or {"echo", "logprobs"} <= given
    )


def parse_body(body: bytes, path: str) -> Job:
    """Read and check a client's body, without what the router adds. Raises RequestError."""
    fields = read_json(body, _raw_fields)
    for name, value in fields.items():
        if name.startswith(_HANDOVER_FIELDS) and bytes(value).strip() != b"null":
            raise RequestError(
                f"{name} is set by the router and refused from clients; leave it out", param=name
            )
    known = read_json(body, _known_fields)
    if _PARAMS in (known.vllm_xargs or ()):
        raise RequestError(
            f"{_PARAMS} is set by the router; leave it out of vllm_xargs", param="vllm_xargs"
        )
    if not known.model:
        raise RequestError("model is missing; GET /v1/models lists the names", param="model")
    choices = max(1, known.n or 1, known.best_of or 1)
    # Before admission counts its tokens against its key.
    check_choices(1, choices)
    limit_field, limit = "max_tokens", known.max_tokens
    if path == CHAT_PATH and known.max_completion_tokens is not None:
        limit_field, limit = "max_completion_tokens", known.max_completion_tokens
    prompt_only = limit == 0 and path != CHAT_PATH and bool(known.echo)
    if not prompt_only:
        _check_limit(known, path, limit_field, limit)
    prompt_tokens, counted = _length(bytes(fields.get(_prompt_field(path), b"")))
    options = known.stream_options
    return Job(
        path=path,
        model=known.model,
        stream=bool(known.stream),
        seed=known.seed or 0,
        max_tokens=limit or 0,
        prompt_tokens=prompt_tokens,
        counted=counted,
        wants_stages=bool(known.include_metrics),
        include_usage=bool(options and options.include_usage),
        choices=choices,
        prompt_only=prompt_only,
        fields=fields,
        priority=known.priority or 0,
        cache_salt=known.cache_salt or "",
        session_id=(known.session_id or known.prompt_cache_key or known.user or "")[
            :_MAX_SESSION_CHARS
        ],
        known=known,
    )


def _check_limit(known: _Fields, path: str, name: str, limit: int | None) -> None:
    if limit is None and path != CHAT_PATH and not known.fit_max_tokens:
        limit = _DEFAULT_COMPLETION_TOKENS
    if limit is not None and limit < 1:
        raise RequestError(f"{name} must be at least 1, got {limit}", param=name)
    if limit is not None and known.min_tokens is not None and known.min_tokens > limit:
        raise RequestError(
            f"min_tokens must be at most {name} ({limit}), got {known.min_tokens}",
            param="min_tokens",
        )


def for_nodes(
    job: Job, model: str, priority: int, session: str, key_hash: str, drawn_seed: int
) -> Job:
    """Return the request as nodes see it: `model` and `priority` replace the client's.

    `drawn_seed` replaces a missing one, `session` is from its headers, and with `key_hash` the KV
    is kept for requests of that API key alone.
    """
    nodes_see = {
        "model": model,
        "priority": priority,
        "session_id": session[:_MAX_SESSION_CHARS] or job.session_id,
        "cache_salt": _salt(job.cache_salt, key_hash) if key_hash else job.cache_salt,
    }
    changed = {
        name: msgspec.Raw(msgspec.json.encode(value))
        for name, value in nodes_see.items()
        if value != getattr(job, name)
    }
    return msgspec.structs.replace(
        job,
        seed=drawn_seed if job.known.seed is None else job.seed,
        fields=job.fields | changed,
        wants_stages=job.wants_stages and job.kind is NodeKind.KVRELAY,  # others tell none
        **nodes_see,
    )


def _salt(own: str, key_hash: str) -> str:
    # The key's hash is the secret: no client can name another key's salt, a salt does not lead back
    # to its key, and all routers make the same one.
    return hmac.digest(
        bytes.fromhex(key_hash), b"kvrelay cache salt 1\0" + own.encode(), "sha256"
    ).hex()


def prefix_of(job: Job) -> Prefix:
    fields = job.fields
    context = hash(
        (job.path, *[(name, bytes(fields[name])) for name in _CONTEXT_FIELDS if name in fields])
    )
    return Prefix.of(
        context,
        bytes(fields.get(_prompt_field(job.path), b"")),
        job.prompt_tokens if job.counted else 0,
    )


def prefill_body(job: Job, sources: Sequence[Source] = ()) -> bytes:
    fields: dict[str, Any] = dict(job.fields)
    fields["max_tokens"] = 0 if job.prompt_only else 1
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if job.kind is NodeKind.VLLM:
        # Some do not go with one token; older versions free KV of a stopped request at once.
        for name in ("stream_options", "min_tokens", "stop_token_ids", "return_token_ids"):
            fields.pop(name, None)
        fields |= {"stream": False, "ignore_eos": True, "kv_transfer_params": _ASK_TO_HOLD}
        return msgspec.json.encode(fields)
    if job.known.min_tokens is not None:
        # Not dropped: with min_tokens >= 1 the first token must not end the answer.
        fields["min_tokens"] = min(job.known.min_tokens, 1)
    fields["seed"] = job.seed
    fields["kv_transfer_params"] = begun(job, prefill=True, sources=sources)
    return msgspec.json.encode(fields)


def begun(job: Job, *, prefill: bool, sources: Sequence[Source] = ()) -> KvTransferParams:
    return KvTransferParams(
        sources=list(sources),
        pin=job.pin,
        do_remote_decode=prefill,
        do_remote_prefill=not prefill,
        pipelined=prefill,
        client_max_tokens=job.max_tokens,
        created=job.created,
        seed=job.seed,
        part=job.part,
        first_index=job.first_index,
    )


def decode_body(job: Job, params: KvTransferParams) -> bytes:
    """Return the body of a decode request, without the prompt if its token ids are in `params`."""
    fields: dict[str, Any] = dict(job.fields)
    if job.kind is NodeKind.VLLM:
        fields.pop("kv_transfer_params", None)
        if isinstance(params, VllmHandover) and params.remote_engine_id is not None:
            fields["kv_transfer_params"] = params.own
        return msgspec.json.encode(fields)
    known = job.known
    # An answer may depend on the prompt's words.
    repeats = known.echo or known.continue_final_message or known.add_generation_prompt is False
    if params.prompt_tokens is not None and not repeats:
        fields[_prompt_field(job.path)] = [] if job.path == CHAT_PATH else ""
    fields["seed"] = job.seed
    fields["kv_transfer_params"] = params
    return msgspec.json.encode(fields)


def _prompt_field(path: str) -> str:
    return "messages" if path == CHAT_PATH else "prompt"


def _length(prompt: bytes) -> tuple[int, bool]:
    # Tokens of a JSON prompt, and whether they are counted.
    raw = prompt.strip()
    if raw[:1] == b"[" and raw[1:32].lstrip()[:1].isdigit():
        return raw.count(b",") + 1, True
    return len(raw) // _BYTES_PER_TOKEN, False
