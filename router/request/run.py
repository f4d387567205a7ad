"""One request on our nodes: prefill request, hand-over, decode request, and what follows a failure.

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
from collections.abc import Mapping, Sequence

import msgspec

from kvrelay.router.background import cancel_and_wait
from kvrelay.router.client_connection import Reply
from kvrelay.router.nodes.node import Lease, Node, kv_mismatch
from kvrelay.router.request.attempt import Attempt
from kvrelay.router.request.job import Job, decode_body, prefill_body, prefix_of
from kvrelay.router.request.placer import ChosenNodes, PlacementLeases, PlacementQuery
from kvrelay.router.request.poison import CrashRecord
from kvrelay.router.request.progress import AnswerProgress, Diverged, FramePosition
from kvrelay.router.request.retries import Attempts, RunContext
from kvrelay.router.request.timeline import Timeline
from kvrelay.router.transport.node_errors import AttemptFailed, Refused
from kvrelay.wire.config import Role
from kvrelay.wire.errors import (
    DeadlineExceeded,
    KvrelayError,
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
"""Seconds that a failed attempt waits for room elsewhere while the client has nothing."""
_POLL_S = 0.05
_RENEW_S = 1.0  # where a node does not tell how long its leases are
_RENEWALS_PER_LEASE = 4.0


class Run:
    """A request on its way through nodes: ours, or vLLM's."""

    parts: Sequence[Run] = ()
    """Prompts with their transfers; none where nodes tell nothing of these."""
    prompt_tokens: int | None = None
    """Tokens of all prompts, once nodes have told."""
    output_tokens: int = 0
    """Tokens of all choices so far."""
    cached_tokens: int = 0
    """Tokens of the prompt that its node had cached, once it has told."""
    nodes: tuple[str, str] = ("-", "-")
    """URLs of the last prefill and decode node."""
    placement: str = "-"
    """Where the request was placed last, and at what price."""

    def __init__(
        self,
        job: Job,
        headers: Mapping[str, str],
        timeline: Timeline,
        context: RunContext,
        crashes: CrashRecord,
        reply: Reply | None = None,
    ) -> None:
        """`crashes` and `headers` are those of the client's request, which may have more prompts."""
        self.job, self.headers, self.timeline = job, headers, timeline
        self.context, self.crashes = context, crashes
        self.reply = reply or Reply()
        self.placed: PlacementLeases | None = None
        """Where the request was placed last; admission may set it before `run`."""

    @property
    def answers(self) -> int:
        return self.job.choices

    def wanted(self) -> PlacementQuery:
        raise NotImplementedError

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

    async def _answer(self) -> None:
        raise NotImplementedError


class RequestRun(Run):
    """A prompt on its way through two of our nodes."""

    def __init__(
        self,
        job: Job,
        headers: Mapping[str, str],
        timeline: Timeline,
        context: RunContext,
        crashes: CrashRecord,
        reply: Reply | None = None,
    ) -> None:
        super().__init__(job, headers, timeline, context, crashes, reply)
        self.progress = AnswerProgress(job)
        self.prefill_node: Node | None = None
        self.decode_node: Node | None = None
        self.usage = (0, 0, 0)
        self.kv_failed = False
        """A decode node could not get the KV."""
        self.unread: list[Lease] = []
        """Attempts that failed while their nodes read the request."""
        self.prefix = prefix_of(job)
        self._pool, self._metrics = context.pool, context.metrics
        self._handover_counted = False
        self._kv_unused = False  # a decode node computes what the prefill node holds
        self._spills = True  # until a decode node has refused to compute the prompt
        self._prefills = Attempts(context, Role.PREFILL)
        self._prefilling: asyncio.Task[bool] | None = None
        self._early_decode: asyncio.Task[bool] | None = None

    def wanted(self) -> PlacementQuery:
        return self.context.placer.wanted(self.job, self.prefix)

    @property
    def prompt_tokens(self) -> int | None:  # type: ignore[override]
        told = self.progress.told
        return self.usage[0] or (told.answer().prompt_tokens or None if told else None)

    @property
    def output_tokens(self) -> int:  # type: ignore[override]
        return self.progress.output_tokens

    @property
    def cached_tokens(self) -> int:  # type: ignore[override]
        if self.usage[0] or self.progress.told is None:
            return self.usage[2]
        return self.progress.told.cached_tokens

    @property
    def placement(self) -> str:  # type: ignore[override]
        return "-" if self.placed is None else str(self.placed.placement)

    @property
    def parts(self) -> Sequence[Run]:  # type: ignore[override]
        return (self,)

    @property
    def nodes(self) -> tuple[str, str]:  # type: ignore[override]
        prefill, decode = self.prefill_node, self.decode_node
        return prefill.url if prefill else "-", decode.url if decode else "-"

    @property
    def is_prefilling(self) -> bool:
        return self._prefilling is not None and not self._prefilling.done()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            # All are done; a failed one would keep this run until the collector comes.
            await cancel_and_wait([each for each in (self._prefilling, self._early_decode) if each])
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
        # Returns whether the answer is complete; else a decode request must follow.
        prefilling = self._prefilling = asyncio.create_task(self._prefill())
        await asyncio.wait([prefilling])
        early = self._early_decode
        if early is None:
            return prefilling.result()
        return (not prefilling.cancelled() and prefilling.result()) or await early

    async def _decode_early(self) -> bool:
        # Begins with the ticket. Ends the prefill request when it has answered or was refused.
        prefilling, failed = self._prefilling, False
        assert prefilling is not None
        try:
            return await self._decode()
        except (NodeFailed, Unavailable) as why:
            failed = not (isinstance(why, Refused | PoisonRequest) or prefilling.done())
            if not failed:
                raise
            return False  # the hand-over may find nodes that the ticket has not found
        finally:
            if not failed:
                prefilling.cancel()

    async def _prefill(self) -> bool:
        try:
            return await self._attempt_prefill()
        except KvrelayError:
            if self.progress.ended:  # by the decode request
                return False
            raise

    async def _attempt_prefill(self) -> bool:
        # Returns whether the answer is complete.
        attempts, until = self._prefills, time.monotonic() + ROOM_DEADLINE_S
        assert self.placed is not None
        while (lease := self.placed.prefill) is not None:
            self.prefill_node, self.timeline.prefilled = lease.node, None
            failure: AttemptFailed | Refused
            try:
                end = await Attempt(self, lease, FramePosition()).run(prefill_body(self.job))
                # Behind a first token of the decode request, that one tells the end of the answer.
                return end is not FrameKind.HANDOVER and self.progress.ended
            except AttemptFailed as why:
                failure = without_frames(why)
                attempts.failed(lease.node, failure)
            except Refused as why:
                if not self.context.note_if_full(lease, why) or time.monotonic() > until:
                    raise
                failure = without_frames(why)
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
        # Runs decode requests, each from where the answer stands, until one ends it (True), or does
        # not want to compute a prompt for prefill nodes (False).
        attempts = Attempts(self.context, Role.DECODE)
        until = time.monotonic() + ROOM_DEADLINE_S
        while True:
            assert self.placed is not None
            lease, known = self.placed.decode, self.progress.output_tokens
            failure: AttemptFailed | None = None
            try:
                if lease in lease.node.leases and lease.node.up:  # else it was released, or is gone
                    await self._attempt_decode(self.placed)
                    return True
            except Diverged as why:
                # Nobody's fault; the next request begins behind what the client has.
                _log.warning(
                    "id=%s: the decode request on %s starts again: %s",
                    self.job.id,
                    lease.node.url,
                    why,
                )
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
            # Where the KV can be fetched, if there is any; else the next node computes the prompt.
            told = self.progress.decode_params().remote_engine_id is not None
            source = self.prefill_node if told and not self.kv_failed else None
            try:
                self.placed = await self._place(attempts, source)
            except (NoNode, Overloaded):
                if failure is None:
                    raise
                raise attempts.failure(failure) from None

    async def _attempt_decode(self, placed: PlacementLeases) -> None:
        lease = placed.decode
        self.decode_node = lease.node
        params = self._decode_params(placed)
        source = None if params.remote_engine_id is None else self.prefill_node
        body = decode_body(self.job, params)
        await Attempt(self, lease, FramePosition.behind(params), source).run(body)

    async def _place(
        self, decode: Attempts | None = None, source: Node | None = None, *, patient: bool = True
    ) -> PlacementLeases:
        """Wait for a place for the rest of the answer, and keep its KV on `source` meanwhile.

        With `decode` only a decode node is placed. A begun answer goes where the least is lacking,
        and waits for a node that is up. Raises NoNode, Overloaded, KvNotLoaded.
        """
        placer, model, renew_at = self.context.placer, self._pool.base_of(self.job.model), 0.0
        until = time.monotonic() + ROOM_DEADLINE_S
        placer.waiting[model] += 1
        try:
            while True:
                prompt, output, found = self.prompt_tokens, self.progress.output_tokens, None
                tokens = prompt + output if prompt else 0
                query = placer.wanted(self.job, self.prefix, tokens, source)
                begun = output > 0
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
                    raise _no_room()
                if source is not None and now >= renew_at:
                    renew_at = now + self._renew_kv(source)
                await asyncio.sleep(_POLL_S)
        finally:
            placer.waiting[model] -= 1

    def _renew_kv(self, source: Node) -> float:
        # Returns the seconds until the lease must be renewed again.
        if (held := self.progress.held) is not None:
            renewal = self.context.node_client.tell_of_kv(source, "renew", held)
            self.context.background.spawn(renewal)
        lease_s = source.kv.lease_s if source.kv is not None else 0.0
        return lease_s / _RENEWALS_PER_LEASE if lease_s else _RENEW_S

    def _release_kv(self) -> None:
        # A prefill node that was cut before it told of any KV has ended the request itself.
        node, held = self.prefill_node, self.progress.held
        unfetched = self._kv_unused or not self.progress.settled
        if node is not None and held is not None and unfetched:
            self.context.background.spawn(self.context.release_kv(node, held))

    def _count_local(self, placed: PlacementLeases) -> None:
        self.timeline.local = True
        none_fits = self._pool.kv_mixed and self._pool.up(Role.PREFILL, model=self.job.model)
        reason = "incompatible" if none_fits else "no_prefill_node"
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
        # Whether a decode node can take the KV that is held for it; else it computes the prompt.
        assert self.prefill_node is not None
        if kv_mismatch(self.prefill_node.kv, node.kv) is None and not self.kv_failed:
            if not self._handover_counted:
                self._handover_counted = True
                self._metrics.handed_over(self.job.model)
            return True
        if not (self._kv_unused or self.kv_failed):
            self._metrics.local(self.job.model, "incompatible")
        self._kv_unused = True
        return False

    def on_ticket(self, frame: Frame, lease: Lease) -> None:
        """Begin the decode request: the prompt is tokenized, and its cached part is known."""
        if frame.params is not None:
            self._metrics.cached(lease.cached_tokens, frame.params.cached_tokens)
            if frame.blocks is not None:
                self.prefix = self.prefix.known(frame.blocks, frame.params.num_tokens)
                self._pool.prefixes.learn(self.prefix)
        if self._early_decode is None:
            self._early_decode = asyncio.create_task(self._decode_early())

    def on_end(self, frame: Frame, now: float) -> bytes:
        """Note the usage of a whole answer, and return its bytes for the client."""
        if frame.usage is not None:
            self.usage = prompt, output, _ = frame.usage
            per_choice = output // max(1, self.job.choices)
            self.context.placer.answered(self.job.model, per_choice, self.prefix, prompt)
        for other in self.unread:  # the node that answered could read the request
            self.context.node_health.could_not_read(other.node, other.role, now)
        self.unread.clear()
        return (
            self.timeline.with_stages(frame.payload, now)
            if self.job.wants_stages
            else frame.payload
        )


def _no_room() -> Overloaded:
    full = Overloaded(
        f"no node had room for the request within {ROOM_DEADLINE_S:g} s; try again later"
    )
    full.retry_after_s = math.ceil(ROOM_DEADLINE_S)  # as long as those before it have waited
    return full
