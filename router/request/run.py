"""The walk of one request: prefill leg, hand-over, decode leg; what to do when one breaks; giving
back what it took.

The decode leg begins with the prefill leg's ticket, before the prompt is computed: its node makes
room, and reads what is computed while the rest is. The first token comes through whichever leg has
it first. A prompt that is better computed where its answer is, or can be nowhere else, has a decode
leg alone.

How a leg can end. A 4xx goes to the client and blames nobody; a 429 is a node without room: it
rests, and another takes the leg, from the same ticket. A process that is lost (router/transport/node_client.py)
is down until it answers a health check. All else is told to the node's breaker
(router/nodes/health.py). What broke is tried on other nodes: what a lost process had always, all
else as long as the retry budget allows, or the client has a part of the answer.

Knows frames and nodes, not HTTP servers: bytes for the client go to a Reply.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Mapping

import msgspec

from kvrelay.router.background import cancel_and_wait
from kvrelay.router.client_connection import Reply
from kvrelay.router.nodes.kv_match import kv_mismatch
from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.request.deaths import CrashRecord
from kvrelay.router.request.job import Job, decode_body, prefill_body, prefix_of
from kvrelay.router.request.means import RunContext
from kvrelay.router.request.placer import ChosenNodes, PlacementLeases, PlacementQuery
from kvrelay.router.request.progress import AnswerProgress, Diverged, FramePosition
from kvrelay.router.request.timeline import AttemptTimes, Timeline
from kvrelay.router.request.tries import Attempts
from kvrelay.router.transport.leg_watch import LegWatch
from kvrelay.router.transport.node_client import AttemptFailed, Refused
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

__all__ = ["RequestRun"]

_log = logging.getLogger("kvrelay.router")


ROOM_DEADLINE_S = 30.0
"""How long a leg that must be placed again waits for room, if the client has nothing of its answer."""
_LOOK_S = 0.05
_RENEW_S = 1.0
"""Where a node does not say how long its leases are."""
_RENEWALS = 4.0
"""Of KV that is held for a request while it waits, within a lease."""


class RequestRun:
    """One request on its way through two nodes. `run` once."""

    def __init__(
        self,
        job: Job,
        headers: Mapping[str, str],
        timeline: Timeline,
        means: RunContext,
        deaths: CrashRecord,
        reply: Reply | None = None,
    ) -> None:
        """`deaths`: of the whole request, of which this may be one prompt."""
        self.job = job
        self.reply = reply or Reply()
        self.progress = AnswerProgress(job)
        self._prefix = prefix_of(job)
        self.timeline = timeline
        self.placed: PlacementLeases | None = None
        """Where it was placed last; set before `run` if its turn has come with a place."""
        self.prefill_node: Node | None = None
        self.decode_node: Node | None = None
        self._headers = headers
        self._means, self._deaths = means, deaths
        self._pool, self._node_health, self._metrics = means.pool, means.node_health, means.metrics
        self.counts: tuple[int, int, int] = (0, 0, 0)
        """Of the ended answer: tokens of the prompt, generated ones, cached ones of the prompt."""
        self._handed = False
        self._kv_left = False  # the decode node computes what the prefill node holds
        self._kv_failed = False  # a decode node could not get it
        self._unread: list[Lease] = []
        """Of legs whose nodes have failed as they read the request."""
        self._spills = True  # until a node has refused its prompt
        self._prefilling: asyncio.Task[object] | None = None
        self._claimed: asyncio.Event | None = (
            None  # the prefill leg of a rebuilding has told where its KV is
        )
        self._decoding: asyncio.Task[None] | None = None

    def wanted(self) -> PlacementQuery:
        """Say what it wants before anything of it has begun."""
        return self._means.placer.wanted(self.job, self._prefix)

    @property
    def prompt_tokens(self) -> int | None:
        """Known once a node has told of its ids, or has ended the answer."""
        told = self.progress.told
        return self.counts[0] or (told.answer().prompt_tokens or None if told else None)

    @property
    def output_tokens(self) -> int:
        """So far, of all choices."""
        return self.progress.output_tokens

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, on the node that computed the rest; 0 while no node has told."""
        if self.counts[0]:
            return self.counts[2]
        told = self.progress.told  # of an answer that is not over, or never will be
        return 0 if told is None else told.cached_tokens

    @property
    def answers(self) -> int:
        """How many come beside each other."""
        return self.job.choices

    @property
    def placement(self) -> str:
        """Where it was placed last, and at what price."""
        return "-" if self.placed is None else str(self.placed.placement)

    @property
    def parts(self) -> list[RequestRun]:
        """The walks of its prompts, of which it has one."""
        return [self]

    @property
    def nodes(self) -> tuple[str, str]:
        """Where its last legs ran."""
        prefill, decode = (
            node.url if node else "-" for node in (self.prefill_node, self.decode_node)
        )
        return prefill, decode

    async def run(self) -> None:
        """Answer the request into `reply`. Raises KvrelayError when it cannot; the KV is given back
        in any case.
        """
        means, deadline_s = self._means, self._means.config.request_deadline_s
        try:
            async with asyncio.timeout(deadline_s - (time.monotonic() - self.timeline.arrived)):
                self._deaths.check()
                means.retries.asked(time.monotonic())
                await self._walk()
        except TimeoutError as why:
            raise DeadlineExceeded(
                f"the request did not finish within {deadline_s:g} s; ask for fewer tokens, or "
                f"raise request_deadline_s"
            ) from why
        finally:
            try:
                await cancel_and_wait(
                    [task for task in (self._prefilling, self._decoding) if task is not None]
                )
            finally:
                if self.placed is not None:
                    means.placer.give_back(self.placed)
                self._give_back()

    async def _walk(self) -> None:
        """Run both legs, the second beside the first as soon as there is a ticket."""
        if self.placed is None:
            self.placed = await self._place(None, None)
        if self.placed.prefill is None:
            self._local(self.placed)
            await self._decode()
            return
        prefilling = self._prefilling = asyncio.create_task(self._prefill())
        await asyncio.wait([prefilling])
        # The decode leg cancels it when it has told all that there is. How it has failed is nothing
        # to a whole answer.
        over = prefilling.cancelled() or (
            self.progress.ended and isinstance(prefilling.exception(), KvrelayError)
        )
        if not over and not prefilling.result():
            return
        early = self._decoding
        if early is None or (
            early.done() and isinstance(early.exception(), NodeFailed | Unavailable)
        ):
            await (
                self._decode()
            )  # with the hand-over: that may find nodes which the ticket has not found
        else:
            await early

    async def _decode_early(self) -> None:
        """Run the decode leg that begins with the ticket. What it has told or was refused needs no
        more prefill.
        """
        assert self._prefilling is not None
        try:
            await self._decode()
        except (Refused, PoisonRequest):
            self._prefilling.cancel()
            raise
        self._prefilling.cancel()

    async def _prefill(self) -> bool:
        """Run prefill legs until one hands over; False if one has ended the answer.

        True too if one broke after token 1 had been sent on, or the prompt is computed on a decode
        node now.
        """
        tries, until = Attempts(self._means, Role.PREFILL), time.monotonic() + ROOM_DEADLINE_S
        assert self.placed is not None
        while (lease := self.placed.prefill) is not None:
            self.prefill_node, self.timeline.prefilled = lease.node, None
            failure: AttemptFailed | Refused
            try:
                ended = await self._leg(
                    lease, FramePosition(), prefill_body(self.job, lease.node.leg_version)
                )
                # An end behind a first token that the decode leg has told is none: that leg tells
                # the answer's.
                return ended is FrameKind.HANDOVER or not self.progress.ended
            except AttemptFailed as why:
                failure = without_frames(why)
                tries.failed(lease.node, failure)
            except Refused as why:
                if not self._means.is_full(lease, why) or time.monotonic() > until:
                    raise
                failure = without_frames(why)
            finally:
                self._pool.give_back(lease)
            if self._decoding is not None or not self.progress.start_over():
                # Its decode node computes the prompt itself, if it must.
                self._metrics.failovers.labels("prefill").inc()
                return True
            if isinstance(failure, AttemptFailed):
                tries.require_another(failure)
            self._means.placer.give_back(self.placed)
            try:
                self.placed = await self._place(tries, None, patient=False)
            except (NoNode, Overloaded):
                raise tries.failure(failure) from None
        self._local(self.placed)
        return True

    async def _decode(self) -> None:
        """Run decode legs, each from where the answer stands, until one ends it."""
        tries, until = Attempts(self._means, Role.DECODE), time.monotonic() + ROOM_DEADLINE_S
        while True:
            assert self.placed is not None
            lease, node, known = (
                self.placed.decode,
                self.placed.decode.node,
                self.progress.output_tokens,
            )
            failure: AttemptFailed | None = None
            anew = True
            try:
                if lease in node.leases and node.up:  # else it was given back, or is gone since
                    self.decode_node = node
                    params = self._params(self.placed)
                    peer = None if params.remote_engine_id is None else self.prefill_node
                    await self._leg(
                        lease,
                        FramePosition.behind(params),
                        decode_body(self.job, params, node.leg_version),
                        peer,
                    )
                    return
            except Diverged as why:
                # Nobody's fault; the next leg begins behind what the client has.
                _log.warning(
                    "id=%s: the decode leg on %s is begun again: %s", self.job.id, node.url, why
                )
                anew = False
            except AttemptFailed as why:
                failure, until = without_frames(why), time.monotonic() + ROOM_DEADLINE_S
                tries.failed(node, failure, told=self.progress.output_tokens > known)
                tries.require_another(failure, begun=self.progress.forwarded)
            except Refused as why:
                if self._spills and why.body().code == SPILL_REFUSED:
                    self._spills = False
                elif not self._means.is_full(lease, why) or (
                    time.monotonic() > until and not self.progress.output_tokens
                ):
                    raise
                else:
                    anew = False
            finally:
                self._pool.give_back(lease)
            await self._again(tries, failure, anew=anew)

    async def _again(self, tries: Attempts, failure: AttemptFailed | None, *, anew: bool) -> None:
        """FramePosition what is left of an answer: where its KV can be fetched or, if that is gone, by its
        price again.

        A prompt whose KV is gone may be computed by a prefill node, `anew`. Best effort: if that
        fails, the decode node does it.
        """
        params = self.progress.decode_params()
        peer = None if params.remote_engine_id is None or self._kv_failed else self.prefill_node
        alone = not (anew and self._may_rebuild(params))
        try:
            placed = self.placed = await self._place(None, tries, peer, alone=alone)
        except (NoNode, Overloaded):
            if failure is None:
                raise
            raise tries.failure(failure) from None
        if placed.prefill is None:
            return
        self._metrics.rebuilt.inc()
        self.progress.compute_again()
        self._kv_failed = False
        self._claimed = asyncio.Event()
        self._prefilling = asyncio.create_task(self._prefill_again(placed.prefill, self._claimed))
        await self._claimed.wait()
        await self._deaths.may_go_on()

    async def _prefill_again(self, lease: Lease, claimed: asyncio.Event) -> None:
        source = self.prefill_node = lease.node
        try:
            await self._leg(
                lease, FramePosition(again=True), prefill_body(self.job, source.leg_version)
            )
        except (AttemptFailed, Refused) as why:
            if isinstance(why, Refused):
                self._means.is_full(lease, why)
            _log.warning(
                "id=%s: its prompt was not computed again on %s: %s", self.job.id, source.url, why
            )
        finally:
            self._pool.give_back(lease)
            claimed.set()

    def _may_rebuild(self, params: KvTransferParams) -> bool:
        """Return whether the next decode leg would have to compute a prompt of which nothing but
        its KV is wanted.
        """
        if self._is_prefilling:
            return False
        if self._kv_left or (self.progress.held is not None and not self.progress.settled):
            return False  # it is still there, under this request's id
        return (
            params.remote_engine_id is None
            and params.prompt_logprobs is None
            and not self.job.prompt_only
        )

    async def _place(
        self,
        prefill: Attempts | None,
        decode: Attempts | None,
        peer: Node | None = None,
        *,
        alone: bool = False,
        patient: bool = True,
    ) -> PlacementLeases:
        """Wait for a place for what is left of the answer, with its KV on `peer` kept meanwhile.

        Raises NoNode, Overloaded, KvNotLoaded. An answer of which a part is there goes where the
        least is lacking, and waits for a node that is up.
        """
        placer, model, renew_at = self._means.placer, self._pool.base_of(self.job.model), 0.0
        until = time.monotonic() + ROOM_DEADLINE_S
        placer.waiting[model] += 1
        try:
            while True:
                prompt, output, found = self.prompt_tokens, self.progress.output_tokens, None
                wanted = placer.wanted(
                    self.job, self._prefix, prompt + output if prompt else 0, peer
                )
                begun, tried = (
                    output > 0,
                    [() if tries is None else tries.nodes() for tries in (prefill, decode)],
                )
                try:
                    found = placer.find(
                        wanted, *tried, anyway=begun, spills=self._spills, alone=alone
                    )
                except NoNode:
                    if not begun or any(node.up for node in tried[1]):
                        raise
                except Overloaded:
                    if not patient:
                        raise
                if isinstance(found, ChosenNodes):
                    return placer.take(found)
                now = time.monotonic()
                if now >= until and not begun:
                    raise _late()
                if peer is not None and now >= renew_at:
                    renew_at = now + self._renew(peer)
                await asyncio.sleep(_LOOK_S)
        finally:
            placer.waiting[model] -= 1

    def _renew(self, peer: Node) -> float:
        """Have a prefill node keep the KV that is fetched from it. Returns the seconds until it
        must be asked again.
        """
        if (held := self.progress.held) is not None:
            self._means.background.spawn(self._means.node_client.tell_of_kv(peer, "renew", held))
        lease_s = peer.kv.lease_s if peer.kv is not None else 0.0
        return lease_s / _RENEWALS if lease_s else _RENEW_S

    def _local(self, placed: PlacementLeases) -> None:
        """Note that a decode node computes the prompt, and why."""
        self.timeline.local = True
        none_fits = self._pool.kv_kinds.mixed and self._pool.up(Role.PREFILL, model=self.job.model)
        reason = (
            "price"
            if placed.placement.spills
            else "incompatible"
            if none_fits
            else "no_prefill_node"
        )
        self._metrics.local(self.job.model, reason)

    def _params(self, placed: PlacementLeases) -> KvTransferParams:
        """Return what the next decode leg is told, and what its node announces of this request to
        all routers.
        """
        params, request, placement = (
            self.progress.decode_params(),
            placed.wanted.request,
            placed.placement,
        )
        if params.remote_engine_id is not None and not self._can_fetch(placed.decode.node):
            params = self.progress.without_kv()
        each = min(request.output, request.most_output) - self.progress.output_tokens
        expected = max(1, round(each / max(self.job.choices, self.job.best_of)))
        params = msgspec.structs.replace(params, tpot_ms=request.tpot_ms, expected_output=expected)
        if not placement.spills:
            return params
        return msgspec.structs.replace(
            params, spill=True, cached_tokens=request.cached.get(placement.decode, 0)
        )

    def _can_fetch(self, node: Node) -> bool:
        """Return whether a decode node can take the KV that is held for it; else it computes the
        prompt.
        """
        assert self.prefill_node is not None
        if kv_mismatch(self.prefill_node.kv, node.kv) is None and not self._kv_failed:
            if not self._handed:
                self._handed = True
                self._metrics.handed_over(self.job.model, *self.nodes)
            return True
        if not (self._kv_left or self._kv_failed):
            self._metrics.local(self.job.model, "incompatible")
        self._kv_left = True
        return False

    async def _leg(
        self, lease: Lease, place: FramePosition, body: bytes, peer: Node | None = None
    ) -> FrameKind:
        """Run one leg, its frames passed on; `peer`: the prefill node whose KV a decode leg
        fetches.

        Raises AttemptFailed, Refused, Diverged, PoisonRequest.
        """
        node, decoding = lease.node, place.decoding
        call = self._node_health.begin(
            node, lease.role, time.monotonic(), computes=decoding and peer is None
        )
        timeline, reply, progress, at, part = (
            self.timeline,
            self.reply,
            self.progress,
            place.at,
            self.job.part,
        )

        def take(frame: Frame) -> Awaitable[None] | None:
            # For every token of every answer: each call in here is 1 % of what the router costs.
            now, ids, payload = time.monotonic(), frame.token_ids, frame.payload
            if frame.kind is not FrameKind.TOKENS:
                payload = self._take_other(frame, seen, lease, peer, now)
            if frame.kv_error and peer is not None:
                self._kv_failed = True
                self._means.kv_did_not_come(peer, node, frame.kv_error)
            if progress.take(frame, place):
                if ids:
                    timeline.last_token = now
                    if timeline.first_token is None:
                        timeline.first_token = now
                if payload:
                    (reply.put if not progress.ended or part else reply.put_last)(payload)
            if ids and seen.tokens is None and not frame.choice:
                timeline.told(seen, at[0], now)
            if ids and call.steady:
                call.heard_at = now
            elif call.heard(now, tokens=bool(ids)):
                self._node_health.answered(call)
                self._deaths.first_token.set()
                lease.answered()
                if peer is not None and not self._kv_failed:
                    self._node_health.kv_came(peer, node)
            flow = reply.flow
            if flow is None or not flow.write_paused:
                return None
            return flow.drain()

        patience_s = self._node_health.patience_s(lease.tokens)
        watch = LegWatch(
            self._means.watches, lease, call, patience_s, lambda: self._may_give_up(decoding)
        )
        seen = timeline.begins(time.monotonic(), decoding=decoding, fetches=peer is not None)
        with watch:
            try:
                ended = await self._means.node_client.run(
                    lease, self.job.path, body, self._headers, take
                )
                if decoding and ended is FrameKind.HANDOVER:
                    raise AttemptFailed("the node handed a decode leg over")
                call.succeeded(time.monotonic())
                return ended
            except AttemptFailed as why:  # noqa: F841 - it is raised below
                if watch.silent:
                    why = AttemptFailed(f"the node has said nothing for {patience_s:g} s")
                    why.paid = True
                self._means.broke(self.job.id, lease, call, why)
                if why.reading:
                    self._unread.append(lease)
                if why.lost and why.reached and not call.answered:
                    self._deaths.lost(lease, time.monotonic())
                    await self._deaths.may_go_on()
                raise why  # kept in no local variable, which its traceback would keep
            except Refused as why:
                if why.kv_error and peer is not None:
                    self._means.kv_did_not_come(peer, node, why.kv_error)
                raise
            finally:
                timeline.ends(seen, time.monotonic(), more=not progress.ended)
                call.close()

    def _take_other(
        self, frame: Frame, seen: AttemptTimes, lease: Lease, peer: Node | None, now: float
    ) -> bytes:
        """Take what any frame but one of TOKENS tells beside them, and return its bytes for the
        client.
        """
        if frame.timing is not None:
            self.timeline.inside(frame.timing, seen)
            if peer is not None and "exposed" in frame.timing and "prefill" not in frame.timing:
                self._node_health.links.observe(peer.url, lease.node.url, frame.timing["exposed"])
        if frame.kind is FrameKind.TICKET and not seen.decoding:
            self._take_ticket(frame, lease)
        if frame.kind is not FrameKind.END:
            return frame.payload
        if frame.usage is not None:
            self.counts = prompt, output, _ = frame.usage
            self._means.placer.answered(
                self.job.model, output // max(1, self.job.choices), self._prefix, prompt
            )
        for other in self._unread:  # this node has read it
            self._node_health.could_not_read(other.node, other.role, now)
        self._unread.clear()
        return self.timeline.stamped(frame.payload, now) if self.job.wants_stages else frame.payload

    def _take_ticket(self, frame: Frame, lease: Lease) -> None:
        """A prefill node has tokenized the prompt, and looked it up in its prefix cache: the decode
        leg may begin.
        """
        if frame.params is not None:
            self._metrics.prefix.cached(lease.cached_tokens, frame.params.cached_tokens)
            if frame.blocks is not None:
                self._prefix = self._prefix.known(frame.blocks, frame.params.num_tokens)
                self._pool.prefixes.learn(self._prefix)
        if self._claimed is not None:
            self._claimed.set()
        elif self._decoding is None:
            self._decoding = asyncio.create_task(self._decode_early())

    @property
    def _is_prefilling(self) -> bool:
        """A prefill leg runs."""
        return self._prefilling is not None and not self._prefilling.done()

    def _may_give_up(self, decoding: bool) -> bool:
        """Whether a leg that is silent for too long is cut. A decode leg's node may be waiting for
        the prefill node.
        """
        if self.reply.full or (decoding and self._is_prefilling):
            return False
        return self._means.retries.take(time.monotonic())

    def _give_back(self) -> None:
        """Release what is held on a prefill node and will not be fetched by a decode leg.

        Of a leg that was cut before it has told of any, nothing is: its node has ended it."""
        node, held, left = (
            self.prefill_node,
            self.progress.held,
            self._kv_left or not self.progress.settled,
        )
        if node is not None and held is not None and left:
            self._means.background.spawn(self._means.release(node, held))


def _late() -> Overloaded:
    full = Overloaded(
        f"no node had room for the request within {ROOM_DEADLINE_S:g} s; try again later"
    )
    full.retry_after_s = math.ceil(ROOM_DEADLINE_S)  # as long as those before it have waited
    return full
