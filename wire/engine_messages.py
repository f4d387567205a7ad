"""Messages between a node's HTTP process and its engine process: msgpack over one zmq pair."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from kvrelay.wire.kv_events import CacheChanges, Pin
from kvrelay.wire.ladder import Found
from kvrelay.wire.outputs import Finish, Load, PromptBlocks, TokenLogprobs
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import KvFacts, Source, Ticket

__all__ = [
    "TransferStats",
    "AdapterFacts",
    "AdapterAnswer",
    "AskStats",
    "EngineFailed",
    "EngineReady",
    "EngineStats",
    "FromEngine",
    "LoadAdapter",
    "Named",
    "Order",
    "RequestUpdate",
    "StepOutputs",
    "Submit",
    "TierStats",
    "Timing",
    "ToEngine",
]


class Named(msgspec.Struct, frozen=True, tag=True):
    """A message, which the name of its class tells from others."""


class Submit(Named, frozen=True):
    """A command: start a request.

    `generated` are output tokens that it already has; `fetch` tells where its KV is held. `hold`
    keeps the KV under a lease when the request ends by length, and `hold_stopped` also when a stop
    token ends it. `fork_of` names an earlier request with the same prompt, whose blocks this one
    waits for and shares. A lower `priority` is served first.
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
    """LoRA adapter; empty for the model alone."""
    at: float = 0.0
    """Sending time on this machine's monotonic clock; 0: now."""
    tpot_ms: float = 0.0
    """Time per token that the client wants; 0: not said."""
    expected_output: int = 0
    """Likely length of the answer; 0: not said."""
    spill_tokens: int = 0
    """Prompt tokens computed here that a prefill node could compute."""
    sources: list[Source] = []
    """Nodes that may have KV of the first tokens; with `fetch` they are not asked."""
    pin: Pin = Pin()


class Order(Named, frozen=True):
    """A command about what it names; unknown names are ignored.

    abort: stop a request and free what it took. release: nobody will fetch the KV held for a
    request, which the id of the router's call names, too. renew: begin its lease anew for a decode
    node that waits for room. unload: begin no request with this adapter; its slot is free once its
    requests are done. reset: hide all present blocks from later requests; with a name, other nodes
    are reset, too, and nothing is taken from them meanwhile. shutdown: end the process after the
    current step.
    """

    verb: Literal["abort", "release", "renew", "unload", "reset", "shutdown"]
    name: str = ""


class LoadAdapter(Named, frozen=True):
    """A command: read a LoRA adapter and give it a slot; see AdapterAnswer.

    `in_place`: it may take the name of another one, whose requests end first.
    """

    number: int
    name: str
    path: str
    in_place: bool = False


class AskStats(Named, frozen=True):
    """A command: send EngineStats now."""

    number: int


ToEngine = Submit | Order | LoadAdapter | AskStats | CacheChanges


class AdapterFacts(msgspec.Struct, frozen=True):
    """A loaded adapter; equal digests mean equal weights."""

    name: str
    digest: str
    rank: int


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """A request's seconds in each stage inside the engine."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    transfer_bytes: int = 0
    exposed_s: float = 0.0
    """The part of transfer_s after the prompt was computed."""
    decode_queue_s: float = 0.0
    """With a transfer: waiting for a seat before it, and for the first step after it."""
    first_step_s: float = 0.0
    told_s: float = 0.0
    """With a transfer: from the news of complete KV to the token of the first step."""
    draft_tokens: int = 0
    accepted_tokens: int = 0


class RequestUpdate(msgspec.Struct, frozen=True, array_like=True):
    """An update of one request with its new tokens, in order.

    The last one carries `finish` and `timing`, as do the first two with tokens. `held` is set when
    a request that holds its KV begins to be computed, and at its end; `fetch_error` when its KV
    could not be fetched. `prompt_logprobs` (from the second token on) come with the first token.
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
    """With an error: the request would be wrong on any node."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    lacks_adapter: bool = False
    """With an error: its adapter was unloaded meanwhile."""
    blocks: PromptBlocks | None = None
    """With the first `held`, names of the prompt's blocks; at the end those of the answer, too."""
    found: Found | None = None
    """Where cached_tokens were found; with `held`, `timing` and `finish`."""
    pinned_tokens: int = 0
    """Tokens whose KV is pinned; with the answer's."""


class StepOutputs(Named, frozen=True):
    """A message with all updates of one step, and the load after it."""

    updates: list[RequestUpdate]
    load: Load


class EngineReady(Named, frozen=True):
    """A message that the model is loaded, with what the engine is."""

    engine_id: str
    generation: str
    model_name: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    eos_token_ids: list[int]
    load_s: float
    adapters: list[AdapterFacts] = []
    kv: KvFacts | None = None
    costs: StepCosts | None = None
    """Measured costs of its steps."""
    max_gap_ms: float = 0.0
    """Limit of a step with prompts beside decodes; 0: none."""


class TierStats(msgspec.Struct):
    """A tier below the pool: blocks that it holds, and counts of blocks."""

    blocks: int = 0
    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    corrupt: int = 0
    """Not what they were when they were stored; dropped."""
    used: int = 0
    """Blocks that are read or written now."""
    failed: int = 0
    """Not read, written or looked up, or not in time."""


class TransferStats(msgspec.Struct):
    """A set of counts of a KV connector."""

    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    fetches: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=Counter)
    """Failed fetches by error name."""
    ask_failures: dict[str, int] = msgspec.field(default_factory=Counter)
    """Asks for cached blocks without a ticket, by cause."""
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    checked_blocks: int = 0
    wrong_blocks: int = 0
    unchecked_blocks: int = 0
    """Blocks drawn for a check whose source gives no checksums."""
    silent_s: float = 0.0
    """Seconds since the slowest of its threads was last seen alive."""


class EngineStats(Named, frozen=True):
    """A snapshot of counters and gauges, sent every half second and when the engine goes idle."""

    load: Load
    held_blocks: int = 0
    lent_blocks: int = 0
    """Held ones of the prefix cache."""
    quarantined_blocks: int = 0
    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    kept_blocks: int = 0
    """Of failed fetches."""
    transfers: TransferStats = msgspec.field(default_factory=TransferStats)
    asked: int = 0
    """Number of the newest AskStats that these answer."""
    host: TierStats = msgspec.field(default_factory=TierStats)
    store: TierStats = msgspec.field(default_factory=TierStats)
    """Both filled in by the node."""
    pulled_tokens: int = 0
    pull_failures: dict[str, int] = {}
    """Pulls without or with a part of their KV, by cause."""
    pinned_blocks: int = 0
    pins_refused: int = 0
    """Requests whose KV was not pinned, or in part."""

    @property
    def looked_up_tokens(self) -> int:
        return self.prompt_tokens + self.cached_prompt_tokens


class EngineFailed(Named, frozen=True):
    """A last message: why the engine process ends."""

    message: str


class AdapterAnswer(Named, frozen=True):
    """An answer: requests may name this adapter now, or why not."""

    asked: int
    adapter: AdapterFacts | None = None
    reason: str = ""
    missing: bool = False


FromEngine = StepOutputs | EngineReady | EngineStats | CacheChanges | EngineFailed | AdapterAnswer
