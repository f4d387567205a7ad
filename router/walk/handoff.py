"""The walk of one request: prefill leg, hand-over, decode leg; what to do when one breaks; giving back what it took.

The decode leg begins with the prefill leg's ticket, before the prompt is computed: its node makes room, and reads what
is computed while the rest is. The first token comes through whichever leg has it first. A prompt that is better
computed where its answer is, or can be nowhere else, has a decode leg alone.

How a leg can end. A 4xx goes to the client and blames nobody; a 429 is a node without room: it rests, and another takes
the leg, from the same ticket. A process that is lost (router/legs/legs.py) is down until it answers a health check. All
else is told to the node's breaker (router/nodes/doors.py). What broke is tried on other nodes: what a lost process had
always, all else as long as the retry budget allows, or the client has a part of the answer.

Knows frames and nodes, not HTTP servers: bytes for the client go to a Reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Mapping

import msgspec

from router.chores import ended
from router.legs.leg_watch import LegWatch
from router.legs.legs import LegFailed, Refused
from router.nodes.node import Lease, Node
from router.nodes.pairing import unlike
from router.reply import Reply
from router.timeline import LegSeen, Timeline
from router.walk.blame import broke, is_full, kv_did_not_come
from router.walk.deaths import Deaths
from router.walk.job import Job, decode_body, prefill_body, prefix_of
from router.walk.means import Means
from router.walk.placer import Found, Placed, Wanted
from router.walk.progress import Diverged, Place, Progress
from router.walk.tries import Tries
from wire.config import Role
from wire.errors import (
    DeadlineExceeded,
    KvrelayError,
    NodeFailed,
    NoNode,
    Overloaded,
    PoisonRequest,
    Unavailable,
    without_frames,
)
from wire.frames import Frame, FrameKind
from wire.transfer import SPILL_REFUSED, KvTransferParams

__all__ = ["Walk"]

_log = logging.getLogger("kvrelay.router")


ROOM_DEADLINE_S = 30.0
"""How long a leg that must be placed again waits for room, if the client has nothing of its answer."""
_LOOK_S = 0.05
_RENEW_S = 1.0
"""Where a node does not say how long its leases are."""
_RENEWALS = 4.0
"""Of KV that is held for a request while it waits, within a lease."""


class Walk:
    """One request on its way through two nodes. `run` once."""

    def __init__(
        self,
        job: Job,
        headers: Mapping[str, str],
        timeline: Timeline,
        means: Means,
        deaths: Deaths,
        reply: Reply | None = None,
    ) -> None:
        """`deaths`: of the whole request, of which this may be one prompt."""
        self.job = job
        self.reply = reply or Reply()
        self.progress = Progress(job)
        self._prefix = prefix_of(job)
        self.timeline = timeline
        self.placed: Placed | None = None
        """Where it was placed last; set before `run` if its turn has come with a place."""
        self.prefill_node: Node | None = None
        self.decode_node: Node | None = None
        self._headers = headers
        self._means, self._deaths = means, deaths
        self._pool, self._doors, self._metrics = means.pool, means.doors, means.metrics
        self.counts: tuple[int, int, int] = (0, 0, 0)
        """Of the ended answer: tokens of the prompt, generated ones, cached ones of the prompt."""
        self._handed = False
        self._kv_left = False  # the decode node computes what the prefill node holds
        self._kv_failed = False  # a decode node could not get it
        self._unread: list[tuple[Node, Role]] = []
        """Nodes that have failed as they read the request, and what they were to do."""
        self._spills = True  # until a node has refused its prompt
        self._prefilling: asyncio.Task[bool] | None = None
        self._claimed: asyncio.Event | None = None  # the prefill leg of a rebuilding has told where its KV is
        self._decoding: asyncio.Task[None] | None = None

    def wanted(self) -> Wanted:
        """Say what it wants before anything of it has begun."""
        return self._means.placer.wanted(self.job, self._prefix)

    @property
    def prompt_tokens(self) -> int | None:
        """Known once a node has told of its ids, or has ended the answer."""
        told = self.progress.handover or self.progress.ticket
        return self.counts[0] or (told.prompt_tokens or None if told else None)

    @property
    def output_tokens(self) -> int:
        """So far, of all choices."""
        return self.progress.output_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, on the node that computed the rest; None: no node has told."""
        if self.counts[0]:
            return self.counts[2]
        told = self.progress.handover or self.progress.ticket  # of an answer that is not over, or never will be
        return None if told is None else told.cached_tokens

    @property
    def answers(self) -> int:
        """How many come beside each other."""
        return self.job.choices

    @property
    def placement(self) -> str:
        """Where it was placed last, and at what price."""
        return "-" if self.placed is None else str(self.placed.placement)

    @property
    def parts(self) -> list[Walk]:
        """Of its prompts, of which it has one."""
        return [self]

    @property
    def nodes(self) -> tuple[str, str]:
        """Where its last legs ran."""
        prefill, decode = (node.url if node else "-" for node in (self.prefill_node, self.decode_node))
        return prefill, decode

    async def run(self) -> None:
        """Answer the request into `reply`. Raises KvrelayError when it cannot; the KV is given back in any case."""
        means = self._means
        try:
            async with asyncio.timeout(means.deadline_s - (time.monotonic() - self.timeline.arrived)):
                self._deaths.check()
                means.retries.asked(time.monotonic())
                await self._walk()
        except TimeoutError as why:
            raise DeadlineExceeded(
                f"the request did not finish within {means.deadline_s:g} s; "
                "ask for fewer tokens, or raise request_deadline_s"
            ) from why
        finally:
            try:
                await ended([task for task in (self._prefilling, self._decoding) if task is not None])
            finally:
                if self.placed is not None:
                    means.placer.give_back(self.placed)
                self._give_back()

    async def _walk(self) -> None:
        """Both legs, the second beside the first as soon as there is a ticket."""
        placed = self.placed = self.placed or await self._place(Tries(self._means), Tries(self._means))
        if placed.prefill is None:
            self._local(placed)
            await self._decode()
            return
        self._prefilling = asyncio.create_task(self._prefill())
        try:
            goes_on = await self._prefilling
        except asyncio.CancelledError:
            # By the decode leg, when it has told all that there is; or the walk itself is cancelled.
            me = asyncio.current_task()
            if self._decoding is None or not self._decoding.done() or (me is not None and me.cancelling()):
                raise
            goes_on = True
        except KvrelayError:
            if not self.progress.ended:  # else it is nothing to an answer that the decode leg has told
                raise
            goes_on = True
        early = self._decoding
        if not goes_on:
            return
        if early is None or (early.done() and isinstance(early.exception(), NodeFailed | Unavailable)):
            await self._decode()  # with the hand-over: that may find nodes which the ticket has not found
        else:
            await early

    async def _decode_early(self) -> None:
        """The decode leg that begins with the ticket. What it has told or was refused needs no more prefill."""
        assert self._prefilling is not None
        try:
            await self._decode()
        except (Refused, PoisonRequest):
            self._prefilling.cancel()
            raise
        self._prefilling.cancel()

    async def _prefill(self) -> bool:
        """True if a decode leg must follow: the prefill node handed over, or broke after token 1 had been sent on, or
        the prompt is computed on a decode node now."""
        tries = Tries(self._means)
        while True:
            assert self.placed is not None
            lease = self.placed.prefill
            if lease is None:
                self._local(self.placed)
                return True
            failure: LegFailed | Refused
            self.prefill_node, self.timeline.prefilled = lease.node, None
            try:
                ended = await self._leg(lease, prefill_body(self.job, lease.node.leg_version), Place(), None)
                # An end behind a first token that the decode leg has told is none: that leg tells the answer's.
                return ended is FrameKind.HANDOVER or not self.progress.ended
            except LegFailed as why:
                failure = without_frames(why)
            except Refused as why:
                if not is_full(self._means, lease, why):
                    raise
                failure = without_frames(why)
            finally:
                self._pool.give_back(lease)
            tries.failed(lease.node, failure, told=False)
            if self._decoding is not None or not self.progress.start_over():
                # Its decode node computes the prompt itself, if it must.
                self._metrics.failovers.labels("prefill").inc()
                return True
            if isinstance(failure, LegFailed) and not tries.may_go_on(failure, begun=self.progress.forwarded):
                raise tries.failure(Role.PREFILL, failure) from failure
            placer = self._means.placer
            placer.give_back(self.placed)
            if isinstance(failure, Refused) and not placer.can_prefill(self.wanted(), tries.nodes()):
                raise failure
            with contextlib.suppress(NoNode, Overloaded):
                self.placed = await self._place(tries, Tries(self._means), patient=False)
                if isinstance(failure, LegFailed):
                    self._metrics.failovers.labels("prefill").inc()
                continue
            raise tries.failure(Role.PREFILL, failure) from failure

    async def _decode(self) -> None:
        """Decode legs, each from where the answer stands, until one ends it."""
        tries, until = Tries(self._means), time.monotonic() + ROOM_DEADLINE_S
        while True:
            assert self.placed is not None
            lease, node, known = self.placed.decode, self.placed.decode.node, self.progress.output_tokens
            if lease not in node.leases or not node.up:  # it was given back, or is gone since
                self._pool.give_back(lease)
                await self._again(tries, None)
                continue
            failure: LegFailed | None = None
            anew = True
            try:
                self.decode_node = node
                params = self._told(self._bound(self.progress.decode_params(), node))
                await self._leg(lease, decode_body(self.job, params, node.leg_version), Place.behind(params), params)
                return
            except Diverged as why:
                # Nobody's fault; the next leg begins behind what the client has.
                _log.warning("id=%s: the decode leg on %s is begun again: %s", self.job.id, node.url, why)
                anew = False
            except LegFailed as why:
                tries.failed(node, why, told=self.progress.output_tokens > known)
                failure, until = without_frames(why), time.monotonic() + ROOM_DEADLINE_S
                if not tries.may_go_on(failure, begun=self.progress.forwarded):
                    raise tries.failure(Role.DECODE, failure) from failure
                self._metrics.failovers.labels("decode").inc()
            except Refused as why:
                spilled = self._spills and why.body().code == SPILL_REFUSED
                late = time.monotonic() > until and not self.progress.output_tokens
                if not spilled and (not is_full(self._means, lease, why) or late):
                    raise
                self._spills, anew = self._spills and not spilled, spilled
            finally:
                self._pool.give_back(lease)
            await self._again(tries, failure, anew=anew)

    async def _again(self, tries: Tries, failure: LegFailed | None, *, anew: bool = True) -> None:
        """Place what is left of an answer: where its KV can be fetched or, if that is gone, by its price again.

        A prompt whose KV is gone may be computed by a prefill node, `anew`. Best effort: if that fails, the decode node
        does it.
        """
        fetches = self.progress.decode_params().remote_engine_id is not None and not self._kv_failed
        peer = self.prefill_node if fetches else None
        none: KvrelayError | None = None
        try:
            self.placed = await self._place(Tries(self._means), tries, peer, alone=not (anew and self._may_rebuild()))
        except (NoNode, Overloaded) as why:
            none = without_frames(why)
        if none is not None:  # raised here, the error before holds none of these frames
            raise none if failure is None else tries.failure(Role.DECODE, failure) from failure
        placed = self.placed
        assert placed is not None
        if placed.prefill is None:
            return
        self._metrics.rebuilt.inc()
        self.progress.compute_again()
        self._kv_failed = False
        claimed = self._claimed = asyncio.Event()
        self._prefilling = asyncio.create_task(self._prefill_again(placed.prefill))
        self._prefilling.add_done_callback(lambda _: claimed.set())
        await claimed.wait()
        await self._deaths.may_go_on()

    async def _place(
        self, prefill: Tries, decode: Tries, peer: Node | None = None, *, alone: bool = False, patient: bool = True
    ) -> Placed:
        """Wait for a place for what is left of the answer, with its KV on `peer` kept meanwhile.

        Raises NoNode, Overloaded, KvNotLoaded. An answer of which a part is there goes where the least is lacking, and
        waits for a node that is up.
        """
        placer, model, renew_at = self._means.placer, self._pool.base_of(self.job.model), 0.0
        until = time.monotonic() + ROOM_DEADLINE_S
        placer.waiting[model] += 1
        try:
            while True:
                wanted, found = placer.wanted(self.job, self._prefix, self._tokens, peer), None
                begun = self.progress.output_tokens > 0
                try:
                    found = placer.find(
                        wanted, prefill.nodes(), decode.nodes(), anyway=begun, spills=self._spills, alone=alone
                    )
                except NoNode:
                    if not begun or any(node.up for node in decode.nodes()):
                        raise
                except Overloaded:
                    if not patient:
                        raise
                if isinstance(found, Found):
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
        """Have a prefill node keep the KV that is fetched from it; how many seconds later it must be asked again."""
        held = self.progress.held
        if held is not None and held.remote_request_id is not None:
            self._means.chores.spawn(self._means.legs.renew(peer, [held.remote_request_id]))
        lease_s = peer.kv.lease_s if peer.kv is not None else 0.0
        return lease_s / _RENEWALS if lease_s else _RENEW_S

    @property
    def _tokens(self) -> int:
        """Of its prompt and of what was generated, as far as they are known."""
        prompt = self.prompt_tokens
        return 0 if prompt is None else prompt + self.progress.output_tokens

    def _local(self, placed: Placed) -> None:
        """Note that a decode node computes the prompt, and why."""
        self.timeline.local = True
        none_fits = self._pool.kinds.mixed and self._pool.up(Role.PREFILL, model=self.job.model)
        reason = "price" if placed.placement.spills else "incompatible" if none_fits else "no_prefill_node"
        self._metrics.local(self.job.model, reason)

    def _told(self, params: KvTransferParams) -> KvTransferParams:
        """Return what the decode node is told, with what it announces of this request to all routers."""
        assert self.placed is not None
        request, placement = self.placed.wanted.request, self.placed.placement
        each = min(request.output, request.most_output) - self.progress.output_tokens
        expected = max(1, round(each / max(self.job.choices, self.job.best_of)))
        params = msgspec.structs.replace(params, tpot_ms=request.tpot_ms, expected_output=expected)
        if not (placement.spills and self._spills):
            return params
        cached = request.cached.get(placement.decode, 0)
        return msgspec.structs.replace(params, spill=True, cached_tokens=cached)

    def _may_rebuild(self) -> bool:
        """Whether the next decode leg would have to compute the prompt, of which nothing but its KV is wanted."""
        if self._is_prefilling:
            return False
        if self._kv_left or (self.progress.held is not None and not self.progress.settled):
            return False  # it is still there, under this request's id
        params = self.progress.decode_params()
        return params.remote_engine_id is None and params.prompt_logprobs is None and not self.job.prompt_only

    async def _prefill_again(self, lease: Lease) -> bool:
        source = self.prefill_node = lease.node
        try:
            await self._leg(lease, prefill_body(self.job, source.leg_version), Place(again=True), None)
        except (LegFailed, Refused) as why:
            if isinstance(why, Refused):
                is_full(self._means, lease, why)
            _log.warning("id=%s: its prompt was not computed again on %s: %s", self.job.id, source.url, why)
        finally:
            self._pool.give_back(lease)
        return True

    def _bound(self, params: KvTransferParams, node: Node) -> KvTransferParams:
        """What the decode leg is told, which its node may have to compute though there is KV."""
        if params.remote_engine_id is None:
            return params
        assert self.prefill_node is not None
        if unlike(self.prefill_node.kv, node.kv) is None and not self._kv_failed:
            if not self._handed:
                self._handed = True
                self._metrics.handed_over(self.job.model, *self.nodes)
            return params
        if not self._kv_left:
            self._kv_left = True
            if not self._kv_failed:
                self._metrics.local(self.job.model, "incompatible")
        return self.progress.without_kv()

    async def _leg(self, lease: Lease, body: bytes, place: Place, params: KvTransferParams | None) -> FrameKind:
        """One leg on one node, its frames passed on; of a decode leg `params`.

        Raises LegFailed, Refused, Diverged, PoisonRequest."""
        decoding, node = place.decoding, lease.node
        peer = self.prefill_node if params is not None and params.remote_engine_id is not None else None
        role = Role.DECODE if decoding else Role.PREFILL
        computes = decoding and peer is None
        passage = self._doors.enter(node, role, time.monotonic(), computes=computes)
        kv_failed = False
        timeline, reply, progress, at, part = self.timeline, self.reply, self.progress, place.at, self.job.part

        def take(frame: Frame) -> Awaitable[None] | None:
            # For every token of every answer: each call in here is 1 % of what the router costs.
            nonlocal kv_failed
            now, ids, payload = time.monotonic(), frame.token_ids, frame.payload
            if frame.kind is not FrameKind.TOKENS:
                payload = self._take_end(frame, seen, node, peer, now)
            if frame.kv_error and peer is not None:
                kv_failed = self._kv_failed = True
                kv_did_not_come(self._means, peer, node, frame.kv_error)
            if progress.take(frame, place):
                if ids:
                    timeline.last_token = now
                    if timeline.first_token is None:
                        timeline.first_token = now
                if payload:
                    (reply.put if not progress.ended or part else reply.put_last)(payload)
            if ids and seen.tokens is None and not frame.choice:
                timeline.told(seen, at[0], now)
            if ids and passage.plain:
                passage.heard_at = now
            elif passage.heard(now, tokens=bool(ids)):
                self._doors.began(passage)
                self._deaths.first_token.set()
                lease.answered()
                if peer is not None and not kv_failed:
                    self._doors.kv_came(peer, node)
            if frame.kind is FrameKind.TICKET and not decoding:
                self._take_ticket(frame, lease, place.again)
            flow = reply.flow
            if flow is None or not flow.write_paused:
                return None
            return flow.drain()

        patience_s = self._doors.patience_s(lease.tokens)
        watch = LegWatch(self._means.watches, lease, passage, patience_s, lambda: self._may_give_up(decoding))
        seen = timeline.begins(time.monotonic(), decoding=decoding, fetches=peer is not None)
        with watch:
            try:
                ended = await self._means.legs.run(lease, self.job.path, body, self._headers, take)
                if decoding and ended is FrameKind.HANDOVER:
                    raise LegFailed("the node handed a decode leg over")
                passage.ended(time.monotonic())
                return ended
            except LegFailed as why:  # noqa: F841 - it is raised below
                if watch.silent:
                    why = LegFailed(f"the node has said nothing for {watch.patience_s:g} s", paid=True)
                broke(self._means, self.job.id, lease, role, passage, why)
                if why.reading:
                    self._unread.append((node, role))
                if why.lost and why.reached and not passage.answered:
                    self._deaths.lost(lease, time.monotonic())
                    await self._deaths.may_go_on()
                raise why  # kept in no local variable, which its traceback would keep
            except Refused as why:
                if why.kv_error and peer is not None:
                    kv_did_not_come(self._means, peer, node, why.kv_error)
                raise
            finally:
                now = time.monotonic()
                timeline.ends(seen, now, more=not progress.ended)
                passage.close()

    def _take_end(self, frame: Frame, seen: LegSeen, node: Node, peer: Node | None, now: float) -> bytes:
        """What a frame tells that ends a leg, beside its tokens; its bytes for the client."""
        if frame.timing is not None:
            self.timeline.inside(frame.timing, seen)
            if peer is not None and "exposed" in frame.timing and "prefill" not in frame.timing:
                self._doors.links.saw(peer.url, node.url, frame.timing["exposed"])
        if frame.kind is FrameKind.END and frame.usage is not None:
            prompt, output, _ = frame.usage
            self._means.placer.answered(self.job.model, output // max(1, self.job.choices), self._prefix, prompt)
        if frame.kind is FrameKind.END and self._unread:  # this node has read it
            for other, role in self._unread:
                self._doors.could_not_read(other, role, now)
            self._unread = []
        self.counts = frame.usage or self.counts
        stamped = frame.kind is FrameKind.END and self.job.wants_stages
        return self.timeline.stamped(frame.payload, now) if stamped else frame.payload

    def _take_ticket(self, frame: Frame, lease: Lease, again: bool) -> None:
        """A prefill node has tokenized the prompt, and looked it up in its prefix cache: the decode leg may begin."""
        if frame.params is not None:
            self._metrics.prefix.cached(lease.cached_tokens, frame.params.cached_tokens)
            if frame.blocks is not None:
                self._prefix = self._prefix.known(frame.blocks, frame.params.num_tokens)
                self._pool.prefixes.learn(self._prefix)
        if self._claimed is not None:
            self._claimed.set()
        if self._decoding is None and not again:
            self._decoding = asyncio.create_task(self._decode_early())

    @property
    def _is_prefilling(self) -> bool:
        """A prefill leg runs."""
        return self._prefilling is not None and not self._prefilling.done()

    def _may_give_up(self, decoding: bool) -> bool:
        """Whether a leg that is silent for too long is cut. A decode leg's node may be waiting for the prefill node."""
        if self.reply.full or (decoding and self._is_prefilling):
            return False
        return self._means.retries.take(time.monotonic())

    def _give_back(self) -> None:
        """Whatever is held on a prefill node and will not be fetched by a decode leg is released.

        Of a leg that was cut before it has told of any, nothing is: its node has ended it."""
        node, handover = self.prefill_node, self.progress.held
        if node is None or (self.progress.settled and not self._kv_left):
            return
        if handover is not None and handover.remote_request_id is not None:
            self._means.release(node, [handover.remote_request_id])


def _late() -> Overloaded:
    full = Overloaded(f"no node had room for the request within {ROOM_DEADLINE_S:g} s; try again later")
    full.retry_after_s = math.ceil(ROOM_DEADLINE_S)  # as long as those before it have waited
    return full
