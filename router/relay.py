"""What the client sees of a walk: headers as late as is honest, then bytes, and never a silent end.

Owns the ASGI side of an answer and watches for the client going away. Knows nothing of nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openai_api.dialect import AS_IS, Dialect, openai_error
from openai_api.sse import error_event
from router.gate import Turn
from router.handoff import Walk
from router.joined_walk import JoinedWalk
from router.vllm.walk import VllmWalk
from wire.errors import ErrorBody, KvrelayError, NodeFailed

__all__ = ["CLIENT_GONE", "HOLD_S", "Finished", "Relay", "error_response", "id_headers"]

HOLD_S = 10.0
"""Headers wait this long for the first payload; after them, a comment is sent when nothing came for this long."""
CLIENT_GONE = 499
# After the request's deadline, a client that does not read its answer is waited for no longer than this.
_FLUSH_DEADLINE_S = 30.0

Finished = Callable[[int, KvrelayError | None], None]
"""Told the status (CLIENT_GONE if the client left; an in-band error's own) and what went wrong."""

_log = logging.getLogger("kvrelay.router")


def error_response(
    why: KvrelayError,
    headers: Mapping[str, str] | None = None,
    shape: Callable[[int, ErrorBody], bytes] = openai_error,
) -> Response:
    """The answer to an error, its body made by `shape`."""
    every = {**(headers or {}), **why.headers}
    if why.retry_after_s is not None:
        every["retry-after"] = str(why.retry_after_s)
    return Response(shape(why.status, why.body()), why.status, every, "application/json")


def id_headers(job_id: str) -> dict[str, str]:
    """How an answer tells its request's id."""
    return {"x-request-id": job_id, "request-id": job_id}  # the second is Anthropic's name of it


class Relay(Response):
    """An answer that runs its own walk, in the client's dialect. `finished` is called once, however it ended."""

    def __init__(
        self,
        walk: Walk | JoinedWalk | VllmWalk,
        turn: Turn,
        deadline_s: float,
        finished: Finished,
        dialect: Dialect = AS_IS,
    ) -> None:
        super().__init__()
        self._dialect = dialect
        self._walk = walk
        self._turn = turn
        self._reply = walk.reply
        self._extra = id_headers(walk.job.id) | turn.headers
        self._deadline_s = deadline_s
        self._finished = finished
        self._left = False  # the client went away before the end
        self._complete = False  # the last byte was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; no task of it survives."""
        work = asyncio.create_task(self._work())
        gone = asyncio.create_task(_client_gone(receive))

        def leave(task: asyncio.Task[None]) -> None:
            if not (self._complete or task.cancelled()):
                self._left = True
                work.cancel()

        gone.add_done_callback(leave)
        try:
            async with asyncio.timeout(self._deadline_s + _FLUSH_DEADLINE_S):
                await (self._stream if self._walk.job.stream else self._whole)(scope, receive, send)
        except TimeoutError:
            _log.warning("id=%s: the client did not read its answer in time", self._walk.job.id)
            self._left = True
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait((work, gone))
            failure = self._reply.failure
            status = CLIENT_GONE if not self._complete else 200 if failure is None else failure.status
            self._finished(status, failure)

    async def _work(self) -> None:
        """The walk; whatever comes of it closes the reply."""
        failure: KvrelayError | None = None
        try:
            await self._turn.begun()
            await self._walk.run()
        except KvrelayError as why:
            failure = why
        except Exception:  # noqa: BLE001 - the edge of a request: it must end, with an honest answer
            _log.exception("id=%s: the walk broke on an error of the router itself", self._walk.job.id)
            failure = KvrelayError("the router broke on this request; its log says how")
        finally:
            self._reply.close(failure)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Server-sent events: headers with the first payload or after HOLD_S, an error event if it breaks later."""
        payload = await self._reply.take(HOLD_S)
        if self._reply.failure is not None and not payload:
            await self._error(self._reply.failure, scope, receive, send)
            return
        if self._left:
            return
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._extra,
        }
        await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
        while not self._left:
            # Read before sending: what was taken after the close is all that there is.
            last, failure = self._reply.closed, self._reply.failure
            if failure is not None:
                payload += error_event(failure)
            events = self._dialect.events(payload) if payload or last else self._dialect.keep_alive()
            await send({"type": "http.response.body", "body": events, "more_body": not last})
            if last:
                self._complete = not self._left
                return
            payload = await self._reply.take(HOLD_S)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One JSON body."""
        body = b""
        while not self._reply.closed:
            body += await self._reply.take(None)
        if self._left:
            return
        body += await self._reply.take(None)
        failure = self._reply.failure
        if failure is None:
            try:
                if not body:
                    raise NodeFailed("a node ended the request without an answer; send it again")
                body = self._dialect.whole(body)
            except NodeFailed as why:
                failure = self._reply.failure = why
        if failure is not None:
            await self._error(failure, scope, receive, send)
            return
        await Response(body, 200, self._extra, "application/json")(scope, receive, send)
        self._complete = True

    async def _error(self, why: KvrelayError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._left:
            await error_response(why, self._extra, self._dialect.error)(scope, receive, send)
            self._complete = True


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
