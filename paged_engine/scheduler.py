"""Continuous batching: which requests run next, how many of their tokens, in which blocks.

Pure Python; `now` is an argument. Decodes come first; wire/step_costs.py says what fits beside
them. A step may be scheduled while the previous one's tokens are *pending*. A request without a
block for its next token preempts the last in order. No block has two writers, and none that a
transfer may touch is given away.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from kvrelay.paged_engine.blocks import BlockPool, KeptBlocks
from kvrelay.paged_engine.request import Chunk, Fetch, Request, State, StepPlan
from kvrelay.paged_engine.speculation import Speculation
from kvrelay.paged_engine.waiting import WaitingQueue
from kvrelay.wire.announced import Announced
from kvrelay.wire.outputs import Finish, Load
from kvrelay.wire.step_costs import StepBudget, StepRoom
from kvrelay.wire.transfer import Ticket

__all__ = ["Scheduler"]


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
    ) -> None:
        self.pool = pool
        self._block_size = block_size
        self.budget = StepBudget(max_num_batched_tokens, block_size)
        """Replaced by measure_steps."""
        self._max_num_seqs = max_num_seqs
        self._eos, self._max_model_len = frozenset(eos_token_ids), max_model_len
        self._prefix_cache = prefix_cache
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(self._requests, block_size)
        self._running: list[Request] = []
        self._fetching: dict[str, Request] = {}
        self.kept = KeptBlocks(pool)
        self._announced = Announced()
        self.legs = 1
        self.pull_prices: dict[str, Any] = {}  # fields of Load
        self.speculation = speculation or Speculation()
        self.preemptions = 0
        self.kept_blocks = 0
        """Blocks of failed fetches that need not be computed again."""

    def reset_prefix_cache(self) -> None:
        """Let no later request find a block whose KV derives from what is there now."""
        self.pool.reset()
        for request in self._requests.values():
            request.unfindable = True

    def add(self, request: Request) -> None:
        if request.request_id in self._requests or self.kept.held(request.request_id) is not None:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._requests[request.request_id] = request
        wants = (0.0, 0)
        if not request.hold and request.params.max_tokens > 1:
            wanted = request.tpot_ms, request.expected_output, request.params.max_tokens
            wants = self._announced.came(*wanted, self.budget.costs)
        request.tpot_ms, request.expected_output = wants
        self._wait(request)
        if request.fetch is None:
            pairs = request.work * (request.shared + request.work / 2)
            self._announced.prompt(self._prompts_ms(request.work, pairs), spills=request.spill)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def abort(self, request_id: str) -> Request | None:
        """End a live request; blocks of a running fetch stay untouchable until settled."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, Finish.ABORT)
        return request

    def cached_tokens(self, request: Request) -> int:
        """Return how many of a request's tokens need not be computed now."""
        return len(self._cached_prefix(request, len(request.token_ids) - 1)) * self._block_size

    def end_ask(self, request: Request, ticket: Ticket | None) -> None:
        """Let a request go on that has asked for KV, with a ticket for a part of its prompt."""
        self._waiting.remove(request)
        request.asking, request.fetch = False, ticket
        self._wait(request)

    def finish_fetch(self, request_id: str, generated: Sequence[int] = ()) -> None:
        """Run a request whose KV has arrived, with tokens from where it was computed."""
        request = self._fetching.pop(request_id)
        assert request.fetch is not None
        if not request.output_tokens:
            request.token_ids += generated
            request.new_tokens += generated
        # Without a first token the last prompt token is computed again.
        request.num_computed = min(request.fetch.num_tokens, len(request.token_ids) - 1)
        self._count_pulled(request)
        request.fetch = None
        request.state = State.RUNNING
        self._running.append(request)
        self._publish(request)
        if generated and (over := self._end_after(request)) is not None:
            self._end(request, over)

    def fail_fetch(self, request_id: str, reason: str, verified: int = 0) -> None:
        """Compute a request here whose KV will not come, in other blocks.

        The first `verified` of the fetched blocks are right.
        """
        request = self._requests[request_id]
        fetch, request.fetch = request.fetch, None
        if request.pull_from is None:
            request.fetch_error = reason
        if request_id in self._fetching:
            assert fetch is not None
            self._keep_verified(self._fetching.pop(request_id), fetch.num_tokens, verified)
        elif request.state is State.WAITING:
            self._waiting.remove(request)
            self._wait(request)

    def end_failed_fetch(self, request_id: str, reason: str) -> None:
        """End a fetching request without KV; its blocks stay untouchable until settled."""
        request = self._requests[request_id]
        request.fetch_error = reason
        self._end(request, Finish.ERROR)

    def _keep_verified(self, request: Request, fetched: int, verified: int) -> None:
        known, cached = len(request.token_ids), request.num_published
        kept = min(cached + verified, min(fetched, known - 1) // self._block_size)
        self._quarantine(request, kept)
        if kept > cached:
            self.kept_blocks += kept - cached
            request.num_computed = kept * self._block_size
            self._count_pulled(request)
            self._publish(request)
        if kept and self._blocks_for(known) - kept <= self.pool.free:
            request.state = State.RUNNING
            self._running.append(request)
            return
        self._drop_blocks(request)
        self._wait(request)

    def _count_pulled(self, request: Request) -> None:
        if request.pull_from is not None:
            cached = request.cached_tokens or 0
            request.pulled_tokens = pulled = request.num_computed - cached
            request.cached_tokens = request.num_computed
            if (costs := self.budget.costs) is not None:  # what came takes no time of steps
                self._announced.prompt(-costs.chunk_ms(pulled, cached), spills=request.spill)

    def _wait(self, request: Request) -> None:
        cached = 0
        if request.fetch is None:
            cached = self.cached_tokens(request)
        elif request.pull_from is not None:
            cached = request.fetch.num_tokens
        self._waiting.add(request, cached)

    def schedule(self, now: float) -> StepPlan:
        plan = StepPlan([], [], [])
        preemptions = self.preemptions
        decodes = [request for request in self._running if request.uncomputed <= 1]
        prompts = sorted(
            (each for each in self._running if each.uncomputed > 1), key=lambda each: each.turn
        )
        for request in decodes:
            self._schedule_running(request, plan, None)
        room = self.budget.room(len(plan.chunks), sum(chunk.start for chunk in plan.chunks))
        for request in prompts:
            # One whose turn comes before goes first.
            if self.preemptions == preemptions:
                self._admit(plan, room, now, before=request)
            if room.is_open:
                self._schedule_running(request, plan, room)
        if self.preemptions != preemptions:
            return plan
        self._admit(plan, room, now)
        if not self.speculation.tokens:
            return plan
        left = min(
            self.budget.tokens - sum(c.count for c in plan.chunks),
            self._max_num_seqs - len(plan.chunks),
        )
        chunks = self.speculation.with_proposals(
            plan.chunks, max(0, left), self._max_model_len, self._room_for
        )
        return StepPlan(chunks, plan.fetches, plan.offers)

    def _schedule_running(self, request: Request, plan: StepPlan, room: StepRoom | None) -> None:
        if request.state is not State.RUNNING or self._waits_for_tokens(request):
            return
        tokens = 1 if room is None else room.take(request.uncomputed, request.num_computed)
        if not tokens:
            return
        chunk = Chunk.next_for(request, tokens)
        while not self._take(plan, chunk):
            # Blocks of a request whose last token is pending are free or held soon.
            going_on = [r for r in self._running if not (r.offered or self._waits_for_tokens(r))]
            victim = max(going_on, key=lambda r: r.turn, default=None)
            if victim is None:
                return
            self._preempt(victim)
            plan.chunks[:] = [each for each in plan.chunks if each.request is not victim]
            if victim is request:
                return

    def _take(self, plan: StepPlan, chunk: Chunk) -> bool:
        request = chunk.request
        # What is offered has all its blocks.
        end = len(request.token_ids) if request.hold else chunk.start + chunk.count
        if not self._grow(request, end):
            return False
        if request.hold and not request.offered:
            request.offered = True
            plan.offers.append(request)
        plan.chunks.append(chunk)
        return True

    def _room_for(self, request: Request, tokens: int) -> int:
        if self._grow(request, tokens):
            return tokens
        return min(tokens, len(request.blocks) * self._block_size)

    @property
    def needs_tokens(self) -> bool:
        return self.speculation.needs_tokens(self._running, self._max_num_seqs)

    def _admit(
        self, plan: StepPlan, room: StepRoom, now: float, before: Request | None = None
    ) -> None:
        for request in self._waiting.candidates(before):
            if len(self._running) + len(self._fetching) >= self._max_num_seqs:
                break
            if request.fetch is not None:
                fetch = self._start_fetch(request)
                if fetch is None:
                    break
                request.first_scheduled_s = request.fetch_started_s = now
                plan.fetches.append(fetch)
                continue
            if not room.is_open or not self._start(request):
                break
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now
            chunk = Chunk.next_for(request, room.take(request.uncomputed, request.num_computed))
            taken = self._take(plan, chunk)
            assert taken, "admission checked that the whole request fits"

    def _start(self, request: Request) -> bool:
        if request.num_pending:
            return False
        shared = self._cached_prefix(request, len(request.token_ids) - 1)
        needed = self._blocks_for(len(request.token_ids)) - len(shared)
        if needed > self.pool.free_after(shared):
            return False
        self._waiting.remove(request)
        self.pool.share(shared, used=True)
        request.blocks = shared
        request.num_computed = len(shared) * self._block_size
        request.num_published = len(shared)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
        request.state = State.RUNNING
        self._running.append(request)
        return True

    def _start_fetch(self, request: Request) -> Fetch | None:
        ticket = request.fetch
        assert ticket is not None
        first, tokens, pulls = 0, ticket.num_tokens, request.pull_from is not None
        if request.pull_from is not None:  # all else of the prompt is computed behind it
            first, tokens = request.pull_from, len(request.token_ids)
        shared = self._cached_prefix(request, tokens - pulls)
        needed = self._blocks_for(tokens) - len(shared)
        # With room for the next token: else it is preempted at once.
        room = min(self._blocks_for(tokens + 1), self.pool.total) - len(shared)
        if room > self.pool.free_after(shared):
            return None
        self._waiting.remove(request)
        self.pool.share(shared, used=True)
        fresh = self.pool.allocate(needed)
        assert fresh is not None
        request.blocks = [*shared, *fresh]
        request.num_published = len(shared)
        request.cached_tokens = len(shared) * self._block_size
        request.state = State.FETCHING
        self._fetching[request.request_id] = request
        # A block before the first one may have been evicted meanwhile.
        missing = first > len(shared)
        remote = [] if missing else ticket.blocks[len(shared) - first :]
        if pulls:
            reached = (len(shared) + len(remote)) * self._block_size
            request.fetch = msgspec.structs.replace(ticket, num_tokens=reached)
        return Fetch(request, remote, fresh[: len(remote)])

    def _cached_prefix(self, request: Request, tokens: int) -> list[int]:
        if not self._prefix_cache:
            return []
        if request.to_score(0, tokens):  # what is not computed has no logits
            tokens = request.num_scored
        return self.pool.lookup(
            request.block_hashes(self._block_size)[: tokens // self._block_size]
        )

    def _grow(self, request: Request, tokens: int) -> bool:
        fresh = self.pool.allocate(max(0, self._blocks_for(tokens) - len(request.blocks)))
        if fresh is None:
            return False
        request.blocks += fresh
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._drop_blocks(request)
        request.pinned_tokens = 0
        self._wait(request)
        self.preemptions += 1

    def mark_launched(self, chunk: Chunk) -> None:
        """Note that a chunk's KV will be written before a later step reads it."""
        request = chunk.request
        request.num_computed = chunk.start + chunk.count - len(chunk.proposals)
        request.num_pending += chunk.samples
        request.proposals = chunk.proposals
        if chunk.scored:
            request.num_scored = chunk.scored.stop
        self._publish(request)

    def append_sampled(self, request: Request, drawn: Sequence[int], now: float) -> int:
        """Add tokens drawn at a chunk's rows as far as proposals agree; return how many."""
        known = len(request.token_ids)
        taken = self.speculation.accept(request, drawn) if request.proposals else drawn
        for count, token_id in enumerate(taken):
            if count:
                request.num_pending += 1
                # The KV of the proposal that came true is there.
                if request.state is State.RUNNING:
                    request.num_computed += 1
                    self._publish(request)
            if self.append(request, token_id, now) is not None:
                break
        return len(request.token_ids) - known

    def append(self, request: Request, token_id: int, now: float) -> Finish | None:
        """Add a pending token; if it ends the request, free or hold its blocks.

        One that has ended meanwhile takes no token.
        """
        request.num_pending -= 1
        if request.finish is not None:
            return request.finish
        guide, over = request.guide, None
        if guide is not None and guide.spent:
            over = Finish.STOP if guide.error is None else Finish.ERROR
        else:
            request.token_ids.append(token_id)
            request.new_tokens.append(token_id)
            request.mark_token(now)
            over = self._end_after(request)
        if over is not None:
            self._end(request, over)
        return request.finish

    def _end_after(self, request: Request) -> Finish | None:
        params, token_id, guide = request.params, request.token_ids[-1], request.guide
        if guide is not None:
            guide.follow(request.token_ids, request.prompt_tokens)
            if guide.error is not None:
                return Finish.ERROR
            if guide.over:
                return Finish.STOP
        if token_id in params.stop_token_ids or (token_id in self._eos and not params.ignore_eos):
            return Finish.STOP
        return Finish.LENGTH if self._is_last(request, 0) else None

    def _is_last(self, request: Request, pending: int) -> bool:
        return (
            request.output_tokens + pending >= request.params.max_tokens
            or len(request.token_ids) + pending >= self._max_model_len
        )

    def _waits_for_tokens(self, request: Request) -> bool:
        pending = request.num_pending
        return bool(request.proposals) or (pending > 0 and self._is_last(request, pending))

    def _end(self, request: Request, why: Finish) -> None:
        if request.state is State.RUNNING:
            self._running.remove(request)
        elif request.state is State.WAITING:
            self._waiting.remove(request)
        request.finish = why
        del self._requests[request.request_id]
        if request.tpot_ms:
            complete = why in (Finish.STOP, Finish.LENGTH)
            wanted = request.tpot_ms, request.expected_output
            self._announced.left(*wanted, request.output_tokens, complete=complete)
        if request.request_id in self._fetching:
            self._quarantine(self._fetching.pop(request.request_id))
        elif request.hold and (
            why is Finish.LENGTH or (why is Finish.STOP and request.hold_stopped)
        ):
            self.kept.hold(request.request_id, request.blocks)
            request.blocks = []
        else:
            self._drop_blocks(request)
        request.state = State.DONE

    def _quarantine(self, request: Request, kept: int = 0) -> None:
        shared = max(0, request.num_published - kept)
        self.kept.quarantine(request.request_id, request.blocks[kept:], shared)
        request.blocks = request.blocks[:kept]
        request.num_published = min(kept, request.num_published)
        request.num_computed = request.num_published * self._block_size

    def _drop_blocks(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.num_published, request.num_computed = [], 0, 0

    def _publish(self, request: Request) -> None:
        full = min(request.num_computed, len(request.token_ids)) // self._block_size
        if self._prefix_cache and not request.unfindable and full > request.num_published:
            hashes = request.block_hashes(self._block_size)
            for index in range(request.num_published, full):
                self.pool.publish(request.blocks[index], hashes[index])
        request.num_published = max(request.num_published, full)
        request.pin_blocks(self.pool, self._block_size)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def load(self, now: float, launched: Iterable[Chunk] = (), for_s: float = 0.0) -> Load:
        """Return queue depth and room for routers; `launched` began `for_s` seconds ago."""
        waiting = self._waiting
        tokens, pairs, promised = waiting.tokens, waiting.pairs, waiting.wanted
        context, tokens_now, pairs_now = 0, 0, 0.0
        # Inlined: a call per request would double the time.
        for request in self._running:
            start = request.num_computed
            context += start
            left = len(request.token_ids) + request.num_pending - start
            if left > 1:
                tokens, pairs = tokens + left, pairs + left * (start + left / 2)
        for chunk in launched:
            if chunk.count > 1 + len(chunk.proposals):
                tokens_now += chunk.count
                pairs_now += chunk.count * (chunk.start + chunk.count / 2)
        block_size = self._block_size
        for request in itertools.chain(self._running, self._fetching.values()):
            lacks = (
                request.prompt_tokens + request.expected_output - len(request.blocks) * block_size
            )
            if lacks > 0:
                promised += lacks
        done_ms = min(for_s * 1e3, self._prompts_ms(tokens_now, pairs_now))
        tokens, pairs = tokens + tokens_now, pairs + pairs_now
        backlog_ms, sums = self._prompts_ms(tokens, pairs) - done_ms, self._announced
        sums.go_on(now * 1e3, self.budget.costs, len(self._running), context)
        return Load(
            running=len(self._running) + len(self._fetching),
            waiting=len(self._waiting),
            waiting_tokens=tokens,
            free_blocks=self.pool.free,
            total_blocks=self.pool.total,
            block_size=block_size,
            context_tokens=context,
            legs=self.legs,
            pace=self.budget.pace,
            backlog_ms=backlog_ms,
            token_rate=sums.token_rate,
            prompt_share=sums.prompt_share,
            row_weight=sums.row_weight,
            strictest_tpot_ms=sums.strictest_tpot_ms,
            spill_ms=max(0.0, sums.spill_ms),
            promised_tokens=promised,
            max_num_seqs=self._max_num_seqs,
            **self.pull_prices,
        )

    def _prompts_ms(self, tokens: int, pairs: float) -> float:
        return 0.0 if self.budget.costs is None else self.budget.costs.prompts_ms(tokens, pairs)

    @property
    def live(self) -> Collection[Request]:
        return self._requests.values()
