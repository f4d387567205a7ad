"""The walk of one request through two vLLM nodes: prefill leg, hand-over, decode leg; and what to do when one breaks.

Nothing of the prefill node's answer but the hand-over is used: the decode node tells of every token, the first too.

A broken leg is tried on other nodes until the client has bytes. KV that a decode node may have read is not offered to
another one: vLLM frees a prompt's blocks after the first read and guards them with no fence, so a second reader could
get another request's KV. The prompt is prefilled again, mostly out of the prefill node's prefix cache. After the first
byte an answer ends with an error: a vLLM node does not tell the state that another one would have to go on from.

KV that nobody fetches (the client left between the legs, or no decode node is left) stays with its prefill node until
that lets go of it: after 30 s, in older versions 480. There is no call to release it. To have a decode node fetch it
for one token would do, and costs a transfer and a seat while the cluster is in trouble, so it is not done. A decode leg
that is aborted while it waits releases it itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import msgspec

from router.legs.legs import LegFailed
from router.metrics import Metrics
from router.nodes.node import Lease, Node, NodeKind
from router.nodes.pool import Pool
from router.prefix.contents import keys_of_prompt
from router.reply import Reply
from router.timeline import LegSeen, Timeline
from router.vllm.bodies import (
    Handover,
    check_fields,
    decode_body,
    forces_tools,
    handover_of,
    p2p_request_id,
    plain_answer,
    prefill_body,
    undivided_because,
)
from router.vllm.legs import NotReached, VllmLegs
from router.vllm.measured import DecodeTimes, prefilled
from router.walk.deaths import Deaths
from router.walk.job import CHAT_PATH, Job, prefix_of
from router.walk.placer import Placed, Placer, Wanted
from wire.config import Role
from wire.errors import DeadlineExceeded, NodeFailed

__all__ = ["VllmWalk"]

_log = logging.getLogger("kvrelay.router")


class VllmWalk:
    """One request on its way. `run` once. What the Relay reads is as of the walk over our own nodes."""

    def __init__(
        self,
        job: Job,
        kind: NodeKind,
        headers: Mapping[str, str],
        timeline: Timeline,
        pool: Pool,
        placer: Placer,
        legs: VllmLegs,
        metrics: Metrics,
        deaths: Deaths,
        attempts: int,
        deadline_s: float,
    ) -> None:
        """`kind`: of all nodes that the request may go to. Raises RequestError."""
        check_fields(job)
        self.job = job
        self.reply = Reply()
        self.timeline = timeline
        self.placed: Placed | None = None
        """None: it is placed leg by leg."""
        self.placement = "-"
        self.prompt_tokens: int | None = None
        self.output_tokens = 0
        """As the node counts them; of a stream its events, which are about one per token."""
        self._kind = kind
        self._prefix = prefix_of(job).for_contents()
        self._headers = headers
        self._pool, self._placer = pool, placer
        self._index = pool.prefixes
        self._legs = legs
        self._metrics, self._deaths = metrics, deaths
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._tried: dict[Role, list[Node]] = {Role.PREFILL: [], Role.DECODE: []}
        self._last: dict[Role, str] = {Role.PREFILL: "", Role.DECODE: ""}
        self._source: Node | None = None
        """The prefill node whose KV the decode leg fetches."""
        self._round = 0
        self._handed = False

    def wanted(self) -> Wanted:
        """Say what is known of it."""
        return self._placer.wanted(self.job, self._prefix, self.prompt_tokens or 0)

    @property
    def answers(self) -> int:
        """How many come beside each other, for each prompt."""
        return self.job.choices

    @property
    def nodes(self) -> tuple[str, str]:
        """Where its last legs ran."""
        return self._last[Role.PREFILL] or "-", self._last[Role.DECODE] or "-"

    async def run(self) -> None:
        """Answer the request into `reply`. Raises KvrelayError when it cannot."""
        try:
            async with asyncio.timeout(self._deadline_s - (time.monotonic() - self.timeline.arrived)):
                self._deaths.check()
                while not await self._hand_over():
                    self._round += 1
        except TimeoutError as why:
            raise DeadlineExceeded(
                f"the request did not finish within {self._deadline_s:g} s; "
                "ask for fewer tokens, or raise request_deadline_s"
            ) from why

    async def _hand_over(self) -> bool:
        """One prefill leg and the decode legs that its KV is good for; whether they have answered the request."""
        by_id = self._kind is NodeKind.VLLM_P2P_NCCL
        with ExitStack() as held:
            # Where the prefill node pushes the KV it must be told where to, before it begins.
            decode = held.enter_context(self._lease(Role.DECODE)) if by_id else None
            # Nodes that find KV by the request's id can do nothing undivided: the decode node would wait for the KV.
            alone = None if by_id else undivided_because(self.job)
            headers, params = self._named(None, None), None
            self._source = None
            if alone is None:
                headers, params, alone = await self._prefill(decode)
            if alone is not None:
                self._metrics.undivided.labels(alone).inc()
            while True:
                if decode is None:
                    decode = held.enter_context(self._lease(Role.DECODE, self.job.prompt_tokens if alone else 0))
                try:
                    await self._decode(decode, decode_body(self.job, params), headers)
                    return True
                except NotReached as why:
                    await self._blame(decode, Role.DECODE, why)
                    if by_id:
                        return False  # the KV went to the node that cannot be reached
                    held.pop_all().close()
                    decode = None
                except LegFailed as why:
                    await self._blame(decode, Role.DECODE, why)
                    return False

    async def _prefill(self, decode: Lease | None) -> tuple[dict[str, str], msgspec.Raw | None, str | None]:
        """The headers that the decode leg must carry, the hand-over, and why there is none if one was to be.

        `decode`: the node that the KV is pushed to, for those that push; it is told nothing.
        """
        while True:
            with self._lease(Role.PREFILL, self.job.prompt_tokens) as lease:
                node = lease.node
                expected_ms = node.state.wait_ms  # its own prompt is in it
                headers = self._named(lease, decode)
                if forces_tools(self.job) and not self._legs.forces_tools(node):
                    return headers, None, "forced_tools"
                with_ids = self._wants_ids(node)
                body = prefill_body(self.job, named_by_id=decode is not None, with_ids=with_ids)
                self.timeline.prefilled = None
                leg = self.timeline.begins(time.monotonic(), decoding=False)
                try:
                    answer = await self._legs.whole(lease, self.job.path, body, headers)
                    handover = handover_of(answer, with_ids=with_ids)
                except LegFailed as why:
                    failure = why
                except NodeFailed as why:
                    failure = LegFailed(why.message)
                else:
                    self.timeline.told(leg, 1, time.monotonic())
                    self._handed_over(lease, handover, expected_ms, time.monotonic() - leg.began)
                    if with_ids:
                        self._learn(node, handover.token_ids)
                    if decode is not None or handover.params is not None:
                        self._source = node
                        return headers, handover.params, None
                    _log.warning("prefill node %s hands no KV over; start it with a NixlConnector", node.url)
                    return headers, None, "no_kv"
                finally:
                    self.timeline.ends(leg, time.monotonic(), more=True)
            if failure.status == 500 and forces_tools(self.job) and decode is None:
                _log.warning("prefill node %s fails on forced tool calls, so decode nodes do those alone", node.url)
                self._legs.note_without_forced_tools(node)
                return headers, None, "forced_tools"
            await self._blame(lease, Role.PREFILL, failure)

    def _handed_over(self, lease: Lease, handover: Handover, expected_ms: float, took_s: float) -> None:
        """A prefill leg has ended well."""
        self.prompt_tokens = handover.prompt_tokens or None
        if handover.cached_tokens is not None:
            self._metrics.prefix.cached(lease.cached_tokens, handover.cached_tokens)
        prefilled(lease.node, expected_ms, took_s)

    def _wants_ids(self, node: Node) -> bool:
        """Whether its blocks are called by their content, and those of this prompt are not known yet."""
        contents = self._index.contents.get(node.url)
        return contents is not None and contents.tells_prompts and not self._index.knows(self._prefix)

    def _learn(self, node: Node, token_ids: list[int] | None) -> None:
        """The node was asked for the tokens of the prompt: they name its blocks."""
        contents, job = self._index.contents.get(node.url), self.job
        if contents is None:
            return
        if token_ids is None:
            _log.warning(
                "node %s tells no tokens of prompts, so its KV events are of no use: use vLLM 0.10.2 or newer", node.url
            )
            contents.tells_prompts = False
            if self._index.trusts(node.url):
                self._index.trust(node.url, whole=False)
        elif block_size := contents.block_size or node.load.block_size:
            adapter = "" if job.model == node.model or job.model in contents.aliases else job.model
            keys = keys_of_prompt(token_ids, block_size, adapter, job.cache_salt)
            self._prefix = self._prefix.called(keys, len(token_ids), block_size)
            self._index.learn(self._prefix)

    async def _decode(self, lease: Lease, body: bytes, headers: Mapping[str, str]) -> None:
        """Pass the answer on. Raises Refused; LegFailed while the client has nothing of it, else NodeFailed."""
        if self._source is not None and not self._handed:
            self._handed = True
            self._metrics.handed_over(self.job.model, *self.nodes)
        leg = self.timeline.begins(time.monotonic(), decoding=True, fetches=self._source is not None)
        complete = False
        try:
            await self._decoded(lease, leg, body, headers)
            complete = True
        finally:
            self.timeline.ends(leg, time.monotonic(), more=not complete)

    async def _decoded(self, lease: Lease, leg: LegSeen, body: bytes, headers: Mapping[str, str]) -> None:
        job = self.job
        times = DecodeTimes(lease.node)
        one = max(job.choices, job.best_of) == 1
        if not job.stream:
            leg.tokens = leg.began  # nobody sees when its first token is there: most of an answer are its steps
            answer = await self._legs.whole(lease, self.job.path, body, headers)
            try:
                ending = plain_answer(answer)
            except NodeFailed as why:
                raise LegFailed(why.message) from why
            now = time.monotonic()
            if self.timeline.prefilled is not None:
                # By then the first token was computed; without a prefill leg nobody knows when that was.
                self.timeline.tokens(self.timeline.prefilled)
                self.timeline.tokens(now)
            self.prompt_tokens, self.output_tokens = ending.prompt_tokens, ending.output_tokens
            if one:
                self._placer.answered(job.model, self.output_tokens, self._prefix, self.prompt_tokens or 0)
            self.reply.put(self._timed(ending.body, leg))
            return

        async def put(events: bytes) -> None:
            if not self.output_tokens:
                lease.answered()
            self.timeline.tokens(now := time.monotonic())
            leg.tokens = leg.tokens or now
            count = events.count(b"data: {")
            self.output_tokens += count
            times.come(count, now)
            self.reply.put(self._timed(events, leg))
            if (room := self.reply.room()) is not None:
                times.held_up()
                await room

        try:
            await self._legs.events(lease, self.job.path, body, headers, put)
        except LegFailed as why:
            if not self.output_tokens:
                raise
            self._pool.blame(lease.node, f"a leg broke on it: {why.detail}", time.monotonic())
            raise NodeFailed(
                "the decode node broke in the middle of the answer, which a vLLM node's answer cannot be continued "
                f"after; send the request again ({why.message})"
            ) from why
        if one:
            self._placer.answered(job.model, self.output_tokens, self._prefix, self.prompt_tokens or 0)
            times.streamed((job.path == CHAT_PATH) + job.include_usage)

    def _timed(self, end: bytes, leg: LegSeen) -> bytes:
        """With the stages at the end of the answer, if the client asked for them."""
        if not self.job.wants_stages or (self.job.stream and not end.endswith(b"data: [DONE]\n\n")):
            return end
        now = time.monotonic()
        self.timeline.seen(leg, now)
        return self.timeline.stamped(end, now)

    @contextmanager
    def _lease(self, role: Role, tokens: int = 0) -> Iterator[Lease]:
        lease = self._placer.hold_alone(role, self.wanted(), self._tried[role], self._kind, tokens)
        self._last[role] = lease.node.url
        try:
            yield lease
        finally:
            self._pool.give_back(lease)

    def _named(self, prefill: Lease | None, decode: Lease | None) -> dict[str, str]:
        """The headers of both legs. An id is used for one hand-over: what the last one has left must not be met."""
        unique = self.job.node_id if not self._round else f"{self.job.node_id}-{self._round}"
        if prefill is not None and decode is not None:
            # Not the client's own id: a colon in it would be read as an address.
            unique = p2p_request_id(prefill.node.p2p_address, decode.node.p2p_address, uuid.uuid4().hex)
        return {**self._headers, "x-request-id": unique}

    async def _blame(self, lease: Lease, role: Role, why: LegFailed) -> None:
        """The leg broke on this node, before any token, and on no other. Raises what the client is told when there is
        nowhere to go."""
        node, now = lease.node, time.monotonic()
        _log.warning("id=%s: the %s leg broke on %s: %s", self.job.id, role, node.url, why.detail)
        self._pool.blame(node, f"a leg broke on it: {why.detail}", now)
        if why.lost:
            self._deaths.lost(lease, now)
            await self._deaths.may_go_on()
        tried = self._tried[role]
        tried.append(node)
        if len(tried) < self._attempts and self._pool.up(role, tried, self.job.model, self._kind):
            self._metrics.failovers.labels(role.value).inc()
            return
        failure = NodeFailed(
            f"no {role} node could serve the request ({len(tried)} tried); the last one: {why.message}"
        )
        failure.status, failure.retry_after_s = why.status, why.retry_after_s
        raise failure from why
