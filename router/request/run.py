"""One request on our nodes: prefill request, hand-over, decode request, and what follows a failure.

The decode request begins with the prefill request's ticket, before the prompt is computed: its node
makes room and reads the KV meanwhile. The first token comes through whichever has it first.

A 4xx goes to the client and blames nobody. After a 429 the node rests, and another one gets the
request with the same ticket. A lost process is down until it answers a health check, and its
requests always move. Any other failure counts for the node's breaker, and is tried elsewhere while
the retry budget lasts, or if the client has a part of the answer.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvrelay.router.nodes.node import Lease, Node, kv_mismatch
from kvrelay.router.relay import Reply
from kvrelay.router.request.failures import Attempts, CrashRecord, RunContext
from kvrelay.router.request.job import Job, decode_body, prefill_body, prefix_of
from kvrelay.router.request.placer import ChosenNodes, PlacementLeases, PlacementQuery
from kvrelay.router.request.progress import AnswerProgress, Diverged, FramePosition
from kvrelay.router.timeline import Timeline
from kvrelay.router.transport.node_errors import AttemptFailed, Refused
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
from kvrelay.wire.transfer import SPILL_REFUSED, KvTransferParams

__all__ = ["ROOM_DEADLINE_S", "RequestRun", "Run"]

_log = logging.getLogger("kvrelay.router")

ROOM_DEADLINE_S = 30.0
"""Seconds that a failed attempt without output waits for room elsewhere."""
_POLL_S = 0.05
_RENEW_S = 1.0  # for nodes that do not tell
_RENEWALS_PER_LEASE = 4.0


@dataclass(eq=False)
class Run(abc.ABC):
    """A prompt on its way through nodes: ours, or vLLM's."""

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
    output_tokens: int = 0
    usage: tuple[int, int, int] = (0, 0, 0)
    """Prompt, generated and cached tokens."""
    nodes: dict[Role, str] = field(
        default_factory=lambda: {Role.PREFILL: "-", Role.DECODE: "-"}, init=False
    )

    def __post_init__(self) -> None:
        self._pool, self._prefix = self.context.pool, prefix_of(self.job)

    @abc.abstractmethod
    def wanted(self) -> PlacementQuery: ...

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

    @abc.abstractmethod
    async def _answer(self) -> None: ...


class RequestRun(Run):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.progress = AnswerProgress(self.job)
        self.kv_failed = False
        self._metrics = self.context.metrics
        self.unread: list[Lease] = []
        """Attempts that failed while their nodes read the request."""
        self._prefill_node: Node | None = None
        self._handover_counted = False
        self._kv_unused = False  # a decode node computes what the prefill node holds
        self._spills = True  # until a decode node has refused to compute the prompt
        self._prefills = Attempts(self.context, Role.PREFILL)
        self._prefilling: asyncio.Task[bool] | None = None
        self._early_decode: asyncio.Task[bool] | None = None

    def wanted(self) -> PlacementQuery:
        return self.context.placer.wanted(self.job, self._prefix)

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            # All are done; a failed one would keep this run until the collector comes.
            tasks = [each for each in (self._prefilling, self._early_decode) if each is not None]
            for task in tasks:
                task.cancel()
            for why in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(why, BaseException):
                    without_frames(why)
            self._prefilling = self._early_decode = None
            if self.placed is not None:
                self.context.placer.give_back(self.placed)
            self._release_kv()

    async def _answer(self) -> None:
        self.placed = self.placed or await self._place()
        while True:
            if self.placed.prefill is None:
                self._count_local(self.placed)
            elif await self._prefill_and_decode():
                return
            if await self._decode():
                return
            self.placed = await self._place()

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
                end = await Attempt(self, lease, FramePosition()).run(prefill_body(self.job))
                # After a first token from the decode request, that one ends the answer.
                return end is not FrameKind.HANDOVER and self.progress.ended
            except AttemptFailed as why:
                failure = without_frames(why)
                attempts.failed(lease.node, failure)
            except Refused as why:
                if self.progress.ended:  # by the decode request
                    return False
                if not self.context.note_if_full(lease, why) or time.monotonic() > until:
                    raise
                failure = without_frames(why)
            except PoisonRequest:
                if self.progress.ended:
                    return False
                raise
            finally:
                self._pool.give_back(lease)
            if self._early_decode is not None or self.progress.forwarded:
                # The decode node computes the prompt itself if it must.
                self._metrics.failovers.labels("prefill").inc()
                return False
            self.progress = AnswerProgress(self.job)
            if isinstance(failure, AttemptFailed):
                attempts.require_another(failure)
            self.context.placer.give_back(self.placed)
            try:
                self.placed = await self._place(patient=False)
            except (NoNode, Overloaded):
                raise attempts.failure(failure) from None
        self._count_local(self.placed)
        return False

    async def _decode(self) -> bool:
        # Runs decode requests, each from where the answer stands, until one ends it (True), or
        # refuses to compute a prompt (False).
        attempts = Attempts(self.context, Role.DECODE)
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
                again = "id=%s: the decode request on %s starts again: %s"
                _log.warning(again, self.job.id, lease.node.url, why)
            except AttemptFailed as why:
                failure, until = without_frames(why), time.monotonic() + ROOM_DEADLINE_S
                progressed = self.progress.output_tokens > known
                attempts.failed(lease.node, failure, progressed=progressed)
                attempts.require_another(failure, begun=self.progress.forwarded)
            except Refused as why:
                if why.body().code == SPILL_REFUSED and self.placed.placement.spills:
                    self._spills = False
                    return False
                if not self.context.note_if_full(lease, why) or (
                    time.monotonic() > until and not self.progress.output_tokens
                ):
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
        """Wait for a place for the rest of the answer, and keep its KV on `source` meanwhile.

        With `decode` only a decode node is placed. A begun answer goes where the least is lacking,
        and waits for a node that is up. Raises NoNode, Overloaded, KvNotLoaded.
        """
        placer, model, renew_at = self.context.placer, self._pool.base_of(self.job.model), 0.0
        until = time.monotonic() + ROOM_DEADLINE_S
        query, tokens = (
            placer.wanted(self.job, self._prefix, self._tokens(), source),
            self._tokens(),
        )
        placer.waiting[model] += 1
        try:
            while True:
                begun, found = self.progress.output_tokens > 0, None
                if tokens != self._tokens():  # looks the prefix up, which takes long
                    tokens = self._tokens()
                    query = placer.wanted(self.job, self._prefix, tokens, source)
                tried = [] if decode is None else decode.nodes()
                try:
                    found = placer.find(
                        query,
                        self._prefills.nodes(),
                        tried,
                        anyway=begun,
                        spills=self._spills,
                        alone=decode is not None,
                    )
                except NoNode:
                    if not begun or any(node.up for node in tried):
                        raise
                except Overloaded:
                    if not patient:
                        raise
                if isinstance(found, ChosenNodes):
                    return placer.take(found)
                now = time.monotonic()
                if now >= until and not begun:
                    limit = f"no node had room for the request within {ROOM_DEADLINE_S:g} s"
                    full = Overloaded(f"{limit}; try again later")
                    full.retry_after_s = math.ceil(ROOM_DEADLINE_S)
                    raise full
                if source is not None and now >= renew_at:
                    renew_at = now + self._renew_kv(source)
                await asyncio.sleep(_POLL_S)
        finally:
            placer.waiting[model] -= 1

    def _tokens(self) -> int:
        return self.prompt_tokens + self.progress.output_tokens if self.prompt_tokens else 0

    def _renew_kv(self, source: Node) -> float:
        # Returns seconds until the next renewal.
        if (held := self.progress.held) is not None:
            renewal = self.context.node_client.tell_of_kv(source, "renew", held)
            self.context.background.spawn(renewal)
        lease_s = source.kv.lease_s if source.kv is not None else 0.0
        return lease_s / _RENEWALS_PER_LEASE if lease_s else _RENEW_S

    def _release_kv(self) -> None:
        # A prefill node cut before it told of KV has ended the request itself.
        node, held = self._prefill_node, self.progress.held
        unfetched = self._kv_unused or not self.progress.settled
        if node is not None and held is not None and unfetched:
            self.context.background.spawn(self.context.release_kv(node, held))

    def _count_local(self, placed: PlacementLeases) -> None:
        self.timeline.local = True
        unlikes = (
            kv_mismatch(node.kv, placed.decode.node.kv)
            for node in self._pool.up(Role.PREFILL, model=self.job.model)
        )
        reason = "incompatible" if any(unlikes) else "no_prefill_node"
        self._metrics.local(self.job.model, "price" if placed.placement.spills else reason)

    def _decode_params(self, placed: PlacementLeases) -> KvTransferParams:
        request, placement = placed.wanted.request, placed.placement
        params = self.progress.decode_params()
        if params.remote_engine_id is not None and not self._can_fetch(placed.decode.node):
            params = self.progress.without_kv()
        left = min(request.output, request.most_output) - self.progress.output_tokens
        expected = max(1, round(left / max(self.job.choices, self.job.best_of)))
        params = msgspec.structs.replace(params, tpot_ms=request.tpot_ms, expected_output=expected)
        if not placement.spills:
            return params
        cached = request.cached.get(placement.decode, 0)
        return msgspec.structs.replace(params, spill=True, cached_tokens=cached)

    def _can_fetch(self, node: Node) -> bool:
        # Returns whether a decode node can take the held KV.
        assert self._prefill_node is not None
        if kv_mismatch(self._prefill_node.kv, node.kv) is None and not self.kv_failed:
            if not self._handover_counted:
                self._handover_counted = True
                self._metrics.handed_over(self.job.model)
            return True
        if not (self._kv_unused or self.kv_failed):
            self._metrics.local(self.job.model, "incompatible")
        self._kv_unused = True
        return False

    def on_ticket(self, params: KvTransferParams, frame: Frame, lease: Lease) -> None:
        """Begin the decode request: the prompt is tokenized, its cached part known."""
        self._metrics.cached(lease.cached_tokens, params.cached_tokens)
        if frame.blocks is not None:
            self._prefix = self._prefix.known(frame.blocks, params.num_tokens)
            self._pool.prefixes.learn(self._prefix)
        if self._early_decode is None:
            self._early_decode = asyncio.create_task(self._decode_early())

    def on_end(self, usage: tuple[int, int, int] | None) -> None:
        """Note the usage of a whole answer, and which nodes could not read the request."""
        if usage is not None:
            self.usage = usage
            self.prompt_tokens, output, self.cached_tokens = usage
            per_choice = output // max(1, self.job.choices)
            self.context.placer.answered(self.job.model, per_choice, self._prefix, usage[0])
        for lease in self.unread:
            self._pool.could_not_read(lease.node, time.monotonic())
        self.unread.clear()


class Attempt:
    """A prefill or decode request on one node; `source` has the KV that a decode node fetches."""

    __slots__ = ("_breaker", "_lease", "_position", "_run", "_source", "_tokens")

    def __init__(
        self, run: RequestRun, lease: Lease, position: FramePosition, source: Node | None = None
    ) -> None:
        self._run, self._lease, self._position, self._source = run, lease, position, source
        self._breaker = lease.node.breaker
        self._breaker.begin(self)
        self._tokens = 0  # frames that had some, up to 2
        run.timeline.sent = run.timeline.sent or time.monotonic()
        if position.decoding:
            run.timeline.stepped = None
        run.nodes[lease.role] = lease.node.url

    async def run(self, body: bytes) -> FrameKind:
        """Run the request to its last frame.

        Raises AttemptFailed, Refused, Diverged, PoisonRequest.
        """
        run, lease, context = self._run, self._lease, self._run.context
        try:
            end = await context.node_client.run(
                lease, run.job.path, body, run.headers, self.on_frame
            )
            if self._position.decoding and end is FrameKind.HANDOVER:
                raise AttemptFailed("the node handed a decode request over")
            self._breaker.succeeded(self)
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
            self._breaker.end(self)

    def on_frame(self, frame: Frame) -> Awaitable[None] | None:
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
                last = progress.ended and not run.job.part
                (reply.put_last if last else reply.put)(payload)
        if ids and self._tokens < 2:
            self._note_tokens(now)
        flow = reply.flow
        return flow.drain() if flow is not None and flow.write_paused else None

    def _note_tokens(self, now: float) -> None:
        run, timeline, first = self._run, self._run.timeline, self._tokens == 0
        self._tokens += 1
        if not self._position.decoding:
            timeline.prefilled = timeline.prefilled or now
        elif not first or self._source is None or self._position.at[0] > 1:
            timeline.stepped = timeline.stepped or now
        if not first:  # the first may be the prefill node's
            self._breaker.answered(self)
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
            run.prompt_tokens = params.prompt_tokens or run.prompt_tokens
            run.cached_tokens = params.cached_tokens
            if frame.kind is FrameKind.TICKET and not self._position.decoding:
                run.on_ticket(params, frame, self._lease)
        if frame.kind is not FrameKind.END:
            return frame.payload
        run.on_end(frame.usage)
        return timeline.with_stages(frame.payload, now) if run.job.wants_stages else frame.payload
