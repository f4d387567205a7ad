"""One router process: its parts, their start and end, and the configuration that they share."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import msgspec
from starlette.responses import Response

from kvrelay.openai_api.json_body import json_response, read_json
from kvrelay.openai_api.model_types import TokenizeRequest
from kvrelay.openai_api.tracing import start_tracing
from kvrelay.router.admission.controller import AdmissionController
from kvrelay.router.admission.keys import callers_by_hash
from kvrelay.router.background import repeat, running_task
from kvrelay.router.membership.health_checks import check_nodes
from kvrelay.router.membership.heartbeats import hear_heartbeats
from kvrelay.router.membership.kubernetes_pods import follow_pods
from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.node import NEW, Source, static_nodes
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.request.failures import MAX_LOST, RunContext
from kvrelay.router.request.placer import Placer
from kvrelay.router.request_log import RequestLog
from kvrelay.router.roles import EVERY_S, RoleChanger
from kvrelay.router.state import (
    Health,
    Models,
    RoleStatus,
    Shared,
    Snapshot,
    WorkerStatus,
    node_statuses,
    snapshot_of,
)
from kvrelay.router.transport.node_client import NodeClient
from kvrelay.router.transport.node_stream import AttemptFailed
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ConfigError, KvrelayError, RequestError
from kvrelay.wire.router_config import LIVE, RouterConfig

__all__ = ["Reread", "Router", "changes", "reload_on_hangup"]

Reread = Callable[[], RouterConfig]
"""Reads the configuration as at the start: flags over file over defaults. Raises ConfigError."""

_asked = msgspec.json.Decoder(TokenizeRequest)

_log = logging.getLogger("kvrelay.router")


class Router:
    node_client: NodeClient
    """Set while `running`, as `run_context` is."""
    run_context: RunContext

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
        self.placer = Placer(config, self.pool, rng)
        self.models = Models(self.pool, config.aliases, int(time.time()))
        self.callers = callers_by_hash(config.api_key, config.keys)
        self.metrics = Metrics(self.pool, [caller.name for caller in self.callers.values()])
        self.metrics.waiting_for_room = lambda: self.placer.waiting
        self.tracing = start_tracing(config.otlp_traces_endpoint, "kvrelay-router")
        self.admission = AdmissionController(config, self.pool, self.placer, self.metrics)
        self.ending = False
        """The router is shutting down, and finishes the requests that it has."""
        self.log = RequestLog(self.metrics)
        self.flipping = asyncio.Lock()
        """Held while an operator's change of a role is checked and begun."""
        self.roles: RoleChanger | None = None
        """Set in the process that changes the roles of nodes, while `running`."""
        self._began = time.monotonic()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all that watches the nodes; afterwards finish what requests left to do."""
        config, pool = self.config, self.pool
        self.node_client = client = NodeClient(config)
        self.run_context = RunContext(pool, self.placer, client, self.metrics, config)
        roles = RoleChanger(self.run_context, lambda: self.ending, self.refused_work)
        self.roles = roles if self.shared.leads else None
        try:
            async with (
                check_nodes(pool, client, config.health_interval_s, follow=self.shared.serves),
                hear_heartbeats(pool, config.host, config.heartbeat_port, config.node_api_key),
                follow_pods(
                    pool,
                    config.kubernetes_selector,
                    config.kubernetes_namespace,
                    self.metrics.registry,
                ),
                running_task(repeat(EVERY_S, roles.look)) if self.shared.leads else nullcontext(),
            ):
                until = time.monotonic() + self.shared.first_checks_s
                while time.monotonic() < until and any(node.reason == NEW for node in pool.nodes):
                    await asyncio.sleep(0.01)
                yield
        finally:
            await self.admission.close()
            await client.close()
            if self.tracing is not None:
                await asyncio.to_thread(self.tracing.close)

    def take_over(self, config: RouterConfig) -> None:
        """Use a configuration for new requests; the pool's nodes stay."""
        self.config = self.admission.config = self.placer.config = config
        self.callers = callers_by_hash(config.api_key, config.keys)
        self.models.aliases = config.aliases
        if hasattr(self, "run_context"):
            self.run_context.config = config

    def reload(self) -> list[str]:
        """Reread the configuration; return the names of changed settings.

        Raises RequestError, ConfigError, and changes nothing then.
        """
        if self._reread is None:
            raise RequestError(
                "this router was started without --config, so there is nothing to be read again"
            )
        config = self._reread()
        changed = changes(self.config, config)
        if not {"prefill", "decode"}.isdisjoint(changed):
            # Only then: a node that an operator has removed must not come back.
            self.pool.set_members(
                Source.STATIC, static_nodes(config.prefill, config.decode), time.monotonic()
            )
        self.take_over(config)
        return changed

    async def ask(self, path: str, body: bytes) -> bytes:
        """Ask any node of a model a short question. Raises KvrelayError."""
        model = read_json(body, _asked).model or ""
        if model:
            model = self.models.named(model)
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            body = msgspec.json.encode(fields | {"model": model})
        elif len(served := list(self.models.health()[1])) > 1:
            raise RequestError(
                f"model is missing; served: {', '.join(map(repr, served))}", param="model"
            )
        # Prefill nodes tokenize anyway.
        nodes = [
            node for role in (Role.PREFILL, Role.DECODE) for node in self.pool.up(role, model=model)
        ]
        if not nodes:
            raise self.pool.no_node(Role.PREFILL, model)
        # A text that ends one node may end the next, as a completion may.
        *others, last = nodes[: min(self.config.attempts, MAX_LOST)]
        for node in others:
            try:
                return await self.node_client.ask(node, path, body)
            except AttemptFailed as why:
                _log.warning("a question was not answered: %s", why.detail)
        return await self.node_client.ask(last, path, body)

    def status(self) -> WorkerStatus:
        """Return what this process sees."""
        roles = {} if self.roles is None else self.roles.models
        running = sum(self.metrics.running().values())  # counts output tokens, too
        return WorkerStatus(
            node_statuses(self.pool, time.monotonic()),
            list(self.log.ended),
            {
                **self.metrics.counts,
                "running": running,
                "waiting": sum(self.admission.waiting().values()),
                "waiting_for_room": sum(self.placer.waiting.values()),
            },
            [RoleStatus(name, each.why, dict(each.use)) for name, each in sorted(roles.items())],
            self.placer.refused_work(time.monotonic()),
        )

    def refused_work(self, model: str) -> tuple[float, float]:
        """Return a model's Placer.refused_work in all processes together."""
        own = self.placer.refused_work(time.monotonic())
        processes = own, *(each.refused for each in self.shared.other_workers())
        prompts_ms, tokens = zip(*(each.get(model, (0.0, 0.0)) for each in processes), strict=True)
        return sum(prompts_ms), sum(tokens)

    def snapshot(self) -> Snapshot:
        """Return what the console shows."""
        own, workers = self.status(), self.shared.workers()
        health, models = self.models.health()
        return snapshot_of(
            own,
            self.shared.other_workers() or [own],
            now=time.time(),
            uptime_s=time.monotonic() - self._began,
            health=health,
            models=models,
            wanted=1 if workers is None else workers["wanted"],
        )

    def health(self) -> Response:
        """Answer GET /health, with 503 if no model can be served."""
        status, by_model = self.models.health()
        body: dict[str, Any] = {"status": status, "models": by_model}
        for role in (Role.PREFILL, Role.DECODE):
            listed = sum(node.role == role for node in self.pool.nodes)
            body[role.value] = {"up": len(self.pool.up(role)), "listed": listed}
        body["requests"] = len(self.log.running)
        body["nodes"] = node_statuses(self.pool, time.monotonic())
        if (workers := self.shared.workers()) is not None:
            body["workers"] = workers
        return json_response(body, 503 if status is Health.UNAVAILABLE else 200)


def changes(old: RouterConfig, new: RouterConfig) -> list[str]:
    """Return the names of settings that differ. Raises ConfigError if some are fixed.

    Also if no API key is left: half a file must not open the router to everybody.
    """
    differ = [
        field.name
        for field in dataclasses.fields(old)
        if getattr(old, field.name) != getattr(new, field.name)
    ]
    fixed = [name for name in differ if name not in LIVE]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)} cannot change while the router runs, so nothing was changed; "
            "restart it for that"
        )
    if (old.api_key or old.keys) and not (new.api_key or new.keys):
        raise ConfigError(
            "the new configuration has no API keys, and without any the router would answer "
            "everybody, so nothing was "
            "changed and the old keys stay; restart it to serve without keys"
        )
    return differ


def reload_on_hangup(reload: Callable[[], list[str]]) -> None:
    """Reload on SIGHUP, and log the result. Call it on the event loop."""

    def hung_up() -> None:
        try:
            changed = ", ".join(reload()) or "nothing"
        except KvrelayError as why:
            _log.error("the configuration is not reloaded: %s", why.message)
        else:
            _log.info("the configuration is reloaded, new: %s", changed)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)
