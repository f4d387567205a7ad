"""One request on its nodes: prefill request, hand-over, decode request, and what follows a failure.

The decode request begins with the prefill request's ticket, before the prompt is computed: its node
makes room and reads the KV meanwhile. The first token comes through whichever has it first.

A 4xx goes to the client and blames nobody. After a 429 the node rests, and another one gets the
request with the same ticket. A lost process is down until it answers a health check, and its
requests always move. Any other failure counts for the node's breaker, and is tried elsewhere while
the retry budget lasts, or if the client has a part of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kvrelay.router.background import cancel_and_wait
from kvrelay.router.nodes.node import Lease, Node, NodeKind, kv_mismatch
from kvrelay.router.placement import Placement
from kvrelay.router.relay import Reply
from kvrelay.router.request.failures import Attempts, CrashRecord, RunContext
from kvrelay.router.request.job import (
    Job,
    decode_body,
    is_undivided,
    prefill_body,
    prefix_of,
)
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery
from kvrelay.router.request.progress import AnswerProgress, Diverged, FramePosition
from kvrelay.router.timeline import Timeline
from kvrelay.router.transport.node_stream import AttemptFailed, Drain, Refused
from kvrelay.wire.config import Role
from kvrelay.wire.errors import (
    DeadlineExceeded,
    NodeFailed,
    NoNode,
    Overloaded,
    PoisonRequest,
    Unavailable,
    without_frames,
)
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.ladder import Found
from kvrelay.wire.transfer import SPILL_REFUSED, KvTransferParams

__all__ = ["ROOM_DEADLINE_S", "RequestRun"]

_log = logging.getLogger("kvrelay.router")

ROOM_DEADLINE_S = 30.0
"""Seconds that a failed attempt without output waits for room elsewhere."""
_POLL_S = 0.05


@dataclass(eq=False)
class RequestRun:
    """A prompt on its way through nodes."""

    job: Job
    headers: Mapping[str, str]
    timeline: Timeline
    context: RunContext
    crashes: CrashRecord
    reply: Reply
    placed: PlacementLeases | None = None
    """Where the request was placed last; admission may set it before `run`."""
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0
    rungs: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the prompt by rung (wire/ladder.py), once a node has told."""

    def __post_init__(self) -> None:
        self.nodes = {Role.PREFILL: "-", Role.DECODE: "-"}
        self.progress = AnswerProgress(self.job)
        self.kv_failed = False
        self.unread: list[Lease] = []
        """Attempts that failed while their nodes read the request."""
        self._pool, self._prefix = self.context.pool, prefix_of(self.job)
        self._prefill_node: Node | None = None
        self._handover_counted = False
        self._kv_unused = False  # a decode node computes what the prefill node holds
        self._spills = True  # until a decode node has refused to compute the prompt
        self._prefills = Attempts(self.context, Role.PREFILL)
        self._prefilling: asyncio.Task[bool] | None = None
        self._early_decode: asyncio.Task[bool] | None = None

    def wanted(self, source: Node | None = None, *, alone: bool = False) -> PlacementQuery:
        generated = self.progress.output_tokens // self.job.choices
        tokens = self.prompt_tokens + generated if self.prompt_tokens else 0
        return self.context.placer.wanted(self.job, self._prefix, tokens, source, alone=alone)

    async def run(self) -> None:
        """Answer the request into `reply`, once. Raises KvrelayError."""
        now, deadline_s = time.monotonic(), self.context.config.request_deadline_s
        try:
            async with asyncio.timeout(deadline_s - (now - self.timeline.arrived)):
                self.crashes.check()
                self.context.retries.add_request(now)
                await self._answer()
        except TimeoutError as why:
            raise DeadlineExceeded(
                f"the request did not finish within {deadline_s:g} s; ask for fewer tokens, or "
                f"raise request_deadline_s"
            ) from why
        finally:
            try:
                await cancel_and_wait(list(filter(None, (self._prefilling, self._early_decode))))
            finally:  # its client may leave now
                self._prefilling = self._early_decode = None  # a failed one would keep this run
                if self.placed is not None:
                    self.context.placer.give_back(self.placed)

    async def _answer(self) -> None:
        while True:
            self.placed = self.placed or await self._place()
            if self.placed.prefill is not None and await self._prefill_and_decode():
                return
            if await self._decode():
                return
            self.placed = None

    async def _prefill_and_decode(self) -> bool:
        # Returns whether the answer is complete.
        prefilling = self._prefilling = asyncio.create_task(self._prefill())
        await asyncio.wait([prefilling])
        early = self._early_decode
        if early is None:
            return prefilling.result()
        return (not prefilling.cancelled() and prefilling.result()) or await early

    async def _decode_early(self) -> bool:
        # Begins with the ticket; ends the prefill request when answered or refused.
        prefilling, failed = self._prefilling, False
        assert prefilling is not None
        try:
            return await self._decode()
        except (NodeFailed, Unavailable) as why:
            failed = not (isinstance(why, Refused | PoisonRequest) or prefilling.done())
            if not failed:
                raise
            return False  # the hand-over may find other nodes
        finally:
            if not failed:
                prefilling.cancel()

    async def _prefill(self) -> bool:
        # Returns whether the answer is complete.
        attempts, until = self._prefills, time.monotonic() + ROOM_DEADLINE_S
        assert self.placed is not None
        while (lease := self.placed.prefill) is not None:
            self._prefill_node, self.timeline.prefilled = lease.node, None
            failure: AttemptFailed | Refused
            try:
                body = prefill_body(self.job, self.context.placer.sources(self.placed))
                end = await Attempt(self, lease, FramePosition()).run(body)
                # After a first token from the decode request, that one ends the answer.
                return end is not FrameKind.HANDOVER and self.progress.ended
            except AttemptFailed as why:
                failure = without_frames(why)
                attempts.failed(lease.node, failure)
            except (Refused, PoisonRequest) as why:
                if self.progress.ended:  # by the decode request
                    return False
                if (
                    isinstance(why, PoisonRequest)
                    or not self.context.note_if_full(lease, why)
                    or time.monotonic() > until
                ):
                    raise
                failure = without_frames(why)
            finally:
                self._pool.give_back(lease)
            if self._early_decode is not None or self.progress.forwarded:
                # The decode node computes the prompt itself if it must.
                self.context.metrics.failovers.labels("prefill").inc()
                return False
            self.progress = AnswerProgress(self.job)
            if isinstance(failure, AttemptFailed):
                attempts.require_another(failure)
            self.context.placer.give_back(self.placed)
            try:
                self.placed = await self._place(patient=False)
            except (NoNode, Overloaded):
                raise attempts.failure(failure) from None
        return False

    async def _decode(self) -> bool:
        # Runs decode requests, each from where the answer stands, until one ends it (True), or
        # refuses to compute a prompt (False).
        attempts, foreign = Attempts(self.context, Role.DECODE), self.job.kind is NodeKind.VLLM
        until = time.monotonic() + ROOM_DEADLINE_S
        while True:
            assert self.placed is not None
            lease, known = self.placed.decode, self.progress.output_tokens
            failure: AttemptFailed | None = None
            try:
                if lease in lease.node.leases and lease.node.up:  # else it was released, or is gone
                    params = self._decode_params(self.placed)
                    source = None if params.remote_engine_id is None else self._prefill_node
                    place, body = FramePosition.behind(params), decode_body(self.job, params)
                    await Attempt(self, lease, place, source).run(body)
                    return True
            except Diverged as why:
                # Nobody's fault; the next request begins behind what the client has.
                _log.warning(
                    "id=%s: the request on %s starts again: %s", self.job.id, lease.node.url, why
                )
            except AttemptFailed as why:
                failure, until = without_frames(why), time.monotonic() + ROOM_DEADLINE_S
                if foreign and self.progress.forwarded:
                    raise NodeFailed(
                        "the decode node broke in the middle of the answer, which a vLLM node's "
                        f"answer cannot be continued after; send the request again ({why.message})"
                    ) from None
                # vLLM frees blocks after the first read without a fence: another reader could get
                # another request's KV.
                self.kv_failed |= foreign and (why.reached or not why.lost)
                progressed = self.progress.output_tokens > known
                attempts.failed(lease.node, failure, progressed=progressed)
                attempts.require_another(failure, begun=self.progress.forwarded)
            except Refused as why:
                if why.body().code == SPILL_REFUSED and self.placed.placement.spills:
                    self._spills = False
                    return False
                full = not foreign and self.context.note_if_full(lease, why)
                if not full or (time.monotonic() > until and not self.progress.output_tokens):
                    raise
            finally:
                self._pool.give_back(lease)
            # Without KV to fetch the next node computes the prompt.
            told = self.progress.decode_params().remote_engine_id is not None
            source = self._prefill_node if told and not self.kv_failed else None
            try:
                self.placed = await self._place(attempts, source)
            except (NoNode, Overloaded):
                if failure is None:
                    raise
                raise attempts.failure(failure) from None

    async def _place(
        self, decode: Attempts | None = None, source: Node | None = None, *, patient: bool = True
    ) -> PlacementLeases:
        """Wait for a place for the rest of the answer, whose KV `source` may have.

        With `decode` only a decode node is placed. A begun answer goes where the least is lacking,
        and waits for a node that is up. Raises NoNode, Overloaded, KvNotLoaded.
        """
        placer, model = self.context.placer, self._pool.base_of(self.job.model)
        until = time.monotonic() + ROOM_DEADLINE_S
        query = self.wanted(source, alone=decode is not None)
        placer.waiting[model] += 1
        try:
            while True:
                begun, found = self.progress.output_tokens > 0, None
                tried = [] if decode is None else decode.nodes()
                try:
                    query = replace(query, ignores_room=begun, spills=self._spills)
                    found = placer.find(query, self._prefills.nodes(), tried)
                except NoNode:
                    if not begun or any(node.up for node in tried):
                        raise
                except Overloaded:
                    if not patient:
                        raise
                if isinstance(found, Placement):
                    return placer.take(query, found)
                if time.monotonic() >= until and not begun:
                    full = Overloaded(
                        f"no node had room for the request within {ROOM_DEADLINE_S:g} s; try again "
                        "later"
                    )
                    full.retry_after_s = math.ceil(ROOM_DEADLINE_S)
                    raise full
                await asyncio.sleep(_POLL_S)
        finally:
            placer.waiting[model] -= 1

    def _decode_params(self, placed: PlacementLeases) -> KvTransferParams:
        request, progress, metrics = placed.wanted, self.progress, self.context.metrics
        params, source, model = progress.decode_params(), self._prefill_node, self.job.model
        if params.remote_engine_id is None:
            if not (progress.output_tokens or self.timeline.local):
                self.timeline.local = True
                metrics.local(model, self._why_local(placed))
        elif source is None or self.kv_failed or kv_mismatch(source.kv, placed.decode.node.kv):
            if not (self._kv_unused or self.kv_failed):
                metrics.local(model, "incompatible")
            params, self._kv_unused = progress.without_kv(), True
        elif not self._handover_counted:
            self._handover_counted = True
            metrics.disaggregated.labels(metrics.model_of(model)).inc()
        left = min(request.output, request.most_output) - progress.output_tokens
        params = msgspec.structs.replace(
            params,
            pin=self.job.pin,  # what the prefill node answers has none
            tpot_ms=request.tpot_ms,
            expected_output=max(1, round(left / self.job.choices)),
        )
        if placed.prefill is None:
            params.sources = self.context.placer.sources(placed)
        if placed.placement.spills:
            params.spill, params.cached_tokens = True, placed.placement.prompt[1]
        return params

    def _why_local(self, placed: PlacementLeases) -> str:
        if self.progress.told is not None:
            _log.warning(
                "prefill node %s hands no KV over; a vLLM node needs a NixlConnector",
                self.nodes[Role.PREFILL],
            )
            return "no_kv"
        if is_undivided(self.job):
            return "undivided"
        if placed.placement.spills:
            return "price"
        prefill = self._pool.up(Role.PREFILL, model=self.job.model)
        unlikes = (kv_mismatch(node.kv, placed.decode.node.kv) for node in prefill)
        return "incompatible" if any(unlikes) else "no_prefill_node"

    def on_ticket(self, node: Node, params: KvTransferParams, frame: Frame) -> None:
        """Begin the decode request: the prompt is tokenized, its cached part known."""
        if frame.blocks is not None:
            self._prefix = self._prefix.known(frame.blocks, params.num_tokens)
            self._pool.prefixes.learn(self._prefix, node.url)
        if self._early_decode is None:
            self._early_decode = asyncio.create_task(self._decode_early())

    def note_prompt(self, node: Node, found: Found | None) -> None:
        """Note what a node has found of the prompt; None: it does not say where."""
        if self.placed and self.prompt_tokens and found:
            rungs = self.context.placer.rungs
            self.rungs = rungs(self.placed, node, self._prefix, self.prompt_tokens, found)

    def on_end(self, node: Node, frame: Frame) -> None:
        """Note the usage of a whole answer, and which nodes could not read the request."""
        output = self.output_tokens
        self.written_tokens = frame.written
        if frame.usage is not None:
            self.prompt_tokens, output, self.cached_tokens = frame.usage
        told = self.prompt_tokens or 0
        self.context.placer.answered(self.job.model, output // self.job.choices)
        self._pool.prefixes.counted(self._prefix, told)
        if frame.blocks is not None:
            self._prefix = self._prefix.known(frame.blocks, told)
            self._pool.prefixes.answered(self._prefix, node.url)
        for lease in self.unread:
            self._pool.could_not_read(lease.node, time.monotonic())
        self.unread.clear()


@dataclass(eq=False, slots=True)
class Attempt:
    """A prefill or decode request on one node; `_source` has the KV that a decode node fetches."""

    _run: RequestRun
    _lease: Lease
    _position: FramePosition
    _source: Node | None = None
    _tokens: int = 0
    """Frames that had some, up to 2."""

    def __post_init__(self) -> None:
        run, lease = self._run, self._lease
        lease.node.breaker.begin(self)
        run.timeline.sent = run.timeline.sent or time.monotonic()
        if self._position.decoding:
            run.timeline.stepped = None
        run.nodes[lease.role] = lease.node.url

    async def run(self, body: bytes) -> FrameKind:
        """Run the request to its last frame.

        Raises AttemptFailed, Refused, Diverged, PoisonRequest.
        """
        run, lease, context = self._run, self._lease, self._run.context
        try:
            end = await context.node_client.run(
                lease, run.job.path, body, run.headers, self.on_frame, stream=run.job.stream
            )
            if self._position.decoding and end is FrameKind.HANDOVER:
                raise AttemptFailed("the node handed a decode request over")
            lease.node.breaker.succeeded(self)
            return end
        except AttemptFailed as why:
            context.note_failure(run.job.id, lease, self, why)
            if why.reading:
                run.unread.append(lease)
            if why.lost and why.reached and not self._tokens:
                await run.crashes.lost(lease)
            raise
        except Refused as why:
            if why.kv_error and self._source is not None:
                context.note_kv_failure(self._source, lease.node, why.kv_error)
            raise
        finally:
            lease.node.breaker.end(self)

    def on_frame(self, frame: Frame) -> Drain | None:
        """Pass a frame on; return what to wait for if the client does not read."""
        # For every token of every answer: each call in here is 1 % of what the router costs.
        run = self._run
        now, ids, payload = time.monotonic(), frame.token_ids, frame.payload
        if frame.kind is not FrameKind.TOKENS:
            payload = self._on_other_frame(frame, now)
        if frame.kv_error and self._source is not None:
            run.kv_failed = True
            run.context.note_kv_failure(self._source, self._lease.node, frame.kv_error)
        timeline, progress, reply = run.timeline, run.progress, run.reply
        if progress.take(frame, self._position):
            run.output_tokens = progress.output_tokens
            if ids:
                timeline.last_token = now
                if timeline.first_token is None:
                    timeline.first_token = now
            if payload:
                reply.put(payload, progress.ended and not run.job.part)
        if ids and self._tokens < 2:
            self._note_tokens(now)
        flow = reply.flow
        return flow.drain if flow is not None and flow.write_paused else None

    def _note_tokens(self, now: float) -> None:
        run, timeline, first = self._run, self._run.timeline, self._tokens == 0
        self._tokens += 1
        if not self._position.decoding:
            timeline.prefilled = timeline.prefilled or now
        elif not first or self._source is None or self._position.at[0] > 1:
            timeline.stepped = timeline.stepped or now
        if not first:  # the first may be the prefill node's
            self._lease.node.breaker.answered(self)
            return
        run.crashes.first_token.set()
        self._lease.answered()
        if self._source is not None and not run.kv_failed:
            run.context.pool.kv_came(self._source, self._lease.node)

    def _on_other_frame(self, frame: Frame, now: float) -> bytes:
        run, timeline, params = self._run, self._run.timeline, frame.params
        if frame.timing is not None:
            timeline.note_report(frame.timing, decoding=self._position.decoding)
        if params is not None:
            told = frame.usage[0] if frame.usage is not None else params.prompt_tokens
            run.prompt_tokens = told or run.prompt_tokens
            run.cached_tokens = params.cached_tokens
            if not self._position.decoding:
                if frame.kind is FrameKind.TICKET:
                    run.on_ticket(self._lease.node, params, frame)
                else:
                    timeline.prefilled = timeline.prefilled or now
                run.note_prompt(self._lease.node, frame.found)
        if frame.kind is not FrameKind.END:
            return frame.payload
        run.on_end(self._lease.node, frame)
        run.note_prompt(self._lease.node, frame.found)
        if run.job.wants_stages:
            return timeline.with_stages(frame.payload, now, run.rungs)
        return frame.payload
