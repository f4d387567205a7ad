"""The node's life: start the engine process and the HTTP server, serve, drain, end. `run` is the
entry point.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType

import msgspec
import uvicorn
from fastapi import FastAPI

from kvrelay.node.app import Node, create_app
from kvrelay.node.drain import DRAIN_DEADLINE_S
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.heartbeat import Announcer
from kvrelay.node.kv_events import KvEvents
from kvrelay.node.loading import serving_of
from kvrelay.node.metrics import NodeMetrics
from kvrelay.node.process_log import log_as
from kvrelay.openai_api.connections import connection_class
from kvrelay.openai_api.json_body import return_large_blocks
from kvrelay.openai_api.tls import server_context
from kvrelay.openai_api.tracing import start_tracing
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import EngineDead, KvrelayError
from kvrelay.wire.heartbeat import Heartbeat, NodeState
from kvrelay.wire.sampling import PLAIN_SAMPLING

__all__ = ["run"]

log = logging.getLogger("kvrelay.node")

_CUT_S = 2
_MAX_CONNECTIONS = 1 << 14
"""Routers, operators and Prometheus need a few each; what comes beyond is answered with 503."""
_TICK_S = 0.02


def run(config: NodeConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends it at once. Raises
    ConfigError.

    Exit code 0 after an orderly end, 1 when the engine failed.
    """
    return_large_blocks()
    context = server_context(config)
    tracing = start_tracing(config.otlp_traces_endpoint, f"kvrelay-{config.role}")
    node = Node(config, EngineClient(config), created=int(time.time()), tracing=tracing)
    served = uvicorn.Config(
        create_app(node, lambda app: _lifespan(app, node, server)),
        host=config.host,
        port=config.port,
        loop="uvloop",
        http=connection_class(_MAX_CONNECTIONS),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        # Of what is under way when the node has drained, or could not in time.
        timeout_graceful_shutdown=_CUT_S,
    )
    served.load()
    served.ssl = context  # uvicorn's own would never read the files again
    server = _Server(node, served)
    server.run()
    return 1 if node.failure is not None else 0


@contextlib.asynccontextmanager
async def _lifespan(_: FastAPI, node: Node, server: _Server) -> AsyncIterator[None]:
    """The server listens while the model loads; /health tells the two apart."""
    await node.engine.start()
    announcer = Announcer(node.config.router, node.config.api_key, lambda: _facts(node))
    node.drain.changed = node.role.changed = lambda: _changed(node, announcer)
    tasks = [
        asyncio.create_task(_load(node, server.give_up, announcer.changed)),
        asyncio.create_task(server.drained()),
        asyncio.create_task(announcer.run()),
    ]
    try:
        yield
    finally:
        node.role.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if node.drain.begun:
            await node.drain.over(_CUT_S)  # a request that came just before may have left KV behind
        if node.kv_events is not None:
            node.engine.on_changes = None
            await node.kv_events.close()
        await node.sandbox.close()
        await node.engine.stop()
        if node.tracing is not None:
            await asyncio.to_thread(node.tracing.close)


class _Server(uvicorn.Server):
    """Told to end it drains first, and still listens: who asks for its health or gives KV back is
    answered.
    """

    def __init__(self, node: Node, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._drain, self._streams = node.drain, node.streams
        self._told: int | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first one begins to drain, within a tick of drained()."""
        if self._told is not None:
            super().handle_exit(sig, frame)
        self._told = sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leg streams never end by themselves."""
        self._streams.close()
        await super().shutdown(sockets)

    def give_up(self) -> None:
        """End without draining: there is no engine."""
        self.should_exit = True

    async def drained(self) -> None:
        """Wait for the signal, drain, and end."""
        while self._told is None:
            await asyncio.sleep(_TICK_S)
        self._drain.begin()
        if not await self._drain.over(DRAIN_DEADLINE_S):
            log.warning("not drained within %g s: what is left goes on elsewhere", DRAIN_DEADLINE_S)
        self.should_exit = (
            True  # not by uvicorn, which would then die of the signal: this is an orderly end
        )


def _facts(node: Node) -> Heartbeat | None:
    """What routers are told of it."""
    try:
        serving = node.ready()
    except EngineDead:
        return None
    state = NodeState.DRAINING if node.drain.begun or node.role.flips_to else NodeState.OK
    info = serving.info
    return Heartbeat(
        node.config.url, node.role.now, serving.model_name, info.generation, node.engine.load, 0.0, state,
        info.costs, info.max_gap_ms,
    )  # fmt: skip


def _changed(node: Node, announcer: Announcer) -> None:
    """It drains, or has another role, or not any more."""
    role = node.role.now
    if node.serving is not None and node.serving.role is not role:
        node.serving.flipped(role)
        if node.metrics is not None:
            node.metrics.flipped(role)
        log_as(str(role))
    announcer.changed()


async def _load(node: Node, give_up: Callable[[], None], changed: Callable[[], None]) -> None:
    """Make the node ready, then watch the engine. A node without one ends, so that its supervisor
    starts another.

    `changed`: it is ready now.
    """
    config = node.config
    try:
        serving = await serving_of(config, node.engine, node.sandbox)
        if config.told_events is not None:
            node.kv_events = KvEvents(config.told_events, serving.info.block_size)
            node.engine.on_changes = node.kv_events.tell
    except Exception as why:
        node.failure = (
            why.message if isinstance(why, KvrelayError) else f"{type(why).__name__}: {why}"
        )
        log.error(
            "the node cannot serve: %s", node.failure, exc_info=not isinstance(why, KvrelayError)
        )
        give_up()
        return
    name, info = serving.model_name, serving.info
    node.metrics = NodeMetrics(lambda: node.engine.stats, config, info, name, node.engine.pid)
    node.role.counted = node.metrics.flip_ended
    if node.kv_events is not None:
        node.kv_events.counted = node.metrics.replay_asked
    node.serving = serving
    changed()
    log.info(
        "%s node serves %s on http%s://%s:%d: "
        "%d blocks of %d tokens (%d tokens, %.0f MiB), context %d, loaded in %.1f s",
        config.role,
        name,
        "s" if config.ssl_certfile else "",
        config.host,
        config.port,
        info.num_blocks,
        info.block_size,
        info.num_blocks * info.block_size,
        info.num_blocks * info.block_size * info.kv_bytes_per_token / 2**20,
        info.max_model_len,
        info.load_s,
    )
    if serving.defaults != PLAIN_SAMPLING:
        log.info(
            "requests that leave it out are sampled as the model's generation config says (or "
            "not, with "
            "--generation-config vllm): %s",
            msgspec.json.encode(serving.defaults).decode(),
        )
    await node.engine.ended.wait()
    node.failure = node.engine.failure
    log.error("%s", node.failure)
    give_up()
