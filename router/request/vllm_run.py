"""The walk of one request through two vLLM nodes: prefill leg, hand-over, decode leg; and what to
do when one breaks.

Nothing of the prefill node's answer but the hand-over is used: the decode node tells of every
token, the first too.

A broken leg is tried on other nodes until the client has bytes. KV that a decode node may have read
is not offered to another one: vLLM frees a prompt's blocks after the first read and guards them
with no fence, so a second reader could get another request's KV. The prompt is prefilled again,
mostly out of the prefill node's prefix cache. After the first byte an answer ends with an error: a
vLLM node does not tell the state that another one would have to go on from.

KV that nobody fetches (the client left between the legs, or no decode node is left) stays with its
prefill node until that lets go of it: after 30 s, in older versions 480. There is no call to
release it. To have a decode node fetch it for one token would do, and costs a transfer and a seat
while the cluster is in trouble, so it is not done. A decode leg that is aborted while it waits
releases it itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import msgspec

from kvrelay.router.client_connection import Reply
from kvrelay.router.nodes.node import Lease, Node, NodeKind
from kvrelay.router.prefix.contents import BlockContents, keys_of_prompt
from kvrelay.router.request.job import CHAT_PATH, Job, prefix_of
from kvrelay.router.request.placer import PlacementLeases, PlacementQuery
from kvrelay.router.request.poison import CrashRecord
from kvrelay.router.request.retries import Attempts, RunContext
from kvrelay.router.request.timeline import AttemptTimes, Timeline
from kvrelay.router.request.vllm_bodies import (
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
from kvrelay.router.request.vllm_measured import prefilled, streamed
from kvrelay.router.request.vllm_requests import VllmLegs
from kvrelay.router.transport.node_client import AttemptFailed
from kvrelay.wire.config import Role
from kvrelay.wire.errors import DeadlineExceeded, NodeFailed

__all__ = ["VllmRun"]

_log = logging.getLogger("kvrelay.router")


class VllmRun:
    """One request on its way. `run` once. What the Relay reads is as of the walk over our own
    nodes.
    """

    def __init__(
        self,
        job: Job,
        kind: NodeKind,
        headers: Mapping[str, str],
        timeline: Timeline,
        means: RunContext,
        legs: VllmLegs,
        deaths: CrashRecord,
    ) -> None:
        """`kind`: of all nodes that the request may go to. Raises RequestError."""
        check_fields(job)
        self.job = job
        self.reply = Reply()
        self.timeline = timeline
        self.placed: PlacementLeases | None = None
        """None: it is placed leg by leg."""
        self.placement = "-"
        self.parts = ()
        self.prompt_tokens: int | None = None
        self.output_tokens = 0
        """As the node counts them; of a stream its events, which are about one per token."""
        self._kind = kind
        self._prefix = prefix_of(job).for_contents()
        self._headers = headers
        self._means, self._legs, self._deaths = means, legs, deaths
        self._pool, self._index = means.pool, means.pool.prefixes
        self._tries = {role: Attempts(means, role) for role in (Role.PREFILL, Role.DECODE)}
        self._last = dict.fromkeys(self._tries, "-")
        self._source: Node | None = None
        """The prefill node whose KV the decode leg fetches."""
        self._round = 0
        self._handed = False

    def wanted(self) -> PlacementQuery:
        """Say what is known of it."""
        return self._means.placer.wanted(self.job, self._prefix, self.prompt_tokens or 0)

    @property
    def answers(self) -> int:
        """How many come beside each other, for each prompt."""
        return self.job.choices

    @property
    def nodes(self) -> tuple[str, str]:
        """Where its last legs ran."""
        return self._last[Role.PREFILL], self._last[Role.DECODE]

    async def run(self) -> None:
        """Answer the request into `reply`. Raises KvrelayError when it cannot."""
        deadline_s = self._means.config.request_deadline_s
        try:
            async with asyncio.timeout(deadline_s - (time.monotonic() - self.timeline.arrived)):
                self._deaths.check()
                self._means.retries.add_request(time.monotonic())
                while not await self._hand_over():
                    self._round += 1
        except TimeoutError as why:
            raise DeadlineExceeded(
                f"the request did not finish within {deadline_s:g} s; ask for fewer tokens, or "
                f"raise request_deadline_s"
            ) from why

    async def _hand_over(self) -> bool:
        """Run one prefill leg and the decode legs that its KV is good for; return whether they have
        answered.
        """
        by_id = self._kind is NodeKind.VLLM_P2P_NCCL
        with ExitStack() as held:
            # Where the prefill node pushes the KV it must be told where to, before it begins.
            decode = held.enter_context(self._lease(Role.DECODE)) if by_id else None
            # Nodes that find KV by the request's id can do nothing undivided: the decode node would
            # wait for the KV.
            alone = None if by_id else undivided_because(self.job)
            headers, params = self._named(None, None), None
            self._source = None
            if alone is None:
                headers, params, alone = await self._prefill(decode)
            if alone is not None:
                self._means.metrics.undivided.labels(alone).inc()
            while True:
                if decode is None:
                    decode = held.enter_context(
                        self._lease(Role.DECODE, self.job.prompt_tokens if alone else 0)
                    )
                try:
                    await self._decode(decode, decode_body(self.job, params), headers)
                    return True
                except AttemptFailed as why:
                    await self._blame(decode, Role.DECODE, why)
                    if by_id or why.reached or not why.lost:
                        return False
                    # Nobody listens there, so the node has not heard of the KV, which is good for
                    # another one.
                    held.pop_all().close()
                    decode = None

    async def _prefill(
        self, decode: Lease | None
    ) -> tuple[dict[str, str], msgspec.Raw | None, str | None]:
        """Return the headers of the decode leg, the hand-over, and why there is none if one was to
        be.

        `decode`: the node that the KV is pushed to, for those that push; it is told nothing.
        """
        while True:
            with self._lease(Role.PREFILL, self.job.prompt_tokens) as lease:
                node, process = lease.node, (lease.node.url, lease.generation)
                headers = self._named(lease, decode)
                if forces_tools(self.job) and process in self._legs.without_forced_tools:
                    return headers, None, "forced_tools"
                try:
                    handover = await self._prefilled(lease, headers, by_id=decode is not None)
                except AttemptFailed as why:
                    failure = why
                else:
                    if decode is not None or handover.params is not None:
                        self._source = node
                        return headers, handover.params, None
                    _log.warning(
                        "prefill node %s hands no KV over; start it with a NixlConnector", node.url
                    )
                    return headers, None, "no_kv"
            if failure.status == 500 and forces_tools(self.job) and decode is None:
                _log.warning(
                    "prefill node %s fails on forced tool calls, so decode nodes do those alone",
                    node.url,
                )
                self._legs.without_forced_tools.add(process)
                return headers, None, "forced_tools"
            await self._blame(lease, Role.PREFILL, failure)

    async def _prefilled(
        self, lease: Lease, headers: Mapping[str, str], *, by_id: bool
    ) -> Handover:
        """Run one prefill leg, and learn from it. Raises AttemptFailed, Refused."""
        node, expected_ms = lease.node, lease.node.state.wait_ms  # its own prompt is in it
        contents = self._unknown_to(node)
        body = prefill_body(self.job, named_by_id=by_id, with_ids=contents is not None)
        self.timeline.prefilled = None
        leg = self.timeline.begins(time.monotonic(), decoding=False)
        try:
            handover = handover_of(await self._legs.whole(lease, self.job.path, body, headers))
            self.timeline.told(leg, 1, time.monotonic())
        finally:
            self.timeline.ends(leg, time.monotonic(), more=True)
        self.prompt_tokens = handover.prompt_tokens or None
        if handover.cached_tokens is not None:
            self._means.metrics.prefix.cached(lease.cached_tokens, handover.cached_tokens)
        prefilled(node, expected_ms, time.monotonic() - leg.began)
        if contents is not None:
            self._learn(node, contents, handover.token_ids)
        return handover

    def _unknown_to(self, node: Node) -> BlockContents | None:
        """Return the node's blocks if they are called by their content, and those of this prompt
        are not known yet.
        """
        contents = self._index.contents.get(node.url)
        known = contents is None or not contents.tells_prompts or self._index.knows(self._prefix)
        return None if known else contents

    def _learn(self, node: Node, contents: BlockContents, token_ids: list[int] | None) -> None:
        """Learn the names of the prompt's blocks from its tokens, which the node was asked for."""
        job = self.job
        if token_ids is None:
            _log.warning(
                "node %s tells no tokens of prompts, so its KV events are of no use: use vLLM "
                "0.10.2 or newer",
                node.url,
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
        """Pass the answer on. Raises Refused; AttemptFailed while the client has nothing of it, else
        NodeFailed.
        """
        job = self.job
        if self._source is not None and not self._handed:
            self._handed = True
            self._means.metrics.handed_over(job.model, *self.nodes)
        leg = self.timeline.begins(
            time.monotonic(), decoding=True, fetches=self._source is not None
        )
        complete = False
        try:
            await (self._streamed if job.stream else self._whole)(lease, leg, body, headers)
            complete = True
        finally:
            self.timeline.ends(leg, time.monotonic(), more=not complete)
        if max(job.choices, job.best_of) == 1:
            self._means.placer.answered(
                job.model, self.output_tokens, self._prefix, self.prompt_tokens or 0
            )

    async def _whole(
        self, lease: Lease, leg: AttemptTimes, body: bytes, headers: Mapping[str, str]
    ) -> None:
        leg.tokens = (
            leg.began
        )  # nobody sees when its first token is there: most of an answer are its steps
        ending = plain_answer(await self._legs.whole(lease, self.job.path, body, headers))
        if self.timeline.prefilled is not None:
            # By then the first token was computed; without a prefill leg nobody knows when that
            # was.
            self.timeline.tokens(self.timeline.prefilled)
            self.timeline.tokens(time.monotonic())
        self.prompt_tokens, self.output_tokens = ending.prompt_tokens, ending.output_tokens
        self.reply.put(self._timed(ending.body, leg))

    async def _streamed(
        self, lease: Lease, leg: AttemptTimes, body: bytes, headers: Mapping[str, str]
    ) -> None:
        newest, held_up = 0.0, False

        async def put(events: bytes) -> None:
            nonlocal newest, held_up
            if not self.output_tokens:
                lease.answered()
            self.timeline.tokens(now := time.monotonic())
            leg.tokens = leg.tokens or now
            if count := events.count(b"data: {"):
                self.output_tokens, newest = self.output_tokens + count, now
            self.reply.put(self._timed(events, leg))
            if (room := self.reply.room()) is not None:
                held_up = True
                await room

        try:
            await self._legs.events(lease, self.job.path, body, headers, put)
        except AttemptFailed as why:
            if not self.output_tokens:
                raise
            self._pool.blame(lease.node, f"a request failed on it: {why.detail}", time.monotonic())
            raise NodeFailed(
                "the decode node broke in the middle of the answer, which a vLLM node's answer "
                "cannot be continued "
                f"after; send the request again ({why.message})"
            ) from why
        one = max(self.job.choices, self.job.best_of) == 1
        if (
            one and not held_up and leg.tokens is not None
        ):  # else it is the client's doing when events come
            no_tokens = (self.job.path == CHAT_PATH) + self.job.include_usage
            streamed(lease.node, self.output_tokens - no_tokens - 1, newest - leg.tokens)

    def _timed(self, end: bytes, leg: AttemptTimes) -> bytes:
        """Return the bytes, with the stages at the end of the answer if the client asked for them."""
        if not self.job.wants_stages or (self.job.stream and not end.endswith(b"data: [DONE]\n\n")):
            return end
        now = time.monotonic()
        self.timeline.seen(leg, now)
        return self.timeline.stamped(end, now)

    @contextmanager
    def _lease(self, role: Role, tokens: int = 0) -> Iterator[Lease]:
        lease = self._means.placer.hold_alone(
            role, self.wanted(), self._tries[role].nodes(), self._kind, tokens
        )
        self._last[role] = lease.node.url
        try:
            yield lease
        finally:
            self._pool.give_back(lease)

    def _named(self, prefill: Lease | None, decode: Lease | None) -> dict[str, str]:
        """Return the headers of both legs. An id is used for one hand-over: what another has left
        must not be met.
        """
        unique = self.job.node_id if not self._round else f"{self.job.node_id}-{self._round}"
        if prefill is not None and decode is not None:
            # Not the client's own id: a colon in it would be read as an address.
            unique = p2p_request_id(
                prefill.node.p2p_address, decode.node.p2p_address, uuid.uuid4().hex
            )
        return {**self._headers, "x-request-id": unique}

    async def _blame(self, lease: Lease, role: Role, why: AttemptFailed) -> None:
        """Note that the request failed on this node, before any token, and on no other.

        Raises what the client is told when there is nowhere to go."""
        node, tries, now = lease.node, self._tries[role], time.monotonic()
        _log.warning(
            "id=%s: the %s request failed on %s: %s", self.job.id, role, node.url, why.detail
        )
        self._pool.blame(node, f"a request failed on it: {why.detail}", now)
        if why.lost and why.reached:
            self._deaths.lost(lease, now)
            await self._deaths.may_go_on()
        tries.failed(node, why)
        if not self._pool.up(role, tries.nodes(), self.job.model, self._kind):
            raise tries.failure(why) from why
        tries.require_another(why)
