"""Requests inside the engine, and what a step computes of them. Pure Python."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvrelay.paged_engine.blocks import NO_PIN, BlockPool
from kvrelay.paged_engine.guide import Guide
from kvrelay.wire.engine_messages import Submit, Timing
from kvrelay.wire.kv_events import BlockHash, Pin, extend, root_of
from kvrelay.wire.ladder import Found
from kvrelay.wire.outputs import Finish, TokenLogprobs
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import Source, Ticket

if TYPE_CHECKING:
    from kvrelay.paged_engine.adapters import Loaded
    from kvrelay.paged_engine.speculation import NgramIndex

__all__ = ["Chunk", "Fetch", "Request", "ScoredRows", "State", "StepPlan"]


class State(enum.Enum):
    """A request's state: WAITING -> (FETCHING ->) RUNNING -> DONE; back to WAITING if preempted."""

    WAITING = enum.auto()
    FETCHING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    token_ids: list[int]
    prompt_tokens: int
    params: SamplingParams
    arrival_s: float
    root: BlockHash
    adapter: Loaded | None = None
    salt: str = ""  # hashed into `root`
    hold: bool = False
    hold_stopped: bool = False
    fork_of: str | None = None
    priority: int = 0
    tpot_ms: float = 0.0  # wanted time per token; 0 if it decodes elsewhere
    expected_output: int = 0
    spill: bool = False  # a prefill node could compute its prompt
    guide: Guide | None = None
    fetch: Ticket | None = None
    pull_from: int | None = None
    """First block of a ticket for a part of the prompt, asked of a peer's prefix cache."""
    sources: list[Source] = field(default_factory=list)  # to ask for such a ticket
    asking: bool = False
    asked_s: float = 0.0
    pull_s: float = 0.0  # its answer and its KV may each take so long
    pull_price: Any = None  # the node's, of the source that was asked
    pull_stored: int = 0  # blocks of what was asked for that lie in this node's files
    pulled_tokens: int = 0
    asked: int = 0  # another node or a tier was asked up to this token
    promised: int = 0  # the KV was to come up to this token
    from_peer: bool = False
    read_from: int = 0  # first token that lies in files, if not from a peer
    fetch_error: str | None = None
    state: State = State.WAITING
    finish: Finish | None = None
    # Set by the waiting queue.
    order: int = 0  # from 1
    rank: int = 0  # among requests of equal priority
    work: int = 0  # tokens neither cached nor shared
    shared: int = 0
    wanted: int = 0  # of KV that it was expected to take
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    offered: bool = False  # others know its blocks
    num_computed: int = 0
    num_published: int = 0
    unfindable: bool = False  # the prefix cache was reset after it came
    pin: Pin = NO_PIN
    pinned_tokens: int = 0
    cached_tokens: int | None = None
    num_counted: int = 0
    num_pending: int = 0  # tokens of launched steps, unknown to the host
    proposals: tuple[int, ...] = ()  # taken for the next tokens; not pending
    lookup: NgramIndex | None = None
    failed_drafts: int = 0  # in a row
    no_draft_before: int = 0  # so many output tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    new_tokens: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_scored: int = 0  # prompt positions whose logits are computed or pending
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    fetch_started_s: float | None = None
    fetched_s: float | None = None
    fetched_bytes: int = 0
    exposed_s: float = 0.0
    told_at_s: float | None = None  # its KV was complete elsewhere
    first_step: int | None = None  # position that its first decode step computes
    first_step_s: float | None = None
    stepped_s: float | None = None  # its token was there
    timings_told: int = 0

    @classmethod
    def from_submit(
        cls, submit: Submit, now: float, adapter: Loaded | None = None, weights: str = ""
    ) -> Request:
        return cls(
            request_id=submit.request_id,
            token_ids=[*submit.prompt_token_ids, *submit.generated],
            prompt_tokens=len(submit.prompt_token_ids),
            params=submit.params,
            arrival_s=now,
            root=root_of(submit.cache_salt, weights + (adapter.identity if adapter else "")),
            adapter=adapter,
            salt=submit.cache_salt or "",
            hold=submit.hold,
            hold_stopped=submit.hold_stopped,
            fork_of=submit.fork_of,
            priority=submit.priority,
            tpot_ms=submit.tpot_ms,
            expected_output=submit.expected_output,
            spill=submit.spill_tokens > 0,
            fetch=submit.fetch,
            sources=submit.sources,
            pin=submit.pin,
        )

    def pin_blocks(self, pool: BlockPool, block_size: int) -> None:
        """Pin what is published and was not tried yet, as far as the budget goes."""
        begin = self.pinned_tokens // block_size
        if self.pin.seconds and begin < self.num_published:
            names = self.block_hashes(block_size)[begin : self.num_published]
            pinned = pool.pin(names, self.pin)
            self.pinned_tokens += pinned * block_size
            if pinned < len(names):
                self.pin = NO_PIN

    @property
    def computes_prompt(self) -> bool:
        return self.fork_of is None and (self.pull_from is not None or self.fetched_s is None)

    @property
    def found(self) -> Found:
        """Return where the tokens of its prompt were found that are not computed."""
        cached, pulled = self.cached_tokens or 0, self.pulled_tokens
        gpu, failed = cached - pulled, max(0, self.promised - cached)
        if self.from_peer:
            return Found(gpu, peer=pulled, failed=failed, asked=self.asked)
        host = max(0, min(cached, self.read_from) - gpu)
        return Found(gpu, host, pulled - host, 0, failed, self.asked)

    @property
    def adapter_slot(self) -> int:
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def adapter_key(self) -> tuple[str, str]:
        """Return name and digest of the adapter, empty without one."""
        facts = None if self.adapter is None else self.adapter.facts
        return ("", "") if facts is None else (facts.name, facts.digest)

    def kv_mismatch(self) -> str | None:
        """Return why KV from elsewhere is not of this request's adapter, or None."""
        if self.fetch is None:
            return None
        theirs = self.fetch.adapter, self.fetch.adapter_digest
        if theirs == self.adapter_key:
            return None
        made, asked = (
            f"adapter {name!r} of content {digest[:12]}" if name else "no adapter"
            for name, digest in (theirs, self.adapter_key)
        )
        return (
            f"the KV was made with {made} and is asked for with {asked}; load the same adapters on "
            f"all nodes"
        )

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def turn(self) -> tuple[int, int, int]:
        return self.priority, self.rank, self.order

    @property
    def uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def is_handed_over(self) -> bool:
        """Return whether all its KV comes from where its prompt is computed."""
        return self.fetch_error is None and self.pull_from is None

    @property
    def expected_tokens(self) -> int:
        """Return the tokens of KV expected in the end; at least those known."""
        return max(
            self.prompt_tokens + self.expected_output, len(self.token_ids) + self.num_pending
        )

    def with_tokens(self, proposals: Iterable[int]) -> Request:
        return replace(self, token_ids=[*self.token_ids, *proposals])

    def to_score(self, start: int, end: int) -> range:
        """Return positions in [start, end) whose next token's log-probability is asked for."""
        if self.params.prompt_logprobs is None:
            return range(0)
        return range(max(start, self.num_scored), min(end, self.prompt_tokens - 1))

    def block_hashes(self, block_size: int) -> list[BlockHash]:
        extend(self.hashes, self.token_ids, block_size, self.root)
        return self.hashes

    def mark_launched(self, start: int, now: float) -> None:
        handed_over = self.is_handed_over and self.fetched_s is not None
        if self.first_step is None and (handed_over or start >= self.prompt_tokens):
            self.first_step, self.first_step_s = start, now

    def mark_started(self, launched: float, now: float) -> None:
        if self.first_scheduled_s == launched:
            self.first_scheduled_s = now
        if self.first_step_s == launched:
            self.first_step_s = now

    def mark_token(self, now: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now
        if (
            self.stepped_s is None
            and self.first_step is not None
            and len(self.token_ids) >= self.first_step + 2
        ):
            self.stepped_s = now

    def timing(self, now: float) -> Timing:
        """Return seconds per stage; 0 for a stage that never happened."""
        scheduled = now if self.first_scheduled_s is None else self.first_scheduled_s
        computed = now if self.first_token_s is None else self.first_token_s
        transfer = decode_queue = told = 0.0
        prefill = computed - scheduled
        if self.fetch_started_s is not None:
            fetched = now if self.fetched_s is None else self.fetched_s
            transfer = fetched - self.fetch_started_s
            prefill -= transfer
            if self.pull_from is None:
                decode_queue = self.fetch_started_s - self.arrival_s
            if self.is_handed_over:
                # Nothing was computed before it: all that follows is decoding.
                computed, prefill = fetched, 0.0
                decode_queue += 0.0 if self.first_step_s is None else self.first_step_s - fetched
                if self.stepped_s is not None and self.told_at_s is not None:
                    told = self.stepped_s - self.told_at_s
        return Timing(
            queue_s=scheduled - self.arrival_s,
            prefill_s=max(0.0, prefill),
            transfer_s=transfer,
            decode_s=now - computed,
            transfer_bytes=self.fetched_bytes,
            exposed_s=self.exposed_s,
            decode_queue_s=decode_queue,
            first_step_s=0.0
            if self.first_step_s is None
            else (self.stepped_s or now) - self.first_step_s,
            told_s=told,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a request to compute: `count` tokens from position `start` on."""

    request: Request
    start: int
    count: int
    samples: bool
    """The chunk ends at the newest token, so its logits decide the next."""
    proposals: tuple[int, ...] = ()
    """Tokens that may follow the newest one; the last ones of `count`."""
    scored: range = range(0)
    """Positions whose next prompt token's log-probability is asked for."""

    @property
    def sampled_rows(self) -> int:
        return 1 + len(self.proposals) if self.samples else 0

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids[self.start : self.start + self.count] + list(self.proposals)

    @classmethod
    def next_for(cls, request: Request, budget: int) -> Chunk:
        count = min(request.uncomputed, budget)
        start = request.num_computed
        scored = request.to_score(start, start + count)
        return cls(request, start, count, samples=count == request.uncomputed, scored=scored)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    targets: list[int]
    parts: list[tuple[Request, int]]
    most: int

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk]) -> ScoredRows | None:
        scored = [chunk for chunk in chunks if chunk.scored]
        if not scored:
            return None
        targets = [
            chunk.request.token_ids[position + 1] for chunk in scored for position in chunk.scored
        ]
        most = max(chunk.request.params.prompt_logprobs or 0 for chunk in scored)
        return cls(targets, [(chunk.request, len(chunk.scored)) for chunk in scored], most)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A read of remote block i into local block i; empty if the prefix cache held all."""

    request: Request
    remote_blocks: list[int]
    local_blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: list[Chunk]
    fetches: list[Fetch]
    offers: list[Request]
