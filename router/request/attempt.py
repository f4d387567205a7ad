"""One prefill or decode request on one node: its frames, its silence, and whose fault its end is."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from kvrelay.router.nodes.node import Lease, Node
from kvrelay.router.request.progress import FramePosition
from kvrelay.router.transport.node_errors import AttemptFailed, Refused
from kvrelay.wire.frames import Frame, FrameKind

if TYPE_CHECKING:
    from kvrelay.router.request.run import RequestRun

__all__ = ["Attempt"]


class Attempt:
    """A prefill or decode request on one node; `source` has the KV that a decode node fetches."""

    __slots__ = (
        "_call",
        "_lease",
        "_patience_s",
        "_position",
        "_run",
        "_silent",
        "_source",
        "_times",
        "_watched_since",
    )

    def __init__(
        self, run: RequestRun, lease: Lease, position: FramePosition, source: Node | None = None
    ) -> None:
        now, health, decoding = time.monotonic(), run.context.node_health, position.decoding
        self._run, self._lease, self._position, self._source = run, lease, position, source
        computes = decoding and source is None
        self._call = health.begin(lease.node, lease.role, now, computes=computes)
        self._times = run.timeline.begin_attempt(now, decoding=decoding, fetches=source is not None)
        self._patience_s = health.patience_s(lease.tokens)
        self._watched_since = now
        self._silent = False  # it was cut because its node sent nothing

    async def run(self, body: bytes) -> FrameKind:
        """Run the request to its last frame. Raises AttemptFailed, Refused, Diverged,
        PoisonRequest.
        """
        run, lease, call, context = self._run, self._lease, self._call, self._run.context
        context.silence.add(self)
        try:
            end = await context.node_client.run(
                lease, run.job.path, body, run.headers, self.on_frame
            )
            if self._position.decoding and end is FrameKind.HANDOVER:
                raise AttemptFailed("the node handed a decode request over")
            call.succeeded(time.monotonic())
            return end
        except AttemptFailed as why:  # noqa: F841 - it is raised below
            if self._silent:
                why = AttemptFailed(f"the node has said nothing for {self._patience_s:g} s")
                why.paid = True
            context.note_failure(run.job.id, lease, call, why)
            if why.reading:
                run.unread.append(lease)
            if why.lost and why.reached and not call.answered:
                run.crashes.lost(lease, time.monotonic())
                await run.crashes.may_go_on()
            raise why  # in no other local variable, which its traceback would keep
        except Refused as why:
            if why.kv_error and self._source is not None:
                context.note_kv_failure(self._source, lease.node, why.kv_error)
            raise
        finally:
            context.silence.discard(self)
            run.timeline.end_attempt(self._times, time.monotonic(), more=not run.progress.ended)
            call.close()

    def on_frame(self, frame: Frame) -> Awaitable[None] | None:
        """Pass a frame on; return what to wait for if the client does not read."""
        # For every token of every answer: each call in here is 1 % of what the router costs.
        run, call = self._run, self._call
        now, ids, payload = time.monotonic(), frame.token_ids, frame.payload
        if frame.kind is not FrameKind.TOKENS:
            payload = self._on_other_frame(frame, now)
        if frame.kv_error and self._source is not None:
            run.kv_failed = True
            run.context.note_kv_failure(self._source, self._lease.node, frame.kv_error)
        timeline, progress, reply = run.timeline, run.progress, run.reply
        if progress.take(frame, self._position):
            if ids:
                timeline.last_token = now
                if timeline.first_token is None:
                    timeline.first_token = now
            if payload:
                last = progress.ended and not run.job.part
                (reply.put_last if last else reply.put)(payload)
        if ids and self._times.tokens is None and not frame.choice:
            timeline.note_first_token(self._times, self._position.at[0], now)
        if ids and call.steady:
            call.heard_at = now
        elif call.heard(now, tokens=bool(ids)):
            self._on_first_tokens()
        flow = reply.flow
        if flow is None or not flow.write_paused:
            return None
        return flow.drain()

    def _on_first_tokens(self) -> None:
        run = self._run
        run.context.node_health.answered(self._call)
        run.crashes.first_token.set()
        self._lease.answered()
        if self._source is not None and not run.kv_failed:
            run.context.node_health.kv_came(self._source, self._lease.node)

    def _on_other_frame(self, frame: Frame, now: float) -> bytes:
        run, timing = self._run, frame.timing
        if timing is not None:
            run.timeline.note_report(timing, self._times)
        if frame.kind is FrameKind.TICKET and not self._position.decoding:
            run.on_ticket(frame, self._lease)
        return run.on_end(frame, now) if frame.kind is FrameKind.END else frame.payload

    def check_silence(self, now: float) -> None:
        run, lease = self._run, self._lease
        since = max(self._watched_since, self._call.heard_at)
        if since + self._patience_s > now or lease.cut is None or self._silent:
            return
        self._watched_since = now
        # The client may not read, and a decode node may be waiting for the prefill node.
        if run.reply.full or (self._position.decoding and run.is_prefilling):
            return
        self._silent = run.context.retries.spend(now)
        if self._silent:
            lease.cut()
