"""Typed messages between a node's HTTP process and its engine process (msgpack over one zmq pair,
never pickle).
"""

from __future__ import annotations

import msgspec

from kvrelay.wire.outputs import Finish, Load, PromptBlocks, TokenLogprobs
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import KvFacts, KvTransferParams, Ticket

__all__ = [
    "PROBE_PREFIX",
    "Abort",
    "AdapterFacts",
    "AdapterLoaded",
    "AdapterRefused",
    "AskStats",
    "BlockText",
    "CacheChanges",
    "EngineFailed",
    "EngineReady",
    "EngineStats",
    "FetchProbe",
    "FromEngine",
    "LoadAdapter",
    "OfferProbe",
    "ProbeFetched",
    "ProbeOffered",
    "ProbeRefused",
    "Profile",
    "Profiled",
    "Release",
    "Renew",
    "RequestUpdate",
    "ResetPrefixCache",
    "STEP_TOKENS",
    "Shutdown",
    "StepOutputs",
    "Submit",
    "Timing",
    "ToEngine",
    "UnloadAdapter",
]

PROBE_PREFIX = "probe-"
"""How ids of probes begin. A probe reads what was offered as one, never a request's KV."""
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Classes in which an engine counts its steps by the tokens that they compute, each up to and with
its number.
"""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A command: start a request. `generated` are output tokens it already has; `fetch` says where
    its KV is held.

    `hold` keeps the KV under a lease when the request ends by length (the prefill leg of a
    hand-over), and with `hold_stopped` also when a stop token ends it: other choices go on from it.
    `fork_of` is the id of a request with the same prompt, sent before: this one waits until that
    one's prompt is there, and shares its blocks. A lower `priority` is served first.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    generated: list[int] = []
    cache_salt: str | None = None
    hold: bool = False
    fetch: Ticket | None = None
    hold_stopped: bool = False
    fork_of: str | None = None
    priority: int = 0
    adapter: str = ""
    """The name of the LoRA adapter that computes it; empty: the model alone."""
    at: float = 0.0
    """When the node sent it, on this machine's monotonic clock: an engine reads it between two
    steps. 0: now.
    """
    tpot_ms: float = 0.0
    """The time per token that its client wants; 0: not said."""
    expected_output: int = 0
    """Tokens that its answer is likely to have; 0: not said."""
    spill_tokens: int = 0
    """What it computes of its prompt, as far as is known, if a prefill node could: the node's limit
    of such counts it.
    """


class Abort(msgspec.Struct, frozen=True, tag=True):
    """A command: stop a request and give back all it took. Unknown ids are ignored."""

    request_id: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """A command: nobody will fetch the KV held for this request. Unknown ids are ignored.

    A router that was cut off before it read the hand-over knows only the id of its call: that names
    the request too.
    """

    request_id: str


class Renew(msgspec.Struct, frozen=True, tag=True):
    """A command: begin this lease anew for somebody who waits for room elsewhere."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """A command: end the engine process after the current step."""


class OfferProbe(msgspec.Struct, frozen=True, tag=True):
    """A command: fill so many free blocks with a pattern and offer them like any KV.

    Answered by ProbeOffered or ProbeRefused.
    """

    probe_id: str
    blocks: int


class FetchProbe(msgspec.Struct, frozen=True, tag=True):
    """A command: fetch this ticket into free blocks, and compare them with the pattern.

    Answered by ProbeFetched or ProbeRefused.
    """

    probe_id: str
    ticket: Ticket
    seed: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """A command: read a LoRA adapter's files and give it a slot.

    `in_place`: it may take the name of another one, which ends with its requests. Answered by
    AdapterLoaded or AdapterRefused.
    """

    load_id: str
    name: str
    path: str
    in_place: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """A command: begin no request with this adapter. Unknown names are ignored.

    Its slot is free when those that have begun are done.
    """

    name: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """A command: let no later request find a block whose KV is there now."""


class Profile(msgspec.Struct, frozen=True, tag=True):
    """A command: begin to profile the steps, or end that and write what was seen."""

    profile_id: int
    begin: bool


class AskStats(msgspec.Struct, frozen=True, tag=True):
    """A command: send EngineStats now, with all in it that was sent before this."""

    number: int


ToEngine = (
    Submit
    | Abort
    | Release
    | Renew
    | Shutdown
    | OfferProbe
    | FetchProbe
    | LoadAdapter
    | UnloadAdapter
    | ResetPrefixCache
    | Profile
    | AskStats
)


class AdapterFacts(msgspec.Struct, frozen=True):
    """A loaded adapter. `digest` names its content: equal digests, equal weights."""

    name: str
    digest: str
    rank: int


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """A request's seconds in each stage inside the engine, by its own monotonic clock."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    transfer_bytes: int = 0
    exposed_s: float = 0.0
    """Of transfer_s, what came after the last of the prompt was computed."""
    decode_queue_s: float = 0.0
    """With a transfer: waiting for a seat and blocks before it, and for the first step after it."""
    first_step_s: float = 0.0
    """From the launch of the first decode step to its token."""
    told_s: float = 0.0
    """With a transfer: from the news that the KV was complete to the token of the first step."""
    draft_tokens: int = 0
    """Tokens that were proposed before they were drawn, and those of them that were drawn."""
    accepted_tokens: int = 0


class RequestUpdate(msgspec.Struct, frozen=True, array_like=True):
    """An update of one request with its new tokens, in order.

    The last one carries `finish` and a `timing`, as do the first two with tokens: the caller may
    end a request by itself. `held` is set when a request that holds its KV begins to be computed,
    and again when it has ended; `fetch_error` when its KV could not be fetched: then the prompt is
    computed here, or the request ends with ERROR. `prompt_logprobs` (from the second token on) come
    with the first token.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    cached_tokens: int = 0
    held: Ticket | None = None
    timing: Timing | None = None
    fetch_error: str | None = None
    error: str | None = None
    refused: bool = False
    """With an error: the request itself is wrong, and would be on any node."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    lacks_adapter: bool = False
    """With an error: its adapter was unloaded while the request was on its way here."""
    blocks: PromptBlocks | None = None
    """With the first `held`: what the prompt's blocks are called."""


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """A message with all updates of one engine step, and the load after it."""

    updates: list[RequestUpdate]
    load: Load


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """A message that the model is loaded, and what the engine is."""

    engine_id: str
    generation: str
    model_name: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    eos_token_ids: list[int]
    transfer_host: str
    transfer_port: int
    load_s: float
    adapters: list[AdapterFacts] = []
    kv: KvFacts | None = None
    costs: StepCosts | None = None
    """What its steps cost, as it has measured them."""
    max_gap_ms: float = 0.0
    """What a step with prompts takes at most beside requests that decode; 0: it has no such limit."""


class EngineStats(msgspec.Struct, frozen=True, tag=True):
    """A snapshot of counters since start and of gauges: the engine's pulse, sent every half second
    and when it goes idle.
    """

    load: Load
    held_blocks: int = 0
    quarantined_blocks: int = 0
    cached_blocks: int = 0
    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    forked_blocks: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = []
    """Of accepted_tokens, those at each place of a proposal."""
    step_sizes: list[int] = []
    """Of steps, those in each class of STEP_TOKENS, and above them."""
    step_tokens: int = 0
    """That all steps computed, together."""
    fetches: int = 0
    fetch_failures: dict[str, int] = {}
    fetch_retries: int = 0
    fetch_kept_blocks: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    checked_blocks: int = 0
    wrong_blocks: int = 0
    unchecked_blocks: int = 0
    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    asked: int = 0
    """The number of the AskStats that these answer, else 0."""
    kv_silent_s: float = 0.0
    """Seconds since the slowest thread of the KV link was seen at work; one that waits for work is."""


class BlockText(msgspec.Struct, frozen=True, array_like=True):
    """A block's tokens, and what else decides its KV."""

    token_ids: list[int]
    adapter: str = ""
    salt: str = ""


class CacheChanges(msgspec.Struct, frozen=True, tag=True):
    """A message which block hashes the prefix cache holds anew, and which no more."""

    stored: dict[bytes, bytes | None]
    removed: list[bytes]
    texts: dict[bytes, BlockText] = {}
    """Of those that are stored, if the node tells token ids."""
    cleared: bool = False
    """Before all that, none was held any more."""


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """A message that the engine process ends because of this; nothing follows it."""

    message: str


class ProbeOffered(msgspec.Struct, frozen=True, tag=True):
    """An answer: the probe's blocks are under a lease, which runs out by itself."""

    probe_id: str
    ticket: KvTransferParams
    seed: int
    spare_blocks: int
    """The largest probe that this node would have taken now, in blocks."""
    host: str
    """Equal on all nodes of one host; empty if that is not known."""


class ProbeFetched(msgspec.Struct, frozen=True, tag=True):
    """An answer: all bytes of a probe have come; `read_s` of its `seconds` were reading."""

    probe_id: str
    num_bytes: int
    seconds: float
    read_s: float
    verified: bool
    plane: str
    missed: dict[str, str]
    """Data planes that are preferred to `plane`, and why each cannot be had for this pair."""
    spare_blocks: int
    host: str


class ProbeRefused(msgspec.Struct, frozen=True, tag=True):
    """An answer: no probe, or none that worked; why, in one sentence."""

    probe_id: str
    reason: str
    busy: bool = False


class Profiled(msgspec.Struct, frozen=True, tag=True):
    """An answer: the profile has begun or was written, or why not."""

    profile_id: int
    refused: str = ""


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """An answer: requests may name this adapter from now on."""

    load_id: str
    adapter: AdapterFacts


class AdapterRefused(msgspec.Struct, frozen=True, tag=True):
    """An answer: the adapter was not loaded; why, in one sentence."""

    load_id: str
    reason: str
    missing: bool = False


FromEngine = (
    StepOutputs
    | EngineReady
    | EngineStats
    | CacheChanges
    | EngineFailed
    | ProbeOffered
    | ProbeFetched
    | ProbeRefused
    | Profiled
    | AdapterLoaded
    | AdapterRefused
)
