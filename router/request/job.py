"""A client's request as the router needs it, and the bodies of its two legs. Pure.

Looks at the few fields that decide the walk and keeps all others as the client's own bytes; the
nodes check everything.
"""

from __future__ import annotations

import hmac
from typing import Any, TypeVar

import msgspec

from kvrelay.openai_api.body import check_choices
from kvrelay.router.prefix.index import Prefix
from kvrelay.wire.errors import RequestError
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.transfer import AnswerState, HandoverRequest, KvTransferParams

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "SESSION_HEADER",
    "Job",
    "Slo",
    "decode_body",
    "parse_job",
    "parts_of",
    "prefill_body",
    "prefix_of",
    "with_salt_of",
]

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
SESSION_HEADER = "x-session-id"

_MOST_COPIED_BYTES = 32 << 20
"""Each prompt of a request goes to its nodes with all other fields."""
_BYTES_PER_TOKEN = 4  # English text; only the choice of a node depends on it
_DEFAULT_COMPLETION_TOKENS = 16  # of the OpenAI API
_MAX_INT = 2**63 - 1
_MAX_MODEL_CHARS = 256
_MAX_SESSION_CHARS = 256
# A client that could set these could point a node at an address.
_HANDOVER_FIELD = "kv_transfer_params"
_HANDOVER_FIELDS = ("remote_", "do_remote_")

# What beside the prompt itself decides its tokens, or the name of their KV.
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

_T = TypeVar("_T")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Asked(msgspec.Struct):
    """The fields that the router itself reads."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    fit_max_tokens: bool | None = None
    seed: int | None = None
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
    cache_salt: str | None = None
    stream_options: _StreamOptions | None = None


class Slo(msgspec.Struct, frozen=True):
    """What a request wants of its tokens' times, in seconds; None is no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class Job(msgspec.Struct, frozen=True):
    """One request on its way. `max_tokens` 0: the client did not say. `prompt_tokens` is `counted`,
    or an estimate.
    """

    id: str
    path: str
    model: str
    stream: bool
    seed: int
    created: int
    max_tokens: int
    min_tokens: int | None
    prompt_tokens: int
    counted: bool
    wants_stages: bool
    """The client asks for the break-down at the end of its answer."""
    include_usage: bool
    seed_given: bool
    choices: int
    """For each prompt, returned of `best_of`."""
    best_of: int
    prompt_only: bool
    """The client wants its prompt back and no token more."""
    repeats_prompt: bool
    """The answer depends on the prompt's own words, not on its tokens alone."""
    fields: dict[str, msgspec.Raw]
    part: bool = False
    """One prompt of several: its answer is joined with theirs (router/request/multi_prompt.py)."""
    first_index: int = 0
    priority: int = 0
    asked_priority: int | None = None
    """What the client gave."""
    cache_salt: str = ""
    """What keeps its KV apart from that of other requests; empty if nothing does."""
    session: str = ""
    """What the requests of one conversation, or else of one user, have in common."""
    targets: Slo = Slo()
    asked_id: str = ""
    """The id that its body gives it."""
    mark: str = ""
    """Of an id that its client chose: another router may have a request with the same one on the
    same node.
    """

    @property
    def node_id(self) -> str:
        """The request's id on the nodes, which tell requests apart by it."""
        return f"{self.id}.{self.mark}" if self.mark else self.id

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt."""
        return _prompt_field(self.path)

    @property
    def response_id(self) -> str:
        """The `id` of the answer, as the nodes form it."""
        return f"{'chatcmpl' if self.path == CHAT_PATH else 'cmpl'}-{self.node_id}"

    def having(self, field: str, value: str | int) -> Job:
        """Return the job with another value of a field, for the nodes too."""
        if getattr(self, field) == value:
            return self
        fields = {**self.fields, field: msgspec.Raw(msgspec.json.encode(value))}
        return msgspec.structs.replace(self, fields=fields, **{field: value})


def parts_of(job: Job) -> list[Job]:
    """Return a job for each prompt; the job itself if it has one. Raises RequestError if they ask
    for too much.
    """
    raw = bytes(job.fields.get("prompt", b"")).strip()
    if job.path != COMPLETIONS_PATH or raw[:1] != b"[" or raw[1:].lstrip()[:1] not in (b'"', b"["):
        return [job]
    prompts = msgspec.json.decode(raw, type=list[msgspec.Raw])
    if len(prompts) == 1:
        return [job]
    check_choices(len(prompts), max(job.choices, job.best_of))
    others = sum(len(bytes(value)) for name, value in job.fields.items() if name != "prompt")
    if len(prompts) * others > _MOST_COPIED_BYTES:
        raise RequestError(
            f"{len(prompts)} prompts with {others} bytes of other fields are "
            f"{len(prompts) * others} bytes for the "
            f"nodes; the limit is {_MOST_COPIED_BYTES}: send fewer prompts at once, or shorter "
            f"fields",
            param="prompt",
        )
    parts = []
    for at, prompt in enumerate(prompts):
        tokens, counted = _length(bytes(prompt))
        part = msgspec.structs.replace(
            job,
            fields={**job.fields, "prompt": prompt},
            prompt_tokens=tokens,
            counted=counted,
            # Without a seed of the client's, equal prompts have different answers.
            seed=job.seed if job.seed_given else (job.seed + at) & _MAX_INT,
            wants_stages=False,
            part=True,
            first_index=at * job.choices,
        )
        parts.append(part)
    return parts


def parse_job(
    body: bytes,
    path: str,
    job_id: str,
    created: int,
    drawn_seed: int,
    session: str = "",
    targets: Slo = Slo(),  # noqa: B008 - a value
) -> Job:
    """Read a client's body. `drawn_seed` is taken if the client gave none; `session` is what its
    headers name.

    Raises RequestError.
    """
    fields = _decode(body, dict[str, msgspec.Raw])
    for name in fields:
        if name != _HANDOVER_FIELD and not name.startswith(_HANDOVER_FIELDS):
            continue
        if bytes(fields[name]).strip() != b"null":
            raise RequestError(
                f"{name} is set by the router and refused from clients; leave it out", param=name
            )
    asked = _decode(body, _Asked)
    if not asked.model:
        raise RequestError("model is missing; GET /v1/models lists the names", param="model")
    if len(asked.model) > _MAX_MODEL_CHARS:
        raise RequestError(
            f"model has {len(asked.model)} characters, and the limit is {_MAX_MODEL_CHARS}; GET "
            f"/v1/models lists names",
            param="model",
        )
    limit_field, limit = "max_tokens", asked.max_tokens
    if path == CHAT_PATH and asked.max_completion_tokens is not None:
        limit_field, limit = "max_completion_tokens", asked.max_completion_tokens
    prompt_only = limit == 0 and path != CHAT_PATH and bool(asked.echo)
    default = None if path == CHAT_PATH or asked.fit_max_tokens else _DEFAULT_COMPLETION_TOKENS
    _check_limits(asked, limit_field, 1 if prompt_only else default if limit is None else limit)
    if asked.cache_salt == "":
        raise RequestError("cache_salt must not be empty; leave it out", param="cache_salt")
    # Before admission reckons with them: what no node would take must not move its key's clock.
    check_choices(1, max(asked.n or 1, asked.best_of or 1))
    prompt_tokens, counted = _length(bytes(fields.get(_prompt_field(path), b"")))
    return Job(
        id=job_id,
        path=path,
        model=asked.model,
        stream=bool(asked.stream),
        seed=drawn_seed if asked.seed is None else asked.seed,
        created=created,
        max_tokens=limit or 0,
        min_tokens=asked.min_tokens,
        prompt_tokens=prompt_tokens,
        counted=counted,
        wants_stages=bool(asked.include_metrics),
        include_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
        seed_given=asked.seed is not None,
        choices=max(1, asked.n or 1),
        best_of=asked.best_of or 1,
        prompt_only=prompt_only,
        repeats_prompt=bool(
            asked.echo or asked.continue_final_message or asked.add_generation_prompt is False
        ),
        fields=fields,
        priority=asked.priority or 0,
        asked_priority=asked.priority,
        cache_salt=asked.cache_salt or "",
        session=(session or asked.session_id or asked.prompt_cache_key or asked.user or "")[
            :_MAX_SESSION_CHARS
        ],
        targets=targets,
        asked_id=asked.request_id or "",
    )


def with_salt_of(job: Job, key_hash: str) -> Job:
    """Keep the job's KV for requests of this API key alone, and of these only for those with the
    same salt.

    The hash of the key is the secret of the salt, so no client can ask for the salt of another key,
    a salt does not lead back to a key, and all routers and workers make the same one.
    """
    salt = hmac.digest(
        bytes.fromhex(key_hash), b"kvrelay cache salt 1\0" + job.cache_salt.encode(), "sha256"
    ).hex()
    return job.having("cache_salt", salt)


def prefix_of(job: Job) -> Prefix:
    """Return by what the prefix index knows the prompt of this job."""
    fields = job.fields
    context = hash(
        (job.path, *[(name, bytes(fields[name])) for name in _CONTEXT_FIELDS if name in fields])
    )
    return Prefix.of(
        context, bytes(fields.get(job.prompt_field, b"")), job.prompt_tokens if job.counted else 0
    )


def prefill_body(job: Job, version: int = 1) -> bytes:
    """Return the body of the prefill leg: one token, and the client's own limits beside it.
    `version` of the leg.
    """
    fields: dict[str, Any] = dict(job.fields)
    fields["max_tokens"] = 0 if job.prompt_only else 1
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if job.min_tokens is not None:
        # Not dropped: with min_tokens >= 1 the first token must not be the end of the answer.
        fields["min_tokens"] = min(job.min_tokens, 1)
    fields["seed"] = job.seed
    fields["kv_transfer_params"] = KvTransferParams.of(
        HandoverRequest(
            do_remote_decode=True,
            client_max_tokens=job.max_tokens,
            pipelined=True,
            leg_version=version,
        ),
        AnswerState(created=job.created, seed=job.seed, part=job.part, first_index=job.first_index),
    )
    return msgspec.json.encode(fields)


def decode_body(job: Job, params: KvTransferParams, version: int = 1) -> bytes:
    """Return the body of a decode leg of this version. The prompt stays at home where its token ids
    go along.
    """
    fields: dict[str, Any] = dict(job.fields)
    if params.answer().prompt_tokens is not None and not job.repeats_prompt:
        fields[job.prompt_field] = [] if job.path == CHAT_PATH else ""
    fields["seed"] = job.seed
    fields["kv_transfer_params"] = params.in_version(version)
    return msgspec.json.encode(fields)


def _prompt_field(path: str) -> str:
    return "messages" if path == CHAT_PATH else "prompt"


def _length(prompt: bytes) -> tuple[int, bool]:
    """Count the tokens of a prompt in JSON; False: they are estimated, as those of anything but
    token ids.
    """
    raw = prompt.strip()
    if raw[:1] == b"[" and raw[1:32].lstrip()[:1].isdigit():
        return raw.count(b",") + 1, True
    return len(raw) // _BYTES_PER_TOKEN, False


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as why:
        message, _, where = str(why).partition(" - at `$")
        name = where.strip("`.") or None
        if name is None:
            raise RequestError(
                f"the body must be a JSON object of request fields: {message}"
            ) from why
        raise RequestError(f"{name} is of a wrong type: {message}", param=name) from why
    except MALFORMED as why:
        raise RequestError(f"the body is not valid JSON: {why}", code="invalid_json") from why


def _check_limits(asked: _Asked, limit_field: str, limit: int | None) -> None:
    """Check what the prefill leg would hide from the nodes, because it changes these fields."""
    if limit is not None and not 1 <= limit <= _MAX_INT:
        raise RequestError(
            f"{limit_field} must be at least 1 and fit in 64 bits, got {limit}", param=limit_field
        )
    if asked.min_tokens is not None and asked.min_tokens < 0:
        raise RequestError(
            f"min_tokens must not be negative, got {asked.min_tokens}", param="min_tokens"
        )
    if limit is not None and asked.min_tokens is not None and asked.min_tokens > limit:
        raise RequestError(
            f"min_tokens must be at most {limit_field} ({limit}), got {asked.min_tokens}",
            param="min_tokens",
        )
    if asked.seed is not None and not -_MAX_INT - 1 <= asked.seed <= _MAX_INT:
        raise RequestError(f"seed must fit in 64 bits, got {asked.seed}", param="seed")
