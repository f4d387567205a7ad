"""How a request begins: its body is checked, admitted, and run by the answer (Relay)."""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from functools import partial

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvrelay.openai_api.body import is_valid_id
from kvrelay.openai_api.dialects.base import AS_IS, Dialect, Translate
from kvrelay.openai_api.dialects.responses import Recall, translate_body
from kvrelay.openai_api.json_body import check_shape, off_loop, unless_disconnected
from kvrelay.openai_api.routes import body_excerpt
from kvrelay.router.admission.keys import Caller
from kvrelay.router.client_connection import Reply, headers_of
from kvrelay.router.guard import caller_of, read_body
from kvrelay.router.nodes.node import NodeKind
from kvrelay.router.relay import CLIENT_GONE, Relay
from kvrelay.router.request.job import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    SESSION_HEADER,
    Job,
    ParsedBody,
    job_of,
    parse_body,
    parts_of,
)
from kvrelay.router.request.multi_prompt import MultiPromptRun
from kvrelay.router.request.poison import CrashRecord, fingerprint_of
from kvrelay.router.request.run import RequestRun, Run
from kvrelay.router.request.timeline import Timeline
from kvrelay.router.request.vllm_run import VllmRun
from kvrelay.router.request_log import RequestTrace
from kvrelay.router.router import Router
from kvrelay.wire.errors import KvrelayError, RequestError
from kvrelay.wire.router_config import RouterConfig

__all__ = ["Frontend", "checked_body", "slo_of_headers"]

_BODY_DEADLINE_S = 60.0
_TTFT, _TPOT = "x-slo-ttft-ms", "x-slo-tpot-ms"  # as llm-d's gateway has them
_MAX_TARGET_MS = 1e9
_ids = random.Random(secrets.randbits(256))  # unlike those of other routers, but no secrets

_log = logging.getLogger("kvrelay.router")


class Frontend:
    """A router as the routes of the OpenAI API see it."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def complete(
        self, request: Request, translate: Translate, recall: Recall | None = None
    ) -> Response:
        """Check and admit a completion request; return the answer that runs it.

        Raises KvrelayError.
        """
        router = self._router
        path, timeline = request.scope["path"], Timeline(time.monotonic())
        caller, header = caller_of(request), headers_of(request.scope).get
        request.state.job_id = self._new_id(header("x-request-id", ""))
        trace: RequestTrace | None = None
        run: Run | None = None
        try:
            body = await checked_body(request, router.config)
            fingerprint = partial(fingerprint_of, caller.sha256, body)
            crashes = CrashRecord(router.shared.poison, router.metrics, fingerprint)
            crashes.check()
            limit_bytes = router.config.max_body_bytes
            body, dialect = await translate_body(body, translate, recall, limit_bytes)
            parsed = parse_body(body, _path_on_nodes(path, dialect))
            job = self._job(request, caller, parsed)
            trace = RequestTrace(router.tracing, path, header, timeline.arrived)
            headers = {"x-request-id": job.node_id, **trace.headers}
            run = self._run_of(job, headers, timeline, crashes)
            slot = await router.admission.admit(caller, job, run.wanted(), timeline.arrived)
        except KvrelayError as why:
            known = None if run is None else run.job
            router.log.refused(request.state.job_id, path, caller.name, why, trace, known)
            raise
        except ClientDisconnect:
            router.metrics.refused(path, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        if router.config.log_bodies:
            _log.info("id=%s body=%s", job.id, body_excerpt(body))
        router.live.add(job.id)
        router.log.tokens.add(run, caller.name, router.metrics.model_of(job.model))

        def finished(status: int, why: KvrelayError | None) -> None:
            sent = run.timeline.sent is not None
            prompt_tokens = run.prompt_tokens or (job.prompt_tokens if sent else 0)
            router.admission.release(slot, prompt_tokens, run.output_tokens)
            router.live.discard(job.id)
            if status == 200 and why is None:
                crashes.answered()
            router.log.finished(run, caller.name, path, status, why, trace)

        return Relay(run, slot, finished, dialect)

    def _job(self, request: Request, caller: Caller, parsed: ParsedBody) -> Job:
        router, header = self._router, headers_of(request.scope).get
        own_ids = header("x-request-id"), parsed.request_id
        wanted = parsed.request_id if own_ids[0] is None and own_ids[1] else request.state.job_id
        # Another request may have taken the id while the body was awaited.
        job_id = request.state.job_id = self._new_id(wanted)
        slo = router.admission.slo(*slo_of_headers(header))
        caller.check_model(parsed.model)
        return job_of(
            parsed,
            job_id,
            int(time.time()),
            _ids.getrandbits(53),
            session=header(SESSION_HEADER, ""),
            targets=slo,
            model=router.models.named(parsed.model),
            priority=caller.check_priority(parsed.priority),
            key_hash=caller.sha256 if router.config.isolate_keys else "",
            mark=secrets.token_hex(4) if job_id in own_ids else "",
        )

    def _run_of(
        self, job: Job, headers: dict[str, str], timeline: Timeline, crashes: CrashRecord
    ) -> Run:
        context = self._router.run_context
        kind = self._router.pool.kind_for(job.model)
        if kind is not NodeKind.KVRELAY:
            return VllmRun(job, kind, headers, timeline, context, crashes)

        def run_of(part: Job, its: Timeline, reply: Reply | None = None) -> RequestRun:
            return RequestRun(part, headers, its, context, crashes, reply)

        parts = parts_of(job)
        if len(parts) == 1:
            return run_of(job, timeline)
        return MultiPromptRun(job, parts, timeline.arrived, run_of)

    def _new_id(self, wanted: str) -> str:
        free = is_valid_id(wanted) and wanted not in self._router.live
        return wanted if free else f"{_ids.getrandbits(128):032x}"

    async def tokenized(
        self, request: Request, path: str, translate: Callable[[bytes], bytes]
    ) -> bytes | None:
        """Return a node's answer to /tokenize or /detokenize; None if the client has gone.

        No node is blamed, which would keep it from all other requests for the sake of one large
        text. Raises KvrelayError.
        """
        router = self._router
        body = await checked_body(request, router.config)
        body = await off_loop(len(body), translate, body)
        async with router.admission.question(caller_of(request)):
            return await unless_disconnected(request, router.ask(path, body))

    def check_key(self, request: Request) -> None:
        """Do nothing: keys are checked before routes are chosen (router/guard.py)."""

    def owner(self, request: Request) -> str:
        return caller_of(request).sha256

    def served(self) -> list[str]:
        return self._router.models.names()

    def healthy(self) -> bool:
        models = self._router.models
        return any(models.ready().values()) or models.alone()

    def alive(self) -> bool:
        return True


def _path_on_nodes(path: str, dialect: Dialect) -> str:
    return path if dialect is AS_IS else CHAT_PATH if dialect.chat else COMPLETIONS_PATH


async def checked_body(request: Request, config: RouterConfig) -> bytes:
    """Return a request's body, its size and shape checked. Raises KvrelayError."""
    deadline_s = min(_BODY_DEADLINE_S, config.request_deadline_s)
    body = await read_body(request, config.max_body_bytes, deadline_s)
    await off_loop(len(body), check_shape, body)
    return body


def slo_of_headers(header: Callable[[str], str | None]) -> tuple[float | None, float | None]:
    """Return the targets in headers, in seconds: to the first token, and per further token.

    Raises RequestError.
    """
    return _target_s(_TTFT, header(_TTFT)), _target_s(_TPOT, header(_TPOT))


def _target_s(name: str, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        target = float(value) if len(value) <= 20 else math.nan
    except ValueError:
        target = math.nan
    if not 0 < target <= _MAX_TARGET_MS:  # also NaN
        raise RequestError(
            f"{name} must be a number of milliseconds above 0, got {value[:40]!r}", param=name
        )
    return target / 1e3
