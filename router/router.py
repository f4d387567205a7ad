"""One router process: what it is made of, and how a request is checked and begins its walk.

Owns nothing that outlives the process's event loop except through `running`. The walk itself is in
walk/handoff.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvrelay.openai_api.body import is_valid_id
from kvrelay.openai_api.dialects.base import AS_IS, Translate
from kvrelay.openai_api.dialects.responses import Recall, translate_body
from kvrelay.openai_api.json_body import check_shape, off_loop, unless_disconnected
from kvrelay.openai_api.routes import body_excerpt
from kvrelay.openai_api.tracing import start_tracing
from kvrelay.router.admission.controller import AdmissionController
from kvrelay.router.admission.keys import Keyring
from kvrelay.router.background import BackgroundTasks, running_task
from kvrelay.router.client_connection import Reply, headers_of
from kvrelay.router.console.state import ConsoleState
from kvrelay.router.guard import caller_of, read_body
from kvrelay.router.membership.health_checks import check_nodes
from kvrelay.router.membership.heartbeats import hear_heartbeats
from kvrelay.router.membership.kubernetes_pods import follow_pods
from kvrelay.router.membership.vllm_pings import hearing_pings
from kvrelay.router.membership.warm_up import Outcome, WarmUp, WarmUps, warm_up_for_ever
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.health import NodeHealth
from kvrelay.router.nodes.members import Source, static_nodes
from kvrelay.router.nodes.models import Models
from kvrelay.router.nodes.node import NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.prefix.kv_events import KvEvents
from kvrelay.router.questions import ask_any
from kvrelay.router.relay import CLIENT_GONE, Relay, Run
from kvrelay.router.reload import Reread, changes
from kvrelay.router.request.job import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    SESSION_HEADER,
    Job,
    parse_job,
    parts_of,
    with_salt_of,
)
from kvrelay.router.request.multi_prompt import MultiPromptRun
from kvrelay.router.request.placer import Placer
from kvrelay.router.request.poison import MAX_LOST, CrashRecord, fingerprint_of
from kvrelay.router.request.retries import RunContext
from kvrelay.router.request.run import RequestRun
from kvrelay.router.request.timeline import Timeline
from kvrelay.router.request.vllm_run import VllmRun
from kvrelay.router.request_log import RequestLog, RequestTrace
from kvrelay.router.roles import RoleChanger
from kvrelay.router.shared import Shared
from kvrelay.router.state import health_of
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.wire.errors import KvrelayError, RequestError
from kvrelay.wire.router_config import RouterConfig

__all__ = ["Router", "targets_of"]

_SHUTDOWN_DEADLINE_S = 5.0
_BODY_DEADLINE_S = 60.0
_TTFT, _TPOT = "x-slo-ttft-ms", "x-slo-tpot-ms"  # as llm-d's gateway has them
_MAX_TARGET_MS = 1e9
_ids = random.Random(secrets.randbits(256))  # of requests: kv_mismatch others, but no secrets

_log = logging.getLogger("kvrelay.router")


class Router:
    """A router process: all that its routes share."""

    node_client: NodeClient
    """Between start and stop."""
    _means: RunContext | None = None

    def __init__(
        self,
        config: RouterConfig,
        rng: random.Random,
        shared: Shared | None = None,
        reread: Reread | None = None,
    ) -> None:
        self.config, self._reread = config, reread
        self.shared = shared or Shared()
        self.pool = Pool(config.prefill, config.decode)
        self.node_health = NodeHealth(self.pool, rng)
        self.placer = Placer(config, self.pool, self.node_health, rng)
        self.models = Models(self.pool, config.aliases, int(time.time()))
        self.keyring = Keyring(config.api_key, config.keys)
        self.warm_ups = WarmUps()
        self.metrics = Metrics(self.pool, [caller.name for caller in self.keyring.callers])
        self.metrics.waiting_for_room.read = lambda: self.placer.waiting
        self.tracing = start_tracing(config.otlp_traces_endpoint, "kvrelay-router")
        self.admission = AdmissionController(config, self.pool, self.placer, self.metrics.admission)
        self.background = BackgroundTasks()
        self.live: set[str] = set()
        """The ids of requests that are being answered."""
        self.ending = False
        """It was told to end, and serves what it has begun."""
        self.console = ConsoleState(
            self.pool, self.models, self.warm_ups, self.metrics, self.shared
        )
        self.log = RequestLog(self.metrics, self.console)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the nodes for the length of the block; afterwards finish what requests left to do."""
        config, leads = self.config, self.shared.leads
        self.node_client = legs = NodeClient(config, self.background)
        self._means = RunContext(
            self.pool, self.node_health, self.placer, legs, self.background, self.metrics, config
        )
        events = None
        if self.shared.serves:
            events = KvEvents(self.pool.prefixes, self.metrics.prefix, config.vllm_event_ports)
        roles = RoleChanger(lambda: self.config, self.pool, legs, self.metrics, lambda: self.ending)
        self.console.roles = roles if leads else None
        try:
            async with (
                check_nodes(self.pool, legs, events, config.health_interval_s),
                hear_heartbeats(self.pool, config.host, config.heartbeat_port, config.node_api_key),
                follow_pods(
                    self.pool,
                    config.kubernetes_selector,
                    config.kubernetes_namespace,
                    self.metrics.registry,
                ),
                running_task(warm_up_for_ever(self.pool, self.warm_ups, legs, self._warmed_up))
                if leads
                else nullcontext(),
                running_task(self.log.tokens.run()),
                hearing_pings(
                    self.pool,
                    config.host,
                    config.p2p_nccl_port,
                    lambda url: self.config.may_be_node(url),
                ),
                running_task(roles.look_for_ever()) if leads else nullcontext(),
            ):
                yield
        finally:
            await self.admission.close()
            if events is not None:
                await events.close()
            await self.background.finish(_SHUTDOWN_DEADLINE_S)
            await legs.close()
            if self.tracing is not None:
                await asyncio.to_thread(self.tracing.close)

    def take_over(self, config: RouterConfig) -> None:
        """Go by this configuration for requests that come from now on. Nodes are told to the pool
        by others.
        """
        self.config = config
        self.keyring.take_over(config.api_key, config.keys)
        self.models.aliases = config.aliases
        self.admission.take_over(config)
        self.placer.take_over(config)
        if self._means is not None:
            self._means = replace(self._means, config=config)

    def reload(self) -> list[str]:
        """Take over the configuration that is read now, and return the names of settings that are
        new.

        Raises RequestError, ConfigError; then everything is as before.
        """
        if self._reread is None:
            raise RequestError(
                "this router was started without --config, so there is nothing to be read again"
            )
        config = self._reread()
        changed = changes(self.config, config)
        if {"prefill", "decode"} & set(
            changed
        ):  # else a node that an operator has removed would come back
            self.pool.set_members(
                Source.STATIC, static_nodes(config.prefill, config.decode), time.monotonic()
            )
        self.take_over(config)
        return changed

    def _warmed_up(self, warm_up: WarmUp, outcome: Outcome) -> None:
        self.metrics.meetings.labels(outcome.how).inc()
        if outcome.how in ("met", "failed"):
            failed, now = outcome.how == "failed", time.monotonic()
            self.node_health.probed(warm_up.prefill, warm_up.decode, failed=failed, now=now)

    async def complete(
        self, request: Request, translate: Translate, recall: Recall | None = None
    ) -> Response:
        """Check a completion request at the door and start its walk. Raises KvrelayError."""
        path, timeline, caller = (
            request.scope["path"],
            Timeline(time.monotonic()),
            caller_of(request),
        )
        header = headers_of(request.scope).get
        request.state.job_id = self._new_id(header("x-request-id", ""))
        trace: RequestTrace | None = None
        walk: Run | None = None
        try:
            body = await self.body(request)
            fingerprint = partial(fingerprint_of, caller.sha256, body)
            deaths = CrashRecord(self.shared.poison, self.metrics, fingerprint)
            deaths.check()
            body, dialect = await translate_body(
                body, translate, recall, self.config.max_body_bytes
            )
            leg_path = path if dialect is AS_IS else CHAT_PATH if dialect.chat else COMPLETIONS_PATH
            request.state.job_id = self._new_id(
                request.state.job_id
            )  # it may be in use since the body was waited for
            session = header(SESSION_HEADER, "")
            targets = self.admission.slo(*targets_of(header))
            job = parse_job(
                body,
                leg_path,
                request.state.job_id,
                int(time.time()),
                _ids.getrandbits(53),
                session,
                targets,
            )
            if job.asked_id and header("x-request-id") is None:
                request.state.job_id = self._new_id(job.asked_id)
                job = msgspec.structs.replace(job, id=request.state.job_id)
            caller.check_model(job.model)
            job = job.having("model", self.models.named(job.model))
            job = job.having("priority", caller.check_priority(job.asked_priority))
            if self.config.isolate_keys:
                job = with_salt_of(job, caller.sha256)
            if job.id in (header("x-request-id"), job.asked_id):
                job = msgspec.structs.replace(job, mark=secrets.token_hex(4))
            trace = RequestTrace(self.tracing, path, header, timeline.arrived)
            walk = self._walk(job, {"x-request-id": job.node_id, **trace.headers}, timeline, deaths)
            slot = await self.admission.admit(caller, job, walk.wanted(), timeline.arrived)
        except KvrelayError as why:
            job_of = None if walk is None else walk.job
            self.log.refused(request.state.job_id, path, caller.name, why, trace, job_of)
            raise
        except ClientDisconnect:
            self.metrics.refused(path, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        if self.config.log_bodies:
            _log.info("id=%s body=%s", job.id, body_excerpt(body))
        self.live.add(job.id)
        self.log.tokens.add(walk, caller.name, self.metrics.model_of(job.model))

        def finished(status: int, why: KvrelayError | None) -> None:
            sent = walk.timeline.sent is not None
            self.admission.release(
                slot, walk.prompt_tokens or (job.prompt_tokens if sent else 0), walk.output_tokens
            )
            self.live.discard(job.id)
            if status == 200 and why is None:
                deaths.answered()
            self.log.finished(walk, caller.name, path, status, why, trace)

        return Relay(walk, slot, finished, dialect)

    def _walk(
        self, job: Job, headers: dict[str, str], timeline: Timeline, deaths: CrashRecord
    ) -> Run:
        """Return the walk of a request, over the nodes of one kind. Raises KvrelayError."""
        means = self._means
        assert means is not None
        kind = self.pool.kind_for(job.model)
        if kind is not NodeKind.KVRELAY:
            return VllmRun(job, kind, headers, timeline, means, deaths)

        def walk_of(part: Job, its: Timeline, reply: Reply | None = None) -> RequestRun:
            return RequestRun(part, headers, its, means, deaths, reply)

        parts = parts_of(job)
        if len(parts) == 1:
            return walk_of(job, timeline)
        return MultiPromptRun(job, parts, timeline.arrived, walk_of, deaths.first_token)

    async def tokenized(
        self, request: Request, path: str, translate: Callable[[bytes], bytes]
    ) -> bytes | None:
        """Return what a node's /tokenize or /detokenize says to a body; None if the client has
        gone.

        Raises KvrelayError.
        """
        body = await self.body(request)
        body = await off_loop(len(body), translate, body)
        async with self.admission.question(caller_of(request)):
            # What ends one node ends the next: no more of them than a request may have that is
            # answered by tokens.
            attempts = min(self.config.attempts, MAX_LOST)
            asked = ask_any(self.pool, self.models, self.node_client, path, body, attempts)
            return await unless_disconnected(request, asked)

    def check_key(self, request: Request) -> None:
        """Do nothing: it was checked before any route was chosen (router/guard.py)."""

    def owner(self, request: Request) -> str:
        """Return the hash of the caller's key."""
        return caller_of(request).sha256

    def health(self) -> tuple[int, bytes]:
        """Return 200 while requests for any model can be served, else 503; and the state of every
        model and node.
        """
        warm = self.warm_ups.pairs() if self.shared.leads else self.shared.warm_pairs
        ready, body = health_of(self.pool, self.models, warm, len(self.live), time.monotonic())
        workers = self.shared.workers()
        if workers is not None:
            body["workers"] = workers
        return (200 if ready else 503), msgspec.json.encode(body)

    def served(self) -> list[str]:
        """Return the names that requests may ask for."""
        return self.models.names()

    def healthy(self) -> bool:
        """Say whether a request for any model can be served now."""
        return any(self.models.ready().values()) or self.models.alone()

    def alive(self) -> bool:
        """Return true: what it cannot do without nodes, a new process could not either."""
        return True

    def _new_id(self, wanted: str) -> str:
        """Return the client's own id if it is sane and not in use, else a fresh one; nodes go by
        it.
        """
        return (
            wanted
            if is_valid_id(wanted) and wanted not in self.live
            else f"{_ids.getrandbits(128):032x}"
        )

    async def body(self, request: Request) -> bytes:
        """Read a request's body, and check its size and shape. Raises KvrelayError."""
        body = await read_body(
            request,
            self.config.max_body_bytes,
            min(_BODY_DEADLINE_S, self.config.request_deadline_s),
        )
        await off_loop(len(body), check_shape, body)
        return body


def targets_of(header: Callable[[str], str | None]) -> tuple[float | None, float | None]:
    """Return the targets in a request's headers: for its first token and for each further one, in
    seconds.

    Raises RequestError.
    """
    return _target_s(_TTFT, header(_TTFT)), _target_s(_TPOT, header(_TPOT))


def _target_s(name: str, value: str | None) -> float | None:
    """Return the seconds that a header gives in milliseconds. Raises RequestError."""
    if value is None:
        return None
    try:
        target = float(value) if len(value) <= 20 else math.nan
    except ValueError:
        target = math.nan
    if not 0 < target <= _MAX_TARGET_MS:  # also if it is no number
        raise RequestError(
            f"{name} must be a number of milliseconds above 0, got {value[:40]!r}", param=name
        )
    return target / 1e3
