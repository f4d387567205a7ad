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
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from router.chores import ended
from router.legs.leg_watch import LegWatch
from router.legs.legs import LegFailed, Refused
from router.nodes.measured import learn
from router.nodes.node import Lease, Node
from router.nodes.standing import GAP_EVERY
from router.policies.policy import Ask
from router.reply import Reply
from router.timeline import LegSeen, Timeline
from router.walk.asks import decode_ask, prefill_ask, prompt_tokens
from router.walk.binding import ROOM_DEADLINE_S, Wish
from router.walk.blame import broke, is_full, kv_did_not_come
from router.walk.deaths import Deaths
from router.walk.job import Job, decode_body, prefill_body, prefix_of
from router.walk.locality import Source
from router.walk.means import Means
from router.walk.progress import Diverged, Place, Progress
from router.walk.tries import Tries
from wire.config import Role
from wire.errors import DeadlineExceeded, KvrelayError, NodeFailed, PoisonRequest, Unavailable, without_frames
from wire.frames import Frame, FrameKind
from wire.transfer import KvTransferParams

__all__ = ["Walk"]

_log = logging.getLogger("kvrelay.router")


class _Moves(Exception):
    """A decode leg was cut because it waits for room that another node has."""


def _nobody(_: Role) -> None:
    """Is told."""


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
        self.on_placed: Callable[[Role], None] = _nobody
        """Told when a node has a leg of it."""
        self.prefill_node: Node | None = None
        self.decode_node: Node | None = None
        self._headers = headers
        self._means, self._deaths = means, deaths
        self._pool, self._doors, self._metrics = means.pool, means.doors, means.metrics
        self.counts: tuple[int, int, int] = (0, 0, 0)
        """Of the ended answer: tokens of the prompt, generated ones, cached ones of the prompt."""
        self._handed = False
        self._kv_left = False  # the decode node computes what the prefill node holds
        self._moves = 0  # of decode legs; each puts it at the end of another queue, so they become rare
        self._bound_by: float | None = None  # the monotonic second until which a decode leg may wait for room
        self._prefilling: asyncio.Task[bool] | None = None
        self._claimed: asyncio.Event | None = None  # the prefill leg of a rebuilding has told where its KV is
        self._decoding: asyncio.Task[None] | None = None

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
                self.on_placed = _nobody
                self._give_back()

    async def _walk(self) -> None:
        """Both legs, the second beside the first as soon as there is a ticket."""
        source = self._means.locality.source(prefill_ask(self.job, self._prefix), self._decode_ask())
        if source is None:
            self.timeline.local = True
            await self._decode()
            return
        self._prefilling = asyncio.create_task(self._prefill(source))
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

    async def _prefill(self, source: Source) -> bool:
        """True if a decode leg must follow: the prefill node handed over, or broke after token 1 had been sent on, or
        no prefill node is left."""
        ask, tries = source.ask, Tries(self._means)
        nodes: Sequence[Node] = [] if source.node is None else [source.node]
        failure: LegFailed | Refused
        while True:
            if not nodes:
                nodes = self._doors.takers(ask, tries.nodes(), time.monotonic())
                nodes, _ = self._doors.with_partner(nodes, self.job.model)
            with self._pool.lease(ask, among=nodes) as lease:
                self.prefill_node, self.timeline.prefilled = lease.node, None
                self.on_placed(Role.PREFILL)
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
            nodes = []
            tries.failed(lease.node, failure, told=False)
            if self._decoding is not None or not self.progress.start_over():
                # Its decode node computes the prompt itself, if it must.
                self._metrics.failovers.labels("prefill").inc()
                return True
            if self._goes_local_instead(ask, tries, failure):
                return True

    async def _decode(self) -> None:
        """Decode legs, each from where the answer stands, until one ends it."""
        tries = Tries(self._means)
        if self._bound_by is None:
            self._bound_by = time.monotonic() + ROOM_DEADLINE_S
        while True:
            params = self.progress.decode_params()
            wish, known = self._wish(params, tries.nodes), self.progress.output_tokens
            lease, fetches = await self._means.binding.place(wish)
            try:
                self.decode_node = lease.node
                if self.timeline.sent is None:
                    self.on_placed(Role.PREFILL)  # what would have been computed there
                self.on_placed(Role.DECODE)
                params = self._bound(params, fetches)
                body = decode_body(self.job, params, lease.node.leg_version)
                await self._leg(lease, body, Place.behind(params), params, wish)
                return
            except _Moves:
                self._moves += 1
                self._doors.rest(lease.node, Role.DECODE, None, time.monotonic())  # or it would be chosen again
                self._metrics.full.labels(Role.DECODE.value).inc()
                self._bound_by = time.monotonic() + ROOM_DEADLINE_S
                continue
            except Diverged as why:
                # Nobody's fault; the next leg begins behind what the client has.
                _log.warning("id=%s: the decode leg on %s is begun again: %s", self.job.id, lease.node.url, why)
                continue
            except LegFailed as why:
                tries.failed(lease.node, why, told=self.progress.output_tokens > known)
                failure, self._bound_by = without_frames(why), time.monotonic() + ROOM_DEADLINE_S
            except Refused as why:
                late = time.monotonic() > self._bound_by and not self.progress.output_tokens
                if not is_full(self._means, lease, why) or late:
                    raise
                continue  # it rests, so it is not asked again at once
            finally:
                self._means.binding.give_back(lease)
            if not (tries.another(wish.ask, wish.patient) and tries.may_go_on(failure, begun=self.progress.forwarded)):
                raise tries.failure(Role.DECODE, failure) from failure
            self._metrics.failovers.labels("decode").inc()
            await self._rebuilt()

    async def _rebuilt(self) -> None:
        """Have the prompt of an answer whose decode node is gone computed by a prefill node again, if that is cheaper
        than to have the next decode node compute it. Best effort: if it fails, the decode node does."""
        if not self._may_rebuild():
            return
        source = self._means.locality.again(prefill_ask(self.job, self._prefix))
        if source is None:
            return
        self._metrics.rebuilt.inc()
        self.progress.compute_again()
        claimed = self._claimed = asyncio.Event()
        self._prefilling = asyncio.create_task(self._prefill_again(source))
        self._prefilling.add_done_callback(lambda _: claimed.set())
        await claimed.wait()
        await self._deaths.may_go_on()

    def _may_rebuild(self) -> bool:
        """Whether the next decode leg would have to compute the prompt, of which nothing but its KV is wanted."""
        if self._is_prefilling:
            return False
        if self._kv_left or (self.progress.held is not None and not self.progress.settled):
            return False  # it is still there, under this request's id
        params = self.progress.decode_params()
        return params.remote_engine_id is None and params.prompt_logprobs is None and not self.job.prompt_only

    async def _prefill_again(self, source: Node) -> bool:
        with self._pool.lease(prefill_ask(self.job, self._prefix), among=[source]) as lease:
            self.prefill_node = source
            try:
                await self._leg(lease, prefill_body(self.job, source.leg_version), Place(again=True), None)
            except (LegFailed, Refused) as why:
                if isinstance(why, Refused):
                    is_full(self._means, lease, why)
                _log.warning("id=%s: its prompt was not computed again on %s: %s", self.job.id, source.url, why)
        return True

    def _wish(self, params: KvTransferParams, tried: Callable[[], list[Node]]) -> Wish:
        assert self._bound_by is not None
        fetches = params.remote_engine_id is not None
        peer = self.prefill_node if fetches else None
        return Wish(
            decode_ask(self.job, self._prefix, self.progress, params, peer),
            tried,
            peer,
            params.remote_request_id if fetches else None,
            is_new=not (fetches or self.progress.output_tokens or self.progress.ticket or self.progress.handover),
            begun=lambda: self.progress.forwarded,
            outlasts=lambda: self.progress.output_tokens > 0,
            until=self._bound_by,
        )

    def _decode_ask(self) -> Ask:
        """Of a decode leg that computes the prompt itself."""
        return decode_ask(self.job, self._prefix, self.progress, self.progress.decode_params(), None)

    def _bound(self, params: KvTransferParams, fetches: bool) -> KvTransferParams:
        """What the decode leg is told, which its node may have to compute though there is KV."""
        if params.remote_engine_id is None:
            return params
        if fetches:
            if not self._handed:
                self._handed = True
                self._metrics.handed_over(self.job.model, *self.nodes)
            return params
        if not self._kv_left:
            self._kv_left = True
            self._metrics.local(self.job.model, "incompatible")
        return self.progress.without_kv()

    async def _leg(
        self, lease: Lease, body: bytes, place: Place, params: KvTransferParams | None, wish: Wish | None = None
    ) -> FrameKind:
        """One leg on one node, its frames passed on; of a decode leg `params` and `wish`. Raises LegFailed, Refused,
        Diverged, _Moves, PoisonRequest."""
        decoding, node = place.decoding, lease.node
        peer = self.prefill_node if params is not None and params.remote_engine_id is not None else None
        role = Role.DECODE if decoding else Role.PREFILL
        computes = decoding and peer is None
        passage = self._doors.enter(node, role, time.monotonic(), computes=computes, waits_for_us=not decoding)
        kv_tokens = lease.kv_tokens if params is None else prompt_tokens(self.job, params)
        kv_failed, begin, grows_at = False, place.at.get(0, 0), 0
        held, block_size = kv_tokens + sum(place.at.values()), node.load.block_size if decoding else 0

        timeline, reply, progress, at, part = self.timeline, self.reply, self.progress, place.at, self.job.part

        def take(frame: Frame) -> Awaitable[None] | None:
            # For every token of every answer: each call in here is 1 % of what the router costs.
            nonlocal kv_failed, held, grows_at
            now, ids, payload = time.monotonic(), frame.token_ids, frame.payload
            if frame.kind is not FrameKind.TOKENS:
                payload = self._take_end(frame, place, seen, begin, lease, peer, now)
            if frame.kv_error and peer is not None:
                kv_failed = True
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
            if ids and passage.plain and passage.gap_frames < GAP_EVERY:
                passage.heard_at = now
                passage.gap_frames += 1
            elif passage.heard(now, tokens=bool(ids)):
                self._doors.began(passage)
                node.answered(lease, kv_tokens)
                if peer is not None and not kv_failed:
                    self._doors.kv_came(peer, node)
            if frame.kind is FrameKind.TICKET and not decoding:
                self._take_ticket(frame, lease, place.again)
            if ids and block_size:
                held += len(ids)
                if held >= grows_at:  # a block further
                    node.grown(lease, held)
                    grows_at = -(-held // block_size) * block_size + 1
            flow = reply.flow
            if flow is None or not flow.write_paused:
                return None
            passage.held_up()
            return flow.drain()

        patience_s = self._doors.patience_s(lease.tokens)
        watch = LegWatch(self._means.watches, lease, passage, patience_s, lambda: self._may_give_up(decoding))
        if peer is not None and wish is not None:
            waits_s = self._doors.waits_s(kv_tokens) * 2**self._moves
            watch.moves_after(waits_s, lambda: self._may_move(wish, node))
        seen = timeline.begins(time.monotonic(), decoding=decoding, fetches=peer is not None)
        with watch:
            try:
                ended = await self._means.legs.run(lease, self.job.path, body, self._headers, take)
                if decoding and ended is FrameKind.HANDOVER:
                    raise LegFailed("the node handed a decode leg over")
                passage.ended(time.monotonic())
                return ended
            except LegFailed as why:
                if watch.moves:
                    _log.info("id=%s: its decode leg goes from %s to where there is room", self.job.id, node.url)
                    raise _Moves from why
                if watch.silent:
                    why = LegFailed(f"the node has said nothing for {watch.patience_s:g} s", paid=True)
                broke(self._means, self.job.id, lease, role, passage, why)
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
                self._doors.look(now)

    def _take_end(
        self, frame: Frame, place: Place, seen: LegSeen, begin: int, lease: Lease, peer: Node | None, now: float
    ) -> bytes:
        """What a frame tells that ends a leg, beside its tokens; its bytes for the client."""
        if frame.timing is not None:
            self.timeline.inside(frame.timing, seen)
            generated = place.at.get(0, 0) + (0 if frame.choice else len(frame.token_ids)) - begin
            learn(lease, frame, 0 if len(place.at) > 1 else generated, peer)
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

    def _may_move(self, wish: Wish, node: Node) -> bool:
        """Whether a decode leg, which has waited for long on this node, has all that it waits for on another."""
        return not self._is_prefilling and self._means.binding.has_room_beside(wish, node)

    def _may_give_up(self, decoding: bool) -> bool:
        """Whether a leg that is silent for too long is cut. A decode leg's node may be waiting for the prefill node."""
        if self.reply.full or (decoding and self._is_prefilling):
            return False
        return self._means.retries.take(time.monotonic())

    def _goes_local_instead(self, ask: Ask, tries: Tries, why: LegFailed | Refused) -> bool:
        """After a prefill leg that broke: whether a decode node computes the prompt, and not another prefill node.

        Raises what the client is told when there is nowhere left to go, or too much is tried again already."""
        another, failure = tries.another(ask), tries.failure(ask.role, why)
        if isinstance(why, LegFailed) and not tries.may_go_on(why, begun=self.progress.forwarded):
            raise failure from why
        if not another:
            if isinstance(failure, Refused):
                raise failure
            self._means.locality.local(self._decode_ask(), "no_prefill_node", failure)
            self.timeline.local = True
        if isinstance(why, LegFailed):
            self._metrics.failovers.labels("prefill").inc()
        return not another

    def _give_back(self) -> None:
        """Whatever is held on a prefill node and will not be fetched by a decode leg is released.

        Of a leg that was cut before it has told of any, nothing is: its node has ended it."""
        node, handover = self.prefill_node, self.progress.held
        if node is None or (self.progress.settled and not self._kv_left):
            return
        if handover is not None and handover.remote_request_id is not None:
            self._means.release(node, [handover.remote_request_id])
