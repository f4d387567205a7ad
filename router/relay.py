"""The answer that a client sees: headers as late as is honest, then bytes, never a silent end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.openai_api.dialects.base import AS_IS, Dialect, openai_error
from kvrelay.openai_api.sse import error_event
from kvrelay.router.admission.controller import AdmissionSlot
from kvrelay.router.client_connection import take_client
from kvrelay.router.request.run import Run
from kvrelay.wire.errors import Draining, ErrorBody, KvrelayError, NodeFailed, without_frames

__all__ = ["CLIENT_GONE", "HOLD_S", "Finished", "Relay", "error_response", "id_headers"]

HOLD_S = 10.0
"""Seconds that headers wait for a first payload; afterwards, silence before a keep-alive comment."""
CLIENT_GONE = 499
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

Finished = Callable[[int, KvrelayError | None], None]
"""Called with the status (that of an in-band error, too) and what went wrong."""

_log = logging.getLogger("kvrelay.router")


def error_response(
    why: KvrelayError,
    headers: Mapping[str, str] | None = None,
    shape: Callable[[int, ErrorBody], bytes] = openai_error,
) -> Response:
    every = {**(headers or {}), **why.headers}
    if why.retry_after_s is not None:
        every["retry-after"] = str(why.retry_after_s)
    return Response(shape(why.status, why.body()), why.status, every, "application/json")


def id_headers(job_id: str) -> dict[str, str]:
    return {"x-request-id": job_id, "request-id": job_id}


class Relay(Response):
    """An answer that runs its own request, in the client's dialect."""

    def __init__(self, run: Run, slot: AdmissionSlot, finished: Finished, dialect: Dialect) -> None:
        """`finished` is called once, however the request ends."""
        super().__init__()
        self._dialect = dialect
        self._run = run
        self._slot = slot
        self._extra = id_headers(run.job.id) | slot.headers
        self._finished = finished
        self._running = False
        self._left = False  # the client went away before the end
        self._begun = False  # headers were sent
        self._complete = False  # the last byte was sent
        self._pieces = 0  # that were sent when they were last counted
        self._broken: NodeFailed | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._client = task, take_client(scope)
        self._client.watch(self._leave)
        self._left = self._client.gone
        failure: KvrelayError | None = None
        try:
            if self._run.job.stream:
                self._run.reply.pass_on(self._pass, self._client.flow)
                self._holding = task.get_loop().call_later(HOLD_S, self._hold)
            failure = None if self._left else await self._failure_of_run()
            if self._run.job.stream:
                self._holding.cancel()
            if not self._left:
                failure = await self._end(failure, scope, receive, send)
        finally:
            self._client.watch(None)
            status = 200 if failure is None else failure.status
            self._finished(status if self._complete else CLIENT_GONE, failure)
            # Frees a long body now instead of when the collector runs.
            self._run.reply.detach()
            if failure is not None:
                without_frames(failure)

    def _leave(self) -> None:
        self._left = not self._complete
        if self._running:
            self._task.cancel()

    async def _failure_of_run(self) -> KvrelayError | None:
        self._running = True
        try:
            await self._slot.begun()
            self._run.placed = self._slot.placed
            await self._run.run()
        except KvrelayError as why:
            return why
        except asyncio.CancelledError:
            self._task.uncancel()
            if not self._left and self._broken is None:  # the server's grace period is over
                return Draining(
                    "the router is shutting down and its time for open requests is over; send the "
                    "request again"
                )
            return self._broken
        except Exception:  # noqa: BLE001 - the edge of a request: it must end, with an honest answer
            _log.exception("id=%s: the request failed by an error of the router", self._run.job.id)
            return KvrelayError("the router broke on this request; its log says how")
        finally:
            self._running = False
        return None

    def _pass(self, payload: bytes) -> None:
        if self._broken is None:
            try:
                self._send(self._dialect.events(payload))
            except NodeFailed as why:
                self._broken = why
                self._task.cancel()

    def _send(self, events: bytes) -> None:
        if not self._begun:
            self._begun = True
            extra = [
                (name.encode("latin-1"), value.encode("latin-1"))
                for name, value in self._extra.items()
            ]
            self._client.begin(200, (*_STREAM_HEADERS, *extra))
            if self._dialect is AS_IS:  # the rest needs nothing from here
                client = self._client
                self._run.reply.pass_on(client.write, client.flow, client.write_last)
        self._client.write(events)

    def _hold(self) -> None:
        if self._client.pieces == self._pieces:
            self._send(self._dialect.keep_alive())
        self._pieces = self._client.pieces
        self._holding = self._task.get_loop().call_later(HOLD_S, self._hold)

    async def _end(
        self, failure: KvrelayError | None, scope: Scope, receive: Receive, send: Send
    ) -> KvrelayError | None:
        # Returns what went wrong in the end.
        if self._run.job.stream and (failure is None or self._begun):
            self._send(self._dialect.events(b"" if failure is None else error_event(failure)))
            self._client.end()
            self._complete = True
            return failure
        if failure is None:
            try:
                body = self._run.reply.kept()
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
