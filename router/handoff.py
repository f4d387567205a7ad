"""The walk of one request: prefill leg, hand-over, decode leg; what to do when one breaks; giving back what it took.

The decode leg begins with the prefill leg's ticket, before the prompt is computed: its node makes room, and reads what
is computed while the rest is. The first token comes through whichever leg has it first.

Knows frames and nodes, not HTTP servers: bytes for the client go to a Reply.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence

from openai_api.stages import with_stages
from router.chores import Chores
from router.job import Job, decode_body, prefill_body, prefix_of
from router.legs import LegFailed, Legs, Refused
from router.measured import learn
from router.metrics import Metrics
from router.policies.policy import Ask
from router.pool import Lease, Node, Pool
from router.progress import Diverged, Place, Progress
from router.reply import Reply
from router.timeline import Timeline
from wire.config import Role
from wire.errors import DeadlineExceeded, NodeFailed, Unavailable
from wire.frames import Frame, FrameKind

__all__ = ["Walk"]

_log = logging.getLogger("kvrelay.router")


class Walk:
    """One request on its way through two nodes. `run` once."""

    def __init__(
        self,
        job: Job,
        headers: Mapping[str, str],
        timeline: Timeline,
        pool: Pool,
        legs: Legs,
        chores: Chores,
        metrics: Metrics,
        attempts: int,
        deadline_s: float,
        reply: Reply | None = None,
    ) -> None:
        self.job = job
        self.reply = reply or Reply()
        self.progress = Progress(job)
        self._prefix = prefix_of(job)
        self.timeline = timeline
        self.prefill_node: Node | None = None
        self.decode_node: Node | None = None
        self._headers = headers
        self._pool = pool
        self._legs = legs
        self._chores = chores
        self._metrics = metrics
        self._attempts = attempts
        self._deadline_s = deadline_s
        self.counts: tuple[int, int, int] = (0, 0, 0)
        """Of the ended answer: tokens of the prompt, generated ones, cached ones of the prompt."""
        self._prefill_cut = False
        self._prefilling: asyncio.Task[bool] | None = None
        self._decoding: asyncio.Task[None] | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """Known once the prompt was handed over."""
        handover = self.progress.handover
        return len(handover.prompt_token_ids) if handover and handover.prompt_token_ids else None

    @property
    def output_tokens(self) -> int:
        """So far, of all choices."""
        return self.progress.output_tokens

    @property
    def nodes(self) -> tuple[str, str]:
        """Where its last legs ran."""
        prefill, decode = (node.url if node else "-" for node in (self.prefill_node, self.decode_node))
        return prefill, decode

    async def run(self) -> None:
        """Answer the request into `reply`. Raises KvrelayError when it cannot; the KV is given back in any case."""
        try:
            async with asyncio.timeout(self._deadline_s - (time.monotonic() - self.timeline.arrived)):
                self._pool.require_ready(self.job.model)
                await self._walk()
        except TimeoutError as why:
            raise DeadlineExceeded(
                f"the request did not finish within {self._deadline_s:g} s; "
                "ask for fewer tokens, or raise request_deadline_s"
            ) from why
        finally:
            try:
                await self._end_tasks()
            finally:
                self._give_back()

    async def _walk(self) -> None:
        """Both legs, the second beside the first as soon as there is a ticket."""
        self._prefilling = asyncio.create_task(self._prefill())
        try:
            goes_on = await self._prefilling
        except asyncio.CancelledError:
            # By the decode leg, when it has told all that there is; or the walk itself is cancelled.
            me = asyncio.current_task()
            if self._decoding is None or not self._decoding.done() or (me is not None and me.cancelling()):
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
        except Refused:
            self._prefilling.cancel()
            raise
        self._prefilling.cancel()

    async def _end_tasks(self) -> None:
        tasks = [task for task in (self._prefilling, self._decoding) if task is not None]
        for task in tasks:
            task.cancel()
        # What they raise has been raised already, or nobody wants to know any more.
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prefill(self) -> bool:
        """True if a decode leg must follow: the prefill node handed over, or broke after token 1 had been sent on."""
        body = prefill_body(self.job)
        tried: list[Node] = []
        while True:
            with self._pool.lease(self._ask(Role.PREFILL, self.job.prompt_tokens), tried) as lease:
                self.prefill_node, self.timeline.prefilled = lease.node, None
                self.timeline.sent = self.timeline.sent or time.monotonic()
                try:
                    ended = await self._leg(lease, body, Place())
                    if ended is FrameKind.HANDOVER:
                        self.timeline.handed_over = time.monotonic()
                    return ended is FrameKind.HANDOVER
                except asyncio.CancelledError:
                    self._prefill_cut = True
                    raise
                except LegFailed as why:
                    self._blame(lease.node, why, tried)
                    failure = why
            if self._decoding is not None:
                # It computes the prompt itself, if it must.
                self._metrics.failovers.labels("prefill").inc()
                return True
            if not self.progress.start_over():
                self._metrics.failovers.labels("prefill").inc()
                return True
            self._require_another(Role.PREFILL, tried, failure)

    async def _decode(self) -> None:
        """Decode legs, each from where the answer stands, until one ends it."""
        tried: list[Node] = []
        while True:
            params = self.progress.decode_params()
            tokens = self.progress.tokens_to_compute(params)
            with self._pool.lease(self._ask(Role.DECODE, tokens), tried) as lease:
                self.decode_node = lease.node
                try:
                    await self._leg(lease, decode_body(self.job, params), Place.behind(params))
                    return
                except Diverged as why:
                    # Nobody's fault; the next leg begins behind what the client has.
                    _log.warning("id=%s: the decode leg on %s is begun again: %s", self.job.id, lease.node.url, why)
                    continue
                except LegFailed as why:
                    self._blame(lease.node, why, tried)
                    failure = why
            self._require_another(Role.DECODE, tried, failure)

    def _ask(self, role: Role, tokens: int) -> Ask:
        """For a leg that must compute so many tokens before it goes on."""
        job, peer = self.job, self.prefill_node
        if role is Role.PREFILL:
            return Ask(role, job.model, tokens, priority=job.priority, session=job.session, prefix=self._prefix)
        return Ask(
            role,
            job.model,
            tokens,
            kv_tokens=self.prompt_tokens or job.prompt_tokens,
            output_tokens=job.max_tokens,
            priority=job.priority,
            session=job.session,
            prefix=self._prefix,
            peer="" if peer is None else peer.url,
        )

    async def _leg(self, lease: Lease, body: bytes, place: Place) -> FrameKind:
        """One leg on one node, its frames passed on. Raises LegFailed, Refused, Diverged."""
        decoding, begin = place.decoding, place.at.get(0, 0)

        def take(frames: Sequence[Frame]) -> Awaitable[None] | None:
            for frame in frames:
                now = time.monotonic()
                if frame.timing is not None:
                    self.timeline.inside(frame.timing, decoding)
                    told = place.at.get(0, 0) + (0 if frame.choice else len(frame.token_ids)) - begin
                    learn(lease, frame, 0 if len(place.at) > 1 else told, self.prefill_node if decoding else None)
                self.counts = frame.usage or self.counts
                if self.progress.take(frame, place):
                    if frame.token_ids:
                        self.timeline.tokens(now)
                    self.reply.put(self._timed(frame, now))
                if frame.token_ids:
                    lease.node.answered(lease)
                if frame.token_ids and not frame.choice:
                    self.timeline.told(place.at[0], now, decoding)
                if frame.kind is FrameKind.TICKET and not decoding:
                    self._learn(frame, lease)
                if frame.kind is FrameKind.TICKET and not decoding and self._decoding is None:
                    self._decoding = asyncio.create_task(self._decode_early())
            return self.reply.room()

        ended = await self._legs.run(lease, self.job.path, body, self._headers, take)
        if decoding and ended is FrameKind.HANDOVER:
            raise LegFailed("the node handed a decode leg over")
        return ended

    def _learn(self, frame: Frame, lease: Lease) -> None:
        """A prefill node has tokenized the prompt, and looked it up in its prefix cache."""
        if frame.params is None:
            return
        self._metrics.prefix.cached(lease.cached_tokens, frame.params.cached_tokens)
        if frame.blocks is not None:
            self._prefix = self._prefix.known(frame.blocks, frame.params.num_tokens)
            self._pool.prefixes.learn(self._prefix)

    def _timed(self, frame: Frame, now: float) -> bytes:
        """A frame's bytes for the client, at the end of the answer with the stages if it asked for them."""
        if frame.kind is not FrameKind.END or not self.job.wants_stages:
            return frame.payload
        return with_stages(frame.payload, {name: took * 1e3 for name, took in self.timeline.stages_s(now).items()})

    def _blame(self, node: Node, why: LegFailed, tried: list[Node]) -> None:
        tried.append(node)
        if why.draining:
            self._pool.drains(node, time.monotonic())
            return
        _log.warning("id=%s: the %s leg broke on %s: %s", self.job.id, node.role, node.url, why.detail)
        self._pool.blame(node, f"a leg broke on it: {why.detail}", time.monotonic())

    def _require_another(self, role: Role, tried: list[Node], why: LegFailed) -> None:
        """Count a fail-over, or raise what the client is told when there is nowhere left to go."""
        if len(tried) < self._attempts and self._pool.up(role, tried, self.job.model):
            self._metrics.failovers.labels(role.value).inc()
            return
        failure = NodeFailed(
            f"no {role} node could serve the request ({len(tried)} tried); the last one: {why.message}"
        )
        failure.status, failure.retry_after_s = why.status, why.retry_after_s
        raise failure from why

    def _give_back(self) -> None:
        """Whatever is held on a prefill node and will not be fetched by a decode leg is released."""
        node, handover = self.prefill_node, self.progress.handover or self.progress.ticket
        if node is None or self.progress.settled:
            return
        if handover is not None and handover.remote_request_id is not None:
            self._chores.spawn(self._release(node, [handover.remote_request_id]))
        elif self._prefill_cut:
            # Cut off by us: its hand-over may be on its way, unread. Nodes ignore ids that they do not know.
            self._chores.spawn(self._release(node, [self.job.id, self.job.response_id]))

    async def _release(self, node: Node, request_ids: list[str]) -> None:
        told = await self._legs.release(node, request_ids)
        self._metrics.releases.labels("yes" if told else "no").inc()
