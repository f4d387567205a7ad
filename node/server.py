"""Server of a node: starts the engine process and the HTTP server, serves, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from types import FrameType

import msgspec
import uvicorn

from kvrelay.node.app import create_app
from kvrelay.node.child import RESTART_S
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import DRAIN_DEADLINE_S, Heartbeats, Node
from kvrelay.node.metrics import NodeMetrics
from kvrelay.node.serving import Serving, load_serving
from kvrelay.openai_api.connections import connection_class
from kvrelay.openai_api.json_body import return_large_blocks
from kvrelay.openai_api.tls import server_context
from kvrelay.openai_api.tracing import start_tracing
from kvrelay.wire.config import NodeConfig
from kvrelay.wire.errors import EngineDead, KvrelayError
from kvrelay.wire.heartbeat import Heartbeat, NodeState
from kvrelay.wire.kv_events import CacheChanges
from kvrelay.wire.sampling import PLAIN_SAMPLING

__all__ = ["run"]

log = logging.getLogger("kvrelay.node")

# For what is under way when the node has drained, or could not in time.
_SHUTDOWN_S = 2
_MAX_CONNECTIONS = 1 << 14
_SIGNAL_POLL_S = 0.02


def run(config: NodeConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once. Raises ConfigError.

    The exit code is 1 when the engine failed.
    """
    return_large_blocks()
    context = server_context(config)
    tracing = start_tracing(config.otlp_traces_endpoint, f"kvrelay-{config.role}")
    node = Node(config, EngineClient(config), created=int(time.time()), tracing=tracing)
    server_config = uvicorn.Config(
        create_app(node, lambda _: _lifespan(node, server)),
        host=config.host,
        port=config.port,
        loop="uvloop",
        http=connection_class(_MAX_CONNECTIONS),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server_config.load()
    server_config.ssl = context  # uvicorn's own options say less of what is wrong
    server = _Server(node, server_config)
    server.run()
    return 1 if node.failure is not None else 0


@contextlib.asynccontextmanager
async def _lifespan(node: Node, server: _Server) -> AsyncIterator[None]:
    # The server listens while the model loads; /health tells the two apart.
    await node.engine.start()
    heartbeats = Heartbeats(node.config.router, node.config.api_key, lambda: _heartbeat(node))
    node.on_change = heartbeats.send_now
    tasks = [
        asyncio.create_task(_load_and_watch(node, server)),
        asyncio.create_task(server.drain_on_signal()),
        asyncio.create_task(heartbeats.run()),
    ]
    try:
        yield
    finally:
        node.cancel_flip()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if node.draining:
            # A request that came just before may have left KV behind.
            await node.wait_idle(_SHUTDOWN_S)
        await node.sandbox.close()
        await node.engine.stop()
        await node.cache.stop()
        if node.tracing is not None:
            await asyncio.to_thread(node.tracing.close)


class _Server(uvicorn.Server):
    def __init__(self, node: Node, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._node = node
        self._signal: int | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            super().handle_exit(sig, frame)
        self._signal = sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._node.streams.close()  # they never end by themselves
        await super().shutdown(sockets)

    async def drain_on_signal(self) -> None:
        while self._signal is None:
            await asyncio.sleep(_SIGNAL_POLL_S)
        self._node.drain()
        if not await self._node.wait_idle(DRAIN_DEADLINE_S):
            log.warning("not drained within %g s: what is left goes on elsewhere", DRAIN_DEADLINE_S)
        # Not by uvicorn's handler, which would die of the signal: this is an orderly end.
        self.should_exit = True


def _heartbeat(node: Node) -> Heartbeat | None:
    try:
        serving = node.ready()
    except EngineDead:
        return None
    info, leaves = serving.info, node.draining or node.flips_to
    return Heartbeat(
        node.config.url,
        node.role,
        serving.model_name,
        info.generation,
        node.engine.load,
        0.0,
        NodeState.DRAINING if leaves else NodeState.OK,
    )


async def _load_and_watch(node: Node, server: _Server) -> None:
    try:
        serving = await load_serving(node.config, node.engine, node.sandbox)
        node.cache.attach(serving.info)
        node.metrics = NodeMetrics(
            node.stats,
            node.config.role,
            serving.info,
            serving.model_name,
            lambda: node.engine.pid(),
        )
        node.serving = serving
        _log_ready(node.config, serving)
        not_before = 0.0
        while True:
            node.on_change()
            await node.engine.ended.wait()
            # An engine that dies again soon ends its node, whose supervisor waits longer each time.
            if node.cache.source is None or node.draining or time.monotonic() < not_before:
                break
            await _start_again(node, serving)
            not_before = time.monotonic() + RESTART_S
        node.failure = node.engine.failure
        log.error("%s", node.failure)
    except Exception as why:
        ours = isinstance(why, KvrelayError)
        node.failure = str(why) if ours else f"{type(why).__name__}: {why}"
        log.error("the node cannot serve: %s", node.failure, exc_info=not ours)
    server.should_exit = True


async def _start_again(node: Node, serving: Serving) -> None:
    """Give the node another engine, which finds KV in the cache process. Raises EngineDead."""
    log.error("%s: another one starts", node.engine.failure)
    node.cancel_flip()
    ended, node.serving = node.engine, None
    node.use(EngineClient(node.config))
    await ended.stop()
    if node.kv_events is not None:
        node.kv_events.publish(CacheChanges([], [], cleared=True))
    await node.engine.start()
    serving.serve(await node.engine.ready(node.config.start_deadline_s))
    node.cache.attach(serving.info)
    node.serving = serving


def _log_ready(config: NodeConfig, serving: Serving) -> None:
    info = serving.info
    tokens = info.num_blocks * info.block_size
    log.info(
        "%s node serves %s on %s: "
        "%d blocks of %d tokens (%d tokens, %.0f MiB), context %d, loaded in %.1f s",
        config.role,
        serving.model_name,
        config.url_at(config.host),
        info.num_blocks,
        info.block_size,
        tokens,
        tokens * info.kv_bytes_per_token / 2**20,
        info.max_model_len,
        info.load_s,
    )
    if serving.defaults != PLAIN_SAMPLING:
        log.info(
            "sampling defaults of the model's generation config (--generation-config vllm ignores "
            "it): %s",
            msgspec.json.encode(serving.defaults).decode(),
        )
