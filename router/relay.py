"""What the client sees of a walk: headers as late as is honest, then bytes, and never a silent end.

Owns an answer's side of the client and ends the walk if the client goes away. Knows nothing of
nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.openai_api.dialects.base import AS_IS, Dialect, openai_error
from kvrelay.openai_api.sse import error_event
from kvrelay.router.admission.gate import Turn
from kvrelay.router.client_connection import take_client
from kvrelay.router.request.multi_prompt import MultiPromptRun
from kvrelay.router.request.run import RequestRun
from kvrelay.router.request.vllm_run import VllmRun
from kvrelay.wire.errors import Draining, ErrorBody, KvrelayError, NodeFailed, without_frames

__all__ = ["CLIENT_GONE", "AnyRun", "HOLD_S", "Finished", "Relay", "error_response", "id_headers"]

HOLD_S = 10.0
"""Headers wait this long for the first payload; after them, a comment is sent when nothing came for
as long, at most for twice as long.
"""
CLIENT_GONE = 499
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

AnyRun = RequestRun | MultiPromptRun | VllmRun
"""The walk of a request: over our nodes, one for each of several prompts, or over vLLM's nodes."""
Finished = Callable[[int, KvrelayError | None], None]
"""Told the status (CLIENT_GONE if the client left; an in-band error's own) and what went wrong."""

_log = logging.getLogger("kvrelay.router")


def error_response(
    why: KvrelayError,
    headers: Mapping[str, str] | None = None,
    shape: Callable[[int, ErrorBody], bytes] = openai_error,
) -> Response:
    """Return the answer to an error, its body made by `shape`."""
    every = {**(headers or {}), **why.headers}
    if why.retry_after_s is not None:
        every["retry-after"] = str(why.retry_after_s)
    return Response(shape(why.status, why.body()), why.status, every, "application/json")


def id_headers(job_id: str) -> dict[str, str]:
    """Return how an answer tells its request's id."""
    return {"x-request-id": job_id, "request-id": job_id}  # the second is Anthropic's name of it


class Relay(Response):
    """An answer that runs its own walk, in the client's dialect. `finished` is called once, however
    it ended.
    """

    def __init__(self, walk: AnyRun, turn: Turn, finished: Finished, dialect: Dialect) -> None:
        super().__init__()
        self._dialect = dialect
        self._walk = walk
        self._turn = turn
        self._extra = id_headers(walk.job.id) | turn.headers
        self._finished = finished
        self._walking = False
        self._left = False  # the client went away before the end
        self._begun = False  # headers were sent
        self._complete = False  # the last byte was sent
        self._pieces = 0  # that were sent when they were last counted
        self._broken: NodeFailed | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, in the task of its own that every request has; no other is left when
        it ends.
        """
        task = asyncio.current_task()
        assert task is not None
        self._task, self._client = task, take_client(scope)
        self._client.watch(self._leave)
        self._left = self._client.gone
        failure: KvrelayError | None = None
        try:
            if self._walk.job.stream:
                self._walk.reply.pass_on(self._pass, self._client.flow)
                self._holding = task.get_loop().call_later(HOLD_S, self._hold)
            failure = None if self._left else await self._walked()
            if self._walk.job.stream:
                self._holding.cancel()
            if not self._left:
                failure = await self._end(failure, scope, receive, send)
        finally:
            self._client.watch(None)
            status = (
                CLIENT_GONE if not self._complete else 200 if failure is None else failure.status
            )
            self._finished(status, failure)
            # A long body is given back now, and not when the collector comes to it.
            self._walk.reply.detach()
            if failure is not None:
                without_frames(failure)

    def _leave(self) -> None:
        """End the walk of a client that went away."""
        self._left = not self._complete
        if self._walking:
            self._task.cancel()

    async def _walked(self) -> KvrelayError | None:
        """Run the walk, and return what went wrong."""
        self._walking = True
        try:
            await self._turn.begun()
            self._walk.placed = self._turn.placed
            await self._walk.run()
        except KvrelayError as why:
            return why
        except asyncio.CancelledError:
            self._task.uncancel()
            if not self._left and self._broken is None:  # by the server, whose time to end is over
                return Draining(
                    "the router ends, and has waited for this request as long as it may; send it "
                    "again"
                )
            return self._broken
        except Exception:  # noqa: BLE001 - the edge of a request: it must end, with an honest answer
            _log.exception(
                "id=%s: the walk broke on an error of the router itself", self._walk.job.id
            )
            return KvrelayError("the router broke on this request; its log says how")
        finally:
            self._walking = False
        return None

    def _pass(self, payload: bytes) -> None:
        """Send events of the walk to the client."""
        if self._broken is None:
            try:
                self._send(self._dialect.events(payload))
            except NodeFailed as why:
                self._broken = why
                self._task.cancel()

    def _send(self, events: bytes) -> None:
        """Send events, with the headers if they were not sent yet."""
        if not self._begun:
            self._begun = True
            extra = [
                (name.encode("latin-1"), value.encode("latin-1"))
                for name, value in self._extra.items()
            ]
            self._client.begin(200, (*_STREAM_HEADERS, *extra))
            if self._dialect is AS_IS:  # from now on there is nothing to do
                self._walk.reply.pass_on(
                    self._client.write, self._client.flow, self._client.write_last
                )
        self._client.write(events)

    def _hold(self) -> None:
        """Say something if nothing was sent since this was asked last."""
        if self._client.pieces == self._pieces:
            self._send(self._dialect.keep_alive())
        self._pieces = self._client.pieces
        self._holding = self._task.get_loop().call_later(HOLD_S, self._hold)

    async def _end(
        self, failure: KvrelayError | None, scope: Scope, receive: Receive, send: Send
    ) -> KvrelayError | None:
        """Send the rest, or an error: as an event behind others, or with its honest status. Return
        what went wrong.
        """
        if self._walk.job.stream and (failure is None or self._begun):
            self._send(self._dialect.events(b"" if failure is None else error_event(failure)))
            self._client.end()
            self._complete = True
            return failure
        if failure is None:
            try:
                body = self._walk.reply.kept()
                if not body:
                    raise NodeFailed("a node ended the request without an answer; send it again")
                answer = Response(self._dialect.whole(body), 200, self._extra, "application/json")
            except NodeFailed as why:
                failure = why
        if failure is not None:
            answer = error_response(failure, self._extra, self._dialect.error)
        await answer(scope, receive, send)
        self._complete = not self._left
        return failure
