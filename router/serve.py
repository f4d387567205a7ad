"""The router's routes, and how a request begins: it is checked, admitted and run."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable
from functools import partial

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.openai_api.body import is_valid_id
from kvrelay.openai_api.dialects.base import AS_IS, Translate
from kvrelay.openai_api.front import front_of
from kvrelay.openai_api.headers import headers_of, id_headers, slo_of_headers, trace_headers
from kvrelay.openai_api.json_body import (
    check_shape,
    json_response,
    off_loop,
    read_body,
    unless_disconnected,
)
from kvrelay.openai_api.model_types import model_list
from kvrelay.openai_api.routes import add_routes, body_excerpt
from kvrelay.openai_api.tracing import RequestSpan
from kvrelay.router.admin import ADAPTER_PATHS, add_admin_routes
from kvrelay.router.admission.keys import Caller
from kvrelay.router.console.routes import add_console_routes
from kvrelay.router.guard import OPERATED, answer_error, caller_of, check_key
from kvrelay.router.relay import CLIENT_GONE, Relay, Reply, arrived_body
from kvrelay.router.request.failures import CrashRecord, fingerprint_of
from kvrelay.router.request.job import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    SESSION_HEADER,
    Job,
    for_nodes,
    parse_body,
    parts_of,
)
from kvrelay.router.request.joined import prompt_tokens_of, run_together
from kvrelay.router.request.run import RequestRun
from kvrelay.router.router import Reread, Router
from kvrelay.router.state import Health, Shared
from kvrelay.router.timeline import Timeline
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.kv_events import Pin
from kvrelay.wire.router_config import RouterConfig

__all__ = ["RouterApp"]

_BODY_DEADLINE_S = 60.0
_ids = random.Random(secrets.randbits(256))  # unlike those of other routers, but no secrets

_log = logging.getLogger("kvrelay.router")


class RouterApp(FastAPI):
    """A router as an ASGI application, and for the routes of the OpenAI API."""

    def __init__(
        self, config: RouterConfig, shared: Shared | None = None, reread: Reread | None = None
    ) -> None:
        router = Router(config, random.Random(), shared, reread)
        super().__init__(
            title="kvrelay router", lifespan=lambda _: router.running(), openapi_url=None
        )
        self._router = self.state.router = router
        self._front = front_of(config) if router.shared.serves else None
        for kind in (KvrelayError, HTTPException, ClientDisconnect, Exception):
            self.add_exception_handler(kind, answer_error)
        forward = router.shared.forward
        if forward is None:
            add_admin_routes(self, router)
        else:
            self.add_route("/metrics", forward)
            for path in (*OPERATED, "/admin/{rest:path}", *ADAPTER_PATHS):
                self.add_route(path, forward, methods=["GET", "POST"])
        add_console_routes(self, router.snapshot, config.root_path)
        if router.shared.serves:
            self._add_client_routes(router)

    def _add_client_routes(self, router: Router) -> None:
        for path in (CHAT_PATH, COMPLETIONS_PATH):  # answers other methods with 405
            self.add_route(path, self.complete, methods=["POST"])
        add_routes(self, self, router.shared.responses, root_path=router.config.root_path)

        @self.get("/v1/models", response_model=None)
        async def models(request: Request) -> Response:
            caller = caller_of(request)
            cards = [card for card in router.models.cards() if caller.may(card.id)]
            return json_response(model_list(cards))

        @self.get("/v1/models/{name:path}", response_model=None)
        async def model(request: Request, name: str) -> Response:
            caller_of(request).check_model(name)
            router.models.named(name)
            return json_response(next(card for card in router.models.cards() if card.id == name))

        @self.get("/health", response_model=None)
        async def health() -> Response:
            return router.health()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._front is not None:
            entered = await self._front.enter(scope, receive, send)
            if entered is None:
                return
            send = entered
        answer = await self._early_answer(scope, receive) if scope["type"] == "http" else None
        await (super().__call__ if answer is None else answer)(scope, receive, send)

    async def _early_answer(self, scope: Scope, receive: Receive) -> Response | None:
        # Refuses requests without a key. Completions need nothing that FastAPI puts around a route.
        router, request = self._router, Request(scope, receive)
        try:
            check_key(scope, router.callers, router.metrics, router.config.admin_key)
            posted = scope["method"] == "POST" and router.shared.serves
            if posted and scope["path"] in (CHAT_PATH, COMPLETIONS_PATH):
                return await self.complete(request)
        except Exception as why:  # noqa: BLE001 - the edge of a request: it must end, with an honest answer
            return await answer_error(request, why)
        return None

    async def complete(self, request: Request, translate: Translate | None = None) -> Response:
        """Check and admit a completion request; return the answer that runs it.

        Raises KvrelayError.
        """
        router, path, arrived = self._router, request.scope["path"], time.monotonic()
        caller, header = caller_of(request), headers_of(request.scope).get
        request.state.job_id = _id(header("x-request-id", ""))
        span: RequestSpan | None = None
        job: Job | None = None
        try:
            body = await checked_body(request, router.config)
            fingerprint = partial(fingerprint_of, caller.sha256, body)
            crashes = CrashRecord(router.shared.poison, router.metrics, fingerprint)
            crashes.check()
            dialect = AS_IS
            if translate is not None:
                body, dialect = await translate(body, router.config.max_body_bytes)
            known = self._job(
                request, caller, parse_body(body, path if dialect is AS_IS else CHAT_PATH)
            )
            trace = trace_headers(header)
            if router.tracing is not None:
                span = router.tracing.begin(f"POST {path}", trace, arrived)
                trace = span.headers
            reply, headers = Reply(), {"x-request-id": known.node_id, **trace}
            runs = self._runs_of(known, headers, arrived, crashes, reply)
            job = known
            slot = await router.admission.admit(caller, job, runs[0].wanted(), arrived)
        except KvrelayError as why:
            router.log.refused(request.state.job_id, path, caller.name, why, span, job)
            raise
        except ClientDisconnect:
            router.metrics.refused(path, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        if router.config.log_bodies:
            _log.info("id=%s body=%s", job.id, body_excerpt(body))
        router.log.begin(job, runs, caller.name)

        async def answer() -> None:
            await slot.begun()
            runs[0].placed = slot.placed
            await (runs[0].run() if len(runs) == 1 else run_together(known, runs, reply))

        def finished(status: int, why: KvrelayError | None) -> None:
            sent = any(run.timeline.sent is not None for run in runs)
            prompt_tokens = prompt_tokens_of(runs) or (known.prompt_tokens if sent else 0)
            output_tokens = sum(run.output_tokens for run in runs)
            router.admission.release(slot, prompt_tokens, output_tokens)
            if status == 200 and why is None:
                crashes.answered()
            router.log.finished(known, path, status, why, trace, span)

        return Relay(
            answer, reply, id_headers(job.id) | slot.headers, finished, dialect, stream=job.stream
        )

    def _job(self, request: Request, caller: Caller, job: Job) -> Job:
        router, header = self._router, headers_of(request.scope).get
        own = header("x-request-id") or job.known.request_id or ""
        job_id = request.state.job_id = _id(own, request.state.job_id)
        slo = router.admission.slo(caller, *slo_of_headers(header), job.prompt_tokens)
        caller.check_model(job.model)
        model = router.models.named(job.model)
        job = msgspec.structs.replace(
            job,
            id=job_id,
            created=int(time.time()),
            targets=slo,
            pin=Pin(caller.name, caller.pin_share),
            mark=secrets.token_hex(4) if job_id == own else "",
            kind=router.pool.kind_for(model),
        )
        priority = caller.check_priority(job.known.priority)
        salted = caller.sha256 if router.config.isolate_keys else ""
        session = header(SESSION_HEADER, "")
        return for_nodes(job, model, priority, session, salted, _ids.getrandbits(53))

    def _runs_of(
        self, job: Job, headers: dict[str, str], arrived: float, crashes: CrashRecord, reply: Reply
    ) -> list[RequestRun]:
        context, parts = self._router.run_context, parts_of(job)
        joined = job.stream or len(parts) == 1
        return [
            RequestRun(
                part, headers, Timeline(arrived), context, crashes, reply if joined else Reply()
            )
            for part in parts
        ]

    async def tokenized(
        self, request: Request, path: str, translate: Callable[[bytes], bytes]
    ) -> bytes | None:
        """Return a node's answer to /tokenize or /detokenize; None if the client left.

        No node is blamed, which would block it for one large text. Raises KvrelayError.
        """
        router = self._router
        body = await checked_body(request, router.config)
        body = await off_loop(len(body), translate, body)
        async with router.admission.question(caller_of(request)):
            return await unless_disconnected(request, router.ask(path, body))

    def check_key(self, request: Request) -> None:
        """Do nothing: keys are checked before routes are chosen."""

    def owner(self, request: Request) -> str:
        return caller_of(request).sha256

    def served(self) -> list[str]:
        return self._router.models.names()

    def healthy(self) -> bool:
        return self._router.models.health()[0] is not Health.UNAVAILABLE

    def alive(self) -> bool:
        return True


def _id(wanted: str, instead: str = "") -> str:
    return wanted if is_valid_id(wanted) else instead or f"{_ids.getrandbits(128):032x}"


async def checked_body(request: Request, config: RouterConfig) -> bytes:
    deadline_s = min(_BODY_DEADLINE_S, config.request_deadline_s)
    # Mostly it has arrived, with the headers.
    body = await read_body(request, config.max_body_bytes, deadline_s, arrived_body(request.scope))
    await off_loop(len(body), check_shape, body)
    return body
